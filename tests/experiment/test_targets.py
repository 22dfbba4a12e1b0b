"""Numbers, several labels, sequences and several inputs through whole runs, against scikit-learn and plain torch."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score, roc_auc_score
from support.commands import refused, run, run_json
from torch import Tensor, nn

import polyeps
from polyeps.data.own_tables import from_arrays, from_frame
from polyeps.data.schema import Column
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.outcome import read
from polyeps.experiment.saved_model import load_model
from polyeps.experiment.target_metrics import target_figures

RECORDS = 180
CLIENTS = np.array(["ash", "elm", "oak"])[np.arange(RECORDS) % 3]
EXPERIMENT = """
rounds = 4
[data]
file = "h.csv"
client = "hospital"
label = "stay"
{data}
[data.columns]
age = {{ range = [0, 100] }}
sex = {{ categories = ["m", "f"] }}
stay = {{ range = [0, 20] }}
[model]
loss = "{loss}"
[budgets]
epsilon = {{ ash = 8.0, elm = 2.0, oak = 20.0 }}
[training]
batch = 16
local_steps = 10
learning_rate = 0.4
"""


def table(folder: Path, loss: str = "squared", data: str = "") -> Path:
    """A table of stays that depend on age and sex, and an experiment about it."""
    chance = np.random.default_rng(3)
    with (folder / "h.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["hospital", "patient", "age", "sex", "stay"])
        for row in range(RECORDS):
            age, sex = chance.uniform(20, 90), chance.choice(["m", "f"])
            stay = 1 + 0.12 * age + 4 * (sex == "m") + chance.normal(0, 0.4)
            writer.writerow([CLIENTS[row], f"p{row // 3}", round(age, 1), sex, round(stay, 2)])
    (folder / "e.toml").write_text(EXPERIMENT.format(loss=loss, data=data))
    return folder / "e.toml"


@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_a_column_of_numbers_is_predicted_from_a_csv_file(tmp_path: Path, loss: str) -> None:
    """Run, report, predict and score by commands; errors in the table's own units."""
    folder = tmp_path / "run"
    table(tmp_path, loss)
    (method,) = run_json("run", str(tmp_path / "e.toml"), "--output", str(folder))["methods"]
    assert method["measure"] == "r2"
    assert 0.6 < method["final_accuracy"] < 1
    assert set(method["metrics"]) == {"mean squared error", "mean absolute error"}
    run("report", str(folder), "--output", str(tmp_path / "r.html"))
    assert "Test r2" in (tmp_path / "r.html").read_text()
    said = run_json("predict", str(folder), str(tmp_path / "h.csv"), "--score", "--keep", "stay")
    truth = np.array([float(row["stay"]) for row in said["predictions"]])
    guessed = np.array([row["prediction"] for row in said["predictions"]])
    assert said["scores"]["r2"] == pytest.approx(r2_score(truth, guessed), abs=1e-5)
    assert said["scores"]["mean squared error"] == pytest.approx(mean_squared_error(truth, guessed), rel=1e-4)
    assert said["scores"]["mean absolute error"] == pytest.approx(mean_absolute_error(truth, guessed), rel=1e-4)
    assert said["scores"]["r2"] > 0.6
    spent = read(folder).spent["fedavg", 1]
    assert spent["elm"] <= 2 < 7 < spent["ash"] <= 8


def test_labels_are_scaled_by_the_declared_range_and_by_nothing_else(tmp_path: Path) -> None:
    columns = {"x": [1.0, 2.0, 3.0], "y": [0.0, 5.0, 30.0], "client": ["a", "a", "b"]}
    schema = {"x": {"range": [0, 4]}, "y": {"range": [0, 20]}}
    found = from_frame(columns, label="y", schema=schema, target="number")
    assert found.labels.tolist() == [-1.0, -0.5, 1.0]  # clamped and scaled; the other records make no difference
    assert found.columns == ("x",)
    assert found.scale == Column("y", range=(0.0, 20.0))
    bare = from_frame(columns, label="y", schema={"x": {"range": [0, 4]}}, target="number")
    assert bare.labels.tolist() == [0.0, 5.0, 30.0]
    assert any("unscaled" in remark for remark in bare.remarks)
    with pytest.raises(InputError, match=r"row 1.*'y'.*not a number"):
        from_frame({**columns, "y": [1.0, "long", 2.0]}, label="y", target="number")
    with pytest.raises(InputError, match=r"data\.columns\.y is the label"):
        from_frame(columns, label="y", schema={"y": {"categories": ["a"]}}, target="number")
    table(tmp_path, "squared", 'unit = "patient"')
    outcome = polyeps.run(config.read_experiment(tmp_path / "e.toml"), tmp_path / "persons", progress=False)
    assert outcome.measure == "r2"
    assert outcome.accuracy["fedavg", 1][-1] > 0.3


