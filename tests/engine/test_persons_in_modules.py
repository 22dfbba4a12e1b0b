"""Persons under users' own modules, however the engine runs them: against a slow loop over persons by plain autograd.

The loop runs the module on one record at a time. Where a module draws, the masks are written out from the random
numbers that the client's key, the step, the person and the record's place give.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyeps.core import Records
from polyeps.engine import units
from polyeps.engine.cuda_graphs import train_on_device
from polyeps.engine.deployed_training import RecordGradients
from polyeps.engine.fallback_layers import LoopedLayer, VmapLayer
from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.losses import cross_entropy
from polyeps.engine.module_mode import ModuleMode
from polyeps.engine.network import add_gradients
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.engine.row_draws import RowDraws, client_keys
from polyeps.engine.units import examples_of
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.models import Model, from_module, of_units
from polyeps.training import Training, dp_sgd, sgd

CLIP = 0.4
CLIENTS = [[1, 7, 2], [3], [2, 1, 1, 5]]
pytestmark = pytest.mark.filterwarnings("ignore:.*one row after the other")


class Apply(nn.Module):
    """Parts, and a function of them and the rows."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, rows: Tensor) -> Tensor:
        return self.function(self, rows)


def residual(s: Any, rows: Tensor) -> Tensor:
    found: Tensor = s.last(rows + torch.tanh(s.first(rows)))
    return found


def dropped(s: Any, rows: Tensor) -> Tensor:
    found: Tensor = s.last(s.second(torch.tanh(s.first(rows))) + s.again(rows))
    return found


def branching(s: Any, rows: Tensor) -> Tensor:
    return torch.cat([s.first(s.drop(row[None])) if row[0] > 0 else s.last(row[None]) for row in rows])


def last_state(s: Any, rows: Tensor) -> Tensor:
    found: Tensor = s.head(s.layers(rows)[0][:, -1])
    return found


def attention(s: Any, rows: Tensor) -> Tensor:
    mixed = rows + s.attend(rows, rows, rows, need_weights=False)[0]
    found: Tensor = s.head(s.norm(mixed).mean(1))
    return found


def tied(s: Any, tokens: Tensor) -> Tensor:
    found: Tensor = (s.table(tokens).mean(1) @ s.table.weight.T)[:, :3]
    return found


def images(s: Any, rows: Tensor) -> Tensor:
    hidden = torch.relu(s.first(rows))
    found: Tensor = s.head((hidden + s.second(hidden)).mean((2, 3)))
    return found


def smooth_absolute(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.sqrt(1 + (outputs[:, 0] - labels) ** 2)


LONG = (4, 6)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (lambda: Apply(residual, first=nn.Linear(6, 6), last=nn.Linear(6, 3)), (6,)),
    "positions": (
        lambda: Apply(lambda s, x: residual(s, x).mean(1), first=nn.Linear(6, 6), last=nn.Linear(6, 3)),
        LONG,
    ),
    "one dropout": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)), (6,)),
    "two dropouts": (
        lambda: Apply(
            dropped, first=nn.Linear(6, 6), second=nn.Dropout(0.3), again=nn.Dropout(0.5), last=nn.Linear(6, 3)
        ),
        (6,),
    ),
    "branching": (lambda: Apply(branching, first=nn.Linear(6, 3), last=nn.Linear(6, 3), drop=nn.Identity()), (6,)),
    "branching dropout": (
        lambda: Apply(branching, first=nn.Linear(6, 3), last=nn.Linear(6, 3), drop=nn.Dropout(0.5)),
        (6,),
    ),
    "lstm": (lambda: Apply(last_state, layers=nn.LSTM(6, 5, 2, batch_first=True), head=nn.Linear(5, 3)), LONG),
    "lstm dropout": (
        lambda: Apply(last_state, layers=nn.LSTM(6, 5, 2, batch_first=True, dropout=0.4), head=nn.Linear(5, 3)),
        LONG,
    ),
    "gru": (
        lambda: Apply(last_state, layers=nn.GRU(6, 5, batch_first=True, bidirectional=True), head=nn.Linear(10, 3)),
        LONG,
    ),
    "attention": (
        lambda: Apply(
            attention, attend=nn.MultiheadAttention(6, 2, batch_first=True), norm=nn.LayerNorm(6), head=nn.Linear(6, 3)
        ),
        LONG,
    ),
    "attention dropout": (
        lambda: Apply(
            attention,
            attend=nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True),
            norm=nn.LayerNorm(6),
            head=nn.Linear(6, 3),
        ),
        LONG,
    ),
    "encoder": (
        lambda: Apply(
            lambda s, x: s.head(s.body(x)[:, 0]),
            body=nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True),
            head=nn.Linear(6, 3),
        ),
        LONG,
    ),
    "tied tokens": (lambda: Apply(tied, table=nn.Embedding(9, 4)), (5,)),
    "images": (
        lambda: Apply(
            images,
            first=nn.Conv2d(2, 4, 3, padding=1, stride=2),
            second=nn.Conv2d(4, 4, 3, padding=1, groups=2),
            head=nn.Linear(4, 3),
        ),
        (2, 6, 6),
    ),
    "wide convolution": (  # norms without forming gradients
        lambda: Apply(
            lambda s, x: s.head(torch.relu(s.first(x)).mean((2, 3))),
            first=nn.Conv2d(128, 256, 3),
            head=nn.Linear(256, 3),
        ),
        (128, 4, 4),
    ),
    "unused parameter": (
        lambda: Apply(residual, first=nn.Linear(6, 6), last=nn.Linear(6, 3), unused=nn.Linear(2, 2)),
        (6,),
    ),
    "own loss": (lambda: Apply(residual, first=nn.Linear(6, 6), last=nn.Linear(6, 1)), (6,)),
}
RANDOM = {"one dropout", "two dropouts", "branching dropout", "lstm dropout", "attention dropout", "encoder"}
LOOPED = {"branching", "branching dropout"}
_made: dict[str, Model] = {}


