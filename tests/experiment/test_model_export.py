"""Exported models: plain PyTorch and ONNX runtimes predict what we do."""

import ast
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from support.saved import records, save
from torch import Tensor, nn

from polyeps.errors import InputError
from polyeps.experiment import onnx_layers
from polyeps.experiment.encoders import FrozenEncoder
from polyeps.experiment.model_export import as_onnx, as_torch
from polyeps.experiment.saved_model import SavedModel, load_model
from polyeps.model_files import ModelMetadata, read_model_file
from polyeps.models import MODELS

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "guides" / "use-the-model.md").read_text()
# The arguments of the guide's examples, where they are not the defaults.
SHOWN: dict[str, dict[str, Any]] = {
    "logistic": {"features": 64, "classes": 10},
    "linear_svm": {"features": 64, "classes": 10},
    "binary_logistic": {"features": 64},
    "binary_svm": {"features": 64},
    "mlp": {"features": 64, "hidden": [50], "classes": 10},
}


def shown() -> dict[str, str]:
    """Return the guide's statements by the name of the model."""
    found = re.findall(r"### ([a-z_, ]+)\n\n```python\n(.*?)```", GUIDE, re.DOTALL)
    return {name: block for names, block in found for name in names.split(", ")}


def test_plain_pytorch_loads_every_model_with_three_statements(tmp_path: Path) -> None:
    blocks = shown()
    assert set(blocks) == set(MODELS)
    (imports,) = re.findall(r"```python\n(import torch\nfrom safetensors.*?)```", GUIDE, re.DOTALL)
    script, wanted = [imports, "import os, sys"], {}
    for name, block in blocks.items():
        (tmp_path / name).mkdir()
        model, vector = save(tmp_path / name / "model.safetensors", name, SHOWN.get(name))
        features = records(model)
        torch.save(features, tmp_path / name / "features.pt")
        wanted[name] = model.classes(model.outputs(vector, features)).tolist()
        assert len(ast.parse(block).body) == 3
        script += [f"os.chdir({str(tmp_path / name)!r})", "features = torch.load('features.pt')", block]
        script += [f"print({name!r}, labels.tolist(), sep='=')"]
    script.append("assert not [name for name in sys.modules if name.startswith('polyeps')]")
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert ran.returncode == 0, ran.stderr
    assert {line.split("=")[0]: json.loads(line.split("=")[1]) for line in ran.stdout.splitlines()} == wanted


def test_the_guides_other_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    sections = {part.splitlines()[0]: part for part in GUIDE.split("\n## ")}
    for title in ("Predict in Python", "Export to ONNX", "What the file says"):
        if title == "Export to ONNX":
            model, vector = save(tmp_path / "model.safetensors", "mlp", {"features": 3, "hidden": [2], "classes": 2})
            (tmp_path / "digits.onnx").write_bytes(as_onnx(load_model(tmp_path / "model.safetensors"))[0])
            known["features"] = records(model).numpy()
        (block,) = re.findall(r"```python\n(.*?)```", sections[title], re.DOTALL)
        exec(compile(block, title, "exec"), known)
    assert known["chances"].shape == (3, 10)
    wanted = torch.softmax(model.outputs(vector, torch.from_numpy(known["features"])), 1)
    np.testing.assert_allclose(known["probabilities"], wanted, atol=1e-5)
    assert known["classes"] == known["about"]["classes"] == ["class 0", "class 1"]
    described = set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", sections[title], re.MULTILINE))))
    assert described == set(ModelMetadata.model_fields)


def test_a_state_dict_loads_without_pickled_code(tmp_path: Path) -> None:
    _, vector = save(tmp_path / "m", "mlp", {"features": 3, "hidden": [4], "classes": 2})
    held = torch.load(io.BytesIO(as_torch(read_model_file(tmp_path / "m")[1])), weights_only=True)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    module.load_state_dict(held)
    assert torch.equal(torch.cat([part.flatten() for part in module.parameters()]), vector)


