"""The examples of own models: trained from TOML and in Python, ledgers and gradients right, exported and reloaded."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from support.commands import run
from torch import Tensor, nn
from torch.nn import functional

from polyeps import Ledger, PrivateFederation, load_model, read
from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.network import add_gradients
from polyeps.experiment.config import ModelSettings
from polyeps.experiment.model_check import check_own_model
from polyeps.models import Model, cross_entropy

FOLDER = Path(__file__).parent.parent / "examples" / "own_models"
IMAGES: NDArray[np.float32] = (load_digits().images / 16).astype(np.float32)
LABELS = load_digits().target
WARDS = {"ash": 2.0, "birch": 4.0, "cedar": 10.0}
# The experiment of each module, the name of its factory, and the numbers of its trained and frozen parameters.
MODELS = {
    "layernorm_mlp": ("layernorm_mlp", 3530, 0),
    "bidirectional_lstm": ("bidirectional_lstm", 3658, 0),
    "lora_gpt": ("lora_gpt", 1354, 26016),
    "resnet_head": ("frozen_resnet", 2570, 175384),
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for module in [name for name in sys.modules if name in {one for one, _, _ in MODELS.values()} | {"public_modules"}]:
        del sys.modules[module]


def factory_of(experiment: str) -> Any:
    name = MODELS[experiment][0]
    return getattr(import_module(name), name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the experiments, by name, run from their files when they are asked for."""
    return _Runs(tmp_path_factory.mktemp("own-models"))


class _Runs(dict[str, Path]):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        self[name] = self.folder / name
        command = (
            "run",
            str(FOLDER / f"{name}.toml"),
            "--trust-code",
            "--set",
            "rounds=2",
            "--set",
            "evaluate_every=2",
        )
        assert "Every client stayed within" in run(*command, "--output", str(self[name])).stdout
        return self[name]


def budgets_of(name: str) -> dict[str, float]:
    epsilons = tomllib.loads((FOLDER / f"{name}.toml").read_text())["budgets"]["epsilons"]
    return {str(client): epsilon for client, epsilon in enumerate(epsilons)}


def check_spending(ledger: Ledger, certified: dict[str, float], budgets: dict[str, float]) -> None:
    """Budgets are nearly used up and never exceeded, and certificates say what the ledger says."""
    ledger.verify()
    assert set(certified) == set(budgets) == set(ledger.clients)
    assert len(set(budgets.values())) >= 3
    for client, epsilon in budgets.items():
        spent = ledger.spent(client)
        assert 0.95 * epsilon < spent <= epsilon
        assert abs(certified[client] - spent) <= 1e-9
    ledger.close()


@pytest.mark.parametrize("name", MODELS)
def test_from_toml_within_mixed_budgets(name: str, runs: dict[str, Path]) -> None:
    model = load_model(runs[name], code_folder=FOLDER)
    ((job, spent),) = read(runs[name]).spent.items()
    certified = {client: one.certified for client, one in model.certificates.items()}
    check_spending(Ledger(runs[name] / "ledgers" / f"{job[0]}-{job[1]}.db"), certified, budgets_of(name))
    assert spent == certified
    trained = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
    assert model.metadata.parameters == tuple(trained)


@pytest.mark.parametrize("name", MODELS)
def test_exported_and_reloaded_to_the_same_predictions(
    name: str, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = load_model(runs[name], code_folder=FOLDER)
    records = torch.from_numpy(IMAGES[:200, None])
    expected = model.outputs(records)
    for kind, ending in (("torch", "pt"), ("safetensors", "safetensors")):
        run("export", str(runs[name]), "--format", kind, "-o", f"m.{ending}")
    tensors = torch.load("m.pt", weights_only=True), safetensors.torch.load_file("m.safetensors")
    for held in tensors:
        plain = factory_of(name)((1, 8, 8), 10)  # without polyeps: other first weights, all replaced
        plain.load_state_dict(held)
        with torch.no_grad():
            assert torch.equal(plain.eval()(records), expected)
    again = load_model("m.safetensors", code_folder=FOLDER)
    assert again.predict(records) == model.predict(records)
    # In a process of its own: what torch's exporter does depends on what it has traced before.
    command = ["polyeps", "export", str(runs[name]), "--format", "onnx", "-o", "m.onnx", "--trust-code", "--json"]
    written = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=200)
    assert written.returncode == 0, written.stderr
    assert json.loads(written.stdout)["largest_error"] < 1e-5
    session = onnxruntime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"features": records.numpy()})
    np.testing.assert_allclose(found, torch.softmax(expected, 1).numpy(), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_in_python_within_mixed_budgets(name: str, tmp_path: Path) -> None:
    make = factory_of(name)
    federation = PrivateFederation(
        make, WARDS, delta=1e-4, rounds=2, batch=8, local_steps=2, settings={"evaluate_every": 2}
    )
    clients = np.array(list(WARDS))[np.arange(300) % 3]
    federation.fit(IMAGES[:300], LABELS[:300], client=clients)
    ledger = federation.ledger_
    assert ledger is not None
    certified = {client: one.certified for client, one in federation.certificates_.items()}
    check_spending(ledger, certified, WARDS)
    file = federation.save(tmp_path / "m.safetensors")
    loaded = load_model(file, models={MODELS[name][0]: make})
    assert loaded.predict(IMAGES) == [str(one) for one in federation.predict(IMAGES)]
    started = make((8, 8), 10)
    counts = {True: 0, False: 0}
    for part in started.parameters():
        counts[part.requires_grad] += part.numel()
    assert (counts[True], counts[False]) == MODELS[name][1:]


@pytest.mark.parametrize("name", ["lora_gpt", "resnet_head"])
def test_frozen_weights_stay_and_trained_ones_move(name: str) -> None:
    torch.manual_seed(3)
    module = factory_of(name)((8, 8), 10)
    federation = PrivateFederation(module, WARDS, delta=1e-4, rounds=1, local_steps=2)
    federation.fit(IMAGES[:300], LABELS[:300], client=np.array(list(WARDS))[np.arange(300) % 3])
    after = dict(federation.model_.module.named_parameters())
    for parameter_name, before in module.named_parameters():
        assert torch.equal(after[parameter_name], before) != before.requires_grad, parameter_name


def one_example_at_a_time(module: nn.Module, rows: Tensor, labels: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the clipped sum over examples by plain autograd, in float64, and every example's norm."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    total, norms = torch.zeros(sum(one.numel() for one in trained), dtype=torch.float64), []
    for row, label in zip(rows, labels, strict=True):
        loss = functional.cross_entropy(module(row[None]), label[None])
        found = torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss, trained)]).double()
        norms.append(found.norm())
        total += found * min(1.0, clip / float(norms[-1]))
    return total, torch.stack(norms)


