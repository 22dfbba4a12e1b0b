"""Parameters as a user's module sees them while it runs over the rows of all clients.

The module runs once, under `vmap` over rows, so that rows cannot mix. Its parameters are replaced by stand-ins of the
same shapes. A function with a rule (`function_rules`) reads each client's own values and records what the parameter's
gradient is made of. Any other function gets the values of the row's client: a copy for every row, whose gradient by
autograd is the row's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_map_only

from polyeps.engine.layout import Layout
from polyeps.engine.row_draws import RowDraws
from polyeps.engine.uses import RowUse, Use

_functorch = torch._C._functorch


class NoRuleError(Exception):
    """A function is called in a way that has no rule."""


@dataclass(eq=False)
class ForwardPass:
    """One run of a module over the rows of a layout: clients' values in, uses of parameters out."""

    layout: Layout
    columns: list[Tensor]  # of each parameter, (n, p): every client's own values
    shapes: list[tuple[int, ...]]
    draws: RowDraws
    uses: list[list[Use]] = field(init=False)
    copies: dict[int, Tensor] = field(default_factory=dict)  # (T, ...): for parameters without a rule
    anchor: Tensor = field(init=False)  # on every rule's path, so that its backward pass always runs
    level: int = 0
    finished: bool = False  # whether the forward pass has ended: uses count from then on

    def __post_init__(self) -> None:
        self.uses = [[] for _ in self.columns]
        self.anchor = self.columns[0].new_zeros(()).requires_grad_()

    def physical(self, values: Tensor) -> Tensor:
        """Return the values of all rows, (T, ...), of a tensor that a module sees for one row."""
        if isinstance(values, ClientParameter):
            values = values.copied()
        if _functorch.current_level() != self.level:
            raise NoRuleError("the module uses vmap or grad itself")
        if not _functorch.is_batchedtensor(values):
            return values.expand(self.layout.rows, *values.shape)
        rows = _functorch.get_unwrapped(values)
        place = _functorch.maybe_get_bdim(values)
        with outside_vmap():
            return rows.movedim(place, 0) if place else rows

    def seen(self, rows: Tensor) -> Tensor:
        """Return values of all rows (T, ...) as the module sees them: those of one row."""
        return _functorch._add_batch_dim(rows, 0, self.level)

    def copy_of(self, index: int) -> Tensor:
        """Return a parameter's values for each row, as the module sees them."""
        if index not in self.copies:
            with outside_vmap(), torch.no_grad():
                rows = self.columns[index].index_select(0, self.layout.owner)
                self.copies[index] = rows.view(len(rows), *self.shapes[index]).requires_grad_()
        return self.seen(self.copies[index])

    def finish(self) -> None:
        """End the forward pass; refuse one that wrote into a parameter, which rules would not see."""
        if any(copy._version for copy in self.copies.values()):
            raise NoRuleError("the module changes a parameter in place")
        self.finished = True

    def record(self, index: int, use: Use) -> None:
        """Note a use of a parameter, in the backward pass."""
        if not self.finished:
            raise NoRuleError("the module computes gradients itself")
        self.uses[index].append(use)

    def gradients(self, outputs: Tensor, by_outputs: Tensor, leaf: Tensor | None) -> Tensor | None:
        """Run the backward pass: record all uses and return the gradients of the input rows, a leaf."""
        if not outputs.requires_grad:
            return None if leaf is None else torch.zeros_like(leaf)
        leaves = [self.anchor, *self.copies.values(), *([] if leaf is None else [leaf])]
        found = torch.autograd.grad(outputs, leaves, by_outputs, allow_unused=True)
        for index, gradients in zip(self.copies, found[1:], strict=False):
            if gradients is not None:
                flat = gradients.reshape(len(gradients), -1)
                self.uses[index].append(RowUse((0, flat.shape[1]), flat))
        if leaf is None:
            return None
        return torch.zeros_like(leaf) if found[-1] is None else found[-1]


