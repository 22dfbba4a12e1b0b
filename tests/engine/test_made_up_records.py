"""Modules that do not take every record, or all inputs by name: made-up records and calls are such as they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from polyeps.core import Records
from polyeps.engine.deployed_training import RecordGradients
from polyeps.engine.network import record_gradients
from polyeps.experiment.model_check import check_own_model
from polyeps.experiment.model_choice import GivenToModel
from polyeps.models import Model, from_module


class Read(nn.Module):
    """Takes no text without words."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(9, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        rows = rnn.pack_padded_sequence(self.e(tokens), lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = self.o(self.r(rows)[1][-1])
        return found


class Solve(nn.Module):
    """Takes no weights of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.o = nn.Parameter(torch.eye(4)), nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.o(rows @ torch.linalg.inv(self.w))
        return found


class OneBatch(nn.Module):
    """Takes all inputs in one dictionary."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(9, 3), nn.Linear(2, 3)

    def forward(self, batch: dict[str, Tensor], training: bool = False) -> Tensor:  # noqa: ARG002
        found: Tensor = self.words(batch["tokens"]).mean(1) + self.numbers(batch["numbers"])
        return found


def texts() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return {
        "tokens": torch.randint(0, 9, (6, 5), generator=drawn),
        "lengths": torch.randint(1, 6, (6,), generator=drawn),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Read, Solve])
def test_what_refuses_zeros_is_reckoned_and_trained(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = from_module(kind(), "cross-entropy", texts() if kind is Read else torch.randn(6, 4))
    assert model.floats_per_row > model.size
    assert not model.one_vector_a_row
    rows = model.sample.expand(2, *model.sample.shape[1:]).clone()
    alone = RecordGradients(model, model.start(torch.Generator()))
    alone.check(Records(rows, torch.tensor([0, 1]), torch.tensor([0, 2])))


def test_a_module_may_take_its_inputs_in_one_dictionary() -> None:
    torch.manual_seed(0)
    inputs = {"tokens": texts()["tokens"], "numbers": torch.randn(6, 2)}
    module = OneBatch()
    model = from_module(module, "cross-entropy", inputs)
    assert model.inputs is not None
    rows = torch.from_numpy(model.inputs.pack({name: np.asarray(part) for name, part in inputs.items()}))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    vector = model.start(torch.Generator())
    found = record_gradients(model.network, model.loss, vector, rows, labels)
    for row in range(6):
        loss = nn.functional.cross_entropy(module({n: v[row : row + 1] for n, v in inputs.items()}), labels[row, None])
        expected = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(module.parameters()))])
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore")
def test_a_sparse_table_is_timed_beside_plain_autograd() -> None:
    def sparse(_: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(8, classes))

    found = check_own_model("sparse", sparse, (2,), 3, torch.int64, given=GivenToModel())
    assert found.verdict == "right"
    assert found.seconds["autograd"] > 0


def test_a_compiled_module_is_trained_as_it_was() -> None:
    plain = nn.Sequential(nn.Linear(4, 3))
    model = Model(torch.compile(plain, backend="eager"), nn.CrossEntropyLoss(reduction="none"), (4,))  # type: ignore[arg-type]
    assert model.module is plain
    assert list(model.slices) == ["0.weight", "0.bias"]
