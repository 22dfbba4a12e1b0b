"""Federated point estimation with any number of privacy groups: the best server, the best clients, and their errors.

Client i of group g has the point φ_i = φ + N(0, τ²), sees φ̂_i = φ_i + N(0, α²) and sends ψ_i = φ̂_i + N(0, n_g). The
server adds noise of variance γ_g² to the mean of a group of N_g clients; the paper moves it to the clients as
n_g = N_g·γ_g², which is the same to all that see no single message. The server knows nothing of φ beforehand
(a flat prior), so the best estimate is the unbiased one of least variance. Errors are mean squares.

Everything here follows from one fact: independent unbiased messages are best weighted by their inverse variances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyeps.errors import InputError

Floats = NDArray[np.float64]
NON_PRIVATE, PRIVATE = 0, 1  # the two groups of the paper, in this order


@dataclass(frozen=True)
class Federation:
    """Groups by size and by γ², the variance of the noise in their means; α² and τ² are the same for all clients."""

    sizes: tuple[int, ...]
    gamma2: tuple[float, ...]
    alpha2: float
    tau2: float

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.gamma2):
            raise InputError(f"{len(self.sizes)} sizes of groups but {len(self.gamma2)} variances; give one for each")
        if min(self.sizes, default=-1) < 0 or sum(self.sizes) < 1:
            raise InputError(f"sizes {self.sizes} are no federation; give counts, at least one above 0")
        if not (min(self.gamma2) >= 0 and self.tau2 >= 0 and self.alpha2 > 0):
            raise InputError("a variance is negative, or alpha2 is 0; give alpha2 > 0, and others of at least 0")
        if not math.isfinite(sum(self.gamma2) + self.tau2 + self.alpha2):
            raise InputError("a variance is not finite; give numbers")

    @classmethod
    def from_records(
        cls, sizes: Sequence[int], gamma2: Sequence[float], beta2: float, records: int, tau2: float
    ) -> Federation:
        """Clients that average so many records of variance β² each: α² = β²/n."""
        return cls(tuple(sizes), tuple(gamma2), beta2 / records, tau2)

    @property
    def clients(self) -> int:
        return sum(self.sizes)

    @property
    def client_variance(self) -> float:
        """σ_c² = α² + τ²: of a client's message without noise, about φ."""
        return self.alpha2 + self.tau2

    @property
    def message_noise(self) -> Floats:
        """n_g = N_g·γ_g²: the noise in one client's message, by group."""
        return np.asarray(np.array(self.sizes) * np.array(self.gamma2), dtype=np.float64)

    @property
    def message_variance(self) -> Floats:
        """σ_c² + n_g, by group."""
        return self.client_variance + self.message_noise


def opt_out(clients: int, private: int, alpha2: float, tau2: float, gamma2: float) -> Federation:
    """The paper's two groups: clients that opted out, then private ones, whose mean has noise of variance γ²."""
    if not 0 <= private <= clients:
        raise InputError(f"{private} of {clients} clients cannot be private; give at most {clients}")
    return Federation((clients - private, private), (0.0, gamma2), alpha2, tau2)


def best_weights(federation: Federation) -> Floats:
    """Weight of one client, by group: its inverse variance, so that all clients' weights sum to one.

    The group's mean gets N_g times that, N_g/(σ_c² + N_g·γ_g²) up to the common factor: Lemma 1 for any number of
    groups, whose ratio of two weights is (σ_c² + n_b)/(σ_c² + n_a).
    """
    precision = 1 / federation.message_variance
    return np.asarray(precision / (np.array(federation.sizes) @ precision), dtype=np.float64)


def weights_of_ratio(federation: Federation, ratio: float) -> Floats:
    """Weight of one client, by group, where a private one counts `ratio` times as much as one that opted out."""
    relative = np.array([1.0, ratio])
    total = np.array(_two_groups(federation).sizes) @ relative
    if not (ratio >= 0 and total > 0):
        raise InputError(f"ratio {ratio} leaves no client a weight; give a number above 0")
    return np.asarray(relative / total, dtype=np.float64)


def best_ratio(federation: Federation) -> float:
    """r* of Lemma 1: σ_c²/(σ_c² + N_p·γ²), as a quotient of the general weights."""
    non_private, private = best_weights(_two_groups(federation))
    return float(private / non_private)


