"""Runs one cell of every paper again and compares it with the stored result: `python -m polyeps_reproductions.rerun`.

A value agrees if it is within the spread over seeds that is stored, or within half a point where that is smaller. Names
of studies as arguments run these alone. CMP-Fed's trainings take hours without an accelerator; its accounts stand in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from polyeps.errors import InputError
from polyeps_reproductions.headlines import Results, number, numbers
from polyeps_reproductions.other_tables import RESULTS
from polyeps_reproductions.studies import Cell, find, same_labels
from polyeps_reproductions.trials import changed, perform

LEAST = 0.005  # a spread counts as half a point at least: machines round differently
SEED = 1
CELLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "pfa": (
        "figure-11",
        {"cell": "mnist logistic shards mixgauss1 M=20", "method": "public-only", "form": "sound"},
    ),
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
    stored, spread = _stored(results, study, part, cell)
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


def _stored(results: Results, study: str, part: str, cell: Cell) -> tuple[float, float]:
    """Return the stored value of the seed and the spread; the mean, or the table's, where no seeds were kept."""
    summary = results.summary(study, part)
    for one in (summary and summary["records"]) or ():
        if same_labels(one, cell.labels):
            return (one["finals"] or {}).get(str(SEED), one["mean"]), one["deviation"]
    row = next(row for row in results.rows(study, part) if wanted_row(row, cell.labels))
    mean, *error = numbers(row["Acc_g"])
    return mean / 100, (error or [0.0])[0] / 100


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
