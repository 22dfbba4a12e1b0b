"""The arithmetic of privacy: what events cost, judged by PLD or RDP, and how to buy exactly a budget's worth.

`events` says what can happen; `profiles` and `pld` judge it exactly, `rdp` judges what they cannot; `afford`
asks what a budget can still buy; `calibration` inverts any price for many budgets at once.
"""

import math
from typing import Literal

import numpy as np
from dp_accounting.dp_event import DpEvent

from polyeps.accounting import pld, rdp
from polyeps.accounting.events import History, check_adjacency, history_of, pure_sum, without_failures
from polyeps.core import Adjacency, check_delta
from polyeps.errors import InputError

Accountant = Literal["pld", "rdp"]
_JUDGES = {"pld": pld.epsilon, "rdp": rdp.epsilon}


def judge(history: History, delta: float, adjacency: Adjacency, accountant: Accountant) -> float:
    """The ε of a history at δ: an upper bound, infinite when nothing is promised."""
    check_delta(delta)
    check_adjacency(adjacency)
    if accountant not in _JUDGES:
        raise InputError(f"there is no accountant {accountant!r}; choose one of {', '.join(_JUDGES)}")
    try:
        history, failure = without_failures(history)
        if failure >= delta > 0 or failure > delta:
            return math.inf
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            return _JUDGES[accountant](history, delta - failure, adjacency)
    except ArithmeticError:  # on the way was what no double can hold: then nothing but a sum is known
        return pure_sum(history)


def epsilon(
    event: DpEvent, delta: float, *, adjacency: Adjacency = "zero-out", accountant: Accountant = "pld"
) -> float:
    """The ε an event costs at δ.

    >>> from polyeps.accounting.events import Gaussian
    >>> round(epsilon(Gaussian(2.0), 1e-5), 6)
    1.993091
    """
    return judge(history_of(event), delta, adjacency, accountant)
