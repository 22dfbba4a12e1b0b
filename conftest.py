"""Settings of all tests."""

import os
import shutil
from pathlib import Path

import pytest
import torch

# Tests run in several processes side by side, on small tensors: threads would only wait for each other. And runs that
# are compared bit for bit must be computed alike.
torch.set_num_threads(1)

# Encoded records of tests stay out of the user's cache; tests of that cache have one of their own.
os.environ["POLYEPS_FEATURE_CACHE"] = "0"

# Ledgers and journals flush every row: temporary folders in memory save a fifth of the time.
_memory = Path("/dev/shm")
if _memory.is_dir() and os.access(_memory, os.W_OK) and shutil.disk_usage(_memory).free > 2**31:
    os.environ.setdefault("TMPDIR", str(_memory))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the federations of real processes: they mostly wait, and other workers do the rest meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
