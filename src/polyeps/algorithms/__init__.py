"""Every algorithm by name, and the budgets under which it is run: the only list of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from polyeps.algorithms.fedavg import fedavg, public_only
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


ALGORITHMS: dict[str, Entry] = {
    "fedavg": Entry(fedavg, "plain mean of all updates, every client within its own budget"),
    "minimum": Entry(fedavg, "FedAvg as if everybody had the strictest budget", "strictest"),
    "maximum": Entry(fedavg, "control: FedAvg as if everybody had the most liberal budget", "most-liberal"),
    "non-private": Entry(fedavg, "control: FedAvg without noise or promise", "none"),
    "public-only": Entry(public_only, "control: FedAvg over the most liberal clients alone"),
}
