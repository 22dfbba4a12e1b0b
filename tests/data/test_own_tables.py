"""Tables of one's own, whatever they come in: the same records give the same data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.data.dataset import Dataset, hold_out, validation
from polyeps.data.own_files import load_client, load_own
from polyeps.data.own_tables import from_arrays, from_frame, from_torch
from polyeps.data.partition import by_owner, divide, set_apart, unit_sizes
from polyeps.data.schema_files import read_schema, schema_of
from polyeps.errors import DataError, InputError

COLUMNS: dict[str, Any] = {
    "hospital": ["elm", "oak", "elm", "oak", "oak"],
    "patient_id": [1, 1, 2, 3, 1],
    "age": [20.0, None, 40.0, 60.0, 30.0],
    "sex": ["m", "f", "f", "?", "M"],
    "smoker": [True, False, True, True, False],
    "seen": ["2020-01-01", "2020-07-01", "2021-01-01", "2021-01-01", "2022-06-01"],
    "outcome": ["well", "ill", "Ill", "well", "ill"],
}
SCHEMA = {
    "age": {"range": [0, 100], "missing": "mean-of-range"},
    "sex": {"categories": ["m", "f"]},
    "smoker": {"categories": [True, False]},
    "seen": {"dates": ["2020-01-01", "2022-01-01"]},
}
ROLES: dict[str, Any] = {"label": "outcome", "client": "hospital", "unit": "patient_id"}


def made(table: Any, **changes: Any) -> Dataset:
    return from_frame(table, **{**ROLES, "schema": SCHEMA, **changes})


def same(one: Dataset, other: Dataset) -> None:
    assert np.array_equal(one.features, other.features)
    assert np.array_equal(one.labels, other.labels)
    assert one.classes == other.classes
    assert one.group_names == other.group_names
    assert one.columns == other.columns
    assert one.groups is not None
    assert other.groups is not None
    assert np.array_equal(one.groups, other.groups)
    assert np.array_equal(one.persons, other.persons)  # type: ignore[arg-type]


def test_a_dictionary_of_columns() -> None:
    found = made(COLUMNS)
    assert found.classes == ("Ill", "well")  # Ill and ill are one label
    assert found.labels.tolist() == [1, 0, 0, 1, 0]
    assert found.group_names == ("elm", "oak")
    assert found.groups is not None
    assert found.groups.tolist() == [0, 1, 0, 1, 1]
    assert found.persons is not None
    assert found.persons.tolist() == [0, 0, 1, 1, 0]  # numbered client by client
    assert found.person == "patient"
    assert found.columns[:2] == ("age", "age missing")
    assert np.allclose(found.features[:, 0], [-0.6, 0, -0.2, 0.2, -0.4])
    assert found.features[:, 1].tolist() == [0, 1, 0, 0, 0]
    assert found.features[:, 2:5].argmax(axis=1).tolist() == [0, 1, 1, 2, 0]
    assert found.features[:, 5:8].argmax(axis=1).tolist() == [0, 1, 0, 0, 1]
    assert found.features[-1, -1] == 1
    assert len(found.remarks) == 1
    assert made(COLUMNS, classes=["well", "ILL"]).remarks == ()
    assert made(COLUMNS, classes=["well", "ILL"]).labels.tolist() == [0, 1, 1, 0, 1]


def test_frames_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(COLUMNS)
    same(made(frame), made(COLUMNS))
    nullable = frame.convert_dtypes()
    nullable["sex"] = nullable["sex"].astype("category")
    nullable["seen"] = pandas.to_datetime(nullable["seen"])
    nullable.index = list("edcba")
    same(made(nullable), made(COLUMNS))
    twice = pandas.concat([frame, frame["age"]], axis=1)
    with pytest.raises(DataError, match="table has 2 columns named 'age'"):
        made(twice)


def test_frames_of_polars() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(COLUMNS)
    same(made(frame), made(COLUMNS))
    same(made(frame.with_columns(polars.col("seen").str.to_date())), made(COLUMNS))


def test_files_of_every_kind(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    parquet = pytest.importorskip("pyarrow.parquet")
    expected, schema = made(COLUMNS), schema_of(SCHEMA)
    table = arrow.table(COLUMNS)
    same(made(table), expected)
    parquet.write_table(table, tmp_path / "t.parquet")
    feather.write_feather(table, tmp_path / "t.feather")
    with arrow.ipc.new_stream(tmp_path / "t.arrow", table.schema) as stream:
        stream.write_table(table)
    dated = table.set_column(5, "seen", table["seen"].cast("timestamp[s]"))
    parquet.write_table(dated, tmp_path / "dated.parquet")
    lines = [list(COLUMNS), *zip(*COLUMNS.values(), strict=True)]
    text = [["" if cell is None else str(cell) for cell in line] for line in lines]
    (tmp_path / "t.csv").write_text("\ufeff" + "\n".join(",".join(line) for line in text))
    (tmp_path / "s.csv").write_text("\r\n".join(";".join(f'"{cell}"' for cell in line) for line in text))
    (tmp_path / "t.tsv").write_text("\n".join("\t".join(line) for line in text))
    (tmp_path / "UPPER.CSV").write_text("\n".join(",".join(line) for line in text))
    shuffled = [[line[place] for place in (6, 2, 4, 0, 5, 3, 1)] + ["unused"] for line in text]
    shuffled[0][-1] = "note"
    (tmp_path / "shuffled.csv").write_text("\n".join(",".join(line) for line in shuffled))
    columns: Any = {
        name: np.array([np.nan if cell is None else cell for cell in cells]) for name, cells in COLUMNS.items()
    }
    np.savez(tmp_path / "t.npz", **columns)
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 10
    for name in names:
        same(load_own(tmp_path / name, **ROLES, schema=schema), expected)


def test_a_folder_of_files_that_differ_in_order_and_further_columns(tmp_path: Path) -> None:
    (tmp_path / "oak.csv").write_text("outcome,age,patient_id\nill,,7\nwell,60,8\n")
    (tmp_path / "elm.csv").write_text("note;patient_id;age;outcome;hospital\nx;7;20;well;elm\ny;7;40;ill;elm\n")
    (tmp_path / "readme.txt").write_text("nothing")
    found = load_own(tmp_path, **ROLES, schema=schema_of({"age": SCHEMA["age"]}))
    assert found.group_names == ("elm", "oak")
    assert found.features[:, 1].tolist() == [0, 0, 1, 0]
    assert found.persons is not None
    assert found.persons.tolist() == [0, 0, 0, 1]
    partition = by_owner(found)
    assert unit_sizes(found, partition).tolist() == [1, 2]


def test_a_client_reads_its_file_as_all_others_do(tmp_path: Path) -> None:
    text = 'label = "outcome"\nunit = "patient_id"\nclasses = ["well", "ill"]\n[columns]\nage = { range = [0, 100] }\n'
    (tmp_path / "schema.toml").write_text(text)
    (tmp_path / "oak.csv").write_text("patient_id,age,outcome\n7,10,ill\n7,20,ILL\n")
    found = load_client(tmp_path / "oak.csv", tmp_path / "schema.toml")
    assert (found.group_names, found.classes) == (("oak",), ("well", "ill"))
    assert found.labels.tolist() == [1, 1]
    assert found.person == "patient"
    assert load_client(tmp_path / "oak.csv", read_schema(tmp_path / "schema.toml"), "Oak Hill").group_names == (
        "Oak Hill",
    )
    (tmp_path / "schema.toml").write_text(text.replace('classes = ["well", "ill"]\n', ""))
    with pytest.raises(
        DataError, match=r"oak.csv cannot be encoded as by other clients: the schema declares no classes"
    ):
        load_client(tmp_path / "oak.csv", tmp_path / "schema.toml")


def test_arrays_and_torch_data_sets() -> None:
    features, labels = np.arange(24.0).reshape(4, 2, 3), np.array([3, 5, 3, 5])
    found = from_arrays(features, labels, ["b", "a", "b", "b"], persons=[9, 9, 9, 8], person="patient")
    assert found.features.shape == (4, 2, 3)
    assert (found.classes, found.group_names) == (("3", "5"), ("a", "b"))
    assert found.persons is not None
    assert found.persons.tolist() == [0, 0, 0, 1]
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))
    again = from_torch(tensors, clients=["b", "a", "b", "b"], classes=[5, 3])
    assert np.array_equal(again.features, found.features)
    assert again.labels.tolist() == [1, 0, 1, 0]
    assert from_torch(tensors).groups is None
    with pytest.raises(DataError, match=r"labels has shape \(3,\), but there are 4 records"):
        from_arrays(features, labels[:3])
    with pytest.raises(DataError, match="item 0 of the torch data set is not a pair"):
        from_torch([1, 2])
    with pytest.raises(DataError, match=r"row 1, column \(0, 1\): nan is not a finite number"):
        from_arrays(np.where(features == 7, np.nan, features), labels)


@pytest.mark.parametrize(
    ("changes", "roles", "message"),
    [
        ({"outcome": ["a", "b", "", "a", "b"]}, {}, r"row 2 \(client elm\), column 'outcome': the label is empty"),
        (
            {"outcome": ["a", "b", "none", "a", "b"]},
            {},
            r"the label is 'none': fill it in, or declare it in data.classes",
        ),
        ({"outcome": [1.5, 2, 3, 4, 5]}, {}, r"the label 1.5 is not a whole number; labels are classes"),
        ({"hospital": ["a", "b", " ", "a", "b"]}, {}, r"row 2, column 'hospital': the cell is empty"),
        ({"patient_id": [1, None, 1, 1, 1]}, {}, r"row 1 \(client oak\), column 'patient_id': the cell is empty"),
        ({}, {"classes": ("well", "fine")}, r"the label 'ill' is none of data.classes \(well, fine\)"),
        ({}, {"classes": ("ill", "Ill")}, r"data.classes must be at least two different labels"),
        ({}, {"label": "outcom"}, r"no column 'outcom', which data.label names .* did you mean 'outcome'\?"),
        ({}, {"unit": "person"}, r"no column 'person', which data.unit names"),
        ({}, {"unit": "hospital"}, r"data.client and data.unit both name the column 'hospital'"),
        ({}, {"label": "age"}, r"data.columns declares 'age', which data.label names and which is no feature"),
        ({"age": [1, 2, 3]}, {}, r"age has shape \(3,\), but there are 5 records"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(changes: Any, roles: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made({**COLUMNS, **changes}, **roles)


def test_no_more_than_a_hundred_labels_are_read_off_the_records() -> None:
    features, labels = np.zeros((101, 1)), np.arange(101)
    with pytest.raises(DataError, match=r"has 101 different labels; if they are classes, declare them as data.classes"):
        from_arrays(features, labels)
    assert len(from_arrays(features, labels, classes=range(101)).classes) == 101


def test_what_may_be_a_mistake_is_remarked_on() -> None:
    found = made({**COLUMNS, "hospital": ["elm", "Elm", "elm", "Elm", "oak"]}, schema={"sex": {"categories": ["w"]}})
    assert "clients 'Elm' and 'elm' are two clients" in " ".join(found.remarks)
    assert "no cell of sex is one of w" in " ".join(found.remarks)
    plain = from_frame({"client": ["a", "b"], "age": [20, 70], "label": [0, 1]})
    assert "used as it stands, age unscaled" in plain.remarks[0]


visits = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=4, max_size=60)


def units(groups: Any, persons: Any) -> set[tuple[int, int]]:
    return set(zip(groups.tolist(), persons.tolist(), strict=True))


@given(rows=visits, share=st.floats(0.05, 0.9), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_all_records_of_a_person_are_held_out_or_none(rows: list[tuple[int, int]], share: float, seed: int) -> None:
    clients, persons = (np.array(part) for part in zip(*rows, strict=True))
    numbers = np.arange(len(rows), dtype=np.float64)[:, None]
    whole = from_arrays(numbers, np.arange(len(rows)) % 2, clients, persons)
    several = {int(client) for client in clients if len(set(persons[clients == client].tolist())) > 1}
    if not several:
        with pytest.raises(InputError, match="no client with two persons, so nothing can be held out"):
            hold_out(whole, share, np.random.default_rng(seed))
        return
    for split in (hold_out, validation):
        found = split(whole, share, np.random.default_rng(seed))
        training, test = found.features[:, 0].astype(int), found.test_features[:, 0].astype(int)
        assert sorted([*training, *test]) == list(range(len(rows)))
        assert not units(clients[training], persons[training]) & units(clients[test], persons[test])
        assert {int(client) for client in clients[test]} == several  # every client that can spare a person
        assert set(clients[training].tolist()) == set(clients.tolist())
        assert found.test_groups is not None
        named = [found.group_names[group] for group in found.test_groups]
        assert named == [str(client) for client in clients[test]]
        assert found.persons is not None
        counts = unit_sizes(found, by_owner(found))
        assert counts.tolist() == [
            len(set(persons[training][clients[training] == int(name)].tolist())) for name in found.group_names
        ]


@given(rows=visits, share=st.floats(0.05, 0.5), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_all_records_of_a_person_are_set_apart_or_none(rows: list[tuple[int, int]], share: float, seed: int) -> None:
    clients, persons = (np.array(part) for part in zip(*rows, strict=True))
    whole = from_arrays(np.zeros((len(rows), 1)), np.arange(len(rows)) % 2, clients, persons)
    partition = by_owner(whole)
    if min(unit_sizes(whole, partition)) < 2:
        with pytest.raises(InputError, match="has 1 persons, which a share of"):
            set_apart(partition, share, np.random.default_rng(seed), whole)
        return
    kept, apart = set_apart(partition, share, np.random.default_rng(seed), whole)
    assert sorted([*kept.rows, *apart.rows]) == list(range(len(rows)))
    for part in (kept, apart):
        owners = np.repeat([int(name) for name in part.ids], part.sizes)
        assert np.array_equal(owners, clients[part.rows])
        assert part.sizes.min() >= 1
    assert not units(clients[kept.rows], persons[kept.rows]) & units(clients[apart.rows], persons[apart.rows])


def test_persons_are_not_torn_apart_by_a_random_partition() -> None:
    whole = made(COLUMNS)
    with pytest.raises(InputError, match="iid would divide the records of a patient among clients: use as-in-file"):
        divide(whole, "iid", clients=2, generator=np.random.default_rng(1))
    assert divide(whole, "as-in-file", clients=None, generator=None).ids == ("elm", "oak")


@pytest.mark.parametrize(
    "spellings",
    [
        ["17", "17.0", " 17", "017", "17.", "+17", "1.7e1", "１７"],
        ["P 17", "p17", "P17 ", "p\u200b17", "p\u00a017"],
        ["René", "Rene\u0301", "RENÉ"],
        ["100000", "1e+05", "1e5"],
    ],
)
def test_no_spelling_splits_a_person(spellings: list[str]) -> None:
    table = {"client": ["elm"] * 9, "x": [0.5] * 9, "label": [0, 1, 1] * 3, "patient": (spellings * 9)[:8] + ["other"]}
    found = from_frame(table, unit="patient")
    assert found.persons is not None
    assert len(set(found.persons[:8].tolist())) == 1
    assert found.persons[8] != found.persons[0]
    assert any("count as the same patient" in said for said in found.remarks)


@pytest.mark.parametrize("cell", ["NA", "nan", "None", "null", "?"])
def test_a_word_for_nothing_names_no_person(cell: str) -> None:
    table = {"client": ["elm"] * 4, "x": [0.5] * 4, "label": [0, 1] * 2, "patient": ["a", "b", cell, cell]}
    with pytest.raises(DataError, match=r"row 2 \(client elm\), column 'patient': '.*' names nobody: fill it in"):
        from_frame(table, unit="patient")


def test_a_file_is_named_after_its_client_however_its_letters_are_stored(tmp_path: Path) -> None:
    (tmp_path / "Rene\u0301.csv").write_text("client,x,label\nRené,1,0\nRene\u0301,2,1\n", encoding="utf-8")
    assert load_own(tmp_path).group_names == ("René",)


def test_labels_and_columns_that_a_screen_cannot_show_are_refused() -> None:
    table = {"client": ["elm"] * 4, "x": [0.5] * 4, "label": ["a", "\x1b[31mb"] * 2}
    with pytest.raises(DataError, match=r"the label '\\x1b\[31mb' holds letters that cannot be shown"):
        from_frame(table)
    with pytest.raises(DataError, match=r"column 2 is named '\\x1b\[31mx', which cannot be shown"):
        from_frame({"client": table["client"], "\x1b[31mx": table["x"], "label": [0, 1, 0, 1]})


def test_a_client_with_other_words_for_categories_is_pointed_out() -> None:
    schema = {"sex": {"categories": ["m", "f"]}}

    def said(sexes: list[str]) -> str:
        table = {"client": ["elm"] * 4 + ["oak"] * 4, "sex": sexes, "label": [0, 1] * 4}
        (remark,) = from_frame(table, schema=schema, classes=["0", "1"]).remarks
        return remark

    end = "is one of m, f; compare data.columns.sex.categories with the table"
    assert said(["m", "f"] * 2 + ["male", "female"] * 2) == f"no cell of sex of client 'oak' {end}"
    assert said(["male", "female"] * 4) == f"no cell of sex {end}"


@pytest.mark.parametrize("labels", [[[0, 1], [1, 0], [0, 1]], [[0], [1], [0]]])
@pytest.mark.parametrize("classes", [None, ["0", "1"]])
def test_a_class_is_one_value_a_record(labels: list[list[int]], classes: list[str] | None) -> None:
    """Rows of one-hot labels are not classes of their own."""
    with pytest.raises(DataError, match=r"labels has shape \(3, [12]\), but a class is one value .* target="):
        from_arrays(np.zeros((3, 2)), np.array(labels), classes=classes)
