"""Federations of privacy groups whose updates are prescribed: no training, no ledger."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from polyeps.algorithms._averaging import Federation
from polyeps.algorithms._group_sums import GroupSums
from polyeps.algorithms.fedhdp import fedhdp
from polyeps.clients import Clients
from polyeps.core import Algorithm, Replies, State, Task
from polyeps.engine.noise import SeededStreams
from polyeps.participation import Participation
from polyeps.server import serve
from support.summed import MODEL, Updates, Watched
from support.summed import cohort as of_one_group
from support.summed import federation as with_one_group

SERVER_SEED = 77


def still(_: int, model: Any) -> Any:
    """Updates of clients that learn nothing."""
    return torch.zeros_like(model)


def federation(
    groups: Sequence[str],
    scales: Mapping[str, float],
    updates: Updates = still,
    *,
    rate: float = 1.0,
    clip: float = 1.0,
) -> Federation:
    """What the builder is given; groups are listed in the order of `scales`."""
    one = with_one_group(len(groups), updates, scale=0.0, clip=clip)
    noise = partial(SeededStreams, SERVER_SEED, list(scales))
    sizes = {name: list(groups).count(name) for name in scales}
    return replace(one, sizes=sizes, noise_for=lambda _: scales, rate=rate, noise=noise)


def cohort(algorithm: Algorithm, groups: Sequence[str]) -> Clients:
    return replace(of_one_group(algorithm, len(groups), 0.0), groups=tuple(groups))


@dataclass
class Overheard(Watched):
    """Keeps everything that was asked and answered."""

    asked: list[Task] = field(default_factory=list)
    replies: list[Replies] = field(default_factory=list)

    def __call__(self, task: Task) -> Replies:
        self.asked.append(task)
        self.replies.append(super().__call__(task))
        return self.replies[-1]


@dataclass
class Outcome:
    """A run, round by round."""

    states: list[State]
    cohorts: list[tuple[int, ...]]
    heard: Overheard
    releases: list[GroupSums]


def run(
    monkeypatch: pytest.MonkeyPatch,
    groups: Sequence[str],
    scales: Mapping[str, float],
    updates: Updates = still,
    *,
    rate: float = 1.0,
    rounds: int = 1,
    clip: float = 1.0,
    lost: dict[str, set[str]] | None = None,
    **options: Any,
) -> Outcome:
    """Rounds from a model of zeros by the server's own loop; all that is released of the groups is kept."""
    releases: list[GroupSums] = []

    def kept(real: Any) -> Any:
        def summed(*arguments: Any, **named: Any) -> GroupSums:
            releases.append(real(*arguments, **named))
            return releases[-1]

        return summed

    module = sys.modules[fedhdp.__module__]
    with monkeypatch.context() as patched:
        for name in ("summed_by_server", "summed_securely"):
            patched.setattr(module, name, kept(getattr(module, name)))
        settings = federation(groups, scales, updates, rate=rate, clip=clip)
        algorithm = fedhdp(settings, personal=False, **options)
    heard = Overheard(cohort(algorithm, groups), algorithm, ("group",), lost or {})
    states: list[State] = []
    cohorts: list[tuple[int, ...]] = []

    def observe(round: Any, state: State) -> None:
        states.append(state)
        cohorts.append(tuple(map(int, round.invited)))

    drawn = Participation("poisson", rate) if rate < 1 else Participation()
    serve(algorithm, heard, State(torch.zeros(MODEL.size)), rounds=rounds, participation=drawn, seed=3, observe=observe)
    return Outcome(states, cohorts, heard, releases)
