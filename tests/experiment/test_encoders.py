"""Encoders of an experiment: applied once, checked, kept in memory and on disk, used again by saved models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import refused
from support.commands import run as command
from torch import Tensor, nn

from polyeps.data.dataset import Dataset
from polyeps.encoders import EncoderChoice
from polyeps.encoders.built_in import ENCODERS
from polyeps.encoders.feature_files import save_features
from polyeps.encoders.scattering import Scattering
from polyeps.errors import InputError
from polyeps.experiment import config, encoders
from polyeps.experiment import run as runs
from polyeps.experiment.model_export import as_onnx
from polyeps.experiment.population import Population, populate
from polyeps.experiment.progress import Watch
from polyeps.experiment.registry import Code, Parts
from polyeps.experiment.saved_model import load_model


def experiment(encoder: str | None = "own", **changes: Any) -> config.Experiment:
    values: dict[str, Any] = {
        "rounds": 2,
        "data": {"name": "digits"},
        "budgets": {"epsilons": [2.0, 8.0]},
        "model": {"encoder": encoder} if encoder else {},
        "training": {"local_steps": 2},
        "algorithm": "fedavg",
    }
    return config.experiment({**values, **changes})


def populated(make: Callable[[], Any], **changes: Any) -> Population:
    return populate(experiment(**changes), 1, parts=Parts(encoders={"own": make}))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is switched on, and a memory without encoded records."""
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("POLYEPS_FEATURE_CACHE")
    monkeypatch.setattr(encoders, "_MEMORY", {})
    return tmp_path / "cache"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images in every call of scattering."""
    calls: list[int] = []
    forward = Scattering.forward

    def counting(self: Scattering, images: Tensor) -> Tensor:
        calls.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(Scattering, "forward", counting)
    return calls


def test_built_in_encoders_end_to_end() -> None:
    plain = populate(experiment(None), 1)
    for name, size in (("scattering", 324), ("random-fourier", 1024), ("random-convolutions", 1024)):
        found = populate(experiment(name), 1)
        assert found.dataset.features.shape == (len(plain.dataset.labels), size)
        assert np.array_equal(found.dataset.labels, plain.dataset.labels)
        assert found.model.input_shape == (size,)
        encoder = ENCODERS[name]((1, 8, 8), experiment(name).model.encoder_choice or EncoderChoice(""))
        expected = encoder(torch.from_numpy(plain.dataset.features[:5]))
        assert np.allclose(found.dataset.features[:5], expected, atol=1e-6)
        assert np.allclose(
            found.dataset.test_features[:3], encoder(torch.from_numpy(plain.dataset.test_features[:3])), atol=1e-6
        )
    projected = populate(experiment("scattering", model={"encoder": "scattering", "encoder_size": 30}), 1)
    assert projected.model.input_shape == (30,)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"encoder": "scatering"}, "there is no encoder 'scatering'; did you mean 'scattering'?"),
        ({"encoder": "own:x"}, "--trust-code"),
        ({"encoder_size": 3}, "model.encoder_size has no effect without model.encoder"),
        ({"encoder_bandwidth": 3.0}, "model.encoder_bandwidth has no effect without model.encoder"),
        ({"encoder": "scattering", "encoder_bandwidth": 1.0}, "no effect on scattering, only on random-fourier"),
        ({"encoder": "scattering", "encoder_size": 999}, "scattering has 324 features"),
        ({"encoder": "random-fourier", "encoder_size": 0}, "model.encoder_size: input should be greater"),
        ({"encoder": "random-fourier", "encoder_bandwidth": 0.0}, "model.encoder_bandwidth: input should be greater"),
        ({"encoder": "scattering", "name": "cnn"}, "takes records of shape"),
    ],
)
def test_wrong_settings_are_refused_in_a_sentence(model: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        populate(experiment(model=model), 1)
    assert said in str(refusal.value)


def test_the_former_key_and_records_that_are_no_images() -> None:
    with pytest.raises(InputError, match=r"data\.encoder is now model\.encoder; rename it"):
        experiment(data={"encoder": "scattering"})
    with pytest.raises(InputError, match=r"scattering.* not records of shape"):
        populate(experiment("scattering", data={"name": "syn-l"}), 1)
    with pytest.raises(InputError, match="'scattering' is built in"):
        Parts(encoders={"scattering": lambda: abs})


# Enemies


class BatchStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64, track_running_stats=False)

    def forward(self, records: Tensor) -> Tensor:
        found: Tensor = self.norm(records.flatten(1))
        return found


class RunningMean(nn.Module):
    """A module that follows the mean of what it sees, in eval mode too, and too slowly to be seen in one call."""

    mean: Tensor

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used = used
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, records: Tensor) -> Tensor:
        rows = records.flatten(1)
        self.mean.lerp_(rows.mean(0), 1e-6)
        return rows - self.mean if self.used else rows


def counting_calls() -> Callable[[Tensor], Tensor]:
    calls = [0]

    def encode(records: Tensor) -> Tensor:
        calls[0] += 1
        return records.flatten(1) + (calls[0] > 8)  # after the checks

    return encode


def quantised(records: Tensor) -> Tensor:
    """Rounds to steps that follow the largest value of the batch, as dynamic quantisation does."""
    step = records.abs().max() / 1000
    return (records.flatten(1) / step).round() * step


def slightly(records: Tensor) -> Tensor:
    return records.flatten(1) - 3e-5 * records.flatten(1).mean(0)


def tiny_and_mixed(records: Tensor) -> Tensor:
    """Features so small that an absolute tolerance would not see how they are mixed."""
    return 1e-6 * (records.flatten(1) - records.flatten(1).mean(0))


def levels_the_largest(records: Tensor) -> Tensor:
    """Changes one record of a large batch alone."""
    rows = records.flatten(1).clone()
    if len(rows) > 100:
        rows[rows.sum(1).argmax()] = rows.mean(0)
    return rows


def counts_equal_records(records: Tensor) -> Tensor:
    rows = records.flatten(1)
    return torch.cat([rows, (torch.cdist(rows, rows) < 1e-6).sum(1, keepdim=True).float()], 1)


MIXED, ANEW, CHANGED = "other records beside it", "when it is made anew", "has changed with the records it encoded"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (BatchStatistics, MIXED),
        (lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm((16, 64))), "failed: RuntimeError"),
        (lambda: RunningMean(used=True), f"{MIXED}|{CHANGED}"),
        (lambda: RunningMean(used=False), "changes its own buffers in eval mode"),
        (counting_calls, f"{MIXED}|{CHANGED}"),
        (lambda: quantised, MIXED),
        (lambda: levels_the_largest, MIXED),
        (lambda: counts_equal_records, MIXED),
        (lambda: slightly, MIXED),
        (lambda: tiny_and_mixed, MIXED),
        (lambda: lambda records: records.flatten(1) + len(records), MIXED),
        (lambda: lambda records: records.flatten(1).sort(0).values, MIXED),
        (lambda: lambda records: records.flatten(1) * torch.arange(1.0, len(records) + 1)[:, None], MIXED),
        (lambda: lambda records: records.flatten(1).roll(1, 0), MIXED),
        (lambda: lambda records: records.flatten(1)[:, : 60 + len(records) % 3], MIXED),
        (lambda: nn.Linear(64, 3).double(), "failed: RuntimeError"),
        (lambda: nn.LSTM(8, 4), "failed: "),  # a tuple
        (lambda: "encoder", "returned a str, not a function, a module or a scikit-learn transformer"),
        (lambda: (lambda shift: lambda records: records.flatten(1) + shift)(np.random.default_rng().random()), ANEW),
    ],
)
def test_encoders_that_are_no_function_of_one_record_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        populated(make)


def test_an_encoder_cannot_change_the_records() -> None:
    def spoiling(records: Tensor) -> Tensor:
        return records.zero_().flatten(1) + 1

    populated(lambda: spoiling)
    assert populate(experiment(None), 1).dataset.features.any()


def frozen_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(144, 6)
    )


def test_a_module_is_frozen_and_its_drawn_weights_are_always_the_same() -> None:
    first = populated(frozen_network)
    torch.manual_seed(77)
    before = torch.random.get_rng_state()
    second = populated(frozen_network)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(first.dataset.features, second.dataset.features)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = frozen_network().eval()
    plain = populate(experiment(None), 1).dataset
    with torch.no_grad():
        assert np.allclose(first.dataset.features, network(torch.from_numpy(plain.features)), atol=1e-5)


# Kept features


def test_records_are_encoded_once_for_all_seeds_and_splits(cache: Path, counted: list[int]) -> None:
    done: list[tuple[int, int]] = []
    wanted = experiment("scattering", data={"name": "digits", "validation": 0.3})
    first = populate(wanted, 1, progress=lambda *now: done.append(now))
    calls = len(counted)
    assert done[-1] == (1797, 1797)
    assert [one for one, _ in done] == sorted(one for one, _ in done)
    second = populate(wanted, 2)
    third = populate(experiment("scattering", data={"name": "digits", "partition": "shards"}), 3)
    assert len(counted) == calls
    for seed, found in ((1, first), (2, second)):  # the same records in the same places as without an encoder
        plain = populate(experiment(None, data={"name": "digits", "validation": 0.3}), seed).dataset
        expected = Scattering((1, 8, 8))(torch.from_numpy(plain.features))
        assert np.allclose(found.dataset.features, expected, atol=1e-6)
        assert np.array_equal(found.dataset.labels, plain.labels)
        assert np.allclose(
            found.dataset.test_features, Scattering((1, 8, 8))(torch.from_numpy(plain.test_features)), atol=1e-6
        )
    assert len(third.dataset.features) > len(first.dataset.features)
    encoders._MEMORY.clear()  # another process
    counted.clear()
    again = populate(wanted, 1)
    assert sum(counted) < 300  # some records, to see whether the file is right
    assert np.array_equal(again.dataset.features, first.dataset.features)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in cache.iterdir())


def test_features_of_another_encoder_or_other_records_are_not_used(cache: Path) -> None:
    first = populate(experiment("random-fourier"), 1).dataset.features
    for path in cache.glob("features-*"):  # forged: right in all it says
        head, _, content = path.read_bytes().partition(b"\n")
        held = json.loads(head)
        rows = np.frombuffer(content, np.float32).reshape(held["shape"])[::-1].copy()
        save_features(cache, {key: value for key, value in held["subject"].items() if key != "format"}, rows)
    encoders._MEMORY.clear()
    assert np.array_equal(populate(experiment("random-fourier"), 1).dataset.features, first)
    for model in ({"encoder_size": 10}, {"encoder_size": 10, "encoder_bandwidth": 3.0}, {"encoder_bandwidth": 3.0}):
        found = populate(experiment(model={"encoder": "random-fourier", **model}), 1).dataset.features
        assert found.shape != first.shape or not np.allclose(found, first)


def test_own_code_is_kept_by_its_digest_and_given_functions_are_not(cache: Path, tmp_path: Path) -> None:
    populated(lambda: lambda records: records.flatten(1))
    assert not list(cache.glob("features-*"))
    code = "import torch\ndef encoder():\n    return lambda records: {} * records.flatten(1)\n"
    found = []
    for factor in (2, 3):
        (tmp_path / "own.py").write_text(code.format(factor))
        parts = Parts(code=Code(tmp_path))
        found.append(populate(experiment("own:encoder"), 1, parts=parts).dataset.features)
        assert len(list(cache.glob("features-*"))) in (factor - 1, 2 * (factor - 1))
    assert np.allclose(3 * found[0], 2 * found[1])


def test_a_damaged_file_is_replaced(cache: Path) -> None:
    first = populate(experiment("random-fourier"), 1).dataset.features
    for path in cache.glob("features-*"):
        path.write_bytes(path.read_bytes()[:-5])
    encoders._MEMORY.clear()
    assert np.array_equal(populate(experiment("random-fourier"), 1).dataset.features, first)
    encoders._MEMORY.clear()
    assert np.array_equal(populate(experiment("random-fourier"), 1).dataset.features, first)


def test_plans_encode_no_records(counted: list[int]) -> None:
    found = populate(experiment("scattering"), 1, plans=True)
    assert sum(counted) < 20
    assert found.dataset.features.shape == (len(found.dataset.labels), 324)
    assert not found.dataset.features.any()
    whole = populate(experiment("scattering"), 1)
    assert (found.budgets, found.model.size) == (whole.budgets, whole.model.size)
    assert np.array_equal(found.partition.rows, whole.partition.rows)


# Saved models


def raw_test() -> Dataset:
    return populate(experiment(None), 1).dataset


@pytest.mark.parametrize(
    "model",
    [
        {"encoder": "scattering"},
        {"encoder": "scattering", "encoder_size": 40},
        {"encoder": "random-fourier", "encoder_size": 50, "encoder_bandwidth": 2.0},
        {"encoder": "random-convolutions", "encoder_size": 160, "name": "mlp"},
    ],
)
def test_a_saved_model_takes_raw_records(model: dict[str, Any], tmp_path: Path) -> None:
    outcome = runs.run(experiment(model=model, evaluate_every=1), tmp_path / "run")
    plain, loaded = raw_test(), load_model(tmp_path / "run")
    places = [loaded.classes.index(one) for one in loaded.predict(plain.test_features)]
    assert (np.array(places) == plain.test_labels).mean() == pytest.approx(outcome.accuracy["fedavg", 1][-1])
    flat = plain.test_features.reshape(len(plain.test_features), -1)
    assert loaded.predict(flat) == loaded.predict(plain.test_features)
    assert loaded.predict(flat[:1]) == loaded.predict(flat)[:1]
    assert loaded.metadata.record_shape == (1, 8, 8)
    with pytest.raises(InputError, match=r"has 63 numbers a record, and the model's encoder .* takes 64"):
        loaded.predict(flat[:, :63])


def test_predict_and_export_on_the_command_line(tmp_path: Path) -> None:
    runs.run(experiment(model={"encoder": "random-convolutions", "encoder_size": 160}), tmp_path / "run")
    plain = raw_test()
    np.savez(tmp_path / "new.npz", features=plain.test_features, labels=plain.test_labels)
    said = json.loads(command("predict", str(tmp_path / "run"), str(tmp_path / "new.npz"), "--score", "--json").stdout)
    loaded = load_model(tmp_path / "run")
    assert [one["prediction"] for one in said["predictions"]] == loaded.predict(plain.test_features)
    command("export", str(tmp_path / "run"), "--format", "torch", "-o", str(tmp_path / "m.pt"))
    shapes = [tuple(one.shape) for one in torch.load(tmp_path / "m.pt", weights_only=True).values()]
    assert sorted(shapes) == [(10,), (10, 160)]  # of the trained model, without its encoder
    command("export", str(tmp_path / "run"), "-o", str(tmp_path / "m.safetensors"))
    assert load_model(tmp_path / "m.safetensors").predict(plain.test_features[:9]) == loaded.predict(
        plain.test_features[:9]
    )


@pytest.mark.parametrize("encoder", ["random-convolutions", "own"])
def test_onnx_holds_the_encoder(encoder: str, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    given = {"own": frozen_network} if encoder == "own" else {}
    runs.run(experiment(encoder), tmp_path / "run", encoders=given)
    loaded, records = load_model(tmp_path / "run", encoders=given), raw_test().test_features
    content, error = as_onnx(loaded)
    assert error < 1e-5
    (found,) = ort.InferenceSession(content).run(None, {"features": records})
    np.testing.assert_allclose(found, loaded.predict_proba(records), atol=1e-5)


def test_scattering_is_not_exported_to_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    runs.run(experiment("scattering"), tmp_path / "run")
    naming = ("whose Fourier transforms ONNX cannot express; export it as safetensors",)
    refused("export", str(tmp_path / "run"), "--format", "onnx", "-o", str(tmp_path / "m.onnx"), naming=naming)
    assert not (tmp_path / "m.onnx").exists()


def test_a_run_with_an_encoder_is_resumed(tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    wanted = experiment("scattering")
    runs.run(wanted, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        runs.run(wanted, tmp_path / "parts", watch=Watch(round_done=stop))
    encoders._MEMORY.clear()
    runs.resume(tmp_path / "parts")
    models = [(tmp_path / name / "models" / "fedavg-1.safetensors").read_bytes() for name in ("whole", "parts")]
    assert models[0] == models[1]


def test_threads_change_neither_features_nor_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_AT_A_TIME", 7)
    records, choice = raw_test().features[:64], EncoderChoice("scattering")
    alone = encoders.frozen(choice, (1, 8, 8), Parts())(records)
    torch.set_num_threads(3)
    try:
        together = encoders.frozen(choice, (1, 8, 8), Parts())(records)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert np.array_equal(alone, together)


def test_reports_name_the_encoder_and_what_is_assumed_of_your_own(tmp_path: Path) -> None:
    own = {"own": lambda: lambda records: records.flatten(1)}
    for name, given in (("own", own), ("random-fourier", {})):
        runs.run(experiment(name), tmp_path / name, encoders=given)
        command("report", str(tmp_path / name), "--output", str(tmp_path / f"{name}.html"))
        page = (tmp_path / f"{name}.html").read_text()
        assert f"on digits, encoded by {name}, in 2 rounds" in page
        assert ("uarantees assume that the encoder own was made without" in page) == (name == "own")


def test_an_encoder_with_other_weights_by_now_encodes_again(cache: Path) -> None:
    module = nn.Linear(64, 5)
    scale = [1.0]

    def function() -> Callable[[Tensor], Tensor]:
        return lambda rows: scale[0] * rows.flatten(1)[:, :5]

    make = lambda: nn.Sequential(nn.Flatten(), module)  # noqa: E731
    before = populated(make).records.features.clone()
    with torch.no_grad():
        module.weight.mul_(1 + 1e-4)  # trained further on public records
    assert not torch.equal(populated(make).records.features, before)
    first = populated(function).records.features.clone()
    scale[0] = 2.0
    torch.testing.assert_close(populated(function).records.features, 2 * first)
