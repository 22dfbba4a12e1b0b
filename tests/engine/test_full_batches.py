"""Full batches: the same numbers as with drawn batches of rate 1, in pieces of any size, and clipped as strictly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polyeps import training
from polyeps.core import Records
from polyeps.engine import full_batches
from polyeps.engine.cuda_graphs import train_on_device
from polyeps.engine.full_batches import pieces, train_on_all
from polyeps.engine.loop import Learning, Settings, pace, train_on_cpu
from polyeps.engine.noise import SeededStreams
from polyeps.engine.row_norms import squared_row_norms
from polyeps.models import Model, cross_entropy, from_module, logistic, lstm, mlp, of_units
from polyeps.training import Training, dp_sgd, sgd, whole_gradient

COUNTS = [70, 1, 33, 33, 5, 128, 40]


def cohort(model: Model, counts: list[int] = COUNTS, classes: int = 4) -> Records:
    generator = torch.Generator().manual_seed(4)
    shape = (sum(counts), *model.input_shape)
    features = torch.randn(shape, generator=generator)
    if model.input_type == torch.int64:
        features = torch.randint(0, 50, shape, generator=generator)
    labels = torch.randint(0, classes, (sum(counts),), generator=generator)
    return Records(features, labels, torch.tensor([0, *np.cumsum(counts)]))


def dropping() -> Model:
    return from_module(
        nn.Sequential(nn.Linear(7, 6), nn.Dropout(0.4), nn.ReLU(), nn.Linear(6, 4)), cross_entropy, torch.rand(3, 7)
    )


def convolving() -> Model:
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    return from_module(nn.Sequential(*layers), cross_entropy, torch.rand(3, 1, 6, 6))


MODELS: dict[str, Model] = {
    "logistic": logistic(7, 4),
    "mlp": mlp(7, (5,), 4),
    "convolution": convolving(),
    "lstm": lstm(50, 3, 4, 6, 4),
    "dropout": dropping(),
}


def drawn(trainer: Training, *arguments: Any, monkeypatch: pytest.MonkeyPatch, **others: Any) -> Tensor:
    """The updates as computed for drawn batches."""
    with monkeypatch.context() as patch:
        patch.setattr(training, "train_on_all", lambda *given: train_on_cpu(*given[:-1]))
        return trainer.run(*arguments, **others)


@pytest.mark.parametrize("memory", [None, 40_000])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["gradient", "dp", "plain", "pulled"])
def test_updates_are_those_of_drawn_batches_of_rate_one(
    kind: str, name: str, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, clients = MODELS[name], len(COUNTS)
    records = cohort(model)
    step: dict[str, Any] = {"rate": 1.0, "learning_rate": 0.3, "memory": memory}
    trainer = {
        "gradient": whole_gradient(model, clip=0.5, decay=0.01, memory=memory),
        "dp": dp_sgd(model, steps=2, clip=0.5, momentum=0.5, decay=0.01, **step),
        "plain": sgd(model, steps=2, momentum=0.5, **step),
        "pulled": sgd(model, steps=2, pull=0.1, **step),
    }[kind]
    noise = np.linspace(0.0, 2.0, clients) if kind in ("gradient", "dp") else None
    starts = torch.randn(clients, model.size, generator=torch.Generator().manual_seed(5)) / 4
    if kind == "gradient":
        starts = starts[0]
    own = {"steps": np.array([2, 1, 2, 1, 1, 2, 2])} if kind in ("dp", "plain") else {}
    given: Any = (starts, records, SeededStreams(3, range(clients), 0), noise)
    expected = drawn(trainer, *given, settings=own, monkeypatch=monkeypatch)
    found = trainer.run(*given, settings=own)
    assert float(found.abs().max()) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_it_is_what_trains_full_batches_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["logistic"]
    called: list[int] = []

    def counted(*given: Any) -> Tensor:
        called.append(1)
        return train_on_all(*given)

    monkeypatch.setattr(training, "train_on_all", counted)
    records, streams = cohort(model), SeededStreams(3, range(len(COUNTS)), 0)
    step: dict[str, Any] = {"steps": 1, "clip": 1.0, "learning_rate": 1.0}
    for trainer, expected in (
        (whole_gradient(model, clip=1.0), 1),
        (dp_sgd(model, rate=0.999, **step), 0),
        # The number of records is hidden here, and the shapes of pieces would depend on it.
        (dp_sgd(model, rate=1.0, batch=10, hide_records=True, **step), 0),
    ):
        called.clear()
        trainer.run(torch.zeros(model.size), records, streams, 1.0)
        assert len(called) == expected
    persons = replace(records, units=torch.stack([torch.arange(310), torch.arange(1, 311)], 1))
    whole_gradient(of_units(model, "patient"), clip=1.0).run(torch.zeros(model.size), persons, streams, 1.0)
    assert not called


@pytest.mark.parametrize("alike", [True, False])
def test_full_and_drawn_batches_in_one_cohort(alike: bool) -> None:
    """Each client's update is the one that it has by itself."""
    model, clients = MODELS["mlp"], len(COUNTS)
    records, trainer = cohort(model), dp_sgd(model, steps=2, clip=0.5, learning_rate=0.3)
    starts = torch.randn(clients, model.size, generator=torch.Generator().manual_seed(5)) / 4
    own = {"rate": np.array([1.0, 0.5, 1.0, 0.1, 0.9, 0.2, 1.0])}
    given = starts[0] if alike else starts
    found = trainer.run(given, records, SeededStreams(3, range(clients), 0), 0.3, settings=own)
    for client in range(clients):
        start = given if alike else given[client]
        mine = {"rate": own["rate"][[client]]}
        alone = trainer.run(start, records.select([client]), SeededStreams(3, [client], 0), 0.3, settings=mine)
        torch.testing.assert_close(found[client], alone[0], rtol=1e-5, atol=1e-5)


