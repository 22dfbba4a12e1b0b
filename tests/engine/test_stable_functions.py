"""Elementwise functions round a record's numbers alike in any company, so that none makes another's gradient turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyeps.core import Records
from polyeps.engine.layout import lay_out, plan_exact, steps_of
from polyeps.engine.losses import Loss, RowWiseLoss
from polyeps.engine.network import add_gradients, add_rows, clip_rows, lower, record_gradients, row_gradients
from polyeps.engine.recurrent import LastState
from polyeps.engine.sampling import Batches
from polyeps.engine.stable_functions import UNEVEN, UNEVEN_MODULES, steady
from polyeps.engine.stable_products import multiply
from polyeps.engine.units import examples_of
from polyeps.models import Model, cross_entropy, of_units

STEADY = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="rounding was measured with torch 2.13")
KINDS = sorted(UNEVEN_MODULES, key=lambda kind: kind.__name__)


class Own(nn.Module):
    """A user's module, which no chain of known layers replaces."""

    def __init__(self, width: int, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, width), kind(), nn.Linear(width, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.act(self.first(rows))
        last: Tensor = self.last(hidden + 0 * hidden.flip(-1))
        return last


def turned(module: nn.Module, act: nn.Module, width: int, drawn: int, seed: int) -> float:
    """By how many clips a record before `drawn` others moves the sum, under a head that sees rounding alone."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randn(width, generator=generator)
    hidden = act(shift.repeat(64, 1))[0].detach().double()
    seen = torch.randn(width, generator=generator, dtype=torch.float64)
    seen -= (seen @ hidden) / (hidden @ hidden) * hidden
    head = torch.stack([seen, -seen, 0 * seen]).float() * 1e10
    models = torch.cat([torch.zeros(4 * width), shift, head.flatten(), torch.zeros(3)])[None]
    rows, labels = torch.rand(drawn + 1, 4, generator=generator), torch.full((drawn + 1,), 2)
    network, clip, sums = lower(module), torch.ones(1), []
    for some in (slice(1, None), slice(None)):
        into, count = torch.zeros_like(models), len(labels[some])
        layout = lay_out(1, [0, 1], np.array([count]), torch.device("cpu"))
        with torch.no_grad():
            add_gradients(network, cross_entropy, models, rows[some].clone(), labels[some], layout, None, clip, into)
        sums.append(into.double())
    return float(torch.linalg.vector_norm(sums[1] - sums[0]))


@STEADY
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_activation_rounds_away_does_not_depend_on_the_other_records(kind: type[nn.Module], own: bool) -> None:
    for width in (5, 11):
        act = kind()
        module = Own(width, kind) if own else nn.Sequential(nn.Linear(4, width), act, nn.Linear(width, 3))
        assert max(turned(module, act, width, drawn, seed) for drawn in (2, 12) for seed in range(6)) <= 1 + 1e-6


@STEADY
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_alike_at_any_place(kind: type[nn.Module], threads: int) -> None:
    act, before = kind(), torch.get_num_threads()
    torch.set_num_threads(threads)
    values = torch.linspace(-4, 4, 50)
    by_size = []
    for count in (1, 2, 31, 33, 70, 40_001):
        rows = values[:, None].expand(50, count) if count < 100 else values[:2, None].expand(2, count)
        for each in rows:
            leaf = each.clone(memory_format=torch.contiguous_format).requires_grad_()
            found = steady(act, leaf)
            (slope,) = torch.autograd.grad(found, leaf, torch.full_like(leaf, 0.7))
            assert len(torch.unique(found.detach())) == len(torch.unique(slope)) == 1
            by_size.append((float(each[0]), found[0].item(), float(slope[0])))
    torch.set_num_threads(before)
    assert len(set(by_size)) == len(values)
    torch.testing.assert_close(steady(act, values), act(values))


class Powers(nn.Module):
    """Functions and operators of several spellings, some in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(7))
        self.last = nn.Linear(7, 3)

    def forward(self, rows: Tensor) -> Tensor:
        gate = torch.sigmoid(self.scale * rows)
        bent = nn.functional.silu(rows * self.scale, inplace=True) + nn.functional.elu(rows * gate, 0.7, True)
        last: Tensor = self.last((bent.abs() + 0.1) ** 1.7 + 1.3**gate + gate.clone().sigmoid_())
        return last


def own_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.softplus(outputs[:, 0] * (1 - 2 * labels)) + (outputs.abs() ** 1.3).sum(1)


@STEADY
@pytest.mark.parametrize(
    "module",
    [Powers(), nn.Sequential(nn.Unflatten(1, (7, 1)), LastState(nn.LSTM(1, 3, batch_first=True)), nn.Linear(3, 3))],
)
@pytest.mark.parametrize("loss", [cross_entropy, RowWiseLoss(own_loss)])
def test_a_records_gradient_is_the_same_in_any_company(module: nn.Module, loss: Loss) -> None:
    torch.manual_seed(0)
    network = lower(module)
    vector, rows, labels = torch.randn(network.size), torch.randn(40, 7), torch.randint(0, 2, (40,))
    together = record_gradients(network, loss, vector, rows, labels)
    for first, last in ((0, 1), (3, 5), (1, 40), (36, 40)):
        some = slice(first, last)
        assert torch.equal(record_gradients(network, loss, vector, rows[some], labels[some]), together[some])
    leaf = vector.clone().requires_grad_()
    parts = torch.split(leaf, [p.numel() for p in module.parameters()])
    named = {name: part.view(p.shape) for part, (name, p) in zip(parts, module.named_parameters(), strict=True)}
    wanted = torch.autograd.grad(loss(torch.func.functional_call(module, named, rows[:1]), labels[:1]).sum(), leaf)[0]
    torch.testing.assert_close(together[0], wanted, rtol=1e-4, atol=1e-5)


