"""Every built-in algorithm by name, and the blocks that an own algorithm is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from polyeps.algorithms._averaging import ask_updates, mean, step, with_local_noise
from polyeps.algorithms.alone import alone
from polyeps.algorithms.balanced import balanced
from polyeps.algorithms.cmp_fed import cmp_fed, dp_randagg
from polyeps.algorithms.dp_scaffold import dp_scaffold
from polyeps.algorithms.fedavg import fedavg, public_only
from polyeps.algorithms.fedhdp import fedhdp
from polyeps.algorithms.fedsel import compressed, exact, fedsel, flat
from polyeps.algorithms.idp import idp
from polyeps.algorithms.pdp_fl import pdp_fl
from polyeps.algorithms.pfa import pfa, pfa_plus
from polyeps.algorithms.robust_hdp import robust_hdp
from polyeps.algorithms.weiavg import weiavg
from polyeps.core import Algorithm

__all__ = ["ALGORITHMS", "BudgetRule", "Entry", "ask_updates", "mean", "step", "with_local_noise"]

# own: every client's own budget. minimum, maximum: everybody under the smallest or largest budget of all.
# none: no noise, no guarantee. exceeded: more than the clients' own budgets, and charged as such.
BudgetRule = Literal["own", "minimum", "maximum", "none", "exceeded"]


@dataclass(frozen=True)
class Entry:
    """How to build an algorithm, what it does, and whose budgets it may spend."""

    build: Callable[..., Algorithm]
    summary: str
    budgets: tuple[BudgetRule, ...] = ("own",)  # the values of algorithm.budgets, the default first
    options: Mapping[str, Any] = field(default_factory=dict)  # of the builder, settled by the name
    # What clients do with their records, and so the arguments of a builder. training: they train as the settings say.
    # gradient: they take one gradient over all of them; builders are given a `Course` as well. sums: whole clients are
    # protected by noise on sums, which may have any training inside; builders are given a `Federation` instead.
    local: Literal["training", "gradient", "sums"] = "training"
    idle: tuple[str, ...] = ()  # options that change nothing without noise: refused under budgets = "none"
    rates: bool = False  # whether budgets set clients' sampling rates, under one noise multiplier for all
    common: bool = True  # whether clients train a common model; without one, each client's own model is evaluated


ALGORITHMS: Mapping[str, Entry] = MappingProxyType(
    {
        "fedavg": Entry(fedavg, "plain mean of all updates", ("own", "minimum", "maximum", "none")),
        "public-only": Entry(public_only, "control: plain mean over the high-ε clients alone"),
        "alone": Entry(
            alone,
            "no federation: every client trains by itself; figures are means over clients' own models",
            ("own", "none"),
            common=False,
        ),
        "weiavg": Entry(weiavg, "mean of all updates, weighted by the disclosed budgets"),
        "balanced": Entry(balanced, "mean of all updates, weighted by their noise and by how much clients differ"),
        "pfa": Entry(pfa, "private updates projected onto the subspace of the public ones"),
        "pfa-plus": Entry(pfa_plus, "PFA with the last round's subspace and thin private uploads"),
        "pdp-fl": Entry(pdp_fl, "PFA with groups and weights estimated from updates, without disclosed budgets"),
        "pdp-fl-plus": Entry(pdp_fl, "PFA+ with groups estimated from updates", options={"delayed": True}),
        "robust-hdp": Entry(robust_hdp, "mean of all updates, weighted by noise that is estimated by robust PCA"),
        "idp": Entry(idp, "one noise multiplier for all; each client samples at a rate of its own", rates=True),
        "dp-scaffold": Entry(
            dp_scaffold,
            "mean of updates corrected by control variates, for clients with different data",
            ("own", "none"),
        ),
        "fedsel": Entry(
            fedsel,
            "one coordinate, chosen privately, and its private value",
            options={"on_top": False},
            local="gradient",
        ),
        "fedsel-extra": Entry(
            fedsel,
            "control: FedSel with the choice of the coordinate charged on top of the budget",
            ("exceeded",),
            {"on_top": True},
            "gradient",
        ),
        "fedsel-flat": Entry(flat, "private values of random coordinates, enlarged to be unbiased", local="gradient"),
        "fedsel-compressed": Entry(
            compressed, "a private value of the randomly projected gradient, recovered by the server", local="gradient"
        ),
        "fedsel-exact": Entry(exact, "gradients, or a coordinate of them", ("none",), local="gradient"),
        "fedhdp": Entry(
            fedhdp,
            "sums per privacy level, weighted by their noise, and personal models",
            ("own", "minimum", "none"),
            local="sums",
            idle=("noise",),
        ),
        "cmp-fed": Entry(
            cmp_fed,
            "updates as two thin factors, each in one secure sum",
            ("minimum", "none"),
            local="sums",
            idle=("noise", "split", "clip_subspace", "clip_embedding", "colluders"),
        ),
        "dp-randagg": Entry(
            dp_randagg,
            "random coordinates of all updates in one secure sum",
            ("minimum", "none"),
            local="sums",
            idle=("noise", "mask_first", "colluders"),
        ),
    }
)
