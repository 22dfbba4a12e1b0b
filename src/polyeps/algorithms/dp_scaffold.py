"""DP-SCAFFOLD: DP-SGD with control variates, which keep clients with different data from drifting apart.

Paper: Noble, Bellet and Dieuleveut, "Differentially Private Federated Learning on Heterogeneous Data", AISTATS 2022,
https://proceedings.mlr.press/v151/noble22a.html

    c_i  a client's "control" in its memory      c  the server's "control"      K, η_l  local steps, learning rate
    y ← y - η_l·(H̃ - c_i + c)  a step; H̃ is the noisy mean of clipped gradients      c_i ← c_i - c + (x - y)/(K·η_l)
    x ← x + mean of y - x      c ← c + (share of clients that replied)·(mean over them of the change of c_i)

Controls are kept in units of updates, times -K·η_l: a client's is its last update without the correction. The
correction c - c_i is then one vector, added in K equal parts (`drift`). The change of c_i is the update less c, which
the server computes itself: clients send updates alone, half of what the paper sends.

Guarantee: that of the DP-SGD steps, as in FedAvg. Memory holds y - x less a correction, both of which the server knows:
nothing without noise is kept for a later release.

Departures: every client adds the noise of its own budget, which the paper has equal. `weights = "epsilon"` weights
updates, and with them c, by disclosed budgets; the paper's mean is plain. The server's step size is 1. The paper's code
clips at the median norm of the batch, which costs privacy that it does not count; here the clip is fixed and public.
"""

from dataclasses import replace
from typing import Literal

import torch

from polyeps.algorithms._averaging import disclosed_weights, mean, step, with_local_noise
from polyeps.core import Action, Algorithm, Ask, Field, Payload, State, Task, Work
from polyeps.messages import update, vector
from polyeps.training import Training


def dp_scaffold(training: Training, *, weights: Literal["equal", "epsilon"] = "equal") -> Algorithm:
    """Return averaging of updates that are corrected by control variates."""
    size = training.model.size

    def train(work: Work) -> tuple[Payload, Payload]:
        drift = work.payload["control"] - work.memory["control"]  # (n, d)
        noise = work.noise_multiplier if training.price is not None else None
        moved = training.run(work.payload["model"], work.data, work.streams, noise, settings=work.settings, drift=drift)
        return {"update": moved}, {"control": moved - drift}

    def round(state: State, ask: Ask) -> State:
        control = state.kept.get("control", torch.zeros_like(state.model))
        sent = {"model": state.model, "control": control}
        replies = ask(Task("train", tuple(client.id for client in state.roster), sent))
        if not replies.ids:
            return state
        enrolled = [client.id for client in state.enrolled]
        by, of_all = (disclosed_weights(state, weights, ids) for ids in (replies.ids, enrolled))
        moved = mean(replies.payload["update"], by)
        return step(state, moved, control=control + sum(by) / sum(of_all) * (moved - control))

    needs: tuple[Field, ...] = ("epsilon",) if weights == "epsilon" else ()
    takes = {"model": vector(size), "control": vector(size)}
    action = Action(train, training.price, takes=takes, gives=lambda _: {"update": update(size)})
    return replace(with_local_noise(training, round, needs, {"train": action}), memory={"control": (size,)})
