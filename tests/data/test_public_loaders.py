from __future__ import annotations

import gzip
import hashlib
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyeps.data import imdb
from polyeps.data.dataset import Dataset
from polyeps.data.imdb import load_imdb
from polyeps.data.public_catalogue import PUBLIC_DATASETS, DataFile
from polyeps.data.public_files import availability, places, user_cache
from polyeps.data.public_loaders import CIFAR_RECORD, load_dataset, parse_cifar, parse_idx
from polyeps.errors import DataError, InputError

MNIST_LABELS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST_LABELS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
# Name: labels in training, labels in test, lowest and highest feature, as published.
PUBLISHED = {
    "mnist": (MNIST_LABELS, MNIST_TEST_LABELS, 0, 1),
    "fashion-mnist": ([6000] * 10, [1000] * 10, 0, 1),
    "cifar10": ([5000] * 10, [1000] * 10, 0, 1),
    "imdb": ([12_500] * 2, [12_500] * 2, imdb.PADDING, 10_001),
    "adult": ([24_720, 7841], [12_435, 3846], 0, 1),
    "bank": ([39_922, 5289], [0, 0], -1, 1),
    "kddcup99": ([97_278, 396_743], [0, 0], -1, 1),
    "mnist-writers": (MNIST_LABELS, MNIST_TEST_LABELS, 0, 1),
}


def load_or_skip(name: str, folder: Path) -> Dataset:
    if availability(PUBLIC_DATASETS[name], places(folder)) == "missing":
        pytest.skip(f"{name} is in no folder searched, and tests do not download")
    return load_dataset(name, data_dir=folder, download=None)


def counts(labels: np.ndarray[tuple[int], np.dtype[np.int64]], classes: int) -> list[int]:
    return [int(count) for count in np.bincount(labels, minlength=classes)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_has_its_shape_counts_and_range(name: str, real_data: Path) -> None:
    dataset = load_or_skip(name, real_data)
    entry = PUBLIC_DATASETS[name]
    train, test, low, high = PUBLISHED[name]
    assert dataset.features.shape == (entry.records, *entry.shape)
    assert dataset.test_features.shape == (entry.test_records, *entry.shape)
    assert dataset.features.dtype == (np.int64 if name == "imdb" else np.float32)
    assert counts(dataset.labels, len(entry.classes)) == train
    assert counts(dataset.test_labels, len(entry.classes)) == test
    assert (dataset.features.min(), dataset.features.max()) == (low, high)
    assert dataset.classes == entry.classes
    if len(entry.shape) == 1 and name != "imdb":
        assert len(set(dataset.columns)) == entry.shape[0]
    if name == "bank":
        assert {"age", "month", "job=technician", "loan=yes"} <= set(dataset.columns)
        assert "loan=no" not in dataset.columns
    if name == "kddcup99":
        assert sum(column.startswith("service=") for column in dataset.columns) == 62
        assert sum("=" not in column for column in dataset.columns) == 38
    if name == "mnist-writers":
        assert dataset.groups is not None
        sizes = np.bincount(dataset.groups)
        assert (len(sizes), sizes.min(), sizes.max()) == (539, 19, 131)
        assert len(set(dataset.group_names)) == 539


def test_every_published_set_is_tested() -> None:
    assert set(PUBLISHED) == {name for name, entry in PUBLIC_DATASETS.items() if entry.files}


def test_adult_has_the_columns_of_libsvm_a9a(real_data: Path) -> None:
    columns = load_or_skip("adult", real_data).columns
    # a9a's blocks by the number, counted from 1, of their first column.
    firsts = {
        1: "age<26",
        6: "workclass=Private",
        14: "fnlwgt<106648",
        19: "education=Bachelors",
        35: "education-num<9",
        40: "marital-status=Married-civ-spouse",
        47: "occupation=Tech-support",
        61: "relationship=Wife",
        67: "race=White",
        72: "sex=Female",
        74: "capital-gain<1",
        76: "capital-loss<1",
        78: "hours-per-week<35",
        83: "native-country=United-States",
    }
    assert {number: columns[number - 1] for number in firsts} == firsts
    cuts = {
        name: [int(column.split(">=")[1]) for column in columns if column.startswith(f"{name}>=")]
        for name in ("age", "fnlwgt", "education-num", "hours-per-week")
    }
    assert cuts == {
        "age": [26, 33, 41, 50],
        "fnlwgt": [106_648, 158_662, 196_338, 259_873],
        "education-num": [9, 10, 11, 13],
        "hours-per-week": [35, 40, 41, 48],
    }


def test_imdb_is_prepared_once_and_again_when_the_copy_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {
        "train": b"label,text\n0,bad bad film\n1,good film\n",
        "test": b"label,text\n1,good good day\n",
    }
    (tmp_path / "imdb").mkdir()
    files = []
    for split, content in contents.items():
        (tmp_path / f"imdb/{split}.csv").write_bytes(content)
        files.append(DataFile(f"imdb/{split}.csv", hashlib.sha256(content).hexdigest(), ""))
    monkeypatch.setitem(PUBLIC_DATASETS, "imdb", replace(PUBLIC_DATASETS["imdb"], files=tuple(files)))
    made = load_imdb(data_dir=tmp_path, download=None, vocabulary=3, length=3)
    assert made.words == ("bad", "film", "good")
    assert made.features.tolist() == [[2, 2, 3], [0, 4, 3]]
    assert made.test_features.tolist() == [[4, 4, imdb.UNKNOWN]]
    (prepared,) = (user_cache() / "prepared").iterdir()
    again = load_imdb(download=None, vocabulary=3, length=3)  # without the folder: from the cache
    np.testing.assert_array_equal(made.features, again.features)
    prepared.write_bytes(prepared.read_bytes()[:100])
    third = load_imdb(data_dir=tmp_path, download=None, vocabulary=3, length=3)
    np.testing.assert_array_equal(made.features, third.features)
    assert [path.name for path in prepared.parent.iterdir()] == [prepared.name]
    (tmp_path / "no-folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))  # nothing can be kept here
    fourth = load_imdb(data_dir=tmp_path, download=None, vocabulary=3, length=3)
    np.testing.assert_array_equal(made.features, fourth.features)


def test_imdb_options_are_checked() -> None:
    with pytest.raises(InputError, match="at least 1, not 0 and 5"):
        load_imdb(vocabulary=0, length=5)


def test_digits_come_with_scikit_learn() -> None:
    digits = load_dataset("digits", download=None)
    assert digits.features.shape == (1500, 1, 8, 8)
    assert digits.test_features.shape == (297, 1, 8, 8)
    assert (digits.features.min(), digits.features.max()) == (0, 1)
    assert counts(digits.labels, 10) == [151, 151, 150, 153, 148, 152, 151, 149, 146, 149]


@pytest.mark.parametrize("name", ["mnist", "cifar10", "imdb"])
def test_a_set_that_is_not_here_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{name} is not here .*polyeps data fetch {name}.* or put {name}/"):
        load_dataset(name, data_dir=tmp_path, download=None)


def test_synthetic_data_are_not_loaded() -> None:
    with pytest.raises(InputError, match="syn-l is not loaded but made"):
        load_dataset("syn-l", download=None)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no data set 'minst'.*mnist"):
        load_dataset("minst", download=None)


@pytest.mark.parametrize("damage", ["truncated", "other content"])
def test_a_damaged_real_file_is_refused(damage: str, real_data: Path, tmp_path: Path) -> None:
    shutil.copytree(real_data / "bank", tmp_path / "bank")
    path = tmp_path / "bank" / "bank-full.csv.gz"
    path.chmod(0o644)
    path.parent.chmod(0o755)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000] if damage == "truncated" else gzip.compress(gzip.decompress(whole) + b"x"))
    match = "truncated or damaged" if damage == "truncated" else "is not the published file"
    with pytest.raises(DataError, match=rf"bank-full.csv.gz.*{match}"):
        load_dataset("bank", data_dir=tmp_path, download=None)


