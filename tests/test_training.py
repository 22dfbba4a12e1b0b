"""Training a cohort: against the plain loop and torch.optim.SGD, and that grouping changes nothing."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import SelfComposedDpEvent
from reference.local_training import dp_sgd_client, example_gradient
from scipy import stats
from support.differing import Differing, of_each
from torch import Tensor, nn

from polyeps import training
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.core import Records
from polyeps.engine import cuda_graphs, device_batches, linear_kernel, loop, memory
from polyeps.engine.cuda_graphs import CudaGraphs, train_on_device
from polyeps.engine.deferred import Deferral
from polyeps.engine.device_batches import BatchShape, PlacedBatches, place_batches
from polyeps.engine.fallback_layers import VmapLayer
from polyeps.engine.kept_memory import keep_freed_memory
from polyeps.engine.layout import Plan, lay_out, plan_exact, plan_padded, plan_sorted
from polyeps.engine.loop import Settings, choose_plans, pace, train_on_cpu
from polyeps.engine.network import Network
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.engine.philox import normals
from polyeps.engine.sampling import Batches, poisson_batches, split_batches
from polyeps.errors import InputError
from polyeps.models import MODELS, Model, cnn, cross_entropy, linear_svm, logistic, mlp
from polyeps.training import Training, dp_sgd, sgd


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small operations on two threads wait for whoever else uses the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = mlp(6, (5,), 3)
COUNTS = [12, 1, 30, 7, 19]
CLIENTS = len(COUNTS)


def cohort(model: Model = SMALL, counts: list[int] = COUNTS, classes: int = 3) -> Records:
    generator = torch.Generator().manual_seed(9)
    total = sum(counts)
    if model.input_type == torch.int64:
        features = torch.randint(0, 50, (total, *model.input_shape), generator=generator)
    else:
        features = torch.randn(total, *model.input_shape, generator=generator)
    labels = torch.randint(0, classes, (total,), generator=generator)
    return Records(features, labels, torch.tensor([0, *np.cumsum(counts)]))


def start(model: Model = SMALL) -> Tensor:
    return model.start(torch.Generator().manual_seed(4))


def streams(ids: list[int] | None = None) -> SeededStreams:
    return SeededStreams(21, list(range(CLIENTS)) if ids is None else ids, 2)


def rows_of(records: Records, clients: list[int]) -> Records:
    """The records of some clients, in a new block."""
    edges = records.offsets.tolist()
    chosen = [torch.arange(edges[i], edges[i + 1]) for i in clients]
    offsets = torch.tensor([0, *np.cumsum([len(rows) for rows in chosen])])
    return Records(records.features[torch.cat(chosen)], records.labels[torch.cat(chosen)], offsets)


# Everything differs between clients; the third has no steps to take, the second one record.
RATE = [0.3, 0.9, 0.2, 1.0, 0.05]
STEPS = [6, 4, 0, 3, 6]
LEARNING_RATE = [0.3, 0.1, 0.2, 0.25, 0.4]
CLIP = [0.5, 1.0, 0.7, 2.0, 0.1]
SCALE = [1.0, 0.5, 2.0, 0.0, 3.0]


def varied(model: Model = SMALL, memory: int | None = None) -> Differing:
    return of_each(dp_sgd, model, rate=RATE, steps=STEPS, clip=CLIP, learning_rate=LEARNING_RATE, memory=memory)


def one_of(client: int) -> Training:
    i = client
    return dp_sgd(SMALL, rate=RATE[i], steps=STEPS[i], clip=CLIP[i], learning_rate=LEARNING_RATE[i])


def test_dp_sgd_equals_the_plain_loop_client_by_client() -> None:
    records = cohort()
    updates = varied().run(start(), records, streams(), SCALE)
    for i in range(CLIENTS):
        plain = dp_sgd_client(
            SMALL,
            start(),
            rows_of(records, [i]),
            streams([i]),
            RATE[i],
            STEPS[i],
            CLIP[i],
            SCALE[i],
            LEARNING_RATE[i],
        )
        torch.testing.assert_close(updates[i], plain, rtol=1e-5, atol=1e-5)
    assert not updates[2].any()  # no steps, no update
    assert updates[[0, 1, 3, 4]].any(dim=1).all()


def test_the_loops_empty_batches_are_really_there() -> None:
    records = cohort()
    drawn = poisson_batches(streams(), records.spans.numpy(), np.array(RATE), np.array(STEPS))
    sizes = drawn.sizes[:, 4]
    assert (sizes == 0).any()  # noise is added and a step taken all the same: see the test above


def test_a_cohort_of_one_is_a_row_of_many() -> None:
    records = cohort()
    together = varied().run(start(), records, streams(), SCALE)
    for i in range(CLIENTS):
        alone = one_of(i).run(start(), rows_of(records, [i]), streams([i]), SCALE[i])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-6)


def test_renumbering_the_clients_changes_nothing() -> None:
    records, order = cohort(), [3, 0, 4, 2, 1]
    together = varied().run(start(), records, streams(), SCALE)

    def moved(values: Sequence[float]) -> list[float]:
        return [values[i] for i in order]

    again = of_each(
        dp_sgd, SMALL, rate=moved(RATE), steps=moved(STEPS), clip=moved(CLIP), learning_rate=moved(LEARNING_RATE)
    ).run(start(), rows_of(records, order), streams(order), moved(SCALE))
    torch.testing.assert_close(again, together[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [[2, 0], [4], [3, 1, 0, 4, 2]])
def test_some_rows_train_as_they_do_among_all(rows: list[int]) -> None:
    records = cohort()
    momentum = [0, 0.1, 0.2, 0.3, 0]
    numbers = {"rate": RATE, "steps": STEPS, "clip": CLIP, "learning_rate": LEARNING_RATE, "momentum": momentum}
    way = of_each(dp_sgd, SMALL, batch=2.0, **numbers)
    together = way.run(start(), records, streams(), SCALE)
    scale = [SCALE[i] for i in rows]
    some = way.run(start(), rows_of(records, rows), streams(rows), scale, rows=rows)
    torch.testing.assert_close(some, together[rows], rtol=1e-5, atol=1e-6)


def test_rows_of_plain_training() -> None:
    records, rows = cohort(), [3, 1]
    way = of_each(sgd, SMALL, rate=RATE, steps=STEPS, learning_rate=LEARNING_RATE, pull=[0.3, 0, 0, 0.1, 0])
    together = way.run(start(), records, streams(), anchor=start() + 0.1)
    some = way.run(start(), rows_of(records, rows), streams(rows), anchor=start() + 0.1, rows=rows)
    torch.testing.assert_close(some, together[rows], rtol=1e-5, atol=1e-6)


def test_a_clients_own_number_stands_in_for_the_common_one_and_others_are_ignored() -> None:
    records = rows_of(cohort(), [4, 0])
    way = sgd(SMALL, rate=0.5, steps=3, learning_rate=0.1)
    one = way.run(start(), records, streams([4, 0]))
    again = way.run(start(), records, streams([4, 0]), settings={"steps": np.full(2, 3), "colour": np.arange(2)})
    assert torch.equal(one, again)
    longer = way.run(start(), records, streams([4, 0]), settings={"steps": np.array([3, 5])})
    assert torch.equal(longer[0], one[0])
    assert not torch.equal(longer[1], one[1])


def test_without_a_rate_it_is_the_batch_over_the_records() -> None:
    records, counts = cohort(counts=[12, 6, 30, 7, 19]), np.array([12, 6, 30, 7, 19])
    for build, noise in ((partial(dp_sgd, clip=1.0), SCALE), (sgd, None)):
        by_batch = build(SMALL, batch=5, steps=3, learning_rate=0.1)
        by_rate = build(SMALL, rate=0.5, steps=3, learning_rate=0.1)
        own = {"rate": 5 / counts} | ({} if noise is None else {"batch": np.full(5, 5.0)})
        found = by_batch.run(start(), records, streams(), noise)
        assert torch.equal(found, by_rate.run(start(), records, streams(), noise, settings=own))
    price = dp_sgd(SMALL, batch=5, steps=3, clip=1.0, learning_rate=0.1).price
    assert price is not None
    assert price(1.5, {"records": 30.0}) == SelfComposedDpEvent(Poisson(5 / 30, Gaussian(1.5)), 3)
    assert price(1.5, {"records": 10.0, "steps": 2.0, "batch": 4.0}) == price(1.5, {"rate": 0.4, "steps": 2.0})
    for settings, said in (({}, "records is not set"), ({"records": 4.0}, "batch is 5 .* which has 4 records")):
        with pytest.raises(InputError, match=said):
            price(1.5, settings)


@pytest.mark.parametrize("fixed", [False, True], ids=["poisson", "fixed"])
def test_a_step_kept_from_other_rows_works_with_the_new_rows_numbers(fixed: bool) -> None:
    """What replaying a graph does: the old step on the old buffers, filled with what the new rows need."""
    records, starts = cohort(counts=[12, 9, 30, 12, 9, 30]), start().expand(3, -1).contiguous()

    def of(
        rows: slice, shift: float, last: BatchShape | None
    ) -> tuple[Settings, Records, SeededStreams, PlacedBatches]:
        quarter = np.array([0.3, 0.6, 0.2]) - shift
        some = Settings(
            rate=quarter,
            steps=np.array([4, 2, 3]) if shift else np.array([3, 4, 1]),
            learning_rate=quarter / 2,
            divisor=quarter * 30,
            clip=quarter,
            deviation=quarter,
            momentum=quarter,
            decay=quarter / 10,
            pull=quarter,
            batch=np.array([4, 3, 4]) if fixed else None,
        )
        mine = Records(records.features, records.labels, records.offsets[rows])
        own = streams(list(range(rows.start, rows.stop - 1)))
        placed = place_batches(own, mine.spans, some, SMALL.size, SMALL.floats_per_row, last, starts.device)
        return some, mine, streams(list(range(rows.start, rows.stop - 1))), placed

    first, mine, own, placed = of(slice(0, 4), 0.0, None)
    layout, held = cuda_graphs._prepare(starts, starts, placed, pace(first, None, starts.device), own)
    with torch.no_grad():
        for _ in range(4):
            cuda_graphs._step(SMALL, Deferral(SMALL.network), mine, layout, held)
    second, mine, own, placed = of(slice(3, 7), 0.1, placed.shape)
    fresh = cuda_graphs._prepare(starts + 0.1, starts, placed, pace(second, None, starts.device), own)[1]
    assert lay_out(3, list(placed.shape.cuts), np.array(placed.shape.widths), starts.device).groups == layout.groups
    cuda_graphs._refill(held, fresh)
    with torch.no_grad():
        for _ in range(4):
            cuda_graphs._step(SMALL, Deferral(SMALL.network), mine, layout, held)
        wanted = train_on_device(SMALL, starts + 0.1, starts, mine, own, second, CudaGraphs())
    torch.testing.assert_close(held.models, wanted, rtol=1e-5, atol=1e-6)


def smooth_cnn() -> Model:
    """A convolution without kinks: at one, rounding decides which way a gradient goes."""
    layers = [nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(64, 10)]
    return Model(nn.Sequential(*layers).to("meta"), cross_entropy, (1, 28, 28))


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [(logistic(), 1e-6), (smooth_cnn(), 1e-6), (cnn(), 1e-3)],
    ids=["logistic", "smooth", "cnn"],
)
def test_chunks_of_1_7_and_64_agree(model: Model, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    records = cohort(model, [9] * 64, classes=10)
    ids = list(range(64))
    found = []
    for size in (1, 7, 64):
        edges = [*range(0, 64, size), 64]
        pieces = [slice(a, b) for a, b in pairwise(edges)]
        monkeypatch.setattr(training, "chunks", lambda *_, pieces=pieces: pieces)
        way = dp_sgd(model, rate=0.3, steps=3, clip=1.0, learning_rate=0.1)
        found.append(way.run(start(model), records, streams(ids), 0.7))
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=tolerance)
    torch.testing.assert_close(found[1], found[2], rtol=1e-5, atol=tolerance)
    assert float(found[0].std()) > 5 * tolerance  # the updates are far larger than what is let pass


def test_how_clients_are_grouped_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    records = cohort()
    found = []
    plans: list[Callable[[Batches], Plan]] = [
        plan_exact,
        plan_padded,
        *(partial(plan_sorted, groups=groups) for groups in (1, 2, 5)),
    ]
    for plan in plans:
        monkeypatch.setattr(loop, "choose_plans", lambda _, batches, *__, plan=plan: [plan(batches)])
        found.append(varied().run(start(), records, streams(), SCALE))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-5, atol=1e-6)


def test_the_layout_follows_the_model() -> None:
    sizes = np.random.default_rng(0).poisson(8, (20, 40))
    batches = Batches(sizes, np.zeros(sizes.sum(), np.int64))
    assert choose_plans(logistic(), batches)[0].cuts == [0, 40]  # padded: 7 850 parameters, 1 568 floats a row
    assert choose_plans(cnn(), batches)[0].order is not None  # sorted: 88 184 floats a row
    assert len(choose_plans(MODELS["mcmahan_cnn"](), batches)[0].cuts) == 41  # exact
    sizes[:, 0] = 500  # one client with huge batches must not widen everybody's
    uneven = Batches(sizes, np.zeros(sizes.sum(), np.int64))
    assert choose_plans(logistic(), uneven)[0].order is not None
    plan = choose_plans(logistic(), uneven)[0]
    assert (plan.widths @ np.diff(plan.cuts)).sum() < 1.25 * sizes.sum()


def test_what_exceeds_the_usual_width_follows_in_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.random.default_rng(0).poisson(8, (200, 40))
    assert sizes.max() > 16
    plans = choose_plans(logistic(), Batches(sizes, np.zeros(sizes.sum(), np.int64)))
    assert len(plans) == 2
    assert set(np.unique(plans[0].widths)) == {16}
    assert sum(len(plan.records) for plan in plans) == sizes.sum()
    records, training = cohort(), varied()
    found = training.run(start(), records, streams(), SCALE)
    passes = []

    def halves(_: Model, batches: Batches, *__: object) -> list[Plan]:
        first, *others = split_batches(batches, max(1, int(batches.sizes.max()) // 2))
        passes.append(len(others))
        return [plan_padded(first, 4), *(plan_exact(each, 2) for each in others)]

    monkeypatch.setattr(loop, "choose_plans", halves)
    split = training.run(start(), records, streams(), SCALE)
    assert min(passes) > 0
    torch.testing.assert_close(found, split, rtol=1e-5, atol=1e-6)


def test_little_memory_means_small_chunks_and_the_same_answer() -> None:
    records = cohort()
    torch.testing.assert_close(
        varied(memory=1).run(start(), records, streams(), SCALE),
        varied().run(start(), records, streams(), SCALE),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_thousand_clients_of_cnn_stay_within_the_memory_they_are_given() -> None:
    model = cnn()
    records = Records(torch.zeros(1000, 1, 28, 28), torch.zeros(1000), torch.arange(1001) * 1200)
    settings = Settings(np.full(1000, 8 / 1200), np.full(1000, 1), np.ones(1000), None, None, None, None, None, None)
    pieces = memory.chunks(model, records, settings, None)
    assert [pieces[0].start, pieces[-1].stop] == [0, 1000]
    assert all(a.stop == b.start for a, b in pairwise(pieces))
    largest = max(piece.stop - piece.start for piece in pieces)
    # 88 184 floats a row (patches twice, activations, gradients), eight rows a client
    assert 10 < largest <= memory.CPU_MEMORY / (8 * 88_184 * 4)


def test_threads_that_train_clients_side_by_side_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    records, threads = cohort(), torch.get_num_threads()
    monkeypatch.setattr(memory, "SIDE_BY_SIDE", 1)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            found.append((varied().run(start(), records, streams(), SCALE), torch.get_num_threads()))
        finally:
            torch.set_num_threads(threads)
    for update, _ in found[1:]:
        torch.testing.assert_close(update, found[0][0], rtol=1e-5, atol=1e-6)
    assert [left for _, left in found] == [1, 2, 3]


def test_modules_of_users_and_small_models_are_trained_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    records = cohort()
    settings = Settings(np.array(RATE), np.array(STEPS), np.array(LEARNING_RATE), *[None] * 6)
    model = SMALL
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert memory.threads_of(model, records, settings, None) == 1
    monkeypatch.setattr(memory, "SIDE_BY_SIDE", 1)
    assert memory.threads_of(model, records, settings, None) == min(4, records.clients)
    assert memory.threads_of(model, records, settings, 1) == 1
    monkeypatch.setitem(vars(model), "network", Network((VmapLayer(nn.Linear(2, 2)),)))
    assert memory.threads_of(model, records, settings, None) == 1


def torch_sgd(
    model: Model, records: Records, ids: list[int], divisor: str | None, penalty: float, **options: float
) -> Tensor:
    """Every client by torch.optim.SGD itself, on the same batches; divisor None is the mean."""
    updates = []
    for i in ids:
        mine = rows_of(records, [i])
        batches = poisson_batches(streams([i]), mine.spans.numpy(), np.array([RATE[i]]), np.array([STEPS[i]]))
        vector = start(model).requires_grad_()
        optimiser = torch.optim.SGD([vector], **options)  # type: ignore[arg-type]
        used = 0
        for size in batches.sizes[:, 0].tolist():
            batch = batches.records[used : used + size]
            used += size
            total = torch.zeros(model.size)
            for row in batch:
                total += example_gradient(model, vector.detach(), mine.features[row], mine.labels[row])
            expected = RATE[i] * COUNTS[i] if divisor == "expected" else max(size, 1)
            vector.grad = total / expected + penalty * (vector.detach() - start(model) - 0.1)
            optimiser.step()
        updates.append(vector.detach() - start(model))
    return torch.stack(updates)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_sgd_is_torchs(momentum: float, decay: float) -> None:
    records = cohort()
    way = of_each(sgd, SMALL, rate=RATE, steps=STEPS, learning_rate=0.2, momentum=momentum, decay=decay)
    theirs = torch_sgd(SMALL, records, list(range(CLIENTS)), None, 0.0, lr=0.2, momentum=momentum, weight_decay=decay)
    torch.testing.assert_close(way.run(start(), records, streams()), theirs, rtol=1e-5, atol=1e-6)
    assert way.price is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_in_which_nobody_has_a_record_only_move_on(momentum: float) -> None:
    """With the rate of the last client most batches are empty, and alone it is in no order but its own."""
    records = cohort()
    alone = rows_of(records, [4])
    sizes = poisson_batches(streams([4]), alone.spans.numpy(), np.array([RATE[4]]), np.array([STEPS[4]])).sizes
    assert (sizes == 0).any()
    way = sgd(SMALL, rate=RATE[4], steps=STEPS[4], learning_rate=0.2, momentum=momentum)
    theirs = torch_sgd(SMALL, records, [4], None, 0.0, lr=0.2, momentum=momentum)
    torch.testing.assert_close(way.run(start(), alone, streams([4])), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.5, 0.01)])
def test_dp_sgd_without_noise_and_clip_is_torchs_sgd(momentum: float, decay: float) -> None:
    records = cohort()
    way = of_each(
        dp_sgd, SMALL, rate=RATE, steps=STEPS, clip=math.inf, learning_rate=0.2, momentum=momentum, decay=decay
    )
    theirs = torch_sgd(
        SMALL, records, list(range(CLIENTS)), "expected", 0.0, lr=0.2, momentum=momentum, weight_decay=decay
    )
    torch.testing.assert_close(way.run(start(), records, streams(), 0.0), theirs, rtol=1e-5, atol=1e-6)


def test_the_proximal_step_pulls_to_the_anchor() -> None:
    records = cohort()
    way = of_each(sgd, SMALL, rate=RATE, steps=STEPS, learning_rate=0.2, pull=0.3)
    ours = way.run(start(), records, streams(), anchor=start() + 0.1)
    theirs = torch_sgd(SMALL, records, list(range(CLIENTS)), None, 0.3, lr=0.2)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    per_client = of_each(sgd, SMALL, rate=RATE, steps=STEPS, learning_rate=0.2, pull=[0.3, 0, 0, 0, 0])
    mixed = per_client.run(start(), records, streams(), anchor=start() + 0.1)
    plain = of_each(sgd, SMALL, rate=RATE, steps=STEPS, learning_rate=0.2).run(start(), records, streams())
    torch.testing.assert_close(mixed, torch.cat([ours[:1], plain[1:]]), rtol=1e-5, atol=1e-6)


class HalfSquares:
    """A loss whose gradient by the outputs are the outputs, of whatever shape."""

    def __call__(self, outputs: Tensor, _labels: Tensor) -> Tensor:
        return outputs.flatten(1).square().sum(1) / 2

    def gradients(self, outputs: Tensor, _labels: Tensor) -> Tensor:
        return outputs


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)], ids=str)
def test_a_users_loss_may_hand_the_outputs_back(shape: tuple[int, ...]) -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.Unflatten(1, shape), nn.Tanh())  # whose outputs its gradient needs
    records = cohort()
    given, derived = HalfSquares(), HalfSquares().__call__
    updates = [
        of_each(sgd, Model(module, loss, (6,)), rate=RATE, steps=STEPS, learning_rate=0.2).run(
            torch.linspace(-1, 1, 21), records, streams()
        )
        for loss in (given, derived)
    ]
    torch.testing.assert_close(updates[0], updates[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True], ids=["ordered", "padded"])
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_no_number_stays_with_its_client(
    broken: float, device: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even padding takes it elsewhere."""
    records = cohort()
    records.features[: COUNTS[0]] = broken
    for module in (loop, device_batches):
        monkeypatch.setattr(module, "padding_is_cheaper", lambda *_: padded)
    if device:
        monkeypatch.setattr(training, "train_on_cpu", partial(train_on_device, graphs=CudaGraphs()))
    updates = of_each(sgd, SMALL, rate=RATE, steps=STEPS, learning_rate=0.2).run(start(), records, streams())
    assert updates.isfinite().all(1).tolist() == [False, True, True, True, True]


