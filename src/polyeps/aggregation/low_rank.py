"""CMP-Fed's linear algebra: updates as products of thin matrices, from one power step shared by all clients.

CMP-Fed: Guo et al., "Agent-Level Differentially Private Federated Learning via Compressed Model Perturbation", IEEE CNS
2022, https://openreview.net/forum?id=IRG_AP-IHR.

    Δ_i  an update, tensor by tensor [out, all else]     r  rank, at most that of the tensor
    V_t  right factors, from the round before            U_i = Δ_i V_t    the first release, `subspace_of`
    Û    left factors: U's mean made orthonormal         V_i = Δ_iᵀ Û     the second release, `embedding_of`

Û V̄ᵀ is the step. Both releases are linear in the update, so the server needs only their sums. The privacy of a release
rests on `mechanisms.clipping` and the noise after it; everything the server does with the sums is post-processing. Û
may also be taken from the public model, and then there is no first release. Tensors that are not compressed are sent
whole within the second release, under the same clip: the paper does not mention biases, and nothing may leave a client
unclipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from polyeps.aggregation.subspace import FLOAT32_ROUNDING
from polyeps.errors import InputError
from polyeps.models import Slice

WholeTensors = Literal["when-cheaper", "biases"]
DirectionSource = Literal["paid", "model"]
WarmStart = Literal["orthonormal", "raw"]
# A column whose part orthogonal to earlier columns is below this share of it is rounding error: no direction.
_FLOOR = 8 * FLOAT32_ROUNDING


class Reader(NamedTuple):
    """The tensor that reads a layer's outputs: its place in the vector, and its rows as a matrix."""

    start: int
    stop: int
    rows: int


class Matrix(NamedTuple):
    """A compressed tensor: its place in the vector, its shape as a matrix, its rank, and the reader of its outputs."""

    start: int
    stop: int
    rows: int
    columns: int
    rank: int
    reader: Reader | None = None


