"""Modules that may run by a batched rule: torch's own, unmodified.

Tests on fixed inputs cannot prove that a user's module treats the rows of a batch independently. So the modules known
to do so are listed here, and everything else runs one row at a time. A module of a listed type counts as unknown if it
has hooks, parametrizations, a `forward` of its own or other parameters than its type.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn


def _types(names: str) -> frozenset[type[nn.Module]]:
    return frozenset(getattr(nn, name) for name in names.split())


# Row-wise whatever they hold, as long as their arguments say nothing else.
_ELEMENTWISE = _types(
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish ReLU ReLU6 SELU SiLU "
    "Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Threshold"
)
_POOLING = _types(
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d "
    "AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d"
)
_DROPOUT = _types("AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout")
_FROZEN = _types("Conv1d Conv2d Conv3d Embedding GroupNorm LayerNorm Linear")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_unmodified(module: nn.Module) -> bool:
    """Return whether a module and its parts do what their types do: no hooks, no methods replaced on an instance."""
    return all(is_unmodified_itself(part) for part in module.modules())


def has_parameters(module: nn.Module, **shapes: tuple[int, ...] | None) -> bool:
    """Return whether a module has exactly these parameters, in this order and shape; None: no such parameter."""
    expected = [(name, shape) for name, shape in shapes.items() if shape is not None]
    return [(name, tuple(p.shape)) for name, p in module.named_parameters(remove_duplicate=False)] == expected


def is_row_wise(module: nn.Module) -> bool:
    """Return whether a module without trainable parameters is known to treat rows independently."""
    kind = type(module)
    if not is_unmodified(module):
        return False
    if kind in _ELEMENTWISE or kind in _FROZEN:
        return True
    if kind in _POOLING:
        return not getattr(module, "return_indices", False)
    if kind in _DROPOUT:
        return not module.training or getattr(module, "p", 1.0) == 0
    if isinstance(module, nn.Flatten) and kind is nn.Flatten:
        return module.start_dim >= 1
    if isinstance(module, nn.Unflatten) and kind is nn.Unflatten:
        return isinstance(module.dim, int) and module.dim >= 1
    return False


def frozen_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module without parameters, unaffected by later hooks or modes of the original."""
    if next(module.parameters(), None) is not None:
        return module
    kept = copy.deepcopy(module).eval()
    if getattr(kept, "inplace", False):
        kept.inplace = False  # type: ignore[assignment]
    return kept


def shares_parameters(names: Iterable[tuple[str, nn.Parameter]]) -> bool:
    """Return whether a parameter occurs under two names."""
    parameters = [id(parameter) for _, parameter in names]
    return len(set(parameters)) < len(parameters)


def is_unmodified_itself(part: nn.Module) -> bool:
    """Return whether a module, apart from its submodules, does what its type does."""
    if any(getattr(part, hooks) for hooks in _HOOKS):
        return False
    own = vars(part)
    replaced = any(callable(getattr(type(part), name, None)) for name in own)
    return not replaced and own.get("_compiled_call_impl") is None
