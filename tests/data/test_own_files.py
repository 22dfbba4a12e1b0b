from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyeps.data.own_files import load_own
from polyeps.data.partition import by_owner
from polyeps.errors import DataError


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def test_one_file_per_client(tmp_path: Path) -> None:
    own = load_own(written(tmp_path / "clinics", oslo="a,label\n1,0\n2,2\n", bern="a,label\n3,1\n"))
    assert own.name == "own:clinics"
    assert own.classes == ("0", "1", "2")
    assert own.columns == ("a",)
    partition = by_owner(own)
    assert partition.ids == ("bern", "oslo")
    assert own.features[partition.rows].ravel().tolist() == [3, 1, 2]
    assert partition.sizes.tolist() == [1, 2]


def test_one_file_with_a_client_column(tmp_path: Path) -> None:
    folder = written(tmp_path, all="a,who,y\n1,oslo,no\n2,bern,yes\n3,oslo,yes\n")
    own = load_own(folder / "all.csv", label="y", client="who")
    assert own.classes == ("no", "yes")
    assert own.labels.tolist() == [0, 1, 1]
    partition = by_owner(own)
    assert partition.ids == ("bern", "oslo")
    assert own.features[partition.rows].ravel().tolist() == [2, 1, 3]


def test_npz_with_clients(tmp_path: Path) -> None:
    path = tmp_path / "all.npz"
    np.savez(path, features=np.eye(3), labels=np.array([0, 1, 0]), clients=np.array(["b", "a", "b"]))
    assert by_owner(load_own(path)).sizes.tolist() == [1, 2]


def test_no_record_is_lost_among_many_clients(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    sizes = generator.integers(1, 30, 25)
    files, value = {}, 0
    for i, size in enumerate(sizes):
        lines = [f"{value + j},{j % 3}" for j in range(size)]
        files[f"client{i:02}"] = "a,label\n" + "\n".join(lines) + "\n"
        value += int(size)
    own = load_own(written(tmp_path / "many", **files))
    assert by_owner(own).sizes.tolist() == sizes.tolist()
    assert own.features.ravel().tolist() == list(range(value))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds no .arrow, .csv, .feather, .npz, .parquet, .tsv file: put one file per client"),
        ({"a": "x,label\n1,0\n", "b": "x,label\n"}, r"client b has no records, as .*b.csv has no rows"),
        ({"a": "x,label\n1,0\n", "b": "y,label\n1,0\n"}, r"b.csv and .*a.csv differ in columns \(x, y\)"),
        (
            {"a": "x,client,label\n1,7,0\n"},
            r"a.csv, row 2: the column 'client' names '7', but the file is that of client 'a'",
        ),
        ({"a": "x,label\n1,0\n2,0\n"}, r"a.csv, column 'label' has one label only, '0'; name another column"),
    ],
)
def test_a_bad_folder_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_own(written(tmp_path / "clinics", **files))


def test_two_files_of_one_client_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "clinics", oslo="a,label\n1,0\n")
    np.savez(folder / "oslo.npz", features=np.eye(1), labels=np.array([0]))
    with pytest.raises(DataError, match=r"oslo.csv and .*oslo.npz both name client oslo: rename"):
        load_own(folder)


def test_a_wrong_label_names_row_and_client(tmp_path: Path) -> None:
    folder = written(tmp_path, all="a,client,label\n1,oslo,0\n2,bern,-7\n")
    with pytest.raises(DataError, match=r"all.csv, row 3 \(client bern\), column 'label': the label '-7' is none of"):
        load_own(folder / "all.csv", classes=("0", "1"))
    assert load_own(folder / "all.csv").classes == ("-7", "0")


def test_records_of_different_shape_are_refused(tmp_path: Path) -> None:
    for name, width in (("a", 2), ("b", 3)):
        np.savez(tmp_path / f"{name}.npz", features=np.zeros((1, width)), labels=np.array([0]))
    with pytest.raises(DataError, match=r"b.npz has records of shape \(3,\) and .*a.npz of \(2,\)"):
        load_own(tmp_path)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent does not exist; check its path"):
        load_own(tmp_path / "absent")