@dataclass(frozen=True)
class Compression:
    """Which tensors of a model are sent as two factors, and which whole; built by `low_rank`.

    The factors of all matrices are concatenated into vectors: `left` (Σ rows · rank), `right` (Σ columns · rank). If
    nothing is compressed, the first release is empty and need not be asked for.

    >>> from polyeps.models import mcmahan_cnn
    >>> low_rank(mcmahan_cnn().slices, 16, whole="biases").uplink
    78942
    >>> low_rank(mcmahan_cnn().slices, 16).uplink
    78730
    """

    size: int  # d, the parameters of the model
    matrices: tuple[Matrix, ...]
    whole: tuple[tuple[int, int], ...]  # places of the tensors that are sent whole
    warm_start: WarmStart = "orthonormal"
    directions: DirectionSource = "paid"  # of the left factors: a release, or the model

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(matrix.rank for matrix in self.matrices)

    @property
    def subspace_size(self) -> int:
        """Return the number of floats of the first release, and of the left factors sent back."""
        return sum(self._left_sizes)

    @property
    def right_size(self) -> int:
        """Return the number of floats of the right factors sent with the model."""
        return sum(self._right_sizes)

    @property
    def embedding_size(self) -> int:
        """Return the number of floats of the second release: embeddings, then the tensors sent whole."""
        return self.right_size + sum(self._whole_sizes)

    @property
    def uplink(self) -> int:
        """Return the number of floats a client sends in a round."""
        return (self.subspace_size if self.directions == "paid" else 0) + self.embedding_size

    @property
    def _left_sizes(self) -> list[int]:
        return [matrix.rows * matrix.rank for matrix in self.matrices]

    @property
    def _right_sizes(self) -> list[int]:
        return [matrix.columns * matrix.rank for matrix in self.matrices]

    @property
    def _whole_sizes(self) -> list[int]:
        return [stop - start for start, stop in self.whole]

    def start(self, generator: torch.Generator) -> Tensor:
        """Draw right factors for the first round, independent of all data."""
        drawn = torch.randn(self.right_size, generator=generator, device=generator.device)
        return drawn if self.warm_start == "raw" else _orthonormal(drawn, self._rights)

    def next_right(self, embedding: Tensor) -> Tensor:
        """Return the right factors for the next round, from this round's mean embedding.

        The paper takes them as they are ("raw"), so that U has the scale of ‖Δ‖², noise included, and needs a clip of
        its own. Orthonormalised they span the same space, and U has the scale of Δ.
        """
        _check_columns("an embedding", embedding, self.embedding_size)
        right = embedding[: self.right_size]
        return right.clone() if self.warm_start == "raw" else _orthonormal(right, self._rights)

    def subspace_of(self, updates: Tensor, right: Tensor) -> Tensor:
        """Return U_i = Δ_i V: the first release (n, subspace_size) of updates (n, d), before clipping."""
        _check_columns("updates", updates, self.size, dimensions=2)
        pieces = [
            torch.bmm(stack, factor.expand(len(updates), -1, -1)).flatten(1)
            for stack, factor in zip(self._stacks(updates), self._rights(right), strict=True)
        ]
        return torch.cat(pieces, dim=1) if pieces else updates[:, :0]

    def embedding_of(self, updates: Tensor, left: Tensor) -> Tensor:
        """Return V_i = Δ_iᵀ Û and the tensors sent whole: the second release (n, embedding_size), before clipping."""
        _check_columns("updates", updates, self.size, dimensions=2)
        pieces = [
            torch.bmm(stack.mT, factor.expand(len(updates), -1, -1)).flatten(1)
            for stack, factor in zip(self._stacks(updates), self._lefts(left), strict=True)
        ]
        return torch.cat([*pieces, *(updates[:, start:stop] for start, stop in self.whole)], dim=1)

    def orthonormal(self, subspace: Tensor) -> Tensor:
        """Return Û: orthonormal left factors (subspace_size,) with the span of the mean of the first release."""
        return _orthonormal(subspace, self._lefts)

    def left_of(self, model: Tensor, generator: torch.Generator) -> Tensor:
        """Return Û without a release: for every matrix, directions in which the next layer reads its outputs.

        A gradient comes back through the weights of the next layer, so its left factor lies near the space they span.
        The model is public, so this costs nothing. Directions are mixed at random: the strongest alone would be the
        same in every round, and the others would never be learnt.
        """
        _check_columns("a model", model, self.size)
        fine = model.to("cpu", torch.float64)
        if not bool(torch.isfinite(fine).all()):
            raise InputError("the model holds a number that is not finite; use a smaller learning rate")
        pieces = []
        for matrix in self.matrices:
            assert matrix.reader is not None
            start, stop, readers = matrix.reader
            ways = (
                fine[start:stop].view(readers, matrix.rows, -1).transpose(0, 1).flatten(1)
            )  # in which each output is used
            mixed = ways @ torch.randn(ways.shape[1], matrix.rank, generator=generator, dtype=torch.float64)
            pieces.append(_orthonormal_columns(mixed).flatten())
        return torch.cat(pieces).to(model) if pieces else model[:0]

    def rebuild(self, left: Tensor, embedding: Tensor) -> Tensor:
        """Return the update (d,): Û V̄ᵀ for every matrix, and the whole tensors in their places."""
        _check_columns("an embedding", embedding, self.embedding_size)
        update = embedding.new_empty(self.size)
        factors = zip(self.matrices, self._lefts(left), self._rights(embedding[: self.right_size]), strict=True)
        for matrix, left_factor, right_factor in factors:
            update[matrix.start : matrix.stop] = (left_factor @ right_factor.T).flatten()
        sent_whole = torch.split(embedding[self.right_size :], self._whole_sizes)
        for (start, stop), values in zip(self.whole, sent_whole, strict=True):
            update[start:stop] = values
        return update

    def _stacks(self, updates: Tensor) -> list[Tensor]:
        """Return each matrix of all clients, (n, rows, columns), as views, which products need not copy."""
        return [torch.unflatten(updates[:, m.start : m.stop], 1, (m.rows, m.columns)) for m in self.matrices]

    def _lefts(self, left: Tensor) -> list[Tensor]:
        _check_columns("left factors", left, self.subspace_size)
        pieces = torch.split(left, self._left_sizes)
        return [piece.reshape(m.rows, m.rank) for m, piece in zip(self.matrices, pieces, strict=True)]

    def _rights(self, right: Tensor) -> list[Tensor]:
        _check_columns("right factors", right, self.right_size)
        pieces = torch.split(right, self._right_sizes)
        return [piece.reshape(m.columns, m.rank) for m, piece in zip(self.matrices, pieces, strict=True)]


