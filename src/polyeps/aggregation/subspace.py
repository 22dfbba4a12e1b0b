"""Linear algebra on a cohort's updates: weighted means, noise estimates, subspaces and projections onto them.

Row i is client i's update; n clients, d parameters. Everything here sees updates that already carry their
noise, so it is post-processing and costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from polyeps.errors import InputError
from polyeps.models import Slice

# Updates are float32: parts of a matrix below this share of it are rounding errors.
FLOAT32_ROUNDING = torch.finfo(torch.float32).eps


Slices = Mapping[str, Slice]
BasisKind = Literal["set", "mean", "centred"]
RandomKind = Literal["gaussian", "sparse"]


def weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of rows (n, d) with weights (n,); equal weights give the same bits whatever their value.

    Rows of weight zero are not read, so a client that is left out cannot spoil the mean with a NaN.
    """
    rows, shares = _weighted(rows, weights)
    return torch.matmul(shares.to(rows.dtype), rows)


def _weighted(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that have a weight, and these weights as shares of one, in float64."""
    if rows.ndim != 2 or weights.shape != rows.shape[:1]:
        raise InputError(f"weights must be one number per row of {tuple(rows.shape)}, not {tuple(weights.shape)}")
    weights = weights.to(rows.device, torch.float64)
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise InputError("weights must be finite and at least 0; a weight of 0 leaves a client out")
    if not bool(weights.any()):
        raise InputError("weights are all 0, so there is nothing to average; give at least one client a weight")
    # Divided by the largest first: equal weights are then exactly 1, and their sum cannot overflow.
    weights = weights / weights.max()
    shares = weights / weights.sum()
    return (rows, shares) if bool(shares.all()) else (rows[shares > 0], shares[shares > 0])


def variances_of_norms(squares: Tensor, size: int) -> Tensor:
    """Return noise variances per coordinate from squared norms (n,) of updates with `size` coordinates."""
    # An update of exactly zero is no update: it must not pass for the one with the least noise.
    least = float(squares.where(squares > 0, math.inf).min())
    if math.isinf(least):
        return squares
    return (squares - least).clamp(min=least * math.sqrt(2 / size)).div(size)


def inverse_variance_weights(variances: Tensor, signal: float = 0.0) -> Tensor:
    """Return shares ∝ 1/(variance + signal²), where `signal` is the deviation of true updates per coordinate.

    If some clients have neither, they share the weight equally: the limit as the signal goes to zero.
    """
    if not (math.isfinite(signal) and signal >= 0):
        raise InputError(f"signal must be a finite number of at least 0, not {signal}")
    if variances.ndim != 1 or not bool((variances >= 0).all()):
        raise InputError("variances must be one number of at least 0 per client")
    totals = variances.double() + signal**2
    least = totals.min() if len(totals) else torch.tensor(math.inf)
    if not bool(torch.isfinite(least)):
        raise InputError(
            "variances are finite for no client, so there is no mean; leave out clients whose updates are not finite"
        )
    weights = (totals == 0).double() if least == 0 else least / totals  # at most one, never overflows
    return weights.div(weights.sum())


class Part(NamedTuple):
    """Directions (k, stop - start) for one section of the vector."""

    start: int
    stop: int
    matrix: Tensor


@dataclass(frozen=True, eq=False)
class Basis:
    """Directions per tensor, or for the whole vector, around a centre (d,), which is zero unless centred.

    Rows may be (n, d) or a single (d,).
    """

    parts: tuple[Part, ...]
    centre: Tensor

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(len(part.matrix) for part in self.parts)

    def coordinates(self, rows: Tensor) -> Tensor:
        """Return the coordinates (n, Σk) of rows (n, d), which PFA+ uploads."""
        if rows.shape[-1:] != self.centre.shape:
            raise InputError(f"rows must have {len(self.centre)} columns, not shape {tuple(rows.shape)}")
        pieces = [(rows[..., a:b] - self.centre[a:b]) @ matrix.T for a, b, matrix in self.parts]
        return torch.cat(pieces, dim=-1)

    def rebuild(self, coordinates: Tensor) -> Tensor:
        """Return rows (n, d) from coordinates (n, Σk)."""
        if coordinates.shape[-1:] != (sum(self.ranks),):
            raise InputError(f"coordinates must have {sum(self.ranks)} columns, not shape {tuple(coordinates.shape)}")
        rows = self.centre.expand(*coordinates.shape[:-1], -1).clone()
        pieces = torch.split(coordinates, list(self.ranks), dim=-1)
        for (a, b, matrix), piece in zip(self.parts, pieces, strict=True):
            rows[..., a:b] += piece @ matrix
        return rows

    def project(self, rows: Tensor) -> Tensor:
        """Project rows onto the directions of this basis around its centre."""
        return self.rebuild(self.coordinates(rows))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return named tensors for a payload or a checkpoint; a zero centre is sent empty."""
        return {
            "basis": torch.cat([part.matrix.flatten() for part in self.parts]),
            "ranks": torch.tensor(self.ranks, dtype=torch.int64),
            "centre": self.centre if bool(self.centre.any()) else self.centre[:0],
        }


def basis_from_tensors(tensors: Mapping[str, Tensor], slices: Slices | None, size: int) -> Basis:
    """Rebuild a basis from `to_tensors`, given the model's slices and number of parameters."""
    spans = _spans(slices, size)
    if missing := {"basis", "ranks", "centre"} - set(tensors):
        raise InputError(f"a basis needs the tensor {min(missing)!r}; write it with to_tensors")
    flat, centre, ranks = tensors["basis"], tensors["centre"], tensors["ranks"].tolist()
    if len(ranks) != len(spans) or any(rank < 0 for rank in ranks):
        raise InputError(f"ranks must be {len(spans)} numbers of at least 0, one per tensor, not {ranks}")
    lengths = [rank * (b - a) for rank, (a, b) in zip(ranks, spans, strict=True)]
    if flat.shape != (sum(lengths),):
        raise InputError(f"basis must hold {sum(lengths)} numbers for ranks {ranks}, not shape {tuple(flat.shape)}")
    if centre.shape not in ((0,), (size,)):
        raise InputError(f"centre must hold {size} numbers or none, not shape {tuple(centre.shape)}")
    pieces = zip(spans, ranks, torch.split(flat, lengths), strict=True)
    parts = tuple(Part(a, b, piece.reshape(rank, b - a)) for (a, b), rank, piece in pieces)
    return Basis(parts, centre if len(centre) else flat.new_zeros(size))


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def subspace(
    rows: Tensor,
    slices: Slices | None = None,
    *,
    rank: int | Literal["auto"] = 1,
    kind: BasisKind = "set",
    weights: Tensor | None = None,
) -> Basis:
    """Return the main directions of PFA's public updates (n, d), per tensor, or of the whole vector without slices.

    "set": the leading eigenvectors of Σ w·Δ·Δᵀ. "mean": those of x̄·x̄ᵀ for the weighted mean x̄, as PFA is written,
    which has only one. "centred": of the updates around their plain mean, which becomes the centre, as in PFA's
    reference code; there are no weights, and a single update is not centred.

    No part has more directions than its updates have rank: zero updates have none. `rank` "auto" is PFA's Remark 3: the
    fewest directions whose singular values sum to at least the sum of the others; the paper's constant factor, which it
    calls domain-dependent without giving a value, is 1.
    """
    _check_rank(rank if rank != "auto" else 1)
    _check_kind(kind, get_args(BasisKind))
    if rows.ndim != 2 or not len(rows):
        raise InputError(f"a subspace needs the updates of at least one client, not shape {tuple(rows.shape)}")
    rows, shares = _weighted(rows, rows.new_ones(len(rows)) if weights is None or kind == "centred" else weights)
    centre = torch.zeros_like(rows[0])
    parts = []
    for a, b in _spans(slices, rows.shape[1]):
        block = rows[:, a:b].double()
        matrix = block * shares.sqrt()[:, None]
        # Relative to the rows themselves: a mean, or the rest after centring, may be only rounding errors.
        smallest = FLOAT32_ROUNDING * float(torch.linalg.vector_norm(matrix))
        if not math.isfinite(smallest):
            raise InputError("an update holds a number that is not finite; leave that client out")
        if kind == "mean":
            matrix = (shares @ block)[None]
        elif kind == "centred" and len(rows) > 1:
            mean = block.mean(0)
            centre[a:b] = mean.to(rows.dtype)
            matrix = (block - mean) * shares.sqrt()[:, None]
        parts.append(Part(a, b, _directions(matrix, rank, smallest).to(rows.dtype)))
    return Basis(tuple(parts), centre)


def _directions(matrix: Tensor, rank: int | Literal["auto"], smallest: float) -> Tensor:
    """Return right singular vectors (k, size) of a float64 matrix (n, size) with singular values above `smallest`."""
    tall = matrix.shape[0] > matrix.shape[1]
    # The smaller Gram matrix: its eigenvalues resolve singular values down to 1e-8, finer than float32 rows are.
    values, vectors = torch.linalg.eigh(matrix.T @ matrix if tall else matrix @ matrix.T)
    values, vectors = values.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    count = int((values > smallest).sum())
    if rank == "auto":
        values = values[:count]
        rest = values.flip(0).cumsum(0).flip(0) - values  # what is left after the first k
        enough = values.cumsum(0) >= rest
        count = int(enough.to(torch.int8).argmax()) + 1 if count else 0
    else:
        count = min(rank, count)
    if tall:
        return torch.t(vectors[:, :count])
    raw = (vectors[:, :count].T @ matrix) / values[:count, None]
    # Weak directions inherit rounding errors of strong ones; orthonormalising in order leaves the strong unchanged.
    fine, corner = torch.linalg.qr(raw.T)
    return torch.mul(fine.T, corner.diagonal().sign()[:, None])


def random_basis(
    size: int, slices: Slices | None, rank: int, generator: torch.Generator, kind: RandomKind = "gaussian"
) -> Basis:
    """Return random directions R (k, size), rebuilt by Rᵀ: the control of PFA's figure 6b.

    "gaussian" has entries N(0, 1/k); "sparse" is the Johnson–Lindenstrauss transform with entries ±√(3/k), each
    one time in six, else 0. RᵀR is the identity on average only: what is rebuilt is right in the mean, off by about
    √(size/k) times the row, and not idempotent. A part takes at most as many
    directions as it has parameters.
    """
    _check_rank(rank)
    _check_kind(kind, get_args(RandomKind))
    parts = []
    for a, b in _spans(slices, size):
        count = min(rank, b - a)
        if kind == "gaussian":
            matrix = torch.randn(count, b - a, generator=generator, device=generator.device) / math.sqrt(count)
        else:
            drawn = torch.randint(6, (count, b - a), generator=generator, device=generator.device, dtype=torch.int8)
            matrix = ((drawn == 0).float() - (drawn == 1).float()) * math.sqrt(3 / count)
        parts.append(Part(a, b, matrix))
    return Basis(tuple(parts), torch.zeros(size, device=generator.device))


def _check_rank(rank: int) -> None:
    if rank < 1:
        raise InputError(f"rank must be at least 1, not {rank}")


def _check_kind(kind: str, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise InputError(f"there is no kind {kind!r} of basis here; choose one of {', '.join(known)}")


def _spans(slices: Slices | None, size: int) -> list[tuple[int, int]]:
    if slices is None:
        return [(0, size)]
    spans = [(part.start, part.stop) for part in slices.values()]
    if not spans or min(a for a, _ in spans) < 0 or max(b for _, b in spans) > size or any(a >= b for a, b in spans):
        raise InputError(f"slices must lie within the {size} parameters of a row; take them from the same model")
    return spans
