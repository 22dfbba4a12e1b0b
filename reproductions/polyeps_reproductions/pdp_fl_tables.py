"""PDP-FL's table 1, as how often its groups are found; and how well an observer estimates each client's ε.

- Table 1: the three mixtures, and how often groups are found exactly over 300 draws. Signals are real: clipped
  updates, without noise, of 50 clients with two labels each. Noise is simulated, as for 6000 records a client,
  however many clients there are; that later gradients react to earlier noise is left out.
- Table observer: 10 clients with ε from 0.1 to 20, trained with noise calibrated for 20 rounds and averaged plainly.
  An observer that sees one round's updates, or four's, estimates every client's ε.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.accounting import cache
from polyeps.accounting.calibration import calibrate_each
from polyeps.accounting.certificate import Form
from polyeps.aggregation.client_groups import group_by_log_norms, group_by_norms
from polyeps.aggregation.noise_estimation import estimate_noise_variances
from polyeps.core import Budget
from polyeps.data.budgets import DISTRIBUTIONS, draw_budgets
from polyeps.engine.noise import SeededStreams
from polyeps.experiment.config import experiment
from polyeps.experiment.population import Population
from polyeps.experiment.seeds import generator
from polyeps.training import dp_sgd
from polyeps_reproductions.comparison import FORMS
from polyeps_reproductions.federations import population
from polyeps_reproductions.observer import Facts, fit_of, infer, silent_coordinates
from polyeps_reproductions.pdp_fl import (
    BATCH,
    CLIENTS,
    EDGES,
    MIXTURES,
    PARTITIONS,
    RATE,
    RECORDS,
    ROUNDS,
    STEPS,
    agreement,
    ten_clients,
    truth_of,
)
from polyeps_reproductions.studies import Content, Part, Record

Array = NDArray[np.float64]
SIGNALS = 50  # clients whose signals are at hand
LISTENED = 3  # rounds: PDP-FL+ settles its groups after as many
WATCHED = (1, 4)  # rounds an observer sees
DELTA, CLIP = 1e-5, 1.0


def recovery(_: Sequence[Record], quick: bool) -> Content:
    """Return table 1: the share of draws in which the groups, and the public group alone, are found exactly."""
    draws = 20 if quick else 300
    signals = updates_of(mnist_clients("shards", SIGNALS), np.zeros(SIGNALS), LISTENED)
    rows: list[list[Any]] = []
    for form, name, clients in product(FORMS, MIXTURES, (10, 20, 50)):
        rng = generator(clients, f"recovery: {name}, {form}")
        noise = torch.Generator().manual_seed(int(rng.integers(2**32)))
        counts: dict[str, list[int]] = {}
        for _draw in range(draws):
            epsilons = draw_both(name, clients, rng)
            picked = signals[torch.from_numpy(rng.permutation(SIGNALS)[:clients])]
            truth = truth_of(epsilons)
            for rule, labels in grouped(noisy(picked, epsilons, form, noise), MIXTURES[name]).items():
                count = counts.setdefault(rule, [0, 0])
                count[0] += agreement(truth, labels) == 1
                count[1] += bool(np.array_equal(truth == 0, labels == 0))
        for rule, (exact, public) in counts.items():
            summary = DISTRIBUTIONS[name].summary
            rows.append([name, summary, clients, form, rule, f"{exact / draws:.1%}", f"{public / draws:.1%}"])
    return Content(["budgets", "mixture", "clients", "form", "rule", "all groups exact", "public group exact"], rows)


def grouped(updates: Tensor, groups: int) -> dict[str, NDArray[np.int64]]:
    """Labels by each rule, from updates (clients, rounds, d)."""
    norms = torch.linalg.vector_norm(updates, dim=2, dtype=torch.float64)
    each = [estimate_noise_variances(updates[:, now : now + 1]).log() / 2 for now in range(updates.shape[1])]
    size = updates.shape[2]
    return {
        "one round, as published": group_by_norms(norms[:, -1].numpy(), groups),
        "three rounds, robust": group_by_log_norms(norms.log().mean(1).numpy(), size),
        "three rounds, noise": group_by_log_norms(torch.stack(each).mean(0).numpy(), size),
    }


def noisy(signals: Tensor, epsilons: Array, form: Form, noise: torch.Generator) -> Tensor:
    """Signals with every client's noise."""
    deviations = torch.from_numpy(noise_norms(epsilons, form, 1)).float()
    return signals + deviations[:, None, None] * torch.randn(signals.shape, generator=noise)


