"""A user's module behind one tensor: named inputs are cut out of a block, and one tensor of its outputs is picked."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polyeps.data.named_inputs import Inputs
from polyeps.errors import InputError

Choice = str | int | None  # of several outputs: a key or a place; None: the logits


class Adapted(nn.Module):
    """A module with several inputs or outputs, as a function of rows (T, ...) that returns one tensor (T, ...)."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs | None = None,
        output: Choice = None,
        alone: bool = False,
        squeezed: bool = False,
    ) -> None:
        super().__init__()
        self.__name__ = type(module).__name__  # that messages call it by
        self.module = module
        self.inputs = inputs
        self.output = output
        self.alone = alone  # whether the module gets one record at a time, since it branches on all of a batch
        self.squeezed = squeezed  # whether it returns no first dimension for one record, as after squeeze()

    def forward(self, rows: Tensor) -> Tensor:
        """Return the picked outputs for rows (T, W), which hold all inputs of a record one after the other."""
        if self.alone and len(rows) != 1:
            return torch.cat([self(row[None]) for row in rows])
        outputs = picked(self.module, self._called(rows), self.output)
        return outputs[None] if self.squeezed and len(rows) == 1 else outputs

    def _called(self, rows: Tensor) -> object:
        if self.inputs is None:
            return self.module(rows)
        found = _cut(self.inputs, rows)
        if "0" in found:
            return self.module(*found.values())
        return self.module(found) if _takes_one_batch(self.module, found) else self.module(**found)


def _cut(inputs: Inputs, rows: Tensor) -> dict[str, Tensor]:
    """Return the inputs of rows (T, W) by name, each in its own shape and type."""
    parts = torch.split(rows, inputs.sizes, dim=1)
    return {
        part.name: numbers.reshape(len(rows), *part.shape).to(getattr(torch, part.kind)).contiguous()
        for part, numbers in zip(inputs.parts, parts, strict=True)
    }


def _takes_one_batch(module: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Return whether a module takes all its inputs in one dictionary, as `forward(self, batch)`."""
    try:
        wanted = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # of compiled code
        return False
    needed = [each.name for each in wanted if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    named = any(each.kind is each.VAR_KEYWORD or each.name in inputs for each in wanted)
    return len(needed) == 1 and not named


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was given: compiled code cannot be run under `vmap`."""
    found = getattr(module, "_orig_mod", module)
    return found if isinstance(found, nn.Module) else module


def adapted(module: nn.Module, inputs: Inputs | None = None, output: Choice = None) -> nn.Module:
    """Return a module from one tensor to one tensor; the module itself, if it needs nothing."""
    module = uncompiled(module)
    if isinstance(module, Adapted) or (inputs is None and output is None):
        return module
    return Adapted(module, inputs, output)


def one_by_one(module: nn.Module) -> Adapted:
    """Return a module that gets one record at a time, in training and for predictions."""
    if isinstance(module, Adapted):
        return Adapted(module.module, module.inputs, module.output, True, module.squeezed)
    return Adapted(module, alone=True)


def unsqueezed(module: nn.Module) -> Adapted:
    """Return a module whose outputs for one record have the first dimension that `squeeze()` takes away."""
    if isinstance(module, Adapted):
        return Adapted(module.module, module.inputs, module.output, module.alone, True)
    return Adapted(module, squeezed=True)


def picked(module: nn.Module, outputs: object, choice: Choice) -> Tensor:
    """Return the tensor to train of what a module returns: the chosen one, the logits, or the only one there is."""
    name = type(module).__name__
    if isinstance(outputs, Tensor):
        if choice not in (None, "logits", 0):  # some modules return a tensor in eval mode only
            raise InputError(f"{name} returns one tensor, so there is nothing to choose; leave out output")
        return outputs
    held = _held(outputs)
    if held is None:
        raise InputError(f"{name} returns a {type(outputs).__name__}; it must return tensors with a row per example")
    if choice is not None:
        places = list(held)
        key = places[choice] if isinstance(choice, int) and 0 <= choice < len(places) else choice
        found = held.get(str(key))
        if not isinstance(found, Tensor):
            raise InputError(f"{name} returns no tensor {choice!r}; output must be one of {_listed(held)}")
    else:
        tensors = [each for each in held.values() if isinstance(each, Tensor)]
        found = held.get("logits", tensors[0] if len(held) == 1 and tensors else None)
    if not isinstance(found, Tensor):
        raise InputError(
            f"{name} returns a {type(outputs).__name__} of {len(held)}, none of them called logits; say which one to "
            f"train as output, one of {_listed(held)}, or wrap the module in one that returns a tensor"
        )
    return found


def _held(outputs: object) -> dict[str, object] | None:
    """Return what a module returned by key or by place."""
    if isinstance(outputs, Mapping):
        return {str(key): value for key, value in outputs.items()}
    if isinstance(outputs, tuple | list):
        names = getattr(outputs, "_fields", range(len(outputs)))
        return {str(key): value for key, value in zip(names, outputs, strict=True)}
    if hasattr(outputs, "logits"):
        return {"logits": outputs.logits}
    if dataclasses.is_dataclass(outputs):
        return {each.name: getattr(outputs, each.name) for each in dataclasses.fields(outputs)}
    return None


def _listed(held: Mapping[str, object]) -> str:
    names = [name if name.isdecimal() else repr(name) for name, each in held.items() if isinstance(each, Tensor)]
    return ", ".join(names) or "none (there is no tensor among them)"
