"""Which modules may run by a batched rule: torch's own, as torch made them.

Fixed probes cannot prove that a user's code treats the rows of a batch apart. So the modules known to do so are listed
here, and everything else runs one row at a time. A module of a listed type counts as another one once it has hooks,
parametrizations, a `forward` of its own or other parameters than its type has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn

# Modules that treat the rows of a batch apart whatever they hold, as long as their arguments say nothing else.
_ELEMENTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
_POOLING = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
)
_DROPOUT = (nn.AlphaDropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_FROZEN = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.Linear)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_unmodified(module: nn.Module) -> bool:
    """Whether a module and its parts do what their types do: no hooks, no method replaced on the instance."""
    return all(is_unmodified_itself(part) for part in module.modules())


def has_parameters(module: nn.Module, **shapes: tuple[int, ...] | None) -> bool:
    """Whether a module has exactly these parameters, in this order and these shapes; None: it has none by that name."""
    expected = [(name, shape) for name, shape in shapes.items() if shape is not None]
    return [(name, tuple(p.shape)) for name, p in module.named_parameters(remove_duplicate=False)] == expected


def is_row_wise(module: nn.Module) -> bool:
    """Whether a module without trainable parameters is known to treat rows apart: then it runs on all at once."""
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
    """A copy of a module without parameters that no later hook or mode of the original reaches."""
    if next(module.parameters(), None) is not None:
        return module
    kept = copy.deepcopy(module).eval()
    if getattr(kept, "inplace", False):
        kept.inplace = False  # type: ignore[assignment]
    return kept


def shares_parameters(names: Iterable[tuple[str, nn.Parameter]]) -> bool:
    """Whether a parameter occurs under two names."""
    parameters = [id(parameter) for _, parameter in names]
    return len(set(parameters)) < len(parameters)


def is_unmodified_itself(part: nn.Module) -> bool:
    """Whether a module, leaving its parts aside, does what its type does."""
    if any(getattr(part, hooks) for hooks in _HOOKS):
        return False
    own = vars(part)
    replaced = any(callable(getattr(type(part), name, None)) for name in own)
    return not replaced and own.get("_compiled_call_impl") is None
