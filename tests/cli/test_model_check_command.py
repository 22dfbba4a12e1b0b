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

class Text(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(4, classes)
    def forward(self, input_ids, attention_mask):
        return {"logits": self.head(self.table(input_ids) * attention_mask[..., None]), "other": input_ids}

class Scores(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.a, self.b = nn.Linear(3, classes), nn.Linear(2, classes)
    def forward(self, left, right):
        return {"scores": self.a(left) + self.b(right), "left": left}

def text(shapes, classes):
    assert shapes == {"input_ids": (6,), "attention_mask": (6,)}
    return Text(classes)

def scores(shapes, classes):
    return Scores(classes)

def pinball(outputs, targets):
    import torch
    apart = targets - outputs[:, 0]
    return torch.maximum(0.9 * apart, -0.1 * apart)

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


def test_several_inputs_targets_and_losses() -> None:
    asked = ("model", "check", "--trust-code")
    words = ("--input", "input_ids=6:int64", "--input", "attention_mask=6:int64")
    found = run_json(*asked, "nets:text", *words, "--classes", "4", "--target", "sequence", "--positions", "6")
    assert (found["verdict"], found["kind"], found["input_shape"]) == ("right", "Text", [12])
    pair = ("nets:scores", "--input", "left=3", "--input", "right=2", "--output", "scores")
    for others in (("--classes", "4"), ("--classes", "1", "--target", "number", "--loss", "nets:pinball")):
        found = run_json(*asked, *pair, *others)
        assert (found["verdict"], found["kind"]) == ("right", "Scores")
        assert found["deviation"] < 1e-5
    for loss in ("huber", "absolute"):
        assert run_json(*asked, *pair, "--classes", "2", "--target", "number", "--loss", loss)["verdict"] == "right"
    refused(*asked, *pair[:-2], "--classes", "4", naming=("none of them called logits", "one of 'scores', 'left'"))
    refused(*asked, *pair, "--classes", "4", "--loss", "huber", naming=("--loss is 'huber'", "cross-entropy"))
    refused(*asked, *pair, "--classes", "1", naming=("--classes is 1",))
    refused(*asked, *pair, "--classes", "4", "--positions", "6", naming=("--target sequence",))
    refused(*asked, *pair, "--classes", "4", "--shape", "6", naming=("give one of the two",))
    refused(*asked, "nets:small", "--classes", "4", naming=("give one of the two",))
    refused(*asked, "nets:scores", "--input", "left", "--classes", "4", naming=("NAME=SHAPE",))
    refused(*asked, "nets:scores", "--input", "left=3:float64", "--classes", "4", naming=("float64",))