def test_padded_persons_of_a_device_are_rows_of_several_records(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_units(MODELS["logistic"], "patient")
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 4, (20, 3), generator=generator)
    labels[::2, 2] = -1
    records = Records(torch.randn(20, 3, 7, generator=generator), labels, torch.tensor([0, 12, 20]), padded=True)
    trainer = whole_gradient(model, clip=0.5, memory=2000)
    given: Any = (torch.randn(model.size, generator=generator), records, SeededStreams(3, range(2), 0), 0.5)
    torch.testing.assert_close(
        trainer.run(*given), drawn(trainer, *given, monkeypatch=monkeypatch), rtol=1e-5, atol=1e-5
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 25), st.data())
def test_pieces_hold_every_row_of_the_chosen_clients_once(counts: list[int], most: int, data: st.DataObject) -> None:
    ends = np.cumsum([0, *counts])
    order = data.draw(st.permutations(range(len(counts))))  # clients need not lie side by side
    spans = np.array([[ends[place], ends[place + 1]] for place in order])
    chosen = sorted(data.draw(st.sets(st.integers(0, len(counts) - 1))))
    seen = []
    for piece in pieces(spans, chosen, most):
        rows = piece.records
        numbers = list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()
        assert len(numbers) == sum(piece.counts) <= most or piece.last - piece.first == 1
        assert len(piece.counts) == piece.last - piece.first
        owners = np.repeat(np.arange(piece.first, piece.last), piece.counts).tolist()
        seen += list(zip(owners, numbers, strict=True))
    assert seen == [(client, row) for client in chosen for row in range(*spans[client])]


