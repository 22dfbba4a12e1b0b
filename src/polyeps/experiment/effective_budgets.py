"""The budgets a method runs under: the clients' own, the strictest of all, or those a control pretends."""

from __future__ import annotations

from collections.abc import Sequence

from polyeps.algorithms import Entry
from polyeps.core import Budget
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.population import Population

_UNDER = {"none": "no budget", "strictest": "the strictest of the clients' budgets"}


def in_force(method: config.Method, entry: Entry, people: Population) -> tuple[Budget | None, ...] | None:
    """What every client is promised; nothing where nobody is promised anything."""
    promised = all_promised(people.budgets)
    everyone = len(people.budgets)
    if method.epsilon is not None:
        return (_pretended(method, method.epsilon, entry, promised),) * everyone
    match entry.budgets:
        case "none":
            return None
        case "strictest":
            return (_strictest(promised),) * everyone
        case "most-liberal":
            return (max(promised),) * everyone
    if entry.local != "sums" and len(promised) < everyone:
        open_one = people.ids[people.budgets.index(None)]
        raise InputError(
            f"client {open_one!r} chose to be promised nothing, but {method.name} protects everybody by a budget of "
            "their own; give every level of the menu an epsilon, or choose fedhdp"
        )
    return people.budgets


def all_promised(budgets: Sequence[Budget | None]) -> tuple[Budget, ...]:
    return tuple(budget for budget in budgets if budget is not None)


def _strictest(promised: Sequence[Budget]) -> Budget:
    """What is within everybody's budget: who has the least ε need not have the least δ."""
    return Budget(min(budget.epsilon for budget in promised), min(budget.delta for budget in promised))


def _pretended(method: config.Method, epsilon: float, entry: Entry, promised: Sequence[Budget]) -> Budget:
    """The ε a control names instead of the clients' own; only `maximum` may take more of them than they allow."""
    if entry.local == "sums" or entry.budgets not in ("strictest", "most-liberal"):
        under = _UNDER.get(entry.budgets, "the clients' own budgets")
        raise InputError(
            f"algorithm.epsilon is for the controls minimum and maximum, and {method.name} runs under {under}; "
            "leave it out"
        )
    strictest = _strictest(promised)
    if entry.budgets == "strictest" and epsilon > strictest.epsilon:
        raise InputError(
            f"algorithm.epsilon = {epsilon:g} is more than the strictest budget {strictest.epsilon:g}, and "
            f"{method.name} charges nobody beyond their own; lower it, or choose maximum"
        )
    return Budget(epsilon, strictest.delta)
