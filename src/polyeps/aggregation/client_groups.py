"""Who counts as public: clients split by the ε they declare, or by how loud their updates are.

A split by ε answers one bool per client, True for public. A split by loudness answers labels, 0 for the
quietest group, which is the public one, and -1 for clients whose update is not finite, who are never public.
No split depends on the order of the clients, except that `liberal_by_top` breaks ties by it.

Norms tell noise levels apart only where noise outweighs the signal: two of paper 002's three mixtures stay
unreliable with any rule here. Logarithms of noise-only coordinates' norms, where a model has such coordinates,
go through the same `quiet_by_log_norms`, which then tells all three apart nearly always.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyeps.errors import InputError

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

# Neighbours closer than this in log norm belong together, however many clients there are.
SMALLEST_GAP = math.log(1.3)
# What clients of one noise level differ by in log norm at the least: their signals are never equal.
SMALLEST_SPREAD = 0.1


@dataclass(frozen=True)
class NoiseGroups:
    """Clients by loudness: label 0 is the quietest group, -1 a client without a finite norm."""

    labels: Labels  # (n,)
    count: int

    @property
    def public(self) -> Bools:
        """The quietest group; with one group only, everybody who has a finite norm."""
        return np.equal(self.labels, 0)

    @property
    def projecting(self) -> bool:
        """Whether anybody is quieter than anybody else; if not, average and do not project."""
        return self.count > 1


def high_epsilon_by_mixture(epsilons: ArrayLike, generator_seed: int = 0) -> Bools:
    """Two Gaussians fitted to log ε; public is the higher one. Of clients that are all alike, all are public.

    Paper 000's rule. It always finds two groups, even among clients drawn from one.
    """
    logs = np.log(_positive(epsilons))
    labels, means = _mixture(logs, 2, generator_seed)
    if len(means) == 1:
        return np.ones(len(logs), dtype=np.bool_)
    # A wide Gaussian claims both ends of the line: the strictest clients must not become public through it.
    lowest: float = np.min(logs[(labels == 1) & (logs >= means[0])], initial=np.inf)
    return logs >= (lowest if math.isfinite(lowest) else logs.max())


def high_epsilon_by_kmeans(epsilons: ArrayLike) -> Bools:
    """The two groups of log ε with the least squared distance to their means, found exactly; public is the higher."""
    logs = np.log(_positive(epsilons))
    line = np.sort(logs)
    cuts = 1 + np.flatnonzero(np.diff(line) > 0)  # equal budgets stay together
    if not len(cuts):
        return np.ones(len(logs), dtype=np.bool_)
    squares = _squares(line)
    cut = cuts[np.argmin(squares(np.zeros_like(cuts), cuts) + squares(cuts, np.full_like(cuts, len(line))))]
    lowest = float(line[cut])
    return logs >= lowest


def high_epsilon_by_share(epsilons: ArrayLike, share: float = 0.1) -> Bools:
    """The ⌊share · n⌋ clients of largest ε, at least one; the rule of paper 000's code. Ties go to the first."""
    values = _positive(epsilons)
    if not 0 < share <= 1:
        raise InputError(f"share must be above 0 and at most 1, not {share}")
    count = max(1, math.floor(share * len(values) + 1e-9))  # 0.29 · 100 is 28.999…
    public = np.zeros(len(values), dtype=np.bool_)
    public[np.argsort(-values, kind="stable")[:count]] = True
    return public


def high_epsilon_by_threshold(epsilons: ArrayLike, threshold: float) -> Bools:
    """Every client whose ε is at least the threshold; that may be nobody."""
    values = _positive(epsilons)
    if not threshold > 0:
        raise InputError(f"threshold must be above 0, not {threshold}")
    return values >= threshold


SPLITS: dict[str, Callable[..., Bools]] = {
    "mixture": high_epsilon_by_mixture,
    "k-means": high_epsilon_by_kmeans,
    "top": high_epsilon_by_share,
    "threshold": high_epsilon_by_threshold,
}


def split_by_epsilon(epsilons: ArrayLike, rule: str = "mixture", **parameter: float) -> Bools:
    """Who is public by the named rule.

    >>> split_by_epsilon([0.1, 10, 0.1], "threshold", threshold=1)
    array([False,  True, False])
    """
    if rule not in SPLITS:
        raise InputError(f"there is no split {rule!r}; choose one of {', '.join(SPLITS)}")
    takes = list(inspect.signature(SPLITS[rule]).parameters.values())[1:]
    if unknown := set(parameter) - {known.name for known in takes}:
        raise InputError(f"the split {rule!r} takes no {min(unknown)!r}; leave it out")
    missing = [known.name for known in takes if known.default is known.empty and known.name not in parameter]
    if missing:
        raise InputError(f"the split {rule!r} needs {missing[0]!r}; give it")
    return SPLITS[rule](epsilons, **parameter)


def group_by_norms(norms: ArrayLike, groups: int = 2) -> Labels:
    """Labels by Gaussians fitted to the norms of one round, as paper 002 publishes it.

    It finds `groups` groups wherever there are as many different norms, also where all clients are alike.
    """
    values = _line("norms", norms)
    if groups < 1:
        raise InputError(f"groups must be at least 1, not {groups}")
    if (values < 0).any():
        raise InputError(f"norms must be at least 0, not {values.min()}")
    finite = np.isfinite(values)
    labels = np.full(len(values), -1)
    if finite.any():
        # The unit of the norms means nothing, but the fit adds 1e-6 to every variance.
        labels[finite] = _mixture(values[finite] / max(values[finite].max(), np.finfo(float).tiny), groups, 0)[0]
    return labels


