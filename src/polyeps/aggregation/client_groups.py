"""Groups of clients: split by the ε they disclose, or by the noise level of their updates.

A split by ε returns one bool per client, True for high-ε clients (PFA's public ones: Liu et al., "Projected Federated
Averaging with Heterogeneous Differential Privacy", VLDB 2022, https://doi.org/10.14778/3503585.3503592). A split by
norms returns labels, 0 for the group of the lowest noise level and -1 for clients whose update is not finite (PDP-FL:
Liu et al., "Personalized Differentially Private Federated Learning without Exposing Privacy Budgets", CIKM 2023,
https://doi.org/10.1145/3583780.3615247). No split depends on the order of the clients, except that
`high_epsilon_by_share` breaks ties by it.

Norms distinguish noise levels only where noise outweighs the signal: two of PDP-FL's three mixtures stay unreliable
with any rule here. Where a model has coordinates that hold only noise, their log norms go through the same
`group_by_log_norms`, which then distinguishes all three nearly always.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyeps.errors import InputError

_Bools = NDArray[np.bool_]
_Floats = NDArray[np.float64]
_Labels = NDArray[np.int64]

_SMALLEST_GAP = math.log(1.3)  # neighbours closer than this in log norm are in one group
_SMALLEST_SPREAD = 0.1  # of log norms at one noise level: signals are never equal


@dataclass(frozen=True)
class NoiseGroups:
    """Clients by noise level: label 0 is the group of the lowest, -1 a client without a finite norm."""

    labels: _Labels  # (n,)
    count: int

    @property
    def public(self) -> _Bools:
        """Return the group of the lowest noise level; with one group only, all clients with a finite norm."""
        return np.equal(self.labels, 0)

    @property
    def projecting(self) -> bool:
        """Return whether there are several noise levels; if not, average and do not project."""
        return self.count > 1


def high_epsilon_by_mixture(epsilons: ArrayLike) -> _Bools:
    """Fit two Gaussians to log ε and select the higher one; if all ε are equal, all clients.

    PFA's rule. It always finds two groups, even among clients drawn from one.
    """
    logs = np.log(_positive(epsilons))
    labels, means = _mixture(logs, 2)
    if len(means) == 1:
        return np.ones(len(logs), dtype=np.bool_)
    # A wide Gaussian claims both ends of the line: the lowest ε must not be selected through it.
    lowest: float = np.min(logs[(labels == 1) & (logs >= means[0])], initial=np.inf)
    return logs >= (lowest if math.isfinite(lowest) else logs.max())


def high_epsilon_by_kmeans(epsilons: ArrayLike) -> _Bools:
    """Split log ε into the two groups with the least squared distance to their means, exactly; select the higher."""
    logs = np.log(_positive(epsilons))
    line = np.sort(logs)
    cuts = 1 + np.flatnonzero(np.diff(line) > 0)  # equal budgets stay together
    if not len(cuts):
        return np.ones(len(logs), dtype=np.bool_)
    squares = _squares(line)
    cut = cuts[np.argmin(squares(np.zeros_like(cuts), cuts) + squares(cuts, np.full_like(cuts, len(line))))]
    lowest = float(line[cut])
    return logs >= lowest


def high_epsilon_by_share(epsilons: ArrayLike, share: float = 0.1) -> _Bools:
    """Select the ⌊share · n⌋ clients of largest ε, at least one, as PFA's reference code does; ties go to the first."""
    values = _positive(epsilons)
    if not 0 < share <= 1:
        raise InputError(f"share must be above 0 and at most 1, not {share}")
    count = max(1, math.floor(share * len(values) + 1e-9))  # 0.29 · 100 is 28.999…
    public = np.zeros(len(values), dtype=np.bool_)
    public[np.argsort(-values, kind="stable")[:count]] = True
    return public


def high_epsilon_by_threshold(epsilons: ArrayLike, threshold: float) -> _Bools:
    """Select the clients whose ε is at least the threshold, possibly none."""
    values = _positive(epsilons)
    if not threshold > 0:
        raise InputError(f"threshold must be above 0, not {threshold}")
    return values >= threshold


SPLITS: dict[str, Callable[..., _Bools]] = {
    "mixture": high_epsilon_by_mixture,
    "k-means": high_epsilon_by_kmeans,
    "top": high_epsilon_by_share,
    "threshold": high_epsilon_by_threshold,
}


