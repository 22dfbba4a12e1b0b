"""Personal models (Ditto): every client keeps one of its own, pulled to the model it receives; it is never sent.

It is trained in the same batched pass as the client's update, on the same batches: a client is two rows there, one
that starts from the model received, and one that starts from its own and is pulled back by λ. A personal model needs
no noise as long as it stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polyeps.algorithms._averaging import Federation, with_padding
from polyeps.core import Payload, Work
from polyeps.errors import InputError
from polyeps.training import Training


def personal_models(memory: Payload, model: Tensor) -> Tensor | None:
    """What clients hold that keep models of their own, (n, d); who was never drawn has the common one."""
    if "personal" not in memory:
        return None
    return torch.where(memory["started"][:, None] > 0, memory["personal"], model)


@dataclass(frozen=True)
class Personal:
    """How personal models are trained: λ for everybody or for each group, and their learning rate."""

    federation: Federation
    pull: float | Mapping[str, float]
    learning_rate: float | None = None  # None: the same as for updates

    def __post_init__(self) -> None:
        for name in self.federation.scales:
            self._pull_of(name)

    def _pull_of(self, group: str) -> float:
        if not isinstance(self.pull, Mapping):
            return float(self.pull)
        key = group.removeprefix("ε = ")  # without privacy levels, a group's key is its ε
        if key not in self.pull:
            raise InputError(f"pull names no λ for the group {key!r}; give every group one, or one for all")
        return self.pull[key]

    @cached_property
    def training(self) -> Training:
        groups, many = self.federation.groups, len(self.federation.groups)
        own = np.array([self._pull_of(name) for name in groups])
        rate = self.federation.learning_rate
        rates = np.repeat([rate, rate if self.learning_rate is None else self.learning_rate], many)
        return self.federation.training(rates, np.concatenate([np.zeros(many), own]))

    def memory(self, size: int) -> dict[str, tuple[int, ...]]:
        return {"personal": (size,), "started": ()}

    def run(self, work: Work) -> tuple[Tensor, Payload]:
        """The updates of clients, and what they keep."""
        received = work.payload["model"]
        clients = len(work.rows)
        own = personal_models(work.memory, received)
        assert own is not None
        places = with_padding(2 * clients, received.device)
        both = [place % clients for place in places]
        rows = np.concatenate([work.rows, work.rows + len(self.federation.groups)])
        moved = self.training.run(
            torch.cat([received.expand_as(own), own, received.expand(len(places) - 2 * clients, -1)]),
            replace(work.data, offsets=work.data.spans[both]),
            work.streams.select(both),
            anchor=received,
            rows=rows[places].tolist(),
        )
        kept = {"personal": own + moved[clients : 2 * clients], "started": torch.ones_like(work.memory["started"])}
        return moved[:clients], kept
