"""Paper 002 (budgets stay hidden): norms of updates, groups found in them, and what PFA does with such groups.

- Figure 2: mean and deviation of the norms of 10 clients' updates per round, by ε and partition, MNIST, logistic
  regression. Clip 1 and δ = 1e-5 are our assumption; an epoch is 94 steps of 64 records for every client.
- Figure 3: groups by norm against those by ε, NIID(2), the three mixtures, as adjusted Rand index per round.
- Figure 4: accuracy of PFA with groups estimated and known. The paper names no number of clients: run with
  30 clients and 10 shards each, as in paper 000, and with 10 clients and two labels, as in figure 3.
- Table 1: the three mixtures, and how often groups are found exactly over 300 draws. Signals are norms of real,
  clipped updates (figure 2's under ε = 20, less their noise); noise is simulated. Each client has 6000 records,
  however many clients there are.

The paper prints no numbers, so its column stays empty. Figure 2's CIFAR10 panels are left out, as in its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.accounting import cache
from polyeps.accounting.calibration import calibrate_each
from polyeps.certificate import Form
from polyeps.core import Budget
from polyeps.grouping import quiet_by_log_norms, quiet_by_mixture
from polyeps.methods import dp_sgd
from polyeps.populate import generator
from polyeps.population.budgets import DISTRIBUTIONS, draw_budgets
from polyeps.studies.cells import FORMS, Cell, Method
from polyeps.studies.figures import Figure
from polyeps.studies.tabulated import Content, Tabulated
from polyeps.studies.trials import Result, Trial

Array = NDArray[np.float64]
CLIENTS, RECORDS, ROUNDS, STEPS, BATCH, RATE = 10, 6000, 20, 94, 64, 0.01
PARTITIONS = {"IID": "iid", "NIID(2)": "shards", "NIID-Dir(0.5)": "dirichlet"}
EPSILONS = (0.4, 3.0, 20.0)
MIXTURES = {"pdp-fl-mixgauss1": 2, "pdp-fl-mixgauss2": 2, "pdp-fl-mixgauss3": 3}  # and how many groups they have
EDGES = (0.4, 4.0)  # between ε ≈ 0.1, 1 and 10


def cell_of(partition: str, budgets: str, epsilon: float | None = None) -> Cell:
    """Ten clients as paper 002 trains them."""
    return Cell(
        partition=partition,
        budgets=budgets,
        clients=CLIENTS,
        choice_clients=CLIENTS,
        epsilons=None if epsilon is None else (epsilon,) * CLIENTS,
        size=None,
        shards_per_client=2,
        rounds=ROUNDS,
        local_steps=STEPS,
        batch_published=BATCH,
        batch_sound=BATCH,
        share=1.0,
    )


def listening(cell: Cell, method: str, form: Form = "sound") -> Trial:
    return Trial(cell, Method(method), form, 1, RATE, norms=True)


def norm_trials(quick: bool) -> tuple[Trial, ...]:
    """Figure 2: every partition with every budget, and without one."""
    partitions = list(PARTITIONS.values())[: 2 if quick else None]
    trials = [listening(cell_of(kind, "same", epsilon), "fedavg") for kind in partitions for epsilon in EPSILONS]
    return (*trials, *(listening(cell_of(kind, "same", 1.0), "non-private") for kind in partitions))


def norms(results: Sequence[Result], _: bool) -> Content:
    """Mean and deviation of norms over clients, at the first and last round and over all."""
    names = {kind: name for name, kind in PARTITIONS.items()}
    lines: dict[str, dict[str, list[float]]] = {}
    rows = []
    for result in results:
        told = result["trial"]
        private = told["method"]["name"] != "non-private"
        budget = f"ε = {told['cell']['epsilons'][0]:g}" if private else "no noise"
        table = table_of(result)
        means, spreads = table.mean(0), table.std(0)
        kind = names[told["cell"]["partition"]]
        lines.setdefault(f"mean norm, {budget}", {})[kind] = means.tolist()
        over = [means[0], means[-1], means.mean(), spreads.mean()]
        rows.append([kind, budget, *(f"{value:.4f}" for value in over)])
    return Content(["partition", "budget", "first round", "last round", "mean", "deviation"], rows, lines)


def table_of(result: Result) -> Array:
    """Norms (clients, rounds); a client that left early drops the rounds after it."""
    series = list(result["norms"].values())
    rounds = min(map(len, series))
    return np.array([values[:rounds] for values in series])


def group_trials(_: bool) -> tuple[Trial, ...]:
    return tuple(listening(cell_of("shards", name), "fedavg", form) for name, form in product(MIXTURES, FORMS))


def groups(results: Sequence[Result], _: bool) -> Content:
    """Figure 3: how well norms tell the groups, round by round."""
    rows: list[list[Any]] = []
    lines: dict[str, dict[str, list[float]]] = {}
    for result in results:
        told, truth = result["trial"], truth_of(np.array(result["epsilons"]))
        name, form = told["cell"]["budgets"], told["form"]
        table = table_of(result)
        found = {
            "one round, as published": [quiet_by_mixture(now, MIXTURES[name]) for now in table.T],
            "rounds so far, robust": [
                quiet_by_log_norms(np.log(table[:, : last + 1]).mean(1), result["parameters"]).labels
                for last in range(table.shape[1])
            ],
        }
        for rule, labels in found.items():
            index = [agreement(truth, now) for now in labels]
            exact = f"{sum(value == 1 for value in index)} of {len(index)}"
            lines.setdefault(f"adjusted Rand index, {form}", {})[f"{name}, {rule}"] = index
            rows.append([name, form, rule, *(f"{v:.2f}" for v in (index[0], np.mean(index), index[-1])), exact])
    return Content(["budgets", "form", "rule", "first round", "mean", "last round", "exact rounds"], rows, lines)


def truth_of(epsilons: Array) -> NDArray[np.int64]:
    """The part of the mixture each client comes from, 0 for the most liberal."""
    parts = len(EDGES) - np.searchsorted(np.array(EDGES), epsilons)
    return np.unique(parts, return_inverse=True)[1].astype(np.int64)


def agreement(truth: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    """The adjusted Rand index of two partitions: 1 when they are the same, about 0 by chance."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(truth, labels))


