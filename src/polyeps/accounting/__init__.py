"""Privacy accounting: the ε that events cost, and the noise that spends a budget.

`events` describes releases and `histories` counts them; the accountants `pld` and `rdp` price a history;
`affordability` compares it with a budget; `calibration` finds the noise multiplier for a budget.
"""

import math
from collections import Counter
from typing import Literal

import numpy as np
from dp_accounting.dp_event import DpEvent, RepeatAndSelectDpEvent

from polyeps.accounting import pld, rdp
from polyeps.accounting.discrete_gaussians import as_gaussians
from polyeps.accounting.events import (
    DiscreteGaussianSumDpEvent,
    Poisson,
    SkellamDpEvent,
    TogetherDpEvent,
    check_adjacency,
)
from polyeps.accounting.histories import History, history_of, pure_sum, without_failures
from polyeps.accounting.known_cohorts import with_draws_known
from polyeps.core import Adjacency, check_delta
from polyeps.errors import InputError

Accountant = Literal["pld", "rdp"]
_ACCOUNTANTS = {"pld": pld.pld_epsilon, "rdp": rdp.rdp_epsilon}
_BY_RDP = SkellamDpEvent | DiscreteGaussianSumDpEvent | TogetherDpEvent | RepeatAndSelectDpEvent


def epsilon(
    event: DpEvent, delta: float, *, adjacency: Adjacency = "zero-out", accountant: Accountant = "pld"
) -> float:
    """Return the ε an event costs at δ.

    >>> from polyeps.accounting.events import Gaussian
    >>> round(epsilon(Gaussian(2.0), 1e-5), 6)
    1.993091
    """
    return history_epsilon(history_of(event), delta, adjacency, accountant)


def history_epsilon(history: History, delta: float, adjacency: Adjacency, accountant: Accountant) -> float:
    """Return the ε of a history at δ: an upper bound, infinite where nothing is guaranteed."""
    check_delta(delta)
    check_adjacency(adjacency)
    if accountant not in _ACCOUNTANTS:
        raise InputError(f"there is no accountant {accountant!r}; choose one of {', '.join(_ACCOUNTANTS)}")
    try:
        history, failure = without_failures(history)
        if failure >= delta > 0 or failure > delta:
            return math.inf
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            return _ACCOUNTANTS[accountant](history, delta - failure, adjacency)
    except ArithmeticError:  # a number out of a double's range: only the plain sum is known
        return pure_sum(history)


def best_accountant(history: History) -> Accountant:
    """Return "pld", unless a step has no privacy loss distribution in closed form."""
    for step in as_gaussians(history):
        inner = step.event if isinstance(step, Poisson) else step
        if isinstance(inner, _BY_RDP):
            return "rdp"
    return "pld"


def epsilon_if_draws_known(history: History, delta: float, adjacency: Adjacency) -> float:
    """Return the ε against an observer that knows in which rounds a client was drawn, such as the server.

    For Gaussian noise the number of draws is left to chance. For integer noise that is not nearly Gaussian the client
    counts as drawn every time, which costs no less.
    """
    known = with_draws_known(as_gaussians(history), adjacency) if delta > 0 else None
    if known is not None:
        return 0.0 if known.delta(0.0) <= delta else known.epsilon(delta)
    always: Counter[DpEvent] = Counter()
    for step, uses in history.items():
        while isinstance(step, Poisson):
            step = step.event
        always += history_of(step, uses)
    return history_epsilon(always, delta, adjacency, best_accountant(always))
