"""Algorithms of a user's own, under audit: noise that is as charged, and noise that is not."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from polyeps.accounting.events import Gaussian, Poisson
from polyeps.algorithms._averaging import step
from polyeps.audit import audit_algorithm
from polyeps.core import Action, Algorithm, Ask, Payload, Records, State, Task, Work
from polyeps.engine.noise import normals_for
from polyeps.errors import InputError, PolyepsError
from polyeps.messages import vector

SIZE = 3


def one_client(value: float) -> Records:
    return Records(torch.full((1, SIZE), value), torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]))


def mean_of(records: Records) -> Tensor:
    """Each client's records, added up and clipped to a norm of one."""
    rows = torch.stack([records.features[a:b].sum(0) for a, b in records.spans.tolist()])
    clipped: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp(min=1.0)
    return clipped


def noisy_mean(added: float, charged: float = 1.0) -> Algorithm:
    """Clients send their clipped mean with noise of `added` · scale, and pay for `charged` · scale."""

    def run(work: Work) -> tuple[Payload, Payload]:
        sums = mean_of(work.data)
        deviation = torch.from_numpy(added * work.noise_multiplier).to(sums)[:, None]
        return {"mean": sums + deviation * normals_for(work.streams, sums, "mean")}, {}

    def round(state: State, ask: Ask) -> State:
        replies = ask(Task("send", tuple(client.id for client in state.roster), {"model": state.model}))
        return step(state, replies.payload["mean"].mean(0))

    price = lambda scale, _: Gaussian(charged * scale)  # noqa: E731
    return Algorithm({"send": Action(run, price, takes={"model": vector(SIZE)})}, round)


def noisy_sum(added: float) -> Algorithm:
    """Clients send what they have; a trusted server adds noise to the sum over a secret cohort."""

    def run(work: Work) -> tuple[Payload, Payload]:
        return {"sum": mean_of(work.data)}, {}

    def round(state: State, ask: Ask) -> State:
        replies = ask(Task("send", tuple(client.id for client in state.roster), {"model": state.model}))
        total = replies.payload["sum"].sum(0) if replies.ids else torch.zeros(SIZE)
        generator = torch.Generator().manual_seed(int(torch.randint(1 << 40, (1,))))
        return step(state, total + added * torch.randn(SIZE, generator=generator))

    return Algorithm(
        {"send": Action(run, price=None, takes={"model": vector(SIZE)})},
        round,
        round_price=lambda scale: Poisson(0.5, Gaussian(scale)),
        trust="server",
        unit="client",
    )


audit: Any = partial(audit_algorithm, model=torch.zeros(SIZE), records=one_client(5.0), neighbour=one_client(0.0))


@pytest.mark.parametrize("rounds", [1, 3])
def test_noise_as_charged_holds(rounds: int) -> None:
    row = audit(noisy_mean(1.0), noise_multiplier=1.0, delta=0.05, rounds=rounds, trials=8000)
    assert row.verdict == "holds"
    assert row.evidence.audited > 0.5 * row.evidence.certified  # and the audit has teeth


@pytest.mark.parametrize(("algorithm", "rounds"), [(noisy_mean(0.5), 1), (noisy_mean(0.5), 3), (noisy_mean(1, 2), 1)])
def test_too_little_noise_is_refuted(algorithm: Algorithm, rounds: int) -> None:
    row = audit(algorithm, noise_multiplier=1.0, delta=0.05, rounds=rounds, trials=2000)
    assert row.verdict == "refuted"
    assert row.as_dict()["audited"] > row.as_dict()["certified"]


def test_no_noise_at_all_is_refuted() -> None:
    assert audit(noisy_mean(0.0), noise_multiplier=2.0, delta=1e-5, trials=600).refuted


def test_a_score_of_ones_own() -> None:
    row = audit(noisy_mean(0.5), noise_multiplier=1.0, delta=0.05, trials=1500, score=lambda seen: seen.sum(1))
    assert row.verdict == "refuted"


def federation(first: float) -> Records:
    return Records(
        torch.tensor([[first] * SIZE, [0.0] * SIZE]), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2])
    )


@pytest.mark.parametrize(("added", "verdict"), [(1.0, "holds"), (0.1, "refuted")])
def test_noise_on_sums(added: float, verdict: str) -> None:
    torch.manual_seed(0)
    row = audit_algorithm(
        noisy_sum(added),
        torch.zeros(SIZE),
        federation(5.0),
        federation(0.0),
        noise_multiplier=1.0,
        delta=0.05,
        rate=0.5,
        rounds=2,
        trials=300,
    )
    assert row.verdict == verdict


def test_impossible_audits_are_refused() -> None:
    with pytest.raises(InputError, match="at least 100"):
        audit(noisy_mean(1.0), noise_multiplier=1.0, trials=10)
    with pytest.raises(InputError, match="1 client"):
        audit_algorithm(noisy_mean(1.0), torch.zeros(SIZE), federation(1.0), federation(0.0), noise_multiplier=1.0)


def test_clients_that_refuse_are_no_evidence() -> None:
    with pytest.raises(PolyepsError):
        audit(noisy_mean(1.0), noise_multiplier=1.0, trials=100, sent={"more": torch.zeros(1)})
    with pytest.raises(InputError, match="did not answer"):
        audit_algorithm(
            noisy_sum(1.0),
            torch.zeros(SIZE, dtype=torch.float64),
            federation(1.0),
            federation(0.0),
            noise_multiplier=1.0,
            trials=100,
        )
