"""A canary against the very code that CMP-Fed's clients clip and add noise with: two releases, one cohort, many runs.

The others send nothing. The canary's updates are as large as floats can be, so that clipping decides what is sent. All
clients that are drawn in many runs make their releases in one call, those of cohorts of one size together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import dp_accounting as dp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.accounting import best_accountant, epsilon
from polyeps.accounting.histories import history_of
from polyeps.algorithms._releases import NoiseKind, Release, round_price
from polyeps.algorithms._secure_sums import DRAWN, SecureSums
from polyeps.algorithms._sum_counts import Counts
from polyeps.audit.lower_bounds import bound_from_scores
from polyeps.core import AGREED, PROGRESS, Ask, Payload, Profile, Records, Replies, State, SumTerms, Task, Total, Work

RATE, OTHERS, ROUNDS, SCALE, DELTA, SIZE = 0.5, 7, 3, 1.0, 1e-3, 4
CONFIDENCE = 1 - 1e-6  # noise of integers comes from the operating system: no seed makes this repeatable
CANARY = torch.full((SIZE,), 1e30)
Seen = NDArray[np.float64]  # (trials, 2): both sums along the canary, in deviations of the noise
Broken = Callable[
    [Release, Tensor, Tensor], Tensor
]  # what is sent instead: of a release, its values, what it would send


@dataclass
class Drawn:
    """Noise of all clients from one generator."""

    clients: int
    generator: torch.Generator
    exact: bool = False

    def uniforms(self, count: int) -> NDArray[np.float64]:
        return torch.rand(self.clients, count, generator=self.generator, dtype=torch.float64).numpy()

    def normals(self, out: Tensor, rows: Sequence[int]) -> None:
        out[list(rows)] = torch.randn(len(rows), *out.shape[1:], generator=self.generator)

    def select(self, rows: Sequence[int]) -> Drawn:
        return replace(self, clients=len(rows))


@dataclass
class Given(Ask):
    """A sum that is known already."""

    summed: Tensor | None

    def __call__(self, task: Task) -> Replies:
        raise AssertionError(task)

    def total(self, task: Task, terms: SumTerms) -> Total:
        assert self.summed is not None
        assert (terms.least, terms.bits is None) == (len(task.to), self.summed.is_floating_point())
        return Total(task.to, {task.action: self.summed})


def releases(noise: NoiseKind, split: float = 0.3) -> tuple[Release, Release]:
    return (
        Release("subspace", SIZE, 0.01, split, noise, OTHERS + 1),
        Release("embed", SIZE, 1.0, 1 - split, noise, OTHERS + 1),
    )


def claimed(noise: NoiseKind) -> float:
    price = partial(round_price, RATE, releases(noise))(SCALE)
    history = history_of(price)
    return epsilon(dp.SelfComposedDpEvent(price, ROUNDS), DELTA, accountant=best_accountant(history))


def as_it_is(_: Release, __: Tensor, sent: Tensor) -> Tensor:
    return sent


def without_noise_on_v(release: Release, values: Tensor, sent: Tensor) -> Tensor:
    return values.clamp(-0.5, 0.5) if release.action == "embed" else sent


def clipped_by_layer(release: Release, values: Tensor, sent: Tensor) -> Tensor:
    """Every coordinate a layer, clipped by itself."""
    return sent + (release.clip - release.clip / math.sqrt(SIZE)) * (values > 0)


def one_round(noise: NoiseKind, there: NDArray[np.bool_], generator: torch.Generator, broken: Broken) -> Seen:
    """What is seen in one round of every trial, where the canary may be drawn if it is there."""
    counts = Counts.settled(OTHERS + 1, RATE, 0.0)
    sums = SecureSums(SCALE, counts, lambda _: Drawn(1, generator))
    coins = torch.rand(len(there), OTHERS + 1, generator=generator).numpy() < RATE
    coins[:, 0] &= there
    sizes = coins.sum(1)
    seen = np.zeros((len(there), 2))
    for place, release in enumerate(releases(noise)):
        deviation = release.deviation(SCALE)
        for size in np.unique(sizes):
            trials = np.flatnonzero(sizes == size)
            state = State(torch.zeros(SIZE, dtype=torch.float64), roster=(Profile("x"),) * int(size))
            sent = None
            if size:
                values = torch.zeros(len(trials), int(size), SIZE)
                values[torch.from_numpy(coins[trials, 0]), 0] = CANARY
                flat = values.flatten(0, 1)
                told = {DRAWN: torch.tensor(int(size)), AGREED: sums.fingerprint(release)}
                rows = sums.from_clients(release, work(len(flat), told, generator), flat)[release.action]
                rows = broken(release, flat, rows) if noise == "gaussian" else rows
                sent = rows.reshape(len(trials), int(size), -1).sum(1)
            along = released(sums, state, release, sent, len(trials)).double().sum(1) / math.sqrt(SIZE)
            seen[trials, place] = along.numpy() / deviation
    return seen


def released(sums: SecureSums, state: State, release: Release, sent: Tensor | None, trials: int) -> Tensor:
    """What the server releases in every trial, (trials, SIZE), by the sums that clients sent, if any was drawn.

    The server adds normals to every coordinate by itself: those of all trials are one long release.
    """
    if release.noise == "gaussian":
        long = sums.of(state, Given(None if sent is None else sent.flatten()), replace(release, size=SIZE * trials), {})
        assert long is not None
        return long.reshape(trials, SIZE)
    rows = [None] * trials if sent is None else list(sent)
    totals = [sums.of(state, Given(row), release, {}) for row in rows]
    return torch.stack([total for total in totals if total is not None])


def work(rows: int, payload: Payload, generator: torch.Generator) -> Work:
    nothing = Records(torch.zeros(0), torch.zeros(0), torch.zeros(rows + 1, dtype=torch.int64))
    memory = {PROGRESS: torch.tensor([[1.0, 0.0]])}
    return Work(payload, nothing, np.full(rows, SCALE), Drawn(rows, generator), memory=memory)


def scores(
    noise: NoiseKind, present: bool, trials: int, seed: int, broken: Broken, looked_at: tuple[int, int]
) -> NDArray[np.float32]:
    """The log-likelihood ratio of all rounds, as it is for sound releases: any other score would be allowed too."""
    generator = torch.Generator().manual_seed(seed)
    shifts = np.array([release.clip / release.deviation(SCALE) for release in releases(noise)]) * looked_at
    total = np.zeros(trials)
    for _ in range(ROUNDS):
        seen = one_round(noise, np.full(trials, present), generator, broken)
        total += np.log1p(RATE * np.expm1(np.minimum(seen @ shifts - shifts @ shifts / 2, 80.0)))
    return total.astype(np.float32)


def shown(noise: NoiseKind, trials: int, broken: Broken = as_it_is, looked_at: tuple[int, int] = (1, 1)) -> float:
    present, absent = (
        scores(noise, there, trials, seed, broken, looked_at) for seed, there in enumerate((True, False))
    )
    return bound_from_scores(present, absent, DELTA, CONFIDENCE)


# As many trials as refute a client and a server that add no noise at all.
@pytest.mark.parametrize(
    ("noise", "trials", "least"),
    [("gaussian", 40_000, 1.6), ("skellam", 4_000, 0.1), ("discrete-gaussian", 2_000, 0.1)],
)
def test_what_clients_really_send_is_never_refuted(noise: NoiseKind, trials: int, least: float) -> None:
    assert least < shown(noise, trials) <= claimed(noise)


@pytest.mark.parametrize(("broken", "looked_at"), [(without_noise_on_v, (0, 1)), (clipped_by_layer, (1, 1))])
def test_mistakes_in_it_are_refuted(broken: Broken, looked_at: tuple[int, int]) -> None:
    assert shown("gaussian", 40_000, broken, looked_at) > claimed("gaussian")
