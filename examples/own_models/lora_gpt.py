"""A small GPT whose frozen weights are adapted by low-rank matrices (LoRA): 1 354 of 27 370 parameters are trained."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class LoRALinear(nn.Module):
    """A frozen linear layer, and a trained product of two low-rank matrices beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))  # zero: training starts with the frozen layer
        self.scale = scale

    def forward(self, values: Tensor) -> Tensor:
        added = functional.linear(functional.linear(values, self.down), self.up)
        found: Tensor = self.base(values) + self.scale * added
        return found


class Block(nn.Module):
    """Causal attention with adapted projections, and a frozen feed-forward layer."""

    def __init__(self, width: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width).requires_grad_(False)
        self.attention = LoRALinear(width, 3 * width, rank)
        self.output = nn.Linear(width, width).requires_grad_(False)
        self.before_mlp = nn.LayerNorm(width).requires_grad_(False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp.requires_grad_(False)

    def forward(self, values: Tensor) -> Tensor:
        count, length, width = values.shape
        parts = self.attention(self.before_attention(values)).chunk(3, dim=-1)
        query, key, value = (part.reshape(count, length, self.heads, -1).transpose(1, 2) for part in parts)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.output(found.transpose(1, 2).reshape(count, length, width))
        after: Tensor = values + self.mlp(self.before_mlp(values))
        return after


class LoRAGPT(nn.Module):
    """A decoder over the rows of an image, with a trained classifier of its last position."""

    def __init__(self, inputs: int, length: int, width: int, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Linear(inputs, width).requires_grad_(False)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width), requires_grad=False)
        self.blocks = nn.Sequential(*(Block(width, 4, 4) for _ in range(2)))
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.classifier = nn.Linear(width, classes)

    def forward(self, records: Tensor) -> Tensor:
        rows = records.flatten(1, -2)  # (n, rows, columns)
        found: Tensor = self.classifier(self.norm(self.blocks(self.tokens(rows) + self.positions))[:, -1])
        return found


def lora_gpt(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the module for records of a shape (..., rows, columns); load public weights into its frozen parts here."""
    return LoRAGPT(shape[-1], shape[-2], 32, classes)
