"""Dropout and other randomness inside models: per record, from the client's own stream; and checks that can fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyeps.core import Records
from polyeps.engine import function_rules, module_mode, recurrent_rules
from polyeps.engine.cuda_graphs import train_on_device
from polyeps.engine.fallback_layers import LoopedLayer
from polyeps.engine.loop import Settings, train_on_cpu
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.engine.row_draws import RowDraws, client_keys
from polyeps.engine.uses import ProductUse
from polyeps.errors import InputError
from polyeps.models import Model, cross_entropy
from polyeps.training import dp_sgd

COUNTS = (5, 9, 3, 7)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    return Model(module, cross_entropy, (4,))


def records() -> Records:
    generator = torch.Generator().manual_seed(1)
    total = sum(COUNTS)
    spans = torch.tensor([0, *np.cumsum(COUNTS).tolist()])
    return Records(
        torch.randn(total, 4, generator=generator), torch.randint(0, 3, (total,), generator=generator), spans
    )


def settings(steps: int = 3, rate: float = 0.5) -> Settings:
    each = np.ones(len(COUNTS))
    return Settings(rate * each, np.full(len(COUNTS), steps), 0.3 * each, 4 * each, 0.5 * each, None, None, None, None)


def test_grouping_and_chunks_do_not_change_the_draws(model: Model) -> None:
    start = model.start(torch.Generator())
    data = records()
    training = dp_sgd(model, rate=0.5, steps=3, clip=1.0, learning_rate=0.3)
    whole = training.run(start, data, SeededStreams(3, range(4), 0), 0.0)
    small = dp_sgd(model, rate=0.5, steps=3, clip=1.0, learning_rate=0.3, memory=1)
    torch.testing.assert_close(small.run(start, data, SeededStreams(3, range(4), 0), 0.0), whole)
    again = training.run(start, data, SeededStreams(3, range(4), 0), 0.0)
    assert torch.equal(again, whole)
    assert not torch.allclose(training.run(start, data, SeededStreams(4, range(4), 0), 0.0), whole)


def test_the_device_draws_as_the_host_does(model: Model) -> None:
    start, data = model.start(torch.Generator()).expand(4, -1), records()
    host = train_on_cpu(model, start, start, data, SeededStreams(3, range(4), 0), settings())
    device = train_on_device(model, start, start, data, SeededStreams(3, range(4), 0), settings(), {})
    torch.testing.assert_close(device, host)


def test_a_step_is_the_mean_over_each_records_own_mask(model: Model) -> None:
    """One full batch without clipping, against plain torch with the masks written out."""
    start, data = model.start(torch.Generator()), records()
    streams = SeededStreams(3, range(4), 0)
    keys = client_keys(SeededStreams(3, range(4), 0))
    plain = settings(steps=1, rate=1.0)
    moved = train_on_cpu(model, start.expand(4, -1), start.expand(4, -1), data, streams, plain)
    for client, (first, last) in enumerate(data.spans.tolist()):
        total = torch.zeros_like(start)
        for record in range(first, last):
            draws = RowDraws(keys[client : client + 1], torch.tensor([record - first]), torch.tensor([0]))
            mask = (draws.words((1, 8)) < 2**31).float()[0] * 2
            leaf = start.clone().requires_grad_()
            parts = model.unflatten(leaf)
            hidden = torch.tanh(data.features[record : record + 1] @ parts["0.weight"].T + parts["0.bias"]) * mask
            loss = cross_entropy(hidden @ parts["3.weight"].T + parts["3.bias"], data.labels[record : record + 1])
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
            total += gradient * min(1.0, 0.5 / float(gradient.norm()))
        torch.testing.assert_close(moved[client], start - 0.3 * total / 4, rtol=1e-4, atol=1e-6)


def test_evaluation_is_in_eval_mode_and_leaves_the_mode(model: Model) -> None:
    vector, rows = model.start(torch.Generator()), torch.randn(6, 4)
    assert model.module.training
    assert torch.equal(model.outputs(vector, rows), model.outputs(vector, rows))
    torch.testing.assert_close(model.outputs(vector, rows)[2:3], model.outputs(vector, rows[2:3]))
    assert model.module.training
    assert model.module[2].training  # type: ignore[index]


def test_draws_are_independent_and_have_the_right_chances() -> None:
    draws = RowDraws(torch.arange(40), torch.zeros(40, dtype=torch.int64), torch.tensor([2]))
    first, second = draws.kept((1000,), 0.7).double(), draws.kept((1000,), 0.7).double()
    assert abs(first.mean() - 0.7) < 0.01
    assert abs(((first - 0.7) * (second - 0.7)).mean()) < 0.01
    assert abs(torch.corrcoef(first).fill_diagonal_(0)).max() < 0.2
    normals = draws.normals((5000,))
    assert abs(normals.mean()) < 0.02
    assert abs(normals.std() - 1) < 0.02
    uniforms = draws.uniforms((5000,))
    assert 0 <= uniforms.min() < 0.001
    assert 0.999 < uniforms.max() < 1


def test_deployed_clients_drop_too(model: Model) -> None:
    training = dp_sgd(model, rate=0.5, steps=2, clip=1.0, learning_rate=0.3)
    data = records()
    start = model.start(torch.Generator())
    one = Records(data.features[:9], data.labels[:9], torch.tensor([0, 9]))
    assert training.run(start, one, SystemStreams(1), 1.0).isfinite().all()
    exact = [training.run(start, one, SeededStreams(3, [0], 0, exact=True), 1.0) for _ in range(2)]
    assert torch.equal(*exact)


class Residual(nn.Module):
    """No chain, so that its parts run by the rules of functions."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, rows: Tensor) -> Tensor:
        for part in self.parts:
            rows = rows + part(rows)
        return rows


