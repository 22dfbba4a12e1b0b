"""Checks of messages: of tasks before a client pays for anything, and of replies before a server uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyeps.core import ENTER, Algorithm, Payload, Spec, Specs, Task, check_name
from polyeps.errors import InputError, TaskRefused

MOST_ROUNDS = 10**6  # clients count rounds in float32, exactly up to 2^24
LARGEST = 1e9  # weight or direction a client accepts: squares and sums stay within float32
LARGEST_UPDATE = 1e6  # entry of a reply that a server uses: no single client can push the model out of bounds


def vector(size: int, bound: float | None = None) -> Spec:
    """Return the specification of `size` floats within ± `bound`, by default the most a client accepts."""
    limit = LARGEST if bound is None else bound
    return Spec((size,), "float32", -limit, limit)


def update(size: int) -> Spec:
    """Return the specification of `size` floats that a client sends."""
    return vector(size, LARGEST_UPDATE)


def whole_number(lowest: int, highest: int) -> Spec:
    """Return the specification of one integer."""
    return Spec((), "int64", lowest, highest)


def check_task(algorithm: Algorithm, task: Task) -> None:
    """Refuse a task with an unknown action, a bad header, or tensors other than the action takes."""
    try:
        _check_header(algorithm, task)
        action = algorithm.actions.get(task.action)
        _check_payload(task, {} if action is None else action.takes)
        if action is not None and action.fits is not None:
            action.fits(task.payload)
    except TaskRefused:
        raise
    except InputError as problem:
        raise TaskRefused(str(problem)) from None


def _check_header(algorithm: Algorithm, task: Task) -> None:
    if not isinstance(task.action, str) or task.action not in _known(algorithm):
        known = ", ".join(algorithm.actions)
        raise TaskRefused(
            f"the server asks for {ascii(task.action)[:80]}, which this algorithm does not know; it knows {known}"
        )
    check_name("the name of a run", task.run)
    if type(task.round) is not int or not 0 <= task.round < MOST_ROUNDS:
        raise TaskRefused(
            f"the round of a task must be a whole number from 0 to {MOST_ROUNDS - 1}, not {ascii(task.round)[:80]}"
        )
    named = isinstance(task.to, tuple) and all(isinstance(client, str) for client in task.to)
    if not named or len(set(task.to)) < len(task.to):
        raise TaskRefused("a task must name clients, each of them once; leave out names that are no text or come again")
    if algorithm.trust == "secure-sum" and task.action != ENTER and not task.summed:
        raise TaskRefused(f"{task.action!r} is only answered into secure sums, never in the clear; ask for a sum")
    if algorithm.trust != "secure-sum" and task.summed:
        raise TaskRefused(f"{task.action!r} is not made for secure sums; ask for replies")


def _known(algorithm: Algorithm) -> set[str]:
    return {*algorithm.actions, *([] if algorithm.round_price is None else [ENTER])}


def _check_payload(task: Task, takes: Specs) -> None:
    if not isinstance(task.payload, Mapping):
        raise TaskRefused(f"the payload of {task.action!r} must be named tensors, not {type(task.payload).__name__}")
    for name in task.payload:
        if name not in takes:
            raise TaskRefused(
                f"{task.action!r} takes {', '.join(takes) or 'no tensors'}, not {ascii(name)[:80]}; leave it out, or "
                "declare it in the action's `takes`"
            )
    for name, spec in takes.items():
        if name in task.payload:
            _check_tensor(name, task.payload[name], spec)
        elif not spec.optional:
            raise TaskRefused(f"{task.action!r} needs the tensor {name!r}, which is missing; send it")


def _check_tensor(name: str, tensor: Any, spec: Spec) -> None:
    if not _is_kind(tensor, spec.dtype) or not _is_shape(tensor.shape, spec.shape):
        shape = "×".join("any" if side is None else str(side) for side in spec.shape) or "a single number"
        found = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TaskRefused(f"{name!r} must be {shape} of {spec.dtype}, not {found}")
    if not tensor.numel():
        return
    low, high = (bound.item() for bound in torch.aminmax(tensor))  # both are NaN where a number is
    if not (spec.lowest <= low and high <= spec.highest):
        raise TaskRefused(
            f"{name!r} must lie between {spec.lowest:g} and {spec.highest:g}, not between {low:g} and {high:g}"
        )


def _is_kind(tensor: Any, dtype: str) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout is torch.strided and str(tensor.dtype) == f"torch.{dtype}"


def _is_shape(shape: torch.Size, wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        asked is None or side == asked for side, asked in zip(shape, wanted, strict=True)
    )


def usable_rows(payload: Payload, rows: int, gives: Specs | None) -> Tensor:
    """Return whether each of stacked replies is usable, (rows,) bool: finite, and as the action gives it.

    Without a specification, replies must be finite real numbers.
    """
    usable = torch.ones(rows, dtype=torch.bool)
    if gives is not None and set(payload) != set(gives):
        return ~usable
    for name, tensor in payload.items():
        spec = Spec((None,) * (tensor.ndim - 1), str(tensor.dtype)[6:]) if gives is None else gives[name]
        if tensor.is_complex() or not _is_kind(tensor, spec.dtype) or not _is_shape(tensor.shape, (rows, *spec.shape)):
            return torch.zeros_like(usable)
        if tensor.numel() and tensor.dtype is not torch.bool:
            low, high = torch.aminmax(tensor.reshape(rows, -1), dim=1)
            # In float64: as a float32, the largest bound would be infinite.
            usable &= ((low.double() >= spec.lowest) & (high.double() <= spec.highest)).cpu()
    return usable
