"""Persons as examples: what the engine computes is what a slow loop over persons computes with plain autograd."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polyeps.clients import check_units
from polyeps.core import Records
from polyeps.engine import units
from polyeps.engine.cuda_graphs import train_on_device
from polyeps.engine.deployed_training import RecordGradients
from polyeps.engine.gradient_checks import CheckedModel, compare_gradients
from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.losses import cross_entropy
from polyeps.engine.network import add_gradients
from polyeps.engine.noise import SeededStreams
from polyeps.engine.sampling import Batches
from polyeps.engine.units import NO_RECORD, examples_of, split_by_length
from polyeps.errors import InputError
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.models import (
    Model,
    binary_logistic,
    binary_svm,
    cnn,
    from_module,
    linear_svm,
    logistic,
    lstm,
    mlp,
    of_units,
)
from polyeps.training import Training, dp_sgd, sgd


class Own(nn.Module):
    """A module without a batched rule: a gate between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(rows))
        out: Tensor = self.second(hidden * torch.sigmoid(hidden))
        return out


class Branching(nn.Module):
    """A module whose way depends on the record, so that `vmap` cannot run it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([self.first(row[None]) if row[0] > 0 else self.second(row[None]) for row in rows])


def looped() -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_module(Branching(), cross_entropy, torch.randn(3, 6))


def smooth_absolute(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.sqrt(1 + (outputs[:, 0] - labels) ** 2)


torch.manual_seed(0)
LINEAR = [logistic(6, 3), linear_svm(6, 3), binary_logistic(6), binary_svm(6), mlp(6, (4,), 3)]
OTHERS = {
    "own module": from_module(Own(), cross_entropy, torch.randn(3, 6)),
    "looped": looped(),
    "own loss": from_module(nn.Linear(6, 1), smooth_absolute, torch.randn(3, 6)),
    "normalised": from_module(
        nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)), cross_entropy, torch.randn(3, 6)
    ),
    "lstm": lstm(vocabulary=9, embedding=3, hidden=4, length=5),
    "cnn": cnn(),
}
CLIP = 0.4


def classes_of(model: Model) -> int:
    shape = torch.zeros(1, *model.input_shape, dtype=model.input_type)
    return max(2, model.outputs(torch.zeros(model.size), shape).shape[-1])


def persons(model: Model, clients: list[list[int]], seed: int = 0) -> Records:
    """Clients' persons with so many records each."""
    lengths = [length for client in clients for length in client]
    drawn = torch.Generator().manual_seed(seed)
    shape = (sum(lengths), *model.input_shape)
    whole = model.input_type == torch.int64
    features = torch.randint(0, 9, shape, generator=drawn) if whole else torch.randn(shape, generator=drawn)
    labels = torch.randint(0, classes_of(model), shape[:1], generator=drawn)
    edges = torch.tensor([0, *np.cumsum(lengths).tolist()])
    offsets = torch.tensor([0, *np.cumsum([len(client) for client in clients]).tolist()])
    return Records(features, labels, offsets, edges.unfold(0, 2, 1))


def padded(records: Records) -> Records:
    """The same persons as one block, as a device has them."""
    features, labels = examples_of(records, torch.arange(len(records.units if records.units is not None else ())), None)
    return Records(features, labels, records.offsets, padded=True)


def start_of(model: Model) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    return model.start(drawn) + 0.3 * torch.randn(model.size, generator=drawn)


