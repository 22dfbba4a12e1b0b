"""Training on batches of fixed size: against the plain loop, whoever is beside whom, on any device, and its price."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import dp_accounting
import numpy as np
import pytest
import torch
from reference.local_training import dp_sgd_on, sets_of
from support.differing import Differing, of_each
from torch import Tensor

from polyeps.accounting import epsilon
from polyeps.cli.quick import quick_dp_sgd
from polyeps.core import Records
from polyeps.engine.cuda_graphs import CudaGraphs, train_on_device
from polyeps.engine.loop import Settings, train_on_cpu
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.models import MODELS, Model, mlp
from polyeps.training import Training, dp_sgd, sgd

SMALL = mlp(6, (5,), 3)
# Everything differs between clients; the second takes all its records, the third no steps.
COUNTS = [12, 3, 30, 7, 19]
BATCH = [4, 3, 8, 1, 16]
STEPS = [6, 4, 0, 3, 6]
LEARNING_RATE = [0.3, 0.1, 0.2, 0.25, 0.4]
CLIP = [0.5, 1.0, 0.7, 2.0, 0.1]
SCALE = [1.0, 0.5, 2.0, 0.0, 3.0]
CLIENTS = len(COUNTS)


def cohort(model: Model = SMALL, clients: list[int] | None = None, classes: int = 3) -> Records:
    """The records of some clients (None: all), in one block."""
    generator = torch.Generator().manual_seed(9)
    features = torch.randn(sum(COUNTS), *model.input_shape, generator=generator)
    labels = torch.randint(0, classes, (sum(COUNTS),), generator=generator)
    chosen = range(CLIENTS) if clients is None else clients
    rows = [torch.arange(COUNTS[i]) + sum(COUNTS[:i]) for i in chosen]
    offsets = torch.tensor([0, *np.cumsum([COUNTS[i] for i in chosen])])
    return Records(features[torch.cat(rows)], labels[torch.cat(rows)], offsets)


def start(model: Model = SMALL) -> Tensor:
    return model.start(torch.Generator().manual_seed(4))


def streams(ids: list[int] | None = None) -> SeededStreams:
    return SeededStreams(21, list(range(CLIENTS)) if ids is None else ids, 2)


def varied(model: Model = SMALL, memory: int | None = None, held: list[int] | None = COUNTS) -> Differing:
    return of_each(
        dp_sgd,
        model,
        sampler="fixed",
        batch=BATCH,
        steps=STEPS,
        clip=CLIP,
        learning_rate=LEARNING_RATE,
        memory=memory,
        **({} if held is None else {"records": held}),
    )


def test_dp_sgd_equals_the_plain_loop_client_by_client() -> None:
    updates = varied().run(start(), cohort(), streams(), SCALE)
    for i in range(CLIENTS):
        own = streams([i])
        batches = sets_of(own, COUNTS[i], BATCH[i], STEPS[i])
        assert all(len(set(batch)) == BATCH[i] for batch in batches)
        plain = dp_sgd_on(
            SMALL, start(), cohort(clients=[i]), own, batches, BATCH[i], CLIP[i], SCALE[i], LEARNING_RATE[i]
        )
        torch.testing.assert_close(updates[i], plain, rtol=1e-5, atol=1e-5)
    assert updates[[0, 1, 3, 4]].any(dim=1).all()


def test_sgd_and_the_proximal_step_take_the_mean_of_the_batch() -> None:
    silent = of_each(dp_sgd, SMALL, sampler="fixed", batch=BATCH, steps=STEPS, clip=np.inf, learning_rate=0.2)
    plain = of_each(sgd, SMALL, sampler="fixed", batch=BATCH, steps=STEPS, learning_rate=0.2)
    pulled = of_each(sgd, SMALL, sampler="fixed", batch=BATCH, steps=STEPS, learning_rate=0.2, pull=0.3)
    wanted = silent.run(start(), cohort(), streams(), 0.0)
    torch.testing.assert_close(plain.run(start(), cohort(), streams()), wanted)
    assert not torch.equal(pulled.run(start(), cohort(), streams(), anchor=start() + 1), wanted)
    assert plain.price is None


def test_a_batch_of_all_records_is_rate_one() -> None:
    whole = of_each(dp_sgd, SMALL, sampler="fixed", batch=COUNTS, steps=STEPS, clip=CLIP, learning_rate=LEARNING_RATE)
    poisson = of_each(dp_sgd, SMALL, rate=1.0, steps=STEPS, clip=CLIP, learning_rate=LEARNING_RATE)
    one, other = (way.run(start(), cohort(), streams(), SCALE) for way in (whole, poisson))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [[2, 0], [4, 3, 1], [0]])
def test_neither_company_nor_chunks_change_a_client(rows: list[int]) -> None:
    together = varied().run(start(), cohort(), streams(), SCALE)
    scale = [SCALE[i] for i in rows]
    some = varied().run(start(), cohort(clients=rows), streams(rows), scale, rows=rows)
    torch.testing.assert_close(some, together[rows], rtol=1e-5, atol=1e-6)
    chunks = varied(memory=1).run(start(), cohort(), streams(), SCALE)
    torch.testing.assert_close(chunks, together, rtol=1e-5, atol=1e-6)


def test_the_captured_step_run_eagerly_is_the_cpu_path() -> None:
    settings = Settings(
        rate=np.array(BATCH) / COUNTS,
        steps=np.array(STEPS),
        learning_rate=np.array(LEARNING_RATE),
        divisor=np.array(BATCH, float),
        clip=np.array(CLIP),
        deviation=None,
        momentum=np.full(CLIENTS, 0.5),
        decay=None,
        pull=None,
        batch=np.array(BATCH),
    )
    starts = start().expand(CLIENTS, -1).contiguous()
    with torch.no_grad():
        device = train_on_device(SMALL, starts, starts, cohort(), streams(), settings, CudaGraphs())
        host = train_on_cpu(SMALL, starts, starts, cohort(), streams(), settings)
    torch.testing.assert_close(device, host, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["logistic", "cnn"])
def test_on_a_device_as_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps without clips round products to ten bits, enough to turn a kink of the CNN the other way.
    monkeypatch.setattr("polyeps.engine.cuda_graphs._coarse_products", nullcontext)
    model = MODELS[name]()
    records = cohort(model, classes=2)
    there = Records(records.features.cuda(), records.labels.cuda(), records.offsets.cuda())
    way = varied(model)
    for round in range(3):  # the first run captures, later ones replay
        host = way.run(start(model), records, SeededStreams(21, range(CLIENTS), round), 0.0)
        device = way.run(start(model), there, SeededStreams(21, range(CLIENTS), round), 0.0).cpu()
        torch.testing.assert_close(device, host, rtol=1e-3, atol=1e-4)
    noisy = way.run(start(model), there, SeededStreams(21, range(CLIENTS), 2), SCALE).cpu()
    assert (noisy - device)[0].any()
    plain = of_each(sgd, model, sampler="fixed", batch=BATCH, steps=STEPS, learning_rate=0.05)
    device = plain.run(start(model), there, streams()).cpu()
    host = plain.run(start(model), records, streams())
    torch.testing.assert_close(device, host, rtol=1e-3, atol=1e-4)


def test_the_price_is_of_fixed_size_batches_under_replace_one() -> None:
    way = varied()
    assert way.price is not None
    assert way.adjacency == "replace-one"
    gaussian = dp_accounting.GaussianDpEvent(1.5)
    batch = dp_accounting.SampledWithoutReplacementDpEvent(19, 16, gaussian)
    assert way.price(1.5, 4) == dp_accounting.SelfComposedDpEvent(batch, 6)
    assert way.price(1.5, 3) != way.price(1.5, 4)
    same = dp_sgd(SMALL, sampler="fixed", batch=8, steps=50, clip=1, learning_rate=1)
    assert same.price is not None
    method = quick_dp_sgd(records=1200, batch=8, steps=50, sampler="fixed")
    assert same.price(4.444, {"records": 1200}) == method.price(4.444)
    assert epsilon(same.price(4.444, {"records": 1200}), 1e-5, adjacency=same.adjacency) > 0
    assert dp_sgd(SMALL, rate=0.1, steps=1, clip=1, learning_rate=1).adjacency == "zero-out"


def test_the_price_needs_to_know_how_many_records_there_are() -> None:
    price = varied(held=None).price
    assert price is not None
    with pytest.raises(InputError, match="records is not set"):
        price(1.0, 0)
    price = varied(held=[3, *COUNTS[1:]]).price
    assert price is not None
    with pytest.raises(InputError, match="batch is 4 for client 0 of the cohort, which has 3 records"):
        price(1.0, 0)


def run(way: Training | Differing) -> Tensor:
    return way.run(start(), cohort(), streams(), SCALE)


def fixed(batch: float | list[int]) -> Differing:
    return of_each(dp_sgd, SMALL, sampler="fixed", batch=batch, steps=1, clip=1, learning_rate=1)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "too few records": (
        lambda: run(fixed(5)),
        "batch is 5 for client 1 of the cohort, which has 3 records; make its batch smaller, or leave it out",
    ),
    "too few records of some": (
        lambda: fixed([5, 5, 5, 9, 5]).run(start(), cohort(clients=[4, 3]), streams([4, 3]), 1.0, rows=[4, 3]),
        "batch is 9 for client 1 of the cohort, which has 7 records",
    ),
    "other records": (
        lambda: run(varied(held=[12, 3, 30, 8, 19])),
        "records is 8 in the settings of client 3, which has 7",
    ),
    "fraction": (lambda: run(fixed(1.5)), "batch must be whole"),
    "nothing": (lambda: run(fixed(0)), "batch must be above 0"),
    "no batch": (
        lambda: run(dp_sgd(SMALL, sampler="fixed", steps=1, clip=1, learning_rate=1)),
        "rate or batch must be given",
    ),
    "rate": (
        lambda: dp_sgd(SMALL, sampler="fixed", rate=0.1, batch=2, steps=1, clip=1, learning_rate=1),
        "rate must be left out",
    ),
    "no rate": (lambda: run(dp_sgd(SMALL, steps=1, clip=1, learning_rate=1)), "rate or batch must be given"),
    "no rate, plain": (
        lambda: sgd(SMALL, steps=1, learning_rate=1).run(start(), cohort(), streams()),
        "rate or batch must be given",
    ),
    "batch, plain": (lambda: sgd(SMALL, rate=0.5, batch=2, steps=1, learning_rate=1), "batch is the exact size"),
    "sampler": (
        lambda: sgd(SMALL, sampler="none", rate=0.5, steps=1, learning_rate=1),  # type: ignore[arg-type]
        'must be "poisson" or "fixed"',
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused_in_a_sentence(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(InputError, match=message):
        call()
