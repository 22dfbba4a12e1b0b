"""PDP-FL, whose budgets stay hidden: norms of updates, groups found in them, and PFA with such groups.

Liu et al., "Personalized Differentially Private Federated Learning without Exposing Privacy Budgets", CIKM 2023,
https://doi.org/10.1145/3583780.3615247.

- Figure 2: mean and deviation of the norms of 10 clients' updates per round, by ε and partition, MNIST, logistic
  regression. Clip 1 and δ = 1e-5 are our assumption; an epoch is 94 steps of 64 records for every client.
- Figure 3: groups by norm against those by ε, NIID(2), the three mixtures, as adjusted Rand index per round.
- Figure 4: accuracy of PFA with groups estimated and known. The paper names no number of clients: run with
  30 clients and 10 shards each, as PFA's figures are, and with 10 clients and two labels, as in figure 3.

Table 1, and one of our own, are in pdp_fl_tables. The paper prints no numbers, so its column stays empty. Its CNN on
CIFAR10 has the figures 2-cifar10, 3-cifar10 and 4-cifar10: the network of PFA's code, 5000 records a client, budgets
and learning rate as for MNIST.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.aggregation.client_groups import group_by_log_norms, group_by_norms
from polyeps_reproductions.cells import Setting
from polyeps_reproductions.comparison import FORMS
from polyeps_reproductions.pfa import figure
from polyeps_reproductions.studies import Cell, Content, Part, Record, Study, line, panel

Array = NDArray[np.float64]
CLIENTS, RECORDS, ROUNDS, STEPS, BATCH, RATE = 10, 6000, 20, 94, 64, 0.01
PICTURES: dict[str, Any] = {"data": "cifar10", "model": "cifar_cnn", "rate": RATE}
PICTURE_STEPS = 79  # of an epoch of 5000 records
PARTITIONS = {"IID": "iid", "NIID(2)": "shards", "NIID-Dir(0.5)": "dirichlet"}
EPSILONS = (0.4, 3.0, 20.0)
MIXTURES = {"pdp-fl-mixgauss1": 2, "pdp-fl-mixgauss2": 2, "pdp-fl-mixgauss3": 3}  # and their numbers of groups
BESIDE = 0.012  # of the index, between lines
EDGES = (0.4, 4.0)  # between ε ≈ 0.1, 1 and 10
METHODS = ("pdp-fl", "pfa", "fedavg", "minimum", "non-private", "public-only")


def ten_clients(partition: str, budgets: str, epsilon: float | None = None) -> Setting:
    """Return ten clients as the paper trains them."""
    return Setting(
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


def on_pictures(setting: Setting) -> Setting:
    """Return a setting with CIFAR10 and its network, at the paper's learning rate."""
    return replace(setting, **PICTURES, local_steps=PICTURE_STEPS if setting.local_steps == STEPS else 100)


def norm_cells(quick: bool, of: Callable[[Setting], Setting] = lambda one: one) -> list[Cell]:
    """Return figure 2: every partition with every budget, and without one."""
    partitions = list(PARTITIONS.values())[: 2 if quick else None]
    with_noise = [(kind, epsilon, "fedavg") for kind, epsilon in product(partitions, EPSILONS)]
    settings = [*with_noise, *((kind, 1.0, "non-private") for kind in partitions)]
    return [
        of(ten_clients(kind, "same", epsilon)).cell(method, "sound", RATE, norms=True)
        for kind, epsilon, method in settings
    ]


def norms(records: Sequence[Record], _: bool) -> Content:
    """Return mean and deviation of norms over clients, at the first and last round and over all."""
    names = {kind: name for name, kind in PARTITIONS.items()}
    series: dict[str, list[dict[str, Any]]] = {}
    rows = []
    for one in records:
        budget = "no noise" if one["method"] == "non-private" else f"ε = {one['epsilons'][0]:g}"
        table = norms_of(one)
        means, spreads = table.mean(0), table.std(0)
        kind = names[one["partition"]]
        drawn = series.setdefault(f"{budget}; bands: deviation over clients", [])
        rounded = [round(value, 4) for value in means.tolist()]
        errors = [round(value, 4) for value in spreads.tolist()]
        drawn.append(line(kind, enumerate(rounded, 1), error=errors, look="band"))
        over = [means[0], means[-1], means.mean(), spreads.mean()]
        rows.append([kind, budget, *(f"{value:.4f}" for value in over)])
    panels = [panel(title, "round", "norm of an update", some) for title, some in series.items()]
    return Content(
        ["partition", "budget", "first round", "last round", "mean", "deviation"], rows, panels=panels, alike=True
    )


