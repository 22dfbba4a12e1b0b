"""Saved models: they predict what the run measured, and say what clients agreed to disclose and no more."""

import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.federations import EPSILONS, experiment
from support.saved import described, save
from torch import Tensor, nn

import polyeps
from polyeps.data.schema import Column, Schema
from polyeps.errors import DataError, InputError
from polyeps.experiment import run as runs
from polyeps.experiment.job import prepare
from polyeps.experiment.model_metadata import SIMULATED, check_description, named_tensors, write_model
from polyeps.experiment.outcome import read
from polyeps.experiment.population import populate
from polyeps.experiment.saved_model import find_model, load_model
from polyeps.model_files import ModelMetadata, model_bytes, read_model_file
from polyeps.models import Model, cross_entropy, logistic

COLUMNS = (
    Column("age", range=(0, 110), missing="mean-of-range"),
    Column("bp", range=(50, 250)),
    Column("sex", categories=("m", "f")),
    Column("seen", dates=(date(2020, 1, 1), date(2024, 12, 31)), missing="mean-of-range"),
)
TABLE: dict[str, list[Any]] = {
    "seen": ["2021-05-03", None],
    "sex": ["f", "unknown"],
    "patient": [7, 8],
    "bp": [120, 300.0],
    "age": ["", 44],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two methods and two seeds."""
    found = tmp_path_factory.mktemp("runs") / "run"
    runs.run(experiment(["fedavg", "fedavg (none)"], seeds=[3, 4], model={"name": "mlp", "hidden": [7]}), found)
    return found


def test_predictions_are_those_that_the_run_measured(folder: Path) -> None:
    outcome = read(folder)
    population = populate(experiment(["fedavg", "fedavg (none)"], model={"name": "mlp", "hidden": [7]}), 4)
    features, labels = population.test
    model = load_model(folder, method="fedavg (none)", seed=4)
    wanted = population.model.outputs(outcome.models["fedavg (none)", 4], features)
    assert torch.equal(model.outputs(model.encode(features)), wanted)
    right = [model.classes.index(name) for name in model.predict(population.dataset.test_features)]
    assert (np.array(right) == labels.numpy()).mean() == outcome.accuracy["fedavg (none)", 4][-1]
    np.testing.assert_allclose(model.predict_proba(features), torch.softmax(wanted.double(), 1).numpy(), atol=1e-12)


def test_a_run_describes_its_models(folder: Path) -> None:
    model = polyeps.load_model(folder, method="fedavg", seed=3)
    about = model.metadata
    assert about.model.name == "mlp"
    assert about.model.arguments == {"features": 64, "hidden": (7,), "classes": 10}
    assert (about.polyeps, about.torch) == (polyeps.__version__, str(torch.__version__))
    assert (about.experiment, about.data, about.method, about.seed, about.rounds) == ("small", "digits", "fedavg", 3, 3)
    spent = read(folder).spent["fedavg", 3]
    assert {client: one.certified for client, one in model.certificates.items()} == spent
    assert about.clients
    assert [one.epsilon for one in about.clients.values()] == list(EPSILONS)
    first = model.certificates["0"]
    assert (first.unit, first.adjacency, first.trust, first.delta) == ("record", "zero-out", "nobody", 1e-3)
    assert SIMULATED in first.sentence
    open_one = load_model(folder, method="fedavg (none)", seed=3)
    assert "Nothing is guaranteed" in open_one.certificates["0"].sentence


def test_hidden_budgets_and_names_stay_out(tmp_path: Path) -> None:
    runs.run(experiment("pdp-fl", budgets={"disclosed": False}, data={"clients": 6}), tmp_path / "run")
    (path,) = (tmp_path / "run" / "models").glob("*")
    model = load_model(tmp_path / "run")
    assert model.metadata.clients is None
    assert "budgets.disclosed = false" in model.metadata.withheld
    assert model.certificates == {}
    with safetensors.safe_open(path, "pt") as stored:
        text = str(stored.metadata())
    for epsilon in EPSILONS:
        assert str(epsilon) not in text.replace("0.2.0", "")
    assert "delta" not in text


def test_models_of_a_folder_are_chosen_by_method_and_seed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"4 of the models in .* choose one with --method and --seed, in Python with .*: 'fedavg' with se",
    ):
        load_model(folder)
    with pytest.raises(InputError, match="2 of the models"):
        load_model(folder, seed=3)
    with pytest.raises(InputError, match=r"no finished model in .* is by 'pfa'; choose one of fedavg, fedavg"):
        load_model(folder, method="pfa")
    path = find_model(folder, "fedavg", 3)
    assert path == folder / "models" / "fedavg-3.safetensors"
    with pytest.raises(InputError, match="is one model"):
        find_model(path, "fedavg")


def job_with_schema() -> Any:
    """A job whose records are those of a table with declared columns."""
    wanted = experiment("weiavg", model={"name": "logistic"})
    population = populate(wanted, 1)
    schema = Schema(COLUMNS)
    width = len(schema.outputs)

    def cut(features: Any) -> Any:
        return np.ascontiguousarray(features.reshape(len(features), -1)[:, 20 : 20 + width])

    dataset = population.dataset
    dataset = replace(
        dataset,
        features=cut(dataset.features),
        test_features=cut(dataset.test_features),
        schema=schema,
        columns=schema.outputs,
    )
    model = logistic(width, 10)
    found = replace(population, dataset=dataset, model=model, start=torch.randn(model.size))
    return wanted, prepare(wanted, wanted.algorithm[0], found)


def with_schema(path: Path) -> Any:
    wanted, job = job_with_schema()
    spent = dict.fromkeys(job.terms, 0.25)
    write_model(path, job, wanted, job.population.start, 2, None, (spent, {}))
    return job


def test_tables_are_encoded_as_the_training_records_were(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    job = with_schema(tmp_path / "m.safetensors")
    model = load_model(tmp_path / "m.safetensors")
    assert model.schema == Schema(COLUMNS)
    assert model.metadata.features == Schema(COLUMNS).outputs
    by_hand = torch.tensor(
        [
            [0, 1, 2 * 70 / 200 - 1, 0, 1, 0, 2 * 488 / 1826 - 1, 0],
            [2 * 44 / 110 - 1, 0, 1, 0, 0, 1, 0, 1],
        ]
    )
    torch.testing.assert_close(model.encode(TABLE), by_hand)
    wanted = job.population.model.outputs(job.population.start, by_hand)
    for table in (TABLE, pandas.DataFrame(TABLE), by_hand, by_hand.numpy()):
        np.testing.assert_allclose(model.predict_proba(table), torch.softmax(wanted.double(), 1).numpy(), atol=1e-6)
    assert model.predict(TABLE) == [str(place) for place in wanted.argmax(1).tolist()]
    assert {one.certified for one in model.certificates.values()} == {0.25}


def test_a_model_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fedavg-1: its model cannot be described \(arguments\.hidden.* at most 64"):
        runs.run(experiment("fedavg", model={"name": "mlp", "hidden": [2] * 70}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    wanted, job = job_with_schema()
    check_description(job, wanted, None)
    many = Schema((Column("town", categories=tuple(f"{place:0900}" for place in range(10_000))),))
    dataset = replace(job.population.dataset, schema=many)
    with pytest.raises(InputError, match=r"more than 8388608; declare fewer"):
        check_description(replace(job, population=replace(job.population, dataset=dataset)), wanted, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bp": None}, "has no column 'bp', which the model was trained on; it has seen, sex, patient, age"),
        ({"bp": ["", 1]}, "record 0: bp is missing"),
        ({"bp": [1, "high"]}, "record 1: bp is 'high', not a number"),
        ({"bp": [1]}, "different lengths"),
        ({"seen": ["yesterday", ""]}, "record 0: seen is 'yesterday', not a date"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with_schema(tmp_path / "m.safetensors")
    table = {name: cells for name, cells in {**TABLE, **change}.items() if cells is not None}
    with pytest.raises(DataError, match=said):
        load_model(tmp_path / "m.safetensors").predict(table)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (np.zeros((2, 4)), "has 4 features a record, and the model takes 3"),
        (np.zeros(3), "has no features a record"),
        (np.zeros((0, 3)), "holds no records"),
        (np.array([["a", "b", "c"]]), "not numbers"),
        (np.array([[0, np.nan, 0]]), "record 0: a feature is nan"),
        (np.array([[0, 0, 0], [0, 1e300, 0]]), "record 1: a feature is too large"),
        ({"a": [1], "b": ["x"], "c": [1]}, "record 0: b is 'x', not a number"),
        (7, "a int is no table"),
        ({}, "has no columns"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, records: Any, said: str) -> None:
    save(tmp_path / "m", "logistic", {"features": 3, "classes": 2})
    with pytest.raises(InputError, match=said):
        load_model(tmp_path / "m").predict(records)


def test_one_output_is_the_log_odds_of_the_second_class(tmp_path: Path) -> None:
    model, vector = save(tmp_path / "m", "binary_svm", {"features": 3})
    features = torch.randn(50, 3)
    outputs = model.outputs(vector, features)
    saved = load_model(tmp_path / "m")
    chances = saved.predict_proba(features)
    np.testing.assert_allclose(chances[:, 1], 1 / (1 + np.exp(-outputs[:, 0].double().numpy())))
    np.testing.assert_allclose(chances.sum(1), 1)
    assert saved.predict(features) == [f"class {int(one > 0)}" for one in outputs[:, 0]]


def test_words_are_numbered_as_in_training(tmp_path: Path) -> None:
    words = ["good", "bad", "film"]
    save(tmp_path / "m", "lstm", {"vocabulary": 5, "length": 4}, words=words)
    model = load_model(tmp_path / "m")
    found = model.encode({"text": ["A GOOD film!", "bad"]})
    assert found.tolist() == [[0, 1, 2, 4], [0, 0, 0, 3]]
    assert len(model.predict({"text": ["A GOOD film!", "bad"]})) == 2
    for wrong in (5, -1, 0.5):
        with pytest.raises(DataError, match=r"record 1: .* is not a whole number from 0 to 4"):
            model.predict(np.array([[0, 0, 0, 0], [0, 0, 0, wrong]]))


def test_a_diverged_model_does_not_predict(tmp_path: Path) -> None:
    model, vector = save(tmp_path / "m", "logistic", {"features": 3, "classes": 2})
    metadata, _ = read_model_file(tmp_path / "m")
    (tmp_path / "m").write_bytes(model_bytes(metadata, named_tensors(model, torch.full_like(vector, torch.nan))))
    with pytest.raises(InputError, match="training diverged"):
        load_model(tmp_path / "m").predict(np.zeros((1, 3)))


class Tied(nn.Module):
    """A module with a shared, a frozen and a remembered tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(3, 2)
        self.last.bias.requires_grad = False
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.again(torch.tanh(self.first(rows * self.scale)))))
        return found