OWN = """
import torch
from torch import nn


def quantile(outputs, targets):
    apart = targets - outputs[:, 0]
    return torch.maximum(0.9 * apart, -0.1 * apart)


def mixing(outputs, targets):
    return (outputs[:, 0] - targets + targets.mean()).square()


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, 1)

    def forward(self, x):
        return self.line(x), x


def pair(shape, classes):
    return Pair(shape[0])
"""


def test_own_losses_and_outputs_of_a_file(tmp_path: Path) -> None:
    path = table(tmp_path, "own:quantile", 'target = "number"')
    (tmp_path / "own.py").write_text(OWN)
    refused("run", str(path), "--output", str(tmp_path / "a"), naming=("model.loss", "--trust-code"))
    changes = ["--set", "model.name=own:pair", "--set", "model.output=0"]
    trusted = ["--trust-code", "--output", str(tmp_path / "b")]
    run("run", str(path), *changes, *trusted)
    saved = load_model(tmp_path / "b", code_folder=tmp_path)
    chosen = saved.predict({"age": [30.0, 80.0], "sex": ["m", "m"]})
    assert chosen[0] < chosen[1]
    wrong = ["--set", "model.loss=own:mixing", "--trust-code", "--output", str(tmp_path / "c")]
    refused("run", str(path), *wrong, naming=("depends on the other rows",))
    refused("run", str(path), *changes[:2], *trusted[:1], "--output", str(tmp_path / "c"), naming=("one of 0, 1",))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("change", "naming"),
    [
        ("model.loss=sqared", ("model.loss", "squared")),
        ("data.target=labels", ('model.loss = "squared" is for numbers', "data.target")),
        ("model.name=linear_svm", ("linear_svm has a loss of its own",)),
        ('metrics=["auc"]', ("auc is for one class a record",)),
        ('metrics=["confusion"]', ("confusion is for one class a record",)),
        ("data.partition=dirichlet", ("divides records by class",)),
        ("model.output=logits", ("logistic has one output",)),
        ('data.unit="age"', ("data.columns declares 'age'",)),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(tmp_path: Path, change: str, naming: Any) -> None:
    table(tmp_path)
    refused("run", str(tmp_path / "e.toml"), "--set", change, "--output", str(tmp_path / "run"), naming=naming)
    assert not (tmp_path / "run").exists()


def test_a_loss_for_numbers_on_classes_is_refused(tmp_path: Path) -> None:
    experiment = config.Experiment(model={"loss": "squared"}, budgets={"epsilons": [1.0, 2.0]})
    with pytest.raises(
        InputError, match=r'model\.loss = "squared" is for numbers, but the targets of digits are classes'
    ):
        polyeps.run(experiment, tmp_path / "run", progress=False)


class Reader(nn.Module):
    """A model of words, a mask and numbers, which answers like those of Hugging Face."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], classes: int, tokens: bool) -> None:
        super().__init__()
        assert shapes == {"input_ids": (8,), "attention_mask": (8,), "amount": (3,)}
        self.tokens = tokens
        self.table, self.amount = nn.Embedding(30, 6), nn.Linear(3, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, amount: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.table(input_ids) + self.amount(amount)[:, None]) * attention_mask[..., None]
        if not self.tokens:
            hidden = hidden.sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)
        return {"logits": self.head(hidden), "hidden": hidden}


def features() -> dict[str, Any]:
    chance = np.random.default_rng(5)
    lengths = chance.integers(2, 9, (RECORDS, 1))
    return {
        "input_ids": chance.integers(0, 30, (RECORDS, 8)),
        "attention_mask": (np.arange(8) < lengths).astype(np.int64),
        "amount": chance.normal(size=(RECORDS, 3)).astype(np.float32),
    }


def targets_of(kind: str, given: dict[str, Any]) -> Any:
    amount, chances = given["amount"], 1 / (1 + np.exp(-3 * given["amount"][:, :1]))
    return {
        "class": (amount[:, 0] > 0).astype(int),
        "number": 2 * amount[:, :2] + 1,
        "labels": (amount > 0).astype(int),
        "soft": np.concatenate([1 - chances, chances], axis=1),
        "sequence": np.where(given["attention_mask"] > 0, given["input_ids"] % 2, -100),
    }[kind]


NAMES: dict[Any, list[str]] = {
    "class": ["0", "1"],
    "number": ["u", "v"],
    "labels": ["x", "y", "z"],
    "soft": ["no", "yes"],
    "sequence": ["0", "1"],
}


@pytest.mark.parametrize(
    ("kind", "persons"), [*((kind, False) for kind in NAMES), ("number", True), ("sequence", True)]
)
def test_named_inputs_and_every_target_from_python(tmp_path: Path, kind: Any, persons: bool) -> None:
    given, names = features(), NAMES[kind]
    labels = targets_of(kind, given)
    data: Any = {"features": given, "labels": labels, "clients": CLIENTS}
    if persons:
        data = from_arrays(given, labels, CLIENTS, np.arange(RECORDS) // 6, classes=names, target=kind)
    experiment = config.Experiment(
        rounds=2,
        data={} if persons else {"target": kind, "classes": names},
        model={"name": "reader"},
        budgets={"epsilon": {"ash": 20.0, "elm": 5.0, "oak": 40.0}},
        training={"batch": 8, "local_steps": 4, "learning_rate": 0.3},
    )
    made = {"reader": lambda shapes, classes: Reader(shapes, classes, kind == "sequence")}
    outcome = polyeps.run(experiment, tmp_path / "run", models=made, data=data, progress=False)
    assert math.isfinite(outcome.accuracy["fedavg", 1][-1])
    saved = load_model(tmp_path / "run", models=made)
    some = {name: array[:7] for name, array in given.items()}
    inside: Any = saved.module.module
    with torch.no_grad():
        logits = inside(**{name: torch.from_numpy(array) for name, array in some.items()})["logits"]
    torch.testing.assert_close(saved.outputs(saved.encode(some)), logits)
    found = saved.predict(some)
    if kind == "number":
        assert np.allclose(found, logits.numpy())
    elif kind == "labels":
        assert found == [[name for name, one in zip(names, row, strict=True) if one > 0] for row in logits]
    elif kind == "sequence":
        assert found == [[names[place] for place in row] for row in logits.argmax(-1).tolist()]
    else:
        assert found == [names[place] for place in logits.argmax(-1).tolist()]
    with pytest.raises(InputError, match="the input 'amount' is missing"):
        saved.predict({"input_ids": some["input_ids"]})


def test_figures_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(7)
    outputs, numbers = (torch.randn(50, 3, generator=generator) for _ in range(2))
    scale = Column("y", range=(10.0, 30.0))
    found = target_figures("number", outputs, numbers, scale)
    mine, theirs = 20 + 10 * outputs.double().numpy(), 20 + 10 * numbers.double().numpy()
    assert found["r2"] == pytest.approx(r2_score(theirs, mine))
    assert found["mean squared error"] == pytest.approx(mean_squared_error(theirs, mine))
    assert found["mean absolute error"] == pytest.approx(mean_absolute_error(theirs, mine))
    labels = (numbers > 0).float()
    found = target_figures("labels", outputs, labels)
    assert found["macro auc"] == pytest.approx(roc_auc_score(labels.numpy(), outputs.numpy(), average="macro"))
    assert found["exact match"] == float(((outputs > 0) == (labels > 0)).all(1).double().mean())
    positions = torch.randint(0, 3, (10, 5), generator=generator)
    positions[3], positions[5, 2:] = -100, -100
    scores = outputs.reshape(10, 5, 3)
    found = target_figures("sequence", scores, positions)
    mean = torch.nn.functional.cross_entropy(scores.reshape(-1, 3), positions.reshape(-1))
    assert found["perplexity"] == pytest.approx(math.exp(float(mean)), rel=1e-5)
    kept = positions != -100
    assert found["token accuracy"] == pytest.approx(float((scores.argmax(-1) == positions)[kept].double().mean()))
    assert math.isnan(target_figures("number", outputs[:1], numbers[:1])["r2"])
    assert math.isnan(target_figures("sequence", scores[3:4], positions[3:4])["perplexity"])
    assert math.isnan(target_figures("labels", outputs, torch.ones(50, 3))["macro auc"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(2, 2), r"takes 0 positional .* a function of the shape .*, here \(\(2,\), 2\)"),
        (nn.Linear(2, 2), "is a module; give a function"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused_with_what_it_is_called_with(
    make: Any, said: str, tmp_path: Path
) -> None:
    data = from_arrays(np.zeros((RECORDS, 2)), np.arange(RECORDS) % 2, CLIENTS)
    asked = polyeps.Experiment(rounds=1, model={"name": "own"}, budgets={"epsilon": 1.0})
    with pytest.raises(InputError, match=said):
        polyeps.run(asked, tmp_path / "run", models={"own": make}, data=data, progress=False)
    assert not (tmp_path / "run").exists()


def test_a_loss_for_other_targets_is_refused_with_the_target_to_name(tmp_path: Path) -> None:
    data = from_arrays(np.zeros((RECORDS, 2)), np.arange(RECORDS) % 2, CLIENTS)
    asked = polyeps.Experiment(rounds=1, model={"loss": "squared"}, budgets={"epsilon": 1.0})
    with pytest.raises(InputError, match=r'choose "cross-entropy", or data\.target = "number"'):
        polyeps.run(asked, tmp_path / "run", data=data, progress=False)
