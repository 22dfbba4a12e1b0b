"""Attacks on clipping: a search for weights and records under which one record contributes more than the clip.

A server may send any weights, and a record may hold any values. The search tries weights of every magnitude, layer by
layer, and weights moved until large gradients nearly cancel; records that repeat themselves, are empty, tiny, huge, or
not finite. A contribution is the norm of what is added to the sum, in float64, over the clip; NaN counts as infinite.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian
from polyeps.audit.results import Attack, Effort, Evidence
from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.network import add_gradients
from polyeps.mechanisms.clipping import clip_to_norm
from polyeps.models import MODELS, Model, Slice

_DELTA = 1e-5
_ROOM = 1e-6  # beyond the clip, for rounding
_NUMBERS = 1 << 19  # weights tried at a time
_ENOUGH = 2.0  # clips of one record, after which there is nothing left to search for
_CLASSES = 2  # labels that every model has
# features of a record
_EXTREMES = (0.0, 1e-38, 1e-30, 1e-25, 1e-22, 1e-12, 1.0, 1e6, 1e15, 1e22, 3e38, math.inf, math.nan)
_TOKENS = 20  # the vocabulary of models of texts
Candidates = tuple[Tensor, Tensor, Tensor]  # weights (n, d), a record (n, ...) and a label (n,) for each


def contributions(model: Model, weights: Tensor, rows: Tensor, labels: Tensor, clip: float) -> Tensor:
    """Return the contribution of each record (n, ...), under its own weights (n, d), in clips, (n,) float64."""
    lengths = torch.linalg.vector_norm(_added(model, weights, rows, labels, clip), dim=1)
    return torch.nan_to_num(lengths / clip, nan=math.inf)


def _added(model: Model, weights: Tensor, rows: Tensor, labels: Tensor, clip: float | None) -> Tensor:
    """Return each record's gradient as the engine adds it, (n, d) float64."""
    count = len(rows)
    layout = Layout(count, (RowGroup(0, count, 1, 0),), torch.arange(count))
    into = torch.zeros(count, model.size)
    clips = None if clip is None else torch.full((count,), clip)
    with torch.no_grad():
        add_gradients(model.network, model.loss, weights, rows, labels, layout, None, clips, into)
    return into.double()


