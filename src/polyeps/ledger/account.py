"""A client's account: its budget and terms, its charges and reservations, and whether another charge fits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from dp_accounting.dp_event import DpEvent

from polyeps.accounting import affordability, best_accountant, rdp
from polyeps.accounting.events import check_uses
from polyeps.accounting.histories import History, history_of, is_pure
from polyeps.core import Adjacency, Budget, Unit, person_of
from polyeps.errors import InputError, UnknownEvent

# adaptive: later requests may depend on earlier answers, for instance when the next run is designed after the last.
#   A Rényi filter of one order, fixed beforehand, is valid then, also for concurrent runs (Haney et al., "Concurrent
#   Composition for Interactive Differential Privacy with Adaptive Privacy-Loss Parameters", CCS 2023).
# fixed: all requests were planned before the first answer; privacy losses then compose exactly.
Schedule = Literal["adaptive", "fixed"]
Obstacle = Literal["", "budget", "plan", "run"]


@dataclass(frozen=True, slots=True)
class BudgetTerms:
    """The terms of a client's budget: the limit, the unit and adjacency it protects, and the rule of composition.

    With a fixed schedule, `plan` is the one event that will be charged, as often as the budget allows. Without it, the
    first reservation is the plan. Stopping early, or changing the order within a plan, reveals no more than the whole
    plan, so the price of the whole plan is an upper bound.
    """

    budget: Budget
    unit: Unit = "record"
    adjacency: Adjacency = "zero-out"
    schedule: Schedule = "adaptive"
    order: float | None = None  # of the Rényi filter; fixed by the first budget, also when the budget is changed later
    plan: DpEvent | None = None
    person: str = ""  # what a person is called, where the unit is one: "patient"

    def __post_init__(self) -> None:
        object.__setattr__(self, "person", person_of(self.unit, self.person))
        if self.schedule not in get_args(Schedule):
            raise InputError(f"schedule is {self.schedule!r}; it must be adaptive or fixed")
        if self.plan is not None:
            if self.schedule != "fixed":
                raise InputError('a plan needs schedule = "fixed"; an adaptive ledger takes any event, leave it out')
            try:
                hash(self.plan)
            except TypeError:
                raise InputError("a plan must be one event; reserve the parts of a composition instead") from None
            if not history_of(self.plan):
                raise InputError("the plan is an event that releases nothing; name the event that will be charged")
        # At δ = 0 costs are added, which is a valid filter.
        if self.schedule == "adaptive" and self.order is None and self.budget.delta > 0:
            object.__setattr__(self, "order", rdp.filter_order(self.budget))
        if self.order is not None and not 1 < self.order < math.inf:
            raise InputError(f"order is {self.order}; the order of a Rényi filter must be above 1")

    @property
    def but_epsilon(self) -> tuple[Any, ...]:
        """All of the terms except ε."""
        delta = self.budget.delta
        return delta, self.unit, self.adjacency, self.schedule, self.order, self.plan, self.person

    def with_epsilon(self, epsilon: float) -> "BudgetTerms":
        """Return the same terms, checked already, with another ε: the order and the plan stay."""
        return self if epsilon == self.budget.epsilon else self.with_budget(Budget(epsilon, self.budget.delta))

    def with_budget(self, budget: Budget) -> "BudgetTerms":
        """Return the same terms, checked already, with a budget that differs in ε alone."""
        terms, put = object.__new__(BudgetTerms), object.__setattr__
        put(terms, "budget", budget)
        put(terms, "unit", self.unit)
        put(terms, "adjacency", self.adjacency)
        put(terms, "schedule", self.schedule)
        put(terms, "order", self.order)
        put(terms, "plan", self.plan)
        put(terms, "person", self.person)
        return terms


@dataclass(frozen=True)
class Charge:
    """One event, charged `uses` times to each of some clients."""

    clients: tuple[str, ...]
    event: DpEvent
    uses: int = 1
    unit: Unit = "record"
    adjacency: Adjacency | None = None  # of the algorithm; None: the event holds under any adjacency
    person: str = ""  # what a person is called, where the unit is one

    def __post_init__(self) -> None:
        object.__setattr__(self, "person", person_of(self.unit, self.person))
        object.__setattr__(self, "uses", check_uses(self.uses, least=1))
        object.__setattr__(self, "clients", tuple(self.clients))


@dataclass(eq=False)
class Standing:
    """What clients share whose terms, but for ε, and histories are equal; what follows a charge is computed once."""

    terms: BudgetTerms  # of one of these clients; others have another ε
    history: History = field(default_factory=dict)  # what was charged
    charges: int = 0
    reserved: Mapping[str, History] = field(default_factory=dict)  # not yet charged, by open run
    planned: str = ""  # the run whose reservation became the plan of a fixed schedule
    least: float = math.inf  # the smallest ε of these clients, where it is known
    holders: int = 0  # accounts in this standing
    # By charge: the obstacle that every ε meets ("budget": it depends on ε), and the standing afterwards.
    after: "dict[tuple[Any, ...], tuple[Obstacle, Standing]]" = field(default_factory=dict)
    _kept: list[float] = field(default_factory=lambda: [0.0, math.inf])  # all is above this ε, and within this one

    @property
    def committed(self) -> History:
        """Return all that was charged, or may still be charged to open runs."""
        together = self.history
        for left in self.reserved.values():
            together = joined(together, left)
        return together

    @cached_property
    def spent(self) -> float:
        """The ε of the history."""
        return self.price(self.history)

    def price(self, history: History) -> float:
        """Return the ε of a history under these terms."""
        terms = self.terms
        if not history:
            return 0.0
        if terms.order is not None:
            return rdp.filter_epsilon(history, terms.order, terms.budget.delta, terms.adjacency)
        return affordability.known_epsilon(history, terms.budget.delta, terms.adjacency, best_accountant(history))

    def affords(self, history: History, epsilon: float) -> bool:
        """Return whether a history stays within an ε."""
        if not history:
            return True
        if self.terms.order is not None:
            return self.price(history) <= epsilon
        budget = Budget(epsilon, self.terms.budget.delta)
        return affordability.fits(history, budget, self.terms.adjacency, best_accountant(history))

    def within(self, epsilon: float) -> bool:
        """Return whether all that is committed stays within an ε; most answers follow from earlier ones."""
        above, within = self._kept
        if not above < epsilon < within:
            return epsilon >= within
        committed = self.committed
        if above < self.least < epsilon and self.affords(committed, self.least):  # one answer then serves all
            self._kept[True] = self.least
            return True
        fits = bool(self.affords(committed, epsilon))
        self._kept[fits] = epsilon
        return fits

    def steps(
        self, event: DpEvent, uses: int, unit: Unit, adjacency: Adjacency | None = None, person: str = ""
    ) -> History:
        """Return the steps of a charge; refuse another unit, person or adjacency than that of the terms."""
        added = history_of(event, uses)
        if self.terms.adjacency == "add-remove" and adjacency not in (None, "add-remove") and not is_pure(added):
            raise UnknownEvent(
                f"a {adjacency} event cannot be charged to an add-remove budget, which hides how many records there "
                "are; train at a public rate (training.rate), or keep a zero-out ledger"
            )
        word = person_of(unit, person)
        whole = unit == "client" and is_pure(added)  # holds for any two inputs of a client, so also for a part of one
        if (unit, word) != (self.terms.unit, self.terms.person) and not whole:
            charged, kept = (f" ({one})" if one else "" for one in (word, self.terms.person))
            raise UnknownEvent(
                f"a {unit}-level event{charged} cannot be charged to a budget that protects a {self.terms.unit}{kept}; "
                "keep a second ledger for it"
            )
        return added

    def obstacle(self, added: History, run: str = "", *, reserving: bool = False) -> Obstacle:
        """Return why a charge to a run, or its reservation, is not possible; "budget" if only its ε can forbid it."""
        if not reserving:
            run = self._payer(run)
            if run:
                left = self.reserved.get(run)
                enough = left is not None and all(count <= left.get(step, 0) for step, count in added.items())
                return "" if enough else "run"
        if self.terms.schedule == "fixed" and not self._in_plan(added, run if reserving else ""):
            return "plan"
        return "budget"

    def sure_of(self, charge: Charge, epsilon: float) -> int:
        """Return how often a charge stays within an ε, as far as is known without accounting."""
        added = self.steps(charge.event, charge.uses, charge.unit, charge.adjacency, charge.person)
        if self.terms.order is not None or self.reserved or self.obstacle(added) != "budget":
            return 0
        budget, accountant = Budget(epsilon, self.terms.budget.delta), best_accountant(joined(self.history, added))
        return affordability.known_to_fit(self.history, added, budget, self.terms.adjacency, accountant)

    def charged(self, added: History, run: str = "", charges: int = 1) -> "Standing":
        """Return what follows charges, drawn from the run's reservation if it has one."""
        run, reserved = self._payer(run), self.reserved
        if run:
            left = {step: count - added.get(step, 0) for step, count in reserved[run].items()}
            reserved = {**reserved, run: {step: count for step, count in left.items() if count > 0}}
        history, charges = joined(self.history, added), self.charges + charges
        return Standing(self.terms, history, charges, reserved, self.planned, self.least)

    def reserving(self, added: History, run: str) -> "Standing":
        """Return what follows a reservation for a run."""
        planned = run if self.terms.schedule == "fixed" and self.terms.plan is None else ""
        reserved = {**self.reserved, run: joined(self.reserved.get(run, {}), added)}
        return Standing(self.terms, self.history, self.charges, reserved, planned, self.least)

    def released(self, run: str) -> "Standing":
        """Return what follows the end of a run: its unused reservation is free again."""
        reserved = {name: left for name, left in self.reserved.items() if name != run}
        return Standing(self.terms, self.history, self.charges, reserved, self.planned, self.least)

    def _payer(self, run: str) -> str:
        """Return the run whose reservation pays; where a reservation is the plan, it is the only one."""
        return run or (self.planned if self.planned in self.reserved else "")

    def _in_plan(self, added: History, run: str) -> bool:
        """Return whether a fixed schedule allows a charge, apart from its price."""
        if self.terms.plan is None:
            return bool(run) and self.planned in ("", run)
        planned = history_of(self.terms.plan)
        if added.keys() != planned.keys():
            return not added
        # Multiples of one bundle of steps: a budget that allows one also allows every smaller one.
        first, *others = planned
        return all(added[step] * planned[first] == added[first] * planned[step] for step in others)


