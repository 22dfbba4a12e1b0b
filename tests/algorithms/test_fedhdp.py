"""FedHDP's global model against its paper's loop, in its limits, and with the noise its price says."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from reference.fedhdp import Plan, one_round
from support.grouped import SERVER_SEED, cohort, federation, run
from support.summed import MODEL, drawn
from support.transports import Securely

from polyeps.accounting.events import RareFailureDpEvent
from polyeps.accounting.histories import fold_gaussians, history_of, split_clip_bit
from polyeps.algorithms._group_sums import Noise, summed_by_server
from polyeps.algorithms.fedhdp import fedhdp
from polyeps.client import answer
from polyeps.core import ENTER, Profile, Replies, State, SumTerms, Task
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError, TaskRefused
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.mechanisms.random_words import words_of
from polyeps.participation import Participation
from polyeps.server import serve
from polyeps.transport.memory import InMemory

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
GROUPS = ("strict", "open", "strict", "careful", "strict", "careful", "strict", "strict")
SCALES = {"careful": 0.4, "open": 0.0, "strict": 1.1}
TRUSTS = pytest.mark.parametrize("trust", ["server", "secure-sum"])
RATIOS = pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0, "auto"])


def noise_of(plan: Plan, number: int) -> tuple[dict[str, Any], float]:
    """The server's noise of a round, by group, and that of the bits, in deviations."""
    words = words_of(SeededStreams(SERVER_SEED, list(plan.multipliers), number), "train")
    sums = {}
    for place, name in enumerate(plan.multipliers):
        grid = GridSum(1.0, MODEL.size, plan.noise_of_sums(name))
        empty = torch.zeros(MODEL.size, dtype=torch.float64)
        sums[name] = grid.release(empty, words, place).numpy() / (grid.noise_multiplier or 1.0)
    if not plan.bit_deviation:
        return sums, 0.0
    bits = GridSum(0.5, 1, 2 * plan.bit_deviation)
    return sums, float(bits.release(torch.zeros(1, dtype=torch.float64), words)) / plan.bit_deviation


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("scales", [SCALES, {"careful": 1.0, "open": 3.0, "strict": 9.0}, dict.fromkeys(SCALES, 0.0)])
def test_it_is_the_papers_loop(monkeypatch: pytest.MonkeyPatch, ratio: float, scales: dict[str, float]) -> None:
    deviation = 5.0 if any(scales.values()) else 0.0
    plan = Plan(GROUPS, scales, deviation, 0.5, ratio if min(scales.values()) == 0 else 1.0, 0.4, 0.7)
    options: dict[str, Any] = {"ratio": plan.ratio, "quantile": 0.4, "clip_rate": 0.7, "clip_noise": deviation}
    updates, rounds = drawn(len(GROUPS)), 6
    found = run(monkeypatch, GROUPS, scales, updates, rate=0.5, rounds=rounds, clip=9.0, **options)

    def in_numpy(row: int, model: Any) -> Any:
        return updates(row, torch.from_numpy(model).float()).double().numpy()

    model, clip = np.zeros(MODEL.size), 9.0
    for number in range(rounds):
        model, clip = one_round(plan, model, clip, found.cohorts[number], in_numpy, *noise_of(plan, number))
        state = found.states[number]
        torch.testing.assert_close(state.model.double(), torch.from_numpy(model), rtol=1e-2, atol=1e-2)
        assert float(state.kept["clip"]) == pytest.approx(clip, rel=1e-3)
    assert len(set(found.cohorts)) > 3
    assert clip != 9.0


@TRUSTS
def test_without_noise_and_clip_everybody_counts_alike(monkeypatch: pytest.MonkeyPatch, trust: str) -> None:
    scales = dict.fromkeys(SCALES, 0.0)
    for ratio in (1.0, "auto"):
        found = run(monkeypatch, GROUPS, scales, drawn(8), clip=1e6, ratio=ratio, trust=trust, rounds=1)
        rows = torch.stack([drawn(8)(row, torch.zeros(MODEL.size)) for row in range(8)])
        torch.testing.assert_close(found.states[0].model, rows.mean(0), **CLOSE)