def search(model: Model, clip: float, turns: int, generator: torch.Generator) -> float:
    """Return the most clips that one record was found to contribute."""
    count = max(4, min(256, _NUMBERS // model.size))
    worst = 0.0
    for turn in range(2 * turns):
        candidates = (_sure if turn % 2 else _any)(model, count, generator)
        worst = max(worst, float(contributions(model, *candidates, clip).max()))
    for part, after in pairwise(_matrices(model)):
        if worst < _ENOUGH:
            worst = max(worst, _cancelled(model, part, after, clip, turns, generator))
    return worst


def _any(model: Model, count: int, generator: torch.Generator) -> Candidates:
    """Return weights and records of any magnitude; half of the models are usual ones."""
    weights = torch.randn(count, model.size, generator=generator)
    usual = torch.rand(count, 1, generator=generator) < 0.5
    for part in model.slices.values():
        power = torch.randint(-30, 31, (count, 1), generator=generator).float()
        weights[:, part.start : part.stop] *= torch.where(usual, 1.0, 10.0**power)
    rows = _records(model, count, generator)
    if rows.is_floating_point():
        extreme = torch.tensor(_EXTREMES)[torch.randint(0, len(_EXTREMES), (count,), generator=generator)]
        usual = torch.rand(count, generator=generator) < 0.5
        rows = rows * torch.where(usual, 1.0, extreme).reshape(-1, *(1,) * len(model.input_shape))
    return weights, rows, _labels(count, generator)


def _sure(model: Model, count: int, generator: torch.Generator) -> Candidates:
    """Return large records under models that are sure of them: large inputs times tiny output gradients."""
    weights, rows = torch.randn(count, model.size, generator=generator), _records(model, count, generator)
    matrices = _matrices(model)
    first, last = matrices[0], matrices[-1]
    if rows.is_floating_point():
        size = 10.0 ** (12 + 7 * torch.rand(count, 1, generator=generator))
        rows = rows * size.reshape(-1, *(1,) * len(model.input_shape))
        weights[:, first.start : first.stop] /= size
    weights[:, last.start : last.stop] *= 30 * torch.rand(count, 1, generator=generator)
    return weights, rows, _labels(count, generator)


def _matrices(model: Model) -> list[Slice]:
    return [part for part in model.slices.values() if len(part.shape) > 1]


def _labels(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, _CLASSES, (count,), generator=generator)


def _records(model: Model, count: int, generator: torch.Generator) -> Tensor:
    """Return usual records, or texts of a few repeated tokens."""
    if model.input_type == torch.float32:
        return torch.randn(count, *model.input_shape, generator=generator)
    few = torch.randint(0, _TOKENS, (count, 3), generator=generator)
    among = torch.randint(1, 4, (count, 1), generator=generator)
    return few.gather(1, torch.randint(0, 3, (count, *model.input_shape), generator=generator) % among)


def _cancelled(model: Model, part: Slice, after: Slice, clip: float, turns: int, generator: torch.Generator) -> float:
    """Search for weights under which large gradients of one tensor nearly cancel, where a norm by cancellation fails.

    The tensor is made small and the matrix after it large, which keeps the outputs and makes the tensor's gradients
    large. That matrix keeps one row, so that all gradients point the same way and can cancel. Then weights are moved,
    by less and less, as long as the tensor's own gradient becomes shorter.
    """
    count = max(2, min(64, _NUMBERS // model.size))
    scale = 10.0 ** torch.randint(2, 10, (count, 1), generator=generator).float()
    weights = torch.randn(count, model.size, generator=generator)
    weights[:, part.start : part.stop] /= scale
    matrix = torch.unflatten(weights[:, after.start : after.stop], 1, (after.shape[0], -1))
    matrix[:, 1:] = 0.0
    matrix *= scale[:, :, None]
    rows, labels = _records(model, count, generator), _labels(count, generator)
    shortest = torch.full((count,), math.inf, dtype=torch.float64)
    worst, step = 0.0, 0.3
    for _ in range(20 * turns):
        moved = weights * (1 + step * torch.randn(weights.shape, generator=generator))
        length = torch.linalg.vector_norm(_added(model, moved, rows, labels, None)[:, part.start : part.stop], dim=1)
        better = (length < shortest) & (length > 0)
        weights, shortest = torch.where(better[:, None], moved, weights), torch.where(better, length, shortest)
        step = max(1e-7, step * 0.85)
        worst = max(worst, float(contributions(model, weights, rows, labels, clip).max()))
        if worst >= _ENOUGH:
            break
    return worst


def _evidence(ratio: float) -> Evidence:
    """Return the ε of Gaussian noise made for one clip, where a record moves the sum by `ratio` clips."""
    certified = epsilon(Gaussian(1.0), _DELTA)
    if ratio <= 1 + _ROOM:
        return Evidence(certified, certified, min(certified, epsilon(Gaussian(1 / max(ratio, 1e-3)), _DELTA)), _DELTA)
    audited = epsilon(Gaussian(1 / ratio), _DELTA) if ratio < 1e3 else math.inf
    return Evidence(certified, certified, audited, _DELTA)


def _of_model(model: str, size: dict[str, Any], clip: float, turns: int, effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed_for())
    return _evidence(search(MODELS[model](**size), clip, effort.trials(turns), generator))


def _of_updates(effort: Effort) -> Evidence:
    """Clip whole updates, as client-level methods do: of every magnitude, in both precisions, at several clips."""
    generator = torch.Generator().manual_seed(effort.seed_for())
    worst = 0.0
    for kind in (torch.float32, torch.float64):
        for clip in (1e-20, 1e-4, 1.0, 1e10):
            rows = torch.randn(effort.trials(200), 500, generator=generator).to(kind)
            rows *= 10.0 ** torch.randint(-30, 38, (len(rows), 1), generator=generator)
            rows[::7, 0] = math.nan
            rows[::11, 1] = math.inf
            kept = torch.linalg.vector_norm(clip_to_norm(rows, clip).double(), dim=1) / clip
            worst = max(worst, float(kept.nan_to_num(nan=math.inf).max()))
    return _evidence(worst)


# Every built-in model, small where its size may be chosen: its layers matter.
_MODELS: list[tuple[str, dict[str, Any], float]] = [
    ("binary_logistic", {"features": 20}, 1.0),
    ("binary_svm", {"features": 20}, 1.0),
    ("logistic", {"features": 20, "classes": 4}, 1.0),
    ("logistic", {"features": 20, "classes": 4}, 1e-5),
    ("linear_svm", {"features": 20, "classes": 4}, 1.0),
    ("mlp", {"features": 20, "hidden": (8,), "classes": 4}, 1.0),
    ("mlp", {"features": 20, "hidden": (8,), "classes": 4}, 1e-5),
    ("cnn", {}, 1.0),
    ("cnn", {}, 1e-5),
    ("mcmahan_cnn", {}, 1.0),
    ("cifar_cnn", {}, 1.0),
    ("lstm", {"vocabulary": _TOKENS, "embedding": 4, "hidden": 4, "length": 3}, 1.0),
    ("lstm", {"vocabulary": _TOKENS, "embedding": 4, "hidden": 4, "length": 3}, 1e-5),
]


def clipping_attacks() -> list[Attack]:
    """Return an attack on every built-in model, and one on whole updates."""
    turns = {"mlp": 6, "lstm": 6, "cnn": 1, "mcmahan_cnn": 1, "cifar_cnn": 1}
    searches = {
        f"clipping: {model}, clip {clip:g}": partial(_of_model, model, size, clip, turns.get(model, 40))
        for model, size, clip in _MODELS
    }
    searches["clipping: whole updates"] = partial(_of_updates)
    return [Attack(name, "sound", "hostile weights", run) for name, run in searches.items()]
