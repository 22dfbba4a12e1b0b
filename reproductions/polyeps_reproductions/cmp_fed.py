"""Paper 004 (CMP-Fed): figures 1 and 2, tables I and II, as trials.

6000 agents with ten images of Fashion-MNIST each, a hundred drawn in a round by their own coins, 180 rounds. As in the
paper clip norms are 1, and learning rates are from its grid but for the two small ones: 0.05 already does worse than
0.125. Then every private method once more *tuned*: with the clip norm and rate that suit it. Choices are made on a
validation split, at the largest rank with images dealt at random, and taken for all ranks and both ways to deal. In
small: 300 clients, a small network, 20 rounds, ε = 4, nothing chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from polyeps_reproductions import experiments
from polyeps_reproductions.cmp_fed_tables import accuracies, by_epsilon, by_uplink
from polyeps_reproductions.experiments import Trial, trial
from polyeps_reproductions.running import Means, Told
from polyeps_reproductions.tabulated import Tabulated, summary_of
from polyeps_reproductions.trials import Store

Split = Literal["iid", "labels"]
RANKS, QUICK_RANKS = (1, 2, 4, 8, 16), (1, 4)
PAPERS_CHOICES = tuple({"training.learning_rate": rate} for rate in (0.125, 0.05))
TUNED_CHOICES = tuple(
    {"training.learning_rate": rate, "training.clip": clip}
    for rate, clip in ((0.125, 1.0), (0.125, 0.5), (0.25, 0.5), (0.5, 0.5), (1.0, 0.5))
)
# The folded noise multiplier that Opacus' accountant, RDP, gives for ε = 1 when both releases are composed; and for
# one release alone, as a reader may take the paper's words: then one of each of two releases.
COMPOSED, ONE_RELEASE = 1.1851, 0.8380
AS_PUBLISHED = {"warm_start": "raw", "clip_subspace": 0.01, "clip_embedding": 1.0, "whole": "biases", "split": 0.5}


@dataclass(frozen=True, eq=False)
class Method:
    """A row of the tables: an algorithm with its options, and how what it is trained with is chosen."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    budgets: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = RANKS  # (0,): nothing is compressed
    choices: tuple[Mapping[str, float], ...] = PAPERS_CHOICES
    like: Method | None = None  # whose choice it takes

    @property
    def compressed(self) -> bool:
        return self.ranks != NONE


NONE, LARGEST = (0,), RANKS[-1:]
CMP_FED = Method("CMP-Fed", "cmp-fed")
PUBLISHED = Method("CMP-Fed, published", "cmp-fed", AS_PUBLISHED, {"scale": COMPOSED}, like=CMP_FED)
UNDERSTATED = Method(
    "CMP-Fed, one release charged",
    "cmp-fed",
    AS_PUBLISHED,
    {"scale": ONE_RELEASE, "epsilon": 1.9},
    LARGEST,
    like=CMP_FED,
)
RANDAGG = Method("DP-RandAgg", "dp-randagg", {"mask_first": False, "whole": "biases"})
UV_FED = Method("UV-Fed", "uv-fed", {"whole": "biases"})
DP_FEDAVG = Method("DP-FedAvg", "dp-randagg", {"rank": 0}, ranks=NONE)
FEDAVG = Method("FedAvg", "randagg", {"rank": 0}, ranks=NONE)
# Tuned; of the papers' the better variant, and our own.
MODEL = Method("CMP-Fed, directions from the model", "cmp-fed", {"directions": "model"}, choices=TUNED_CHOICES)
CMP_FED_TUNED = Method("CMP-Fed, tuned", "cmp-fed", ranks=LARGEST, choices=TUNED_CHOICES)
RANDAGG_TUNED = Method("DP-RandAgg, tuned", "dp-randagg", ranks=LARGEST, choices=TUNED_CHOICES)
DP_FEDAVG_TUNED = Method("DP-FedAvg, tuned", "dp-randagg", {"rank": 0}, ranks=NONE, choices=TUNED_CHOICES)
METHODS = (
    CMP_FED, PUBLISHED, UNDERSTATED, RANDAGG, UV_FED, DP_FEDAVG, FEDAVG,
    MODEL, CMP_FED_TUNED, RANDAGG_TUNED, DP_FEDAVG_TUNED,
)  # fmt: skip
# In small nothing is chosen, and noise made for the paper's setting says nothing.
QUICK_METHODS = (CMP_FED, RANDAGG, UV_FED, DP_FEDAVG, FEDAVG, MODEL)