def split_by_epsilon(epsilons: ArrayLike, rule: str = "mixture", **parameter: float) -> _Bools:
    """Return which clients the named rule selects as high-ε clients.

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


def group_by_norms(norms: ArrayLike, groups: int = 2) -> _Labels:
    """Return labels by Gaussians fitted to the norms of one round, as PDP-FL is published.

    It finds `groups` groups wherever there are as many different norms, also if all noise levels are equal.
    """
    values = _line("norms", norms)
    if groups < 1:
        raise InputError(f"groups must be at least 1, not {groups}")
    if (values < 0).any():
        raise InputError(f"norms must be at least 0, not {values.min()}")
    finite = np.isfinite(values)
    labels = np.full(len(values), -1)
    if finite.any():
        # Norms are scaled to at most 1, because the fit adds 1e-6 to every variance.
        labels[finite] = _mixture(values[finite] / max(values[finite].max(), np.finfo(float).tiny), groups)[0]
    return labels


def group_by_log_norms(log_norms: ArrayLike, parameters: int) -> NoiseGroups:
    """Return one to three groups of log norms, by the Bayesian information criterion.

    Every way to cut the sorted line at gaps of at least ln 1.3 between neighbours is tried, so the best is found
    exactly. The gap is between neighbours, not between means, so a continuum stays one group however long it is. Every
    group has its own variance, at least max(1/(2·parameters), 0.1²), and its own share. Fewer than four clients are one
    group. Average a client's log norms over rounds before calling: its noise stays, its signal does not.
    """
    values = _line("log_norms", log_norms)
    if parameters < 1:
        raise InputError(f"parameters must be at least 1, not {parameters}")
    finite = np.isfinite(values)
    labels = np.full(len(values), -1)
    line = np.sort(values[finite])
    cuts = _best_cuts(line, max(1 / (2 * parameters), _SMALLEST_SPREAD**2)) if len(line) >= 4 else []
    labels[finite] = np.searchsorted(line[cuts], values[finite], side="right")
    return NoiseGroups(labels, len(cuts) + 1)


def _best_cuts(line: _Floats, floor: float) -> list[int]:
    """Return where to cut the sorted line: the best by BIC of all cuts at large enough gaps."""
    size = len(line)
    squares = _squares(line)

    def criterion(*edges: NDArray[np.int64]) -> _Floats:
        groups = len(edges) - 1
        counts = np.stack([b - a for a, b in pairwise(edges)])  # (groups, tries)
        errors = np.stack([squares(a, b) for a, b in pairwise(edges)])
        variances = np.maximum(errors / counts, floor)
        shares = counts * np.log(counts / size)
        total: _Floats = (counts * np.log(variances) + errors / variances - 2 * shares).sum(0)
        return total + 3 * groups * math.log(size)

    gaps = 1 + np.flatnonzero(np.diff(line) >= _SMALLEST_GAP)
    start, end = np.zeros(1, dtype=np.int64), np.full(1, size)
    best, cuts = float(criterion(start, end)[0]), list[int]()
    for first in range(len(gaps)):
        left, later = gaps[first : first + 1], gaps[first + 1 :]
        values = criterion(start, left, end)
        if values[0] < best:
            best, cuts = float(values[0]), [int(left[0])]
        if not len(later):
            continue
        values = criterion(*np.broadcast_arrays(start, left, later, end))
        if values.min() < best:
            best, cuts = float(values.min()), [int(left[0]), int(later[np.argmin(values)])]
    return cuts


def _squares(line: _Floats) -> Callable[[NDArray[np.int64], NDArray[np.int64]], _Floats]:
    """Return a function of (start, stop): the sum of squared distances of line[start:stop] to its mean."""
    centred = line - line.mean()  # else differences of large sums would lose small squares
    sums, seconds = (np.concatenate([[0.0], np.cumsum(values)]) for values in (centred, centred**2))

    def squares(start: NDArray[np.int64], stop: NDArray[np.int64]) -> _Floats:
        total: _Floats = seconds[stop] - seconds[start] - (sums[stop] - sums[start]) ** 2 / (stop - start)
        return np.maximum(total, 0)

    return squares


def _mixture(values: _Floats, groups: int) -> tuple[_Labels, _Floats]:
    """Return labels by ascending mean, and those means; fewer groups if there are fewer different values."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    groups = min(groups, len(np.unique(values)))
    if groups == 1:
        return np.zeros(len(values), dtype=np.int64), values[:1]
    order = np.argsort(values, kind="stable")  # the fit starts at random, so it must not depend on the clients' order
    column = values[order][:, None]
    model: Any = GaussianMixture(groups, max_iter=1000, random_state=0)
    with warnings.catch_warnings():  # the fit warns if values differ only by rounding, and still answers
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = model.fit(column).predict(column)
    means: _Floats = model.means_[:, 0]
    occupied = np.unique(found)
    occupied = occupied[np.argsort(means[occupied], kind="stable")]
    rank = np.zeros(len(means), dtype=np.int64)
    rank[occupied] = np.arange(len(occupied))
    labels = np.empty(len(values), dtype=np.int64)
    labels[order] = rank[found]
    return labels, means[occupied]


def _line(name: str, values: ArrayLike) -> _Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise InputError(f"{name} must be one number per client, not of shape {array.shape}")
    return array


def _positive(epsilons: ArrayLike) -> _Floats:
    array = _line("epsilons", epsilons)
    if not (np.isfinite(array) & (array > 0)).all():
        raise InputError("epsilons must be finite numbers above 0; leave out clients without a budget")
    return array
