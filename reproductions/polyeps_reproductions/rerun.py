"""Runs one cell of every paper again and compares it with the stored result: `python -m polyeps_reproductions.rerun`.

A value agrees if it lies where 95 of 100 further seeds do, by the stored mean, deviation and number of seeds
(Student's t), or within half a point where that is smaller. Names of studies as arguments run these alone. CMP-Fed's
trainings take hours without an accelerator; its accounts stand in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

from scipy import stats

from polyeps.errors import InputError
from polyeps_reproductions.headlines import Results, number, numbers
from polyeps_reproductions.other_tables import RESULTS
from polyeps_reproductions.studies import Cell, find, same_labels
from polyeps_reproductions.trials import changed, perform

LEAST = 0.005  # a spread counts as half a point at least: machines round differently
SEED = 1
CELLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "pfa": ("figure-3", {"cell": "mnist logistic iid mixgauss1 M=20", "method": "pfa", "form": "sound"}),
    "fedsel": ("figure-2a", {"method": "np-ps"}),
    "pdp-fl": ("figure-4", {"clients": 10, "method": "fedavg", "form": "sound"}),
    "fedhdp": ("table-1", {"clients": "one digit", "method": "dp-fedavg"}),
}
ACCOUNTS = "table-accounts"


class Agreement(NamedTuple):
    study: str
    what: str
    stored: float
    spread: float
    again: float

    @property
    def agrees(self) -> bool:
        return abs(self.again - self.stored) <= max(self.spread, LEAST)


def again(study: str, results: Results = RESULTS) -> Agreement:
    """Run one cell again, beside what is stored."""
    if study == "cmp-fed":
        return accounts(results)
    if study not in CELLS:
        raise InputError(f"no cell of {study!r} is named here; choose one of {', '.join([*CELLS, 'cmp-fed'])}")
    part, wanted = CELLS[study]
    cell = _cell(study, part, wanted)
    stored, spread = stored_range(results, study, part, cell)
    trial = cell.trial
    if trial.choice is not None:
        if trial.recorded is None:
            raise InputError(f"{study}: the settings of {part} are not recorded; run the study first")
        trial = replace(trial, settings=changed(trial.settings, trial.recorded), choice=None)
    found = perform(replace(trial, seed=SEED))
    return Agreement(study, f"{part}, {', '.join(map(str, wanted.values()))}", stored, spread, found[cell.value])


def _cell(study: str, part: str, wanted: Mapping[str, Any]) -> Cell:
    (one,) = (one for one in find(study).choose() if one.name == part)
    return next(cell for cell in one.cells(False) if wanted.items() <= cell.labels.items())


def stored_range(results: Results, study: str, part: str, cell: Cell) -> tuple[float, float]:
    """Return the stored mean, and how far from it 95 of 100 further seeds lie at most."""
    summary = results.summary(study, part)
    for one in (summary and summary["records"]) or ():
        if same_labels(one, cell.labels):
            return one["mean"], further_seeds(one["deviation"], one["count"])
    row = next(row for row in results.rows(study, part) if wanted_row(row, cell.labels))
    mean, *deviation = numbers(row["Acc_g"])
    return mean / 100, further_seeds((deviation or [0.0])[0] / 100, summary["seeds"] if summary else 1)


def further_seeds(deviation: float, count: int) -> float:
    """Return how far from the mean of `count` seeds 95 of 100 further ones lie at most; 0 for a single seed.

    >>> further_seeds(0.01, 1), round(further_seeds(0.01, 3), 4), round(further_seeds(0.01, 1000), 4)
    (0.0, 0.0497, 0.0196)
    """
    return float(stats.t.ppf(0.975, count - 1)) * deviation * sqrt(1 + 1 / count) if count > 1 else 0.0


def wanted_row(row: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    return (row["clients"], row["method"]) == (labels["clients"], labels["method"])


def accounts(results: Results) -> Agreement:
    """Compute CMP-Fed's noise again; the value is the largest σ that differs."""
    (part,) = (one for one in find("cmp-fed").choose() if one.name == ACCOUNTS)
    content = part.show([], False)
    place = content.columns.index("σ")
    kept = [number(row["σ"]) for row in results.rows("cmp-fed", ACCOUNTS)]
    pairs = [(number(row[place]), old) for row, old in zip(content.rows, kept, strict=True)]
    new, old = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return Agreement("cmp-fed", f"{ACCOUNTS}, σ", old, 0.0, new)


def main(studies: Sequence[str]) -> int:
    failed = 0
    for study in studies or [*CELLS, "cmp-fed"]:
        one = again(study)
        said = "agrees" if one.agrees else "DIFFERS"
        print(
            f"{study}: {one.what}: stored {one.stored:.4f} ± {one.spread:.4f}, again {one.again:.4f}: {said}",
            flush=True,
        )
        failed += not one.agrees
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