@RATIOS
def test_summed_unseen_it_is_the_same_without_noise(monkeypatch: pytest.MonkeyPatch, ratio: Any) -> None:
    both = [
        run(monkeypatch, GROUPS, dict.fromkeys(SCALES, 0.0), drawn(8), rate=0.5, rounds=5, ratio=ratio, trust=trust)
        for trust in ("server", "secure-sum")
    ]
    torch.testing.assert_close(both[0].states[-1].model, both[1].states[-1].model, **CLOSE)
    assert float(both[0].states[-1].kept["clip"]) == pytest.approx(float(both[1].states[-1].kept["clip"]), rel=1e-6)
    assert not both[0].heard.totals
    assert {task.action for task in both[1].heard.asked} == {ENTER, "train"}  # the latter inside sums alone


# Limits


@TRUSTS
@RATIOS
@pytest.mark.parametrize("clip", [1e-25, 1.0, 1e20])
def test_any_clip_leaves_the_model_finite(monkeypatch: pytest.MonkeyPatch, trust: str, ratio: Any, clip: float) -> None:
    found = run(monkeypatch, GROUPS, SCALES, drawn(8), rate=0.3, rounds=8, clip=clip, ratio=ratio, trust=trust)
    assert all(torch.isfinite(state.model).all() for state in found.states)
    assert all(1e-30 <= float(state.kept["clip"]) <= 1e30 for state in found.states)
    if clip == 1e-25:
        assert found.states[-1].model.norm() < 1e-20


@TRUSTS
def test_a_group_of_which_nobody_was_drawn_is_noise_all_the_same(monkeypatch: pytest.MonkeyPatch, trust: str) -> None:
    groups = ("rare", *("many",) * 9)
    found = run(
        monkeypatch, groups, {"rare": 2.0, "many": 1.0}, drawn(10), rate=0.2, rounds=40, trust=trust, clip_rate=0.0
    )
    absent = [release for release, drawn in zip(found.releases, found.cohorts, strict=True) if 0 not in drawn]
    assert len(absent) > 20
    rows = torch.stack([release.sums["rare"] for release in absent])
    expected = split_clip_bit(2.0, 2.0)  # by default bits have the strictest group's noise here
    assert abs(float(rows.std()) / expected - 1) < 5 / math.sqrt(2 * rows.numel())
    assert all(bool(one.sums["many"].any()) for one in found.releases)


@TRUSTS
def test_nobody_drawn_at_all(monkeypatch: pytest.MonkeyPatch, trust: str) -> None:
    found = run(monkeypatch, GROUPS, SCALES, drawn(8), rate=0.02, rounds=3, trust=trust, ratio=1.0)
    assert () in found.cohorts
    for release in found.releases:
        assert set(release.sums) == set(SCALES)
    place = found.cohorts.index(())
    assert not found.releases[place].sums["open"].any()
    assert found.releases[place].sums["strict"].abs().min() > 0


@TRUSTS
@RATIOS
@pytest.mark.parametrize(
    "scales", [{"a": 0.0}, {"a": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 0.5, "b": 1.0, "c": 2.0, "d": 0.0}]
)
def test_any_groups(monkeypatch: pytest.MonkeyPatch, trust: str, ratio: Any, scales: dict[str, float]) -> None:
    """One group or several, with an open one or without, also with a single client."""
    groups = (*scales, *(next(iter(scales)),) * 4)
    found = run(monkeypatch, groups, scales, drawn(len(groups)), rounds=3, ratio=ratio, trust=trust)
    assert torch.isfinite(found.states[-1].model).all()
    assert found.states[-1].model.any()


def test_all_open_is_federated_averaging_whatever_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [
        run(monkeypatch, ("open",) * 5, {"open": 0.0}, drawn(5), rounds=3, ratio=ratio).states[-1].model
        for ratio in (0.0, 0.5, 1.0, "auto")
    ]
    assert all(torch.equal(model, models[0]) for model in models)


