"""Attacks on deployed clients: the grid of their replies, the spread of their noise, and noise used twice.

All clients answer through `client.answer` with the operating system's entropy, so these results cannot be repeated.
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
from polyeps.audit.dp_sgd_attacks import GAUSSIAN, SUBSAMPLED, trained
from polyeps.audit.lower_bounds import Samples
from polyeps.audit.results import Attack, AttackKind, Effort, Evidence
from polyeps.audit.trial_clients import StreamsOf, ask_trials, deployed, seeded
from polyeps.core import Records
from polyeps.engine.noise import SystemStreams, normals_for
from polyeps.errors import InputError
from polyeps.mechanisms.integer_noise import NoiseName, add_noise, table_for
from polyeps.mechanisms.random_words import SystemWords
from polyeps.mechanisms.values import perturb
from polyeps.models import MODELS, Model
from polyeps.training import dp_sgd

_DELTA = 1e-5
_FINEST = 40  # bits after the point, beyond which a reply counts as lying on no grid


def _replies(
    model: Model,
    records: Records,
    *,
    clients: int,
    tasks: int,
    noise_multiplier: float,
    streams: StreamsOf,
    steps: int = 1,
    start: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Return the replies of equal clients to equal tasks, (tasks, clients, d), and the ε each client was charged.

    Steps have size one, so that a reply is the sum of the releases: only the client itself rounds.
    """
    training = dp_sgd(model, rate=0.5, steps=steps, clip=1.0, learning_rate=1.0, batch=1)
    asked = [("train", {"model": torch.zeros(model.size) if start is None else start})] * tasks
    algorithm = ALGORITHMS["fedavg"].build(training)
    found = ask_trials(
        algorithm, records, asked, trials=clients, noise_multiplier=noise_multiplier, delta=_DELTA, streams=streams
    )
    return torch.stack([reply["update"] for reply in found.replies]).double(), found.charged


def _records(model: Model, empty: bool, generator: torch.Generator) -> Records:
    """Return the records of one client: usual ones, whose gradients use all digits, or empty ones.

    A record of zeros would still move a bias; a record of NaN contributes nothing.
    """
    rows = torch.randn(6, *model.input_shape, generator=generator)
    return Records(rows * math.nan if empty else rows, torch.arange(6) % 2, torch.tensor([0, 6]))


def grid_of(values: Tensor) -> int | None:
    """Return the number of bits after the point of values, at most 40; None where they have more."""
    for bits in range(-_FINEST, _FINEST + 1):
        if bool((torch.ldexp(values, torch.tensor(bits)).frac() == 0).all()):
            return bits
    return None


def _support(model_name: str, size: dict[str, Any], effort: Effort) -> Evidence:
    """Compare the grids of replies: those to empty records show the noise's, and others must lie on the same.

    The server's model has few digits, so that the client's steps away from it are not rounded.
    """
    model, generator = MODELS[model_name](**size), torch.Generator().manual_seed(effort.seed_for())
    start = torch.randint(-8, 9, (model.size,), generator=generator) / 16
    worlds = []
    paid = 0.0
    for empty in (True, False):
        records = _records(model, empty, generator)
        replies, paid = _replies(
            model, records, clients=4, tasks=3, noise_multiplier=1.0, streams=deployed, steps=3, start=start
        )
        worlds.append(grid_of(replies))
    noise, data = worlds
    on_grid = noise is not None and data is not None and data <= noise
    return Evidence(paid, paid, 0.0 if on_grid else math.inf, _DELTA, trials=12)


