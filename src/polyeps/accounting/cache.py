"""Noise scales found earlier, kept on disk as hints: where to look first, never what to believe."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Raised whenever an accountant may give another figure for the same event: older files are then not found.
_ACCOUNTANTS_VERSION = 3
_LARGEST = 1 << 24  # bytes of a file


def default_directory() -> Path:
    """Where this user's hints lie, by the platform's custom; POLYEPS_CACHE overrides it."""
    if chosen := os.environ.get("POLYEPS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyeps"


def load_hints(directory: Path, subject: Mapping[str, Any]) -> dict[int, float]:
    """The scales kept for a subject, by step of its ladder; none if there is no such file, or it is malformed.

    Anybody who can write to the folder can put any number here, so the caller computes what each of them costs.
    """
    try:
        with os.fdopen(os.open(_path(directory, subject), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))) as file:
            stored = json.loads(file.read(_LARGEST))
        if stored["subject"] != _plain(subject):
            return {}
        kept = {int(step): float(scale) for step, scale in stored["scales"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
    return {step: scale for step, scale in kept.items() if math.isfinite(scale) and scale > 0}


def save_hints(directory: Path, subject: Mapping[str, Any], scales: Mapping[int, float]) -> None:
    """Keep scales in a file that only its owner can read; a cache that cannot be written is no reason to fail."""
    content = {"subject": _plain(subject), "scales": sorted(scales.items())}
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=directory, suffix=".tmp")  # mode 0600
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        Path(name).replace(_path(directory, subject))  # takes the place of a link, does not follow it
    except OSError:
        return


def _path(directory: Path, subject: Mapping[str, Any]) -> Path:
    text = json.dumps(_plain(subject), sort_keys=True)
    return directory / f"calibration-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _plain(subject: Mapping[str, Any]) -> dict[str, Any]:
    return {"accountants": _ACCOUNTANTS_VERSION, **subject}