def test_without_noise_open_clients_alone_are_heard_at_ratio_0(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = lambda row, model: torch.full_like(model, float(row == 1))  # noqa: E731
    found = run(monkeypatch, GROUPS, SCALES, updates, clip=1e6, ratio=0.0)
    assert torch.equal(found.states[0].model, torch.ones(MODEL.size))


def test_too_few_answers_leave_a_group_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"train": {"0", "2"}}  # two of five strict clients
    found = run(monkeypatch, GROUPS, SCALES, drawn(8), trust="secure-sum", lost=lost, ratio=1.0)
    assert set(found.releases[0].sums) == {"careful", "open"}
    within = run(monkeypatch, GROUPS, SCALES, drawn(8), trust="secure-sum", lost=lost, ratio=1.0, dropouts=0.4)
    assert set(within.releases[0].sums) == set(SCALES)
    nobody = run(monkeypatch, GROUPS, SCALES, drawn(8), trust="secure-sum", lost={"train": set("01234567")})
    assert not nobody.states[0].model.any()


# The clip norm


@TRUSTS
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_the_clip_norm_comes_to_the_quantile_of_norms(
    monkeypatch: pytest.MonkeyPatch, trust: str, quantile: float
) -> None:
    clients = 200
    unit = torch.ones(MODEL.size) / math.sqrt(MODEL.size)
    updates = lambda row, _: unit * math.exp(row / clients)  # noqa: E731
    groups = tuple("open" if row % 4 == 0 else "private" for row in range(clients))
    found = run(
        monkeypatch, groups, {"open": 0.0, "private": 1.0}, updates, rate=0.5, rounds=150, clip=0.4, quantile=quantile,
        trust=trust,
    )  # fmt: skip
    late = [math.log(float(state.kept["clip"])) for state in found.states[80:]]
    assert abs(sum(late) / len(late) - quantile) < 0.06


def test_a_clip_that_does_not_adapt_costs_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, ("a",) * 4, {"a": 1.5}, rounds=100, adaptive=False)
    rows = torch.stack([release.sums["a"] for release in found.releases])
    assert abs(float(rows.std()) / 1.5 - 1) < 5 / math.sqrt(2 * rows.numel())
    assert float(found.states[-1].kept["clip"]) == 1.0


# Noise


@TRUSTS
@pytest.mark.parametrize(("dropouts", "rate"), [(0.0, 1.0), (0.3, 1.0), (0.25, 0.4)])
def test_sums_and_bits_have_the_noise_their_price_says(
    monkeypatch: pytest.MonkeyPatch, trust: str, dropouts: float, rate: float
) -> None:
    """Whatever the cohort, so that the size of the noise tells nothing of it."""
    clip, deviation, rounds = 0.3, 2.5, 250
    found = run(
        monkeypatch, GROUPS, SCALES, rate=rate, rounds=rounds, clip=clip, clip_noise=deviation, clip_rate=0.0,
        trust=trust, dropouts=dropouts,
    )  # fmt: skip
    # Of five strict clients one may be missing, where all take part; of two careful ones none.
    surplus = {"strict": math.sqrt(5 / 4) if trust == "secure-sum" and dropouts == 0.3 else 1.0, "careful": 1.0}
    for name, z in SCALES.items():
        rows = torch.stack([release.sums[name] for release in found.releases])
        if not z:
            assert not rows.any()
            continue
        together = fold_gaussians(split_clip_bit(z, deviation), 2 * deviation)
        assert together == pytest.approx(z)
        wanted = split_clip_bit(z, deviation) * clip * surplus[name]
        for part in (rows, *(rows[[len(who) < 4 for who in found.cohorts]],) * (rate < 1)):
            assert abs(float(part.std()) / wanted - 1) < 5 / math.sqrt(2 * part.numel())
            assert abs(float(part.mean())) < 5 * wanted / math.sqrt(part.numel())
    bits = np.array([one.bits - len(who) / 2 for one, who in zip(found.releases, found.cohorts, strict=True)])
    # Summed unseen, each group has noise of its own.
    wanted = deviation * (1.0 if trust == "server" else math.hypot(*surplus.values()))
    assert abs(bits.std() / wanted - 1) < 5 / math.sqrt(2 * rounds)
    assert abs(bits.mean()) < 5 * wanted / math.sqrt(rounds)


