"""Why a value differs from the paper's: found in results of experiments, never written by hand for a value.

An experiment runs what the paper's code, or its authors, may have done instead. It explains a value if it gives the
paper's, or one within two standard errors over seeds, and if, over all values of that method that it has, it is near
the paper's at least as often as the plain run: else it would be only one more draw. Without one, a value within two
standard errors of the plain run is explained by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from polyeps_reproductions.comparison import MEBIBYTES
from polyeps_reproductions.headlines import Results, number, numbers
from polyeps_reproductions.reference_models import SOFTMAX_TWICE
from polyeps_reproductions.studies import Record

UNEXPLAINED = "unexplained"
REPEATS = 5  # of the paper's runs
ENOUGH = 3  # seeds whose deviation says something
ERRORS = 2.0  # standard errors within which two means count as the same
# Parts of PFA's study, by what they change.
PFA = {
    "figure-3-softmax-once": "softmax once, as in the paper's text,",
    "figure-3-softmax-fashion": "softmax twice, as in the paper's code,",
    "figure-3-one-rate": "PFA's learning rate for all methods",
    "figure-3-one-rate-cnn": "PFA's learning rate for all methods",
    "figure-3-small-rate-cnn": "the smallest learning rate of the paper's grid",
    "figure-3-sharp-cnn": "ε = 0.1 or 1 exactly, as in the paper's code,",
    "figure-3-not-granted": "softmax once, and rounds without a high-ε client, which the code spares PFA alone,",
    "figure-3-not-granted-cnn": "rounds without a high-ε client, which the code spares PFA alone,",
    "figure-6-lanczos": "256 Lanczos steps, as in the paper's code,",
    "figure-6-code": "256 Lanczos steps, equal weights and softmax twice, as in the paper's code,",
    "figure-6-random-equal": "equal weights and softmax twice, as in the paper's code,",
}
Key = tuple[Any, ...]  # of a value; its last part says which values an experiment must not spoil: those of a method
Pair = tuple[float, float]  # the paper's value and ours
Near = Callable[[float, float], bool]


class Experiment(NamedTuple):
    """Values that an experiment gives, in the unit of the value that it explains."""

    says: str
    where: str
    values: Mapping[Key, float]
    spreads: Mapping[Key, tuple[float, int]] = MappingProxyType({})  # standard deviation and number of seeds

    def explains(self, key: Key, plain: Mapping[Key, Pair], near: Near) -> tuple[float, str]:
        """Return how it explains a value of the plain run, and the share of values it gives; or nothing."""
        if key not in self.values:
            return 0.0, ""
        paper, ours = plain[key][0], self.values[key]
        chance = "" if near(paper, ours) else by_chance(paper, ours, *self.spreads.get(key, (0.0, 1)))
        if not near(paper, ours) and not chance:
            return 0.0, ""
        alike = [other for other in self.values if other in plain and other[-1] == key[-1]]
        before = sum(near(*plain[other]) for other in alike)
        after = sum(near(plain[other][0], self.values[other]) for other in alike)
        if after < before:
            return 0.0, ""
        count = f"{self.where}: near in {after} of {len(alike)}, not {before}"
        return after / len(alike), f"{self.says} gives {ours:.1f} ({count}{'; ' * bool(chance)}{chance})"


def explained(key: Key, plain: Mapping[Key, Pair], some: Iterable[Experiment], near: Near) -> str:
    """Return how the experiment explains a value that gives most of the values around it; empty if none does."""
    found = [one for one in (experiment.explains(key, plain, near) for experiment in some) if one[1]]
    return max(found, key=lambda one: one[0])[1] if found else ""


def by_chance(paper: float, mean: float, deviation: float, count: int) -> str:
    """Return that our mean is within two standard errors of the paper's, whose spread is taken for ours."""
    if count < ENOUGH or not deviation:
        return ""
    errors = abs(mean - paper) / (deviation * math.sqrt(1 / count + 1 / REPEATS))
    return f"chance: {errors:.1f} standard errors over {count} seeds" if errors <= ERRORS else ""


def of_pfa(one: Mapping[str, Any]) -> Key:
    """Return what identifies a value of PFA's figures, in the plain run and in experiments."""
    model = "logistic" if one["model"] == SOFTMAX_TWICE else one["model"]
    return one["data"], model, one["partition"], one["budgets"], one["clients"], one["method"]


def experiments_of_pfa(results: Results) -> Iterator[Experiment]:
    for part, says in PFA.items():
        records = results.records("pfa", part, form="published")
        values = {of_pfa(one): 100 * one["mean"] for one in records}
        spreads = {of_pfa(one): (100 * one["deviation"], one["count"]) for one in records}
        yield Experiment(says, part.replace("-", " ", 1), values, spreads)


def uplink(one: Record, results: Results) -> str:
    """Return that an uplink is the paper's if its rounds are, as far as the chance of cohorts allows."""
    for row in results.rows("pfa", "figure-7-draws", model=one["model"], method=one["method"]):
        least, _, most = (number(value) for value in list(row.values())[3:])
        if least - MEBIBYTES <= one["paper"] <= most:
            return f"with the paper's 95 rounds {least:.1f} to {most:.1f} MiB, by chance of cohorts (figure 7-draws)"
    return ""


def experiments_of_fedsel(results: Results) -> Iterator[Experiment]:
    """Other α for all methods than the one that is best for NP; values of the same data and model belong together."""
    found: dict[float, dict[Key, float]] = {}
    for row in results.rows("fedsel", "table-3-rates"):
        for word in ("gain", "loss"):
            key = word, row["selection"], (row["data"], row["model"])
            found.setdefault(row["α"], {})[key] = numbers(row[word])[0]
    for rate, values in found.items():
        yield Experiment(f"α = {rate:g} for all methods", "table 3-rates", values)


def experiments_of_fedhdp(results: Results) -> Iterator[Experiment]:
    """Writers with the noise of the paper's 3383 clients; and r = 1 at DP-FedAvg's learning rate."""
    says = {"noise": "the noise of the paper's 3383 clients", "rate": "DP-FedAvg's learning rate"}
    columns = ("Acc_g", "Acc_g,p", "Acc_g,np", "Acc_l,p", "Acc_l,np")
    for name, what in says.items():
        values: dict[Key, float] = {}
        spreads: dict[Key, tuple[float, int]] = {}
        summary = results.summary("fedhdp", f"table-2-{name}") or {"seeds": 0}
        for row in results.rows("fedhdp", f"table-2-{name}"):
            for column in columns:
                if found := numbers(row[column]):
                    key = ("2", row["clients"], row["r"], column, row["method"])
                    values[key] = found[0]
                    spreads[key] = (found[1] if "±" in row[column] else 0.0, summary["seeds"])
        yield Experiment(what, f"table 2-{name}", values, spreads)
