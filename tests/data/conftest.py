"""Keeps every test off the user's cache, and off whatever POLYEPS_DATA names unless the test asks for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SHARED = os.environ.get("POLYEPS_DATA")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("POLYEPS_DATA", raising=False)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data files, or a reason to skip."""
    if not _SHARED:
        pytest.skip("POLYEPS_DATA names no folder of real data files")
    return Path(_SHARED)
