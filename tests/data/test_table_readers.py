from __future__ import annotations

import builtins
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyeps.data.dataset import Dataset
from polyeps.data.own_tables import assemble
from polyeps.data.schema import Column
from polyeps.data.schema_files import TableDeclaration
from polyeps.data.table_readers import read_columns
from polyeps.errors import DataError

GOOD = "age,height,label\n1,2.5,0\n3,-4e1,1\n"


def read(path: Path) -> Dataset:
    """The file of one client, called as the file is."""
    return assemble(path.name, [read_columns(path)], TableDeclaration(), [path.stem])


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "anna.csv"
    path.write_text(text)
    return path


def test_a_csv_file_as_it_stands(tmp_path: Path) -> None:
    table = read(csv_file(tmp_path, "\ufeff" + GOOD + "\n"))
    assert table.columns == ("age", "height")
    assert table.features.tolist() == [[1, 2.5], [3, -40]]
    assert table.labels.tolist() == [0, 1]
    assert table.classes == ("0", "1")


def test_equal_records_are_all_kept(tmp_path: Path) -> None:
    table = read(csv_file(tmp_path, GOOD + "3,-4e1,1\n3,-4e1,1\n"))
    assert len(table.labels) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "anna.csv is empty: its first row must name the columns"),
        ("age,label\n", r"client anna has no records, as .*anna.csv has no rows: remove it or add records"),
        ("age,label\n1,0\n2\n", "anna.csv, row 3: 1 cells where the header names 2"),
        ("age,label\n1,0\n2,1,9\n", "anna.csv, row 3: 3 cells where the header names 2"),
        ("age,age,label\n1,2,0\n", "anna.csv has 2 columns named 'age': rename or remove"),
        (
            "age,target\n1,0\n",
            r"anna.csv has no column 'label', which data.label names \(it has age, target\); name one of them",
        ),
        ("label\n1\n", "anna.csv has no feature column beside label"),
        (
            "age,job,label\n1,2,0\n1,cook,1\n",
            "anna.csv, row 3, column 'job': 'cook' is not a number: declare data.columns",
        ),
        (
            "age,label\n1,0\n,1\n",
            "anna.csv, row 3, column 'age': the cell is empty: fill it in, or declare data.columns",
        ),
        ("age,label\n1,0\n2,\n", "anna.csv, row 3, column 'label': the label is empty: fill it in"),
        ("age,label\n1,0\nnan,1\n", "anna.csv, row 3, column 'age': the cell is empty: fill it in"),
        ("age,label\n1,0\n1e999,1\n", "anna.csv, row 3, column 'age': 1e999 is not a finite number"),
        ("age,label\n1,0\n1e300,1\n", "anna.csv, row 3, column 'age': 1e300 is not a finite number"),
        ('age,label\n1,0\n"2"x,1\n', "anna.csv, after row 2: .*correct its quotes"),
    ],
)
def test_a_malformed_csv_file_is_refused_by_place_with_a_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = csv_file(tmp_path, text)
    with pytest.raises(DataError, match=message):
        read(path)
    assert path.read_text() == text


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "anna.csv"
    path.write_bytes(b"age,label\n\xff,0\n")
    with pytest.raises(DataError, match=r"anna.csv is not UTF-8 text \(byte 10\): save it as UTF-8"):
        read(path)


def test_absent_and_unknown_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent.csv does not exist"):
        read(tmp_path / "absent.csv")
    (tmp_path / "anna.xlsx").write_text("")
    with pytest.raises(DataError, match=r"anna.xlsx is a spreadsheet: save its sheet as CSV"):
        read(tmp_path / "anna.xlsx")
    (tmp_path / "anna.doc").write_text("")
    with pytest.raises(
        DataError, match=r"anna.doc ends in .doc: give a .arrow, .csv, .feather, .npz, .parquet, .tsv file"
    ):
        read(tmp_path / "anna.doc")
    with pytest.raises(DataError, match=r"is a folder: name one client's file in it"):
        read_columns(tmp_path)


def test_columns_without_a_name_are_no_part_of_a_table(tmp_path: Path) -> None:
    table = read_columns(csv_file(tmp_path, ";age;label;;\n7;30;0;;\n3;40;1;;\n"))  # pandas' index, a spreadsheet's end
    assert {name: list(cells) for name, cells in table.columns.items()} == {"age": ["30", "40"], "label": ["0", "1"]}


def npz_file(folder: Path, **arrays: Any) -> Path:
    path = folder / "anna.npz"
    np.savez(path, **arrays)
    return path


