"""Products of every record's matrices by a copy of OpenBLAS of our own, which uses AVX-512 on AMD's processors.

torch's matrix products (MKL) use AVX-512 on Intel's processors alone. OpenBLAS comes with the package scipy-openblas32;
where that or the processor is missing, products are torch's. A call is one record's: its shape, and so its rounding, is
the same in any company, at any place and with any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KERNELS = "SkylakeX"  # OpenBLAS' name for its AVX-512 kernels; for some of AMD's processors it chooses older ones
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112  # of cblas.h
_FEWEST = 1 << 12  # multiplications of a record below which torch's calls, of several records each, cost less
_PART = 1 << 23  # multiplications that are worth a thread
_lock = threading.Lock()

Pointers = NDArray[np.uint64]


def suits_openblas(rows: int, inner: int, columns: int) -> bool:
    """Return whether products of a record's matrices (rows, inner) and (inner, columns) are computed here."""
    return rows > 1 and rows * inner * columns >= _FEWEST and _batched_product() is not None


def multiply_records(left: Tensor, right: Tensor, into: Tensor, owner: Tensor | None = None, *, add: bool) -> None:
    """Write the products of matrices left (T, a, b) and right (T, b, c) to `into` (T, a, c), or add them to it.

    With `owner` (T,), right is (n, b, c): row i is multiplied by right[owner[i]].
    """
    product = _batched_product()
    assert product is not None
    count, rows, inner = left.shape
    columns = right.shape[2]
    if into.stride(2) != 1 or into.stride(1) < columns:  # OpenBLAS would print a line and compute nothing
        raise ValueError(f"results of {columns} columns cannot lie at strides {into.stride()}")
    if not count:
        return
    (left, turned_left), (right, turned_right) = _with_unit_stride(left), _with_unit_stride(right)
    items = None if owner is None else owner.numpy().astype(np.uint64)
    lefts, rights, results = _pointers(left), _pointers(right, items), _pointers(into)
    sizes = [
        ctypes.c_int(each)
        for each in (turned_left, turned_right, rows, columns, inner, _lead(left), _lead(right), into.stride(1))
    ]
    flip_left, flip_right, m, n, k, lead_left, lead_right, lead_into = map(ctypes.byref, sizes)
    one, beta = ctypes.c_float(1.0), ctypes.c_float(float(add))

    def call(first: int, last: int) -> None:
        some = ctypes.c_int(last - first)
        product(
            _ROW_MAJOR, flip_left, flip_right, m, n, k, ctypes.byref(one), lefts[first:].ctypes.data, lead_left,
            rights[first:].ctypes.data, lead_right, ctypes.byref(beta), results[first:].ctypes.data, lead_into,
            1, ctypes.byref(some),
        )  # fmt: skip

    _divide(call, count, rows * inner * columns)


def _divide(call: Callable[[int, int], None], count: int, each: int) -> None:
    """Call for all of `count` records, in as many threads as torch uses if they are worth it."""
    parts = max(1, min(torch.get_num_threads(), count, count * each // _PART))
    edges = np.linspace(0, count, parts + 1).round().astype(int).tolist()
    others = [_pool().submit(call, first, last) for first, last in pairwise(edges[1:])]
    call(0, edges[1])
    for other in others:
        other.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="products")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


def _with_unit_stride(matrices: Tensor) -> tuple[Tensor, int]:
    """Return matrices (T, a, b) of which rows or columns are contiguous, and how OpenBLAS is to read them."""
    _, rows, columns = matrices.stride()
    if columns == 1 and rows >= matrices.shape[2]:
        return matrices, _AS_IT_IS
    if rows == 1 and columns >= matrices.shape[1]:
        return matrices, _TRANSPOSED
    return matrices.contiguous(), _AS_IT_IS


def _lead(matrices: Tensor) -> int:
    """Return the step from a contiguous row or column to the next."""
    _, rows, columns = matrices.stride()
    return rows if columns == 1 and rows >= matrices.shape[2] else columns


def _pointers(matrices: Tensor, items: Pointers | None = None) -> Pointers:
    """Return the address of each matrix, or of some."""
    items = np.arange(len(matrices), dtype=np.uint64) if items is None else items
    found: Pointers = items * np.uint64(matrices.stride(0) * matrices.element_size()) + np.uint64(matrices.data_ptr())
    return found


def _batched_product() -> Callable[..., None] | None:
    """Return OpenBLAS' cblas_sgemm_batch on one thread with AVX-512; None without it."""
    with _lock:
        return _loaded()


@functools.cache
def _loaded() -> Callable[..., None] | None:
    library = _library()
    if library is None or torch.backends.cpu.get_cpu_capability() != "AVX512" or not _made_by_amd():
        return None
    wanted = {"OPENBLAS_CORETYPE": _KERNELS, "OPENBLAS_NUM_THREADS": "1"}  # read once, as the library loads
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:
        return None
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    loaded.scipy_openblas_get_corename.restype = ctypes.c_char_p
    if loaded.scipy_openblas_get_corename() != _KERNELS.encode():  # somebody else loaded it before
        return None
    product: Callable[..., None] = loaded.scipy_cblas_sgemm_batch
    address, number = ctypes.c_void_p, ctypes.c_int
    product.argtypes = [number, *[address] * 13, number, address]  # type: ignore[attr-defined]
    product.restype = None  # type: ignore[attr-defined]
    return product


def _library() -> Path | None:
    """Return the file of OpenBLAS; importing its package would load it as it chooses."""
    found = importlib.util.find_spec("scipy_openblas32") if sys.platform == "linux" else None
    places = [] if found is None else found.submodule_search_locations or []
    return next((file for place in places for file in Path(place, "lib").glob("libscipy_openblas*.so")), None)


def _made_by_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