def model_of(name: str) -> Model:
    if name not in _made:
        torch.manual_seed(0)
        build, shape = MODULES[name]
        example = torch.randint(0, 9, (3, *shape)) if name == "tied tokens" else torch.randn(3, *shape)
        _made[name] = from_module(build(), smooth_absolute if name == "own loss" else cross_entropy, example)
    return _made[name]


def persons(model: Model, clients: list[list[int]] = CLIENTS, seed: int = 0) -> Records:
    lengths = [length for client in clients for length in client]
    drawn = torch.Generator().manual_seed(seed)
    shape = (sum(lengths), *model.input_shape)
    whole = model.input_type == torch.int64
    features = torch.randint(0, 9, shape, generator=drawn) if whole else torch.randn(shape, generator=drawn)
    labels = torch.randint(0, 3, shape[:1], generator=drawn)
    edges = torch.tensor([0, *np.cumsum(lengths).tolist()])
    offsets = torch.tensor([0, *np.cumsum([len(client) for client in clients]).tolist()])
    return Records(features, labels, offsets, edges.unfold(0, 2, 1))


def start_of(model: Model) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    return model.start(drawn) + 0.2 * torch.randn(model.size, generator=drawn)


def training_of(model: Model, steps: int = 1, rate: float = 1.0, **options: Any) -> Training:
    return dp_sgd(
        of_units(model, "patient"), rate=rate, batch=1, steps=steps, clip=CLIP, learning_rate=1.0 / steps, **options
    )


def ids(records: Records) -> list[str]:
    return [str(place) for place in range(records.clients)]


def of_person(model: Model, vector: Tensor, features: Tensor, labels: Tensor, draws: RowDraws) -> Tensor:
    """The gradient of a person's mean loss, one record after the other."""
    leaf = vector.clone().requires_grad_()
    outputs = []
    for place in range(len(features)):
        row = (features[place : place + 1],)
        before = torch.random.get_rng_state()
        found = functional_call(model.module, model.unflatten(leaf), row)
        if not torch.equal(torch.random.get_rng_state(), before):
            with ModuleMode(draws.widened(len(features)).of_row(place)):
                found = functional_call(model.module, model.unflatten(leaf), row)
        outputs.append(found)
    (gradient,) = torch.autograd.grad(
        model.loss(torch.cat(outputs), labels).mean(), leaf, allow_unused=True, materialize_grads=True
    )
    return gradient.double()