def dataset_of(features: list[list[float]], labels: list[int], columns: tuple[str, ...] = ()) -> Dataset:
    rows = np.array(features, dtype=np.float32)
    return Dataset("toy", rows, np.array(labels), rows[:0], np.array([], dtype=np.int64), ("a", "b"), columns=columns)


def test_a_feature_that_is_no_number_is_refused_by_place() -> None:
    with pytest.raises(DataError, match=r"toy, training records: feature height of record 1 is nan"):
        dataset_of([[1, 2], [3, np.nan]], [0, 1], ("width", "height"))
    with pytest.raises(DataError, match=r"feature \(0,\) of record 0 is inf"):
        dataset_of([[np.inf, 2], [3, 4]], [0, 1])


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_out_of_range_is_refused_by_place(label: int) -> None:
    with pytest.raises(DataError, match=rf"toy, training records: label {label} of record 1 is outside 0 to 1"):
        dataset_of([[1, 2], [3, 4]], [0, label])


def test_as_many_labels_as_records() -> None:
    with pytest.raises(DataError, match="2 rows of features but 1 labels"):
        dataset_of([[1, 2], [3, 4]], [0])


def idx_file(kind: int, shape: tuple[int, ...], body: bytes) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


def test_idx_of_bytes_and_of_integers() -> None:
    np.testing.assert_array_equal(parse_idx(idx_file(8, (2, 3), bytes(range(6))), "f"), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(parse_idx(idx_file(12, (2,), struct.pack(">2i", -1, 70_000)), "f"), [-1, 70_000])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is not an IDX file"),
        (b"\x1f\x8b\x08\x00", "is not an IDX file"),
        (idx_file(13, (1,), b"0000"), "is not an IDX file"),
        (bytes([0, 0, 8, 2, 0]), "ends inside its header"),
        (idx_file(8, (2, 3), bytes(5)), "has 17 bytes where its header announces 18"),
        (idx_file(8, (2, 3), bytes(7)), "has 19 bytes where its header announces 18"),
    ],
)
def test_a_damaged_idx_file_is_refused_by_name(content: bytes, what: str) -> None:
    with pytest.raises(DataError, match=rf"some-file {what}.*fetch it again"):
        parse_idx(content, "some-file")


def test_a_cifar_record_is_a_label_and_three_planes() -> None:
    planes = np.arange(3072, dtype=np.uint8)
    images, labels = parse_cifar(bytes([7]) + planes.tobytes() + bytes([1]) + bytes(3072), "f")
    assert labels.tolist() == [7, 1]
    np.testing.assert_array_equal(images[0], planes.reshape(3, 32, 32))


@pytest.mark.parametrize("length", [0, CIFAR_RECORD - 1, CIFAR_RECORD + 1])
def test_a_damaged_cifar_batch_is_refused_by_name(length: int) -> None:
    with pytest.raises(DataError, match=rf"batch has {length} bytes, not a multiple"):
        parse_cifar(bytes(length), "batch")
