"""Which method is the best? Those that cannot be ruled out: a 95 % confidence set, from paired t-tests over seeds.

A method is ruled out if another one is better by a one-sided test, its chance multiplied by the number of other
methods. The truly best one is then ruled out in at most 5 % of all cases. Hsu, "Simultaneous confidence intervals for
all distances from the 'best'", Annals of Statistics 1981, with Bonferroni's bound in the place of Dunnett's quantile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from polyeps.report.formatting import SHARES, percent, plural
from polyeps.report.joining import TOLD_APART_AT
from polyeps.report.tables import MethodRuns, final_value, mean_of

LEAST_SEEDS = 3  # shared by two methods, to compare them
_NAMED = 4  # methods that a sentence names one by one


@dataclass(frozen=True)
class MethodPair:
    """Two methods on the seeds that both have finished; `better` reached more on these."""

    better: str
    other: str
    seeds: int
    difference: float
    deviation: float  # of the difference, over seeds
    chance: float  # of so much more where the other is as good, times the number of other methods; 1: too few seeds

    @property
    def told(self) -> bool:
        """Whether the other method is ruled out as the best."""
        return self.chance < 1 - TOLD_APART_AT


@dataclass(frozen=True)
class Ranking:
    """Methods under the clients' own budgets, the highest mean first."""

    labels: tuple[str, ...]
    leading: tuple[str, ...]  # those that may be the best
    pairs: tuple[MethodPair, ...]
    seeds: int  # the least of any pair


def ranking(methods: Sequence[MethodRuns]) -> Ranking | None:
    """Compare the methods under the clients' own budgets; None where there is nothing to compare."""
    finals = {one.label: _finals(one) for one in methods if not one.control}
    means = {label: mean_of(list(values.values())) or 0.0 for label, values in finals.items() if values}
    labels = sorted(means, key=lambda label: -means[label])
    if len(labels) < 2:
        return None
    pairs = tuple(_pair(*two, finals, len(labels) - 1) for two in combinations(labels, 2))
    beaten = {pair.other for pair in pairs if pair.told}
    leading = tuple(label for label in labels if label not in beaten)
    return Ranking(tuple(labels), leading, pairs, min(pair.seeds for pair in pairs))


def _finals(method: MethodRuns) -> dict[int, float]:
    found = {job.seed: final_value(job, job.accuracy) for job in method.counted if job.accuracy}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def _pair(first: str, second: str, finals: Mapping[str, Mapping[int, float]], others: int) -> MethodPair:
    shared = finals[first].keys() & finals[second].keys()
    apart = [finals[first][seed] - finals[second][seed] for seed in sorted(shared)]
    middle = mean_of(apart) or 0.0
    better, other = (first, second) if middle >= 0 else (second, first)
    if len(apart) < LEAST_SEEDS:
        return MethodPair(better, other, len(apart), abs(middle), math.nan, 1.0)
    spread, chance = one_sided(apart)
    return MethodPair(better, other, len(apart), abs(middle), spread, min(1.0, others * chance))


def one_sided(apart: Sequence[float]) -> tuple[float, float]:
    """Return the deviation of paired differences, and the chance of a mean as far from 0 on its side."""
    from scipy.stats import t

    many, middle = len(apart), math.fsum(apart) / len(apart)
    spread = math.sqrt(math.fsum((one - middle) ** 2 for one in apart) / (many - 1))
    if spread <= 1e-12 * abs(middle):  # the same under every seed
        return spread, 0.0 if middle else 1.0
    return spread, float(t.sf(abs(middle) / spread * math.sqrt(many), many - 1))


def verdict(found: Ranking | None) -> str:
    """Say which methods lead, in a sentence; a best one is named only where all others are ruled out."""
    if found is None:
        return ""
    many = len(found.labels)
    if found.seeds < LEAST_SEEDS:
        shared = "have no seed in common" if not found.seeds else f"share {plural(found.seeds, 'seed')}"
        return f"The {many} methods under own budgets {shared}, too few to tell them apart; run {LEAST_SEEDS} or more."
    how = f"paired t-tests over {found.seeds} seeds, {percent(TOLD_APART_AT, digits=0)}"
    if len(found.leading) == many:
        which = "The two methods" if many == 2 else f"The {many} methods"
        return f"{which} under own budgets cannot be told apart ({how})."
    if len(found.leading) == 1:
        others = "the other method" if many == 2 else f"each of the {many - 1} other methods"
        return f"{found.leading[0]} is more accurate than {others} under own budgets ({how})."
    beaten = [label for label in found.labels if label not in found.leading]
    are = "is" if len(beaten) == 1 else "are"
    return f"{in_a_sentence(found.leading)} cannot be told apart; {in_a_sentence(beaten)} {are} less accurate ({how})."


def in_a_sentence(labels: Sequence[str]) -> str:
    """Name some methods in a sentence.

    >>> in_a_sentence(["a"]), in_a_sentence(["a", "b"]), in_a_sentence(["a", "b", "c", "d", "e"])
    ('a', 'a and b', 'a, b, c and 2 more')
    """
    if len(labels) > _NAMED:
        return f"{', '.join(labels[: _NAMED - 1])} and {len(labels) - _NAMED + 1} more"
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def points(measure: str, value: float) -> str:
    """Format a difference of a metric: in points where it is a share."""
    return f"{100 * value:.1f}" if measure in SHARES else f"{value:.3f}"