def draw_both(name: str, clients: int, rng: np.random.Generator) -> Array:
    """Draw budgets until both high-ε and low-ε clients are among them: otherwise there is nothing to find."""
    while True:
        epsilons = draw_budgets(name, clients, rng).epsilons
        if 0 < int(np.sum(epsilons > EDGES[1])) < clients:
            return epsilons


_GRID = np.geomspace(0.009, 25, 48)


def noise_norms(epsilons: Array, form: Form, size: int) -> Array:
    """Return the norm of the noise in an update of so many coordinates: η·√steps·σC/B·√p, σ by the form."""
    sigma = np.exp(np.interp(np.log(epsilons), np.log(_GRID), np.log(_noise_multipliers(form))))
    return np.asarray(RATE * np.sqrt(STEPS) * sigma * CLIP / BATCH * np.sqrt(size))


@lru_cache(maxsize=2)
def _noise_multipliers(form: Form) -> Array:
    if form == "published":
        return np.array([10 * BATCH / RECORDS * np.sqrt(ROUNDS * STEPS * 5) / epsilon for epsilon in _GRID])
    return calibrated(_GRID)


def calibrated(epsilons: Array) -> Array:
    """Return the noise multiplier that spends each budget over all rounds."""
    budgets = [Budget(float(epsilon), DELTA) for epsilon in epsilons]
    step = Facts(STEPS, RATE, CLIP, BATCH, RECORDS, ROUNDS, DELTA).step(RECORDS)
    steps = ROUNDS * STEPS
    return calibrate_each(
        budgets, lambda sigma, _: step(sigma), steps, directory=cache.default_directory()
    ).noise_multiplier


def mnist_clients(partition: str, clients: int, seed: int = 1) -> Population:
    """Return clients that share MNIST, and a linear model."""
    setting = replace(ten_clients(partition, "same", 1.0), clients=clients, epsilons=(1.0,) * clients)
    return population(experiment(setting.experiment("fedavg", "sound", RATE)), seed)


def updates_of(clients: Population, sigma: Array, rounds: int, seed: int = 1) -> Tensor:
    """Return updates (clients, rounds, d) of clients that train with these noise multipliers and are averaged."""
    held = np.diff(clients.records.offsets.cpu().numpy())
    training = dp_sgd(clients.model, steps=STEPS, clip=CLIP, learning_rate=RATE)
    model, found = torch.zeros(clients.model.size), []
    for now in range(rounds):
        streams = SeededStreams(seed, range(len(held)), round=now)
        found.append(training.run(model, clients.records, streams, sigma, settings={"rate": BATCH / held}).cpu())
        model = model + found[-1].mean(0)
    return torch.stack(found, 1)


def observed(_: Sequence[Record], quick: bool) -> Content:
    """Return how well an observer estimates every client's ε: R² of log ε, and the median relative error of ε."""
    epsilons = np.geomspace(0.1, 20, CLIENTS)
    sigma = calibrated(epsilons)
    facts = Facts(STEPS, RATE, CLIP, BATCH, RECORDS, ROUNDS, DELTA)
    fits: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for title, seed in product(("IID", "NIID(2)"), range(1, 2 if quick else 6)):
        clients = mnist_clients(PARTITIONS[title], CLIENTS, seed)
        updates = updates_of(clients, sigma, max(WATCHED), seed)
        silent = silent_coordinates(clients.model, clients.test[0])
        for (known, mask), rounds in product({"known": silent, "not known": None}.items(), WATCHED):
            fit = fit_of(infer([updates[:, now] for now in range(rounds)], facts, mask), epsilons)
            fits.setdefault((title, known, rounds), []).append((fit.r_squared, fit.relative_error))
    rows = [[*key, *(f"{fmean(values):.3f}" for values in zip(*found, strict=True))] for key, found in fits.items()]
    return Content(["partition", "silent coordinates", "rounds seen", "R² of log ε", "median relative error"], rows)


TABLES = (
    Part("table", "1", "How often updates reveal the groups exactly", recovery),
    Part(
        "table",
        "observer",
        "How well an observer estimates undisclosed budgets",
        observed,
        note="10 clients with ε from 0.1 to 20, mean over 5 seeds (1 with --quick); silent coordinates are weights of "
        "pixels that are black in all test records",
    ),
)
