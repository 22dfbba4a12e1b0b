"""Rules for convolutions of any dimension, transposed or grouped, by torch's own kernels: a call per client.

A row's gradient is formed by a call per row if it is small. If it is large and the image has few positions, its norm
is computed without forming it, from inner products in float64; the clipped sum is then one call per client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyeps.engine.client_parameters import ClientParameter, ForwardPass, NoRuleError, outside_vmap
from polyeps.engine.contributions import SMALLEST, Contribution, RowGradients
from polyeps.engine.gram_norms import Taps, position_sums
from polyeps.engine.layout import Layout
from polyeps.engine.openblas import suits_openblas
from polyeps.engine.row_norms import squared_row_norms
from polyeps.engine.stable_products import add_product, align_matrices, multiply_each, multiply_persons
from polyeps.engine.uses import Range, RowUse

_FORMED = 1 << 18  # numbers of a row's gradient from which on it is not kept, if that can be avoided
_SMALL = 1 << 20  # products of a row below which one call for all rows is faster than a call each
_SMALL_HERE = 1 << 23  # the same, where OpenBLAS makes that call
_FEW = 256  # positions of a client's rows up to which a product with patches is faster than torch's kernel
_CANCELLED = 16  # largest ratio of the sum of the positions' norms to the norm of their sum that is trusted
_SMALLEST_FLOAT = 2.0**-149
_UNSEEN = 2.0**-20  # share of a row's clipped gradient, well within the margin of the clip


class Kind(NamedTuple):
    """The arguments of a convolution, as torch's kernels take them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    more: tuple[int, ...]  # output padding
    groups: int

    def outputs(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs; torch computes a single image by another kernel, so two are given always."""
        if len(images) > 1:
            return torch.ops.aten.convolution(images, weight, bias, *self)  # type: ignore[no-any-return]
        return self.outputs(_doubled(images), weight, bias)[:1]

    def of_images(self, gradients: Tensor, images: Tensor, weight: Tensor) -> Tensor:
        """Return the gradients of the images."""
        if len(images) == 1:
            return self.of_images(_doubled(gradients), _doubled(images), weight)[:1]
        found = torch.ops.aten.convolution_backward(gradients, images, weight, None, *self, [True, False, False])
        return found[0]  # type: ignore[no-any-return]

    def of_weight(self, gradients: Tensor, images: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight, summed over images."""
        found = torch.ops.aten.convolution_backward(gradients, images, weight, None, *self, [False, True, False])
        return found[1]  # type: ignore[no-any-return]


def _doubled(images: Tensor) -> Tensor:
    """Return an image twice, laid out in memory as several like it would be: that decides on the kernel."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(images.dim(), torch.contiguous_format)
    kept = not images.is_contiguous() and images.is_contiguous(memory_format=last)
    return images.expand(2, *images.shape[1:]).contiguous(memory_format=last if kept else torch.contiguous_format)


def _rule(dims: int, transposed: bool) -> Callable[..., Tensor]:
    def each(value: int | tuple[int, ...]) -> tuple[int, ...]:
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * dims if len(values) == 1 else values

    def apply(of: ForwardPass, input: Tensor, weight: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
        if not isinstance(weight, ClientParameter) or weight.turned or weight.dim() != dims + 2:
            raise NoRuleError
        rows = of.physical(input)
        with outside_vmap():
            single = input.dim() == dims + 1
            images = rows.unsqueeze(1) if single else rows
            mine = bias if isinstance(bias, ClientParameter) else None
            outputs: Tensor = _Convolution.apply(of.anchor, images, weight, mine, kind)  # type: ignore[no-untyped-call]
            outputs = outputs if single else torch.unflatten(outputs, 0, images.shape[:2])
        seen = of.seen(outputs)
        return seen if bias is mine else seen + bias.reshape(-1, *(1,) * dims)  # type: ignore[union-attr]

    def straight(
        of: ForwardPass,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if isinstance(padding, str):
            sizes = weight.shape[2:]
            total = [d * (k - 1) for d, k in zip(each(dilation), sizes, strict=True)]
            padding = 0 if padding == "valid" else tuple(t // 2 for t in total)
            if padding and any(t % 2 for t in total):  # torch pads the odd one at the end
                ends = [side for t in reversed(total) for side in (0, t % 2)]
                input = functional.pad(input, ends)
        kind = Kind(each(stride), each(padding), each(dilation), False, each(0), groups)
        return apply(of, input, weight, bias, kind)

    def turned(
        of: ForwardPass,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        kind = Kind(each(stride), each(padding), each(dilation), True, each(output_padding), groups)
        return apply(of, input, weight, bias, kind)

    return turned if transposed else straight


class _Convolution(torch.autograd.Function):
    """Images (T, images a row, channels, ...) under the weights of each row's client."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, images: Tensor, weight: ClientParameter, bias: ClientParameter | None, kind: Kind
    ) -> Tensor:
        ctx.save_for_backward(images)
        ctx.weight, ctx.bias, ctx.kind = weight, bias, kind
        values = weight.of_clients()
        shifts = None if bias is None else bias.of_clients()
        found = [
            kind.outputs(mine.flatten(0, 1), values[client], None if shifts is None else shifts[client])
            for client, mine in clients_rows(weight.of.layout, images)
        ]
        # (T · images a row, ...): a view here would forbid work in place
        together = torch.cat(found) if len(found) > 1 or found[0]._is_view() else found[0]
        # What follows patches that do not overlap, such as attention, takes them as a sequence of vectors.
        apart = len(kind.stride) == 2 and min(kind.stride) > 1 and tuple(weight.shape[2:]) == kind.stride
        return together.contiguous(memory_format=torch.channels_last) if apart else together

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        images = ctx.saved_tensors[0].detach()  # a use must not hold the graph, which holds the use
        gradients = torch.unflatten(gradients, 0, images.shape[:2])
        weight: ClientParameter = ctx.weight
        kind: Kind = ctx.kind
        of, values = weight.of, weight.of_clients()
        of.record(weight.number, ConvolutionUse(weight.range, kind, images, gradients, values))
        if ctx.bias is not None:
            of.record(ctx.bias.number, RowUse(ctx.bias.range, gradients.flatten(3).sum((1, 3))))
        if not ctx.needs_input_grad[1]:
            return None, None, None, None, None
        each = zip(clients_rows(of.layout, images), clients_rows(of.layout, gradients), strict=True)
        found = [
            kind.of_images(given.flatten(0, 1), mine.flatten(0, 1), values[client])
            for (client, mine), (_, given) in each
        ]
        together = torch.cat(found) if len(found) > 1 else found[0]
        return None, torch.unflatten(together, 0, images.shape[:2]), None, None, None


