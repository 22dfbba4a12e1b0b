"""Deployed clients: where their replies can lie, how much noise is in them, and whether any noise is used twice.

All of them answer through `client.answer` with the operating system's entropy, so that nothing here can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2, norm
from torch import Tensor

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian
from polyeps.algorithms import ALGORITHMS
from polyeps.audit.local_cases import GAUSSIAN, SUBSAMPLED, trained
from polyeps.audit.montecarlo import Floats
from polyeps.audit.rows import Attack, Case, Effort, Shown
from polyeps.audit.trial_clients import StreamsOf, ask_trials, deployed, seeded
from polyeps.core import Records
from polyeps.engine.noise import SystemStreams, normals_for
from polyeps.errors import InputError
from polyeps.mechanisms.integer_noise import NoiseName, add_noise, table_for
from polyeps.mechanisms.random_words import SystemWords
from polyeps.mechanisms.values import perturb
from polyeps.models import MODELS, Model
from polyeps.training import dp_sgd

DELTA = 1e-5
_FINEST = 40  # bits after the point, beyond which a reply counts as lying on no grid


def replies_of(
    model: Model,
    records: Records,
    *,
    clients: int,
    tasks: int,
    scale: float,
    streams: StreamsOf,
    steps: int = 1,
    start: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Return what clients with the same records reply to the same tasks, (tasks, clients, d), and what they paid.

    Steps have size one, so that a reply is the sum of what was released: no rounding but the client's own.
    """
    training = dp_sgd(model, rate=0.5, steps=steps, clip=1.0, learning_rate=1.0, batch=1)
    asked = [("train", {"model": torch.zeros(model.size) if start is None else start})] * tasks
    algorithm = ALGORITHMS["fedavg"].build(training)
    found = ask_trials(algorithm, records, asked, trials=clients, scale=scale, delta=DELTA, streams=streams)
    return torch.stack([reply["update"] for reply in found.replies]).double(), found.charged


def _records(model: Model, empty: bool, generator: torch.Generator) -> Records:
    """The records of one client: usual ones, whose gradients have digits everywhere, or empty ones.

    A record of zeros would still move a bias; one that is not a number contributes nothing.
    """
    rows = torch.randn(6, *model.input_shape, generator=generator)
    return Records(rows * math.nan if empty else rows, torch.arange(6) % 2, torch.tensor([0, 6]))


def grid_of(values: Tensor) -> int | None:
    """Return the number of bits after the point that values have, at most 40; nothing where they have more."""
    for bits in range(-_FINEST, _FINEST + 1):
        if bool((torch.ldexp(values, torch.tensor(bits)).frac() == 0).all()):
            return bits
    return None


def _support(name: str, size: dict[str, Any], what: str, effort: Effort) -> Shown:
    """Replies to empty records show the grid of the noise; replies to others must lie on the same grid.

    The model that is sent has few digits, so that the client's steps away from it are not rounded.
    """
    model, generator = MODELS[name](**size), torch.Generator().manual_seed(effort.seed_for(what))
    start = torch.randint(-8, 9, (model.size,), generator=generator) / 16
    worlds = []
    paid = 0.0
    for empty in (True, False):
        records = _records(model, empty, generator)
        replies, paid = replies_of(
            model, records, clients=4, tasks=3, scale=1.0, streams=deployed, steps=3, start=start
        )
        worlds.append(grid_of(replies))
    noise, data = worlds
    on_grid = noise is not None and data is not None and data <= noise
    return Shown(paid, paid, 0.0 if on_grid else math.inf, DELTA, trials=12)