def norms_of(one: Record) -> Array:
    """Return norms (clients, rounds), of the rounds that all clients joined."""
    series = list(one["norms"].values())
    rounds = min(map(len, series))
    return np.array([values[:rounds] for values in series])


def group_cells(_: bool, of: Callable[[Setting], Setting] = lambda one: one) -> list[Cell]:
    settings = product(MIXTURES, FORMS)
    return [of(ten_clients("shards", name)).cell("fedavg", form, RATE, norms=True) for name, form in settings]


def groups(records: Sequence[Record], _: bool) -> Content:
    """Return figure 3: how well norms separate the groups, round by round."""
    rows: list[list[Any]] = []
    series: dict[str, list[dict[str, Any]]] = {}
    for one in records:
        truth, name, form, table = truth_of(np.array(one["epsilons"])), one["budgets"], one["form"], norms_of(one)
        found = {
            "one round, as published": [group_by_norms(now, MIXTURES[name]) for now in table.T],
            "rounds so far, robust": [
                group_by_log_norms(np.log(table[:, : last + 1]).mean(1), int(one["parameters"]))
                for last in range(table.shape[1])
            ],
        }
        if one.get("noise"):  # versions before 0.3 kept norms alone
            levels = np.array([values[: table.shape[1]] for values in one["noise"].values()])
            found["rounds so far, noise (ours)"] = [
                group_by_log_norms(np.log(levels[:, : last + 1]).mean(1), int(one["parameters"]))
                for last in range(table.shape[1])
            ]
        for rule, labels in found.items():
            index = [agreement(truth, now) for now in labels]
            exact = f"{sum(value == 1 for value in index)} of {len(index)}"
            drawn = series.setdefault(f"{name.removeprefix('pdp-fl-')}, {form}", [])
            at = [(number, round(value + BESIDE * len(drawn), 4)) for number, value in enumerate(index, 1)]
            drawn.append(line(rule, at, look="band", error=[0.0] * len(at)))
            rows.append([name, form, rule, *(f"{v:.2f}" for v in (index[0], np.mean(index), index[-1])), exact])
    panels = [panel(form, "round", "adjusted Rand index", some) for form, some in series.items()]
    if panels:
        note = f"In the figure, lines are {BESIDE:g} apart where they would lie on each other"
    columns = ["budgets", "form", "rule", "first round", "mean", "last round", "exact rounds"]
    return Content(columns, rows, [note] if panels else [], panels=panels, pairs=True, alike=True)


def truth_of(epsilons: Array) -> NDArray[np.int64]:
    """Return the part of the mixture each client comes from, 0 for the largest ε."""
    parts = len(EDGES) - np.searchsorted(np.array(EDGES), epsilons)
    return np.unique(parts, return_inverse=True)[1].astype(np.int64)


def agreement(truth: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    """Return the adjusted Rand index of two partitions: 1 when they are the same, about 0 by chance."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(truth, labels))


def parts(quick: bool) -> tuple[Part, ...]:
    """Return all figures and tables."""
    from polyeps_reproductions.pdp_fl_tables import TABLES

    settings = (Setting(partition="shards"), ten_clients("shards", "pdp-fl-mixgauss1"))
    title = "PFA with estimated and with known groups, non-IID {}, MixGauss1"
    note = "10 clients have two labels each and one high-ε client among them"
    two, three = "Norms of updates by budget and partition, 10 clients", "Groups by norm against groups by ε, NIID(2)"
    found = (
        figure("4", title.format("MNIST"), settings, quick, methods=METHODS, note=note),
        Part("figure", "2", two, norms, norm_cells, once=True),
        Part("figure", "3", f"{three}, 10 clients", groups, group_cells, once=True),
        *TABLES,
    )
    if quick:
        return found
    pictures, note = [on_pictures(one) for one in settings], f"{note}; learning rate 0.01, as in the paper's figure 2"
    with_pictures = partial(norm_cells, of=on_pictures), partial(group_cells, of=on_pictures)
    return (
        *found,
        Part("figure", "2-cifar10", f"{two}, CIFAR10", norms, with_pictures[0], partial=True, once=True),
        Part("figure", "3-cifar10", f"{three}, CIFAR10", groups, with_pictures[1], partial=True, once=True),
        figure("4-cifar10", title.format("CIFAR10"), pictures, methods=METHODS, note=note),
    )


STUDY = Study("pdp-fl", parts)
