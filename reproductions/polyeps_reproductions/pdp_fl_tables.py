"""Paper 002's table 1, as what becomes of it: how often the groups are found; and what an observer finds of each ε.

- Table 1: the three mixtures, and how often groups are found exactly over 300 draws. Signals are real: clipped
  updates, without noise, of 50 clients with two labels each. Noise is simulated, as for 6000 records a client,
  however many clients there are; that later gradients react to earlier noise is left out.
- Table observer: 10 clients with ε from 0.1 to 20, trained with noise calibrated for 20 rounds and averaged plainly.
  Whoever sees one round's updates, or four's, estimates every client's ε.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from polyeps.experiment.population import Population, generator, populate
from polyeps.methods import dp_sgd
from polyeps.training import dp_sgd as dp_sgd_training
from polyeps_reproductions.cells import FORMS, Method, experiment_of
from polyeps_reproductions.observer import Facts, infer, judge, silent_coordinates
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
    cell_of,
    truth_of,
)
from polyeps_reproductions.tabulated import Content, Tabulated
from polyeps_reproductions.trials import Result

Array = NDArray[np.float64]
SIGNALS = 50  # clients whose signals are at hand
HEARD = 3  # rounds: PDP-FL+ settles its groups after as many
WATCHED = (1, 4)  # rounds an observer sees
DELTA, CLIP = 1e-5, 1.0


def recovery(_: Sequence[Result], quick: bool) -> Content:
    """Table 1: in which share of draws the groups, and the public group alone, are found exactly."""
    draws = 20 if quick else 300
    people = people_of("shards", SIGNALS)
    signals = updates_of(people, np.zeros(SIGNALS), HEARD)
    rows: list[list[Any]] = []
    for form, name, clients in product(FORMS, MIXTURES, (10, 20, 50)):
        rng = generator(clients, f"recovery: {name}, {form}")
        noise = torch.Generator().manual_seed(int(rng.integers(2**32)))
        counts: dict[str, list[int]] = {}
        for _draw in range(draws):
            epsilons = draw_liberal(name, clients, rng)
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
        "three rounds, robust": group_by_log_norms(norms.log().mean(1).numpy(), size).labels,
        "three rounds, noise": group_by_log_norms(torch.stack(each).mean(0).numpy(), size).labels,
    }


def noisy(signals: Tensor, epsilons: Array, form: Form, noise: torch.Generator) -> Tensor:
    """Signals with every client's noise."""
    deviations = torch.from_numpy(noise_norms(epsilons, form, 1)).float()
    return signals + deviations[:, None, None] * torch.randn(signals.shape, generator=noise)


def draw_liberal(name: str, clients: int, rng: np.random.Generator) -> Array:
    """A draw with both liberal and strict clients: with one kind there is nothing to find."""
    for epsilons in _draws(name, clients, rng):
        if 0 < int(np.sum(epsilons > EDGES[1])) < clients:
            return epsilons
    raise AssertionError("draws do not end")


def _draws(name: str, clients: int, rng: np.random.Generator) -> Iterator[Array]:
    while True:
        yield draw_budgets(name, clients, rng).epsilons


_GRID = np.geomspace(0.009, 25, 48)


def noise_norms(epsilons: Array, form: Form, size: int) -> Array:
    """The length of the noise in an update of so many coordinates: η·√steps·σC/B·√p, σ by the form's calibration."""
    scale = np.exp(np.interp(np.log(epsilons), np.log(_GRID), np.log(_scales(form))))
    return np.asarray(RATE * np.sqrt(STEPS) * scale * CLIP / BATCH * np.sqrt(size))


@lru_cache(maxsize=2)
def _scales(form: Form) -> Array:
    if form == "published":
        return np.array([10 * BATCH / RECORDS * np.sqrt(ROUNDS * STEPS * 5) / epsilon for epsilon in _GRID])
    return calibrated(_GRID)


def calibrated(epsilons: Array) -> Array:
    """The noise scale every budget needs for all rounds."""
    price = dp_sgd(records=RECORDS, batch=BATCH, steps=ROUNDS * STEPS).price
    budgets = [Budget(float(epsilon), DELTA) for epsilon in epsilons]
    found = calibrate_each(budgets, lambda sigma, _: price(sigma), ROUNDS * STEPS, directory=cache.default_directory())
    return found.noise_multiplier


def people_of(partition: str, clients: int, seed: int = 1) -> Population:
    """Clients with MNIST among them, and a linear model."""
    cell = replace(cell_of(partition, "same", 1.0), clients=clients, epsilons=(1.0,) * clients)
    return populate(experiment_of(cell, Method("fedavg"), "sound", RATE), seed)


def updates_of(people: Population, scales: Array, rounds: int, seed: int = 1) -> Tensor:
    """Updates (clients, rounds, d) of clients that train with these noise scales and are averaged plainly."""
    held = np.diff(people.records.offsets.cpu().numpy())
    training = dp_sgd_training(people.model, steps=STEPS, clip=CLIP, learning_rate=RATE)
    model, found = torch.zeros(people.model.size), []
    for now in range(rounds):
        streams = SeededStreams(seed, range(len(held)), round=now)
        found.append(training.run(model, people.records, streams, scales, settings={"rate": BATCH / held}).cpu())
        model = model + found[-1].mean(0)
    return torch.stack(found, 1)


def observed(_: Sequence[Result], quick: bool) -> Content:
    """How near an observer comes to every client's ε: R² of log ε, and the median relative error of ε."""
    epsilons = np.geomspace(0.1, 20, CLIENTS)
    scales = calibrated(epsilons)
    seeds = range(1, 2 if quick else 6)
    facts = Facts(STEPS, RATE, CLIP, BATCH, RECORDS, ROUNDS, DELTA)
    verdicts: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for title, seed in product(("IID", "NIID(2)"), seeds):
        people = people_of(PARTITIONS[title], CLIENTS, seed)
        updates = updates_of(people, scales, max(WATCHED), seed)
        silent = silent_coordinates(people.model, people.test[0])
        for (known, mask), rounds in product({"known": silent, "not known": None}.items(), WATCHED):
            verdict = judge(infer([updates[:, now] for now in range(rounds)], facts, mask), epsilons)
            verdicts.setdefault((title, known, rounds), []).append((verdict.r_squared, verdict.relative_error))
    rows = [[*key, *(f"{fmean(values):.3f}" for values in zip(*found, strict=True))] for key, found in verdicts.items()]
    return Content(["partition", "silent coordinates", "rounds seen", "R² of log ε", "median relative error"], rows)


TABLES: tuple[Tabulated, ...] = (
    Tabulated("pdp-fl", "table", "1", "How often updates tell the groups exactly", recovery),
    Tabulated(
        "pdp-fl",
        "table",
        "observer",
        "What an observer finds of budgets that nobody tells",
        observed,
        note="10 clients with ε from 0.1 to 20, mean over 5 seeds (1 with --quick); silent coordinates are weights of "
        "pixels that are black in all test records",
    ),
)