@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_are_those_of_one_example_at_a_time(name: str) -> None:
    """With adapters, frozen and trained layers side by side, a hook can take a gradient of the wrong one."""
    generator = torch.Generator().manual_seed(5)
    modules = [factory_of(name)((1, 8, 8), 10) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    for module in modules:  # every parameter at work, also matrices that start at zero; each client has its own
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    model = Model(modules[0], cross_entropy, (1, 8, 8))
    vectors = torch.stack(
        [torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad]) for module in modules]
    )
    rows, labels = torch.from_numpy(IMAGES[:12, None]), torch.from_numpy(LABELS[:12])
    _, norms = one_example_at_a_time(modules[0], rows, labels, 1.0)
    clip = float(norms.median())  # half of the examples are clipped
    into = torch.zeros_like(vectors)
    layout = Layout(2, (RowGroup(0, 2, 6, 0),), torch.arange(2).repeat_interleave(6))
    with torch.no_grad():
        add_gradients(model.network, model.loss, vectors, rows, labels, layout, None, torch.full((2,), clip), into)
    for client, module in enumerate(modules):
        mine = slice(6 * client, 6 * client + 6)
        expected, _ = one_example_at_a_time(module, rows[mine], labels[mine], clip)
        assert float((into[client].double() - expected).norm() / expected.norm()) < 3e-5


def test_the_examples_are_right_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyeps.experiment.model_check._SECONDS", 0.05)
    for name, (_, trained, frozen) in MODELS.items():
        found = check_own_model(name, factory_of(name), (1, 8, 8), 10)
        assert (found.verdict, found.trained, found.frozen) == ("right", trained, frozen)
        assert found.deviation < 1e-5
        assert found.seconds["one_by_one"] > found.seconds["polyeps"]


@pytest.mark.skipif("encoder" not in ModelSettings.model_fields, reason="[model] encoder comes with another change")
def test_a_frozen_encoder_with_a_trained_head(runs: dict[str, Path]) -> None:
    model = load_model(runs["frozen_resnet"], code_folder=FOLDER)
    certified = {client: one.certified for client, one in model.certificates.items()}
    check_spending(Ledger(runs["frozen_resnet"] / "ledgers" / "weiavg-1.db"), certified, budgets_of("frozen_resnet"))
    assert model.metadata.parameters == ("0.weight", "0.bias")
    assert len(model.predict(IMAGES[:20, None])) == 20


# Modules of packages that are not installed with polyeps: the example, a record's shape and type.
PUBLIC = [
    ("torchvision", "torchvision_resnet", (3, 32, 32), torch.float32),
    ("timm", "timm_vit", (3, 32, 32), torch.float32),
    ("transformers", "hugging_face_bert", (12,), torch.int64),
    ("transformers", "hugging_face_gpt2", (12,), torch.int64),
]


@pytest.mark.parametrize(("package", "name", "shape", "kind"), PUBLIC)
def test_public_modules_are_right(package: str, name: str, shape: tuple[int, ...], kind: torch.dtype) -> None:
    pytest.importorskip(package)
    make = getattr(import_module("public_modules"), name)
    found = check_own_model(name, make, shape, 10, kind)
    assert found.verdict == "right"
    assert found.deviation < 1e-4
    rng = np.random.default_rng(1)
    records = rng.integers(0, 50, (60, *shape)) if kind == torch.int64 else rng.normal(size=(60, *shape))
    federation = PrivateFederation(
        make, WARDS, dtype=str(kind).removeprefix("torch."), delta=1e-4, rounds=1, batch=4, local_steps=1
    )
    federation.fit(records, np.arange(60) % 10, client=np.array(list(WARDS))[np.arange(60) % 3])
    assert federation.predict_proba(records[:4]).shape == (4, 10)
    assert all(federation.spent_[client] <= epsilon for client, epsilon in WARDS.items())
    assert prod(shape) == federation.n_features_in_
