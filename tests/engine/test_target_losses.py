"""Named losses of every target against plain torch, one row at a time, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyeps.core import Records
from polyeps.data.named_inputs import inputs_of
from polyeps.data.targets import IGNORED, LOSS_TARGETS, NAMES, Target, default_loss, example_targets
from polyeps.engine.losses import cross_entropy, is_row_wise_loss
from polyeps.engine.network import output_gradients
from polyeps.engine.noise import SeededStreams
from polyeps.engine.target_losses import LOSSES, loss_named
from polyeps.engine.units import UnitLoss, examples_of, is_record
from polyeps.errors import InputError
from polyeps.models import Model, from_module, of_units
from polyeps.training import dp_sgd

PLAIN: dict[str, Any] = {
    "squared": functional.mse_loss,
    "absolute": functional.l1_loss,
    "huber": functional.huber_loss,
    "multi-label": functional.binary_cross_entropy_with_logits,
    "soft-cross-entropy": functional.cross_entropy,
}


def test_every_loss_says_what_it_takes() -> None:
    assert list(LOSSES) == list(LOSS_TARGETS)
    assert {default_loss(target) for target in NAMES} <= set(LOSSES)
    assert all(is_row_wise_loss(loss) for loss in LOSSES.values())
    with pytest.raises(InputError, match="no loss 'mse'; known are cross-entropy"):
        loss_named("mse")


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_losses_and_their_gradients_are_those_of_torch(name: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    outputs = scale * torch.randn(7, 4, generator=generator)
    targets = torch.from_numpy(example_targets(LOSS_TARGETS[name][0], (4,), 4, 7))
    for row in range(7):
        leaf = outputs[row : row + 1].clone().requires_grad_()
        value = PLAIN[name](leaf, targets[row : row + 1])
        (wanted,) = torch.autograd.grad(value, leaf)
        loss = loss_named(name)
        torch.testing.assert_close(loss(outputs, targets)[row], value.detach())
        torch.testing.assert_close(output_gradients(loss, outputs, targets, None)[row], wanted[0])
    if name != "soft-cross-entropy":  # one number a row, with or without a dimension for it
        for some, other in ((outputs[:, 0], targets[:, :1]), (outputs[:, :1], targets[:, 0])):
            assert output_gradients(loss_named(name), some, other, None).shape == some.shape


def test_ignored_positions_count_for_nothing() -> None:
    generator = torch.Generator().manual_seed(4)
    outputs = torch.randn(4, 5, 3, generator=generator)
    labels = torch.randint(0, 3, (4, 5), generator=generator)
    labels[0, 2:] = labels[1] = labels[2, 0] = IGNORED
    for row in range(4):
        kept = labels[row] != IGNORED
        wanted = functional.cross_entropy(outputs[row][kept], labels[row][kept]) if kept.any() else torch.tensor(0.0)
        torch.testing.assert_close(cross_entropy(outputs, labels)[row], wanted)
    gradients = cross_entropy.gradients(outputs, labels)
    assert not gradients[labels == IGNORED].any()
    leaf = outputs.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(cross_entropy(leaf, labels).sum(), leaf)
    torch.testing.assert_close(gradients, wanted)
    broken = outputs.clone()
    broken[labels == IGNORED] = float("nan")
    torch.testing.assert_close(cross_entropy.gradients(broken, labels), gradients)


@pytest.mark.parametrize(
    ("name", "outputs", "targets"),
    [
        ("squared", (5, 3), (5,)),
        ("squared", (5,), (5, 3)),
        ("multi-label", (5, 3), (5, 2)),
        ("soft-cross-entropy", (5, 3), (5,)),
        ("cross-entropy", (5, 4, 3), (5,)),
        ("cross-entropy", (5, 3, 4), (5, 4)),
        ("binary-logistic", (5, 2), (5,)),
        ("binary-hinge", (5, 2), (5,)),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(
    name: str, outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    whole = LOSS_TARGETS[name][0] == "class"
    given = torch.zeros(targets, dtype=torch.int64) if whole else torch.zeros(targets)
    with pytest.raises(InputError, match=r"outputs? "):
        loss_named(name)(torch.zeros(outputs), given)
    with pytest.raises(InputError, match=r"outputs? "):
        output_gradients(loss_named(name), torch.zeros(outputs), given, None)


@pytest.mark.parametrize("target", ["sequence", "number", "soft", "labels"])
def test_persons_padded_for_devices_train_as_those_without_padding(target: Target) -> None:
    model: Model = from_module(
        nn.Linear(6, 3),
        default_loss(target),
        torch.randn(4, *((2, 6) if target == "sequence" else (6,))),
    )
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(8, *model.input_shape, generator=generator)
    targets = torch.from_numpy(example_targets(target, (2,) if target == "sequence" else (3,), 3, 8))
    units = torch.tensor([[0, 3], [3, 3], [3, 4], [4, 8]])
    persons = of_units(model, "patient")
    records = Records(features, targets, torch.tensor([0, 2, 4]), units)
    block, labels = examples_of(records, torch.arange(4), None)
    assert is_record(labels).sum(1).tolist() == [3, 0, 1, 4]
    padded = Records(block, labels, records.offsets, padded=True)
    assert isinstance(persons.loss, UnitLoss)
    training = dp_sgd(persons, rate=1.0, batch=2, steps=3, clip=0.3, learning_rate=0.5)
    start = 0.1 * torch.randn(model.size, generator=generator)
    found = [training.run(start, each, SeededStreams(1, ["a", "b"], 0), 0.0) for each in (records, padded)]
    torch.testing.assert_close(*found)
    assert float(found[0].abs().max()) > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_target_that_is_no_number_moves_nobody(value: float) -> None:
    model = from_module(nn.Linear(3, 2), "squared", torch.randn(4, 3))
    drawn = torch.Generator().manual_seed(6)
    features, targets = torch.randn(6, 3, generator=drawn), torch.randn(6, 2, generator=drawn)
    training = dp_sgd(model, rate=1.0, batch=3, steps=2, clip=0.5, learning_rate=0.5)

    def trained(targets: Tensor, rows: slice) -> Tensor:
        data = Records(features[rows], targets[rows], torch.tensor([0, len(features[rows])]))
        return training.run(torch.zeros(model.size), data, SeededStreams(2, ["a"], 0), 0.0)

    broken = targets.clone()
    broken[5, 0] = value
    torch.testing.assert_close(trained(broken, slice(6)), trained(targets, slice(5)))


def test_features_of_other_types_are_refused_in_training() -> None:
    model = from_module(nn.Linear(3, 2), "cross-entropy", torch.randn(4, 3))
    training = dp_sgd(model, rate=1.0, batch=1, steps=1, clip=1.0, learning_rate=1.0)
    data = Records(torch.zeros(2, 3, dtype=torch.float64), torch.tensor([0, 1]), torch.tensor([0, 2]))
    with pytest.raises(InputError, match=r"call float\(\) on the features"):
        training.run(torch.zeros(model.size), data, SeededStreams(1, ["a"], 0), np.float64(0.0))


@pytest.mark.parametrize("persons", [False, True])
@pytest.mark.parametrize("target", ["sequence", "number", "soft", "labels"])
def test_a_deployed_client_trains_as_a_simulated_one_but_for_the_noise(target: Target, persons: bool) -> None:
    """Two inputs, one of them whole, and a dictionary of outputs."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.line = nn.Embedding(9, 5), nn.Linear(5, 3)

        def forward(self, code: Tensor, amount: Tensor) -> dict[str, Tensor]:
            hidden = self.table(code) + amount
            return {"logits": self.line(hidden if target == "sequence" else hidden.mean(1)), "hidden": hidden}

    drawn = torch.Generator().manual_seed(8)
    inputs = {"code": torch.randint(0, 9, (24, 2), generator=drawn), "amount": torch.randn(24, 2, 5, generator=drawn)}
    model = from_module(Two(), default_loss(target), inputs)
    targets = torch.from_numpy(example_targets(target, (2,) if target == "sequence" else (3,), 3, 24))
    rows = torch.from_numpy(inputs_of(inputs).pack(inputs))
    data = Records(rows, targets, torch.tensor([0, 24]))
    if persons:
        model = of_units(model, "patient")
        edges = torch.tensor([0, 1, 4, 4, 10, 12, 17, 24])
        data = Records(rows, targets, torch.tensor([0, 7]), edges.unfold(0, 2, 1))
    training = dp_sgd(model, rate=0.5, batch=6, steps=5, clip=0.4, learning_rate=0.5)
    start = model.start(drawn)
    simulated = training.run(start, data, SeededStreams(3, ["a"], 0), 0.0)
    deployed = training.run(start, data, SeededStreams(3, ["a"], 0, exact=True), 1e-4)
    assert float(simulated.norm()) > 0
    assert float((simulated - deployed).norm()) < 5e-3 * float(simulated.norm())


def test_other_targets_than_those_stated_are_refused() -> None:
    stated = from_module(
        nn.Linear(3, 2), lambda o, t: (o - t).square().sum(1), torch.randn(4, 3), targets=torch.zeros(2, 2)
    )
    for model, units in ((stated, None), (of_units(stated, "patient"), torch.tensor([[0, 2], [2, 3]]))):
        data = Records(torch.zeros(3, 3), torch.zeros(3), torch.tensor([0, 3 if units is None else 2]), units)
        training = dp_sgd(model, rate=1.0, batch=1, steps=1, clip=1.0, learning_rate=1.0)
        with pytest.raises(InputError, match=r"takes targets of shape \(2,\) for each record, but these are \(\)"):
            training.run(torch.zeros(model.size), data, SeededStreams(1, ["a"], 0), 0.0)