def low_rank(
    slices: Mapping[str, Slice],
    rank: int,
    *,
    whole: WholeTensors = "when-cheaper",
    warm_start: WarmStart = "orthonormal",
    directions: DirectionSource = "paid",
) -> Compression:
    """Return how to send updates of a model with these slices at a rank, at most a tensor's smaller side.

    "when-cheaper" sends a tensor whole if two factors would not be smaller: fewer floats, less noise, nothing lost.
    "biases" is the paper's rule: every tensor of two or more dimensions is compressed. Where directions come from the
    model, a tensor's rank is at most the number of ways in which its reader uses an output, and a tensor without a
    reader is sent whole.
    """
    if rank < 1:
        raise InputError(f"rank must be at least 1, not {rank}")
    _check_choice("whole", whole, WholeTensors)
    _check_choice("warm_start", warm_start, WarmStart)
    _check_choice("directions", directions, DirectionSource)
    matrices, spans, end = [], [], 0
    for name, part in slices.items():
        if part.start != end:
            raise InputError(f"slices must follow each other without gaps, but {name!r} starts at {part.start}")
        end = part.stop
        if len(part.shape) < 2:
            spans.append((part.start, part.stop))
            continue
        rows = part.shape[0]
        columns = (part.stop - part.start) // rows
        reader = _reader(part, slices) if directions == "model" else None
        ways = [(reader.stop - reader.start) // rows] if reader else []  # in which the reader uses each output
        found = min(rank, rows, columns, *ways)
        cheaper = found * (rows + columns) < rows * columns or whole == "biases"
        if cheaper and (reader is not None or directions == "paid"):
            matrices.append(Matrix(part.start, part.stop, rows, columns, found, reader))
        else:
            spans.append((part.start, part.stop))
    if directions == "model" and not any(_reader(part, slices) for part in slices.values() if len(part.shape) > 1):
        raise InputError(
            'directions = "model" needs a layer whose outputs the next one reads, and this model has none; use "paid"'
        )
    return Compression(end, tuple(matrices), tuple(spans), warm_start, directions)


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise InputError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")


def _reader(part: Slice, slices: Mapping[str, Slice]) -> Reader | None:
    """Return the next tensor of two or more dimensions, if it can be the reader of this one's outputs.

    In a sequence of layers the reader uses every output equally often: once, or, for a convolution or a flattened
    image, once for each place. A wrong guess costs accuracy, never privacy.
    """
    later = [other for other in slices.values() if other.start >= part.stop and len(other.shape) > 1]
    if not later or (later[0].stop - later[0].start) % (later[0].shape[0] * part.shape[0]):
        return None
    return Reader(later[0].start, later[0].stop, later[0].shape[0])


def _orthonormal(flat: Tensor, factors_of: Callable[[Tensor], list[Tensor]]) -> Tensor:
    """Orthonormalise factors column by column (Gram-Schmidt) and concatenate them again.

    A column without a direction of its own (zero, or spanned by earlier columns) is replaced by a unit vector that
    depends only on earlier columns. A zero column would stay zero as the next start; a column of rounding errors would
    differ between machines. Always on the CPU, where thin factors take no longer and all machines agree.
    """
    fine = flat.to("cpu", torch.float64)
    if not bool(torch.isfinite(fine).all()):
        raise InputError(
            "a sum of releases holds a number that is not finite; a client sent an update that it did not clip"
        )
    pieces = [_orthonormal_columns(factor).flatten() for factor in factors_of(fine)]
    return torch.cat(pieces).to(flat) if pieces else flat


def _orthonormal_columns(matrix: Tensor) -> Tensor:
    largest = matrix.abs().amax(0)
    alive = largest > torch.finfo(torch.float32).tiny  # below, float32 has few digits, or none
    unit = torch.where(alive, matrix / largest, 0.0)
    _, corner = torch.linalg.qr(unit, mode="r")
    remainders = corner.diagonal().abs()
    alive &= remainders > _FLOOR * torch.linalg.vector_norm(unit, dim=0)
    # Householder reflections skip a column of zeros, and complete the others to an orthonormal set.
    fine, corner = torch.linalg.qr(torch.where(alive, unit, 0.0))
    return torch.mul(fine, torch.where(corner.diagonal() < 0, -1.0, 1.0))


def _check_columns(what: str, values: Tensor, size: int, dimensions: int = 1) -> None:
    if values.ndim != dimensions or values.shape[-1] != size:
        kind = "a vector of" if dimensions == 1 else "one row per client with"
        raise InputError(f"{what} must be {kind} {size} numbers, not shape {tuple(values.shape)}")
