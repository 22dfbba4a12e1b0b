"""`PrivateFederation`: scikit-learn's habits, the same run as an experiment's, and what is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

import polyeps
from polyeps import PrivateFederation
from polyeps.data.own_tables import from_arrays
from polyeps.errors import InputError
from polyeps.experiment.config import Experiment
from polyeps.experiment.saved_model import load_model
from polyeps.models import Model, cross_entropy
from polyeps.private_federation import _ARGUMENTS, _SETTINGS

DIGITS: NDArray[np.float64] = load_digits().data[:360] / 16
LABELS: NDArray[np.int64] = load_digits().target[:360]
WARDS = np.array(["ash", "birch", "cedar"])[np.arange(360) % 3]
BUDGETS = {"ash": 2.0, "birch": 4.0, "cedar": 8.0}
SMALL: dict[str, Any] = {"rounds": 2, "local_steps": 3, "delta": 1e-4}


def small(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 6), nn.LayerNorm(6), nn.Linear(6, classes))


@pytest.fixture(scope="module")
def fitted() -> PrivateFederation:
    return PrivateFederation(budgets=BUDGETS, **SMALL).fit(DIGITS, LABELS, client=WARDS)


# What scikit-learn's own checks ask, without the client argument: records are divided among two clients.
CHECKED = PrivateFederation(budgets=8.0, clients=2, rounds=1, local_steps=2, batch=2)
OTHERWISE = {
    "check_dtype_object": "an object that is no number is a DataError with a remedy, not a TypeError",
    "check_array_api_input": "skipped by scikit-learn unless SCIPY_ARRAY_API is set",
}


def checks() -> list[Any]:
    found: list[Any] = []
    for estimator, check in estimator_checks_generator(CHECKED):
        name = check.func.__name__
        if name not in OTHERWISE:
            found.append(pytest.param(estimator, check, id=f"{len(found)}-{name}"))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("estimator", "check"), checks())
def test_scikit_learns_checks_hold(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def test_most_of_scikit_learns_checks_are_run() -> None:
    assert len(checks()) >= 45


def test_it_is_the_run_of_the_experiment(fitted: PrivateFederation, tmp_path: Path) -> None:
    experiment = Experiment(
        rounds=2,
        budgets={"epsilon": BUDGETS, "delta": 1e-4},
        training={"local_steps": 3},
        algorithm="weiavg",
    )
    data = from_arrays(DIGITS, LABELS, WARDS)
    outcome = polyeps.run(experiment, tmp_path / "run", data=data)
    ((mine, theirs),) = zip(fitted.outcome_.models.values(), outcome.models.values(), strict=True)
    assert torch.equal(mine, theirs)
    assert fitted.spent_ == outcome.spent["weiavg", 1]


def test_arguments_are_settings_with_the_same_defaults() -> None:
    parameters = inspect.signature(PrivateFederation).parameters
    usual = Experiment()
    for table, names in _SETTINGS.items():
        held = getattr(usual, table) if table else usual
        for name in names:
            assert parameters[name].default == (
                getattr(held, name) or None if name == "columns" else getattr(held, name)
            )
    assert set(_ARGUMENTS.values()) <= set(parameters)


def test_ledger_and_certificates_agree(fitted: PrivateFederation) -> None:
    ledger = fitted.ledger_
    assert ledger is not None
    ledger.verify()
    for client, epsilon in BUDGETS.items():
        spent = ledger.spent(client)
        assert 0.9 * epsilon < spent <= epsilon
        assert abs(fitted.certificates_[client].certified - spent) < 1e-9
        assert abs(fitted.spent_[client] - spent) < 1e-9
    ledger.close()


def test_predictions_are_those_of_plain_torch(fitted: PrivateFederation, tmp_path: Path) -> None:
    held = torch.load(fitted.save(tmp_path / "m.pt"), weights_only=True)
    plain = DIGITS.astype(np.float32) @ held["0.weight"].numpy().T + held["0.bias"].numpy()
    assert fitted.predict(DIGITS).tolist() == plain.argmax(1).tolist()
    assert fitted.predict(torch.from_numpy(DIGITS).reshape(-1, 8, 8)).tolist() == plain.argmax(1).tolist()
    exact = torch.softmax(torch.from_numpy(plain).double(), 1).numpy()
    np.testing.assert_allclose(fitted.predict_proba(DIGITS), exact, atol=1e-5)
    assert fitted.score(DIGITS, LABELS) == (plain.argmax(1) == LABELS).mean()


def test_files_and_the_page(fitted: PrivateFederation, tmp_path: Path) -> None:
    assert "ash" in fitted.report(tmp_path / "page.html").read_text()
    loaded = load_model(fitted.save(tmp_path / "m.safetensors"))
    assert loaded.predict(DIGITS) == [str(one) for one in fitted.predict(DIGITS)]
    assert loaded.certificates["ash"] == fitted.certificates_["ash"]
    assert load_model(fitted.save(tmp_path / "bare.safetensors", clients=False)).certificates == {}
    assert fitted.save(tmp_path / "m.onnx").stat().st_size > 1000
    with pytest.raises(InputError, match="exists already"):
        fitted.save(tmp_path / "m.onnx")
    with pytest.raises(InputError, match="give one of"):
        fitted.save(tmp_path / "m.h5")
    with pytest.raises(InputError, match="cannot be written"):
        fitted.save(tmp_path / "nowhere" / "m.pt")


def test_the_temporary_folder_lives_as_long_as_the_object(tmp_path: Path) -> None:
    federation = PrivateFederation(budgets=8.0, clients=2, rounds=1, local_steps=2).fit(DIGITS, LABELS)
    first = federation.outcome_.folder
    federation.fit(DIGITS, LABELS)
    second = federation.outcome_.folder
    assert (first.exists(), second.exists()) == (False, True)
    stored, copied = pickle.dumps(federation), copy.deepcopy(federation)
    assert copied.ledger_ is not None
    expected = federation.predict(DIGITS).tolist()
    del federation
    gc.collect()
    assert not second.exists()
    for one in (pickle.loads(stored), copied):
        assert one.predict(DIGITS).tolist() == expected
        with pytest.raises(InputError, match="is gone; name a folder"):
            one.report(tmp_path / "page.html")


def test_a_named_folder_is_kept(tmp_path: Path) -> None:
    federation = PrivateFederation(budgets=8.0, clients=2, rounds=1, local_steps=2, folder=tmp_path / "run")
    federation.fit(DIGITS, LABELS)
    del federation
    gc.collect()
    assert polyeps.read(tmp_path / "run").spent
    with pytest.raises(InputError, match="holds a run already"):
        PrivateFederation(budgets=8.0, clients=2, folder=tmp_path / "run").fit(DIGITS, LABELS)


def test_a_fit_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = PrivateFederation(budgets={"ash": 1.0}, **SMALL)
    for federation in (
        before,
        clone(before).set_params(budgets=BUDGETS, algorithm="alone"),
        clone(before).set_params(budgets=BUDGETS, model=nn.BatchNorm1d(64)),
        clone(before).set_params(budgets=BUDGETS, learning_rate=-1),
    ):
        with pytest.raises(InputError) as refused:
            federation.fit(DIGITS, LABELS, client=WARDS)
        assert "\n" not in str(refused.value)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(NotFittedError):
            federation.predict(DIGITS)


@pytest.mark.parametrize(
    "budgets",
    [
        {0: 2.0, 1: 4.0, 2: 8.0},
        {"0": 2, "1": 4, "2": 8},
        np.array([2.0, 4.0, 8.0]),
        [2.0, 4.0, 8.0],
        torch.tensor([2.0, 4.0, 8.0]),
        pandas.Series([8.0, 2.0, 4.0], index=[2, 0, 1]),
    ],
)
def test_budgets_by_number(budgets: Any) -> None:
    federation = PrivateFederation(budgets=budgets, **SMALL).fit(DIGITS, LABELS, client=np.arange(360) % 3)
    assert federation.experiment_.budgets.epsilon == {"0": 2.0, "1": 4.0, "2": 8.0}
    assert [round(federation.spent_[client]) for client in "012"] == [2, 4, 8]


def test_one_budget_levels_and_a_distribution() -> None:
    for federation in (
        PrivateFederation(budgets=np.float64(4.0), **SMALL),
        PrivateFederation("mlp", "mixgauss1", hidden=(4,), **SMALL),
        PrivateFederation(settings={"budgets.levels": [{"name": "strict", "epsilon": 2.0}]}, **SMALL),
    ):
        assert set(federation.fit(DIGITS, LABELS, client=WARDS).spent_) == set(BUDGETS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budgets": None}, "budgets is missing"),
        ({"budgets": [1.0, 2.0, 3.0]}, "give a dictionary by client"),
        ({"budgets": [[1.0, 2.0, 3.0]]}, "2 dimensions"),
        ({"budgets": BUDGETS | {"oak": 1.0}}, "oak"),
        ({"budgets": {"ash": 1.0, "birch": 2.0}}, "cedar"),
        ({"budgets": BUDGETS | {"ash": -1}}, "budgets.epsilon.ash is -1"),
        ({"budgets": float("nan")}, "budgets.epsilon is nan"),
        ({"budgets": {1: 2.0, "1": 8.0}}, "names a client twice"),
        ({"budgets": True}, "budgets.epsilon is True"),
        ({"delta": {"oak": 1e-5}}, "oak"),
        ({"algorithm": "fedavgg"}, "did you mean 'fedavg'"),
        ({"algorithm": 3}, "algorithm is a int"),
        ({"algorithm": "alone"}, "no common model"),
        ({"model": 3}, "model is a int"),
        ({"model": "resnet"}, "there is no model 'resnet'"),
        ({"model": "small:net"}, "names code"),
        ({"settings": {"training.batch": 3}}, "is the argument batch"),
        ({"settings": {"serving.speed": 3}}, "serving"),
        ({"settings": {"algorithm.budgets": "none"}}, "is the argument algorithm"),
        ({"settings": {"rounds.most": 3}}, "rounds is a value"),
        ({"settings": {"training": {"clip": 9.0}}}, "would replace arguments"),
        ({"budgets": []}, "array of 0"),
        ({"budgets": ["a", "b", "c"]}, "dictionary by client"),
        ({"budgets": pandas.Series([1.0, 2.0, 8.0, 9.0], index=[*BUDGETS, "ash"])}, "names a client twice"),
        ({"dtype": "float64"}, "records are float32 or int64"),
        ({"dtype": "int64"}, "fractions"),
        ({"columns": {"age": {"range": [0, 1]}}}, "X is an array"),
        ({"classes": [0, 1]}, "none of data.classes"),
        ({"classes": [0, "0"]}, "two labels that are written '0'"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(changes: dict[str, Any], said: str) -> None:
    federation = PrivateFederation(budgets=BUDGETS, **SMALL).set_params(**changes)
    with pytest.raises(InputError, match=said) as refused:
        federation.fit(DIGITS, LABELS, client=WARDS)
    assert "\n" not in str(refused.value)


def test_records_and_clients_must_be_given() -> None:
    federation = PrivateFederation(budgets=8.0, **SMALL)
    with pytest.raises(InputError, match="fit needs client="):
        federation.fit(DIGITS, LABELS)
    with pytest.raises(InputError, match=r"client has shape \(5,\)"):
        federation.fit(DIGITS, LABELS, client=WARDS[:5])
    with pytest.raises(InputError, match="test must be a pair"):
        federation.fit(DIGITS, LABELS, client=WARDS, test=DIGITS)
    with pytest.raises(InputError, match="test has other features"):
        federation.fit(DIGITS, LABELS, client=WARDS, test=(DIGITS[:, :3], LABELS))


def test_text_labels_are_predicted_and_stored(tmp_path: Path) -> None:
    words = np.array(["even", "odd"])[LABELS % 2]
    federation = PrivateFederation(small, 8.0, **SMALL).fit(DIGITS, words, client=WARDS)
    assert federation.classes_.tolist() == ["even", "odd"]
    assert set(federation.predict(DIGITS)) <= {"even", "odd"}
    assert 0 <= federation.score(DIGITS, words) <= 1
    loaded = load_model(federation.save(tmp_path / "m.safetensors"), models={"small": small})
    assert loaded.classes == ("even", "odd")
    assert loaded.predict(DIGITS) == federation.predict(DIGITS).tolist()
    booleans = PrivateFederation(budgets=8.0, **SMALL).fit(DIGITS, LABELS > 4, client=WARDS)
    assert booleans.predict(DIGITS).dtype == bool


def test_declared_classes_may_be_more_and_in_any_order() -> None:
    federation = PrivateFederation(budgets=8.0, classes=[11, *range(9, -1, -1)], **SMALL)
    federation.fit(DIGITS, LABELS, client=WARDS)
    assert federation.predict_proba(DIGITS).shape == (360, 11)
    assert federation.classes_.tolist() == [11, *range(9, -1, -1)]


def table() -> pandas.DataFrame:
    rng = np.random.default_rng(1)
    sex = np.array(["m", "f"])[rng.integers(0, 2, 120)]
    return pandas.DataFrame({"age": rng.integers(20, 90, 120), "sex": sex, "label": rng.normal(size=120)})


SCHEMA = {"age": {"range": [0, 110]}, "sex": {"categories": ["m", "f"]}, "label": {"range": [-3, 3]}}


def test_a_table_with_texts_needs_a_schema(tmp_path: Path) -> None:
    frame, outcome = table(), pandas.Series(["well", "ill"] * 60, name="outcome")
    wards = pandas.Series(["ash", "birch"] * 60, name="client")
    federation = PrivateFederation(budgets=8.0, **SMALL)
    with pytest.raises(InputError, match=r"column 'sex': '[mf]' is not a number: declare data.columns"):
        federation.fit(frame, outcome, client=wards)
    federation.set_params(columns=SCHEMA).fit(frame, outcome, client=wards)
    assert federation.feature_names_in_.tolist() == ["age", "sex", "label"]
    assert set(federation.predict(frame)) <= {"well", "ill"}
    assert federation.predict(frame[["sex", "label", "age"]]).tolist() == federation.predict(frame).tolist()
    loaded = load_model(federation.save(tmp_path / "m.safetensors"))
    assert loaded.predict(frame) == federation.predict(frame).tolist()
    assert loaded.metadata.label == "outcome"
    with pytest.raises(InputError, match="no column 'sex'"):
        federation.predict(frame[["age"]])


def test_a_table_of_numbers_and_roles_of_the_same_names() -> None:
    frame = table()[["age", "label"]].assign(client=1.0)
    federation = PrivateFederation(budgets=8.0, **SMALL).fit(frame, ["a", "b"] * 60, client=["x", "y"] * 60)
    assert federation.experiment_.data.label == "label_"
    assert federation.feature_names_in_.tolist() == ["age", "label", "client"]
    assert set(federation.spent_) == {"x", "y"}
    with pytest.raises(InputError, match="dtype"):
        federation.set_params(dtype="int64").fit(frame, ["a", "b"] * 60, client=["x", "y"] * 60)


def test_tokens_stay_whole_numbers() -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 9, (120, 5))
    model = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(15, 2))
    federation = PrivateFederation(model, 8.0, dtype="int64", clients=3, **SMALL).fit(tokens, tokens[:, 0] > 4)
    assert federation.model_.metadata.input_type == "int64"
    assert federation.predict(tokens).shape == (120,)
    with pytest.raises(InputError, match="whole number"):
        federation.predict(tokens - 5)


def test_modules_models_and_factories() -> None:
    torch.manual_seed(1)
    module = small((64,), 10)
    before = copy.deepcopy(module.state_dict())
    by_module = PrivateFederation(module, 8.0, **SMALL).fit(DIGITS, LABELS, client=WARDS)
    by_model = PrivateFederation(Model(module, cross_entropy, (64,)), 8.0, **SMALL).fit(DIGITS, LABELS, client=WARDS)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert by_module.predict(DIGITS).tolist() == by_model.predict(DIGITS).tolist()
    cloned = clone(by_module).fit(DIGITS, LABELS, client=WARDS)
    assert cloned.predict(DIGITS).tolist() == by_module.predict(DIGITS).tolist()
    assert "small" in repr(PrivateFederation(small, 8.0).fit(DIGITS, LABELS, client=WARDS).model_)


class Projected(nn.Module):
    """A module that draws a tensor which is neither a parameter nor a buffer, and so in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.randn(64, 20)
        self.last = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(x.flatten(1) @ self.matrix)
        return found


