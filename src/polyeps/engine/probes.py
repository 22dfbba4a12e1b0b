"""What is refused of a user's module by its parts alone, and the rows on which the rest of it is checked."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyeps.engine.checking import MAGNITUDES, ROWS
from polyeps.errors import InputError


def check_module(module: nn.Module) -> None:
    """Refuse what mixes the rows of a batch, draws from a global generator or has no float32 weights, with a remedy."""
    for name, part in module.named_modules():
        kind = type(part).__name__
        where = f"{kind} at '{name}'" if name else kind
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise InputError(
                f"{where} mixes the examples of a batch, so no example's gradient can be clipped on its own;"
                " use GroupNorm or LayerNorm instead"
            )
        if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats:
            raise InputError(f"{where} keeps statistics across examples; build it with track_running_stats=False")
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and part.training:
            raise InputError(
                f"{where} draws from torch's global generator, so runs could not be repeated;"
                " remove it (clipping and noise regularise already), set p=0 or call eval() on the module"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and (part.max_norm is not None or part.sparse):
            raise InputError(f"{where} has max_norm or sparse gradients, which change weights as a whole; use neither")
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise InputError(f"parameter '{name}' has no shape yet; run the module once before making a model of it")
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise InputError(f"parameter '{name}' is {parameter.dtype}; models are float32: call float() on the module")
        if parameter._backward_hooks:
            raise InputError(f"parameter '{name}' has hooks on its gradient, which are not run here; remove them")


def candidates(module: nn.Module, shape: tuple[int, ...], kind: torch.dtype, example: Tensor | None) -> list[Tensor]:
    """Rows to check a model on: random ones of several magnitudes, and milder ones should it take no such numbers."""
    generator = torch.Generator().manual_seed(1)
    size = (ROWS, *shape)
    if not kind.is_floating_point:
        if example is not None:
            picked = torch.randint(0, example.numel(), size, generator=generator)
            return [example.flatten().cpu()[picked], example[torch.arange(ROWS) % len(example)].cpu()]
        tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
        return [torch.randint(0, min(tables, default=2), size, generator=generator).to(kind)]
    magnitudes = torch.tensor(MAGNITUDES).reshape(-1, *(1,) * len(shape))
    rows = [torch.randn(size, generator=generator) * magnitudes, torch.rand(size, generator=generator)]
    if example is not None:
        rows.append(example[torch.arange(ROWS) % len(example)].cpu())
    return rows
