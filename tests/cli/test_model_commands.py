"""`polyeps export` and `polyeps predict`: what they write, what they never overwrite, and what they refuse."""

import csv
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from support.commands import refused, run, run_json
from support.federations import experiment
from support.saved import save

from polyeps.experiment import run as runs
from polyeps.experiment.population import populate

CODE = """
from torch import nn

def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, classes))
"""
TABLE = "patient,bp,age\n7,120,33\n8,60,\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of a table in an empty folder, with a table to predict."""
    monkeypatch.chdir(tmp_path)
    columns = [{"name": "age", "range": [0, 100], "missing": 50.0}, {"name": "bp", "range": [0, 200]}]
    changes = {"columns": columns, "label": "outcome", "classes": ["well", "ill"]}
    save(tmp_path / "m.safetensors", "logistic", {"features": 3, "classes": 2}, **changes)
    (tmp_path / "new.csv").write_text(TABLE)
    return tmp_path


def test_predictions_are_written_as_csv_and_printed(here: Path) -> None:
    spoken = run("predict", "m.safetensors", "new.csv", "--keep", "patient", "--probabilities")
    rows = list(csv.DictReader(spoken.stdout.splitlines()))
    assert [row["patient"] for row in rows] == ["7", "8"]
    assert {row["prediction"] for row in rows} <= {"well", "ill"}
    assert all(float(row["probability"]) == float(row[f"probability of {row['prediction']}"]) for row in rows)
    assert spoken.stderr == ""
    said = run("predict", "m.safetensors", "new.csv", "--keep", "patient", "--probabilities", "-o", "out.csv")
    assert (here / "out.csv").read_text() == spoken.stdout
    assert "wrote out.csv: 2 predictions" in said.stderr


def test_scores_and_json(here: Path) -> None:
    predicted = run_json("predict", "m.safetensors", "new.csv")["predictions"]
    labels = ["outcome", *(row["prediction"] for row in predicted)]
    text = "".join(f"{line},{label}\n" for line, label in zip(TABLE.splitlines(), labels, strict=True))
    (here / "new.csv").write_text(text)
    found = run_json("predict", "m.safetensors", "new.csv", "--score")
    assert found["scores"]["accuracy"] == 1
    loud = [labels[0], *(label.upper() for label in labels[1:])]  # as labels are read for training
    shouted = "".join(f"{line},{label}\n" for line, label in zip(TABLE.splitlines(), loud, strict=True))
    (here / "loud.csv").write_text(shouted)
    assert run_json("predict", "m.safetensors", "loud.csv", "--score")["scores"] == found["scores"]
    assert found["records"] == 2
    (here / "loud.csv").write_text(text.replace("ill", "ILL").replace("well", "Well"))  # as training reads them
    assert run_json("predict", "m.safetensors", "loud.csv", "--score")["scores"]["accuracy"] == 1
    assert "accuracy 1.0000" in run("predict", "m.safetensors", "new.csv", "--score").stderr
    assert "accuracy" in run("predict", "m.safetensors", "new.csv", "--score", "-o", "out.csv").stdout
    refused("predict", "m.safetensors", "new.csv", "--score", "--label", "death", naming=("'death'", "--label"))


def test_nothing_is_overwritten_and_nothing_left_behind(here: Path) -> None:
    before = (here / "m.safetensors").read_bytes()
    (here / "link.pt").symlink_to("nowhere")
    for arguments in (
        ("predict", "m.safetensors", "new.csv", "-o", "new.csv"),
        ("export", "m.safetensors", "-o", "m.safetensors"),
        ("export", "m.safetensors"),  # whose default is the file itself
        ("export", "m.safetensors", "--format", "torch", "-o", "link.pt"),
    ):
        refused(*arguments, naming=("exists already; remove it, or choose another file",))
    assert (here / "m.safetensors").read_bytes() == before
    assert (here / "new.csv").read_text() == TABLE
    refused("predict", "m.safetensors", "new.csv", "-o", "far/out.csv", naming=("the folder far does not exist",))
    refused("predict", "m.safetensors", "new.csv", "-o", "out.parquet", naming=("as CSV",))
    (here / "new.csv").write_text(TABLE.replace("120", "high"))
    refused("predict", "m.safetensors", "new.csv", "-o", "out.csv", naming=("new.csv, row 2: bp is 'high'",))
    assert {path.name for path in here.iterdir()} == {"m.safetensors", "new.csv", "link.pt"}


