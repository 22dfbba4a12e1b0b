"""Layers for a user's modules: over all rows at once under `vmap` or, where that fails, one row after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import vmap

from polyeps.engine.client_parameters import ClientParameter, ForwardPass
from polyeps.engine.contributions import Contribution, RowGradients
from polyeps.engine.layout import Layout
from polyeps.engine.module_mode import ModuleMode
from polyeps.engine.row_draws import RowDraws
from polyeps.engine.uses import contribution_of_uses
from polyeps.errors import InputError

# Held while a module has other parameters or another mode than the user gave it: threads may share a module.
RUNNING = threading.RLock()


@dataclass(frozen=True)
class Lender:
    """Every place where a module keeps a trained parameter, so that it can run with other ones for a while.

    A parameter that occurs in several places is lent to all of them.
    """

    module: nn.Module
    trained: dict[str, nn.Parameter] = field(init=False, repr=False, compare=False)
    _places: list[tuple[nn.Module, str, int]] = field(init=False, repr=False, compare=False)
    _tables: list[tuple[nn.Module, str, nn.Parameter]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        numbers = {parameter: number for number, parameter in enumerate(trained.values())}
        everywhere = [
            (part, name, parameter)
            for part in self.module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        object.__setattr__(self, "trained", trained)
        object.__setattr__(self, "_places", [(part, name, numbers[p]) for part, name, p in everywhere if p in numbers])
        # A frozen table with max_norm is changed by what is looked up in it.
        tables = [
            (part, name, p) for part, name, p in everywhere if p not in numbers and getattr(part, "max_norm", None)
        ]
        object.__setattr__(self, "_tables", tables)

    @contextmanager
    def lend(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Give the module these parameters, until gradients are computed: a checkpoint runs it again for them."""
        with RUNNING:
            before = [(part, name, part._parameters[name]) for part, name, _ in self._places]
            try:
                for part, name, number in self._places:
                    part._parameters[name] = cast(nn.Parameter, values[number])
                for part, name, table in self._tables:
                    part._parameters[name] = nn.Parameter(table.detach().clone(), requires_grad=False)
                yield
            finally:
                for part, name, own in [*before, *self._tables]:
                    part._parameters[name] = own

    @contextmanager
    def lend_copies(self, vector: Tensor) -> Iterator[None]:
        """Give the module copies of the parameters in a vector (d,); what it changes in place is forgotten."""
        parts = torch.split(vector, [parameter.numel() for parameter in self.trained.values()]) if self.trained else ()
        copies = [part.view(of.shape).clone() for part, of in zip(parts, self.trained.values(), strict=True)]
        for each in copies:
            each._is_param = True  # for modules that ask whether it is an nn.Parameter
        with self.lend(copies):
            yield


@dataclass(frozen=True)
class _Trace:
    """What a forward pass saves: the input rows, the outputs with their autograd graph, and the uses."""

    leaf: Tensor
    outputs: Tensor
    run: ForwardPass


@dataclass(frozen=True)
class VmapLayer:
    """Any module, run once over all rows through `vmap`, which cannot mix them.

    Inside it, functions with rules work on the clients' own weights (`client_parameters`).
    """

    module: nn.Module
    inputs: bool = True  # whether the gradients of the input rows can be asked for
    written: bool = False  # whether tensors that the module makes are each row's own, since it writes into them
    _lender: Lender = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lender", Lender(self.module))

    @property
    def size(self) -> int:
        return sum(self._sizes)

    @property
    def _trained(self) -> list[nn.Parameter]:
        return list(self._lender.trained.values())

    @property
    def _sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self._trained]

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, _Trace]:
        columns = list(torch.split(weights.detach(), self._sizes, dim=1)) or [weights]
        draws = layout.draws.again() if layout.draws is not None else RowDraws.fixed(layout.rows, rows.device)
        run = ForwardPass(layout, columns, [tuple(p.shape) for p in self._trained], draws)

        def one(row: Tensor) -> Tensor:
            run.level = torch._C._functorch.current_level()
            # A copy of the row: a module may work in place on its input.
            outputs = self.module(row[None].clone())
            return check_one_tensor(self.module, outputs, 1)[0]

        with torch.enable_grad():
            leaf = rows.detach()
            if self.inputs and rows.is_floating_point():
                leaf.requires_grad_()
            stand_ins = [ClientParameter.make(run, number) for number in range(len(self._trained))]
            with self._lender.lend(stand_ins), ModuleMode(draws, run, self.written):
                outputs: Tensor = vmap(one)(leaf)
        run.finish()
        return outputs.detach(), _Trace(leaf, outputs, run)

    def backward(
        self, _weights: Tensor, saved: Any, gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution | None]:
        wanted = inputs and saved.leaf.requires_grad
        onwards = saved.run.gradients(saved.outputs, gradients, saved.leaf if wanted else None)
        if not self._trained:
            return onwards, None
        return onwards, contribution_of_uses(layout, self._sizes, saved.run.uses)

    def floats_per_row(self, saved: Any) -> tuple[int, int]:
        """Return how many floats a row's activations take, and what is formed of its gradient, from one row's trace."""
        saved_sizes = _sizes_kept(saved.outputs)
        # the largest also lives as outputs, gradients and kernels' own copies at the same time; measured
        kept = sum(saved_sizes) + 3 * max(saved_sizes, default=0)
        run = saved.run
        _, contribution = self.backward(run.columns[0], saved, torch.ones_like(saved.outputs), run.layout, False)
        formed = 0 if contribution is None else contribution.formed
        return kept + sum(copy.numel() for copy in run.copies.values()), formed