def test_shared_frozen_and_remembered_tensors_come_out(tmp_path: Path) -> None:
    module = Tied()
    model = Model(module, cross_entropy, (3,), torch.float32)
    vector = torch.randn(model.size)
    values = described(model, "tied", {"shape": [3], "classes": 2})
    metadata = ModelMetadata.model_validate(values)
    (tmp_path / "m").write_bytes(model_bytes(metadata, named_tensors(model, vector)))
    plain = Tied()
    plain.load_state_dict(read_model_file(tmp_path / "m")[1])
    rows = torch.randn(5, 3)
    torch.testing.assert_close(plain(rows), model.outputs(vector, rows))
    loaded = load_model(tmp_path / "m", models={"tied": lambda *_: Tied()})
    torch.testing.assert_close(loaded.outputs(rows), model.outputs(vector, rows))
    assert loaded.metadata == metadata
    with pytest.raises(InputError, match="tied"):
        load_model(tmp_path / "m")
    with pytest.raises(InputError, match=r"holds a tensor 'again\.weight'"):
        load_model(tmp_path / "m", models={"tied": lambda *_: nn.Linear(3, 2)})


CODE = """
import torch
from torch import nn

def factory(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, classes))

def half():
    return lambda records: records.flatten(1)[:, :32]
"""


