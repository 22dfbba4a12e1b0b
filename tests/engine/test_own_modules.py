"""Modules of a user's own: rows apart whatever they do, no rule for what is not the module it was made for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from reference.local_training import clipped_sum
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

from polyeps.engine.fallback_layers import LoopedLayer, VmapLayer
from polyeps.engine.layers import Linear, Parameterless
from polyeps.engine.layout import lay_out
from polyeps.engine.network import add_gradients, record_gradients
from polyeps.engine.recurrent import LastState
from polyeps.errors import InputError
from polyeps.models import Model, cross_entropy, from_module


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    torch.manual_seed(0)


class Does(nn.Module):
    """What a function does, without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, rows: Tensor) -> Tensor:
        return self.function(rows)


class Own(nn.Module):
    """What a function of a linear layer and the rows does."""

    def __init__(self, function: Callable[[nn.Linear, Tensor], object]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(4, 3), function

    def forward(self, rows: Tensor) -> object:
        return self.function(self.inner, rows)


def sandwich(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 3))


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda _module, _inputs, outputs: 2 * outputs)
    return module


def prehooked(module: nn.Module) -> nn.Module:
    module.register_forward_pre_hook(lambda _module, inputs: (inputs[0].flip(1),))
    return module


def patched(module: nn.Module) -> nn.Module:
    before = module.forward
    module.forward = lambda rows: before(rows).flip(1)
    return module


def pruned(module: nn.Module) -> nn.Module:
    prune.l1_unstructured(module, "weight", 0.5)  # type: ignore[no-untyped-call]
    return module


def unpruned(module: nn.Module) -> nn.Module:
    prune.remove(pruned(module), "weight")  # type: ignore[no-untyped-call]
    return module


def unparametrized(module: nn.Module) -> nn.Module:
    parametrizations.weight_norm(module)
    parametrize.remove_parametrizations(module, "weight")
    return module


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        return nn.utils.weight_norm(module)


def without_weight_norm(module: nn.Module) -> nn.Module:
    return nn.utils.remove_weight_norm(old_weight_norm(module))


class Doubled(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        return 2 * super().forward(rows)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.gain


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "hook": hooked,
    "pre-hook": prehooked,
    "patched": patched,
    "pruned": pruned,
    "pruning removed": unpruned,
    "weight norm": old_weight_norm,
    "parametrization removed": unparametrized,
    "weight norm removed": without_weight_norm,
}


def agrees_with_autograd(model: Model, rows: Tensor, clients: tuple[int, ...] = (3, 4)) -> None:
    """Clipped sums of clients with weights of their own, and single records, against one example at a time."""
    generator = torch.Generator().manual_seed(9)
    count = len(clients)
    models = model.start(generator) + 0.2 * torch.randn(count, model.size, generator=generator)
    labels = torch.randint(0, 3, (len(rows),), generator=generator)
    sums = torch.zeros_like(models)
    layout = lay_out(count, list(range(count + 1)), np.array(clients), torch.device("cpu"))
    if len(set(clients)) == 1:
        layout = lay_out(count, [0, count], np.array(clients[:1]), torch.device("cpu"))
    with torch.no_grad():
        add_gradients(model.network, model.loss, models, rows, labels, layout, None, torch.full((count,), 0.3), sums)
    first = 0
    for vector, size, found in zip(models, clients, sums, strict=True):
        mine = slice(first, first + size)
        torch.testing.assert_close(
            found, clipped_sum(model, vector, rows[mine], labels[mine], 0.3), rtol=1e-4, atol=2e-5
        )
        first += size
    alone = record_gradients(model.network, model.loss, models[0], rows[:1], labels[:1])[0]
    wanted = clipped_sum(model, models[0], rows[:1], labels[:1], float("inf"))
    torch.testing.assert_close(alone, wanted, rtol=1e-4, atol=1e-5)


def rows_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:.*one row after the other")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["first", "last", "all"])
def test_no_rule_is_used_for_a_module_that_was_changed(change: str, where: str) -> None:
    first, last = nn.Linear(4, 5), nn.Linear(5, 3)
    if where in ("first", "all"):
        first = CHANGES[change](first)  # type: ignore[assignment]
    if where in ("last", "all"):
        last = CHANGES[change](last)  # type: ignore[assignment]
    model = Model(nn.Sequential(first, nn.Tanh(), last), cross_entropy, (4,))
    rules = sum(isinstance(layer, Linear) for layer in model.network.layers)
    assert rules == (0 if where == "all" else 1)
    agrees_with_autograd(model, rows_of(7, 4))


