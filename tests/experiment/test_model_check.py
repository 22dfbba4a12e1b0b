"""The verdict on a user's module: right, slow where, random where, and faults that it must see."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyeps.engine.network import lower, record_gradients
from polyeps.errors import InputError
from polyeps.experiment import model_check
from polyeps.experiment.model_check import BATCHED, COPIED, INSIDE, LOOPED, ModelCheck, check_own_model
from polyeps.experiment.model_check_options import parse_shape
from polyeps.models import Model, cross_entropy


class Residual(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, 12)
        self.norm = nn.LayerNorm(12)
        self.drop = nn.ModuleList([nn.Dropout(0.1)])
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.last = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.flatten(1)))
        found: Tensor = self.last(x + self.drop[0](self.frozen(self.norm(x))))
        return found


class Einsum(Residual):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.mix = nn.Parameter(torch.randn(12, 12, 12) / 12)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.einsum("bi,ijk->bk", torch.relu(self.first(x.flatten(1))), self.mix))
        return found


class Branching(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row if row.sum() > 0 else 2 * row for row in super().forward(x)])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "_SECONDS", 0.0)


def checked(kind: Any, shape: tuple[int, ...] = (4, 4)) -> ModelCheck:
    return check_own_model("net", lambda shape, classes: kind(prod(shape), classes), shape, 3)


def test_a_module_with_rules_is_right() -> None:
    found = checked(Residual)
    assert found.verdict == "right"
    assert found.rows == 20
    assert found.deviation < 1e-5
    assert found.sum_deviation < 2e-5  # the clip has a margin of 2^-16 for rounding
    assert (found.trained, found.frozen) == (17 * 12 + 24 + 13 * 3, 13 * 12)
    assert found.random == ("Dropout at 'drop.0'",)
    assert [(part.path, part.way, part.parameters) for part in found.parts] == [("", INSIDE, found.trained)]
    assert set(found.seconds) == {"polyeps", "autograd", "one_by_one"}
    assert min(found.seconds.values()) > 0


def test_a_chain_is_listed_layer_by_layer() -> None:
    def make(shape: tuple[int, ...], classes: int) -> nn.Module:
        middle = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU())
        return nn.Sequential(nn.Conv2d(1, 4, 3), middle, nn.Flatten(), nn.Linear(16, classes))

    found = check_own_model("net", make, (1, 4, 4), 3)
    assert [(part.path, part.kind, part.parameters) for part in found.parts] == [
        ("0", "Conv2d", 40),
        ("1.0", "GroupNorm", 8),
        ("3", "Linear", 51),
    ]
    assert {part.way for part in found.parts} == {BATCHED}
    assert found.random == ()


def test_slow_parts_are_named() -> None:
    copied = checked(Einsum)
    assert copied.verdict == "right, slow in parts"
    (slow,) = [part for part in copied.parts if part.slow]
    assert (slow.path, slow.way, slow.parameters) == ("mix", COPIED, 12**3)
    assert "Einsum does with 'mix'" in slow.because
    assert sum(part.parameters for part in copied.parts) == copied.trained
    (looped,) = checked(Branching).parts
    assert (looped.path, looped.way) == ("", LOOPED)
    assert "branches on a record's values" in looped.because


def test_tokens_and_own_losses() -> None:
    def tokens(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(4 * prod(shape), classes))

    assert check_own_model("net", tokens, (5,), 3, torch.int64).parts[0].kind == "Embedding"

    def regression(shape: tuple[int, ...], classes: int) -> Model:
        return Model(nn.Linear(prod(shape), classes), lambda found, wanted: (found[:, 0] - wanted) ** 2, shape)

    assert check_own_model("net", regression, (5,), 2).deviation < 1e-5


def test_the_module_is_left_as_it_was() -> None:
    module = Residual(16, 3)
    check_own_model("net", lambda *_: module, (16,), 3)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, lambda *_: nn.Tanh(), lambda *_: nn.Linear(16, 5)])
def test_refused_modules(kind: Any) -> None:
    with pytest.raises(InputError):
        checked(kind, (16,))


def test_wrong_gradients_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(*arguments: Any) -> Tensor:
        return 1.01 * record_gradients(*arguments)

    monkeypatch.setattr(model_check, "record_gradients", scaled)
    assert 0.009 < checked(Residual).deviation < 0.011


def test_a_network_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Any) -> Model:
        model = Model(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)), cross_entropy, (16,))
        wrong = lower(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)))
        object.__setattr__(model, "network", wrong)
        return model

    monkeypatch.setattr(model_check, "own_model", faulty)
    with pytest.raises(InputError, match="is not what autograd gives"):
        checked(Residual, (16,))


@pytest.mark.parametrize("text", ["", "3,", "0", "-1,2", "a", "3x3", "1.5"])
def test_shapes_are_whole_numbers(text: str) -> None:
    with pytest.raises(InputError, match="--shape is"):
        parse_shape(text)