def settings(method: Method, partition: Split, rank: int, quick: bool = False, agents: int = 6000) -> dict[str, Any]:
    """One method as an experiment."""
    clients, rounds, cohort = (300, 20, 100) if quick else (agents, 180, 100)
    options = {"rate_decay": 0.99, "dropouts": 0.0, **({"rank": rank} if method.compressed else {}), **method.options}
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
        "algorithm": {"name": method.name, "label": method.label, **options},
    }


def choice(method: Method) -> Trial:
    """The trial by whose candidates a method's settings are chosen; a sixth of the agents' images judge it."""
    judged = method.like or method
    return trial("cmp-fed", settings(judged, "iid", RANKS[-1], agents=5000), experiments.CHOICE_SEED, judged.choices)


def settled(method: Method, partition: Split, rank: int, seed: int, store: Store, quick: bool) -> Trial | None:
    """One training, with the settings chosen; nothing while they are not. In small there is no choice."""
    values = settings(method, partition, rank, quick)
    if not quick:
        chosen = experiments.settled(choice(method), store)
        if chosen is None:
            return None
        training = json.loads(chosen.settings)["training"]
        values["training"] |= {name: training[name] for name in ("learning_rate", "clip")}
    return trial("cmp-fed", values, seed)


@dataclass(frozen=True)
class Wanted:
    """A cell of a table."""

    method: Method
    partition: Split
    rank: int


def cells(partition: Split, quick: bool, methods: Iterable[Method] = METHODS) -> tuple[Wanted, ...]:
    some = [method for method in methods if method in QUICK_METHODS or not quick]
    wanted = ((method, QUICK_RANKS if quick and method.compressed else method.ranks) for method in some)
    return tuple(Wanted(method, partition, rank) for method, ranks in wanted for rank in ranks)


def _part(kind: Literal["figure", "table"], number: str, title: str, make: Any, wanted: Any) -> Tabulated:
    return Tabulated("cmp-fed", kind, number, title, make, wanted)


_COMPARED = (CMP_FED, RANDAGG, DP_FEDAVG, FEDAVG, MODEL, CMP_FED_TUNED, DP_FEDAVG_TUNED)
PARTS: tuple[Tabulated, ...] = (
    _part(
        "figure", "1", "Accuracy by ε, by rank", by_epsilon,
        lambda q: (*cells("iid", q, [CMP_FED]), *cells("labels", q, [CMP_FED])),
    ),
    _part(
        "figure", "2", "Accuracy by uplink", by_uplink,
        lambda q: (*cells("iid", q, _COMPARED), *cells("labels", q, _COMPARED)),
    ),
    _part("table", "1", "Accuracy, images dealt at random", accuracies, lambda q: cells("iid", q)),
    _part("table", "2", "Accuracy, five labels each", accuracies, lambda q: cells("labels", q)),
)  # fmt: skip


def run(parts: Iterable[Tabulated], store: Store, means: Means, seeds: int, quick: bool, told: Told) -> None:
    """Choose settings, then run what is missing."""
    wanted = list(dict.fromkeys(cell for part in parts for cell in part.trials(quick)))
    if not quick:
        choices = [
            candidate
            for method in METHODS
            for candidate in experiments.choice_of(choice(method))
            if any(cell.method == method for cell in wanted)
        ]
        experiments.run_all(choices, store, means, lambda _, *count: told("choosing settings", *count))
    ready = [settled(c.method, c.partition, c.rank, seed, store, quick) for seed in _seeds(seeds) for c in wanted]
    experiments.run_all([one for one in ready if one is not None], store, means, told)


def outcome(part: Tabulated, store: Store, seeds: int, quick: bool, command: str) -> dict[str, Any]:
    """A figure or table from its finished trials; whatever is missing is left out of it."""
    wanted = [(cell, seed) for cell in part.trials(quick) for seed in _seeds(seeds)]
    ready = [settled(cell.method, cell.partition, cell.rank, seed, store, quick) for cell, seed in wanted]
    found = experiments.found([one for one in ready if one is not None], store)
    return {**summary_of(part, found, 0 if found else len(wanted), quick, command), "missing": len(wanted) - len(found)}


def _seeds(count: int) -> range:
    return range(1, count + 1)
