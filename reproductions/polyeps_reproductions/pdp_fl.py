"""Paper 002 (budgets stay hidden): norms of updates, groups found in them, and what PFA does with such groups.

- Figure 2: mean and deviation of the norms of 10 clients' updates per round, by ε and partition, MNIST, logistic
  regression. Clip 1 and δ = 1e-5 are our assumption; an epoch is 94 steps of 64 records for every client.
- Figure 3: groups by norm against those by ε, NIID(2), the three mixtures, as adjusted Rand index per round.
- Figure 4: accuracy of PFA with groups estimated and known. The paper names no number of clients: run with
  30 clients and 10 shards each, as in paper 000, and with 10 clients and two labels, as in figure 3.

Table 1, and one of our own, are in pdp_fl_tables.

The paper prints no numbers, so its column stays empty. Figure 2's CIFAR10 panels are left out, as in its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.accounting.certificate import Form
from polyeps.aggregation.client_groups import group_by_log_norms, group_by_norms
from polyeps_reproductions.cells import FORMS, Cell, Method
from polyeps_reproductions.figures import Figure
from polyeps_reproductions.tabulated import Content, Tabulated
from polyeps_reproductions.trials import Result, Trial

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
            "one round, as published": [group_by_norms(now, MIXTURES[name]) for now in table.T],
            "rounds so far, robust": [
                group_by_log_norms(np.log(table[:, : last + 1]).mean(1), result["parameters"]).labels
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
)
