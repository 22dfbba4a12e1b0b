"""Every algorithm by name, and the budgets under which it is run: the only list of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from polyeps.algorithms.fedavg import fedavg, public_only
from polyeps.algorithms.pdp_fl import pdp_fl
from polyeps.algorithms.pfa import pfa
from polyeps.algorithms.pfa_plus import pfa_plus
from polyeps.algorithms.weiavg import weiavg
from polyeps.core import Algorithm

# own: every client's own budget. strictest, most-liberal: everybody under the smallest or largest one of all,
# as if they had agreed to it. none: no budget, no noise, no promise.
Budgets = Literal["own", "strictest", "most-liberal", "none"]


@dataclass(frozen=True)
class Entry:
    """How to build an algorithm, what it is, and whose budgets it spends."""

    build: Callable[..., Algorithm]
    summary: str
    budgets: Budgets = "own"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the builder, settled by the name


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
}