def group_by_log_norms(log_norms: ArrayLike, parameters: int, spreads: Literal["own", "tied"] = "own") -> NoiseGroups:
    """One to three groups of log norms, as many as the Bayesian information criterion finds worth having.

    Every way to cut the sorted line at gaps of at least ln 1.3 between neighbours is tried, so the best is found
    exactly. The gap is one between neighbours, not between means: a continuum then stays whole however long it
    is. A group's variance is floored at max(1/(2·parameters), 0.1²), which keeps a group of one from
    collapsing.

    "own" gives every group its own variance and share: quiet clients differ by their signals, loud ones by next
    to nothing. "tied" is one variance for all; it cuts a wide quiet group in two when many loud clients are
    tight. Fewer than four clients are one group. Average a client's log norms over rounds before calling: its
    noise stays, its signal does not.
    """
    values = _line("log_norms", log_norms)
    if parameters < 1:
        raise InputError(f"parameters must be at least 1, not {parameters}")
    if spreads not in ("own", "tied"):
        raise InputError(f"there are no spreads {spreads!r}; choose own or tied")
    finite = np.isfinite(values)
    labels = np.full(len(values), -1)
    line = np.sort(values[finite])
    cuts = _best_cuts(line, max(1 / (2 * parameters), SMALLEST_SPREAD**2), spreads) if len(line) >= 4 else []
    labels[finite] = np.searchsorted(line[cuts], values[finite], side="right")
    return NoiseGroups(labels, len(cuts) + 1)


def _best_cuts(line: Floats, floor: float, spreads: str) -> list[int]:
    """Where to cut the sorted line: the cheapest by BIC of all cuts at large enough gaps."""
    size = len(line)
    squares = _squares(line)

    def price(*edges: NDArray[np.int64]) -> Floats:
        groups = len(edges) - 1
        counts = np.stack([b - a for a, b in pairwise(edges)])  # (groups, tries)
        errors = np.stack([squares(a, b) for a, b in pairwise(edges)])
        if spreads == "tied":
            counts, errors = counts.sum(0, keepdims=True), errors.sum(0, keepdims=True)
            each = 2  # a mean and a share; the one variance is common
        else:
            each = 3
        variances = np.maximum(errors / counts, floor)
        shares = counts * np.log(counts / size)  # zero when tied, as in the published recipe
        total: Floats = (counts * np.log(variances) + errors / variances - 2 * shares).sum(0)
        return total + each * groups * math.log(size)

    gaps = 1 + np.flatnonzero(np.diff(line) >= SMALLEST_GAP)
    start, end = np.zeros(1, dtype=np.int64), np.full(1, size)
    best, cuts = float(price(start, end)[0]), list[int]()
    for first in range(len(gaps)):
        left, later = gaps[first : first + 1], gaps[first + 1 :]
        prices = price(start, left, end)
        if prices[0] < best:
            best, cuts = float(prices[0]), [int(left[0])]
        if not len(later):
            continue
        prices = price(*np.broadcast_arrays(start, left, later, end))
        if prices.min() < best:
            best, cuts = float(prices.min()), [int(left[0]), int(later[np.argmin(prices)])]
    return cuts


def _squares(line: Floats) -> Callable[[NDArray[np.int64], NDArray[np.int64]], Floats]:
    """A function of (start, stop): the squared distances of line[start:stop] to its mean, summed."""
    centred = line - line.mean()  # or the differences of large sums would lose the small squares
    sums, seconds = (np.concatenate([[0.0], np.cumsum(values)]) for values in (centred, centred**2))

    def squares(start: NDArray[np.int64], stop: NDArray[np.int64]) -> Floats:
        total: Floats = seconds[stop] - seconds[start] - (sums[stop] - sums[start]) ** 2 / (stop - start)
        return np.maximum(total, 0)

    return squares


def _mixture(values: Floats, groups: int, seed: int) -> tuple[Labels, Floats]:
    """Labels by ascending mean, and those means; fewer groups where there are fewer different values."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    groups = min(groups, len(np.unique(values)))
    if groups == 1:
        return np.zeros(len(values), dtype=np.int64), values[:1]
    order = np.argsort(values, kind="stable")  # the fit starts at random, so it must not see the clients' order
    column = values[order][:, None]
    model: Any = GaussianMixture(groups, max_iter=1000, random_state=int(seed))
    with warnings.catch_warnings():  # values a rounding apart are too few for the fit's taste; it answers all the same
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = model.fit(column).predict(column)
    means: Floats = model.means_[:, 0]
    occupied = np.unique(found)
    occupied = occupied[np.argsort(means[occupied], kind="stable")]
    rank = np.zeros(len(means), dtype=np.int64)
    rank[occupied] = np.arange(len(occupied))
    labels = np.empty(len(values), dtype=np.int64)
    labels[order] = rank[found]
    return labels, means[occupied]


def _line(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise InputError(f"{name} must be one number per client, not of shape {array.shape}")
    return array


def _positive(epsilons: ArrayLike) -> Floats:
    array = _line("epsilons", epsilons)
    if not (np.isfinite(array) & (array > 0)).all():
        raise InputError("epsilons must be finite numbers above 0; a client without one has no place in a split by ε")
    return array
