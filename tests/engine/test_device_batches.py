"""Batches placed on the device: the same records as the host draws, each in a row of its owner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from polyeps.engine.device_batches import BatchShape, PlacedBatches, place_batches
from polyeps.engine.loop import Settings, draw_batches
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError

COUNTS = [50, 7, 200, 90, 1]
SPANS = torch.tensor([0, *np.cumsum(COUNTS)]).unfold(0, 2, 1)
CPU = torch.device("cpu")
SETTINGS = Settings(
    rate=np.array([0.1, 0.9, 0.04, 0.2, 0.5]),
    steps=np.array([12, 3, 12, 12, 0]),
    learning_rate=np.ones(5),
    divisor=None,
    clip=None,
    deviation=None,
    momentum=None,
    decay=None,
    pull=None,
)


def placed(size: int, last: BatchShape | None = None, settings: Settings = SETTINGS) -> PlacedBatches:
    return place_batches(SeededStreams(5, range(5), 0), SPANS, settings, size, 100, last, CPU)


FIXED = replace(SETTINGS, batch=np.array([8, 7, 20, 3, 1]))


@pytest.mark.parametrize("settings", [SETTINGS, FIXED], ids=["poisson", "fixed"])
@pytest.mark.parametrize(("size", "ordered"), [(10, True), (10**6, False)])
def test_rows_hold_the_very_records_the_host_would_draw(size: int, ordered: bool, settings: Settings) -> None:
    found = placed(size, settings=settings)
    assert found.shape.ordered == ordered
    wanted = draw_batches(SeededStreams(5, range(5), 0), SPANS.numpy(), settings)
    assert np.array_equal(found.sizes.numpy(), wanted.sizes)
    owner = np.repeat(np.arange(5), np.repeat(found.shape.widths, np.diff(found.shape.cuts)))
    used = 0
    for step, sizes in enumerate(wanted.sizes):
        client = owner if found.order is None else found.order[step].numpy()[owner]
        valid = found.valid[step].numpy() > 0
        for number, size_of_batch in enumerate(sizes):
            mine = found.records[step].numpy()[valid & (client == number)]
            assert mine.tolist() == wanted.records[used : used + size_of_batch].tolist()
            padding = found.records[step].numpy()[~valid & (client == number)]
            assert (padding == int(SPANS[number, 0])).all()
            used += size_of_batch
    assert used == len(wanted.records) == int(found.valid.sum())


@pytest.mark.parametrize("size", [10, 10**6])
def test_a_later_run_keeps_the_shape_where_it_suffices(size: int) -> None:
    first = placed(size)
    rarer = replace(SETTINGS, rate=SETTINGS.rate / 2)
    assert placed(size, first.shape, rarer).shape == first.shape
    often = replace(SETTINGS, rate=np.minimum(SETTINGS.rate * 4, 1))
    wider = placed(size, first.shape, often).shape
    assert wider.cuts == first.shape.cuts
    assert all(a >= b for a, b in zip(wider.widths, first.shape.widths, strict=True))
    assert wider != first.shape


def test_rates_are_checked_here_too() -> None:
    with pytest.raises(InputError, match="sampling rate"):
        placed(10, settings=replace(SETTINGS, rate=np.zeros(5)))


def test_batches_of_one_fixed_size_are_never_padded_and_keep_their_shape() -> None:
    equal = replace(SETTINGS, steps=np.full(5, 12), batch=np.full(5, 1))
    first = placed(10, settings=equal)
    assert not first.shape.ordered
    assert bool((first.valid == 1).all())
    assert placed(10, first.shape, equal).shape == first.shape


@pytest.mark.parametrize("settings", [SETTINGS, FIXED], ids=["poisson", "fixed"])
def test_ragged_rows_are_the_same_records_without_padding_between_clients(settings: Settings) -> None:
    streams = SeededStreams(5, range(5), 0)
    found = place_batches(streams, SPANS, settings, 10, 100, None, CPU, ragged=True)
    wanted = draw_batches(SeededStreams(5, range(5), 0), SPANS.numpy(), settings)
    assert found.owner is not None
    assert found.spans is not None
    used = 0
    for step, sizes in enumerate(wanted.sizes):
        assert found.spans[step].diff().tolist() == sizes.tolist()
        total = int(sizes.sum())
        assert found.records[step, :total].tolist() == wanted.records[used : used + total].tolist()
        assert found.owner[step, :total].tolist() == np.repeat(np.arange(5), sizes).tolist()
        assert found.valid[step].tolist() == [1.0] * total + [0.0] * (found.valid.shape[1] - total)
        used += total
    # A later run that fits takes the same shape; one that does not gets room of its own.
    same = place_batches(SeededStreams(6, range(5), 0), SPANS, settings, 10, 100, found.shape, CPU, ragged=True)
    assert same.shape == found.shape or int(same.sizes.sum(1).max()) > found.shape.widths[0]
    narrow = place_batches(
        streams, SPANS, settings, 10, 100, BatchShape(False, (0, 5), (1,), ragged=True), CPU, ragged=True
    )
    assert narrow.shape.widths[0] >= int(narrow.sizes.sum(1).max())
