"""`polyeps model check`: what it prints, what it refuses, and that nothing runs without --trust-code."""

from pathlib import Path

import pytest
from support.commands import refused, run, run_json

CODE = """
from pathlib import Path
from torch import nn

Path("it_ran").touch()

def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Dropout(0.1), nn.Linear(4, classes))

def mixing(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))

def failing(shape, classes):
    raise RuntimeError("out of luck")

def leaving(shape, classes):
    raise SystemExit(0)

def exploding(shape, classes):
    class Exploding(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1)) * float("inf")
    return Exploding(64, classes)

number = 3
"""
ASKED = ("--shape", "8,8", "--classes", "10")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polyeps.experiment.model_check._SECONDS", 0.0)
    (tmp_path / "nets.py").write_text(CODE)
    return tmp_path


def test_the_verdict_in_words_and_as_json() -> None:
    said = run("model", "check", "nets:small", *ASKED, "--trust-code").stdout
    assert said.startswith("nets:small (Sequential): right\n")
    for part in ("20 records", "310 trained, 0 frozen", "Dropout at '2'", "a record of a batch", "batched rule"):
        assert part in said
    found = run_json("model", "check", "nets:small", *ASKED, "--trust-code")
    assert found["verdict"] == "right"
    assert found["trained"] == 310
    assert found["deviation"] < 1e-5
    assert [part["path"] for part in found["parts"]] == ["1", "3"]


def test_refusals_have_a_reason_and_status_2(here: Path) -> None:
    refused("model", "check", "nets:mixing", *ASKED, "--trust-code", naming=("is refused: BatchNorm1d", "GroupNorm"))
    refused("model", "check", "nets:failing", *ASKED, "--trust-code", naming=("out of luck",))
    refused("model", "check", "nets:leaving", *ASKED, "--trust-code", naming=("ends the program",))
    refused("model", "check", "nets:exploding", *ASKED, "--trust-code", naming=("finite",))
    refused("model", "check", "nets:number", *ASKED, "--trust-code", naming=("name a function of (shape, classes)",))
    refused("model", "check", "nets:other", *ASKED, "--trust-code", naming=("cannot be loaded",))
    refused("model", "check", "cnn", *ASKED, "--trust-code", naming=('"module:name"',))
    refused("model", "check", "nets:small", "--shape", "8x8", "--classes", "10", naming=("--shape is '8x8'",))
    refused("model", "check", "nets:small", "--shape", "64", "--classes", "1", naming=("classes",))
    refused("model", "check", "nets:small", *ASKED, "--code", ".", naming=("add --trust-code",))
    refused("model", "check", "nets:small", *ASKED, "--trust-code", "--code", "gone", naming=("is no folder",))
    spoken = run("model", "check", "nets:mixing", *ASKED, "--trust-code", "--json", status=2)
    assert '"verdict": "refused"' in spoken.stdout
    assert "GroupNorm" in spoken.stdout


def test_nothing_runs_without_trust(here: Path) -> None:
    refused("model", "check", "nets:small", *ASKED, naming=("--trust-code",))
    assert not (here / "it_ran").exists()
    folder = here / "elsewhere"
    folder.mkdir()
    (here / "nets.py").rename(folder / "nets.py")
    assert run_json("model", "check", "nets:small", *ASKED, "--trust-code", "--code", str(folder))["frozen"] == 0
    assert (here / "it_ran").exists()