def test_export_writes_every_format(here: Path) -> None:
    found = run_json("export", "m.safetensors", "--format", "torch")
    assert found["file"] == "m.pt"
    assert found["tensors"] == {"0.weight": [2, 3], "0.bias": [2]}
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    module.load_state_dict(torch.load("m.pt", weights_only=True))
    said = run("export", "m.safetensors", "--format", "onnx")
    assert "wrote m.onnx, with the names and budgets of 2 clients" in said.stderr
    features = np.array([[-0.34, 0, 0.2], [0, 1, -0.4]], dtype=np.float32)  # age, age missing, bp
    (chances,) = onnxruntime.InferenceSession("m.onnx").run(None, {"features": features})
    predicted = run_json("predict", "m.safetensors", "new.csv", "--probabilities")["predictions"]
    ours = [[row["probability of well"], row["probability of ill"]] for row in predicted]
    np.testing.assert_allclose(chances, ours, atol=1e-5)
    np.testing.assert_allclose(torch.softmax(module(torch.from_numpy(features)), 1).detach(), ours, atol=1e-5)
    run("export", "m.safetensors", "-o", "given-away.safetensors", "--without-clients")
    assert b"elm" not in (here / "given-away.safetensors").read_bytes()
    assert run_json("predict", "given-away.safetensors", "new.csv", "--probabilities")["predictions"] == predicted


def test_a_runs_folder_and_its_own_code(here: Path) -> None:
    (here / "code").mkdir()
    (here / "code" / "nets.py").write_text(CODE)
    wanted = experiment(["fedavg", "fedavg (none)"], model={"name": "nets:small"})
    outcome = runs.run(wanted, here / "run", code_folder=here / "code")
    dataset = populate(experiment("fedavg"), 1).dataset
    np.savez(here / "new.npz", features=dataset.test_features, labels=dataset.test_labels)
    refused("predict", "run", "new.npz", naming=("2 of the models in run", "'fedavg (none)' with seed 1", "--method"))
    chosen = ("predict", "run", "new.npz", "--method", "fedavg", "--score")
    refused(*chosen, naming=("nets:small", "--trust-code"))
    refused(*chosen, "--code", "code", naming=("--code code", "add --trust-code"))
    found = run_json(*chosen, "--trust-code")
    assert found["scores"]["accuracy"] == outcome.accuracy["fedavg", 1][-1]
    # Names and weights need no code.
    run("export", "run", "--method", "fedavg", "-o", "given.safetensors")
    run("export", "given.safetensors", "--format", "torch")
    refused("export", "given.safetensors", "--format", "onnx", naming=("--trust-code",))
    refused("export", "given.safetensors", "--format", "onnx", "--trust-code", naming=("nets",))
    run("export", "given.safetensors", "--format", "onnx", "--trust-code", "--code", "code")
    assert json.loads(onnxruntime.InferenceSession("given.onnx").get_modelmeta().custom_metadata_map["classes"])
    (here / "code" / "nets.py").write_text(CODE.replace("Tanh", "ReLU"))
    refused(*chosen, "--trust-code", naming=("has changed since the run began",))


def test_wrong_models_are_refused_in_one_sentence(here: Path) -> None:
    (here / "bad.safetensors").write_bytes(b"\x80\x04cos\nsystem\n" + b"x" * 500)
    (here / "cut.safetensors").write_bytes((here / "m.safetensors").read_bytes()[:-1])
    for name in ("bad.safetensors", "cut.safetensors", "none.safetensors", "new.csv", "."):
        refused("predict", name, "new.csv", naming=(name if name != "." else "there is no run at .",))
        refused("export", name, "--format", "torch", "-o", "out.pt")
    assert not (here / "out.pt").exists()
