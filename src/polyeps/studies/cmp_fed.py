"""Paper 004 (CMP-Fed): figures 1 and 2, tables I and II, as trials.

6000 agents with ten images of Fashion-MNIST each, a hundred drawn in a round by their own coins, 180 rounds. Learning
rates: the paper's grid but for 0.001, which moves nothing in 180 rounds; of every method its own, judged on a
validation split, at the largest rank with images dealt at random, and taken for all ranks and both ways to deal. In
small: 300 clients, a small network, 20 rounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from polyeps.studies import experiments
from polyeps.studies.cmp_fed_tables import accuracies, by_epsilon, by_uplink
from polyeps.studies.experiments import Trial, trial
from polyeps.studies.running import Means, Told
from polyeps.studies.tabulated import Tabulated, summary_of
from polyeps.studies.trials import Store

Split = Literal["iid", "labels"]
RANKS, QUICK_RANKS = (1, 2, 4, 8, 16), (1, 4)
RATES = (0.125, 0.05, 0.01)
# The folded noise multiplier that Opacus' accountant, RDP, gives for ε = 1 when both releases are composed; and for
# one release alone, as a reader may take the paper's words: then one of each of two releases.
COMPOSED, ONE_RELEASE = 1.1851, 0.8380
AS_PUBLISHED = {"warm_start": "raw", "clip_subspace": 0.01, "clip_embedding": 1.0, "whole": "biases", "split": 0.5}


@dataclass(frozen=True, eq=False)
class Method:
    """A row of the tables: an algorithm with its options, and what it is trained with."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    budgets: Mapping[str, Any] = field(default_factory=dict)
    clip: float = 1.0
    compressed: bool = True  # whether it has a rank


CMP_FED = Method("CMP-Fed", "cmp-fed")
PUBLISHED = Method("CMP-Fed, published", "cmp-fed", AS_PUBLISHED, {"scale": COMPOSED})
UNDERSTATED = Method("CMP-Fed, one release charged", "cmp-fed", AS_PUBLISHED, {"scale": ONE_RELEASE, "epsilon": 1.9})
RANDAGG = Method("DP-RandAgg", "dp-randagg", {"mask_first": False, "whole": "biases"})
MASKED = Method("DP-RandAgg, clipped after", "dp-randagg", {"whole": "biases"}, clip=0.3)
UV_FED = Method("UV-Fed", "uv-fed", {"whole": "biases"})
DP_FEDAVG = Method("DP-FedAvg", "dp-randagg", {"rank": 0}, compressed=False)
FEDAVG = Method("FedAvg", "randagg", {"rank": 0}, compressed=False)
METHODS = (CMP_FED, PUBLISHED, UNDERSTATED, RANDAGG, MASKED, UV_FED, DP_FEDAVG, FEDAVG)


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
        "training": {"batch": 10, "local_steps": 10, "learning_rate": 0.1, "momentum": 0.5, "clip": method.clip},
        "participation": {"kind": "poisson", "share": cohort / clients},
        "algorithm": {"name": method.name, "label": method.label, **options},
    }


def tuned(method: Method) -> Trial:
    """The trial by whose candidates a method's learning rate is chosen; a sixth of the agents' images judge it."""
    rates = [{"training.learning_rate": rate} for rate in RATES]
    return trial("cmp-fed", settings(method, "iid", RANKS[-1], agents=5000), experiments.CHOICE_SEED, rates)


def settled(method: Method, partition: Split, rank: int, seed: int, store: Store, quick: bool) -> Trial | None:
    """One training, at the learning rate chosen; nothing while it is not. In small there is no choice."""
    values = settings(method, partition, rank, quick)
    if not quick:
        chosen = experiments.settled(tuned(method), store)
        if chosen is None:
            return None
        values["training"]["learning_rate"] = json.loads(chosen.settings)["training"]["learning_rate"]
    return trial("cmp-fed", values, seed)


@dataclass(frozen=True)
class Wanted:
    """A cell of a table."""

    method: Method
    partition: Split
    rank: int


def cells(partition: Split, quick: bool, methods: Iterable[Method] = METHODS) -> tuple[Wanted, ...]:
    ranks = QUICK_RANKS if quick else RANKS
    return tuple(
        Wanted(method, partition, rank) for method in methods for rank in (ranks if method.compressed else (0,))
    )


def _part(kind: Literal["figure", "table"], number: str, title: str, make: Any, wanted: Any) -> Tabulated:
    return Tabulated("cmp-fed", kind, number, title, make, wanted)


_COMPARED = (CMP_FED, RANDAGG, DP_FEDAVG, FEDAVG)
PARTS: tuple[Tabulated, ...] = (
    _part(
        "figure", "1", "Accuracy by ε, by rank", by_epsilon,
        lambda q: (*cells("iid", q, [CMP_FED]), *cells("labels", q, [CMP_FED])),
    ),
    _part(
        "figure", "2", "Accuracy by uplink", by_uplink,
        lambda q: (*cells("iid", q, _COMPARED), *cells("labels", q, _COMPARED)),
    ),
    _part("table", "1", "Accuracy at ε = 1, images dealt at random", accuracies, lambda q: cells("iid", q)),
    _part("table", "2", "Accuracy at ε = 1, five labels each", accuracies, lambda q: cells("labels", q)),
)  # fmt: skip


def run(parts: Iterable[Tabulated], store: Store, means: Means, seeds: int, quick: bool, told: Told) -> None:
    """Choose learning rates, then run what is missing."""
    wanted = list(dict.fromkeys(cell for part in parts for cell in part.trials(quick)))
    if not quick:
        choices = [
            choice
            for method in METHODS
            for choice in experiments.choice_of(tuned(method))
            if any(cell.method == method for cell in wanted)
        ]
        experiments.run_all(choices, store, means, lambda _, *count: told("choosing learning rates", *count))
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
