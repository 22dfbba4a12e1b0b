"""What holds against those who know in which rounds a client was drawn: the server that draws, or fellow clients."""

from collections import Counter

from dp_accounting.dp_event import DpEvent

from polyeps.accounting import judge
from polyeps.accounting.afford import best_accountant
from polyeps.accounting.events import History, Poisson, history_of
from polyeps.accounting.lattice import as_gaussians
from polyeps.accounting.open_cohorts import with_draws_known
from polyeps.core import Adjacency


def epsilon_if_draws_known(history: History, delta: float, adjacency: Adjacency) -> float:
    """Return the ε of a history of sampled releases when the samples are known.

    How often a client was drawn is left to chance for Gaussian noise. For integer noise that is not nearly Gaussian the
    client counts as drawn every time, which costs no less.
    """
    known = with_draws_known(as_gaussians(history), adjacency) if delta > 0 else None
    if known is not None:
        return 0.0 if known.delta(0.0) <= delta else known.epsilon(delta)
    always: Counter[DpEvent] = Counter()
    for step, uses in history.items():
        while isinstance(step, Poisson):
            step = step.event
        always += history_of(step, uses)
    return judge(always, delta, adjacency, best_accountant(always))