def test_a_model_that_python_gave_to_the_run_is_given_again(tmp_path: Path) -> None:
    def net(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))

    runs.run(experiment("fedavg", model={"name": "net"}), tmp_path / "run", models={"net": net})
    with pytest.raises(InputError, match=r"your own model 'net'.* load_model\(..., models=\{'net': FUNCTION\}\)"):
        load_model(tmp_path / "run")
    model = load_model(tmp_path / "run", models={"net": net})
    assert "net by fedavg, seed 1" in repr(model)


def test_own_models_and_encoders_need_trust_and_the_code_they_were_trained_with(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    wanted = experiment("fedavg", model={"name": "own:factory", "encoder": "own:half"})
    outcome = runs.run(wanted, tmp_path / "run", code_folder=tmp_path)
    with pytest.raises(InputError, match="--trust-code"):
        load_model(tmp_path / "run")
    model = load_model(tmp_path / "run", code_folder=tmp_path)
    assert list(model.metadata.code) == ["own"]
    dataset = populate(experiment("fedavg"), 1).dataset
    right = [model.classes.index(name) for name in model.predict(dataset.test_features)]
    assert (np.array(right) == dataset.test_labels).mean() == outcome.accuracy["fedavg", 1][-1]
    with pytest.raises(InputError, match="encoder own:half takes 64"):
        model.predict(np.zeros(2))
    with pytest.raises(InputError, match="has 3 numbers a record"):
        model.predict(np.zeros((2, 3)))
    (tmp_path / "own.py").write_text(CODE + "\n")
    with pytest.raises(InputError, match="has changed since the run began"):
        load_model(tmp_path / "run", code_folder=tmp_path)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3), st.integers(2, 30))
def test_a_record_is_predicted_alike_alone_and_among_others(row: list[float], count: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "m", "mlp", {"features": 3, "hidden": [4], "classes": 3})
        model = load_model(Path(folder) / "m")
    others = np.vstack([np.random.default_rng(count).normal(size=(count, 3)), row])
    np.testing.assert_allclose(model.predict_proba(np.array([row]))[0], model.predict_proba(others)[-1], atol=1e-6)