def slow_sums(model: Model, vector: Tensor, records: Records, keys: Tensor, clip: float = CLIP) -> Tensor:
    """Every client's sum of clipped gradients in its first step."""
    assert records.units is not None
    sums = torch.zeros(records.clients, model.size, dtype=torch.float64)
    for client, (first, last) in enumerate(records.spans.tolist()):
        for person in range(first, last):
            rows = slice(*records.units[person].tolist())
            draws = RowDraws(keys[client : client + 1], torch.tensor([person - first]), torch.tensor([0]))
            one = of_person(model, vector, records.features[rows], records.labels[rows], draws)
            sums[client] += one * min(1.0, clip / max(float(one.norm()), 1e-30))
    return sums


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("split", [1 << 20, 0])  # one pass, and one for each class of lengths
def test_sums_are_those_of_a_slow_loop(name: str, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_PASS", split)
    model = model_of(name)
    layers = of_units(model, "patient").network.layers
    assert any(isinstance(layer, VmapLayer) for layer in layers)
    assert any(isinstance(layer, LoopedLayer) for layer in layers) == (name in LOOPED)
    assert model.network.random == (name in RANDOM | LOOPED)
    records, start = persons(model), start_of(model)
    found = -training_of(model).run(start, records, SeededStreams(0, ids(records), 0), 0.0)
    keys = client_keys(SeededStreams(0, ids(records), 0))
    expected = slow_sums(model, start, records, keys)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5 * CLIP)


@pytest.mark.parametrize("name", ["two dropouts", "branching dropout", "lstm", "images"])
def test_plain_training_is_that_of_a_slow_loop(name: str) -> None:
    model = model_of(name)
    records, start = persons(model), start_of(model)
    plain = sgd(of_units(model, "patient"), rate=1.0, steps=1, learning_rate=1.0)
    found = -plain.run(start, records, SeededStreams(0, ids(records), 0), None)
    sums = slow_sums(model, start, records, client_keys(SeededStreams(0, ids(records), 0)), clip=1e9)
    expected = sums / torch.from_numpy(records.counts)[:, None]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", MODULES)
