"""CMP-Fed: the reference loop's steps, clients that do each thing once, and noise of the right size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from reference import cmp_fed as reference
from support.summed import MODEL, alone_with, drawn, entered, federation, run

from polyeps.accounting.certificate import SECRET_COHORT
from polyeps.aggregation.low_rank import low_rank
from polyeps.algorithms._releases import NoiseKind
from polyeps.algorithms.cmp_fed import cmp_fed
from polyeps.algorithms.dp_randagg import dp_randagg
from polyeps.client import answer
from polyeps.core import Algorithm, Ask, Payload, Replies, SumTerms, Task, Total
from polyeps.engine.noise import SeededStreams, normals_for
from polyeps.errors import InputError, TaskRefused

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
CLIENTS = 6


def built(
    scale: float = 0.0, clip: float = 1.0, clients: int = CLIENTS, updates: Any = None, **options: Any
) -> Algorithm:
    return cmp_fed(federation(clients, updates or drawn(clients), scale=scale, clip=clip), **options)


def averaged(scale: float = 0.0, **options: Any) -> Algorithm:
    return dp_randagg(federation(CLIENTS, drawn(CLIENTS), scale=scale), **options)


# What it comes down to without noise


@pytest.mark.parametrize("whole", ["when-cheaper", "biases"])
@pytest.mark.parametrize("warm_start", ["orthonormal", "raw"])
def test_at_full_rank_it_is_federated_averaging(whole: str, warm_start: str) -> None:
    found, _ = run(built(rank=99, whole=whole, warm_start=warm_start), CLIENTS, 0.0, rounds=4)
    plain, _ = run(averaged(rank=0), CLIENTS, 0.0, rounds=4)
    torch.testing.assert_close(found.model, plain.model, **CLOSE)
    assert plain.model.abs().sum() > 1


@pytest.mark.parametrize("warm_start", ["orthonormal", "raw"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_without_noise_it_is_power_sgd(rank: int, warm_start: str) -> None:
    compression = low_rank(MODEL.slices, rank, whole="biases")
    found, watched = run(built(rank=rank, whole="biases", warm_start=warm_start), CLIENTS, 0.0, rounds=4)
    model = torch.zeros(MODEL.size)
    right = reference.factors_of(compression, watched.tasks[0].payload["right"].double().numpy())
    for _ in range(4):
        rows = [drawn(CLIENTS)(row, model).double().numpy() for row in range(CLIENTS)]
        step, right = reference.power_sgd_step([reference.tensors_of(compression, row) for row in rows], right)
        model = model + torch.from_numpy(reference.vector_of(compression, step)).float()
    torch.testing.assert_close(found.model, model, **CLOSE)


@pytest.mark.parametrize("split", [0.2, 0.5])
def test_with_noise_it_is_the_papers_loop(split: float) -> None:
    clips, scale, rounds = (0.3, 0.5), 0.4, 3
    options: dict[str, Any] = {"rank": 2, "whole": "biases", "warm_start": "raw", "split": split, "dropouts": 0.0}
    algorithm = built(scale, clip_subspace=clips[0], clip_embedding=clips[1], server_rate=0.7, **options)
    found, watched = run(algorithm, CLIENTS, scale, rounds)
    compression = low_rank(MODEL.slices, 2, whole="biases", warm_start="raw")

    def noise(agent: int, number: int) -> Any:
        streams = SeededStreams(5, [str(agent)], number)
        drawn_ones = []
        for name, size, clip, share in (
            ("subspace", compression.subspace_size, clips[0], split),
            ("embed", compression.embedding_size, clips[1], 1 - split),
        ):
            deviation = scale / math.sqrt(share) * clip / math.sqrt(CLIENTS)
            drawn_ones.append(deviation * normals_for(streams, torch.zeros(1, size), name)[0].double().numpy())
        return reference.lefts_of(compression, drawn_ones[0]), reference.embeddings_of(compression, drawn_ones[1])

    def updates(agent: int, _: int, model: Any) -> Any:
        vector = torch.from_numpy(reference.vector_of(compression, model)).float()
        return reference.tensors_of(compression, drawn(CLIENTS)(agent, vector).double().numpy())

    start = reference.tensors_of(compression, np.zeros(MODEL.size))
    right = reference.factors_of(compression, watched.tasks[0].payload["right"].double().numpy())
    wanted = reference.cmp_fed(start, right, [range(CLIENTS)] * rounds, updates, clips, noise, 0.7)
    expected = torch.from_numpy(reference.vector_of(compression, wanted)).float()
    torch.testing.assert_close(found.model, expected, rtol=1e-3, atol=1e-4)


def test_zero_updates_move_nothing() -> None:
    found, _ = run(built(rank=2, updates=lambda _, model: torch.zeros_like(model)), CLIENTS, 0.0, rounds=3)
    assert torch.equal(found.model, torch.zeros(MODEL.size))


def test_learning_rates_fall() -> None:
    still = lambda _, model: torch.ones_like(model)  # noqa: E731
    found, _ = run(built(rank=99, updates=still, rate_decay=0.5), CLIENTS, 0.0, rounds=3)
    torch.testing.assert_close(found.model, torch.full((MODEL.size,), 1.75), **CLOSE)


# What clients do, and do not


def test_an_embedding_only_after_the_subspace_and_only_once() -> None:
    algorithm = built(rank=2)
    compression = low_rank(MODEL.slices, 2)
    first = {"model": torch.zeros(MODEL.size), "right": torch.ones(compression.right_size)}
    second = {"left": torch.ones(compression.subspace_size)}
    people = entered(algorithm, CLIENTS, 0.0)

    def ask(action: str, payload: Payload, to: tuple[str, ...] = people.ids, round: int = 0) -> tuple[str, ...]:
        return answer(people, algorithm, Task(action, to, payload, round=round, summed=True)).ids

    assert ask("embed", second) == ()
    assert ask("subspace", first, ("1", "2")) == ("1", "2")
    assert ask("subspace", first, ("2", "3")) == ("3",)
    assert ask("embed", second, ("0", "1", "2"), round=1) == ()  # a round nobody has paid for
    assert ask("embed", second) == ("1", "2", "3")
    assert ask("embed", second) == ()
    assert ask("subspace", first, ("0",)) == ("0",)
    assert ask("subspace", first, round=1) == ()


def test_a_client_that_lost_its_update_declines() -> None:
    algorithm = built(rank=2)
    people = entered(algorithm, CLIENTS, 0.0)
    compression = low_rank(MODEL.slices, 2)
    first = {"model": torch.zeros(MODEL.size), "right": torch.ones(compression.right_size)}
    assert answer(people, algorithm, Task("subspace", ("0", "1"), first, summed=True)).ids == ("0", "1")
    people.passed_on.rows["update"].pop("0")
    second = {"left": torch.ones(compression.subspace_size)}
    assert answer(people, algorithm, Task("embed", ("0", "1"), second, summed=True)).ids == ("1",)


@pytest.mark.parametrize("noise", get_args(NoiseKind))
def test_a_server_cannot_talk_clients_out_of_their_noise(noise: NoiseKind) -> None:
    algorithm = built(1.0, rank=2, noise=noise)
    _, watched = run(algorithm, CLIENTS, 1.0)
    honest = watched.tasks[0].payload
    people = entered(algorithm, CLIENTS, 1.0)
    numbers = (1e18, 6.5, 2.5, 0, -1, CLIENTS + 1, 10**18, math.nan, math.inf)
    others = (built(0.5, rank=2, noise=noise), built(1.0, rank=2, noise=noise, dropouts=0.4))
    lies: list[Payload] = [
        *({**honest, "drawn": torch.tensor(number)} for number in numbers),
        *(run(other, CLIENTS, 0.5)[1].tasks[0].payload for other in others),
        *({key: value for key, value in honest.items() if key != name} for name in ("drawn", "agreed")),
    ]
    for payload in lies:
        with pytest.raises(TaskRefused):
            answer(people, algorithm, Task("subspace", people.ids, payload, summed=True))
    assert answer(people, algorithm, Task("subspace", people.ids, honest, summed=True)).ids == people.ids


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_one_norm_bounds_a_whole_release(size: float) -> None:
    algorithm = built(
        1e-12, clip_subspace=0.2, clip_embedding=0.7, rank=2, updates=lambda _, m: size * torch.ones_like(m)
    )
    _, watched = run(algorithm, 1, 1e-12)
    subspace, embedding = (
        total.payload[task.action] for task, total in zip(watched.tasks, watched.totals, strict=True)
    )
    assert subspace.norm() <= 0.2
    assert embedding.norm() <= 0.7
    if size == 1e6:
        assert subspace.norm() > 0.199
        assert embedding.norm() > 0.699


# Directions from the model


def test_with_directions_from_the_model_there_is_one_release_with_all_of_the_budget() -> None:
    scale, clients = 2.0, 10
    options: dict[str, Any] = {"rank": 2, "directions": "model", "dropouts": 0.0}
    algorithm = built(scale, clip=0.5, clients=clients, updates=lambda _, m: torch.zeros_like(m), **options)
    assert set(algorithm.actions) == {"embed"}
    assert algorithm.round_price is not None
    assert algorithm.round_price(scale) == averaged(scale, rank=0).round_price(scale)  # type: ignore[misc]
    _, watched = run(algorithm, clients, scale, rounds=300)
    assert {task.action for task in watched.tasks} == {"embed"}
    numbers = torch.stack([total.payload["embed"] for total in watched.totals]).flatten()
    assert abs(float(numbers.std()) / (scale * 0.5) - 1) < 5 / math.sqrt(2 * len(numbers))


def test_with_directions_from_the_model_a_step_is_the_updates_part_in_them() -> None:
    people = federation(CLIENTS, drawn(CLIENTS), scale=0.0)
    found, watched = run(cmp_fed(people, rank=2, directions="model"), CLIENTS, 0.0, rounds=2)
    compression = low_rank(MODEL.slices, 2, directions="model")
    model = torch.zeros(MODEL.size)
    for task in watched.tasks:
        dice = torch.Generator().manual_seed(people.seed(task.round))
        torch.testing.assert_close(task.payload["left"], compression.left_of(model, dice), **CLOSE)
        mean = torch.stack([drawn(CLIENTS)(row, model) for row in range(CLIENTS)]).mean(0)
        step, (matrix,) = mean.clone(), compression.matrices
        left = task.payload["left"].view(matrix.rows, matrix.rank)
        inner = mean[matrix.start : matrix.stop].view(matrix.rows, matrix.columns)
        step[matrix.start : matrix.stop] = (left @ left.T @ inner).flatten()
        model = model + step
    torch.testing.assert_close(found.model, model, **CLOSE)


def test_with_directions_from_the_model_a_client_answers_once_in_a_round_it_paid_for() -> None:
    algorithm = built(rank=2, directions="model")
    people = entered(algorithm, CLIENTS, 0.0)
    size = low_rank(MODEL.slices, 2, directions="model").subspace_size
    asked = {"model": torch.zeros(MODEL.size), "left": torch.ones(size)}
    assert answer(people, algorithm, Task("embed", ("0", "1"), asked, round=1, summed=True)).ids == ()
    assert answer(people, algorithm, Task("embed", ("0", "1"), asked, summed=True)).ids == ("0", "1")
    assert answer(people, algorithm, Task("embed", ("1", "2"), asked, summed=True)).ids == ("2",)


# Noise


def test_the_promise_names_what_it_hangs_on() -> None:
    drawn_in_part = replace(federation(CLIENTS, drawn(CLIENTS), scale=1.0), rate=0.5)
    for build in (cmp_fed, dp_randagg):
        sums, cohort = build(drawn_in_part, dropouts=0.07, colluders=0.05).conditions
        assert "sums from which no client drawn is missing" in sums  # of so few none can be
        assert "at most 1 of them tell others their noise" in sums
        assert cohort == SECRET_COHORT
    (alone,) = built(1.0, clients=20).conditions  # all take part, which is no secret
    assert alone.endswith("at most 2 of the clients drawn are missing, and none tells its noise.")


@pytest.mark.parametrize(("dropouts", "colluders"), [(0.0, 0.0), (0.3, 0.0), (0.35, 0.2)])
def test_both_sums_have_the_noise_their_price_says(dropouts: float, colluders: float) -> None:
    scale, split, clients = 2.0, 0.2, 10
    options: dict[str, Any] = {"rank": 2, "split": split, "dropouts": dropouts, "colluders": colluders}
    algorithm = built(scale, clients=clients, updates=lambda _, m: torch.zeros_like(m), clip_subspace=0.1, **options)
    _, watched = run(algorithm, clients, scale, rounds=300)
    honest = clients - math.floor(dropouts * clients) - math.ceil(colluders * clients)
    surplus = math.sqrt(clients / honest)
    for action, wanted in (("subspace", scale / math.sqrt(split) * 0.1), ("embed", scale / math.sqrt(1 - split))):
        sums = [
            t.payload[action] for task, t in zip(watched.tasks, watched.totals, strict=True) if task.action == action
        ]
        numbers = torch.stack(sums).flatten()
        assert abs(float(numbers.std()) / (wanted * surplus) - 1) < 5 / math.sqrt(2 * len(numbers))
        assert abs(float(numbers.mean())) < 5 * wanted * surplus / math.sqrt(len(numbers))
    firsts = torch.stack([total.payload["subspace"] for total in watched.totals[::2]]).flatten()
    seconds = torch.stack([total.payload["embed"] for total in watched.totals[1::2]])[
        :, : firsts.numel() // 300
    ].flatten()
    assert abs(float(torch.corrcoef(torch.stack([firsts, seconds]))[0, 1])) < 5 / math.sqrt(len(firsts))


def test_dropouts_within_the_promise_change_nothing_and_beyond_it_nothing_is_opened() -> None:
    for lost, opened in (({"subspace": {"0"}}, True), ({"embed": {"3"}}, True), ({"embed": {"1", "2"}}, False)):
        found, watched = run(built(1.0, clients=10, rank=2, dropouts=0.1), 10, 1.0, lost=lost)
        assert (len(watched.totals[-1].payload) > 0) is opened
        assert bool(found.model.any()) is opened


class Unasked(Ask):
    def __call__(self, task: Task) -> Replies:
        raise AssertionError(task)

    def total(self, task: Task, terms: SumTerms) -> Total:
        raise AssertionError(task, terms)


def test_when_nobody_was_drawn_the_round_is_noise_all_the_same() -> None:
    algorithm = built(1.0, rank=2)
    state = algorithm.round(alone_with(algorithm), Unasked())
    assert state.model.abs().min() > 0
    open_one = built(0.0, rank=2)
    assert not open_one.round(alone_with(open_one), Unasked()).model.any()
    masked = averaged(1.0, rank=0).round(alone_with(algorithm), Unasked()).model
    assert abs(float(masked.std()) * CLIENTS - 1) < 5 / math.sqrt(2 * len(masked))


def test_a_cohort_of_one_has_all_the_noise() -> None:
    algorithm = built(1.0, rank=2, updates=lambda _, m: torch.zeros_like(m), colluders=0.25, dropouts=0.25)
    found, watched = run(algorithm, 1, 1.0)
    assert watched.tasks[0].payload["drawn"] == 1
    numbers = torch.cat([total.payload[task.action] for task, total in zip(watched.tasks, watched.totals, strict=True)])
    deviations = torch.tensor([0.01 * math.sqrt(2), math.sqrt(2)]).repeat_interleave(
        torch.tensor(
            [len(total.payload[task.action]) for task, total in zip(watched.tasks, watched.totals, strict=True)]
        )
    )
    assert abs(float((numbers / deviations).std()) - 1) < 5 / math.sqrt(2 * len(numbers))
    assert found.model.any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": 0.0}, "split"),
        ({"split": 1.0}, "split"),
        ({"rank": 0}, "rank"),
        ({"dropouts": 1.0}, "dropouts"),
        ({"colluders": -0.1}, "colluders"),
        ({"colluders": 0.5, "dropouts": 0.5}, "leave no client to add noise"),
        ({"dropouts": 0.51}, r"dropouts must be at most \(1 - colluders\)/2, here 0.5, not 0.51"),
        ({"colluders": 0.2, "dropouts": 0.41}, "here 0.4, not 0.41"),
        ({"directions": "model", "split": 0.3}, "split is about left factors .* leave it out"),
        ({"directions": "model", "clip_subspace": 0.01}, "clip_subspace is about left factors"),
        ({"directions": "model", "warm_start": "raw"}, "warm_start is about left factors"),
        ({"clip_embedding": 1e-30}, "clip_subspace, 0.01 of clip_embedding, must be between 1e-30"),
        ({"server_rate": 0.0}, "server_rate"),
        ({"rate_decay": 1.5}, "rate_decay"),
        ({"directions": "guessed"}, "directions must be one of paid, model"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        built(1.0, **options)


@pytest.mark.parametrize("clip", [-1.0, 0.0, 1e-31, 1e300, math.inf, math.nan])
@pytest.mark.parametrize("noise", get_args(NoiseKind))
def test_clip_norms_nothing_can_be_clipped_to_are_refused(clip: float, noise: NoiseKind) -> None:
    for name in ("clip_embedding", "clip_subspace"):
        with pytest.raises(InputError, match=f"^{name} must be between 1e-30 and "):
            cmp_fed(federation(CLIENTS, drawn(CLIENTS), scale=1.0), noise=noise, **{name: clip})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"training\.clip must be between"):
        federation(CLIENTS, drawn(CLIENTS), scale=1.0, clip=clip)


# The baseline


def test_randagg_sends_the_same_coordinates_of_all_and_others_in_every_round() -> None:
    _, watched = run(averaged(rank=1), CLIENTS, 0.0, rounds=3)
    assert len({int(task.payload["mask"]) for task in watched.tasks}) == 3
    assert watched.totals[0].payload["train"].shape == (low_rank(MODEL.slices, 1).uplink,)
    ones = dp_randagg(federation(CLIENTS, lambda _, m: torch.ones_like(m), scale=0.0), rank=1)
    found, _ = run(ones, CLIENTS, 0.0)
    assert int(found.model.sum()) == low_rank(MODEL.slices, 1).uplink
    assert set(found.model.tolist()) == {0.0, 1.0}


def test_clipping_what_is_sent_leaves_more_of_it() -> None:
    norms = {}
    for mask_first in (True, False):
        updates = lambda _, m: 10 * torch.ones_like(m)  # noqa: E731
        algorithm = dp_randagg(federation(CLIENTS, updates, scale=1e-12), rank=1, mask_first=mask_first)
        norms[mask_first] = float(run(algorithm, CLIENTS, 1e-12)[0].model.norm())
    assert norms[True] == pytest.approx(1.0, abs=1e-4)
    assert norms[False] == pytest.approx(math.sqrt(low_rank(MODEL.slices, 1).uplink / MODEL.size), abs=1e-4)