def test_starts_may_differ_by_client() -> None:
    records = cohort()
    starts = start() + torch.arange(CLIENTS)[:, None] * 0.01
    together = varied().run(starts, records, streams(), SCALE)
    alone = one_of(3).run(starts[3], rows_of(records, [3]), streams([3]), SCALE[3])
    torch.testing.assert_close(together[3:4], alone, rtol=1e-5, atol=1e-6)


def test_the_noise_has_the_variance_that_is_paid_for() -> None:
    model = logistic(784, 10)
    records = cohort(model, [20] * 4, classes=10)
    scales, clips, rates = np.array([0.5, 1.0, 2.0, 4.0]), np.array([1.0, 0.5, 2.0, 1.0]), np.full(4, 0.25)
    way = of_each(dp_sgd, model, rate=rates, steps=1, clip=clips, learning_rate=1.0)
    ids = [0, 1, 2, 3]
    silent = way.run(start(model), records, streams(ids), 0.0)
    difference = way.run(start(model), records, streams(ids), scales) - silent
    for i in range(4):
        deviation = scales[i] * clips[i] / (0.25 * 20)
        sample = (difference[i] / deviation).double().numpy()
        # 5.6 standard deviations either way: 9 % of the variance for so many coordinates
        assert 1e-8 < stats.chi2(len(sample)).cdf(np.sum(sample**2)) < 1 - 1e-8
        assert stats.kstest(sample, "norm").pvalue > 1e-6
    price = way.price
    assert price is not None
    dp_accounting = pytest.importorskip("dp_accounting")
    assert price(2.0, 0) == dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(2.0)), 1
    )


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_noise_of_clients_that_take_more_steps_does_not_reach_those_that_have_finished(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left in the buffer of a client that had finished grew with every later step, until it was infinite."""
    monkeypatch.setattr(loop, "NOISE_BLOCK", 1)
    records = cohort(counts=[12, 12])
    way = of_each(dp_sgd, SMALL, rate=[rate, rate], steps=[1, 60], clip=[1.0, 1.0], learning_rate=[0.1, 0.1])
    found = way.run(start(), records, streams([0, 1]), [20.0, 1.0])
    alone = dp_sgd(SMALL, rate=rate, steps=1, clip=1.0, learning_rate=0.1)
    torch.testing.assert_close(found[:1], alone.run(start(), rows_of(records, [0]), streams([0]), 20.0))


def test_price_is_per_client_where_clients_differ() -> None:
    price = varied().price
    assert price is not None
    dp_accounting = pytest.importorskip("dp_accounting")
    event = price(1.5, 1)
    assert event == dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.9, dp_accounting.GaussianDpEvent(1.5)), 4
    )
    assert price(1.5, 0) != event


def test_same_seed_same_run_other_seed_other_run() -> None:
    records = cohort()
    one = varied().run(start(), records, SeededStreams(1, range(CLIENTS), 0), SCALE)
    assert torch.equal(one, varied().run(start(), records, SeededStreams(1, range(CLIENTS), 0), SCALE))
    assert not torch.equal(one, varied().run(start(), records, SeededStreams(1, range(CLIENTS), 1), SCALE))
    assert not torch.equal(one, varied().run(start(), records, SeededStreams(2, range(CLIENTS), 0), SCALE))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains(name: str) -> None:
    model = MODELS[name](length=5) if name == "lstm" else MODELS[name]()
    records = cohort(model, [6, 4], classes=2)
    way = sgd(model, rate=1.0, steps=3, learning_rate=0.02)
    updates = way.run(start(model), records, streams([0, 1]))
    for i in range(2):
        rows = slice(int(records.offsets[i]), int(records.offsets[i + 1]))
        losses = [
            float(model.loss(model.outputs(vector, records.features[rows]), records.labels[rows]).mean())
            for vector in (start(model), start(model) + updates[i])
        ]
        assert losses[1] < losses[0]


def settings(steps: list[int], noisy: bool) -> Settings:
    return Settings(
        rate=np.array(RATE),
        steps=np.array(steps),
        learning_rate=np.array(LEARNING_RATE),
        divisor=np.array(RATE) * np.array(COUNTS),
        clip=np.array(CLIP),
        deviation=np.array(SCALE) * np.array(CLIP) if noisy else None,
        momentum=np.full(CLIENTS, 0.5),
        decay=np.full(CLIENTS, 0.01),
        pull=np.full(CLIENTS, 0.1),
    )


def test_the_captured_step_run_eagerly_is_the_cpu_path() -> None:
    records, starts = cohort(), start().expand(CLIENTS, -1).contiguous()
    anchor = starts + 0.1
    with torch.no_grad():
        device = train_on_device(SMALL, starts, anchor, records, streams(), settings(STEPS, False), CudaGraphs())
        host = train_on_cpu(SMALL, starts, anchor, records, streams(), settings(STEPS, False))
    torch.testing.assert_close(device, host, rtol=1e-5, atol=1e-6)


def test_the_captured_step_adds_each_clients_own_noise() -> None:
    records, starts = cohort(), start().expand(CLIENTS, -1).contiguous()
    keys = torch.tensor([key & (2**63 - 1) for key in streams().keys])
    quick = settings([1] * CLIENTS, True)
    with torch.no_grad():
        noisy = train_on_device(SMALL, starts, starts, records, streams(), quick, CudaGraphs())
        plain = train_on_device(SMALL, starts, starts, records, streams(), settings([1] * CLIENTS, False), CudaGraphs())
    column = (np.array(SCALE) * CLIP * LEARNING_RATE / (np.array(RATE) * COUNTS))[:, None]
    wanted = torch.from_numpy(column).float() * normals(keys, torch.tensor([0]), SMALL.size)
    torch.testing.assert_close(plain - noisy, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["logistic", "cnn", "lstm"])
def test_on_a_device_as_on_the_cpu(name: str) -> None:
    model = MODELS[name](length=5) if name == "lstm" else MODELS[name]()
    records = cohort(model, classes=2)
    there = Records(records.features.cuda(), records.labels.cuda(), records.offsets.cuda())
    way = varied(model)
    for _ in range(3):  # the first run captures, later ones replay
        device = way.run(start(model), there, streams(), 0.0).cpu()
        host = way.run(start(model), records, streams(), 0.0)
        torch.testing.assert_close(device, host, rtol=1e-3, atol=1e-4)
    noise = way.run(start(model), there, streams(), SCALE).cpu() - device
    alone = varied(model, memory=1).run(start(model), there, streams(), SCALE).cpu() - device
    torch.testing.assert_close(noise, alone, rtol=1e-3, atol=1e-3)
    assert noise[0].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["logistic", "cnn", "mcmahan_cnn"])
@pytest.mark.parametrize("rate", [0.4, 1 / 60])
def test_kernels_on_a_device_agree_with_other_ways_and_drop_what_is_no_number(
    name: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of a handful and of more than 32 records, of which some are infinite or huge; with and without noise."""
    model = MODELS[name]()
    records = cohort(model, counts=[120, 1, 90, 7, 60])
    for row, bad in ((3, math.nan), (40, 1e30), (125, math.inf), (250, 1e-30)):
        records.features[row] = bad
    there = Records(records.features.cuda(), records.labels.cuda(), records.offsets.cuda())
    way = of_each(
        dp_sgd, model, rate=rate, steps=[5, 4, 2, 0, 3], clip=[0.5, 1.0, 0.7, 2.0, 0.1],
        learning_rate=[0.3, 0.1, 0.2, 0.25, 0.4], batch=[60.0, 1.0, 40.0, 3.0, 30.0],
    )  # fmt: skip
    for noise in (0.0, [0.5, 1.0, 2.0, 0.1, 3.0]):
        fast = [way.run(start(model), there, streams(), noise) for _ in range(2)]
        assert torch.equal(*fast)
        assert torch.isfinite(fast[0]).all()
        with monkeypatch.context() as patch:
            patch.setattr(cuda_graphs, "has_kernel", lambda _: False)
            patch.setattr(linear_kernel, "has_kernel", lambda _: False)
            copied = Records(there.features.clone(), there.labels, there.offsets)  # for which no graph is held
            other = way.run(start(model), copied, streams(), noise)
        torch.testing.assert_close(fast[0], other, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("name", ["logistic", "cnn"])
def test_plain_steps_on_a_device_as_on_the_cpu_but_for_coarse_products(name: str, momentum: float) -> None:
    model = MODELS[name]()
    records = cohort(model, classes=2)
    there = Records(records.features.cuda(), records.labels.cuda(), records.offsets.cuda())
    way = of_each(sgd, model, rate=RATE, steps=[5, 4, 2, 5, 3], learning_rate=LEARNING_RATE, momentum=momentum)
    for _ in range(2):
        device = way.run(start(model), there, streams()).cpu()
        host = way.run(start(model), records, streams())
        assert float((device - host).norm() / host.norm()) < 0.01
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_other_rows_may_replay_the_same_graph() -> None:
    records = cohort(counts=[12, 9, 30, 7, 12, 9, 30, 7])
    there = Records(records.features.cuda(), records.labels.cuda(), records.offsets.cuda())
    way = of_each(
        dp_sgd,
        SMALL,
        rate=[0.5, 0.9, 0.3, 1.0, 0.4, 0.8, 0.2, 0.7],
        steps=[5, 4, 2, 5, 3, 5, 5, 1],
        clip=[0.5, 1.0, 0.7, 2.0, 0.1, 0.2, 0.3, 0.4],
        learning_rate=[0.3, 0.1, 0.2, 0.25, 0.4, 0.05, 0.5, 0.6],
        batch=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    )
    for first in (0, 4, 0, 4):  # the same block of records, so that the graph is the same
        rows, edges = list(range(first, first + 4)), slice(first, first + 5)
        host = way.run(
            start(), Records(records.features, records.labels, records.offsets[edges]), streams(rows), 0.0, rows=rows
        )
        device = way.run(
            start(), Records(there.features, there.labels, there.offsets[edges]), streams(rows), 0.0, rows=rows
        )
        torch.testing.assert_close(device.cpu(), host, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_batches_are_drawn_once_however_long_they_are(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw that is thrown away because of what it holds would not be the sampling that is charged."""
    model, counts = logistic(6, 3), [130, 1, 90, 7, 60]  # 65 of 130 are more than the kernel is used for, 30 of 60 not
    records = cohort(model, counts=counts)
    draws: list[BatchShape | None] = []
    monkeypatch.setattr(linear_kernel, "has_kernel", lambda _: True)
    monkeypatch.setattr(cuda_graphs, "train_linear", lambda _model, starts, *_: starts.clone())
    placed = place_batches
    monkeypatch.setattr(cuda_graphs, "place_batches", lambda *some: (draws.append(some[5]), placed(*some))[1])  # type: ignore[func-returns-value]
    none = dict.fromkeys(("divisor", "clip", "deviation", "momentum", "decay", "pull"))
    for few in (False, True):
        some = settings(STEPS, False).select(slice(None))
        some = Settings(
            rate=np.full(CLIENTS, 0.49 if few else rate), steps=some.steps, learning_rate=some.learning_rate, **none
        )
        starts = start(model).expand(CLIENTS, -1).contiguous()
        draws.clear()
        with torch.no_grad():
            train_on_device(model, starts, starts, records, streams(), some, CudaGraphs())
        assert len(draws) == 1
        assert (draws[0] is not None) == few  # the kernel's own shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_draws_what_the_torch_operations_draw() -> None:
    from polyeps.engine.philox import fill_normals

    keys = torch.tensor([1, 2**62 + 5, 77], device="cuda")
    for d in (1, 2, 3, 7850, 26_010):
        out = torch.empty(3, d, device="cuda")
        fill_normals(out, keys, torch.tensor([41], device="cuda"))
        torch.testing.assert_close(out, normals(keys, torch.tensor([41], device="cuda"), d), rtol=1e-3, atol=1e-4)


def test_a_deployed_client_is_a_cohort_of_one() -> None:
    pytest.importorskip("cryptography")
    records = rows_of(cohort(), [0])
    way = dp_sgd(SMALL, rate=1.0, steps=2, clip=1.0, learning_rate=0.1)
    noisy = [way.run(start(), records, SystemStreams(1), 1.0) for _ in range(2)]
    assert not torch.equal(noisy[0], noisy[1])
    silent = way.run(start(), records, SystemStreams(1), 0.0)  # rate 1: the batches are everything, always
    torch.testing.assert_close(silent, way.run(start(), records, streams([0]), 0.0))


def test_freed_memory_is_kept_where_the_library_can() -> None:
    assert keep_freed_memory() is keep_freed_memory()
    if platform.libc_ver()[0] == "glibc":
        assert keep_freed_memory()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux with huge pages only")
def test_kept_memory_lies_in_huge_pages() -> None:
    code = (
        "from pathlib import Path; from polyeps.engine.kept_memory import keep_freed_memory;"
        "kept = keep_freed_memory();"
        "areas = Path('/proc/self/smaps').read_text().split('VmFlags:');"  # an area's flags follow its name
        "asked = any('[heap]' in area and ' hg' in flags.splitlines()[0] for area, flags in zip(areas, areas[1:]));"
        "print(asked or not kept)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout == "True\n"


def test_linear_svm_moves_only_on_violated_margins() -> None:
    model = linear_svm(2, 2)
    records = Records(torch.tensor([[10.0, 0.0]]), torch.tensor([0]), torch.tensor([0, 1]))
    right = torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0, 0.0])
    way = sgd(model, rate=1.0, steps=1, learning_rate=1.0)
    assert not way.run(right, records, streams([0])).any()
    assert way.run(-right, records, streams([0])).any()


BAD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "starts": (lambda: varied().run(torch.zeros(3), cohort(), streams(), SCALE), "starts must be"),
    "streams": (lambda: varied().run(start(), cohort(), streams([1]), SCALE), "random stream"),
    "scale": (lambda: varied().run(start(), cohort(), streams()), "needs a noise multiplier"),
    "negative": (lambda: varied().run(start(), cohort(), streams(), -1.0), "noise_multiplier must be at least 0"),
    "length": (lambda: varied().run(start(), cohort(), streams(), [1.0, 2.0]), "5 of them"),
    "empty": (
        lambda: varied().run(start(), cohort(counts=[3, 0, 2, 1, 1]), streams(), SCALE),
        "client 1 of the cohort has no records",
    ),
    "steps": (
        lambda: sgd(SMALL, rate=1, steps=1.5, learning_rate=1).run(start(), cohort(), streams()),
        "whole numbers",
    ),
    "no clip": (
        lambda: dp_sgd(SMALL, rate=1, steps=1, clip=math.inf, learning_rate=1).run(start(), cohort(), streams(), 1.0),
        "finite clip",
    ),
    "empty among some": (
        lambda: varied().run(start(), cohort(counts=[3, 0]), streams([0, 4]), 1.0, rows=[0, 4]),
        "client 1 of the cohort has no records",
    ),
    "noise of others": (
        lambda: varied().run(start(), cohort(counts=[3, 2]), streams([0, 4]), SCALE, rows=[0, 4]),
        "noise_multiplier must be one number or 2",
    ),
    "settings of others": (
        lambda: varied().run(start(), cohort(), streams(), SCALE, rows=[0, 1]),
        "clip must be one number or 5",
    ),
    "settings too short": (
        lambda: of_each(sgd, SMALL, rate=0.5, steps=[1, 2, 3], learning_rate=1).run(start(), cohort(), streams()),
        "steps must be one number or 5",
    ),
    "other records": (
        lambda: of_each(sgd, SMALL, rate=0.5, steps=1, learning_rate=1, records=[12, 1, 30, 8, 19]).run(
            start(), cohort(), streams()
        ),
        "records is 8 in the settings of client 3, which has 7",
    ),
    "own clip": (
        lambda: of_each(dp_sgd, SMALL, rate=1.0, steps=1, learning_rate=1, clip=[1e-31] * 5).run(
            start(), cohort(), streams(), 1.0
        ),
        "clip must",
    ),
    "endless": (
        lambda: sgd(SMALL, rate=1, steps=math.inf, learning_rate=1).run(start(), cohort(), streams()),
        "whole numbers",
    ),
    "no noise": (
        lambda: sgd(SMALL, rate=1, steps=1, learning_rate=1).run(start(), cohort(), streams(), 1.0),
        "adds no noise",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused_in_a_sentence(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(InputError, match=message):
        call()


def test_images_are_flattened_for_linear_models_and_other_shapes_refused() -> None:
    flat = cohort()
    images = Records(flat.features.reshape(len(flat.features), 1, -1, 1), flat.labels, flat.offsets)
    one, other = (varied().run(start(), records, streams(), SCALE) for records in (flat, images))
    assert torch.equal(one, other)
    wrong = Records(flat.features[:, 1:], flat.labels, flat.offsets)
    with pytest.raises(InputError, match="takes records of shape"):
        varied().run(start(), wrong, streams(), SCALE)


def test_a_public_batch_size_replaces_the_number_of_records() -> None:
    records = cohort()
    sizes = np.diff(records.offsets.numpy()) * 0.25

    def run(steps: int, batch: float | np.ndarray[tuple[int], np.dtype[np.float64]] | None) -> Tensor:
        way = of_each(dp_sgd, SMALL, rate=0.25, steps=steps, clip=1.0, learning_rate=0.1, batch=batch)
        return way.run(start(), records, streams(), SCALE)

    assert torch.equal(run(3, None), run(3, sizes))
    torch.testing.assert_close(2 * run(1, 2 * sizes), run(1, None))
    with pytest.raises(InputError, match="batch must be above 0"):
        run(1, 0.0)


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_one_record_never_decides_more_than_its_clip(name: str, bad: float) -> None:
    """A record that overflows, by its own values or by the weights a server sent, counts as zero, not as a signal."""
    model = MODELS[name]()
    records = cohort(model)
    way = dp_sgd(model, rate=1.0, steps=1, clip=0.5, learning_rate=1.0, batch=1.0)
    features = records.features.clone()
    features[int(records.offsets[1])] = bad  # client 1's first record
    clean = way.run(start(model), records, streams(), 0.0)
    poisoned = way.run(start(model), Records(features, records.labels, records.offsets), streams(), 0.0)
    assert torch.isfinite(poisoned).all()
    assert 0 < float((clean - poisoned)[1].norm()) <= 2 * 0.5 + 1e-4
    others = torch.arange(CLIENTS) != 1
    assert torch.equal(clean[others], poisoned[others])


@pytest.mark.parametrize(
    ("name", "shape", "clip"),
    [*(("logistic", (64,), clip) for clip in (1.0, math.inf)), ("mlp", (64,), 1.0), ("cnn", (1, 28, 28), 1.0)],
)
def test_a_client_learns_the_same_to_the_last_bit_in_any_company(
    name: str, shape: tuple[int, ...], clip: float
) -> None:
    """How wide a step is follows from the others' batches; that only adds zeros to sums."""
    model, clients, held = MODELS[name](*shape[:1] if len(shape) == 1 else ()), 12, 40
    source = torch.Generator().manual_seed(1)
    features = torch.rand(clients * held, *shape, generator=source)
    labels = torch.randint(0, 10, (clients * held,), generator=source)
    start = 0.05 * torch.randn(model.size, generator=source)
    train = dp_sgd(model, batch=12, steps=4, clip=clip, learning_rate=0.1).run

    def updates(first: int, last: int) -> Tensor:
        rows = slice(first * held, last * held)
        records = Records(features[rows].clone(), labels[rows].clone(), torch.arange(last - first + 1) * held)
        streams = SeededStreams(7, [f"client-{place}" for place in range(first, last)], 0)
        return train(start, records, streams, 0.0 if math.isinf(clip) else 1.0)

    whole = updates(0, clients)
    for size in (1, 3, 6):
        parts = [updates(first, first + size) for first in range(0, clients, size)]
        assert torch.equal(torch.cat(parts), whole)