def test_what_a_module_draws_is_drawn_again(tmp_path: Path) -> None:
    federation = PrivateFederation(lambda *_: Projected(), 8.0, rounds=8, seed=7, learning_rate=0.3)
    federation.fit(DIGITS, LABELS, client=WARDS, test=(DIGITS, LABELS))
    ((accuracies),) = federation.outcome_.accuracy.values()
    assert accuracies[-1] > 0.4
    assert federation.score(DIGITS, LABELS) == accuracies[-1]
    loaded = load_model(federation.save(tmp_path / "m.safetensors"), models={"own-model": lambda *_: Projected()})
    assert loaded.predict(DIGITS) == [str(one) for one in federation.predict(DIGITS)]


def test_persons_are_protected_together() -> None:
    federation = PrivateFederation(budgets=8.0, **SMALL)
    persons = pandas.Series(np.arange(360) // 6, name="patient")
    federation.fit(DIGITS, LABELS, client=np.array(["ash", "birch", "cedar"])[np.arange(360) // 120], unit=persons)
    assert federation.certificates_["ash"].unit == "person"
    assert federation.certificates_["ash"].person == "patient"


def test_test_records_are_given_or_held_out() -> None:
    federation = PrivateFederation(budgets=8.0, **SMALL).fit(DIGITS, LABELS, client=WARDS)
    assert federation.outcome_.clients_frame().records.sum() == 288
    federation.fit(DIGITS, LABELS, client=WARDS, test=(DIGITS[:50], LABELS[:50]))
    assert federation.outcome_.clients_frame().records.sum() == 360
    ((accuracies),) = federation.outcome_.accuracy.values()
    assert accuracies[-1] == federation.score(DIGITS[:50], LABELS[:50])


def test_clients_follow_their_records_through_cross_validation() -> None:
    federation = PrivateFederation(budgets=BUDGETS, rounds=1, local_steps=2)
    scores = cross_val_score(federation, DIGITS, LABELS, cv=2, params={"client": WARDS})
    assert len(scores) == 2
    search = GridSearchCV(federation, {"clip": [0.5, 1.0]}, cv=2).fit(DIGITS, LABELS, client=WARDS)
    assert set(search.best_estimator_.spent_) == set(BUDGETS)


def test_other_settings_and_algorithms() -> None:
    from polyeps.algorithms.fedavg import fedavg

    def average(local: Any) -> Any:
        return fedavg(local)

    more = {"participation.kind": "poisson", "participation.share": 0.5, "metrics": ["balanced_accuracy"]}
    federation = PrivateFederation(
        budgets=BUDGETS, algorithm={"name": "pfa", "label": "mine"}, settings=more, **SMALL
    ).fit(DIGITS, LABELS, client=WARDS)
    assert federation.experiment_.participation.share == 0.5
    assert list(federation.outcome_.spent) == [("mine", 1)]
    own = PrivateFederation(budgets=BUDGETS, algorithm=average, **SMALL).fit(DIGITS, LABELS, client=WARDS)
    usual = PrivateFederation(budgets=BUDGETS, algorithm="fedavg", **SMALL).fit(DIGITS, LABELS, client=WARDS)
    assert own.predict(DIGITS).tolist() == usual.predict(DIGITS).tolist()


def test_one_gradient_a_round_takes_no_arguments_of_local_steps() -> None:
    recipe = {"training.kind": "gradient", "server.learning_rate": 2.0, "model.encoder": "random-fourier"}
    asked: dict[str, Any] = {"budgets": BUDGETS, "rounds": 2, "settings": recipe}
    found = PrivateFederation(**asked).fit(DIGITS, LABELS, client=WARDS)
    assert found.experiment_.training.kind == "gradient"
    assert found.experiment_.server.learning_rate == 2.0
    assert found.score(DIGITS, LABELS) > 0.3
    with pytest.raises(InputError, match='batch has no effect with kind = "gradient"'):
        PrivateFederation(**asked, batch=4).fit(DIGITS, LABELS, client=WARDS)