def test_noise_differs_between_groups_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for trust in ("server", "secure-sum"):
        found = run(monkeypatch, ("a", "b") * 3, {"a": 1.0, "b": 1.0}, rounds=30, trust=trust, clip_rate=0.0)
        rows = torch.stack([one.sums[name] for name in ("a", "b") for one in found.releases])
        products = torch.corrcoef(rows) - torch.eye(len(rows))
        assert float(products.abs().max()) < 6 / math.sqrt(MODEL.size)


def test_by_default_bits_cost_next_to_nothing_of_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, ("a",) * 400, {"a": 1.5}, rounds=60, clip_rate=0.0)
    rows = torch.stack([release.sums["a"] for release in found.releases])
    assert split_clip_bit(1.5, 20.0) < 1.5011
    assert abs(float(rows.std()) / 1.5 - 1) < 5 / math.sqrt(2 * rows.numel()) + 1e-3


@TRUSTS
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_no_clip_bits_are_sent_where_nothing_adapts(monkeypatch: pytest.MonkeyPatch, trust: str, rate: float) -> None:
    updates = lambda row, model: torch.full_like(model, 10.0 if row < 3 else 1e-3)  # noqa: E731
    for scales in (SCALES, dict.fromkeys(SCALES, 0.0)):
        found = run(monkeypatch, GROUPS, scales, updates, rate=rate, rounds=3, adaptive=False, trust=trust, ratio=1.0)
        assert all(set(reply.payload) <= {"entered", "update", "train"} for reply in found.heard.replies)
        for total in found.heard.totals:
            assert {tensor.shape for tensor in total.payload.values()} <= {(MODEL.size,)}
        assert {release.bits for release in found.releases} == {0.0}


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_integer_noise_is_as_large(monkeypatch: pytest.MonkeyPatch, noise: str, adaptive: bool) -> None:
    clip, deviation, rounds = 0.3, 2.5, 12
    options: dict[str, Any] = {"clip_noise": deviation, "clip_rate": 0.0, "trust": "secure-sum", "adaptive": adaptive}
    found = run(monkeypatch, GROUPS, SCALES, rate=0.5, rounds=rounds, clip=clip, noise=noise, **options)
    for name, z in SCALES.items():
        rows = torch.stack([release.sums[name] for release in found.releases])
        wanted = (split_clip_bit(z, deviation) if adaptive else z) * clip if z else 0.0
        surplus = math.sqrt(1 + 1 / len(GROUPS)) if noise == "discrete-gaussian" else 1.0
        assert abs(float(rows.std()) - wanted * surplus) <= 5 * wanted / math.sqrt(2 * rows.numel())


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
def test_the_real_protocol_gives_the_same_bits(noise: Any) -> None:
    groups, scales = ("a", "b") * 4, {"a": 0.5, "b": 1.0}
    models = []
    for carried in (InMemory, Securely):
        built = fedhdp(federation(groups, scales, drawn(8)), personal=False, trust="secure-sum", noise=noise)
        transport = carried(cohort(built, groups), built, ("group",))
        start = State(torch.zeros(MODEL.size))
        models.append(serve(built, transport, start, rounds=2, participation=Participation(), seed=3, run="x").model)
    assert torch.equal(*models)
    assert models[0].any()


# What clients and builders refuse


