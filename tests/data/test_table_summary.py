"""A table is described by guesses at its columns, and a schema is drafted that fits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.commands import refused, run, run_json

from polyeps.data.own_files import load_client
from polyeps.data.own_tables import frame_table, from_frame
from polyeps.data.table_summary import client_count, of_client, summarise_table
from polyeps.errors import DataError

TABLE: dict[str, Any] = {
    "row": [1, 2, 3, 4],
    "site_name": ["a", "a", "b", "b"],
    "Patient ID": ["x", "y", "x", "x"],
    "visit_id": [77, 12, 31, 54],
    "age": [20, None, 45, 61],
    "free": ["fine", "", "as before", "?"],
    "gone": ["", None, "", ""],
    "seen": ["2020-02-01", "2021-02-01", "2020-05-01", "2020-02-03"],
    "outcome": [0, 1, 1, 0],
}


def test_roles_are_guessed_from_names() -> None:
    table = frame_table(TABLE)
    found = summarise_table(table, label=None, client=None, unit=None)
    roles = {column.name: (column.role, column.kind) for column in found.columns}
    assert roles == {
        "row": ("left out", "text"),
        "site_name": ("client", "category"),
        "Patient ID": ("unit", "category"),
        "visit_id": ("left out", "text"),
        "age": ("feature", "number"),
        "free": ("feature", "category"),
        "gone": ("left out", "empty"),
        "seen": ("feature", "date"),
        "outcome": ("label", "number"),
    }
    assert found.declared is not None
    assert found.declared.classes == ("0", "1")
    assert client_count(table, found) == 2
    assert next(column.missing for column in found.columns if column.name == "age") == 1


def test_a_column_that_is_left_out_has_a_reason() -> None:
    table: dict[str, Any] = {
        "outcome": ["no", "yes"] * 15,
        "sex": ["m", "M", "f"] * 10,
        "Unnamed: 0": list(range(30, 0, -1)),
        "bp": ["120,5", "130,1", "k.A."] * 10,
        "age": [*map(str, range(20, 49)), "k.A."],
        "seen": [f"{day}.01.2024" for day in range(1, 31)],
        "code": [f"I{place}" for place in range(30)],
        "gone": [""] * 30,
    }
    found = summarise_table(frame_table(table), label=None, client=None, unit=None)
    assert {column.name: column.suggestion for column in found.columns} == {
        "outcome": "the label",
        "sex": "categories M, f",
        "Unnamed: 0": "left out: it counts rows or names them",
        "bp": "left out: decimal commas; write 120.5 for 120,5",
        "age": "left out: 'k.A.' is no number; empty or correct it",
        "seen": "left out: dates must read like 2024-05-31, not 1.01.2024",
        "code": "left out: 30 different texts; declare their categories, or group them",
        "gone": "left out: all cells are missing",
    }


def test_labels_that_mean_the_same_are_remarked_on(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,outcome\n1,0\n2,yes\n3,1\n5,True\n5,no\n")
    told = run("data", "describe", str(path)).stderr
    assert "the labels 1, True and yes are 3 classes; if they mean the same, write them in one way" in told
    assert any("1, True and yes" in said for said in from_frame(TWO_WAYS, label="y", client=None).remarks)


TWO_WAYS = {"x": [1, 2, 3, 4], "y": ["0", "1", "True", "yes"]}


def test_given_roles_come_before_guesses() -> None:
    found = summarise_table(frame_table(TABLE), label="free", client="Patient ID", unit=None)
    roles = {column.role: column.name for column in found.columns}
    assert (roles["label"], roles["client"]) == ("free", "Patient ID")
    with pytest.raises(DataError, match=r"no column 'agee', which --label-column names .* did you mean 'age'\?"):
        summarise_table(frame_table(TABLE), label="agee", client=None, unit=None)


def test_one_client_is_described_by_itself() -> None:
    table = of_client(frame_table(TABLE), "site_name", "b")
    found = summarise_table(table, label=None, client="site_name", unit=None)
    assert found.records == 2
    assert found.declared is not None
    assert found.declared.schema is not None
    assert next(column.range for column in found.declared.schema.columns if column.name == "age") == (40, 70)
    with pytest.raises(DataError, match="has no rows of client 'c'; its column 'site_name' has a, b"):
        of_client(frame_table(TABLE), "site_name", "c")


def test_a_file_is_read_by_the_schema_that_was_drafted_from_it(tmp_path: Path) -> None:
    file, schema = tmp_path / "oak.csv", tmp_path / "schema.toml"
    file.write_text('"blood p.",sex "x",label\n120,m,no\n,f,yes\n140.5,\u00e9,no\n', encoding="utf-8")
    run("data", "describe", str(file), "--write", str(schema))
    table = load_client(file, schema)
    assert table.features.shape == (3, 2 + 4)
    assert table.classes == ("no", "yes")
    refused("data", "describe", str(file), "--write", str(schema), naming=("exists already",))
    refused("data", "describe", str(tmp_path / "no.csv"), naming=("no.csv does not exist",))
    shown = run_json("data", "show", str(tmp_path), "--schema", str(schema), "--partition", "as-in-file")
    assert shown["partition"]["clients"] == ["oak"]