@dataclass(eq=False, slots=True)
class ClientAccount:
    """A client's ε, and its standing, which it may share with a million others."""

    epsilon: float
    standing: Standing

    @classmethod
    def opened(cls, terms: BudgetTerms) -> "ClientAccount":
        """Return the account of a client that was charged nothing yet."""
        return cls(terms.budget.epsilon, Standing(terms))

    @property
    def terms(self) -> BudgetTerms:
        return self.standing.terms.with_epsilon(self.epsilon)

    def under(self, terms: BudgetTerms) -> bool:
        """Return whether these are the account's terms."""
        mine = self.standing.terms
        return (
            self.epsilon == terms.budget.epsilon
            and mine.budget.delta == terms.budget.delta
            and (mine.unit, mine.person, mine.adjacency) == (terms.unit, terms.person, terms.adjacency)
            and (mine.schedule, mine.order, mine.plan) == (terms.schedule, terms.order, terms.plan)
        )

    @property
    def history(self) -> History:
        return self.standing.history

    @property
    def charges(self) -> int:
        return self.standing.charges

    @property
    def reserved(self) -> Mapping[str, History]:
        return self.standing.reserved

    @property
    def committed(self) -> History:
        return self.standing.committed

    def spent(self, history: History | None = None) -> float:
        """Return the ε of this account's history (or of another one, under the same terms)."""
        return self.standing.spent if history is None else self.standing.price(history)

    def affords(self, history: History) -> bool:
        """Return whether a history stays within these terms."""
        return self.standing.affords(history, self.epsilon)

    def with_charge(self, event: DpEvent, uses: int) -> History:
        """Return the history after a charge under the same terms."""
        terms = self.standing.terms
        return joined(self.history, self.standing.steps(event, uses, terms.unit, person=terms.person))

    def obstacle(self, added: History, run: str = "", *, reserving: bool = False) -> Obstacle:
        """Return why a charge to a run, or its reservation, is not possible; "" if it is."""
        found = self.standing.obstacle(added, run, reserving=reserving)
        return "" if found == "budget" and self.affords(joined(self.committed, added)) else found


def joined(history: History, added: History) -> History:
    """Return a history with more steps."""
    together = dict(history)
    for step, count in added.items():
        together[step] = together.get(step, 0) + count
    return together
