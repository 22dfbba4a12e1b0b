"""Keep freed memory in the process between training steps.

A step frees all it allocated, and the next one allocates the same again. glibc returns large blocks to the system at
once, so every step would pay for fresh pages: a quarter to a half of the time of a step of the large models, measured.
"""

from __future__ import annotations

import ctypes
import functools
import sys

_KEPT = 1 << 30  # bytes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@functools.cache
def keep_freed_memory() -> bool:
    """Ask the C library, once per process, to keep freed memory; return whether it agreed."""
    if not sys.platform.startswith("linux"):
        return False
    change = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if change is None:
        return False
    return bool(change(_MMAP_THRESHOLD, _KEPT)) and bool(change(_TRIM_THRESHOLD, _KEPT))
