"""What a user's module consists of: parts that no record's gradient exists for, and numbers of other types."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn

from polyeps.engine.fallback_layers import evaluating
from polyeps.errors import InputError

_TRAINED = (torch.float32, torch.float64)


def check_module(module: nn.Module) -> None:
    """Refuse parts that mix rows of a batch, or that cannot be run with other parameters; name a remedy."""
    for name, part in module.named_modules():
        kind = type(part).__name__
        where = f"{kind} at '{name}'" if name else kind
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None):
            raise InputError(
                f"{where} mixes the examples of a batch, so no example's gradient can be clipped on its own;"
                " use GroupNorm or LayerNorm instead, or call eval() on it to keep its statistics"
            )
        if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats:
            raise InputError(f"{where} keeps statistics across examples; build it with track_running_stats=False")
        if isinstance(part, torch.jit.ScriptModule):
            raise InputError(f"{where} is compiled, so its parameters cannot be lent; give the module it was made from")
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            raise InputError(
                f"{where} is compiled by torch.compile; give the module without, and compile it afterwards"
            )
        if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise InputError(f"{where} divides batches among devices, which is done here by client; give its .module")
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise InputError(f"parameter '{name}' has no shape yet; run the module once before making a model of it")
        if parameter.requires_grad and parameter.is_complex():
            raise InputError(
                f"parameter '{name}' is {parameter.dtype}, but models consist of real numbers; keep "
                "torch.view_as_real(...) of it as the parameter, and call torch.view_as_complex in forward"
            )
        if parameter.requires_grad and parameter.dtype not in _TRAINED:
            raise InputError(f"parameter '{name}' is {parameter.dtype}; models are float32: call float() on the module")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(f"parameter '{name}' has hooks on its gradient, which are not run here; remove them")


def in_float32(module: nn.Module) -> nn.Module:
    """Return a module with trained parameters in float32: a copy, with a warning, if they are float64."""
    wide = [name for name, part in module.named_parameters() if part.requires_grad and part.dtype == torch.float64]
    if not wide:
        return module
    warnings.warn(
        f"parameter '{wide[0]}' of {type(module).__name__} is float64; a copy of the module in float32 is trained",
        stacklevel=2,
    )
    try:
        return copy.deepcopy(module).float()
    except Exception as error:  # of user code
        raise InputError(
            f"parameter '{wide[0]}' is float64, and the module cannot be copied ({error}); call float() on it"
        ) from error


def has_lazy_parts(module: nn.Module) -> bool:
    """Return whether parameters or buffers get their shape from the first record only."""
    return any(nn.parameter.is_lazy(each) for each in [*module.parameters(), *module.buffers()])


def give_shapes(module: nn.Module, candidates: list[Tensor]) -> None:
    """Run a module with lazy parts once."""
    for rows in candidates:
        try:
            with torch.no_grad(), evaluating(module), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that lazy modules are new
                module(rows.clone())
        except Exception:  # of user code: what is wrong with it is said by the checks
            continue
        return