@dataclass(frozen=True)
class LoopedLayer(VmapLayer):
    """A module that `vmap` cannot run, for instance because its branches depend on the data: a loop over rows."""

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Any]:
        draws = layout.draws if layout.draws is not None else RowDraws.fixed(layout.rows, rows.device)
        outputs = []
        with torch.no_grad():
            for place, (owner, row) in enumerate(zip(layout.owner.tolist(), rows, strict=True)):
                with self._lender.lend_copies(weights[owner]):
                    outputs.append(self._one(row, draws.of_row(place)))
        return torch.stack(outputs), (weights, rows, draws)

    def backward(
        self, _weights: Tensor, saved: Any, gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution | None]:
        weights, rows, draws = saved
        wanted = inputs and rows.is_floating_point()
        found = [
            self._gradients(weights[owner], row, gradient, wanted, draws.of_row(place))
            for place, (owner, row, gradient) in enumerate(zip(layout.owner.tolist(), rows, gradients, strict=True))
        ]
        onwards = torch.stack([of_row for _, of_row in found]) if wanted else None
        return onwards, RowGradients(layout, torch.stack([of for of, _ in found])) if self.size else None

    def floats_per_row(self, saved: Any) -> tuple[int, int]:
        return saved[1].numel(), self.size

    def _gradients(
        self, weights: Tensor, row: Tensor, gradient: Tensor, wanted: bool, draws: RowDraws
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weights and, if `wanted`, of the row."""
        with torch.enable_grad():
            leaf, start = weights.detach().clone().requires_grad_(), row.detach()
            if wanted:
                start = start.clone().requires_grad_()
            leaves = (leaf, start) if wanted else (leaf,)
            with self._lender.lend_copies(leaf):
                output = self._one(start, draws)
                found = leaf_gradients(output, leaves, gradient)
        filled = [torch.zeros_like(of) if by is None else by for of, by in zip(leaves, found, strict=True)]
        return filled[0], filled[-1]

    def _one(self, row: Tensor, draws: RowDraws) -> Tensor:
        with ModuleMode(draws):
            return check_one_tensor(self.module, self.module(row[None].clone()), 1)[0]


def _sizes_kept(outputs: Tensor) -> list[int]:
    """Return the sizes of the tensors that an autograd graph keeps."""
    seen: dict[int, int] = {}
    nodes = [outputs.grad_fn]
    known = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for each in [*saved, *getattr(node, "saved_tensors", ())]:
            if isinstance(each, Tensor):
                seen[each.data_ptr()] = max(seen.get(each.data_ptr(), 0), each.numel())
        new = {following for following, _ in node.next_functions} - known
        known |= new
        nodes += new
    return list(seen.values())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module and its parts into eval mode for a while."""
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


def check_one_tensor(module: nn.Module, outputs: object, count: int) -> Tensor:
    """Return the outputs of a module for `count` rows; refuse anything but one tensor with a row for each."""
    name = getattr(module, "__name__", type(module).__name__)
    if not isinstance(outputs, Tensor):
        raise InputError(
            f"{name} returns a {type(outputs).__name__}; it must return one tensor with a row per example: choose one"
            " of several with output, or wrap it in a module that picks one"
        )
    if not outputs.dim() or len(outputs) != count:
        raise InputError(
            f"{name} returns shape {tuple(outputs.shape)} for {count} examples; the first dimension must be that of the"
            " examples (batch_first=True for recurrent and attention modules)"
        )
    return outputs.float() if outputs.dtype == torch.float64 else outputs


def leaf_gradients(outputs: Tensor, leaves: Sequence[Tensor], by_outputs: Tensor | None = None) -> list[Tensor | None]:
    """Return the gradients of leaves by plain autograd; None where the outputs do not depend on one.

    Reentrant checkpoints work in `backward` alone, which writes gradients into the leaves.
    """
    if not outputs.requires_grad:
        return [None for _ in leaves]
    try:
        return list(torch.autograd.grad(outputs, leaves, by_outputs, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(outputs, by_outputs)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found