def server_variance(federation: Federation, weights: ArrayLike | None = None) -> float:
    """σ_s²: variance of the server's estimate with these weights of one client by group, the best ones unless given."""
    chosen = _weights(federation, weights)
    return float(np.array(federation.sizes) @ (chosen**2 * federation.message_variance))


@dataclass(frozen=True)
class Personal:
    """Second moments of a client's mixture: its own error v = φ̂_j − φ_j, and the server's about *its* point.

    θ̂_j = (φ̂_j + λ·θ̂)/(1 + λ) has the error ((1 − s)·v + s·(θ̂ − φ_j)) with s = λ/(1 + λ), so the three moments say
    all: E v² = α², E v(θ̂ − φ_j) = w·α² and E(θ̂ − φ_j)² = σ_s² + (1 − 2w)·τ², w being its own weight in θ̂. The
    noise of its own message hides in σ_s² alone.
    """

    own: float
    shared: float
    server: float

    def error(self, penalty: ArrayLike) -> Floats:
        """Mean squared error with this λ; λ = ∞ takes the server's estimate as it is."""
        given = np.asarray(penalty, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            share = np.where(np.isinf(given), 1.0, given / (1 + given))
        found = (1 - share) ** 2 * self.own + 2 * share * (1 - share) * self.shared + share**2 * self.server
        return np.asarray(found, dtype=np.float64)

    @property
    def best_penalty(self) -> float:
        """The λ of least error: the parabola in s has its minimum at λ = (own − shared)/(server − shared)."""
        gained, left = self.own - self.shared, self.server - self.shared
        return math.inf if left <= 1e-12 * self.own else gained / left


def personal(federation: Federation, group: int, weights: ArrayLike | None = None) -> Personal:
    """The moments of a client of this group, when the server uses these weights (the best ones unless given)."""
    _member(federation, group)
    chosen = _weights(federation, weights)
    own, alpha2 = float(chosen[group]), federation.alpha2
    away = server_variance(federation, chosen) + (1 - 2 * own) * federation.tau2
    return Personal(alpha2, own * alpha2, away)


def best_penalty(federation: Federation, group: int) -> float:
    """λ* = α²(1 − w)/(τ²(1 − w) + w·n_g), under the best weights; ∞ where nothing speaks against the server's θ̂.

    `personal(...).best_penalty` gives the same from moments, and holds for other weights, too.
    """
    _member(federation, group)
    own, noise = float(best_weights(federation)[group]), float(federation.message_noise[group])
    against = federation.tau2 * (1 - own) + own * noise
    if own == 1:
        raise InputError("a single client has no others to learn from; give at least two")
    return federation.alpha2 * (1 - own) / against if against else math.inf


def others_variance(federation: Federation, group: int) -> float:
    """Variance of the best estimate of φ from all messages but those of one client of this group."""
    _member(federation, group)
    precision = 1 / federation.message_variance
    rest = float(np.array(federation.sizes) @ precision - precision[group])
    return 1 / rest if federation.clients > 1 else math.inf


def bayes_penalty(federation: Federation, group: int) -> float:
    """Weight of the others' best estimate against the client's own in (8): θ_j* = (φ̂_j + b·θ_others)/(1 + b).

    Given the others, φ_j is normal about their estimate with variance V + τ²; given its own records, about φ̂_j with
    α². So b = α²/(V + τ²).
    """
    return federation.alpha2 / (others_variance(federation, group) + federation.tau2)


def bayes_error(federation: Federation, group: int) -> float:
    """Mean squared error of (8), the least of all estimates from the others' messages and their own records."""
    return federation.alpha2 / (1 + bayes_penalty(federation, group))


def _two_groups(federation: Federation) -> Federation:
    if len(federation.sizes) != 2:
        raise InputError(f"a ratio is of two groups, not of {len(federation.sizes)}; give weights instead")
    return federation


def _member(federation: Federation, group: int) -> None:
    if not (0 <= group < len(federation.sizes) and federation.sizes[group]):
        raise InputError(f"group {group} has no clients; choose another one")


def _weights(federation: Federation, weights: ArrayLike | None) -> Floats:
    if weights is None:
        return best_weights(federation)
    chosen = np.asarray(weights, dtype=np.float64)
    if chosen.shape != (len(federation.sizes),) or not math.isclose(np.array(federation.sizes) @ chosen, 1.0):
        raise InputError("weights of all clients must sum to one; give one weight for each group")
    return chosen