def recovery(results: Sequence[Result], quick: bool) -> Content:
    """Table 1: in which share of draws the groups, and the public group alone, are found exactly."""
    (quiet,) = results
    size = int(quiet["parameters"])
    signals = signals_of(table_of(quiet), float(noise_norms(np.array([EPSILONS[-1]]), "sound", size)[0]))
    draws = 30 if quick else 300
    rows: list[list[Any]] = []
    for form, name, clients in product(FORMS, MIXTURES, (10, 20, 50)):
        counts = {rule: [0, 0] for rule in ("one round, as published", "all rounds, robust")}
        rng = generator(clients, f"recovery: {name}, {form}")
        for _ in range(draws):
            epsilons = draw_liberal(name, clients, rng)
            lengths = simulated(signals, noise_norms(epsilons, form, size), size, rng)
            truth = truth_of(epsilons)
            found = (
                quiet_by_mixture(lengths[:, -1], MIXTURES[name]),
                quiet_by_log_norms(np.log(lengths).mean(1), size).labels,
            )
            for count, labels in zip(counts.values(), found, strict=True):
                count[0] += agreement(truth, labels) == 1
                count[1] += bool(np.array_equal(truth == 0, labels == 0))
        for rule, (exact, public) in counts.items():
            summary = DISTRIBUTIONS[name].summary
            rows.append([name, summary, clients, form, rule, f"{exact / draws:.1%}", f"{public / draws:.1%}"])
    return Content(["budgets", "mixture", "clients", "form", "rule", "all groups exact", "public group exact"], rows)


def signals_of(lengths: Array, noise: float) -> Array:
    """What norms are without their noise, which is all but orthogonal to the signal."""
    return np.asarray(np.sqrt(np.maximum(lengths**2 - noise**2, 0)))


def draw_liberal(name: str, clients: int, rng: np.random.Generator) -> Array:
    """A draw with both liberal and strict clients: with one kind there is nothing to find."""
    for epsilons in _draws(name, clients, rng):
        if 0 < int(np.sum(epsilons > EDGES[1])) < clients:
            return epsilons
    raise AssertionError("draws do not end")


def _draws(name: str, clients: int, rng: np.random.Generator) -> Iterator[Array]:
    while True:
        yield draw_budgets(name, clients, rng).epsilons


def simulated(signals: Array, noise: Array, size: int, rng: np.random.Generator) -> Array:
    """Norms (clients, rounds): a real signal picked at random for each client, and noise orthogonal to it."""
    picked = signals[rng.integers(len(signals), size=len(noise))]
    loud = noise[:, None] * np.sqrt(rng.chisquare(size, picked.shape) / size)
    return np.asarray(np.hypot(picked, loud))


_GRID = np.geomspace(0.009, 25, 48)
_SCALES: dict[Form, Array] = {}


def noise_norms(epsilons: Array, form: Form, size: int) -> Array:
    """The length of the noise in an update: η·√steps·σC/B·√p, with σ by the form's calibration."""
    if form not in _SCALES:
        uses = ROUNDS * STEPS
        priced = dp_sgd(records=RECORDS, batch=BATCH, steps=uses)
        if form == "published":
            _SCALES[form] = np.array([10 * BATCH / RECORDS * np.sqrt(uses * 5) / epsilon for epsilon in _GRID])
        else:
            budgets = [Budget(float(epsilon), 1e-5) for epsilon in _GRID]
            found = calibrate_each(
                budgets, lambda sigma, _: priced.price(sigma), uses, directory=cache.default_directory()
            )
            _SCALES[form] = found.scale
    scale = np.exp(np.interp(np.log(epsilons), np.log(_GRID), np.log(_SCALES[form])))
    return np.asarray(RATE * np.sqrt(STEPS) * scale / BATCH * np.sqrt(size))


METHODS = tuple(Method(name) for name in ("pdp-fl", "pfa", "fedavg", "minimum", "non-private", "public-only"))
FIGURES: dict[str, Figure] = {
    "4": Figure(
        "pdp-fl",
        "4",
        "PFA with estimated and with known groups, non-IID MNIST, MixGauss1",
        (Cell(partition="shards"), cell_of("shards", "pdp-fl-mixgauss1")),
        METHODS,
        note="10 clients have two labels each and one liberal client among them",
    )
}
TABULATED: tuple[Tabulated, ...] = (
    Tabulated("pdp-fl", "figure", "2", "Norms of updates by budget and partition, 10 clients", norms, norm_trials),
    Tabulated("pdp-fl", "figure", "3", "Groups by norm against groups by ε, NIID(2), 10 clients", groups, group_trials),
    Tabulated(
        "pdp-fl",
        "table",
        "1",
        "How often norms tell the groups exactly",
        recovery,
        lambda _: (listening(cell_of("shards", "same", EPSILONS[-1]), "fedavg"),),
    ),
)
