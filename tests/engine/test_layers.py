"""Every rule against the `vmap` fallback, the plain loop and Opacus."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from reference.local_training import clipped_sum
from torch import Tensor, nn

from polyeps.engine.fallback_layers import VmapLayer
from polyeps.engine.layout import Layout, lay_out
from polyeps.engine.network import Network, add_gradients, lower
from polyeps.engine.recurrent import LastState
from polyeps.models import MODELS, Model, cross_entropy, from_module

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

SIZES = np.array([4, 2, 0, 1])  # rows of four clients; one has none


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    torch.manual_seed(0)  # torch's layers start from the global generator; only tests may touch it


class Mean(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.mean(1)


class Gated(nn.Module):
    """A module no rule knows, with parameters used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.full((6,), 0.7))

    def forward(self, rows: Tensor) -> Tensor:
        gated: Tensor = torch.sigmoid(self.inner(rows)) * self.gain + self.inner(rows)
        return gated


def tied() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 4))
    network[0].requires_grad_(False)
    network[2].get_parameter("bias").requires_grad_(False)
    return network


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)), (6,)),
    "linear on sequences": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU(), Mean(), nn.Linear(5, 4)),
        (3, 6),
    ),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0)),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 4, 2, padding="same", bias=False),
            nn.Flatten(),
        ),
        (2, 6, 8),
    ),
    "dilated convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2, dilation=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (2, 6, 6),
    ),
    "pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.MaxPool2d(2, stride=1), nn.Conv2d(3, 4, 2), nn.AvgPool2d(2), nn.Flatten()
        ),
        (1, 8, 8),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), Mean(), nn.LayerNorm(5, bias=False), nn.Linear(5, 4)),
        (3, 6),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)),
        (2, 6, 6),
    ),
    "reshape": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 2), nn.Sequential(nn.Flatten())),
        (16,),
    ),
    "unknown": (lambda: nn.Sequential(nn.Linear(5, 6), Gated(), nn.Linear(6, 4)), (5,)),
    "tied": (tied, (6,)),
    "frozen": (frozen, (6,)),
}
TOKENS = {
    "embedding": lambda: nn.Sequential(nn.Embedding(7, 5, padding_idx=0), Mean(), nn.Linear(5, 4)),
    "lstm": lambda: nn.Sequential(
        nn.Embedding(7, 5), LastState(nn.LSTM(5, 6, num_layers=2, batch_first=True)), nn.Linear(6, 4)
    ),
    "lstm without bias": lambda: nn.Sequential(
        nn.Embedding(7, 5), LastState(nn.LSTM(5, 4, batch_first=True, bias=False))
    ),
}


def examples(name: str, rows: int) -> tuple[Model, Tensor]:
    """The model of a network above, and input rows for it."""
    generator = torch.Generator().manual_seed(3)
    if name in TOKENS:
        features = torch.randint(0, 7, (rows, 6), generator=generator)  # 7 words, 6 places: words recur
        return from_module(TOKENS[name](), cross_entropy, features), features
    build, shape = NETWORKS[name]
    features = torch.randn(rows, *shape, generator=generator)
    return from_module(build(), cross_entropy, features), features


def layouts() -> dict[str, Layout]:
    cpu = torch.device("cpu")
    return {
        "exact": lay_out(4, [0, 1, 2, 3, 4], SIZES, cpu),
        "grouped": lay_out(4, [0, 2, 4], np.array([4, 1]), cpu),
    }


def packed(rows: Tensor, layout: str) -> tuple[Tensor, Tensor | None]:
    """Seven rows as a layout wants them, and which rows count."""
    if layout == "exact":
        return rows, None
    place = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 0, 6])
    return rows[place], torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0, 0, 1])


def batched(
    model: Model, network: Network, models: Tensor, features: Tensor, labels: Tensor, layout: str, clip: float
) -> Tensor:
    into = torch.zeros_like(models)
    rows, valid = packed(features, layout)
    limit = None if clip == float("inf") else torch.full((4,), clip)
    with torch.no_grad():
        add_gradients(
            network,
            model.loss,
            models,
            rows,
            packed(labels, layout)[0],
            layouts()[layout],
            valid,
            limit,
            into,
        )
    return into


def looped(model: Model, models: Tensor, features: Tensor, labels: Tensor, clip: float) -> Tensor:
    sums, first = [], 0
    for vector, size in zip(models, SIZES, strict=True):
        rows = slice(first, first + size)
        sums.append(clipped_sum(model, vector, features[rows], labels[rows], clip))
        first += size
    return torch.stack(sums)


