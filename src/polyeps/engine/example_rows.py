"""Rows to check a user's module on: random ones of several magnitudes, and milder ones in case it refuses those."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyeps.data.named_inputs import Inputs

CHECKED_ROWS = 5  # two of one client and three of another
MAGNITUDES = (0.3, 1.0, 30.0, 3.0, 0.03)


def candidate_rows(
    module: nn.Module, shape: tuple[int, ...], kind: torch.dtype, example: Tensor | None
) -> list[Tensor]:
    """Return rows to check a model on: random ones of several magnitudes, and milder ones in case it refuses those."""
    generator = torch.Generator().manual_seed(1)
    size = (CHECKED_ROWS, *shape)
    inputs = getattr(module, "inputs", None)
    if isinstance(inputs, Inputs):
        return _named_rows(module, inputs, example, generator)
    if not kind.is_floating_point:
        if example is not None:
            picked = torch.randint(0, example.numel(), size, generator=generator)
            return [example.flatten().cpu()[picked], example[torch.arange(CHECKED_ROWS) % len(example)].cpu()]
        tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
        return [torch.randint(0, min(tables, default=2), size, generator=generator).to(kind)]
    magnitudes = torch.tensor(MAGNITUDES).reshape(-1, *(1,) * len(shape))
    rows = [torch.randn(size, generator=generator) * magnitudes, torch.rand(size, generator=generator)]
    if example is not None:
        rows.append(example[torch.arange(CHECKED_ROWS) % len(example)].cpu())
    return rows


def _named_rows(module: nn.Module, inputs: Inputs, example: Tensor | None, generator: torch.Generator) -> list[Tensor]:
    """Return blocks of named inputs; whole numbers are the example's or, where a name says mask or type, 0 and 1."""
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    shown = [None] * len(inputs.parts) if example is None else torch.split(example.cpu(), inputs.sizes, dim=1)
    blocks = []
    for mild in (False, True):
        columns = []
        for part, width, own in zip(inputs.parts, inputs.sizes, shown, strict=True):
            size = (CHECKED_ROWS, width)
            if part.kind == "float32":
                wild = torch.randn(size, generator=generator) * torch.tensor(MAGNITUDES)[:, None]
                columns.append(torch.rand(size, generator=generator) if mild else wild)
            elif own is not None:
                columns.append(own.flatten()[torch.randint(0, own.numel(), size, generator=generator)])
            else:
                flags = mild or part.kind == "bool" or any(word in part.name for word in ("mask", "type"))
                drawn = torch.randint(0, 2 if flags else min(tables, default=2), size, generator=generator)
                drawn[:, :1] = 1  # a mask that hides everything is no example
                columns.append(drawn)
        blocks.append(torch.cat([each.to(getattr(torch, inputs.kind)) for each in columns], dim=1))
    if example is not None:
        blocks.append(example[torch.arange(CHECKED_ROWS) % len(example)].cpu())
    return blocks