def test_a_wrong_rule_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of one in a hundred in a rule: the module then runs one row after the other."""

    def faulty(span: tuple[int, int], inputs: Tensor, gradients: Tensor) -> ProductUse:
        return ProductUse(span, inputs * 1.01, gradients)

    monkeypatch.setattr(function_rules, "ProductUse", faulty)
    with pytest.warns(UserWarning, match="not what autograd gives"):
        Model(Residual(nn.Linear(4, 4)), cross_entropy, (4,))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.filterwarnings("ignore:.*one row after the other")
def test_wrong_equations_of_a_recurrent_layer_are_not_used(
    kind: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks compare with torch's kernels, not with the equations themselves."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(4, 3, batch_first=True)

        def forward(self, rows: Tensor) -> Tensor:
            last: Tensor = self.layers(rows)[0][:, -1]
            return last + rows[:, -1, :3]

    def faulty(drive: Tensor, recur: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.tanh(drive + recur).chunk(len(drive[0, 0]) // 3, -1)[0] * 1.01 for _ in before)

    for function in (torch.rnn_tanh, torch.gru, torch.lstm):
        monkeypatch.setitem(module_mode._ROWS, function, recurrent_rules._layers_rule(faulty))
    broken = Model(Last(), cross_entropy, (5, 4))
    assert isinstance(broken.network.layers[0], LoopedLayer)
    monkeypatch.undo()
    assert not isinstance(Model(Last(), cross_entropy, (5, 4)).network.layers[0], LoopedLayer)


@pytest.mark.parametrize("seed", range(25))
def test_a_normalisation_of_two_numbers_is_accepted(seed: int) -> None:
    """Its gradient consists of rounding, which is not held against the module."""
    torch.manual_seed(seed)
    Model(nn.Sequential(nn.Linear(20, 2), nn.LayerNorm(2)), cross_entropy, (20,))
    Model(nn.Sequential(nn.Linear(20, 2, bias=False), nn.LayerNorm(2, elementwise_affine=False)), cross_entropy, (20,))


@pytest.mark.filterwarnings("ignore:.*one row after the other")
def test_the_slow_part_is_named() -> None:
    class Branching(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return torch.stack([row if row.sum() > 0 else -row for row in rows])

    with pytest.warns(
        UserWarning, match=r"Residual \(because of Branching at 'parts.1'\) runs one row after the other"
    ):
        Model(Residual(nn.Linear(4, 4), Branching()), cross_entropy, (4,))
    with pytest.raises(InputError, match="global generator in eval mode"):
        Model(Residual(nn.Linear(4, 4), Always()), cross_entropy, (4,))


class Always(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(rows)