def test_a_client_larger_than_memory_is_split() -> None:
    model = logistic(1000, 3)
    records = cohort(model, [900, 3], 3)
    given: Any = (torch.zeros(model.size), records, SeededStreams(3, range(2), 0), 0.0)
    whole = whole_gradient(model, clip=0.5).run(*given)
    memory = 32 * 4 * 2400  # bytes of 32 rows
    parts = list(pieces(records.spans.numpy(), [0, 1], full_batches._rows_of_a_piece(model, records, memory)))
    largest = [sum(piece.counts) for piece in parts]
    assert max(largest) == 32
    torch.testing.assert_close(whole_gradient(model, clip=0.5, memory=memory).run(*given), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_no_record_moves_a_sum_by_more_than_the_clip(seed: int) -> None:
    """A record without a finite gradient counts as empty, so that it can be compared with the record itself."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    model, rows, clip = logistic(37, 5), 300, 0.25
    features = torch.randn(rows, 37, generator=generator) * 10 ** rng.uniform(-3, 3)
    if seed % 2:
        features += 10 ** rng.uniform(0, 3)  # nearly alike: sums are as large as they can be
    labels = torch.randint(0, 5, (rows,), generator=generator)
    weights = torch.randn(model.size, generator=generator) * 10 ** rng.uniform(-3, 3)
    if seed % 3 == 0:  # outputs are what rounding leaves of large terms that cancel
        features[:, 1:36:2] = features[:, :36:2]
        matrix = weights[:185].view(5, 37)
        matrix[:, 1:36:2] = -matrix[:, :36:2]
    learning = Learning(model.network, model.loss, weights[None], None, weights[None])
    one = np.ones(1)
    fixed = pace(Settings(one, one.astype(int), one, one, one * clip, None, None, None, None), None, weights.device)
    place = int(rng.integers(rows))

    def total(block: Tensor) -> Tensor:
        summed = torch.zeros(1, model.size)
        records = Records(block, labels, torch.tensor([0, rows]))
        for piece in pieces(records.spans.numpy(), [0], 128):
            full_batches._add(learning, records, piece, fixed, 0, summed)
        return summed[0].double()

    empty = features.clone()
    empty[place] = torch.nan
    moved = float((total(features) - total(empty)).norm())
    assert moved <= clip * (1 + 1e-4) + 1e-5


def test_clients_that_do_not_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["mlp"]
    everybody = cohort(model)
    some = everybody.select([5, 0, 2])
    trainer = whole_gradient(model, clip=0.5)
    given: Any = (torch.ones(model.size) / 9, some, SeededStreams(3, [5, 0, 2], 0), 0.3)
    found = trainer.run(*given)
    torch.testing.assert_close(found, drawn(trainer, *given, monkeypatch=monkeypatch), rtol=1e-5, atol=1e-5)
    alone = trainer.run(given[0], everybody.select([2]), SeededStreams(3, [2], 0), 0.3)
    torch.testing.assert_close(found[2:], alone, rtol=1e-5, atol=1e-5)


def test_noise_on_a_device_is_that_of_drawn_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for devices, on the CPU: `train_on_device` runs there without a graph."""
    model = MODELS["logistic"]
    records, trainer = cohort(model), dp_sgd(model, rate=1.0, steps=2, clip=0.5, learning_rate=0.3)
    given: Any = (torch.zeros(model.size), records, SeededStreams(3, range(len(COUNTS)), 0), np.linspace(0, 2, 7))

    def by_device(*all_: Any) -> Tensor:
        model, starts, anchor, held, streams, numbers, _ = all_
        return train_on_device(model, starts, anchor, held, streams, numbers, {})

    with monkeypatch.context() as patch:
        patch.setattr(training, "train_on_all", by_device)
        expected = trainer.run(*given)
    monkeypatch.setattr(
        full_batches,
        "_noise",
        lambda streams, _, fixed, models: full_batches._noise_on_device(streams, fixed, models),
    )
    torch.testing.assert_close(trainer.run(*given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("memory", [None, 1_000_000])
@pytest.mark.parametrize("name", MODELS)
def test_a_device_computes_the_same(name: str, memory: int | None) -> None:
    model = MODELS[name]
    records, trainer = cohort(model), whole_gradient(model, clip=0.5, memory=memory)
    start = torch.randn(model.size, generator=torch.Generator().manual_seed(5)) / 4
    held = Records(records.features.cuda(), records.labels.cuda(), records.offsets.cuda())
    here, there = (
        trainer.run(start.to(one.features.device), one, SeededStreams(3, range(len(COUNTS)), 0), 0.0).cpu()
        for one in (records, held)
    )
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)


def test_squares_of_records_are_computed_once_and_anew_when_records_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = logistic(7, 4)
    counted: list[int] = []
    records = cohort(model)

    def counting(rows: Tensor) -> Tensor:
        counted.append(len(rows))
        return squared_row_norms(rows)

    monkeypatch.setattr(full_batches, "squared_row_norms", counting)
    trainer = whole_gradient(model, clip=0.5)
    start = torch.randn(model.size, generator=torch.Generator().manual_seed(1))

    def update() -> Tensor:
        return trainer.run(start, records, SeededStreams(3, range(len(COUNTS)), 0), 0.0)

    first = update()
    assert sum(counted) == sum(COUNTS)
    assert torch.equal(update(), first)
    assert sum(counted) == sum(COUNTS)
    records.features.mul_(1000.0)  # norms that were kept would let gradients be 1000 times the clip
    assert update().norm(dim=1).max() <= 0.5
    assert sum(counted) == 2 * sum(COUNTS)