def gradient(model: Model, vector: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The gradient of a person's mean loss, by plain autograd through the module of single records."""
    leaf = vector.clone().requires_grad_()
    outputs = torch.func.functional_call(model.module, model.unflatten(leaf), (features,))
    (found,) = torch.autograd.grad(model.loss(outputs, labels).mean(), leaf)
    return found


def slow_sum(model: Model, vector: Tensor, records: Records, clip: float | None = CLIP) -> Tensor:
    """The sum of all persons' clipped gradients, one person after the other."""
    assert records.units is not None
    total = torch.zeros(model.size, dtype=torch.float64)
    for first, end in records.units.tolist():
        if end > first:
            one = gradient(model, vector, records.features[first:end], records.labels[first:end]).double()
            total += one if clip is None else one * min(1.0, clip / max(float(one.norm()), 1e-30))
    return total


def one_step(training: Training, records: Records, vector: Tensor, noise: float | None = 0.0) -> Tensor:
    """Minus the update of a full batch with learning rate one: the sum over all persons."""
    ids = [str(place) for place in range(records.clients)]
    return -training.run(vector, records, SeededStreams(0, ids, 0), noise).double()


def clipped(model: Model, records: Records) -> Tensor:
    training = dp_sgd(of_units(model, "patient"), rate=1.0, batch=1, steps=1, clip=CLIP, learning_rate=1.0)
    return one_step(training, records, start_of(model))[0]


def blanked(records: Records, person: int) -> Records:
    """The same without the records of one person, whose place stays."""
    assert records.units is not None
    first, end = records.units[person].tolist()
    kept = torch.cat([torch.arange(first), torch.arange(end, len(records.labels))])
    moved = records.units - (end - first) * (records.units >= end).long()
    moved[person] = first
    return Records(records.features[kept], records.labels[kept], records.offsets, moved)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    which=st.sampled_from(LINEAR),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_sums_are_those_of_a_slow_loop_and_no_person_moves_them_by_more_than_the_clip(
    lengths: list[int], which: Model, seed: int, data: st.DataObject
) -> None:
    records = persons(which, [lengths], seed)
    person = data.draw(st.integers(0, len(lengths) - 1))
    _sums_and_influence(which, records, person)


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_for_models_of_other_layers(name: str) -> None:
    lengths = [1, 3, 2] if name == "cnn" else [1, 40, 7, 2]
    _sums_and_influence(OTHERS[name], persons(OTHERS[name], [lengths]), 1)


def _sums_and_influence(model: Model, records: Records, person: int) -> None:
    whole = clipped(model, records)
    torch.testing.assert_close(whole, slow_sum(model, start_of(model), records), atol=2e-4 * CLIP, rtol=1e-3)
    without = clipped(model, blanked(records, person))
    assert float((whole - without).norm()) <= CLIP * (1 + 1e-5)


def test_single_records_would_move_sums_by_more() -> None:
    """The check above can fail: the same person's rows as records of their own."""
    model = LINEAR[0]
    features = torch.ones(12, 6)
    units_of = torch.tensor([[0, 11], [11, 12]])
    records = Records(features, torch.zeros(12, dtype=torch.int64), torch.tensor([0, 2]), units_of)
    single = Records(records.features, records.labels, torch.tensor([0, 12]))
    training = dp_sgd(model, rate=1.0, batch=1, steps=1, clip=CLIP, learning_rate=1.0)
    start = torch.zeros(model.size)
    kept = Records(features[11:], records.labels[11:], torch.tensor([0, 1]))
    moved = one_step(training, single, start)[0] - one_step(training, kept, start)[0]
    assert float(moved.norm()) > 10 * CLIP
    persons_training = dp_sgd(of_units(model, "patient"), rate=1.0, batch=1, steps=1, clip=CLIP, learning_rate=1.0)
    moved = one_step(persons_training, records, start)[0] - one_step(persons_training, blanked(records, 0), start)[0]
    assert CLIP * 0.99 < float(moved.norm()) <= CLIP * (1 + 1e-5)


@pytest.mark.parametrize("model", [*LINEAR, OTHERS["own module"], OTHERS["lstm"]])
def test_layers_are_those_that_autograd_checks(model: Model) -> None:
    """The check that own modules pass, on persons: per-person gradients and clipped sums, some rows padding."""
    made = of_units(model, "patient")
    shapes = {name: part.shape for name, part in made.slices.items()}
    drawn = torch.Generator().manual_seed(3)
    whole = model.input_type == torch.int64
    shape = (5, 4, *model.input_shape)
    rows = torch.randint(0, 9, shape, generator=drawn) if whole else torch.randn(shape, generator=drawn)
    labels = torch.randint(NO_RECORD, classes_of(model), (5, 4), generator=drawn)
    models = torch.stack([start_of(model), 0.5 * start_of(model)])
    compare_gradients(CheckedModel(made.module, shapes, made.loss), made.network, made.loss, models, rows, labels)


CLIENTS = [[1, 1, 9, 2], [40, 1, 3], [2, 2, 2, 2, 17]]


@pytest.mark.parametrize("split", [1 << 20, 0])  # one pass, and one for each class of lengths
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("private", [True, False])
def test_clients_train_alike_together_alone_and_padded(
    private: bool, momentum: float, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_PASS", split)
    model = mlp(6, (4,), 3)
    records = persons(model, CLIENTS)
    common: dict[str, Any] = {"steps": 6, "learning_rate": 0.3, "momentum": momentum, "decay": 0.01}
    trained = of_units(model, "patient")
    training = dp_sgd(trained, batch=2, clip=CLIP, **common) if private else sgd(trained, batch=2, **common)
    noise = np.full(3, 0.7) if private else None
    start, ids = start_of(model), ["a", "b", "c"]
    together = training.run(start, records, SeededStreams(4, ids, 0), noise)
    assert float(together.abs().min(1).values.max()) > 0
    for place, client in enumerate(ids):
        alone = training.run(
            start, records.select([place]), SeededStreams(4, [client], 0), None if noise is None else noise[:1]
        )
        torch.testing.assert_close(alone[0], together[place], rtol=1e-4, atol=1e-5)
    in_block = training.run(start, padded(records), SeededStreams(4, ids, 0), noise)
    torch.testing.assert_close(in_block, together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_plain_training_is_that_of_a_slow_loop(sampler: Any) -> None:
    model = logistic(6, 3)
    records = persons(model, [[1, 5, 12]])
    rate = {"rate": 1.0} if sampler == "poisson" else {"batch": 3}
    training = sgd(of_units(model, "patient"), sampler=sampler, steps=1, learning_rate=1.0, **rate)
    found = one_step(training, records, start_of(model), None)[0]
    torch.testing.assert_close(found, slow_sum(model, start_of(model), records, None) / 3, rtol=1e-4, atol=1e-6)


def test_batches_count_persons() -> None:
    """With rate 1/2 a person enters with all its records or with none."""
    model = binary_logistic(4)
    features = torch.eye(4).repeat_interleave(5, 0)
    edges = torch.arange(0, 21, 5)
    records = Records(features, torch.ones(20, dtype=torch.int64), torch.tensor([0, 4]), edges.unfold(0, 2, 1))
    training = dp_sgd(of_units(model, "patient"), rate=0.5, batch=1, steps=1, clip=100.0, learning_rate=1.0)
    seen = [
        training.run(torch.zeros(4), records, SeededStreams(seed, ["a"], 0), 0.0)[0] for seed in range(60)
    ]  # every person moves its own coordinate by 1/2
    moved = torch.stack(seen).mul(2).round().int()
    assert set(moved.flatten().tolist()) == {0, 1}
    assert 0.35 < float(moved.float().mean()) < 0.65


def test_a_person_of_many_records_does_not_make_the_batch_long() -> None:
    lengths = [*[1, 2, 3] * 100, 10_000]
    records = persons(logistic(6, 3), [lengths])
    batches = Batches(np.array([[len(lengths)]]), np.arange(len(lengths)))
    parts = split_by_length(batches, records, 200)
    assert sorted(np.concatenate([part.records for part, _ in parts]).tolist()) == list(range(len(lengths)))
    rows = sum(int(part.sizes.sum()) * most for part, most in parts)
    assert rows < 1.2 * sum(lengths)
    _sums_and_influence(logistic(6, 3), records, len(lengths) - 1)


def test_a_broken_record_spoils_its_own_person_alone() -> None:
    model = logistic(6, 3)
    records = persons(model, [[3, 2, 4]])
    records.features[1] = float("inf")
    torch.testing.assert_close(
        clipped(model, records), slow_sum(model, start_of(model), blanked(records, 0)), atol=1e-4, rtol=1e-3
    )


def test_examples_are_padded_with_their_own_records() -> None:
    records = persons(logistic(2, 2), [[2, 0, 3]])
    features, labels = examples_of(records, torch.tensor([0, 1, 2, 2]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert (labels != NO_RECORD).sum(1).tolist() == [2, 0, 3, 0]
    assert torch.equal(features[0, 2], records.features[0])
    assert not features[1].any()
    assert torch.equal(features[2], records.features[2:])
    only_empty = Records(
        torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), torch.tensor([0, 1]), torch.tensor([[0, 0]])
    )
    features, labels = examples_of(only_empty, torch.tensor([0]), None)
    assert features.shape == (1, 1, 2)
    assert labels.tolist() == [[NO_RECORD]]


def test_persons_and_single_records_are_not_confused() -> None:
    model = logistic(6, 3)
    records = persons(model, [[2, 3]])
    single = Records(records.features, records.labels, torch.tensor([0, 5]))
    options: dict[str, Any] = {"rate": 1.0, "batch": 1, "steps": 1, "clip": 1.0, "learning_rate": 1.0}
    with pytest.raises(InputError, match="takes single records as examples, but these are persons"):
        one_step(dp_sgd(model, **options), records, start_of(model))
    with pytest.raises(InputError, match="takes persons as examples, but these are single records"):
        one_step(dp_sgd(of_units(model, "patient"), **options), single, start_of(model))
    with pytest.raises(InputError, match="one of patients already"):
        of_units(of_units(model, "patient"), "doctor")


def test_the_unit_of_a_training_is_that_of_its_model() -> None:
    options: dict[str, Any] = {"rate": 0.1, "batch": 1, "steps": 1, "clip": 1.0, "learning_rate": 1.0}
    assert dp_sgd(logistic(6, 3), **options).unit == "record"
    assert dp_sgd(of_units(logistic(6, 3), "patient"), **options).unit == "person"


# Deployed


def exactly(seed: int) -> SeededStreams:
    return SeededStreams(seed, ["a"], 0, exact=True)


@pytest.mark.parametrize(
    "model", [logistic(6, 3), binary_logistic(6), binary_svm(6), mlp(6, (4,), 3), OTHERS["own module"], OTHERS["lstm"]]
)
def test_deployed_clients_train_like_simulated_ones_but_for_the_noise(model: Model) -> None:
    data = persons(model, [[1, 5, 2, 0, 12, 3, 1, 1]])
    training = dp_sgd(of_units(model, "patient"), rate=0.4, batch=3, steps=5, clip=CLIP, learning_rate=0.3)
    simulated = training.run(start_of(model), data, SeededStreams(5, ["a"], 0), 0.0)
    deployed = training.run(start_of(model), data, exactly(5), 1e-4)
    torch.testing.assert_close(deployed, simulated, atol=3e-3 * float(simulated.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("model", [logistic(6, 3), mlp(6, (4,), 3), OTHERS["own module"]])
def test_when_deployed_others_change_no_bit_of_a_person(model: Model) -> None:
    """Integer sums: with and without another person they differ by exactly that person's own."""
    data = persons(model, [[3, 1, 25, 2]])
    alone = RecordGradients(of_units(model, "patient"), start_of(model))
    grid = GridSum(CLIP, model.size, 1.0)
    whole = alone.total(data, [0, 1, 2, 3], grid)
    for person in range(4):
        kept = blanked(data, person)
        assert not alone.total(kept, [person], grid).any()
        assert torch.equal(whole - alone.total(kept, [0, 1, 2, 3], grid), alone.total(data, [person], grid))
        moved = float((alone.total(data, [person], grid) * grid.step).norm())
        assert moved <= CLIP * (1 + 1e-6) + grid.step * model.size**0.5


def test_a_deployed_client_takes_no_padding() -> None:
    data = padded(persons(logistic(6, 3), [[1, 5]]))
    training = dp_sgd(of_units(logistic(6, 3), "patient"), rate=0.4, batch=3, steps=1, clip=1.0, learning_rate=0.3)
    with pytest.raises(InputError, match="persons have no padding"):
        training.run(torch.zeros(21), data, exactly(5), 1.0)


@pytest.mark.parametrize(
    "spans", [[[0, 3], [2, 5]], [[0, 2], [2, 6]], [[-1, 2], [2, 5]], [[0, 5], [1, 2]], [[2, 0], [2, 5]]]
)
def test_persons_that_share_records_are_refused(spans: list[list[int]]) -> None:
    records = Records(torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64), torch.tensor([0, 2]), torch.tensor(spans))
    with pytest.raises(InputError, match="give every person rows of its own"):
        check_units(records)
    check_units(replace(records, units=torch.tensor([[3, 5], [0, 3], [3, 3]])))


@pytest.mark.parametrize("private", [True, False])
def test_a_padded_block_trains_alike_by_the_code_of_devices(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device the same code runs eagerly; batches and noise are drawn as on the CPU."""
    model = mlp(6, (4,), 3)
    records = persons(model, CLIENTS)
    trained = of_units(model, "patient")
    common: dict[str, Any] = {"steps": 4, "learning_rate": 0.3, "momentum": 0.5}
    training = dp_sgd(trained, batch=2, clip=CLIP, **common) if private else sgd(trained, batch=2, **common)
    noise = np.zeros(3) if private else None
    expected = training.run(start_of(model), records, SeededStreams(4, ["a", "b", "c"], 0), noise)
    monkeypatch.setattr("polyeps.training.train_on_cpu", partial(train_on_device, graphs={}))
    found = training.run(start_of(model), padded(records), SeededStreams(4, ["a", "b", "c"], 0), noise)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="one padded block"):
        training.run(start_of(model), records, SeededStreams(4, ["a", "b", "c"], 0), noise)


@pytest.mark.parametrize("name", ["logistic", "mlp", "lstm", "normalised"])
def test_no_weights_or_records_make_a_person_contribute_more_than_the_clip(name: str) -> None:
    """Magnitudes from 1e-20 to 1e18, and records of one person that nearly cancel."""
    model = {"logistic": LINEAR[0], "mlp": LINEAR[4], **OTHERS}[name]
    made, drawn = of_units(model, "patient"), torch.Generator().manual_seed(5)
    layout = Layout(6, (RowGroup(0, 6, 1, 0),), torch.arange(6))  # every person is a client of its own
    for trial in range(60):
        lengths = torch.randint(1, 12, (6,), generator=drawn).tolist()
        records = persons(model, [lengths], trial)
        if records.features.is_floating_point():
            records.features.mul_(10.0 ** torch.randint(-20, 19, (len(records.labels), 1), generator=drawn))
            if trial % 3 == 0:
                records.features[1::2] = -(1 + 1e-6) * records.features[: 2 * (len(records.labels) // 2) : 2]
        weights = torch.randn(model.size, generator=drawn) * 10.0 ** torch.randint(-18, 19, (1,), generator=drawn)
        clip = 10.0 ** int(torch.randint(-6, 3, (1,), generator=drawn))
        rows, labels = examples_of(records, torch.arange(6), None)
        into = torch.zeros(6, model.size)
        with torch.no_grad():
            clips = torch.full((6,), clip)
            add_gradients(made.network, made.loss, weights.expand(6, -1), rows, labels, layout, None, clips, into)
        assert float(into.double().norm(dim=1).max()) <= clip
