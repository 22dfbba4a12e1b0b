"""Balanced averaging, our own rule: noise is weighed against what only some clients have seen.

Strict clients add much noise, so weights by noise leave them out; but where they hold classes that others lack, a model
without them never learns these. How much strict clients count should thus depend on how much clients differ. Both are
estimated from the updates of all rounds (`aggregation.client_effects`), so no budget needs to be disclosed:

    v_i  noise variance of client i      τ²  variance between clients that stays over rounds
    w_i  = (κτ²/n + λ) / (κτ² + v_i)     κ   how much worse an error that stays is than one that is drawn anew

κ follows from the speed of training. An error that stays moves the model by its size over the curvature, noise only by
as much as the learning rate lets through. So κ is inverse to the distance `reach` that a round can move the model. It
grows with the number d of parameters, since few of the d directions that noise takes change any prediction:

    κ = 0.8 √d / reach

for features of mean square one; the 0.8 was chosen by hand (docs/decisions/0016 says on which data). A row
of weights gives strict clients more where it is proved that others lack what they know, such as a whole class
(`aggregation.row_effects`).

Limits: equal noise → FedAvg; no difference between clients → weights by 1/v_i; difference beyond all noise → FedAvg;
infinite noise → ignored.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field

from polyeps.aggregation.client_effects import ClientEffects
from polyeps.aggregation.row_effects import RowEffects
from polyeps.algorithms._averaging import ask_updates, step, with_local_noise
from polyeps.algorithms.fedavg import fedavg
from polyeps.core import Algorithm, Ask, State
from polyeps.training import Training


def balanced(training: Training, *, constancy: Annotated[float, Field(gt=0)] = 0.8) -> Algorithm:
    """Return averaging with weights that balance noise against differences between clients."""
    if training.price is None:
        return fedavg(training)  # without noise there is nothing to balance
    slices, size = training.model.slices, training.model.size
    persistence = constancy * math.sqrt(size) / training.reach

    def round(state: State, ask: Ask) -> State:
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        updates = replies.payload["update"]
        place = {client.id: number for number, client in enumerate(state.enrolled)}
        clients = torch.tensor([place[client] for client in replies.ids])
        effects = ClientEffects.restored(state.kept, len(state.enrolled), size)
        effects.take(clients, updates)
        variances = effects.variances[clients]
        rows = RowEffects.restored(state.kept, len(state.enrolled), slices)
        rows.take(clients, updates, variances)
        weights = rows.weights(clients, variances, persistence * effects.spread, persistence)
        return step(state, rows.mean(updates, weights), **effects.kept, **rows.kept)

    return with_local_noise(training, round)
