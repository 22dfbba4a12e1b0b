"""Memory that the C library keeps between steps instead of returning it to the system."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys

_KEPT = 1 << 30  # bytes of freed memory
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@functools.cache
def keep_freed_memory() -> bool:
    """Ask the C library, once per process, to keep freed memory; return whether it agreed.

    A step frees all it allocated, and the next one allocates the same again. glibc returns large blocks to the system
    at once, so every step would pay for fresh pages: a quarter to a half of a step's time for large models, measured.
    Pages of what is kept are huge where the system allows it: the processor then translates fewer addresses.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    change = getattr(library, "mallopt", None)  # glibc's alone
    kept = change is not None and bool(change(_MMAP_THRESHOLD, _KEPT)) and bool(change(_TRIM_THRESHOLD, _KEPT))
    if kept:
        _ask_for_huge_pages(library, _KEPT - _KEPT // 16)
    return kept


def _ask_for_huge_pages(library: ctypes.CDLL, size: int) -> None:
    """Ask for huge pages where the next blocks will lie: at the end of the heap, which is made longer for that."""
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    block = library.malloc(size)
    if not block:
        return
    first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size - mmap.PAGESIZE), mmap.MADV_HUGEPAGE)
    library.free(block)
