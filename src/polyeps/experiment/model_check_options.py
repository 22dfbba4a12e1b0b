"""What the options of `polyeps model check` say of a module: its inputs, outputs, targets and loss."""

from __future__ import annotations

from polyeps.data.named_inputs import Inputs, NamedInput
from polyeps.data.targets import LOSS_TARGETS, Target
from polyeps.engine.losses import Loss
from polyeps.engine.target_losses import LOSSES
from polyeps.errors import InputError
from polyeps.experiment.model_choice import GivenToModel


def given_by(
    inputs: list[str], target: Target, positions: str | None, classes: int, loss: Loss | str | None, output: str | None
) -> GivenToModel:
    """Return what options say of a module's inputs, such as "input_ids=128:int64", its targets, loss and output."""
    parts = []
    for text in inputs:
        name, equals, rest = text.partition("=")
        size, _, kind = rest.partition(":")
        if not equals:
            raise InputError(f"--input is {text!r}; write NAME=SHAPE, or NAME=SHAPE:int64 for whole numbers")
        parts.append(NamedInput(name, parse_shape(size, "--input"), kind or "float32"))
    if (positions is not None) != (target == "sequence"):
        raise InputError("--positions and --target sequence belong together: give both, or neither")
    shapes: dict[str, tuple[int, ...]] = {"class": (), "soft": (classes,), "labels": (classes,)}
    shapes["number"] = (classes,) if classes > 1 else ()
    wanted = shapes[target] if positions is None else parse_shape(positions, "--positions")
    if isinstance(loss, str):
        if target not in LOSS_TARGETS.get(loss, ()):
            known = ", ".join(name for name, targets in LOSS_TARGETS.items() if target in targets)
            raise InputError(f"--loss is {loss!r}; for --target {target} there are {known}, or your own MODULE:NAME")
        loss = LOSSES[loss]
    choice = int(output) if output is not None and output.isdecimal() else output
    return GivenToModel(Inputs(tuple(parts)) if parts else None, choice, loss, target, wanted)


def parse_shape(text: str, option: str = "--shape") -> tuple[int, ...]:
    """Return the shape of a record, such as "3,32,32".

    >>> parse_shape("3,32,32")
    (3, 32, 32)
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InputError(f"{option} is {text!r}; write whole numbers above 0 with commas between them, such as 3,32,32")
    return found
