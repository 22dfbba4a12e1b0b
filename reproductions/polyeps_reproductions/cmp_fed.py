"""CMP-Fed: figures 1 and 2, tables I and II, and the comparison of its accounts.

Guo et al., "Agent-Level Differentially Private Federated Learning via Compressed Model Perturbation", IEEE CNS 2022,
https://openreview.net/forum?id=IRG_AP-IHR.

6000 clients with ten images of Fashion-MNIST each, a hundred in a round, Poisson-sampled, 180 rounds. As in the paper
clip norms are 1, and learning rates are from its grid but for the two small ones: 0.05 already does worse than 0.125.
Then every private method once more *tuned*: with the clip norm and rate that suit it. Choices are made on a validation
split, at the largest rank with images dealt at random, and taken for all ranks and both partitions. Quick: 300 clients,
a small network, 20 rounds, ε = 4, nothing chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from polyeps_reproductions import cmp_fed_noise
from polyeps_reproductions.algorithms import algorithm
from polyeps_reproductions.cmp_fed_tables import accuracies, by_epsilon, by_uplink, paper
from polyeps_reproductions.studies import Cell, Part, Study
from polyeps_reproductions.trials import Settings, choice, trial

Split = Literal["iid", "labels"]
RANKS, QUICK_RANKS = (1, 2, 4, 8, 16), (1, 4)
PAPERS_CHOICES: tuple[Settings, ...] = tuple({"training.learning_rate": rate} for rate in (0.125, 0.05))
TUNED_CHOICES: tuple[Settings, ...] = tuple(
    {"training.learning_rate": rate, "training.clip": clip}
    for rate, clip in ((0.125, 1.0), (0.125, 0.5), (0.25, 0.5), (0.5, 0.5), (1.0, 0.5))
)
# The folded noise multiplier that Opacus' accountant, RDP, gives for ε = 1 when both releases are composed; and for
# one release alone, as a reader may take the paper's words: then one of each of two releases.
COMPOSED, ONE_RELEASE = 1.1851, 0.8380
AS_PUBLISHED = {"warm_start": "raw", "clip_subspace": 0.01, "clip_embedding": 1.0, "whole": "biases", "split": 0.5}


@dataclass(frozen=True, eq=False)
class Method:
    """A row of the tables: an algorithm with its options, and the candidates for its settings."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    budgets: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = RANKS  # (0,): nothing is compressed
    choices: tuple[Settings, ...] = PAPERS_CHOICES
    like: Method | None = None  # the method whose choice it takes


NONE, LARGEST = (0,), RANKS[-1:]
CMP_FED = Method("CMP-Fed", "CMP-Fed")
PUBLISHED = Method("CMP-Fed, published", "CMP-Fed", AS_PUBLISHED, {"noise_multiplier": COMPOSED}, like=CMP_FED)
UNDERSTATED = Method(
    "CMP-Fed, one release charged",
    "CMP-Fed",
    AS_PUBLISHED,
    {"noise_multiplier": ONE_RELEASE, "epsilon": 1.9},
    LARGEST,
    like=CMP_FED,
)
RANDAGG = Method("DP-RandAgg", "DP-RandAgg", {"mask_first": False, "whole": "biases"})
UV_FED = Method("UV-Fed", "UV-Fed", {"whole": "biases"})
DP_FEDAVG = Method("DP-FedAvg", "DP-FedAvg", ranks=NONE)
FEDAVG = Method("FedAvg", "FedAvg", ranks=NONE)
# Tuned: the better variants of the paper's methods, and our own.
MODEL = Method("CMP-Fed, directions from the model", "CMP-Fed", {"directions": "model"}, choices=TUNED_CHOICES)
CMP_FED_TUNED = Method("CMP-Fed, tuned", "CMP-Fed", ranks=LARGEST, choices=TUNED_CHOICES)
RANDAGG_TUNED = Method("DP-RandAgg, tuned", "DP-RandAgg", ranks=LARGEST, choices=TUNED_CHOICES)
DP_FEDAVG_TUNED = Method("DP-FedAvg, tuned", "DP-FedAvg", ranks=NONE, choices=TUNED_CHOICES)
METHODS = (
    CMP_FED, PUBLISHED, UNDERSTATED, RANDAGG, UV_FED, DP_FEDAVG, FEDAVG,
    MODEL, CMP_FED_TUNED, RANDAGG_TUNED, DP_FEDAVG_TUNED,
)  # fmt: skip
# Quick runs choose nothing, and noise calibrated for the paper's setting says nothing about theirs.
QUICK_METHODS = (CMP_FED, RANDAGG, UV_FED, DP_FEDAVG, FEDAVG, MODEL)
COMPARED = (CMP_FED, RANDAGG, DP_FEDAVG, FEDAVG, MODEL, CMP_FED_TUNED, DP_FEDAVG_TUNED)


