"""Federated linear regression with any number of privacy groups (the paper's Appendix A, which our text lacks).

So this is derived, not copied. Client i has φ_i = φ + N(0, τ²I) in d dimensions, records x_i = F_i·φ_i + N(0, β²I),
and sends its least squares φ̂_i plus N(0, n_g·I), n_g = N_g·γ_g². About φ its message has the covariance
S_i = A_i + (τ² + n_g)·I with A_i = β²(F_iᵀF_i)⁻¹. Two servers and two kinds of client are set side by side:

- *matrix*: the server weighs with matrices in proportion to S_i⁻¹. This is the Bayes estimate.
- *scalar*: one number per client, as FedHDP does it. Best is 1/tr S_i, since Σ w²·tr S is least there.

They are the same when all FᵀF = n·I: then every coordinate is a point estimation with α² = β²/n, and r*, λ* and errors
are those of `points`, errors times d. With other designs a number is not enough, and `losses` says how much is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import InputError
from polyeps_reproductions.theory.points import Federation, Personal

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Regression:
    """Clients by their designs (clients × records × d), their groups, and γ² of each group's mean."""

    designs: Floats
    groups: tuple[int, ...]  # of each client
    gamma2: tuple[float, ...]
    beta2: float
    tau2: float

    def __post_init__(self) -> None:
        if self.designs.ndim != 3 or len(self.designs) != len(self.groups) or len(self.groups) < 2:
            raise InputError("designs are clients × records × dimensions, of two clients at least; give one for each")
        if not set(self.groups) <= set(range(len(self.gamma2))):
            raise InputError(f"groups are numbered from 0 to {len(self.gamma2) - 1}; give each client one of them")
        if not (self.beta2 > 0 and self.tau2 >= 0 and min(self.gamma2) >= 0):
            raise InputError("a variance is negative, or beta2 is 0; give beta2 > 0, and others of at least 0")
        if np.linalg.matrix_rank(self.designs).min() < self.dimension:
            raise InputError("a client's records do not determine its least squares; give each at least d of them")

    @property
    def dimension(self) -> int:
        return int(self.designs.shape[2])

    @property
    def own_covariance(self) -> Floats:
        """A_i, of each client's least squares about its own φ_i."""
        return np.asarray(self.beta2 * np.linalg.inv(np.swapaxes(self.designs, 1, 2) @ self.designs))

    @property
    def message_noise(self) -> Floats:
        """n_g of each client."""
        groups = np.array(self.groups)
        sizes = np.bincount(groups, minlength=len(self.gamma2))
        return np.asarray((sizes * np.array(self.gamma2))[groups], dtype=np.float64)

    @property
    def message_covariance(self) -> Floats:
        """S_i."""
        return self.own_covariance + (self.tau2 + self.message_noise)[:, None, None] * np.eye(self.dimension)

    @property
    def points(self) -> Federation:
        """The point estimation each coordinate is, where all FᵀF are one multiple of I."""
        own = self.own_covariance
        alpha2 = float(own[0, 0, 0])
        if not np.allclose(own, alpha2 * np.eye(self.dimension), rtol=0, atol=1e-9 * alpha2):
            raise InputError("the designs are not orthogonal and alike; use matrix or scalar weights")
        sizes = np.bincount(self.groups, minlength=len(self.gamma2))
        return Federation(tuple(int(size) for size in sizes), self.gamma2, alpha2, self.tau2)


def orthogonal(
    sizes: tuple[int, ...], gamma2: tuple[float, ...], records: int, dimension: int, beta2: float, tau2: float
) -> Regression:
    """All clients with the same FᵀF = records·I: discrete cosines, scaled."""
    if not 1 <= dimension <= records:
        raise InputError(f"{records} records do not determine {dimension} numbers; give as many at least")
    angles = np.pi / records * np.outer(np.arange(records) + 0.5, np.arange(dimension))
    cosines = np.cos(angles) * np.where(np.arange(dimension) == 0, 1.0, np.sqrt(2.0))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    designs = np.broadcast_to(cosines, (len(groups), *cosines.shape))
    return Regression(designs, tuple(int(group) for group in groups), gamma2, beta2, tau2)


def matrix_weights(regression: Regression) -> Floats:
    """The Bayes server's: S_i⁻¹, so scaled that they sum to the identity."""
    precision = np.linalg.inv(regression.message_covariance)
    return np.asarray(np.linalg.solve(precision.sum(axis=0), precision))


def scalar_weights(regression: Regression) -> Floats:
    """The best numbers, 1/tr S_i, as multiples of the identity."""
    inverse = 1 / np.trace(regression.message_covariance, axis1=1, axis2=2)
    return np.asarray((inverse / inverse.sum())[:, None, None] * np.eye(regression.dimension))


def server_covariance(regression: Regression, weights: Floats) -> Floats:
    """Of θ̂ = Σ W_i·ψ_i about φ."""
    return np.asarray(np.einsum("iab,ibc,idc->ad", weights, regression.message_covariance, weights))


def personal(regression: Regression, client: int, weights: Floats) -> Personal:
    """The three moments of `points.Personal`, summed over coordinates: errors with any λ, and the best λ, follow."""
    own, weight = regression.own_covariance[client], weights[client]
    spread = regression.tau2 * (np.eye(regression.dimension) - weight - weight.T)
    away = server_covariance(regression, weights) + spread
    return Personal(float(np.trace(own)), float(np.trace(weight @ own)), float(np.trace(away)))


def bayes_covariance(regression: Regression, client: int) -> Floats:
    """Of the best estimate of φ_j from the others' messages and the client's own records."""
    precision = np.linalg.inv(regression.message_covariance)
    others = np.linalg.inv(precision.sum(axis=0) - precision[client]) + regression.tau2 * np.eye(regression.dimension)
    return np.asarray(np.linalg.inv(np.linalg.inv(regression.own_covariance[client]) + np.linalg.inv(others)))


def losses(regression: Regression, client: int) -> dict[str, float]:
    """Squared errors: the server's with matrices and numbers, the client's by (8) and with the best λ on either."""
    matrix, scalar = matrix_weights(regression), scalar_weights(regression)
    found = {
        "server, matrix": float(np.trace(server_covariance(regression, matrix))),
        "server, scalar": float(np.trace(server_covariance(regression, scalar))),
        "client, Bayes": float(np.trace(bayes_covariance(regression, client))),
    }
    for name, weights in (("matrix", matrix), ("scalar", scalar)):
        moments = personal(regression, client, weights)
        found[f"client, {name}"] = float(moments.error(moments.best_penalty))
    return found
