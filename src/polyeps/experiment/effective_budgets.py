"""The budgets a method runs under: the clients' own, or those that `algorithm.budgets` puts in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyeps.algorithms import BudgetRule, Entry
from polyeps.core import Budget
from polyeps.errors import InputError
from polyeps.experiment import config

if TYPE_CHECKING:
    from polyeps.experiment.population import Population


def whose_budgets(method: config.Method, entry: Entry) -> BudgetRule:
    """Return whose budgets a method spends: what its table says, or the algorithm's default."""
    if method.budgets is None:
        return entry.budgets[0]
    if method.budgets not in entry.budgets:
        allowed = " or ".join(f'"{one}"' for one in entry.budgets if one != "exceeded")
        raise InputError(
            f'algorithm.budgets = "{method.budgets}" is not for {method.name}; '
            + (f"choose {allowed}, or leave it out" if allowed else "leave it out")
        )
    return method.budgets


def effective_budgets(method: config.Method, entry: Entry, population: Population) -> tuple[Budget | None, ...] | None:
    """Return every client's effective budget, None for a client without a guarantee; None where no client has one."""
    known, clients = guaranteed(population.budgets), len(population.budgets)
    whose = whose_budgets(method, entry)
    if method.epsilon is not None:
        return (_replaced(method, method.epsilon, entry, whose, known),) * clients
    match whose:
        case "none":
            return None
        case "minimum":
            return (_smallest(known),) * clients
        case "maximum":
            return (max(known),) * clients
    if entry.local != "sums" and len(known) < clients:
        client = population.ids[population.budgets.index(None)]
        raise InputError(
            f"client {client!r} chose a privacy level without an epsilon, but {method.name} protects every client by "
            "a budget of its own; give every level in budgets.levels an epsilon, or choose fedhdp"
        )
    return population.budgets


def guaranteed(budgets: Sequence[Budget | None]) -> tuple[Budget, ...]:
    """Return the budgets of the clients that have a guarantee."""
    return tuple(budget for budget in budgets if budget is not None)


def described(summary: str, whose: BudgetRule) -> str:
    """Return what a method does, with the budgets it spends."""
    match whose:
        case "minimum":
            return f"{summary}, every client under the smallest budget of all"
        case "maximum":
            return f"control: {summary}, every client under the largest budget of all"
        case "none":
            return f"control: {summary}, without noise or guarantee"
    return summary


def _smallest(budgets: Sequence[Budget]) -> Budget:
    """Return what is within every budget: the client with the smallest ε need not have the smallest δ."""
    return Budget(min(budget.epsilon for budget in budgets), min(budget.delta for budget in budgets))


def _replaced(
    method: config.Method, epsilon: float, entry: Entry, whose: BudgetRule, known: Sequence[Budget]
) -> Budget:
    """Return the budget with the ε that a control names; only "maximum" may exceed the clients' own."""
    if entry.local == "sums" or whose not in ("minimum", "maximum"):
        raise InputError(
            f"algorithm.epsilon = {epsilon:g} changes nothing about {method.title}: it is for methods that train "
            'locally with budgets = "minimum" or "maximum"; leave it out'
        )
    smallest = _smallest(known)
    if whose == "minimum" and epsilon > smallest.epsilon:
        raise InputError(
            f"algorithm.epsilon = {epsilon:g} is more than the smallest budget {smallest.epsilon:g}, and "
            'budgets = "minimum" exceeds no client\'s own; lower it, or take budgets = "maximum"'
        )
    return Budget(epsilon, smallest.delta)