def _apart(streams: StreamsOf, what: str, effort: Effort) -> Shown:
    """No noise is used twice: replies of clients, tasks and halves of a model are not correlated."""
    model = MODELS["binary_logistic"](features=8000)
    generator = torch.Generator().manual_seed(effort.seed_for(what))
    records = _records(model, True, generator)
    replies, paid = replies_of(model, records, clients=3, tasks=2, scale=1.0, streams=streams)
    halves = replies.reshape(-1, model.size // 2).numpy()
    pairs = list(combinations(range(len(halves)), 2))
    found = [float(np.corrcoef(halves[a], halves[b])[0, 1]) for a, b in pairs]
    most = norm.isf((1 - effort.confidence) / 2 / len(pairs)) / math.sqrt(halves.shape[1])
    return Shown(paid, paid, math.inf if not max(map(abs, found)) <= most else 0.0, DELTA, trials=len(pairs))


def _lone_batches(_: str, effort: Effort) -> Shown:
    """Uniforms that batches are drawn by: of each client its own, in every round others."""
    drawn = np.concatenate([SystemStreams(3).uniforms(8000), SystemStreams(3).uniforms(8000)])
    pairs = list(combinations(range(len(drawn)), 2))
    most = norm.isf((1 - effort.confidence) / 2 / len(pairs)) / math.sqrt(drawn.shape[1])
    found = max(abs(float(np.corrcoef(drawn[a], drawn[b])[0, 1])) for a, b in pairs)
    return Shown(1.0, 1.0, math.inf if not found <= most else 0.0, trials=len(pairs))


def spread_shown(noise: Floats, confidence: float) -> float:
    """Return the ε of Gaussian noise for a sensitivity of 1 that is as large as this noise may be, at most."""
    largest = math.sqrt(float((noise**2).sum()) / chi2.ppf(1 - confidence, noise.size))
    return epsilon(Gaussian(largest), DELTA)


def _spread_of_replies(streams: StreamsOf, scale: float, what: str, effort: Effort) -> Shown:
    model = MODELS["binary_logistic"](features=8000)
    records = _records(model, True, torch.Generator().manual_seed(effort.seed_for(what)))
    noise, _ = replies_of(model, records, clients=4, tasks=1, scale=scale, streams=streams)
    certified = epsilon(Gaussian(scale), DELTA)
    return Shown(certified, certified, spread_shown(noise.numpy(), effort.confidence), DELTA, noise.numel())


def _spread_of_integers(noise: NoiseName, deviation: float, _: str, effort: Effort) -> Shown:
    """Noise of secure sums, in units of its promised deviation."""
    drawn = np.zeros((4, 10_000), np.int64)
    add_noise(table_for(noise, deviation**2), drawn, SystemWords(4), range(4))
    certified = epsilon(Gaussian(1.0), DELTA)
    return Shown(certified, certified, spread_shown(drawn / deviation, effort.confidence), DELTA, drawn.size)


def _refused(draw: Callable[[], object], *_: object) -> Shown:
    """Noise in floating point leaks in its low digits: a deployed client must not draw any."""
    try:
        draw()
    except InputError:
        return Shown(0.0, 0.0, 0.0)
    return Shown(0.0, 0.0, math.inf)


def _normals() -> object:
    return normals_for(SystemStreams(1), torch.zeros(1, 8), "train")


def _piecewise() -> object:
    return perturb("pm", np.zeros(1), np.ones(1), SystemStreams(1))


def cases() -> list[Case]:
    """All rows about deployed clients, and about the streams of simulations beside them."""
    streams: Attack = "noise streams"
    pair: Attack = "worst-case pair"
    support: Attack = "support"
    small = {"features": 12, "classes": 3}

    def case(what: str, attack: Attack, run: Callable[..., Shown], *given: object) -> Case:
        return Case(what, "sound", attack, partial(run, *given, what))

    full, sampled = replace(GAUSSIAN, deployed=True), replace(SUBSAMPLED, deployed=True)
    return [
        case("deployed DP-SGD: full batch", pair, trained, "fedavg", full, 60_000),
        case("deployed DP-SGD: Poisson batches", pair, trained, "fedavg", sampled, 60_000),
        case(
            "deployed DP-SGD: grid of replies, logistic", support, _support, "logistic", {"features": 12, "classes": 3}
        ),
        case("deployed DP-SGD: grid of replies, mlp", support, _support, "mlp", {**small, "hidden": (6,)}),
        case("deployed DP-SGD: no noise twice", streams, _apart, deployed),
        case("deployed DP-SGD: spread of the noise", streams, _spread_of_replies, deployed, 1.0),
        case("deployed DP-SGD: spread of little noise", streams, _spread_of_replies, deployed, 0.3),
        case("deployed batches: no draw twice", streams, _lone_batches),
        case("deployed sums: spread of discrete Gaussians", streams, _spread_of_integers, "discrete-gaussian", 40.0),
        case("deployed sums: spread of Skellam noise", streams, _spread_of_integers, "skellam", 40.0),
        case("deployed: floating-point normals refused", support, _refused, _normals),
        case("deployed: floating-point values refused", support, _refused, _piecewise),
        case("simulated DP-SGD: no noise twice", streams, _apart, seeded(0)),
        case("simulated DP-SGD: spread of the noise", streams, _spread_of_replies, seeded(0), 1.0),
    ]
