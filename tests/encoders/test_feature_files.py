"""Encoded records on disk: kept for their owner, found again, and never believed when damaged or foreign."""

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.encoders.feature_files import load_features, save_features
from polyeps.errors import InputError

SUBJECT = {"records": "abc", "name": "scattering"}
FEATURES = np.random.default_rng(1).random((7, 5), dtype=np.float32)


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYEPS_FEATURE_CACHE")


def stored(folder: Path) -> Path:
    save_features(folder, SUBJECT, FEATURES)
    (path,) = folder.glob("features-*")
    return path


def test_features_are_found_again_bit_for_bit_and_are_their_owners_alone(tmp_path: Path) -> None:
    path = stored(tmp_path / "new" / "folder")
    found = load_features(path.parent, SUBJECT)
    assert found is not None
    assert found.dtype == np.float32
    assert np.array_equal(found, FEATURES)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_features(path.parent, {**SUBJECT, "size": 300}) is None
    images = FEATURES.reshape(7, 1, 5, 1)
    save_features(tmp_path, {"records": "images"}, images)
    again = load_features(tmp_path, {"records": "images"})
    assert again is not None
    assert again.shape == images.shape


def header(change: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        first, _, rest = content.partition(b"\n")
        held = json.loads(first)
        change(held)
        return json.dumps(held).encode() + b"\n" + rest

    return changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"[]\n" + content,
        lambda _: b"\xff" * 100,
        lambda _: b"[" * 60_000,
        header(lambda held: held.pop("sha256")),
        header(lambda held: held.update(shape=[5, 7])),
        header(lambda held: held.update(shape=[35])),
        header(lambda held: held.update(shape=[-7, -5])),
        header(lambda held: held.update(shape=[1 << 40, 1 << 40])),
        header(lambda held: held.update(shape="ab")),
        header(lambda held: held.update(shape=[7.0, 5.0])),
        header(lambda held: held.update(subject={**SUBJECT, "format": 1, "name": "other"})),
    ],
)
def test_a_damaged_or_foreign_file_is_not_used(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = stored(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert load_features(tmp_path, SUBJECT) is None
    save_features(tmp_path, SUBJECT, FEATURES)  # which replaces it
    again = load_features(tmp_path, SUBJECT)
    assert again is not None
    assert np.array_equal(again, FEATURES)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_changed_byte_is_overlooked(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = stored(tmp_path_factory.mktemp("cache"))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    found = load_features(path.parent, SUBJECT)
    assert found is None or np.array_equal(found, FEATURES)  # a blank of the header may become a tab


def test_links_and_files_that_others_can_read_are_not_used(tmp_path: Path) -> None:
    path = stored(tmp_path)
    path.chmod(0o640)
    assert load_features(tmp_path, SUBJECT) is None
    path.chmod(0o600)
    assert load_features(tmp_path, SUBJECT) is not None
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert load_features(tmp_path, SUBJECT) is None
    save_features(tmp_path, SUBJECT, FEATURES)
    assert not path.is_symlink()
    path.unlink()
    os.mkfifo(path, 0o600)
    assert load_features(tmp_path, SUBJECT) is None  # at once
    path.unlink()
    path.mkdir()
    assert load_features(tmp_path, SUBJECT) is None


def test_the_oldest_files_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYEPS_FEATURE_CACHE", str(1000 / 2**30))
    rows = np.zeros((10, 9), np.float32)  # 360 bytes and a header
    for place in range(4):
        save_features(tmp_path, {"records": str(place)}, rows)
        for path in tmp_path.glob("features-*"):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10))
        if place == 1:
            assert load_features(tmp_path, {"records": "0"}) is not None  # which makes it the youngest
    kept = [place for place in range(4) if load_features(tmp_path, {"records": str(place)}) is not None]
    assert 3 in kept
    assert 1 not in kept
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000 + 200  # headers
    save_features(tmp_path, {"records": "large"}, np.zeros((10, 99), np.float32))
    assert load_features(tmp_path, {"records": "large"}) is None
    assert load_features(tmp_path, {"records": "3"}) is not None  # nothing was removed for it


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    for name, age in (("features-old.tmp", 2 * 24 * 3600), ("features-new.tmp", 0), ("calibration-x.tmp", 10**6)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    stored_name = "features-new.tmp"
    save_features(tmp_path, SUBJECT, FEATURES)
    names = {path.name for path in tmp_path.iterdir()}
    assert {stored_name, "calibration-x.tmp"} < names
    assert "features-old.tmp" not in names


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    save_features(tmp_path, SUBJECT, FEATURES)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    save_features(tmp_path / "file", SUBJECT, FEATURES)  # no folder


def test_the_cache_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path)
    monkeypatch.setenv("POLYEPS_FEATURE_CACHE", "0")
    assert load_features(tmp_path, SUBJECT) is None
    path.unlink()
    save_features(tmp_path, SUBJECT, FEATURES)
    assert not list(tmp_path.iterdir())
    for wrong in ("off", "-1", "nan", "inf"):
        monkeypatch.setenv("POLYEPS_FEATURE_CACHE", wrong)
        with pytest.raises(InputError, match=f"POLYEPS_FEATURE_CACHE is '{wrong}'; it must be a number of GiB"):
            save_features(tmp_path, SUBJECT, FEATURES)
