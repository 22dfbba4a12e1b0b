"""A user's class whose forward applies one module or function after the other, as a list of modules.

Such a class is the same as an nn.Sequential, so the layers' own rules apply without running the class's code in every
step. Anything else, such as a residual connection, is no chain.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from polyeps.engine.known_modules import is_unmodified

_FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    functional.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    "relu": nn.ReLU,
    torch.tanh: nn.Tanh,
    functional.tanh: nn.Tanh,
    "tanh": nn.Tanh,
    torch.sigmoid: nn.Sigmoid,
    functional.sigmoid: nn.Sigmoid,
    "sigmoid": nn.Sigmoid,
    functional.gelu: nn.GELU,
    functional.silu: nn.SiLU,
    functional.elu: nn.ELU,
    functional.selu: nn.SELU,
    functional.leaky_relu: nn.LeakyReLU,
    functional.max_pool2d: nn.MaxPool2d,
    functional.avg_pool2d: nn.AvgPool2d,
    functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}
_FLATTEN = (torch.flatten, "flatten")
_SHAPE = ("view", "reshape", torch.reshape)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return type(m).__module__.startswith("torch.nn.modules") and not isinstance(m, nn.Sequential)


def chain_of(module: nn.Module) -> list[nn.Module] | None:
    """Return the modules that a class applies one after the other, in the order of its parameters; None if it differs.

    Functions become modules without parameters.
    """
    if not is_unmodified(module):
        return None
    held = [each for part in module.modules() for each in (vars(part), *vars(part).values())]
    kept = [(each, copy.copy(each)) for each in held if type(each) in (dict, list, set)]
    try:
        graph = _Tracer().trace(module)
    except Exception:  # any error of user code on symbols, for instance a branch on data
        return None
    finally:  # symbols that the module has kept in its attributes or buffers
        for now_held, before in kept:
            now_held.clear()
            now_held.extend(before) if isinstance(now_held, list) else now_held.update(before)
    found: list[nn.Module] = []
    now: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            if now is not None:
                return None
            now = node
            continue
        if node.op == "output":
            if node.args[0] is not now:
                return None
            continue
        if node.op == "get_attr" or now is None or _is_count(node, now):
            if node.op == "get_attr":
                return None
            continue
        part = _part(module, node, now)
        if part is None:
            return None
        found.append(part)
        now = node
    ordered = [id(parameter) for part in found for parameter in part.parameters()]
    return found if ordered == [id(parameter) for parameter in module.parameters()] else None


def _part(module: nn.Module, node: fx.Node, now: fx.Node) -> nn.Module | None:
    """Return the module that a node applies to the one before it."""
    if not node.args or node.args[0] is not now:
        return None
    rest = node.args[1:]
    if node.op == "call_module":
        return module.get_submodule(str(node.target)) if not rest and not node.kwargs else None
    options = {name: value for name, value in node.kwargs.items() if name not in ("inplace", "return_indices")}
    if node.target in _FLATTEN:
        plain = (rest in ((1,), (1, -1)) and not options) or (not rest and options == {"start_dim": 1})
        return nn.Flatten() if plain else None
    if node.target in _SHAPE:
        sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
        if len(sizes) != 2 or options:
            return None
        counted = isinstance(sizes[0], fx.Node) and _is_count(sizes[0], now)
        # (-1, width) is the same wherever it keeps rows apart; checks refuse it elsewhere
        if (counted and sizes[1] == -1) or (sizes[0] == -1 and isinstance(sizes[1], int)):
            return nn.Flatten()
        return None
    made = _FUNCTIONS.get(node.target)
    numbers = [*rest, *options.values()]
    if made is None or any(isinstance(each, fx.Node | Tensor) for each in numbers) or node.kwargs.get("return_indices"):
        return None
    try:
        return made(*rest, **options)
    except TypeError:
        return None


def _is_count(node: fx.Node, now: fx.Node) -> bool:
    """Return whether a node is the number of rows, or the shape of which it is taken."""
    if node.target in ("size", "dim") and node.args in ((now, 0), (now,)):
        return True
    if node.target is len and node.args == (now,):
        return True
    if node.target is getattr and node.args == (now, "shape"):
        return True
    if getattr(node.target, "__name__", "") == "getitem" and node.args[1] == 0:
        shape = node.args[0]
        return isinstance(shape, fx.Node) and shape.target is not len and _is_count(shape, now)
    return False