@TRUSTS
def test_the_price_is_the_same_before_and_after_calibration(trust: Any) -> None:
    groups = ("a",) * 300 + ("b",) * 20
    before, after = (
        fedhdp(federation(groups, scales, rate=0.3), personal=False, trust=trust).round_price
        for scales in ({"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 2.0})
    )
    assert before is not None
    assert after is not None
    assert before(1.5) == after(1.5)
    failures = [step for step in history_of(after(1.5)) if isinstance(step, RareFailureDpEvent)]
    assert len(failures) == (trust == "secure-sum")
    assert all(0 < step.probability <= 1e-10 / 3 for step in failures)


def test_clients_of_one_group_do_not_take_part_in_the_sum_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' noise would be smaller, or none."""
    found = run(monkeypatch, GROUPS, SCALES, drawn(8), trust="secure-sum", noise="skellam")
    tasks = {int(task.to[0]): task for task in found.heard.tasks}
    algorithm = fedhdp(federation(GROUPS, SCALES, drawn(8)), personal=False, trust="secure-sum", noise="skellam")
    people = cohort(algorithm, GROUPS)
    answer(people, algorithm, Task(ENTER, people.ids, {}))
    strict, opened = tasks[0], tasks[1]
    with pytest.raises(InputError, match="other terms than were agreed to"):
        answer(people, algorithm, Task("train", ("0",), opened.payload, summed=True))
    with pytest.raises(InputError, match="clients of several groups"):
        answer(people, algorithm, Task("train", ("1", "2"), strict.payload, summed=True))
    assert algorithm.sums is not None
    assert algorithm.sums("train", strict.payload) == SumTerms(5, 5, 0, algorithm.sums("train", strict.payload).bits)
    for name in ("drawn", "agreed", "clip"):
        left = {key: value for key, value in strict.payload.items() if key != name}
        with pytest.raises(TaskRefused):
            answer(people, algorithm, Task("train", ("4",), left, summed=True))
    for clip in (math.nan, math.inf, 0.0, -1.0, 1e40):
        asked = {**strict.payload, "clip": torch.tensor(clip, dtype=torch.float64)}
        with pytest.raises(TaskRefused):
            answer(people, algorithm, Task("train", ("4",), asked, summed=True))
    assert answer(people, algorithm, Task("train", ("4",), strict.payload, summed=True)).ids == ("4",)


def test_a_client_trains_once_for_what_it_paid_and_not_before() -> None:
    algorithm = fedhdp(federation(GROUPS, SCALES, drawn(8)), personal=False)
    people = cohort(algorithm, GROUPS)
    payload = {"model": torch.zeros(MODEL.size), "clip": torch.tensor(1.0, dtype=torch.float64)}

    def trained(to: tuple[str, ...], round: int = 0) -> tuple[str, ...]:
        return answer(people, algorithm, Task("train", to, payload, round=round)).ids

    assert trained(people.ids) == ()
    answer(people, algorithm, Task(ENTER, ("0", "1", "2"), {}))
    assert trained(("1", "2", "3")) == ("1", "2")
    assert trained(("0", "1")) == ("0",)
    assert trained(people.ids) == ()
    assert trained(people.ids, round=1) == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ratio": 1.5}, "ratio must lie between"),
        ({"quantile": -0.1}, "quantile must lie between"),
        ({"dropouts": 1.0}, "dropouts must be at least 0 and below 1"),
        ({"noise": "skellam"}, "is about shares that clients add"),
        ({"clip_noise": 0.5}, "clip_noise must be above half the strictest"),
        ({"pull": {"strict": 0.1}}, "pull names no λ for the group 'careful'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        fedhdp(federation(GROUPS, SCALES), **options)


def lying(update: float, bit: float) -> Any:
    """A transport on which every client sends the same numbers."""

    def ask(task: Task) -> Replies:
        rows = torch.full((len(task.to), MODEL.size), update)
        return Replies(task.to, {"update": rows, "bit": torch.full((len(task.to),), bit)}, (True,) * len(task.to))

    return ask


def test_rows_of_a_group_without_noise_are_clipped_by_the_server_too() -> None:
    state = State(torch.zeros(MODEL.size), roster=(Profile("a", group="open"), Profile("b", group="strict")))
    streams = partial(SeededStreams, 1, ["open", "strict"])
    asked = {"model": state.model, "clip": torch.tensor(2.0, dtype=torch.float64)}
    found = summed_by_server(state, lying(1e20, 0.5), asked, Noise({"open": 0.0, "strict": 1e-3}, 0.0), streams)
    assert float(found.sums["open"].norm()) <= 2.0
    assert float(found.sums["strict"].norm()) <= 2.1


@pytest.mark.parametrize("bit", [-3e38, 3e38, -3e5])
def test_no_bit_makes_the_clip_overflow(bit: float) -> None:
    algorithm = fedhdp(federation(GROUPS, dict.fromkeys(SCALES, 0.0)))
    roster = tuple(Profile(str(place), group=name) for place, name in enumerate(GROUPS))
    after = algorithm.round(State(torch.zeros(MODEL.size), enrolled=roster, roster=roster), lying(0.0, bit))
    assert 1e-30 <= float(after.kept["clip"]) <= 1e30
