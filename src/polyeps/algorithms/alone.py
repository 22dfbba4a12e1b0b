"""Alone: every client trains by itself, on its own records, and keeps its model; the control of joining a federation.

Clients do in each round what FedAvg's do, with the same batches, steps, noise and price, but go on from their own model
instead of a common one. They reply only that they have trained. With `budgets = "own"` the model a client ends with
spends its budget, so that it may be given to others; with `budgets = "none"` the model must stay at home.
"""

from dataclasses import replace

import torch

from polyeps.algorithms._averaging import with_local_noise
from polyeps.algorithms._personal_models import personal_models
from polyeps.core import Action, Algorithm, Ask, Payload, Spec, State, Task, Work
from polyeps.messages import vector
from polyeps.training import Training


def alone(training: Training) -> Algorithm:
    """Return local training without a federation: there is no common model."""
    size = training.model.size

    def train(work: Work) -> tuple[Payload, Payload]:
        own = personal_models(work.memory, work.payload["model"])
        assert own is not None
        noise = work.noise_multiplier if training.price is not None else None
        moved = training.run(own, work.data, work.streams, noise, settings=work.settings)
        kept = {"personal": own + moved, "started": torch.ones_like(work.memory["started"])}
        return {"trained": torch.ones(work.clients, dtype=torch.uint8)}, kept

    def round(state: State, ask: Ask) -> State:
        ask(Task("train", tuple(client.id for client in state.roster), {"model": state.model}))
        return state

    gives = {"trained": Spec((), "uint8", 1, 1)}
    action = Action(train, training.price, takes={"model": vector(size)}, gives=lambda _: gives)
    memory: dict[str, tuple[int, ...]] = {"personal": (size,), "started": ()}
    return replace(with_local_noise(training, round, actions={"train": action}), memory=memory)
