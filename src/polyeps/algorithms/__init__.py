"""Every algorithm by name, and the budgets under which it is run: the only list of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from polyeps.algorithms.cmp_fed import cmp_fed
from polyeps.algorithms.dp_randagg import dp_randagg
from polyeps.algorithms.fedavg import fedavg, public_only
from polyeps.algorithms.fedhdp import fedhdp
from polyeps.algorithms.fedsel import fedsel
from polyeps.algorithms.fedsel_baselines import compressed, exact, flat
from polyeps.algorithms.pdp_fl import pdp_fl
from polyeps.algorithms.pfa import pfa
from polyeps.algorithms.pfa_plus import pfa_plus
from polyeps.algorithms.weiavg import weiavg
from polyeps.core import Algorithm

# own: every client's own budget. strictest, most-liberal: everybody under the smallest or largest one of all,
# as if they had agreed to it. exceeded: more than their own, and charged as such. none: no budget, no promise.
Budgets = Literal["own", "strictest", "most-liberal", "exceeded", "none"]


@dataclass(frozen=True)
class Entry:
    """How to build an algorithm, what it is, and whose budgets it spends."""

    build: Callable[..., Algorithm]
    summary: str
    budgets: Budgets = "own"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the builder, settled by the name
    # What clients do with their records, and so what a builder is given. training: they train as the settings say.
    # gradient: they take one gradient over all of them; builders are given a `Course` as well. sums: whole clients are
    # protected by noise on sums, which may have any training inside; builders are given a `Federation` instead.
    local: Literal["training", "gradient", "sums"] = "training"
    idle: tuple[str, ...] = ()  # options of the builder that change nothing without noise, and are refused


ALGORITHMS: dict[str, Entry] = {
    "fedavg": Entry(fedavg, "plain mean of all updates, every client within its own budget"),
    "minimum": Entry(fedavg, "FedAvg as if everybody had the strictest budget", "strictest"),
    "maximum": Entry(fedavg, "control: FedAvg as if everybody had the most liberal budget", "most-liberal"),
    "non-private": Entry(fedavg, "control: FedAvg without noise or promise", "none"),
    "public-only": Entry(public_only, "control: FedAvg over the most liberal clients alone"),
    "weiavg": Entry(weiavg, "mean of all updates, weighted by the disclosed budgets"),
    "pfa": Entry(pfa, "private updates projected onto the subspace of the public ones"),
    "pfa-plus": Entry(pfa_plus, "PFA with the last round's subspace and thin private uploads"),
    "pdp-fl": Entry(pdp_fl, "PFA with groups and weights estimated from updates; budgets stay hidden"),
    "pdp-fl-plus": Entry(pdp_fl, "PFA+ with estimated groups; budgets stay hidden", options={"delayed": True}),
    "fedsel": Entry(
        fedsel, "one coordinate, chosen privately, and its private value", options={"on_top": False}, local="gradient"
    ),
    "fedsel-extra": Entry(
        fedsel, "control: FedSel whose choice comes on top of the budget", "exceeded", {"on_top": True}, "gradient"
    ),
    "fedsel-flat": Entry(flat, "private values of random coordinates, enlarged to be unbiased", local="gradient"),
    "fedsel-compressed": Entry(
        compressed, "a private value of the randomly projected gradient, recovered by the server", local="gradient"
    ),
    "fedhdp": Entry(fedhdp, "whole clients protected, at the levels they chose; personal models", local="sums"),
    "dp-fedavg": Entry(
        fedhdp, "FedAvg that protects whole clients, everybody at the strictest level", "strictest", local="sums"
    ),
    "fedhdp-open": Entry(fedhdp, "control: FedHDP with nobody protected", "none", local="sums", idle=("noise",)),
    "cmp-fed": Entry(
        cmp_fed,
        "updates as two thin factors, summed unseen with noise; whole clients protected",
        "strictest",
        local="sums",
    ),
    "uv-fed": Entry(
        cmp_fed,
        "control: CMP-Fed without noise, clip or promise",
        "none",
        local="sums",
        idle=("noise", "split", "clip_subspace", "clip_embedding", "colluders"),
    ),
    "dp-randagg": Entry(
        dp_randagg,
        "random coordinates of updates, summed unseen with noise; whole clients protected",
        "strictest",
        local="sums",
    ),
    "randagg": Entry(
        dp_randagg,
        "control: DP-RandAgg without noise, clip or promise",
        "none",
        local="sums",
        idle=("noise", "mask_first", "colluders"),
    ),
    "fedsel-exact": Entry(exact, "control: gradients, or a coordinate of them, as they are", "none", local="gradient"),
}