class ClientParameter(Tensor):
    """A stand-in for a parameter or for some of its rows, perhaps transposed."""

    of: ForwardPass
    number: int
    span: tuple[int, int] | None  # rows of the parameter; None: it is a single number
    turned: bool
    _is_param = True

    @staticmethod
    def make(of: ForwardPass, index: int, span: tuple[int, int] | None = None, turned: bool = False) -> ClientParameter:
        shape = of.shapes[index]
        if shape:
            span = (0, shape[0]) if span is None else span
            shape = (span[1] - span[0], *shape[1:])
        columns = of.columns[index]
        made: ClientParameter = Tensor._make_wrapper_subclass(
            ClientParameter,
            shape[::-1] if turned else shape,
            dtype=columns.dtype,
            device=columns.device,
            requires_grad=True,
        )
        made.of, made.number, made.span, made.turned = of, index, span, turned
        return made

    @property
    def range(self) -> tuple[int, int]:
        """Return which of the parameter's numbers these are."""
        shape = self.of.shapes[self.number]
        if self.span is None:
            return 0, 1
        width = torch.Size(shape[1:]).numel()
        return self.span[0] * width, self.span[1] * width

    def of_clients(self) -> Tensor:
        """Return every client's values, (n, ...), in the parameter's own orientation."""
        first, last = self.range
        shape = self.of.shapes[self.number]
        kept = (self.span[1] - self.span[0], *shape[1:]) if self.span else ()
        columns = self.of.columns[self.number][:, first:last]
        return torch.unflatten(columns, 1, kept) if kept else columns[:, 0]

    def copied(self) -> Tensor:
        """Return the values of each row's client, as the module sees them."""
        copy = self.of.copy_of(self.number)
        if self.span is not None and self.span != (0, self.of.shapes[self.number][0]):
            copy = copy[self.span[0] : self.span[1]]
        return copy.mT if self.turned else copy

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        view = _VIEWS.get(func)
        if view is not None and isinstance(args[0], ClientParameter):
            found = view(*args, **kwargs)
            if found is not None:
                return found
        from polyeps.engine.function_rules import RULES

        rule = RULES.get(func)
        if rule is not None:
            try:
                return rule(_pass_of(args, kwargs), *args, **kwargs)
            except NoRuleError:
                pass
        if _in_place(func) and isinstance(args[0], ClientParameter):
            raise NoRuleError("the module changes a parameter in place")  # rules would not see it
        args, kwargs = tree_map_only(ClientParameter, lambda each: each.copied(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NoRuleError(f"{func} reached a parameter past torch's overrides")  # it holds no values


def _in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


@contextmanager
def outside_vmap() -> Iterator[None]:
    """Run operations on the rows of all clients, as if no module were running under `vmap`."""
    with torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():
        yield


def _pass_of(args: Any, kwargs: dict[str, Any]) -> ForwardPass:
    for each in (*args, *kwargs.values()):
        if isinstance(each, ClientParameter):
            return each.of
    # one within a list, as of recurrent layers
    found: list[ForwardPass] = []

    def note(each: ClientParameter) -> ClientParameter:
        found.append(each.of)
        return each

    tree_map_only(ClientParameter, note, (args, kwargs))
    return found[0]


def _rows(parameter: ClientParameter, first: int, last: int) -> ClientParameter:
    assert parameter.span is not None
    start = parameter.span[0]
    return ClientParameter.make(parameter.of, parameter.number, (start + first, start + last))


def _item(parameter: ClientParameter, key: object) -> ClientParameter | None:
    plain = isinstance(key, slice) and key.step in (None, 1) and parameter.span is not None and not parameter.turned
    if not plain or not isinstance(key, slice):
        return None
    first, last, _ = key.indices(len(parameter))
    return _rows(parameter, first, max(first, last))


def _split(parameter: ClientParameter, sizes: int | list[int], dim: int = 0) -> tuple[ClientParameter, ...] | None:
    if dim != 0 or parameter.span is None or parameter.turned:
        return None
    count = len(parameter)
    sizes = [min(sizes, count - first) for first in range(0, count, sizes)] if isinstance(sizes, int) else sizes
    if sum(sizes) != count:
        return None
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(_rows(parameter, end - size, end) for size, end in zip(sizes, ends, strict=True))


def _chunk(parameter: ClientParameter, chunks: int, dim: int = 0) -> tuple[ClientParameter, ...] | None:
    return _split(parameter, -(-len(parameter) // chunks), dim) if parameter.dim() else None


def _turn(parameter: ClientParameter, *dims: int) -> ClientParameter | None:
    if len(parameter.of.shapes[parameter.number]) != 2 or sorted(d % 2 for d in dims) not in ([], [0, 1]):
        return None
    return ClientParameter.make(parameter.of, parameter.number, parameter.span, not parameter.turned)


def _same(parameter: ClientParameter, *args: object, **kwargs: object) -> ClientParameter | None:
    """Return the parameter itself if a conversion changes neither its type nor its device."""
    for each in [*args, *kwargs.values()]:
        if isinstance(each, torch.dtype | Tensor) and getattr(each, "dtype", each) != parameter.dtype:
            return None
        if isinstance(each, torch.device | Tensor) and getattr(each, "device", each) != parameter.device:
            return None
        if each is not None and not isinstance(each, torch.dtype | torch.device | Tensor | bool):
            return None
    return None if kwargs.get("copy") else parameter


_WRITES = frozenset(
    f"__{name}__"
    for name in ["setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"]
)
_FIELDS = ("device", "dtype", "grad", "is_cuda", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape")
_METHODS = ("__hash__", "__len__", "__repr__", "dim", "element_size", "is_complex", "is_contiguous")
_SIZES = ("is_floating_point", "numel", "size", "stride")
_ABOUT = frozenset(
    [getattr(Tensor, name).__get__ for name in _FIELDS]
    + [getattr(Tensor, name) for name in _METHODS + _SIZES]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
_VIEWS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _item,
    Tensor.split: _split,
    torch.split: _split,
    Tensor.chunk: _chunk,
    torch.chunk: _chunk,
    Tensor.t: _turn,
    torch.t: _turn,
    Tensor.T.__get__: _turn,  # type: ignore[attr-defined]
    Tensor.mT.__get__: _turn,  # type: ignore[attr-defined]
    Tensor.transpose: _turn,
    torch.transpose: _turn,
    Tensor.to: _same,
    Tensor.type_as: _same,
    Tensor.float: lambda parameter: parameter if parameter.dtype == torch.float32 else None,
    Tensor.contiguous: lambda parameter, **_: parameter if not parameter.turned else None,
}
