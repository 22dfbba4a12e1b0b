"""What a user is told of a module that runs one row after the other: which part, and why."""

from __future__ import annotations

import warnings

from torch import nn

from polyeps.engine.adapters import Adapted
from polyeps.engine.gradient_checks import name_of
from polyeps.errors import InputError


class HalfPrecisionError(Exception):
    """A module computes in bfloat16 or float16, whose digits depend on how many records are computed at once."""


def warn_slow(what: str, error: Exception, alone: bool = False) -> None:
    also = ", for predictions too" if alone else ""
    warnings.warn(f"{what} runs one row after the other{also}, which is slow: {_why(error)}", stacklevel=2)


def _why(error: Exception) -> str:
    """Return in plain words why `vmap` cannot run a module."""
    if isinstance(error, HalfPrecisionError):
        return "it computes in half precision; call float() on it, and leave autocast out"
    if isinstance(error, InputError):
        return "its gradients for several records at once are not what autograd gives"
    return next(
        (plain for words, plain in _REASONS.items() if words in str(error)),
        f"vmap cannot run it ({first_sentence(error)})",
    )


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error of torch's or of a user's."""
    lines = str(error).strip().splitlines()
    first = lines[0].partition(". ")[0] if lines else ""
    return first.rstrip(".") or type(error).__name__


_REASONS = {
    "data-dependent control flow": "it branches on a record's values; torch.where takes both branches",
    ".item()": "it turns a record's values into Python numbers",
    "dynamic shape": "the shape of a tensor depends on a record's values",
    "boolean mask": "the shape of a tensor depends on a record's values; use torch.where",
    "differently shaped": "the shape of a tensor depends on a record's values; use torch.where",
    "autograd.Function": "its autograd.Function has no setup_context and generate_vmap_rule = True",
    "does not have vmap support": "its autograd.Function does not set generate_vmap_rule = True",
    "accessing `data`": "it uses `.data` of a tensor; use detach()",
    "changes a parameter in place": "it changes a parameter in place; compute a new tensor",
    "escaped": "it is checkpointed, or keeps tensors of a record",
}


def slow_part(module: nn.Module, error: Exception) -> str:
    """Return the name of the innermost module in which an error was raised."""
    inner = module.module if isinstance(module, Adapted) else module
    paths = {id(part): path for path, part in inner.named_modules()}
    found, trace = name_of(module), error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            found = f"{name_of(module)} (because of {type(owner).__name__} at '{paths[id(owner)]}')"
        trace = trace.tb_next
    return found