def test_npz_arrays_keep_their_shape(tmp_path: Path) -> None:
    images = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    table = read(npz_file(tmp_path, features=images, labels=np.array([1.0, 0.0])))
    assert table.features.shape == (2, 4, 4)
    assert table.labels.tolist() == [1, 0]
    assert table.labels.dtype == np.int64


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": [[1]], "labels": [0]}, "anna.npz has no array 'features', and 'x' is no column: store features, labels"),
        ({"features": [[1.0], [2.0]], "labels": [0]}, r"labels has shape \(1,\), but there are 2 records"),
        ({"features": [1.0], "labels": [0]}, "one row per record"),
        ({"features": [["a"]], "labels": [0]}, "features must be numbers"),
        (
            {"features": [[1.0], [2.0]], "labels": [0, 0.5]},
            "column 'labels': the label 0.5 is not a whole number; labels are classes",
        ),
        (
            {"features": [[1.0], [np.nan]], "labels": [0, 0]},
            r"row 2, column \(0,\): nan is not a finite number",
        ),
        ({"features": [[{}]], "labels": [0]}, "anna.npz is not a readable .npz file of plain arrays"),
    ],
)
def test_a_malformed_npz_file_is_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    path = npz_file(tmp_path, **{name: np.array(value) for name, value in arrays.items()})
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_truncated_npz_file_is_refused(tmp_path: Path) -> None:
    path = npz_file(tmp_path, features=np.zeros((50, 2)), labels=np.zeros(50))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"anna.npz is not a readable"):
        read(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"some text",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }"
        + b" " * 58
        + b"\n"
        + bytes(8),
    ],
)
def test_a_file_that_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "anna.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"anna.npz is not a readable"):
        read(tmp_path / "anna.npz")


def parquet_file(folder: Path, **columns: Any) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    path = folder / "anna.parquet"
    parquet.write_table(arrow.table(columns), path)
    return path


def test_a_parquet_file_as_it_stands(tmp_path: Path) -> None:
    path = parquet_file(tmp_path, age=[1, 2], height=[0.5, 1.5], label=["no", "yes"], who=["a", "b"])
    table = assemble("x", [read_columns(path)], TableDeclaration(client="who"))
    assert table.columns == ("age", "height")
    assert table.features.tolist() == [[1, 0.5], [2, 1.5]]
    assert table.classes == ("no", "yes")
    assert table.group_names == ("a", "b")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"age": [1], "target": [0]}, "anna.parquet has no column 'label'"),
        (
            {"job": ["cook"], "label": [0]},
            "anna.parquet, row 1, column 'job': 'cook' is not a number: declare data.columns",
        ),
        ({"age": [1.0, None], "label": [0, 1]}, "row 2, column 'age': the cell is empty: fill it in"),
        ({"age": [1, 2], "label": [0, None]}, "row 2, column 'label': the label is empty: fill it in"),
    ],
)
def test_a_malformed_parquet_file_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(parquet_file(tmp_path, **columns))


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    (tmp_path / "anna.parquet").write_text("age,label")
    with pytest.raises(DataError, match=r"anna.parquet is not a Parquet file that can be read"):
        read(tmp_path / "anna.parquet")


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "anna.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DataError, match=r"needs pyarrow: run `pip install 'polyeps\[parquet\]'`, or save it as CSV"):
        read(tmp_path / "anna.parquet")


@pytest.mark.parametrize("text", ["\n\n" + GOOD.replace(",", ";"), GOOD.replace(",", "\t"), GOOD.replace("\n", "\r\n")])
def test_delimiters_and_line_ends_are_found(tmp_path: Path, text: str) -> None:
    table = read(csv_file(tmp_path, text))
    assert table.columns == ("age", "height")
    assert table.features.tolist() == [[1, 2.5], [3, -40]]


def test_many_rows_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyeps.data.table_readers._BLOCK", 7)
    path = csv_file(tmp_path, "age,label\n" + "".join(f"{row},{row % 2}\n" for row in range(30)))
    assert read(path).features.ravel().tolist() == list(range(30))
    path.write_text(path.read_text().replace("17,1", "17"))
    with pytest.raises(DataError, match=r"anna.csv, row 19: 1 cells where the header names 2"):
        read(path)


def test_a_decimal_comma_in_a_table_separated_by_commas_is_suspected(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"row 2: 4 cells where the header names 3: correct it; write decimals with a poi"
    ):
        read(csv_file(tmp_path, "age,height,label\n1,2,5,0\n"))


def test_a_time_with_a_zone_is_of_the_day_there(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    night = datetime(2024, 5, 31, 0, 30, tzinfo=timezone(timedelta(hours=2)))
    times = pyarrow.array([night, None], pyarrow.timestamp("us", tz="Europe/Berlin"))
    parquet.write_table(pyarrow.table({"seen": times}), tmp_path / "t.parquet")
    seen = Column("seen", dates=(date(2024, 5, 30), date(2024, 6, 1)), missing="mean-of-range")
    expected = seen.encode([night.isoformat(), ""], str)  # as a CSV file has it
    assert expected.tolist() == [[0.0, 0.0], [0.0, 1.0]]
    assert seen.encode(read_columns(tmp_path / "t.parquet").columns["seen"], str).tolist() == expected.tolist()