def setting(model: Model) -> tuple[Tensor, Tensor]:
    """Four different models, and labels for seven rows."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 2, (7,), generator=generator)
    start = model.start(generator)
    return start + 0.1 * torch.randn(4, model.size, generator=generator), labels


@pytest.mark.parametrize("clip", [0.5, float("inf")])
@pytest.mark.parametrize("layout", ["exact", "grouped"])
@pytest.mark.parametrize("name", [*NETWORKS, *TOKENS])
def test_sums_equal_the_plain_loop(name: str, layout: str, clip: float) -> None:
    model, features = examples(name, 7)
    models, labels = setting(model)
    found = batched(model, model.network, models, features, labels, layout, clip)
    torch.testing.assert_close(found, looped(model, models, features, labels, clip), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*NETWORKS, "embedding"])  # torch's own LSTM does not go through vmap
def test_rules_equal_the_fallback(name: str) -> None:
    model, features = examples(name, 7)
    models, labels = setting(model)
    fallback = Network((VmapLayer(model.module),))
    rules = batched(model, model.network, models, features, labels, "exact", 0.5)
    mapped = batched(model, fallback, models, features, labels, "exact", 0.5)
    torch.testing.assert_close(rules, mapped, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "mapped"), [("unknown", 1), ("tied", 1), ("dilated convolution", 1), ("frozen", 1), ("lstm", 0)]
)
def test_only_what_has_no_rule_falls_back(name: str, mapped: int) -> None:
    model, _ = examples(name, 2)
    assert sum(isinstance(layer, VmapLayer) for layer in model.network.layers) == mapped


def test_a_subclass_gets_no_rule() -> None:
    class Doubled(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return 2 * super().forward(rows)

    assert isinstance(lower(nn.Sequential(Doubled(3, 2))).layers[0], VmapLayer)


def model_rows(name: str) -> tuple[Model, Tensor]:
    model = MODELS[name]() if name != "lstm" else MODELS["lstm"](length=7)
    generator = torch.Generator().manual_seed(8)
    if model.input_type == torch.int64:
        return model, torch.randint(0, 4227, (7, *model.input_shape), generator=generator)
    return model, torch.rand(7, *model.input_shape, generator=generator)


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_the_plain_loop(name: str) -> None:
    model, features = model_rows(name)
    models, labels = setting(model)
    for layout in ("exact", "grouped"):
        found = batched(model, model.network, models, features, labels, layout, 0.5)
        torch.testing.assert_close(found, looped(model, models, features, labels, 0.5), rtol=1e-5, atol=1e-5)


def opacus_sum(model: Model, module: nn.Module, vector: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    from opacus import GradSampleModule

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its hooks warn about full backward hooks
        module = module.to_empty(device="cpu")
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in model.unflatten(vector).items():
                named[name].copy_(value)
        sampler = GradSampleModule(module, loss_reduction="sum")
        model.loss(sampler(features), labels).sum().backward()  # type: ignore[no-untyped-call,unused-ignore]
    each = torch.cat([getattr(named[name], "grad_sample").flatten(1) for name in model.slices], dim=1)  # noqa: B009
    total: Tensor = (each * (0.5 / each.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    return total


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])
def test_models_equal_opacus(name: str) -> None:
    model, features = model_rows(name)
    models, labels = setting(model)
    found = batched(model, model.network, models, features, labels, "exact", 0.5)
    fresh = MODELS[name]().module
    theirs = opacus_sum(model, fresh, models[0], features[:4], labels[:4])
    torch.testing.assert_close(found[0], theirs, rtol=1e-5, atol=1e-5)


# As above, without what Opacus does otherwise (padding tokens) or not at all (in place, "same", no bias).
FOR_OPACUS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0)), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.Flatten()
    ),
    "embedding": lambda: nn.Sequential(nn.Embedding(7, 5), Mean(), nn.Linear(5, 4)),
    "group norm": NETWORKS["group norm"][0],
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), Mean(), nn.Linear(5, 4)),
    "linear": NETWORKS["linear"][0],
    "linear on sequences": NETWORKS["linear on sequences"][0],
    "pooling": NETWORKS["pooling"][0],
}


@pytest.mark.parametrize("name", FOR_OPACUS)
def test_layers_equal_opacus(name: str) -> None:
    features = examples(name, 7)[1]
    model = from_module(FOR_OPACUS[name](), cross_entropy, features)
    models, labels = setting(model)
    found = batched(model, model.network, models, features, labels, "exact", 0.5)
    theirs = opacus_sum(model, FOR_OPACUS[name](), models[0], features[:4], labels[:4])
    torch.testing.assert_close(found[0], theirs, rtol=1e-5, atol=1e-5)


def test_lstm_equals_opacus() -> None:
    from opacus.layers import DPLSTM

    class LastOfTheirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = DPLSTM(5, 6, num_layers=2, batch_first=True)

        def forward(self, rows: Tensor) -> Tensor:
            states: Tensor = self.lstm(rows)[0]
            return states[:, -1]

    model, features = examples("lstm", 7)
    models, labels = setting(model)
    found = batched(model, model.network, models, features, labels, "exact", 0.5)
    module = nn.Sequential(nn.Embedding(7, 5), LastOfTheirs(), nn.Linear(6, 4))
    theirs = opacus_sum(model, module, models[0], features[:4], labels[:4])
    torch.testing.assert_close(found[0], theirs, rtol=1e-5, atol=1e-5)
