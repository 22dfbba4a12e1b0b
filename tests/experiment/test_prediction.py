"""Predictions for files: tables of any column order, identifiers passed through, scores as scikit-learn has them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from support.saved import records, save

from polyeps.errors import DataError, InputError
from polyeps.experiment.prediction import predict_file
from polyeps.experiment.saved_model import SavedModel, load_model

COLUMNS = [
    {"name": "age", "range": [0, 100], "missing": "mean-of-range"},
    {"name": "bp", "range": [0, 200]},
    {"name": "smoker", "categories": ["True", "False"]},
]


@pytest.fixture
def model(tmp_path: Path) -> SavedModel:
    """A model of a table with an age that may be missing, a blood pressure, and smokers."""
    changes = {"columns": COLUMNS, "label": "outcome", "classes": ["well", "ill"]}
    save(tmp_path / "m.safetensors", "logistic", {"features": 6, "classes": 2}, **changes)
    return load_model(tmp_path / "m.safetensors")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_table_in_any_order_with_gaps_and_unknown_categories(model: SavedModel, tmp_path: Path) -> None:
    text = "bp,patient,smoker,hospital,age\n100,a-1,TRUE,x,50\n0,a-2,maybe,y,\n200,,False,z,100\n"
    found = predict_file(model, write(tmp_path / "new.csv", text), keep=["patient"])
    rows = torch.tensor(
        [[0.0, 0, 0, 1, 0, 0], [0, 1, -1, 0, 0, 1], [1, 0, 1, 0, 1, 0]]
    )  # age, age missing, bp, True, False, other
    chances = model.predict_proba(rows)
    np.testing.assert_allclose(found.probabilities, chances)
    assert found.header(every=True) == [
        "patient",
        "prediction",
        "probability",
        "probability of well",
        "probability of ill",
    ]
    for row, one, name in zip(found.rows(), chances, ("a-1", "a-2", ""), strict=True):
        assert row == [name, ["well", "ill"][int(one.argmax())], one.max()]
    assert found.scores == {}


def test_parquet_and_csv_are_the_same(model: SavedModel, tmp_path: Path) -> None:
    import pyarrow.parquet

    cells: dict[str, list[Any]] = {"age": [50, None], "bp": [90.5, 180.0], "smoker": [True, False], "patient": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(cells), tmp_path / "new.parquet")
    text = "age,bp,smoker,patient\n50,90.5,True,1\n,180.0,False,2\n"
    by_text = predict_file(model, write(tmp_path / "new.csv", text))
    by_type = predict_file(model, tmp_path / "new.parquet", keep=["patient"])
    np.testing.assert_allclose(by_text.probabilities, by_type.probabilities)
    assert [row[0] for row in by_type.rows()] == [1, 2]


def test_scores_are_those_of_scikit_learn(model: SavedModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    ages, pressures, truth = rng.integers(0, 100, 60), rng.integers(0, 200, 60), rng.integers(0, 2, 60)
    lines = [f"{a},{b},True,{['well', 'ill'][t]}" for a, b, t in zip(ages, pressures, truth, strict=True)]
    path = write(tmp_path / "new.csv", "\n".join(["age,bp,smoker,outcome", *lines]))
    found = predict_file(model, path, score=True)
    assert found.scores["accuracy"] == (found.places == truth).mean()
    assert found.scores["auc"] == pytest.approx(roc_auc_score(truth, found.probabilities[:, 1]))
    write(path, path.read_text().replace("ill", "well"))
    assert predict_file(model, path, score=True).scores["auc"] is None
    assert predict_file(model, path).scores == {}


def test_several_classes_are_scored_one_against_the_rest(tmp_path: Path) -> None:
    saved, _ = save(tmp_path / "m", "logistic", {"features": 4, "classes": 3}, classes=["0", "1", "2"])
    features = records(saved, 90).numpy()
    truth = np.arange(90) % 3
    np.savez(tmp_path / "new.npz", features=features.reshape(90, 2, 2), labels=truth)
    found = predict_file(load_model(tmp_path / "m"), tmp_path / "new.npz", score=True)
    wanted = roc_auc_score(truth, found.probabilities, multi_class="ovr", average="macro")
    assert found.scores["auc"] == pytest.approx(wanted)


def test_features_without_names_are_taken_in_order(tmp_path: Path) -> None:
    save(tmp_path / "m", "logistic", {"features": 2, "classes": 2}, classes=["0", "1"])
    model = load_model(tmp_path / "m")
    path = write(tmp_path / "new.csv", "id,p0,p1,label\nx,0.5,1,0\ny,2,-1,1\n")
    found = predict_file(model, path, keep=["id"], score=True)
    np.testing.assert_allclose(found.probabilities, model.predict_proba(np.array([[0.5, 1], [2, -1]])))
    with pytest.raises(DataError, match="row 2: id is 'x', not a number"):
        predict_file(model, path)


def test_features_with_names_are_taken_by_name(tmp_path: Path) -> None:
    save(tmp_path / "m", "logistic", {"features": 2, "classes": 2}, features=["bp", "age"])
    model = load_model(tmp_path / "m")
    found = predict_file(model, write(tmp_path / "new.csv", "age,x,bp\n1,hello,2\n"))
    np.testing.assert_allclose(found.probabilities, model.predict_proba(np.array([[2.0, 1.0]])))


GOOD = "age,bp,smoker,outcome,patient\n50,100,True,ill,7\n"
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no column": (GOOD.replace("bp", "BP"), {}, r"new\.csv has no column 'bp', which the model was trained on"),
    "no number": (GOOD.replace("100", "high"), {}, r"new\.csv, row 2: bp is 'high', not a number"),
    "missing": (GOOD.replace("100", ""), {}, r"new\.csv, row 2: bp is missing"),
    "infinite": (GOOD.replace("100", "inf"), {}, "row 2: bp is .?inf"),
    "no records": (GOOD.splitlines()[0], {}, r"new\.csv holds no records"),
    "empty": ("", {}, r"new\.csv is empty"),
    "ragged": (GOOD + "1,2\n", {}, "row 3: 2 cells where the header names 5"),
    "twice": (GOOD.replace("patient", "bp"), {}, "2 columns named 'bp'"),
    "keep": (GOOD, {"keep": ["name"]}, "--keep name: .* has no such column; it has age, bp"),
    "keep result": (GOOD.replace("patient", "prediction"), {"keep": ["prediction"]}, "rename it"),
    "no label": (GOOD.replace("outcome", "y"), {"score": True}, "has no column 'outcome'.*--label"),
    "no class": (GOOD.replace("ill", "dead"), {"score": True}, r"row 2: the label is 'dead', which .*\(well, ill\)"),
    "label missing": (GOOD.replace("ill", ""), {"score": True}, "row 2: the label is missing"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_files_are_refused_by_place(model: SavedModel, tmp_path: Path, kind: str) -> None:
    text, options, said = WRONG[kind]
    with pytest.raises(InputError, match=said):
        predict_file(model, write(tmp_path / "new.csv", text), **options)


def test_other_files_are_refused(model: SavedModel, tmp_path: Path) -> None:
    for name, content, said in [
        ("new.xlsx", b"PK", "save its sheet as CSV"),
        ("new.npz", b"PK\x03\x04 nothing", "not a readable .npz"),
        ("new.csv", b"\xff\xfe\x00", "not UTF-8"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=said):
            predict_file(model, tmp_path / name)
    with pytest.raises(DataError, match="does not exist"):
        predict_file(model, tmp_path / "none.csv")
    for arrays, said in [
        ({"x": np.zeros((2, 6))}, "has no array 'features'"),
        ({"features": np.zeros((2, 6)), "labels": np.zeros(3)}, "labels has shape"),
        ({"features": np.array([[object()]])}, "not a readable .npz"),
    ]:
        np.savez(tmp_path / "new.npz", **arrays)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=said):
            predict_file(model, tmp_path / "new.npz")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.lists(st.tuples(*[st.text(max_size=5)] * 3), min_size=1, max_size=4))
def test_any_cells_are_predicted_or_refused(model: SavedModel, tmp_path: Path, cells: list[tuple[str, ...]]) -> None:
    import csv

    path = tmp_path / "wild.csv"
    with path.open("w", newline="", encoding="utf-8", errors="surrogatepass") as stream:
        csv.writer(stream).writerows([("age", "bp", "smoker"), *cells])
    try:
        found = predict_file(model, path)
    except DataError:
        return
    assert np.isfinite(found.probabilities).all()
    assert len(found.places) <= len(cells)
