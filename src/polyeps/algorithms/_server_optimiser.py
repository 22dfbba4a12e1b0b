"""The server's optimiser: learning rate, momentum and averaging of iterates, around the round of any algorithm.

    v ← momentum · v + Δ        Δ: the update that the algorithm has aggregated
    x ← x + learning_rate · v   the iterate, from which clients train
    a ← β · a + (1 - β) · x     β = averaging; corrected for its start, so that the weights of iterates add up to 1

It only processes what was released, so it changes no price. A state's model is the average, which is evaluated and
saved; the iterate is kept beside it. A round without an answer changes nothing: momentum does not carry the model on.
Where there is no common model (`alone`), each client has the optimiser for its own model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyeps.algorithms._personal_models import personal_models
from polyeps.core import Action, Algorithm, Ask, Payload, State, Work
from polyeps.errors import InputError

_ITERATE, _VELOCITY, _STEPS = "server_iterate", "server_velocity", "server_steps"
_OWN = (_ITERATE, _VELOCITY, _STEPS)


@dataclass(frozen=True)
class ServerOptimiser:
    """The settings of the optimiser; by default it adds every update to the model as it is."""

    learning_rate: float = 1.0
    momentum: float = 0.0
    averaging: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"server.learning_rate must be a finite number above 0, not {self.learning_rate}")
        for name in ("momentum", "averaging"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"server.{name} must be at least 0 and below 1, not {getattr(self, name)}")

    @property
    def gain(self) -> float:
        """How far an update moves the model in the end, in lengths of the update."""
        return self.learning_rate / (1 - self.momentum)

    def memory(self, size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what it keeps for a model of so many parameters, all zero at first."""
        shapes = {_VELOCITY: (size,), _ITERATE: (size,), _STEPS: ()}
        return {name: shapes[name] for name in self._kept}

    def iterate(self, kept: Payload, model: Tensor) -> Tensor:
        """Return the models (..., d) from which training goes on, given those that are evaluated."""
        if not self.averaging or _STEPS not in kept:
            return model
        return torch.where(kept[_STEPS][..., None] > 0, kept[_ITERATE], model)

    def step(self, kept: Payload, model: Tensor, update: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the models (..., d) after an update of their iterates, and what to keep for the next one."""
        found: dict[str, Tensor] = {}
        before = self.iterate(kept, model)
        if self.momentum:
            update = found[_VELOCITY] = update + self.momentum * kept[_VELOCITY] if _VELOCITY in kept else update
        after = before + self.learning_rate * update
        if not self.averaging:
            return after, found
        steps = (kept[_STEPS] if _STEPS in kept else torch.zeros(model.shape[:-1]).to(model)) + 1
        newest = (1 - self.averaging) / (1 - self.averaging ** steps.double())  # its share of the average; 1 at first
        return torch.lerp(model, after, newest.to(model)[..., None]), found | {_ITERATE: after, _STEPS: steps}

    @property
    def _kept(self) -> tuple[str, ...]:
        return ((_VELOCITY,) if self.momentum else ()) + ((_ITERATE, _STEPS) if self.averaging else ())


def with_server_optimiser(algorithm: Algorithm, optimiser: ServerOptimiser, *, common: bool = True) -> Algorithm:
    """Return the algorithm with an optimiser around its rounds or, without a common model, around its clients' work."""
    if optimiser == ServerOptimiser():
        return algorithm
    if not common:
        actions = {name: _at_clients(action, optimiser) for name, action in algorithm.actions.items()}
        (size,) = algorithm.memory["personal"]
        return replace(algorithm, actions=actions, memory={**algorithm.memory, **optimiser.memory(size)})

    def round(state: State, ask: Ask) -> State:
        own = {name: kept for name, kept in state.kept.items() if name in _OWN}
        others = {name: kept for name, kept in state.kept.items() if name not in _OWN}
        before = optimiser.iterate(own, state.model)
        after = algorithm.round(replace(state, model=before, kept=others), ask)
        if after.model is before:  # nobody answered
            return replace(after, model=state.model, kept={**after.kept, **own})
        model, own = optimiser.step(own, state.model, after.model - before)
        return replace(after, model=model, kept={**after.kept, **own})

    return replace(algorithm, round=round)


def _at_clients(action: Action, optimiser: ServerOptimiser) -> Action:
    """Return an action that moves every client's own model by the optimiser."""

    def run(work: Work) -> tuple[Payload, Payload]:
        shown = personal_models(work.memory, work.payload["model"])
        assert shown is not None
        before = optimiser.iterate(work.memory, shown)
        started = torch.ones_like(work.memory["started"])
        reply, kept = action.run(replace(work, memory={**work.memory, "personal": before, "started": started}))
        model, own = optimiser.step(work.memory, shown, kept["personal"] - before)
        return reply, {**kept, **own, "personal": model}

    return replace(action, run=run)