def _reused(streams: StreamsOf, effort: Effort) -> Evidence:
    """Look for noise that is used twice: correlated replies of clients, tasks or halves of a model."""
    model = MODELS["binary_logistic"](features=8000)
    records = _records(model, True, torch.Generator().manual_seed(effort.seed_for()))
    replies, paid = _replies(model, records, clients=3, tasks=2, noise_multiplier=1.0, streams=streams)
    return _correlated(replies.reshape(-1, model.size // 2).numpy(), paid, _DELTA, effort)


def _reused_batches(effort: Effort) -> Evidence:
    """Look for equal draws of batches: each client has its own, and new ones in every round."""
    drawn = np.concatenate([SystemStreams(3).uniforms(8000), SystemStreams(3).uniforms(8000)])
    return _correlated(drawn, 1.0, 0.0, effort)


def _correlated(rows: Samples, paid: float, delta: float, effort: Effort) -> Evidence:
    """Refute the independence of rows where two of them are correlated beyond chance."""
    pairs = list(combinations(range(len(rows)), 2))
    most = norm.isf((1 - effort.confidence) / 2 / len(pairs)) / math.sqrt(rows.shape[1])
    found = [abs(float(np.corrcoef(rows[a], rows[b])[0, 1])) for a, b in pairs]
    return Evidence(paid, paid, math.inf if not max(found) <= most else 0.0, delta, trials=len(pairs))


def _spread_epsilon(noise: Samples, confidence: float) -> float:
    """Return the ε of Gaussian noise as large as this noise may be at most, for a sensitivity of 1."""
    largest = math.sqrt(float((noise**2).sum()) / chi2.ppf(1 - confidence, noise.size))
    return epsilon(Gaussian(largest), _DELTA)


def _spread_of_replies(streams: StreamsOf, multiplier: float, effort: Effort) -> Evidence:
    model = MODELS["binary_logistic"](features=8000)
    records = _records(model, True, torch.Generator().manual_seed(effort.seed_for()))
    noise, _ = _replies(model, records, clients=4, tasks=1, noise_multiplier=multiplier, streams=streams)
    certified = epsilon(Gaussian(multiplier), _DELTA)
    return Evidence(certified, certified, _spread_epsilon(noise.numpy(), effort.confidence), _DELTA, noise.numel())


def _spread_of_integers(noise: NoiseName, deviation: float, effort: Effort) -> Evidence:
    """Measure the noise of secure sums, in units of its specified deviation."""
    drawn = np.zeros((4, 10_000), np.int64)
    add_noise(table_for(noise, deviation**2), drawn, SystemWords(4), range(4))
    certified = epsilon(Gaussian(1.0), _DELTA)
    return Evidence(certified, certified, _spread_epsilon(drawn / deviation, effort.confidence), _DELTA, drawn.size)


def _refused(draw: Callable[[], object], _: Effort) -> Evidence:
    """Check that a deployed client refuses floating-point noise, which leaks in its low digits."""
    try:
        draw()
    except InputError:
        return Evidence(0.0, 0.0, 0.0)
    return Evidence(0.0, 0.0, math.inf)


def _normals() -> object:
    return normals_for(SystemStreams(1), torch.zeros(1, 8), "train")


def _piecewise() -> object:
    return perturb("pm", np.zeros(1), np.ones(1), SystemStreams(1))


def deployment_attacks() -> list[Attack]:
    """Return all attacks on deployed clients, and on the noise streams of simulations."""
    streams: AttackKind = "noise streams"
    pair: AttackKind = "worst-case pair"
    support: AttackKind = "support"
    small = {"features": 12, "classes": 3}

    def attack(name: str, kind: AttackKind, run: Callable[..., Evidence], *given: object) -> Attack:
        return Attack(name, "sound", kind, partial(run, *given))

    full, sampled = replace(GAUSSIAN, deployed=True), replace(SUBSAMPLED, deployed=True)
    return [
        attack("deployed DP-SGD: full batch", pair, trained, "fedavg", full, 60_000),
        attack("deployed DP-SGD: Poisson batches", pair, trained, "fedavg", sampled, 60_000),
        attack("deployed DP-SGD: grid of replies, logistic", support, _support, "logistic", small),
        attack("deployed DP-SGD: grid of replies, mlp", support, _support, "mlp", {**small, "hidden": (6,)}),
        attack("deployed DP-SGD: no noise twice", streams, _reused, deployed),
        attack("deployed DP-SGD: spread of the noise", streams, _spread_of_replies, deployed, 1.0),
        attack("deployed DP-SGD: spread of little noise", streams, _spread_of_replies, deployed, 0.3),
        attack("deployed batches: no draw twice", streams, _reused_batches),
        attack("deployed sums: spread of discrete Gaussians", streams, _spread_of_integers, "discrete-gaussian", 40.0),
        attack("deployed sums: spread of Skellam noise", streams, _spread_of_integers, "skellam", 40.0),
        attack("deployed: floating-point normals refused", support, _refused, _normals),
        attack("deployed: floating-point values refused", support, _refused, _piecewise),
        attack("simulated DP-SGD: no noise twice", streams, _reused, seeded(0)),
        attack("simulated DP-SGD: spread of the noise", streams, _spread_of_replies, seeded(0), 1.0),
    ]