def test_together_alone_chunked_and_on_a_device_are_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    records, start = persons(model), start_of(model)
    options: dict[str, Any] = {"steps": 3, "rate": 0.6, "momentum": 0.5}
    together = training_of(model, **options).run(start, records, SeededStreams(4, ids(records), 0), 0.5)
    for client in range(3):
        alone = training_of(model, **options).run(
            start, records.select([client]), SeededStreams(4, [str(client)], 0), 0.5
        )
        torch.testing.assert_close(alone[0], together[client], rtol=1e-4, atol=1e-5)
    small = training_of(model, **options, memory=1).run(start, records, SeededStreams(4, ids(records), 0), 0.5)
    torch.testing.assert_close(small, together, rtol=1e-4, atol=1e-5)
    assert records.units is not None
    block = Records(*examples_of(records, torch.arange(len(records.units)), None), records.offsets, padded=True)
    quiet = training_of(model, **options).run(start, records, SeededStreams(4, ids(records), 0), 0.0)
    monkeypatch.setattr("polyeps.training.train_on_cpu", partial(train_on_device, graphs={}))
    device = training_of(model, **options).run(start, block, SeededStreams(4, ids(records), 0), 0.0)
    torch.testing.assert_close(device, quiet, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_deployed_clients_train_like_simulated_ones_but_for_the_noise(name: str) -> None:
    model = model_of(name)
    records, start = persons(model, [[1, 7, 2, 0, 3]]), start_of(model)
    training = training_of(model, steps=3, rate=0.6)
    simulated = training.run(start, records, SeededStreams(5, ["a"], 0), 0.0)
    deployed = training.run(start, records, SeededStreams(5, ["a"], 0, exact=True), 1e-4)
    assert float(simulated.abs().max()) > 0.02
    torch.testing.assert_close(deployed, simulated, atol=1e-3, rtol=1e-3)
    assert training.run(start, records, SystemStreams(1), 1.0).isfinite().all()


@pytest.mark.parametrize("name", ["residual", "two dropouts", "branching dropout", "lstm dropout", "encoder", "images"])
def test_other_persons_change_nothing_of_a_person(name: str) -> None:
    """Without another person's records, whose place stays: not a bit when deployed; sums differ by its clip at most."""
    model = model_of(name)
    lengths, start = [3, 1, 25, 2], start_of(model)
    data = persons(model, [lengths])
    alone = RecordGradients(of_units(model, "patient"), start)
    alone.key = torch.tensor([77])
    grid = GridSum(CLIP, model.size, 1.0)
    whole = alone.total(data, [0, 1, 2, 3], grid)
    simulated = training_of(model).run(start, data, SeededStreams(0, ["a"], 0), 0.0)
    for person in range(4):
        kept = without(data, person)
        mine = alone.total(data, [person], grid)
        assert torch.equal(whole - alone.total(kept, [0, 1, 2, 3], grid), mine)
        less = training_of(model).run(start, kept, SeededStreams(0, ["a"], 0), 0.0)
        assert 0 < float((simulated - less).norm()) <= CLIP * (1 + 1e-5)


@pytest.mark.parametrize(
    "name", ["residual", "positions", "two dropouts", "lstm", "attention", "images", "wide convolution"]
)
def test_no_weights_or_records_make_a_person_contribute_more_than_the_clip(name: str) -> None:
    """Magnitudes from 1e-20 to 1e18, and records of one person that nearly cancel."""
    model = model_of(name)
    made, drawn = of_units(model, "patient"), torch.Generator().manual_seed(5)
    layout = Layout(6, (RowGroup(0, 6, 1, 0),), torch.arange(6))  # every person is a client of its own
    moved = 0
    for trial in range(6 if name == "wide convolution" else 40):
        records = persons(model, [torch.randint(1, 6, (6,), generator=drawn).tolist()], trial)
        scales = 10.0 ** torch.randint(-20, 19, (len(records.labels),), generator=drawn)
        records.features.mul_(scales.reshape(-1, *(1,) * len(model.input_shape)))
        if trial % 3 == 0:
            records.features[1::2] = -(1 + 1e-6) * records.features[: 2 * (len(records.labels) // 2) : 2]
        weights = torch.randn(model.size, generator=drawn) * 10.0 ** torch.randint(-18, 19, (1,), generator=drawn)
        clip = 10.0 ** int(torch.randint(-6, 3, (1,), generator=drawn))
        rows, labels = examples_of(records, torch.arange(6), None)
        into = torch.zeros(6, model.size)
        with torch.no_grad():
            clips = torch.full((6,), clip)
            add_gradients(made.network, made.loss, weights.expand(6, -1), rows, labels, layout, None, clips, into)
        lengths = into.double().norm(dim=1)
        assert float(lengths.max()) <= clip
        moved += int((lengths > 0.9 * clip).sum())
    assert moved > 0


def without(records: Records, person: int) -> Records:
    assert records.units is not None
    first, end = records.units[person].tolist()
    kept = torch.cat([torch.arange(first), torch.arange(end, len(records.labels))])
    moved = records.units - (end - first) * (records.units >= end).long()
    moved[person] = first
    return Records(records.features[kept], records.labels[kept], records.offsets, moved)


def test_every_record_has_draws_of_its_own() -> None:
    draws = RowDraws(torch.tensor([3, 3, 4]), torch.tensor([0, 1, 0]), torch.tensor([2]), torch.tensor([4, 2, 1]))
    words = torch.unflatten(draws.widened(4).words((6,)), 0, (3, 4))
    distinct = torch.cat([words[0], words[1, :2], words[2, :1]])
    assert len({tuple(each) for each in distinct.tolist()}) == 7
    assert torch.equal(words[:, 0], draws.again().words((6,)))  # as a person of one record would
    assert torch.equal(words[1, 2:], words[1, :1].expand(2, -1))  # padding is a copy of the first record
    longer = torch.unflatten(draws.widened(9).words((6,)), 0, (3, 9))
    assert torch.equal(longer[:, :4], words)


def test_a_person_of_one_record_draws_as_the_record_does() -> None:
    model = model_of("two dropouts")
    records, start = persons(model, [[1] * 6]), start_of(model)
    single = Records(records.features, records.labels, torch.tensor([0, 6]))
    plain = dp_sgd(model, rate=0.6, batch=1, steps=3, clip=CLIP, learning_rate=1 / 3)
    by_record = plain.run(start, single, SeededStreams(4, ["a"], 0), 0.0)
    by_person = training_of(model, steps=3, rate=0.6).run(start, records, SeededStreams(4, ["a"], 0), 0.0)
    torch.testing.assert_close(by_person, by_record)


def test_a_loop_that_draws_where_no_check_looked_draws_from_the_clients_stream() -> None:
    """The branch is taken by large rows alone; torch's global generator stays untouched."""

    def rare(s: Any, rows: Tensor) -> Tensor:
        kept = [nn.functional.dropout(row, training=s.training) if row.sum() > 1e4 else row for row in rows]
        found: Tensor = s.last(torch.stack(kept))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = from_module(Apply(rare, last=nn.Linear(6, 3)), cross_entropy, torch.randn(3, 6))
    records, start = persons(model, [[2, 1, 3]]), start_of(model)
    records.features.add_(1e5)
    before = torch.random.get_rng_state()
    for exact, noise in ((False, 0.0), (True, 1.0)):
        runs = [
            training_of(model).run(start, records, SeededStreams(seed, ["a"], 0, exact=exact), noise)
            for seed in (1, 1, 2)
        ]
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])
    assert torch.equal(torch.random.get_rng_state(), before)
