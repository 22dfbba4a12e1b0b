"""Personal models (Ditto): every client keeps its own model, pulled towards the one it receives, and never sends it.

It is trained in the same batched pass as the client's update, on the same batches: a client has two rows there, one
that starts from the model received, and one that starts from its own and is pulled back by λ. A personal model needs
no noise because it is never released.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polyeps.algorithms._averaging import Federation, with_padding
from polyeps.core import Payload, Work
from polyeps.errors import InputError


def personal_models(memory: Payload, model: Tensor) -> Tensor | None:
    """Return the clients' personal models, (n, d); clients that were never drawn have the common one."""
    if "personal" not in memory:
        return None
    return torch.where(memory["started"][:, None] > 0, memory["personal"], model)


@dataclass(frozen=True)
class Personal:
    """How personal models are trained: λ for all clients or for each group, and their learning rate."""

    federation: Federation
    pull: float | Mapping[str, float]
    learning_rate: float | None = None  # None: the same as for updates

    def __post_init__(self) -> None:
        for name in self.federation.sizes:
            self.pull_of(name)

    def pull_of(self, group: str) -> float:
        """Return λ for the clients of a group."""
        if not isinstance(self.pull, Mapping):
            return float(self.pull)
        key = group.removeprefix("ε = ")  # without privacy levels, a group's key is its ε
        if key not in self.pull:
            raise InputError(f"pull names no λ for the group {key!r}; give every group one, or one for all")
        return self.pull[key]

    def memory(self, size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what a client keeps."""
        return {"personal": (size,), "started": ()}

    def run(self, work: Work) -> tuple[Tensor, Payload]:
        """Return the updates of clients, and what they keep."""
        received = work.payload["model"]
        clients = work.clients
        own = personal_models(work.memory, received)
        assert own is not None
        places = with_padding(2 * clients, received.device)
        both = [place % clients for place in places]
        pull = [self.pull_of(name) for name in work.groups]
        rate = self.federation.learning_rate
        rates = np.repeat([rate, rate if self.learning_rate is None else self.learning_rate], clients)
        moved = self.federation.training.run(
            torch.cat([received.expand_as(own), own, received.expand(len(places) - 2 * clients, -1)]),
            replace(work.data, offsets=work.data.spans[both]),
            work.streams.select(both),
            anchor=received,
            settings={
                **{name: values[both] for name, values in work.settings.items()},
                "learning_rate": rates[places],
                "pull": np.concatenate([np.zeros(clients), pull])[places],
            },
        )
        kept = {"personal": own + moved[clients : 2 * clients], "started": torch.ones_like(work.memory["started"])}
        return moved[:clients], kept
