"""Rules for convolutions of any dimension, transposed or grouped, by torch's own kernels: a call per client.

A row's gradient is formed by a call per row if it is small. If it is large and the image has few positions, its norm
is computed without forming it, from inner products in float64; the clipped sum is then one call per client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyeps.engine.client_parameters import ClientParameter, ForwardPass, NoRuleError, outside_vmap
from polyeps.engine.contributions import Contribution, RowGradients
from polyeps.engine.layout import Layout
from polyeps.engine.uses import Range, RowUse

_FORMED = 1 << 18  # numbers of a row's gradient from which on it is not kept, if that can be avoided
_CANCELLED = 16  # largest ratio of the sum of the positions' norms to the norm of their sum that is trusted


class Kind(NamedTuple):
    """The arguments of a convolution, as torch's kernels take them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    more: tuple[int, ...]  # output padding
    groups: int

    def forward(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.convolution(images, weight, bias, *self)  # type: ignore[no-any-return]

    def backward(self, gradients: Tensor, images: Tensor, weight: Tensor, which: int) -> Tensor:
        """Return the gradient of the images (0) or of the weight (1)."""
        mask = [which == 0, which == 1, False]
        found = torch.ops.aten.convolution_backward(gradients, images, weight, None, *self, mask)
        return found[which]  # type: ignore[no-any-return]


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
        values = weight.values()
        shifts = None if bias is None else bias.values()
        found = [
            kind.forward(mine.flatten(0, 1), values[client], None if shifts is None else shifts[client])
            for client, mine in clients_rows(weight.of.layout, images)
        ]
        return torch.cat(found)  # (T · images a row, ...): a view here would forbid work in place

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        (images,) = ctx.saved_tensors
        gradients = torch.unflatten(gradients, 0, images.shape[:2])
        weight: ClientParameter = ctx.weight
        kind: Kind = ctx.kind
        of, values = weight.of, weight.values()
        of.record(weight.index, ConvolutionUse(weight.range, kind, images, gradients, values))
        if ctx.bias is not None:
            of.record(ctx.bias.index, RowUse(ctx.bias.range, gradients.flatten(3).sum((1, 3))))
        if not ctx.needs_input_grad[1]:
            return None, None, None, None, None
        each = zip(clients_rows(of.layout, images), clients_rows(of.layout, gradients), strict=True)
        found = [
            kind.backward(given.flatten(0, 1), mine.flatten(0, 1), values[client], 0)
            for (client, mine), (_, given) in each
        ]
        return None, torch.unflatten(torch.cat(found), 0, images.shape[:2]), None, None, None


@dataclass(frozen=True)
class ConvolutionUse:
    """A convolution's images (T, images a row, channels, ...) and the gradients of its outputs."""

    range: Range
    kind: Kind
    images: Tensor
    gradients: Tensor
    weights: Tensor  # (n, ...)

    def formed(self) -> Tensor:
        found = [
            self.kind.backward(given, mine, self.weights[0], 1).flatten()
            for given, mine in zip(self.gradients, self.images, strict=True)
        ]
        return torch.stack(found)

    def alone(self, layout: Layout) -> Contribution:
        return ConvolutionProducts(layout, self)


class ConvolutionProducts:
    """Rows whose gradient is a convolution's: formed, or only summed up for each client."""

    def __init__(self, layout: Layout, use: ConvolutionUse) -> None:
        self.layout, self.use = layout, use
        self._formed: RowGradients | None = None

    def squared_norms(self) -> Tensor:
        size = self.use.range[1] - self.use.range[0]
        if size >= _FORMED:
            squares = self._without_forming(size)
            if squares is not None:
                return squares
        self._formed = RowGradients(self.layout, self.use.formed())
        return self._formed.squared_norms()

    def drop(self, rows: Tensor) -> None:
        if self._formed is not None:
            self._formed.drop(rows)
            return
        mask = rows.reshape(-1, *(1,) * (self.use.gradients.dim() - 1))
        images, gradients = (each.masked_fill(mask, 0.0) for each in (self.use.images, self.use.gradients))
        self.use = ConvolutionUse(self.use.range, self.use.kind, images, gradients, self.use.weights)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        if self._formed is not None:
            self._formed.add_to(gradient, factors)
            return
        use = self.use
        gradients = use.gradients
        if factors is not None:
            gradients = gradients * factors.to(gradients.dtype).reshape(-1, *(1,) * (gradients.dim() - 1))
        each = zip(clients_rows(self.layout, use.images), clients_rows(self.layout, gradients), strict=True)
        for (client, images), (_, given) in each:
            found = use.kind.backward(given.flatten(0, 1), images.flatten(0, 1), use.weights[client], 1)
            gradient[client] += found.flatten()

    def _without_forming(self, size: int) -> Tensor | None:
        """Return the squared norms from the positions' inner products; None if too costly, or if terms cancel.

        Σ over pairs of positions of (g · g') (a · a'), in float64. Where the norm is much smaller than its terms, what
        the sum adds up would differ from it by rounding, so the gradients are formed.
        """
        use, kind = self.use, self.use.kind
        positions = use.gradients.shape[1] * use.gradients[0, 0, 0].numel()
        plain = use.images.dim() == 5 and not kind.transposed and kind.groups == 1
        wide = any(group.width > 32 for group in self.layout.groups)
        if not plain or wide or 4 * positions**2 > size:
            return None
        found = []
        for first in range(0, len(use.images), 8):
            some = use.images[first : first + 8]
            patches = functional.unfold(
                some.flatten(0, 1), use.weights.shape[3:], kind.dilation, kind.padding, kind.stride
            )
            a = torch.unflatten(patches, 0, some.shape[:2]).transpose(1, 2).flatten(2).double()  # (t, in, positions)
            g = use.gradients[first : first + 8].transpose(1, 2).flatten(2).double()
            squares = (torch.bmm(a.transpose(1, 2), a) * torch.bmm(g.transpose(1, 2), g)).sum((1, 2))
            terms = (torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(g, dim=1)).sum(1)
            # not finite or zero counts as well: the row is then dropped by its norm
            if bool((terms > _CANCELLED * squares.clamp(min=0).sqrt()).any()):
                return None
            found.append(squares)
        return torch.cat(found)


def clients_rows(layout: Layout, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each client with rows, and its rows."""
    for group in layout.groups:
        for client, mine in zip(range(group.first, group.last), group.rows(rows) if group.width else (), strict=False):
            yield client, mine


CONVOLUTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.conv1d: _rule(1, False),
    torch.conv2d: _rule(2, False),
    torch.conv3d: _rule(3, False),
    torch.conv_transpose1d: _rule(1, True),
    torch.conv_transpose2d: _rule(2, True),
    torch.conv_transpose3d: _rule(3, True),
}
