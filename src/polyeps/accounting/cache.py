"""Noise multipliers found earlier, stored on disk as hints for calibration; every hint is checked before use."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Increased whenever an accountant may return another figure for the same event: older files are then not found.
_ACCOUNTANTS_VERSION = 3
_LARGEST = 1 << 24  # bytes of a file


def default_directory() -> Path:
    """Return the folder for hints: POLYEPS_CACHE, or polyeps in the platform's cache folder."""
    if chosen := os.environ.get("POLYEPS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyeps"


def load_hints(directory: Path, subject: Mapping[str, Any]) -> dict[int, float]:
    """Return the noise multipliers stored for a subject, by step; empty if the file is missing or malformed.

    Anyone with write access to the folder can store any number here, so the caller computes the price of each.
    """
    try:
        with os.fdopen(os.open(_path(directory, subject), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))) as file:
            stored = json.loads(file.read(_LARGEST))
        if stored["subject"] != _plain(subject):
            return {}
        found = {int(step): float(multiplier) for step, multiplier in stored["scales"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
    return {step: multiplier for step, multiplier in found.items() if math.isfinite(multiplier) and multiplier > 0}


def save_hints(directory: Path, subject: Mapping[str, Any], multipliers: Mapping[int, float]) -> None:
    """Store noise multipliers in a file that only its owner can read; ignore a folder that cannot be written."""
    content = {"subject": _plain(subject), "scales": sorted(multipliers.items())}
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=directory, suffix=".tmp")  # mode 0600
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        Path(name).replace(_path(directory, subject))  # replaces a symbolic link, does not follow it
    except OSError:
        return


def _path(directory: Path, subject: Mapping[str, Any]) -> Path:
    text = json.dumps(_plain(subject), sort_keys=True)
    return directory / f"calibration-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _plain(subject: Mapping[str, Any]) -> dict[str, Any]:
    return {"accountants": _ACCOUNTANTS_VERSION, **subject}
