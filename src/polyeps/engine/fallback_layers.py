"""Layers for a user's modules: over all rows at once under `vmap` or, where that fails, one row after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

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
    _trained: dict[str, nn.Parameter] = field(init=False, repr=False, compare=False)
    _places: list[tuple[nn.Module, str, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        numbers = {parameter: number for number, parameter in enumerate(trained.values())}
        places = [
            (part, name, numbers[parameter])
            for part in self.module.modules()
            for name, parameter in part._parameters.items()
            if parameter in numbers
        ]
        object.__setattr__(self, "_trained", trained)
        object.__setattr__(self, "_places", places)

    @property
    def size(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self._trained.values()]

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, _Trace]:
        columns = list(torch.split(weights.detach(), self._sizes, dim=1)) or [weights]
        draws = layout.draws.again() if layout.draws is not None else RowDraws.fixed(layout.rows, rows.device)
        run = ForwardPass(layout, columns, [tuple(p.shape) for p in self._trained.values()], draws)

        def one(row: Tensor) -> Tensor:
            run.level = torch._C._functorch.current_level()
            # A copy of the row: a module may work in place on its input.
            outputs = self.module(row[None].clone())
            return check_one_tensor(self.module, outputs, 1)[0]

        with torch.enable_grad():
            leaf = rows.detach()
            if self.inputs and rows.is_floating_point():
                leaf.requires_grad_()
            with RUNNING, self._with_parameters_of(run), ModuleMode(draws, run):
                outputs: Tensor = vmap(one)(leaf)
        run.finished = True
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

    @contextmanager
    def _with_parameters_of(self, run: ForwardPass) -> Iterator[None]:
        """Put stand-ins in the places of the module's parameters."""
        stand_ins = [ClientParameter.make(run, number) for number in range(len(self._trained))]
        before = [part._parameters[name] for part, name, _ in self._places]
        try:
            for part, name, number in self._places:
                part._parameters[name] = cast(nn.Parameter, stand_ins[number])
            yield
        finally:
            for (part, name, _), parameter in zip(self._places, before, strict=True):
                part._parameters[name] = parameter


@dataclass(frozen=True)
class LoopedLayer(VmapLayer):
    """A module that `vmap` cannot run, for instance because its branches depend on the data: a loop over rows."""

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Any]:
        draws = layout.draws if layout.draws is not None else RowDraws.fixed(layout.rows, rows.device)
        with torch.no_grad():
            outputs = [
                self._one(weights[owner], row, draws.of_row(place))
                for place, (owner, row) in enumerate(zip(layout.owner.tolist(), rows, strict=True))
            ]
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
            output = self._one(leaf, start, draws)
        leaves = (leaf, start) if wanted else (leaf,)
        if not output.requires_grad:
            return torch.zeros_like(leaf), torch.zeros_like(start)
        found = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
        filled = [torch.zeros_like(of) if by is None else by for of, by in zip(leaves, found, strict=True)]
        return filled[0], filled[-1]

    def _one(self, weights: Tensor, row: Tensor, draws: RowDraws) -> Tensor:
        parts = torch.split(weights, self._sizes) if self._trained else ()
        values = {name: part.view(p.shape) for (name, p), part in zip(self._trained.items(), parts, strict=True)}
        with RUNNING, ModuleMode(draws):
            outputs = call_module(self.module, values, row[None].clone())
        return check_one_tensor(self.module, outputs, 1)[0]


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
    return outputs


def call_module(module: nn.Module, values: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Return the outputs of a module whose parameters, by their names in `named_parameters`, have these values.

    Every place of a shared parameter is passed once: torch's own search passes a module that occurs twice two times,
    and does not restore it.
    """
    found = {parameter: values[name] for name, parameter in module.named_parameters() if name in values}
    places = {
        f"{path}.{name}" if path else name: found[parameter]
        for path, part in module.named_modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in found
    }
    return cast(Tensor, functional_call(module, places, (rows,), tie_weights=False))