@pytest.mark.parametrize("change", ["hook", "pre-hook", "patched"])
@pytest.mark.parametrize("kind", ["relu", "sequential", "pooling", "last state"])
def test_hooks_count_wherever_they_are(kind: str, change: str) -> None:
    changed = CHANGES[change]
    if kind == "relu":
        module, rows = sandwich(changed(nn.ReLU())), rows_of(7, 4)
    elif kind == "sequential":
        module, rows = changed(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))), rows_of(7, 4)
    elif kind == "pooling":
        module = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), changed(nn.MaxPool2d(2)), nn.Flatten(), nn.Linear(12, 3))
        rows = rows_of(7, 1, 4, 4)
    else:
        module, rows = changed(LastState(nn.LSTM(4, 3, batch_first=True))), rows_of(7, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Model(module, cross_entropy, tuple(rows.shape[1:]))
    agrees_with_autograd(model, rows)


def test_hooks_that_come_later_do_not_reach_what_runs_on_all_rows() -> None:
    relu = nn.ReLU()
    model = Model(sandwich(relu), cross_entropy, (4,))
    hooked(relu)
    layer = next(layer for layer in model.network.layers if isinstance(layer, Parameterless))
    assert torch.equal(layer.module(torch.ones(2)), torch.ones(2))


def test_subclasses_and_other_shapes_have_no_rule() -> None:
    other = nn.Linear(9, 9)
    other.weight, other.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.zeros(5))
    for module in (nn.Sequential(Doubled(4, 5), nn.Linear(5, 3)), nn.Sequential(other, nn.Linear(5, 3))):
        model = Model(module, cross_entropy, (4,))
        assert isinstance(model.network.layers[0], VmapLayer)
        agrees_with_autograd(model, rows_of(7, 4))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_prelu_is_right_for_any_number_of_clients_and_rows(width: int, count: int) -> None:
    model = Model(nn.Sequential(nn.Linear(4, width), nn.PReLU(width), nn.Linear(width, 3)), cross_entropy, (4,))
    for size in (2, 3, 4):
        agrees_with_autograd(model, rows_of(count * size, 4), (size,) * count)
    images = nn.Sequential(nn.Conv2d(1, width, 1), nn.PReLU(width), nn.Flatten(), nn.Linear(width * 4, 3))
    agrees_with_autograd(Model(images, cross_entropy, (1, 2, 2)), rows_of(count * count, 1, 2, 2), (count,) * count)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows - rows.mean(0),
        lambda rows: rows / rows.detach().std(),
        lambda rows: rows.flip(0),
        lambda rows: rows.cumsum(0),
        lambda rows: rows * (1 + (rows.detach().abs() > 3).any()),
    ],
    ids=["centred", "scaled", "flipped", "cumulated", "quiet branch"],
)
@pytest.mark.parametrize("example", ["random", "equal"])
def test_what_mixes_rows_is_refused_whatever_the_example(function: Callable[[Tensor], Tensor], example: str) -> None:
    rows = torch.zeros(2, 4) if example == "equal" else rows_of(4, 4)
    with pytest.raises(InputError, match="depends on the other examples"):
        from_module(sandwich(Does(function)), cross_entropy, rows)


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_branch_that_no_probe_takes_runs_row_by_row(with_weights: bool) -> None:
    """One client's record beyond the threshold must change no other row."""

    def scaled(rows: Tensor) -> Tensor:
        return rows / rows.abs().max() if rows.abs().max() > 1e6 else rows

    module = Own(lambda inner, rows: scaled(inner(rows))) if with_weights else sandwich(Does(scaled))
    with pytest.warns(UserWarning, match=r"(Does|Own) runs one row after the other"):
        model = Model(module, cross_entropy, (4,))
    assert sum(isinstance(layer, LoopedLayer) for layer in model.network.layers) == 1
    vector = model.start(torch.Generator())
    rows, labels = rows_of(3, 4), torch.tensor([0, 1, 2])
    calm = record_gradients(model.network, model.loss, vector, rows, labels)
    rows[0] = 1e8
    assert torch.equal(record_gradients(model.network, model.loss, vector, rows, labels)[1:], calm[1:])
    agrees_with_autograd(model, rows_of(7, 4))