def settings(method: Method, partition: Split, rank: int, quick: bool = False, clients: int = 6000) -> dict[str, Any]:
    """Return one method as an experiment."""
    clients, rounds, cohort = (300, 20, 100) if quick else (clients, 180, 100)
    ranked = {} if method.ranks == NONE else {"rank": rank}
    options = {"rate_decay": 0.99, "dropouts": 0.0, **ranked, **method.options}
    budgets = {"epsilon": 4.0} if quick else {"epsilon": 1.0, **method.budgets}
    spread = {"partition": "labels", "labels_per_client": 5} if partition == "labels" else {"size": 10}
    return {
        "name": "cmp-fed",
        "rounds": rounds,
        "evaluate_every": 5,
        "data": {"name": "fashion-mnist", "clients": clients, **spread},
        "budgets": {"delta": 1e-4, **budgets},
        "model": {"name": "mlp", "hidden": [32]} if quick else {"name": "mcmahan_cnn"},
        "training": {"batch": 10, "local_steps": 10, "learning_rate": 0.1, "momentum": 0.5, "clip": 1.0},
        "participation": {"kind": "poisson", "share": cohort / clients},
        "algorithm": algorithm(method.name, label=method.label, **options),
    }


def cell(method: Method, partition: Split, rank: int, quick: bool) -> Cell:
    """Return one training; a sixth of the clients' images decides about its settings."""
    tuned = method.like or method
    chosen = None if quick else choice(tuned.choices, settings(tuned, "iid", RANKS[-1], clients=5000))
    labels = {"partition": partition, "method": method.label, "rank": rank}
    labels |= {"share": 100 / (300 if quick else 6000), "delta": 1e-4}
    printed = None if quick else paper(partition, method.label, rank)
    return Cell(labels, trial(settings(method, partition, rank, quick), choice=chosen), printed)


def cells(partitions: Iterable[Split], methods: Iterable[Method], quick: bool) -> list[Cell]:
    some = [method for method in methods if method in QUICK_METHODS or not quick]
    ranks = {one: QUICK_RANKS if quick and one.ranks != NONE else one.ranks for one in some}
    return [cell(one, part, rank, quick) for part in partitions for one in some for rank in ranks[one]]


def _trained(kind: Literal["figure", "table"], number: str, title: str, show: Any, *wanted: Any) -> Part:
    return Part(kind, number, title, show, partial(cells, *wanted), partial=True)


BOTH: tuple[Split, ...] = ("iid", "labels")
PARTS: tuple[Part, ...] = (
    _trained("figure", "1", "Accuracy by ε, by rank", by_epsilon, BOTH, (CMP_FED,)),
    _trained("figure", "2", "Accuracy by uplink", by_uplink, BOTH, COMPARED),
    _trained("table", "1", "Accuracy, images dealt at random", accuracies, ("iid",), METHODS),
    _trained("table", "2", "Accuracy, five labels each", accuracies, ("labels",), METHODS),
    *cmp_fed_noise.PARTS,
)
STUDY = Study("cmp-fed", lambda _: PARTS)
