"""Work planned by budget: the batch and the local steps with which a client's update has least noise.

With `training.batch = "auto"` or `training.local_steps = "auto"`, every client gets a sampling rate q and a number s of
steps a round. They are judged by the noise of its update in a round, at equal progress: s steps of learning rate 1/s,
on batches of b = qN of its N records, with the noise multiplier σ that its budget leaves for this schedule:

    noise² = (d σ²/b² + (1 - q)/b) / s      in units of the clip norm; d is the number of parameters

The first term is the noise added for privacy, the second bounds that of drawing batches. Of all schedules of a small
grid whose noise is within 2 % of the least, a client takes the one with the least work q·s. Full batches always have
the least noise; a low-ε client has as little with small batches, a high-ε client has not.

Everything here is public or the client's own: the rounds, d, N (public under zero-out) and its own budget. A simulation
plans for all clients; a deployed client can do it by itself, and sends neither its batch nor its budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.accounting import cache
from polyeps.accounting.calibration import ProgressCallback, calibrate_each
from polyeps.core import Budget, PerClient
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.training import Training

_CLOSE = 1.02  # noise this close to the least is as good
_STEPS = (1, 2, 5, 10, 20, 50)
USUAL_WORK = (8, 20)  # batch and steps by default: no batch is smaller, and gains are stated over them
_Floats = NDArray[np.float64]


def plans_work(settings: config.TrainingSettings) -> bool:
    """Return whether clients' batches or steps are planned by their budgets."""
    return "auto" in (settings.batch, settings.local_steps)


def check_planned(settings: config.TrainingSettings, method: config.Method, local: str, common: float | None) -> None:
    """Refuse planned work where it has no meaning: local work of another kind, or noise of another origin."""
    auto = f'training.{"batch" if settings.batch == "auto" else "local_steps"} = "auto"'
    if local != "training":
        raise InputError(f"{auto} does not apply to {method.name}, whose clients' steps have no noise; give a number")
    if method.form == "published":
        raise InputError(f"{auto} is in no paper, so it has no published form; leave out form, or give a number")
    if settings.rate is not None:
        raise InputError(f"{auto} depends on the number of records, which training.rate hides; leave out one of them")
    if common is not None:
        raise InputError(f"{auto} needs noise calibrated to each budget; leave out budgets.noise_multiplier")
    if settings.momentum and settings.local_steps == "auto":
        raise InputError(f"{auto}: momentum has more effect on clients with more steps; leave out training.momentum")


@dataclass(frozen=True)
class LocalWork:
    """The schedules of n clients."""

    rate: _Floats
    steps: NDArray[np.int64]

    def settings(self, wanted: config.TrainingSettings) -> dict[str, NDArray[Any]]:
        """Return the clients' own settings; where numbers of steps differ, they divide the learning rate of a round."""
        own: dict[str, NDArray[Any]] = {"rate": self.rate, "steps": self.steps}
        return own | ({"learning_rate": wanted.learning_rate / self.steps} if wanted.local_steps == "auto" else {})


@dataclass(frozen=True)
class WorkPlanner:
    """What the schedules of some clients are judged by."""

    training: Training
    sizes: NDArray[np.int64]
    budgets: Sequence[Budget]
    rounds: int  # that noise is calibrated for
    progress: ProgressCallback | None = None

    def noise(self, work: LocalWork) -> _Floats:
        """Return the noise of each client's update in a round, in clip norms, at equal progress."""
        price = self.training.price
        assert price is not None

        def event(multiplier: float, row: int) -> Any:
            own = {"records": self.sizes[row], "rate": work.rate[row], "steps": work.steps[row]}
            return price(multiplier, {name: float(value) for name, value in own.items()})

        sigma = calibrate_each(
            self.budgets, event, self.rounds, directory=cache.default_directory(), progress=self.progress
        ).noise_multiplier
        batch = work.rate * self.sizes
        variance = self.training.model.size * np.square(sigma / batch) + (1 - work.rate) / batch
        found: _Floats = np.sqrt(variance / work.steps)
        return found

    def usual(self, wanted: config.TrainingSettings) -> LocalWork:
        """Return the schedules without planning: those that are given, or else the usual ones."""
        batch = USUAL_WORK[0] if wanted.batch == "auto" else wanted.batch
        steps = USUAL_WORK[1] if wanted.local_steps == "auto" else wanted.local_steps
        return LocalWork(np.minimum(batch / self.sizes, 1.0), np.full(len(self.sizes), steps))

    def plan(self, wanted: config.TrainingSettings) -> LocalWork:
        """Return the schedule of each client."""
        tried = [wanted.local_steps] if wanted.local_steps != "auto" else [*_STEPS]
        rate = np.ones(len(self.sizes)) if wanted.batch == "auto" else wanted.batch / self.sizes
        found = [LocalWork(rate, np.full(len(self.sizes), steps)) for steps in tried]
        noise = np.array([self.noise(work) for work in found])  # (steps, n)
        least = noise.min(0)
        if wanted.batch == "auto":  # full batches have the least noise, whatever the steps, up to rounding
            found = [self._smallest(work.steps, least) for work in found]
            noise = np.broadcast_to(least, noise.shape)
        rates, steps_of = (np.array([getattr(work, name) for work in found]) for name in ("rate", "steps"))
        chosen = np.where(noise <= _CLOSE * least, rates * steps_of, math.inf).argmin(0)
        rows = np.arange(len(self.sizes))
        return LocalWork(rates[chosen, rows], steps_of[chosen, rows])

    def _smallest(self, steps: NDArray[np.int64], least: _Floats) -> LocalWork:
        """Return the smallest rates, powers of 1/2, that have close to the least noise; noise falls with the rate."""
        enough = np.zeros(len(steps), np.int64)  # exponents: known to be good, and too large
        beyond = np.floor(np.log2(np.maximum(self.sizes / USUAL_WORK[0], 1.0))).astype(np.int64) + 1
        while np.any(left := beyond - enough > 1):
            middle = np.where(left, (enough + beyond) // 2, enough)
            fits = self.noise(LocalWork(np.exp2(-1.0 * middle), steps)) <= _CLOSE * least
            enough, beyond = np.where(left & fits, middle, enough), np.where(left & ~fits, middle, beyond)
        return LocalWork(np.exp2(-1.0 * enough), steps)


def planned_work(planner: WorkPlanner | None, wanted: config.TrainingSettings, clients: int) -> dict[str, NDArray[Any]]:
    """Return the clients' own settings; without a planner they add no noise, and use all their records.

    A budget that affords no schedule is left to calibration, which names the client.
    """
    steps = USUAL_WORK[1] if wanted.local_steps == "auto" else wanted.local_steps
    whole = LocalWork(np.ones(clients), np.full(clients, steps))
    try:
        return (whole if planner is None else planner.plan(wanted)).settings(wanted)
    except InputError:
        return whole.settings(wanted)


def gains_of_plan(planner: WorkPlanner, wanted: config.TrainingSettings, settings: PerClient) -> list[float]:
    """Return how many times less noise each client has than without planning."""
    chosen = LocalWork(settings["rate"], settings["steps"])
    gains: list[float] = (planner.noise(planner.usual(wanted)) / planner.noise(chosen)).tolist()
    return gains