@dataclass(frozen=True)
class ConvolutionUse:
    """A convolution's images (T, images a row, channels, ...) and the gradients of its outputs."""

    range: Range
    kind: Kind
    images: Tensor
    gradients: Tensor
    weights: Tensor  # (n, ...)

    @property
    def positions(self) -> int:
        return self.gradients.shape[1] * self.gradients[0, 0, 0].numel()

    @property
    def plain(self) -> bool:
        """Return whether it is two-dimensional, neither grouped nor transposed: a product of patches."""
        return self.images.dim() == 5 and not self.kind.transposed and self.kind.groups == 1

    def formed(self) -> Tensor:
        if self.plain and (self.images.is_cuda or self._small):
            patches, gradients = self.matrices(slice(None))
            if self.images.shape[1] == 1 or patches.is_cuda:
                return multiply_each(align_matrices(gradients), align_matrices(patches).transpose(1, 2))
            return multiply_persons(gradients.transpose(1, 2), patches.transpose(1, 2))
        return torch.stack([self._formed(*each) for each in zip(self.gradients, self.images, strict=True)])

    @property
    def _small(self) -> bool:
        """Return whether a call for all rows is faster than one each; asked of an image, not of a person's padding."""
        positions, taps = self.gradients[0, 0, 0].numel(), self.weights[0, 0].numel()
        fast = self.images.shape[1] == 1 and suits_openblas(positions, taps, self.weights.shape[1])
        return positions * taps * self.weights.shape[1] < (_SMALL_HERE if fast else _SMALL)

    def _formed(self, gradients: Tensor, images: Tensor) -> Tensor:
        """Return a row's gradient, image by image: of a person, the padding must not change it."""
        each = zip(torch.split(gradients, 1), torch.split(images, 1), strict=True)
        found = [self.kind.of_weight(_aligned(given), _aligned(mine), self.weights[0]) for given, mine in each]
        return reduce(torch.add, found).flatten()

    def matrices(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return rows' patches (t, in, positions) and gradients (t, out, positions)."""
        images, kind = self.images[rows], self.kind
        together, taps = images.flatten(0, 1), self.weights.shape[3:]
        if taps.numel() == 1 and not any(kind.padding):
            patches = together[:, :, :: kind.stride[0], :: kind.stride[1]].flatten(2)
        else:
            patches = functional.unfold(together, taps, kind.dilation, kind.padding, kind.stride)
        return (
            torch.unflatten(patches, 0, images.shape[:2]).transpose(1, 2).flatten(2),
            self.gradients[rows].transpose(1, 2).flatten(2),
        )

    def of_rows(self, rows: slice) -> ConvolutionUse:
        """Return the use of some rows."""
        return replace(self, images=self.images[rows], gradients=self.gradients[rows])

    def alone(self, layout: Layout) -> Contribution:
        return ConvolutionProducts(layout, self)


class ConvolutionProducts:
    """Rows whose gradient is a convolution's: formed, or only summed up for each client."""

    def __init__(self, layout: Layout, use: ConvolutionUse) -> None:
        self.layout, self.use = layout, use
        self._formed: RowGradients | None = None
        self._lengths: Tensor | None = None  # (T,) squared, of the output gradients
        self._sums: Tensor | None = None  # (T,) squared norms of the rows' gradients
        self._alone: list[int] = []  # rows whose terms cancel

    def squared_norms(self) -> Tensor:
        if not self.formed:
            return self._without_forming()
        self._formed = RowGradients(self.layout, self.use.formed())
        return self._formed.squared_norms()

    @property
    def formed(self) -> int:
        use = self.use
        size = use.range[1] - use.range[0]
        short = size < _FORMED or not use.plain or use.images.is_cuda or 4 * use.positions**2 > size
        return size if short or any(group.width > 32 for group in self.layout.groups) else 0

    def drop(self, rows: Tensor) -> None:
        if self._formed is not None:
            self._formed.drop(rows)
            return
        mask = rows.reshape(-1, *(1,) * (self.use.gradients.dim() - 1))
        images, gradients = (each.masked_fill(mask, 0.0) for each in (self.use.images, self.use.gradients))
        self.use = replace(self.use, images=images, gradients=gradients)

    def grouped(self, layout: Layout, times: int) -> Contribution:
        images, gradients = (
            torch.unflatten(each, 0, (-1, times)).flatten(1, 2) for each in (self.use.images, self.use.gradients)
        )
        return ConvolutionProducts(layout, replace(self.use, images=images, gradients=gradients))

    def part(self, layout: Layout, rows: slice) -> Contribution:
        return ConvolutionProducts(layout, self.use.of_rows(rows))

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        if self._formed is not None:
            self._formed.add_to(gradient, factors)
            return
        use = self.use
        gradients = use.gradients
        if factors is not None:
            if self._lengths is not None:  # huge images may compensate for an underflow here
                factors = factors.masked_fill(self._lengths * factors.square() < SMALLEST**2, 0.0)
            exact = [row for row in self._underflowing(factors) if row not in self._alone]
            for row in exact:
                patches, by_outputs = (matrix[0].double() for matrix in use.matrices(slice(row, row + 1)))
                gradient[int(self.layout.owner[row])] += (by_outputs * factors[row] @ patches.T).flatten()
            for row in self._alone:
                client = int(self.layout.owner[row])
                gradient[client].add_(use.of_rows(slice(row, row + 1)).formed()[0], alpha=float(factors[row]))
            factors = factors.index_fill(0, torch.tensor([*exact, *self._alone], dtype=torch.int64), 0.0)
            gradients = gradients * factors.to(gradients.dtype).reshape(-1, *(1,) * (gradients.dim() - 1))
        each = zip(clients_rows(self.layout, use.images), clients_rows(self.layout, gradients), strict=True)
        for (client, images), (_, given) in each:
            if use.plain and not images.is_cuda and len(images) * use.positions <= _FEW:
                mine = replace(use, images=images, gradients=given)
                patches, by_outputs = (matrix.transpose(0, 1).flatten(1) for matrix in mine.matrices(slice(None)))
                add_product(torch.unflatten(gradient[client], 0, (len(by_outputs), -1)), by_outputs, patches.T)
                continue
            found = use.kind.of_weight(given.flatten(0, 1), images.flatten(0, 1), use.weights[client])
            gradient[client] += found.flatten()

    def _without_forming(self) -> Tensor:
        """Return the squared norms from the positions' inner products.

        Where a norm is much smaller than its terms, what the sum adds up would differ from it by rounding. Such a row's
        gradient is formed alone, once for its norm and once more to be added.
        """
        use = self.use
        taps = Taps(tuple(use.weights.shape[3:]), use.kind.stride, use.kind.dilation, use.kind.padding)
        blocks = [use.of_rows(slice(first, first + 8)) for first in range(0, len(use.images), 8)]
        sums = [position_sums(block.images, block.gradients, taps) for block in blocks]
        squares, terms, self._lengths = (torch.cat(each) for each in zip(*sums, strict=True))
        # a row whose norm is not finite is dropped by it
        cancelled = terms > _CANCELLED * squares.clamp(min=0).sqrt()
        self._alone = cancelled.nonzero()[:, 0].tolist()
        for row in self._alone:
            squares[row] = squared_row_norms(use.of_rows(slice(row, row + 1)).formed())[0]
        self._sums = squares.clone()
        return squares

    def _underflowing(self, factors: Tensor) -> list[int]:
        """Return rows of which some output gradients, times the row's factor, underflow where images are huge."""
        if self._sums is None:
            return []
        images, gradients = (each.flatten(1) for each in (self.use.images, self.use.gradients))
        # Each output gradient is off by half the smallest float at most, and meets every tap of its patch.
        taps = self.use.weights[0, 0].numel() * gradients.shape[1]
        off = images.abs().amax(1).double() * (_SMALLEST_FLOAT * taps**0.5 * self.use.positions**0.5)
        lost = (off > _UNSEEN * factors * self._sums.sqrt()) & (factors > 0)
        found: list[int] = lost.nonzero()[:, 0].tolist()
        return found


def _aligned(values: Tensor) -> Tensor:
    """Return values at an address of which torch's kernels make no difference."""
    if values.data_ptr() % 64 == 0 and values.is_contiguous():
        return values
    return values.clone(memory_format=torch.contiguous_format)


def clients_rows(layout: Layout, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each client with rows, and its rows."""
    for group in layout.groups:
        if group.width:
            yield from zip(range(group.first, group.last), group.rows(rows), strict=True)


CONVOLUTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.conv1d: _rule(1, False),
    torch.conv2d: _rule(2, False),
    torch.conv3d: _rule(3, False),
    torch.conv_transpose1d: _rule(1, True),
    torch.conv_transpose2d: _rule(2, True),
    torch.conv_transpose3d: _rule(3, True),
}
