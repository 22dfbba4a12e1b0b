"""Keeping freed memory in the process between steps.

A training step frees all it allocated, and the next one asks for the same again. The C library of Linux gives
large blocks back to the system at once, so every step would pay for fresh pages: a quarter to a half of the
time of a step of the large models, measured. So the library is told to keep up to `KEPT` bytes.
"""

from __future__ import annotations

import ctypes
import functools
import sys

KEPT = 1 << 30
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@functools.cache
def keep_freed_memory() -> bool:
    """Ask the C library, once per process, to keep freed memory; whether it agreed."""
    if not sys.platform.startswith("linux"):
        return False
    change = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries than glibc have none
    if change is None:
        return False
    return bool(change(_MMAP_THRESHOLD, KEPT)) and bool(change(_TRIM_THRESHOLD, KEPT))