@pytest.mark.parametrize("name", MODELS)
def test_onnx_predicts_what_we_do(tmp_path: Path, name: str) -> None:
    model, _ = save(tmp_path / "m", name)
    saved = load_model(tmp_path / "m")
    content, error = as_onnx(saved)
    assert error <= 1e-5
    session = onnxruntime.InferenceSession(content)
    for count in (1, 2, 7):
        features = records(model, count)
        (found,) = session.run(None, {"features": features.numpy()})
        np.testing.assert_allclose(found, saved.predict_proba(features), atol=1e-5)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == list(saved.classes)
    assert json.loads(about["polyeps"])["model"]["name"] == name
    assert set(about) == {"classes", "features", "polyeps"}
    assert os.fsencode(Path(__file__).parent.parent.parent) not in content  # nor any other path of this machine
    assert b"site-packages" not in content


def test_onnx_without_clients_does_not_name_them(tmp_path: Path) -> None:
    columns = [{"name": "age", "range": [0, 9], "missing": 3}, {"name": "sex", "categories": ["m"]}]
    save(tmp_path / "m", "logistic", {"features": 4, "classes": 2}, columns=columns)
    saved = load_model(tmp_path / "m")
    assert b"elm" in as_onnx(saved)[0]
    content = as_onnx(saved, clients=False)[0]
    assert b"elm" not in content
    about = onnxruntime.InferenceSession(content).get_modelmeta().custom_metadata_map
    assert json.loads(about["features"]) == ["age", "age missing", "sex=m", "sex=(other)"]
    assert json.loads(about["polyeps"])["columns"][0]["range"] == [0, 9]


class Gated(nn.Module):
    """A module of the user's, of no layer that has a rule of its own."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.one, self.other, self.wrong = nn.Linear(3, 2), nn.Linear(3, 2), wrong

    def forward(self, rows: Tensor) -> Tensor:
        if self.wrong and rows.sum() > 0:
            return torch.zeros(len(rows), 2)
        found: Tensor = self.one(rows) * torch.sigmoid(self.other(rows))
        return found


def own(path: Path, wrong: bool = False) -> SavedModel:
    """Return a saved model of the user's."""
    save(path, "logistic", {"features": 3, "classes": 2})
    found = load_model(path)
    return replace(found, module=Gated(wrong))


def test_own_modules_are_exported_by_torch(tmp_path: Path) -> None:
    saved = own(tmp_path / "m")
    content, error = as_onnx(saved)
    assert error <= 1e-5
    features = torch.randn(5, 3)
    (found,) = onnxruntime.InferenceSession(content).run(None, {"features": features.numpy()})
    np.testing.assert_allclose(found, saved.predict_proba(features), atol=1e-5)
    assert b"site-packages" not in content
    assert os.fsencode(Path(__file__).parent) not in content


def test_models_that_onnx_cannot_express_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = own(tmp_path / "m", wrong=True)
    with pytest.raises(InputError, match="export it as safetensors") as problem:
        as_onnx(saved)
    assert "\n" not in str(problem.value)
    with pytest.raises(InputError, match="has the encoder"):
        as_onnx(replace(saved, encoder=FrozenEncoder("own", lambda: abs, (4,), torch.device("cpu"))))
    for missing in ("onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(InputError, match=rf"{missing}.*pip install 'polyeps\[onnx\]'"):
            as_onnx(saved)


class Attending(nn.Module):
    """A module of the user's in which torch's exporter fixes the number of records."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(1, 4, 2, batch_first=True), nn.Linear(4, 2)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        states = self.layers(rows.reshape(len(rows), -1, 1))[0]
        found: Tensor = self.head(self.attend(states, states, states, need_weights=False)[0].mean(1))
        return found


def test_a_file_for_one_number_of_records_alone_is_refused(tmp_path: Path) -> None:
    saved = replace(own(tmp_path / "m"), module=Attending())
    with pytest.raises(InputError, match=r"takes no other number of records.*export it as safetensors"):
        as_onnx(saved)


def test_an_export_that_predicts_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "m", "lstm", {"vocabulary": 20, "length": 3})
    saved = load_model(tmp_path / "m")
    as_onnx(saved)
    monkeypatch.setattr(onnx_layers, "_GATES", (0, 1, 2, 3))
    with pytest.raises(InputError, match="differ from ours"):
        as_onnx(saved)