def test_an_own_module_without_parameters_runs_one_row_at_a_time() -> None:
    model = Model(sandwich(Does(lambda rows: 2 * torch.sin(rows))), cross_entropy, (4,))
    assert [type(layer) for layer in model.network.layers] == [Linear, VmapLayer, Linear]
    agrees_with_autograd(model, rows_of(7, 4))


@pytest.mark.filterwarnings("ignore:.*one row after the other")
@pytest.mark.parametrize(
    "module",
    [
        sandwich(Scalar()),
        sandwich(Does(lambda rows: rows.mul_(2))),
        nn.Sequential(Does(lambda rows: rows.add_(1).relu_()), nn.Linear(4, 3)),
        Own(lambda inner, rows: inner(rows.mul_(2))),
        Own(lambda inner, rows: torch.utils.checkpoint.checkpoint(inner, rows, use_reentrant=False)),
        sandwich(nn.Dropout(0.5).eval()),
        sandwich(nn.Softmax(1)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)),
    ],
    ids=["0-dim", "in place", "in place first", "own in place", "checkpoint", "dropout in eval", "softmax", "relu"],
)
def test_what_crashed_is_right(module: nn.Module) -> None:
    agrees_with_autograd(Model(module, cross_entropy, (4,)), rows_of(7, 4))


class RunningMean(nn.Module):
    """Keeps a mean over examples where no check of buffers sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean = nn.Linear(4, 3), 0.0

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * float(rows.detach().mean())
        return cast(Tensor, self.inner(rows - self.mean))


class Remembers(nn.Module):
    """Keeps its last hidden values to look at, and does not use them: a chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.hidden: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        self.hidden = torch.relu(self.first(rows))
        return cast(Tensor, self.second(self.hidden))


def test_making_a_model_leaves_no_symbols_in_a_module() -> None:
    module = Remembers()
    agrees_with_autograd(Model(module, cross_entropy, (4,)), rows_of(7, 4))
    assert module.hidden is None or isinstance(module.hidden, Tensor)


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "lstm": (lambda: nn.LSTM(4, 3, batch_first=True), (5, 4), "returns a tuple.*none of them called logits.*output"),
    "gru": (lambda: nn.Sequential(nn.GRU(4, 3, batch_first=True)), (5, 4), "returns a tuple"),
    "dictionary": (lambda: Own(lambda inner, rows: {"scores": inner(rows), "hidden": rows}), (4,), "returns a dict"),
    "two outputs": (lambda: Own(lambda inner, rows: (inner(rows), rows)), (4,), "returns a tuple"),
    "two inputs": (lambda: nn.Bilinear(4, 4, 3), (4,), "cannot be run on one tensor"),
    "bfloat16": (lambda: nn.Linear(4, 3).bfloat16(), (4,), "bfloat16.*float32"),
    "rows flattened": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), (4,), "for 5 examples"),
    "own dropout": (lambda: Own(lambda inner, rows: functional.dropout(inner(rows))), (4,), "global generator"),
    "noise": (lambda: sandwich(Does(lambda rows: rows + torch.rand_like(rows))), (4,), "global generator"),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), (4,), "changes its buffer"),
    "running mean in an attribute": (RunningMean, (4,), "depends on the examples it saw before"),
    "softmax of rows": (lambda: sandwich(nn.Softmax(0)), (4,), "depends on the other examples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_in_a_sentence(name: str) -> None:
    build, shape, sentence = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of lazy modules
        module = build()
    state = torch.random.get_rng_state()
    with pytest.raises(InputError, match=sentence):
        Model(module, cross_entropy, shape)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_gradient_hooks_and_wide_rows_are_refused() -> None:
    linear = nn.Linear(4, 3)
    linear.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match="hooks on its gradient"):
        Model(linear, cross_entropy, (4,))
    with pytest.raises(InputError, match="float32 or whole numbers"):
        Model(nn.Linear(4, 3), cross_entropy, (4,), torch.float64)


@pytest.mark.parametrize("token", [-1, 7, 100])
def test_tokens_outside_the_table_are_refused(token: int) -> None:
    module = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 3))
    model = Model(module, cross_entropy, (2,), torch.int64)
    rows = torch.tensor([[1, 2], [3, token]])
    with pytest.raises(InputError, match=f"token {token}; the embedding has tokens 0 to 6"):
        record_gradients(model.network, model.loss, torch.zeros(model.size), rows, torch.tensor([0, 1]))
