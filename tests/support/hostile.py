"""A search for weights and rows under which one record moves a clipped sum by more than its clip.

Every candidate is a client of its own, so that a whole population is judged in three calls of the engine: with all
rows, with one of them masked and with it removed. The best are kept, changed and tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyeps.engine.layout import lay_out
from polyeps.engine.losses import Loss
from polyeps.engine.network import Network, add_gradients

ROWS = 3  # of every candidate; the first is the one that comes and goes


@dataclass
class Population:
    """Candidates: weights (n, d), rows (n * ROWS, ...), labels (n * ROWS,) and clips (n,)."""

    models: Tensor
    rows: Tensor
    labels: Tensor
    clips: Tensor


def contributions(network: Network, loss: Loss, tried: Population) -> Tensor:
    """What the first row of every candidate adds to its clipped sum, in clips (n,)."""
    clients = len(tried.models)
    places = torch.arange(clients * ROWS).view(clients, ROWS)
    masked = (places != places[:, :1]).float()
    whole = _sums(network, loss, tried, places, None)
    others = (_sums(network, loss, tried, places, masked.flatten()), _sums(network, loss, tried, places[:, 1:], None))
    moved = torch.stack([torch.linalg.vector_norm(whole - without, dim=1) for without in others]).amax(0)
    assert not moved.isnan().any(), "a row that is no number reached the sum"
    return moved / tried.clips.double()


def _sums(network: Network, loss: Loss, tried: Population, places: Tensor, valid: Tensor | None) -> Tensor:
    """The clipped sums (n, d) over the rows at places (n, w)."""
    clients, width = places.shape
    layout = lay_out(clients, [0, clients], np.array([width]), torch.device("cpu"))
    into = torch.zeros_like(tried.models)
    rows, labels = tried.rows[places.flatten()], tried.labels[places.flatten()]
    with torch.no_grad():
        add_gradients(network, loss, tried.models, rows, labels, layout, valid, tried.clips, into)
    return into.double()


def worst_contribution(
    network: Network, loss: Loss, start: Population, sizes: list[int], seed: int, generations: int = 12
) -> float:
    """The largest contribution found, in clips, by changing weights (in parts of these sizes), rows and clips."""
    generator = torch.Generator().manual_seed(seed)
    now, found = start, contributions(network, loss, start)
    for _ in range(generations):
        best = found.topk(max(1, len(found) // 4)).indices
        parents = best[torch.randint(0, len(best), (len(found),), generator=generator)]
        tried = _changed(now, parents, sizes, generator)
        values = contributions(network, loss, tried)
        better = values > found
        found = torch.where(better, values, found)
        now = _chosen(better, tried, now)
    return float(found.max())


def scattered(shape: tuple[int, ...], columns: list[int], generator: torch.Generator) -> Tensor:
    """Normal numbers (n, d); every part of a row has a magnitude of its own, between 1e-20 and 1e20."""
    parts = torch.split(torch.randn(shape, generator=generator), columns, dim=1)
    return torch.cat([part * _magnitude(len(part), 20, generator) for part in parts], dim=1)


def _magnitude(count: int, decades: float, generator: torch.Generator) -> Tensor:
    wild = torch.rand(count, 1, generator=generator) < 0.5  # the other half is ordinary
    powers = (2 * torch.rand(count, 1, generator=generator) - 1) * torch.where(wild, decades, 1.0)
    return 10**powers


def _changed(now: Population, parents: Tensor, sizes: list[int], generator: torch.Generator) -> Population:
    clients = len(parents)
    models = now.models[parents]
    steps = 10 ** (-6 * torch.rand(clients, 1, generator=generator))
    models = models + steps * models.abs().mean(1, keepdim=True) * torch.randn(models.shape, generator=generator)
    scales = torch.cat([_magnitude(clients, 2, generator).expand(-1, size) for size in sizes], dim=1)
    rescaled = torch.rand(clients, 1, generator=generator) < 0.3
    models = torch.where(rescaled, models * scales, models)
    rows = now.rows.view(clients, ROWS, -1)[parents]
    if rows.is_floating_point():
        rows = rows * (1 + steps[:, :, None] * torch.randn(rows.shape, generator=generator))
        rows = torch.where(rescaled[:, :, None], rows * _magnitude(clients, 2, generator)[:, :, None], rows)
    labels = now.labels.view(clients, ROWS)[parents].flatten()
    clips = now.clips[parents]
    return Population(models, rows.view_as(now.rows), labels, clips)


def _chosen(better: Tensor, tried: Population, now: Population) -> Population:
    by_row = better.repeat_interleave(ROWS)
    rows = torch.where(by_row.reshape(-1, *(1,) * (now.rows.dim() - 1)), tried.rows, now.rows)
    return Population(
        torch.where(better[:, None], tried.models, now.models),
        rows,
        torch.where(by_row, tried.labels, now.labels),
        torch.where(better, tried.clips, now.clips),
    )
