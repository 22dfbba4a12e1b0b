"""Layers that steps do not write learn what layers that they do write learn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polyeps.core import Records
from polyeps.engine import loop
from polyeps.engine.cuda_graphs import CudaGraphs, train_on_device
from polyeps.engine.deferred import Deferral, worths_of
from polyeps.engine.loop import Settings, train_on_cpu
from polyeps.engine.noise import SeededStreams
from polyeps.models import Model, cross_entropy, mcmahan_cnn, mlp
from polyeps.training import sgd

Train = Callable[[Model, Tensor, Records, SeededStreams, Settings], Tensor]
WIDE = mlp(60, (50, 40), 3)
COUNTS = [5, 1, 7, 3, 6]
CLIENTS = len(COUNTS)


def two_positions() -> Model:
    """A linear map of each half of a row, then one of both together."""
    layers = [nn.Unflatten(1, (2, 30)), nn.Linear(30, 30), nn.Tanh(), nn.Flatten(), nn.Linear(60, 60), nn.Linear(60, 3)]
    return Model(nn.Sequential(*layers).to("meta"), cross_entropy, (60,))


def cohort(model: Model, counts: list[int] = COUNTS) -> Records:
    generator = torch.Generator().manual_seed(9)
    features = torch.randn(sum(counts), *model.input_shape, generator=generator)
    labels = torch.randint(0, 3, (sum(counts),), generator=generator)
    return Records(features, labels, torch.tensor([0, *np.cumsum(counts)]))


def starts_of(model: Model, clients: int, alike: bool) -> Tensor:
    start = model.start(torch.Generator().manual_seed(4)).expand(clients, -1)
    if alike:
        return start
    return start + 0.01 * torch.randn(start.shape, generator=torch.Generator().manual_seed(5))


def way(momentum: float | None, rate: float = 0.7, steps: int = 3, counts: list[int] = COUNTS) -> Settings:
    clients = len(counts)
    fewer = np.array([steps, 0, steps, 1, max(steps - 1, 0)] * clients)[:clients]
    return Settings(
        rate=np.full(clients, rate),
        steps=fewer,
        learning_rate=np.linspace(0.1, 0.5, clients),
        divisor=None,
        clip=None,
        deviation=None,
        momentum=None if momentum is None else np.linspace(momentum, 0.9, clients),
        decay=None,
        pull=None,
    )


def on_host(model: Model, starts: Tensor, records: Records, streams: SeededStreams, settled: Settings) -> Tensor:
    return train_on_cpu(model, starts, starts, records, streams, settled)


def as_on_device(model: Model, starts: Tensor, records: Records, streams: SeededStreams, settled: Settings) -> Tensor:
    return train_on_device(model, starts, starts, records, streams, settled, CudaGraphs())


@pytest.fixture
def deferrals(monkeypatch: pytest.MonkeyPatch) -> list[Deferral]:
    """Every decision what to defer."""
    made: list[Deferral] = []
    decide = loop.deferral_of

    def noted(*arguments: object) -> Deferral:
        made.append(decide(*arguments))  # type: ignore[arg-type]
        return made[-1]

    for module in ("loop", "cuda_graphs"):
        monkeypatch.setattr(f"polyeps.engine.{module}.deferral_of", noted)
    monkeypatch.setattr("polyeps.engine.deferred.FEWEST", 0)
    # plans without padding keep the clients' own order
    monkeypatch.setattr("polyeps.engine.loop.LARGE", 0)
    monkeypatch.setattr("polyeps.engine.device_batches.padding_is_cheaper", lambda *_: True)
    return made


def never(model: Model, *_: object) -> Deferral:
    return Deferral(model.network)


@pytest.mark.parametrize("train", [on_host, as_on_device])
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "apart"])
@pytest.mark.parametrize("momentum", [None, 0.0, 0.5])
@pytest.mark.parametrize("model", [WIDE, two_positions()], ids=["mlp", "positions"])
def test_deferred_layers_learn_the_same(
    deferrals: list[Deferral],
    monkeypatch: pytest.MonkeyPatch,
    model: Model,
    momentum: float | None,
    alike: bool,
    train: Train,
) -> None:
    records, starts = cohort(model), starts_of(model, CLIENTS, alike)
    with torch.no_grad():
        found = train(model, starts, records, SeededStreams(21, range(CLIENTS), 2), way(momentum))
        assert deferrals[0].layers
        for module in ("loop", "cuda_graphs"):
            monkeypatch.setattr(f"polyeps.engine.{module}.deferral_of", never)
        wanted = train(model, starts, records, SeededStreams(21, range(CLIENTS), 2), way(momentum))
    assert (wanted - starts)[[0, 2, 3, 4]].any(1).all()
    assert torch.equal(found[1], starts[1])  # it takes no steps
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_which_layers_are_deferred(deferrals: list[Deferral]) -> None:
    model = two_positions()
    records, starts = cohort(model), starts_of(model, CLIENTS, True)
    with torch.no_grad():
        on_host(model, starts, records, SeededStreams(21, range(CLIENTS), 2), way(0.5))
        pulled = way(None)
        pulled = Settings(**{**pulled.__dict__, "pull": np.full(CLIENTS, 0.1)})
        on_host(model, starts, records, SeededStreams(21, range(CLIENTS), 2), pulled)
        on_host(model, starts, records, SeededStreams(21, range(CLIENTS), 2), way(0.5, steps=40))
    # not the map of two halves, nor the small one; none with a pull, none of long runs
    assert [list(made.layers) for made in deferrals] == [[4], [], []]
    ours = mcmahan_cnn()
    linear = {type(ours.network.layers[i]).__name__ for i in ours.one_vector_a_row}
    assert linear == {"Linear"}
    assert len(ours.one_vector_a_row) == 2


def test_few_weights_are_written(deferrals: list[Deferral], monkeypatch: pytest.MonkeyPatch) -> None:
    records, starts = cohort(WIDE), starts_of(WIDE, CLIENTS, True)
    for fewest in (CLIENTS * 61 * 50, CLIENTS * 61 * 50 + 1):
        monkeypatch.setattr("polyeps.engine.deferred.FEWEST", fewest)
        with torch.no_grad():
            on_host(WIDE, starts, records, SeededStreams(21, range(CLIENTS), 2), way(0.5))
    assert [list(made.layers) for made in deferrals] == [[0], []]


def test_a_run_begun_again_forgets_the_last_one(deferrals: list[Deferral]) -> None:
    records, starts = cohort(WIDE), starts_of(WIDE, CLIENTS, True)
    settled = way(0.5)
    with torch.no_grad():
        as_on_device(WIDE, starts + 0.1, records, SeededStreams(21, range(CLIENTS), 2), settled)
        (held,) = deferrals
        fixed = loop.pace(settled, np.ones((3, CLIENTS), np.int64), starts.device)
        held.begin(starts, fixed.rate, fixed.momentum)
    assert all(not layer.inputs.any() for layer in held.layers.values())
    assert torch.equal(held.joined(held.kept(starts)), starts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_device_replays_deferred_steps(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyeps.engine.cuda_graphs._coarse_products", nullcontext)  # else only two digits agree
    monkeypatch.setattr("polyeps.engine.deferred.FEWEST", 0)
    model = mlp(300, (200,), 3)
    records = cohort(model)
    there = Records(records.features.cuda(), records.labels.cuda(), records.offsets)
    way_there, way_here = (sgd(model, rate=0.7, steps=3, learning_rate=0.1, momentum=momentum) for _ in range(2))
    for seed in range(3):  # a graph is captured, then replayed
        start = model.start(torch.Generator().manual_seed(seed))
        device = way_there.run(start, there, SeededStreams(seed, range(CLIENTS), 2)).cpu()
        host = way_here.run(start, records, SeededStreams(seed, range(CLIENTS), 2))
        torch.testing.assert_close(device, host, rtol=1e-3, atol=1e-4)


@given(
    steps=st.integers(1, 5),
    momentum=st.floats(0, 0.99),
    rates=st.lists(st.floats(0, 2), min_size=5, max_size=5),
    moving=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_what_a_row_is_worth_is_what_steps_make_of_it(
    steps: int, momentum: float, rates: list[float], moving: bool
) -> None:
    """Against taking the steps, one number at a time."""
    rate = torch.tensor(rates[:steps], dtype=torch.float64)[:, None, None]
    worth = worths_of(rate, torch.tensor([[momentum]], dtype=torch.float64) if moving else None)
    assert worth.shape == (steps + 1, 1, steps)
    for s in range(steps):
        weight = velocity = 0.0
        for t in range(steps):
            assert float(worth[t, 0, s]) == pytest.approx(weight, abs=1e-12)
            gradient = float(t == s)
            velocity = momentum * velocity + gradient
            weight = weight - rates[t] * velocity if moving else weight + gradient
        assert float(worth[steps, 0, s]) == pytest.approx(weight, abs=1e-12)