def test_all_spellings_are_known() -> None:
    for function in (torch.sigmoid, Tensor.sigmoid_, nn.functional.gelu, nn.functional.elu_, Tensor.__pow__, torch.pow):
        assert function in UNEVEN


class Adapted(nn.Module):
    """LoRA: a frozen map and a trained one beside it, then a softmax over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(33, 7), nn.Linear(33, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.base.requires_grad_(False)
        self.last = nn.Linear(7, 3)

    def forward(self, rows: Tensor) -> Tensor:
        both = self.base(rows) + self.up(self.down(rows))
        last: Tensor = self.last(torch.softmax(both, 1) * both).mean(1)
        return last


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@STEADY
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Adapted(), (5, 33)),
        (nn.Sequential(frozen(nn.Linear(33, 7)), nn.Tanh(), nn.Linear(7, 3)), (33,)),
        (nn.Sequential(frozen(nn.Conv2d(3, 16, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(400, 3)), (3, 7, 7)),
        (nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 10)), (9,)),
        (nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3, dilation=2), nn.Flatten()), (3, 7, 7)),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_steps_of_any_size_round_a_record_alike(module: nn.Module, shape: tuple[int, ...], threads: int) -> None:
    """By the layouts that training plans, which never have a single row."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    network, rows, labels = lower(module), torch.randn(48, *shape), torch.randint(0, 3, (48,))
    model, clip = torch.randn(1, network.size), torch.ones(1)
    alone = []
    for first, count in ((0, 48), (0, 1), (0, 2), (0, 7), (0, 33)):
        some = np.arange(first, first + count)
        plan = plan_exact(Batches(np.array([[count]]), some))
        ((layout, _, records, valid),) = steps_of(plan, np.zeros(1, np.int64))
        with torch.no_grad():
            found = row_gradients(network, cross_entropy, model, rows[records], labels[records], layout, valid)
            factors = clip_rows(found, clip.index_select(0, layout.owner))
            factors[0], factors[1:] = 1, 0  # the sum of many is in float64
            into = torch.zeros_like(model)
            add_rows(network, found, factors, into)
        alone.append(into)
    torch.set_num_threads(before)
    assert all(torch.equal(each, alone[0]) for each in alone)


@STEADY
@pytest.mark.parametrize("outputs", [2, 3])
def test_few_outputs_do_not_depend_on_a_clients_place(outputs: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weights, row = torch.randn(outputs, 9, generator=generator), torch.randn(1, 9, generator=generator)
    models = weights.flatten().expand(7, -1).contiguous().view(7, outputs, 9)
    into = torch.empty(7, 5, outputs)
    multiply(row.expand(7, 5, 9).contiguous(), models.transpose(1, 2), None, into)
    assert all(torch.equal(each, into[0, 0]) for each in into.flatten(0, 1))


class Grouped(nn.Module):
    """Convolutions that run by torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2)
        self.last = nn.Linear(16, 3)

    def forward(self, rows: Tensor) -> Tensor:
        last: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(rows)))).flatten(1))
        return last


@STEADY
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(30, 5), (30,)),
        (nn.Sequential(nn.Linear(9, 2), nn.Tanh(), nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 3)), (9,)),
        (nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, 3)), None),
        (Grouped(), (3, 4, 4)),
    ],
)
def test_the_longest_person_of_a_batch_does_not_change_the_others(
    module: nn.Module, shape: tuple[int, ...] | None
) -> None:
    """All are padded to its length, by which sums over records were rounded apart."""
    kind = torch.int64 if shape is None else torch.float32
    model = of_units(Model(module, cross_entropy, shape or (6,), kind), "patient")
    vector = torch.randn(1, model.size, generator=torch.Generator().manual_seed(1))
    layout = lay_out(1, [0, 1], np.array([2]), torch.device("cpu"))
    for held in (1, 2, 3, 9):
        generator = torch.Generator().manual_seed(held)
        features = torch.randn(held + 150, *(shape or (6,)), generator=generator)
        features = features if shape else features.abs().long().clamp(max=4)
        labels, found = torch.randint(0, 3, (held + 150,), generator=generator), set()
        for longest in (1, 4, 14, 150):
            units = torch.tensor([[0, held], [held, held + longest]])
            records = Records(features, labels, torch.tensor([0, 2]), units)
            rows, targets = examples_of(records, torch.tensor([0, 1]), None)
            into = torch.zeros_like(vector)
            with torch.no_grad():
                each = row_gradients(model.network, model.loss, vector, rows, targets, layout, None)
                clip_rows(each, torch.ones(2))
                add_rows(model.network, each, torch.tensor([1.0, 0.0], dtype=torch.float64), into)
            found.add(into.numpy().tobytes())
        assert len(found) == 1
