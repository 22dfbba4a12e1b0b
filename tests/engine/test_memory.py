"""Steps take the memory they are given: batches in parts, formed gradients of some clients at a time, nothing kept."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from polyeps.core import Records
from polyeps.engine import fallback_layers, network
from polyeps.engine.client_parameters import ForwardPass
from polyeps.engine.layout import lay_out
from polyeps.engine.network import add_gradients
from polyeps.engine.noise import SeededStreams
from polyeps.engine.sampling import Batches, split_batches
from polyeps.models import Model, cross_entropy, logistic
from polyeps.training import dp_sgd, sgd


class Residual(nn.Module):
    """A convolutional block with group normalisation, and a head with layer normalisation."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(2, channels), nn.LayerNorm(channels)
        self.head = nn.Linear(channels, 3)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        rows = rows + torch.tanh(self.norm(self.second(rows)))
        found: Tensor = self.head(self.last(rows.mean((2, 3))))
        return found


def residual() -> Model:
    torch.manual_seed(0)
    return Model(Residual(), cross_entropy, (1, 6, 6))


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 10))
def test_parts_of_batches_hold_every_record_once(sizes: list[list[int]], most: int) -> None:
    held = np.array(sizes, np.int64)
    batches = Batches(held, np.arange(held.sum()))
    parts = split_batches(batches, most)
    assert all(part.sizes.max(initial=0) <= most and part.sizes.shape == held.shape for part in parts)
    assert np.array_equal(np.sum([part.sizes for part in parts], axis=0), held)
    of_batch = [np.split(part.records, np.cumsum(part.sizes.ravel())[:-1]) for part in parts]
    joined = np.concatenate([np.concatenate(pieces) for pieces in zip(*of_batch, strict=True)])
    assert np.array_equal(joined, batches.records)  # in their order, each in the batch it was in


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}, {"decay": 0.1}, {"pull": 0.2}, {"clip": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["residual", "logistic"])
def test_a_split_batch_trains_as_a_whole_one(name: str, options: dict[str, float], monkeypatch: Any) -> None:
    model = residual() if name == "residual" else logistic(36, 3)
    generator = torch.Generator().manual_seed(1)
    counts = [30, 7, 0, 1, 19]
    offsets = torch.tensor([0, *np.cumsum([max(1, count) for count in counts])])
    rows = torch.randn(int(offsets[-1]), *model.input_shape, generator=generator)
    records = Records(rows, torch.randint(0, 3, (len(rows),), generator=generator), offsets)
    start = 0.3 * torch.randn(model.size, generator=generator)
    found: list[Tensor] = []
    passes: list[int] = []
    real = network.row_gradients

    def counted(*args: Any) -> Any:
        passes[-1] += 1
        return real(*args)

    monkeypatch.setattr(network, "row_gradients", counted)
    for at_once in (None, 1, 4):
        passes.append(0)
        if at_once is not None:
            monkeypatch.setattr("polyeps.training.rows_at_once", lambda *_, most=at_once: most)
        way: Any = dp_sgd if "clip" in options else sgd
        training = way(model, rate=0.7, steps=3, learning_rate=0.2, **options)
        noise = 0.8 if "clip" in options else None
        found.append(training.run(start, records, SeededStreams(2, range(5), 0), noise))
    assert float(found[0].std()) > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)
    if "clip" in options:
        assert passes[1] > 10 > passes[0]  # batches were split indeed


def test_formed_gradients_of_some_clients_at_a_time_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    model = residual()
    generator = torch.Generator().manual_seed(3)
    models = model.start(generator) + 0.1 * torch.randn(6, model.size, generator=generator)
    layout = lay_out(6, [0, 2, 3, 6], np.array([4, 1, 3]), torch.device("cpu"))
    rows = torch.randn(layout.rows, 1, 6, 6, generator=generator)
    labels = torch.randint(0, 3, (layout.rows,), generator=generator)
    sums = []
    for most in (1 << 25, 1, 600, 2000):
        monkeypatch.setattr(network, "_FORMED", most)
        sums.append(torch.zeros_like(models))
        with torch.no_grad():
            add_gradients(
                model.network, model.loss, models, rows, labels, layout, None, torch.full((6,), 0.3), sums[-1]
            )
    for other in sums[1:]:
        torch.testing.assert_close(other, sums[0], rtol=1e-5, atol=1e-6)


def test_a_step_frees_its_memory_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[weakref.ref[Any]] = []
    real = ForwardPass

    def noted(*args: Any) -> Any:
        made = real(*args)
        passes.append(weakref.ref(made))
        return made

    model = residual()
    monkeypatch.setattr(fallback_layers, "ForwardPass", noted)
    layout = lay_out(1, [0, 1], np.array([4]), torch.device("cpu"))
    gc.disable()
    try:
        with torch.no_grad():
            add_gradients(
                model.network, model.loss, torch.zeros(1, model.size), torch.randn(4, 1, 6, 6),
                torch.zeros(4, dtype=torch.int64), layout, None, torch.ones(1), torch.zeros(1, model.size),
            )  # fmt: skip
        assert passes
        assert all(each() is None for each in passes)
    finally:
        gc.enable()


_PEAK = """
import sys
import torch
from polyeps.core import Records
from polyeps.engine.noise import SeededStreams
from polyeps.models import Model, cross_entropy
from polyeps.training import dp_sgd
from test_memory import Residual

def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) / 1024

model = Model(Residual(32), cross_entropy, (1, 32, 32), check=False)
start, features = model.start(torch.Generator()), torch.randn(256, 1, 32, 32)
for rows in (4, 256):  # the first run loads libraries
    records = Records(features[:rows], torch.zeros(rows, dtype=torch.int64), torch.tensor([0, rows]))
    way = dp_sgd(model, batch=rows, sampler="fixed", steps=1, clip=1.0, learning_rate=0.1, memory=int(sys.argv[1]))
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    way.run(start, records, SeededStreams(0, [0], 0), 1.0)
print(status("VmHWM") - before)
"""


def peak(memory: int) -> float:
    """Return the MiB that a step of 256 images takes in a process of its own."""
    command = [sys.executable, "-c", _PEAK, str(memory << 20)]
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": folders}
    )
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_batch_of_a_users_module_stays_within_the_memory_it_is_given() -> None:
    assert 4 * 256 * Model(Residual(32), cross_entropy, (1, 32, 32), check=False).floats_per_row > 256 << 20
    assert peak(memory=64) < 64


def test_norms_of_clients_take_no_copy_of_parameters_for_each_row() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.GroupNorm(2, 4), nn.LayerNorm((4, 5)), nn.LayerNorm(5, bias=False)

        def forward(self, rows: Tensor) -> Tensor:
            return functional.relu(self.c(self.b(self.a(rows)) + rows)).mean(2)

    torch.manual_seed(0)
    model = Model(Norms(), cross_entropy, (4, 5))  # compares with autograd
    (layer,) = model.network.layers
    layout = lay_out(2, [0, 2], np.array([3]), torch.device("cpu"))
    _, saved = layer.forward(torch.ones(2, model.size), torch.randn(6, 4, 5), layout)
    assert not saved.run.copies
