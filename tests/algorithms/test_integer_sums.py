"""Releases of integers: the same sums as with ideal noise but for their noise, plainly or by the real protocol."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from dp_accounting import NonPrivateDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from support.summed import MODEL, alone_with, cohort, drawn, federation, run
from support.transports import AsBytes, Securely

from polyeps.accounting import best_accountant, epsilon
from polyeps.accounting.events import Poisson, TogetherDpEvent
from polyeps.accounting.histories import history_of
from polyeps.algorithms._releases import FINE, NoiseKind, Release
from polyeps.algorithms._secure_sums import SecureSums
from polyeps.algorithms._sum_counts import Counts
from polyeps.algorithms.cmp_fed import cmp_fed
from polyeps.algorithms.dp_randagg import dp_randagg
from polyeps.core import Algorithm, Ask, Replies, State, SumTerms, Task, Total
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.mechanisms.integer_noise import LARGEST_DEVIATION
from polyeps.participation import Participation
from polyeps.secagg.messages import Step
from polyeps.server import serve
from polyeps.transport.memory import InMemory

CLIENTS = 8


def built(scale: float, *, clients: int = CLIENTS, rate: float = 1.0, updates: Any = None, **options: Any) -> Algorithm:
    people = federation(clients, updates or drawn(clients), scale=scale)
    return cmp_fed(replace(people, rate=rate), **{"rank": 2, "dropouts": 0.25, "noise": "skellam", **options})


def finished(algorithm: Algorithm, transport: InMemory, rounds: int = 2) -> State:
    start = State(torch.zeros(MODEL.size))
    return serve(algorithm, transport, start, rounds=rounds, participation=Participation(), seed=3, run="test")


def test_with_little_noise_it_is_what_floats_give() -> None:
    options: dict[str, Any] = {"clip_subspace": 50.0, "clip_embedding": 50.0, "rank": 99, "whole": "biases"}
    whole, _ = run(built(1e-3, **options), CLIENTS, 1e-3, rounds=2)
    plain, _ = run(built(0.0, noise="gaussian", **options), CLIENTS, 0.0, rounds=2)
    torch.testing.assert_close(
        whole.model, plain.model, rtol=0.0, atol=0.2
    )  # noise of 50 · 1e-3 · √(2/0.75)/8, in two rounds
    assert plain.model.abs().max() > 2


@pytest.mark.parametrize("noise", ["gaussian", "skellam", "discrete-gaussian"])
def test_all_kinds_of_noise_are_equally_large(noise: Any) -> None:
    scale, rounds = 1.5, 20
    still = federation(CLIENTS, lambda _, model: torch.zeros_like(model), scale=scale)
    found, _ = run(dp_randagg(still, rank=0, noise=noise, dropouts=0.25), CLIENTS, scale, rounds)
    wanted = scale / math.sqrt(0.75) / CLIENTS * math.sqrt(rounds)
    assert abs(float(found.model.std()) / wanted - 1) < 5 / math.sqrt(2 * MODEL.size)


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
def test_a_round_of_nobody_has_as_much(noise: Any) -> None:
    algorithm = dp_randagg(federation(CLIENTS, drawn(CLIENTS), scale=1.5), rank=0, noise=noise, dropouts=0.25)
    found = algorithm.round(alone_with(algorithm), Unasked()).model
    assert abs(float(found.std()) / (1.5 / math.sqrt(0.75) / CLIENTS) - 1) < 5 / math.sqrt(2 * MODEL.size)


class Unasked(Ask):
    def __call__(self, task: Task) -> Replies:
        raise AssertionError(task)


def summed(dropouts: float) -> SecureSums:
    """Sums over a tenth of a thousand clients."""
    counts = Counts.settled(1000, 0.1, dropouts, delta=1e-5, rounds=10)
    return SecureSums(1.2, counts, partial(SeededStreams, 1, ["all"]))


@given(drawn=st.integers(0, 300), share=st.floats(0.5, 1.0))
@settings(max_examples=50, deadline=None)
def test_the_modulus_tells_nothing_of_who_was_drawn(drawn: int, share: float) -> None:
    """Cohorts of neighbouring federations differ by one; so must not the bits of their sums."""
    release = Release("train", 1000, 1.0, noise="skellam")
    sums = summed(1 - share)
    asked: list[int | None] = []

    class Refusing(Unasked):
        def total(self, task: Task, terms: SumTerms) -> Total:
            assert terms.least <= drawn
            asked.extend([terms.bits, sums.terms(release, task.payload).bits])
            return Total((), {})

    sums.of(alone_with(built(1.2), drawn), Refusing(), release, {})
    assert set(asked) <= {sums.bits(release)}
    assert len(asked) == (2 if drawn >= sums.counts.rule(1000).fewest else 0)


def test_a_round_of_nobody_is_on_the_same_grid() -> None:
    release = Release("train", 1000, 1.0, noise="skellam")
    with patch.object(SecureSums, "bits", lambda *_: 3):
        few = summed(0.1).of(alone_with(built(1.2)), Unasked(), release, {})
    assert few is not None
    assert 0 < few.norm() <= 4 * math.sqrt(1024) / FINE  # three bits hold no more than four steps


# The protocol


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
def test_the_real_protocol_gives_the_same_bits(noise: Any) -> None:
    algorithms = [built(0.5, noise=noise), built(0.5, noise=noise)]
    people = [cohort(algorithm, CLIENTS, 0.5) for algorithm in algorithms]
    plain = finished(algorithms[0], InMemory(people[0], algorithms[0], ()))
    masked = finished(algorithms[1], Securely(people[1], algorithms[1], ()))
    assert torch.equal(masked.model, plain.model)
    assert plain.model.any()


@pytest.mark.parametrize("step", [Step.SHARE, Step.MASK, Step.UNMASK])
def test_who_drops_out_is_left_out_of_the_sum(step: Step) -> None:
    algorithm, twin = built(0.5), built(0.5)
    lost = {"2", "5"}
    sums: list[Total] = []

    class Noted(Securely):
        def total(self, task: Task, terms: SumTerms) -> Total:
            sums.append(super().total(task, terms))
            return sums[-1]

    finished(algorithm, Noted(cohort(algorithm, CLIENTS, 0.5), algorithm, (), {step: lost}), rounds=1)
    in_it = tuple(str(row) for row in range(CLIENTS) if step is Step.UNMASK or str(row) not in lost)
    assert sums[0].ids == in_it
    _, watched = run(twin, CLIENTS, 0.5, lost={} if step is Step.UNMASK else {"subspace": lost})
    assert torch.equal(sums[0].payload["subspace"], watched.totals[0].payload["subspace"])


def test_with_fewer_than_promised_nothing_is_opened() -> None:
    algorithm = built(0.5)
    lost = {Step.MASK: {"0", "1", "2"}}
    assert not finished(algorithm, Securely(cohort(algorithm, CLIENTS, 0.5), algorithm, (), lost), 1).model.any()


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
def test_of_one_client_the_sum_is_its_vector_with_all_of_the_noise(noise: Any) -> None:
    algorithms = [built(0.5, clients=1, noise=noise, updates=drawn(1)) for _ in range(2)]
    people = [cohort(algorithm, 1, 0.5) for algorithm in algorithms]
    masked = finished(algorithms[0], Securely(people[0], algorithms[0], ()), 1)
    assert torch.equal(masked.model, finished(algorithms[1], InMemory(people[1], algorithms[1], ()), 1).model)
    assert masked.model.any()


def test_floats_cannot_be_masked() -> None:
    algorithm = built(0.5, noise="gaussian")
    with pytest.raises(InputError, match="a mask would not hide all digits"):
        finished(algorithm, Securely(cohort(algorithm, CLIENTS, 0.5), algorithm, ()))


@pytest.mark.parametrize("carried", [InMemory, Securely, AsBytes])
def test_a_client_sends_as_many_bytes_as_its_integers_take(carried: type[InMemory]) -> None:
    algorithm = built(0.5)
    sums: list[tuple[int | None, Total]] = []

    class Noted(carried):  # type: ignore[misc, valid-type]
        def total(self, task: Task, terms: SumTerms) -> Total:
            sums.append((terms.bits, super().total(task, terms)))
            return sums[-1][1]

    finished(algorithm, Noted(cohort(algorithm, CLIENTS, 0.5), algorithm, ()), rounds=1)
    for bits, total in sums:
        assert bits is not None
        assert 8 < bits <= 24
        (numbers,) = total.payload.values()
        assert total.sent == numbers.numel() * math.ceil(bits / 8)


# Its price


def test_two_releases_of_one_cohort_are_amplified_together() -> None:
    price = built(1.2, rate=0.05).round_price
    assert price is not None
    (step,) = history_of(price(1.2))
    assert isinstance(step, Poisson)
    assert isinstance(step.event, TogetherDpEvent)
    assert best_accountant({step: 1}) == "rdp"
    found = epsilon(price(1.2), 1e-5, accountant="rdp")
    ideal = built(1.2, rate=0.05, noise="gaussian").round_price
    assert ideal is not None
    apart = epsilon(Poisson(0.05, step.event.events[0]), 1e-5, accountant="rdp")
    assert found > epsilon(ideal(1.2), 1e-5)
    assert found > apart


def test_discrete_gaussians_cost_about_what_skellam_noise_does() -> None:
    prices = {
        noise: Release("train", 60_000, 1.0, noise=noise, clients=6000).event(1.2) for noise in get_args(NoiseKind)
    }
    cost = {noise: epsilon(Poisson(1 / 60, price), 1e-4, accountant="rdp") for noise, price in prices.items()}
    assert cost["gaussian"] < cost["discrete-gaussian"] <= cost["skellam"] < 1.05 * cost["discrete-gaussian"]


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
@pytest.mark.parametrize(("scale", "split"), [(1e5, 0.5), (1.0, 1 - 1e-9), (1.0, 1e-9)])
def test_noise_too_large_to_be_drawn_is_refused_before_anybody_pays(noise: Any, scale: float, split: float) -> None:
    with pytest.raises(
        InputError, match=r"noise = .* would need .*larger budgets.epsilon.*fewer rounds.*split.*gaussian"
    ):
        built(scale, noise=noise, split=split)
    built(scale, noise="gaussian", split=split)
    with pytest.raises(InputError, match=r"fewer rounds, or take noise"):  # no split to move
        dp_randagg(federation(CLIENTS, drawn(CLIENTS), scale=1e5), rank=0, noise=noise)


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
def test_what_is_not_refused_can_be_drawn(noise: Any) -> None:
    """Close to the limit, where the server draws what nobody drawn would release."""
    surplus = 1 / 0.75 + (1 / CLIENTS if noise == "discrete-gaussian" else 0.0)
    limit = LARGEST_DEVIATION / FINE / math.sqrt(surplus)
    people = federation(CLIENTS, drawn(CLIENTS), scale=0.9999 * limit)
    algorithm = dp_randagg(people, rank=0, noise=noise, dropouts=0.25)
    assert algorithm.round(alone_with(algorithm), Unasked()).model.any()
    assert run(algorithm, CLIENTS, 0.9999 * limit)[0].model.any()
    with pytest.raises(InputError, match="the server would need 100"):
        dp_randagg(replace(people, noise_for=lambda _: {"all": 1.0001 * limit}), rank=0, noise=noise, dropouts=0.25)


def test_noise_too_small_to_be_drawn_is_refused() -> None:
    with pytest.raises(InputError, match=r"smaller budgets.epsilon or larger budgets.noise_multiplier"):
        built(1e-9)


def test_nothing_is_promised_where_parts_of_discrete_noise_are_small() -> None:
    crowd = Release("train", 60_000, 1.0, noise="discrete-gaussian", clients=10_000_000)
    assert crowd.event(1.2) == NonPrivateDpEvent()


def test_an_unknown_noise_is_refused() -> None:
    with pytest.raises(InputError, match="noise must be one of gaussian, skellam, discrete-gaussian"):
        Release("train", 3, 1.0, noise="laplace")  # type: ignore[arg-type]
