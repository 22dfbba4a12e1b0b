"""What an owner agreed to, what was charged since, and whether more would still fit."""

from dataclasses import dataclass, field
from typing import Literal

from dp_accounting.dp_event import DpEvent

from polyeps.accounting import afford, rdp
from polyeps.accounting.events import History, history_of, is_pure
from polyeps.core import Adjacency, Budget, Unit
from polyeps.errors import UnknownEvent

# fixed: what will be asked was settled without looking at the client's answers; privacy losses then compose exactly.
# adaptive: later requests may depend on earlier answers; only a Rényi filter is known to hold then.
Schedule = Literal["fixed", "adaptive"]


@dataclass(frozen=True)
class Terms:
    """What an owner agreed to: a budget, what it protects, and under which rule it is spent."""

    budget: Budget
    unit: Unit = "record"
    adjacency: Adjacency = "zero-out"
    schedule: Schedule = "fixed"
    order: float | None = None  # of the Rényi filter; settled with the first budget and kept when that is changed

    def __post_init__(self) -> None:
        # At δ = 0 costs are simply added, which is a valid filter as it is.
        if self.schedule == "adaptive" and self.order is None and self.budget.delta > 0:
            object.__setattr__(self, "order", rdp.filter_order(self.budget))


@dataclass(frozen=True)
class Charge:
    """One event to be paid for, `uses` times, by each of some clients."""

    clients: tuple[str, ...]
    event: DpEvent
    uses: int = 1
    unit: Unit = "record"


@dataclass(eq=False)
class Account:
    """Terms and history that any number of clients may share; what each charge leads to is worked out once."""

    terms: Terms
    history: History = field(default_factory=dict)
    charges: int = 0
    after: "dict[tuple[str, int, Unit], Account]" = field(default_factory=dict)

    def spent(self, history: History | None = None) -> float:
        """The ε of this account's history (or of another one, under the same terms)."""
        history = self.history if history is None else history
        terms = self.terms
        if not history:
            return 0.0
        if terms.order is not None:
            return rdp.filter_epsilon(history, terms.order, terms.budget.delta, terms.adjacency)
        return afford.known_epsilon(history, terms.budget.delta, terms.adjacency, afford.best_accountant(history))

    def affords(self, history: History) -> bool:
        """Whether a history stays within these terms."""
        terms = self.terms
        if not history:
            return True
        if terms.order is not None:
            return self.spent(history) <= terms.budget.epsilon
        return afford.fits(history, terms.budget, terms.adjacency, afford.best_accountant(history))

    def with_charge(self, event: DpEvent, uses: int, unit: Unit) -> History:
        """The history after a charge; refuses what protects another unit than these terms do."""
        added = history_of(event, uses)
        if unit != self.terms.unit and not is_pure(added):
            raise UnknownEvent(
                f"a {unit}-level event cannot be charged to a budget that protects a {self.terms.unit}; "
                "keep a second ledger for it"
            )
        together = dict(self.history)
        for step, count in added.items():
            together[step] = together.get(step, 0) + count
        return together
