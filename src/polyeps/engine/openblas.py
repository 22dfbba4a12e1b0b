"""Products of every record's matrices by a copy of OpenBLAS of our own, which uses AVX-512 on AMD's processors.

torch's matrix products (MKL) use AVX-512 on Intel's processors alone. OpenBLAS comes with the package scipy-openblas32;
where that or the processor is missing, products are torch's. A call is one record's: its shape, and so its rounding, is
the same in any company, at any place and with any number of threads. Large products round every row alike however many
rows there are, so a client's records are multiplied by its weights at once, which packs the weights once.
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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KERNELS = "SkylakeX"  # OpenBLAS' name for its AVX-512 kernels; for some of AMD's processors it chooses older ones
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112  # of cblas.h
_FEWEST = 1 << 12  # multiplications of a record below which torch's calls, of several records each, cost less
_SMALL = 100**3  # multiplications up to which OpenBLAS has kernels of another rounding
_KINDS = {torch.float32: np.float32, torch.float64: np.float64}
_PART = 1 << 23  # multiplications that are worth a thread
_lock = threading.Lock()

Addresses = NDArray[np.int64]


def suits_openblas(rows: int, inner: int, columns: int, *, alone: bool = False) -> bool:
    """Return whether products of records' matrices (rows, inner) and (inner, columns) are computed here.

    Such a product `alone` is worth a call if it is larger.
    """
    fewest = _SMALL if alone else _FEWEST
    return rows > 1 and rows * inner * columns >= fewest and _batched_product(torch.float32) is not None


def multiply_records(
    left: Tensor, right: Tensor, into: Tensor, owner: Tensor | None = None, *, add: bool, scale: float = 1.0
) -> None:
    """Write the products of matrices left (..., a, b) and right (..., b, c) to `into` (..., a, c), or add them to it.

    With `owner` (T,), left is (T, a, b) and right (n, b, c): row i is multiplied by right[owner[i]]. All are float32 or
    all float64; products are multiplied by `scale`.
    """
    product = _batched_product(left.dtype)
    assert product is not None
    count, rows, inner = left.shape[:-2].numel(), *left.shape[-2:]
    columns = right.shape[-1]
    if into.stride(-1) != 1 or into.stride(-2) < columns:  # OpenBLAS would print a line and compute nothing
        raise ValueError(f"results of {columns} columns cannot lie at strides {into.stride()}")
    if not count:
        return
    (left, turned_left), (right, turned_right) = _with_unit_stride(left), _with_unit_stride(right)
    lefts, rights, results = _addresses(left), _addresses(right), _addresses(into)
    rights = rights if owner is None else rights[owner.numpy()]
    heights = np.array([rows])
    if owner is not None and rows * inner * columns > _SMALL and _stacked(left) and _stacked(into):
        firsts, lengths = _runs(owner.numpy(), -(-count // torch.get_num_threads()))
        lefts, rights, results, count = lefts[firsts], rights[firsts], results[firsts], len(firsts)
        heights = rows * (lengths[:1] if (lengths == lengths[0]).all() else lengths)
    ragged = len(heights) > 1  # then every product is a group of its own
    leads = _lead(left), _lead(right), into.stride(-2)
    numbers: tuple[Any, ...] = (turned_left, turned_right, heights, columns, inner, *leads)
    sizes = np.empty((len(numbers), len(heights)), np.int32)
    for number, each in enumerate(numbers):
        sizes[number] = each
    factors = np.empty((2, len(heights)), _KINDS[left.dtype])
    factors[0], factors[1] = scale, add

    def call(first: int, last: int) -> None:
        groups, of_each, start = (last - first, 1, first) if ragged else (1, last - first, 0)
        members = np.full(groups, of_each, np.int32)
        flip_left, flip_right, m, n, k, lead_left, lead_right, lead_into = _rows_from(sizes, start)
        alpha, beta = _rows_from(factors, start)
        a, b, c = (each.ctypes.data + first * each.itemsize for each in (lefts, rights, results))
        product(
            _ROW_MAJOR, flip_left, flip_right, m, n, k, alpha, a, lead_left, b, lead_right, beta, c, lead_into,
            groups, members.ctypes.data,
        )  # fmt: skip

    _divide(call, count, int(heights[0]) * inner * columns)


def _rows_from(numbers: NDArray[Any], column: int) -> list[int]:
    """Return the address of each row of contiguous numbers, from a column on."""
    begin = numbers.ctypes.data + column * numbers.itemsize
    return [begin + row * numbers.strides[0] for row in range(len(numbers))]


def _stacked(matrices: Tensor) -> bool:
    """Return whether the rows of neighbouring matrices (T, a, b) are those of one matrix."""
    return matrices.stride(2) == 1 and matrices.stride(0) == matrices.shape[1] * matrices.stride(1)


def _runs(owner: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where runs of one owner's neighbouring records begin, and how long they are: at most `most`."""
    places = np.arange(len(owner))
    new = np.concatenate([[True], owner[1:] != owner[:-1]])
    begun = np.maximum.accumulate(np.where(new, places, 0))
    firsts = np.flatnonzero((places - begun) % most == 0)
    return firsts, np.concatenate([firsts[1:], [len(owner)]]) - firsts


def _divide(call: Callable[[int, int], None], count: int, each: int) -> None:
    """Call for all of `count` records, in as many threads as torch uses if they are worth it."""
    parts = max(1, min(torch.get_num_threads(), count, count * each // _PART))
    if parts == 1:
        call(0, count)
        return
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
    """Return matrices (..., a, b) of which rows or columns are contiguous, and how OpenBLAS is to read them."""
    rows, columns = matrices.stride()[-2:]
    if columns == 1 and rows >= matrices.shape[-1]:
        return matrices, _AS_IT_IS
    if rows == 1 and columns >= matrices.shape[-2]:
        return matrices, _TRANSPOSED
    return matrices.contiguous(), _AS_IT_IS


def _lead(matrices: Tensor) -> int:
    """Return the step from a contiguous row or column to the next."""
    rows, columns = matrices.stride()[-2:]
    return rows if columns == 1 and rows >= matrices.shape[-1] else columns


def _addresses(matrices: Tensor) -> Addresses:
    """Return the address of each matrix (..., a, b), in order."""
    found = np.array([matrices.data_ptr()])
    for size, step in zip(matrices.shape[:-2], matrices.stride()[:-2], strict=True):
        found = np.add.outer(found, np.arange(size) * (step * matrices.element_size())).ravel()
    return found


def _batched_product(kind: torch.dtype) -> Callable[..., None] | None:
    """Return OpenBLAS' cblas_sgemm_batch or cblas_dgemm_batch on one thread with AVX-512; None without it."""
    with _lock:
        loaded = _loaded()
    return None if loaded is None else loaded[kind]


@functools.cache
def _loaded() -> dict[torch.dtype, Callable[..., None]] | None:
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
    products: dict[torch.dtype, Any] = {
        torch.float32: loaded.scipy_cblas_sgemm_batch,
        torch.float64: loaded.scipy_cblas_dgemm_batch,
    }
    address, number = ctypes.c_void_p, ctypes.c_int
    for product in products.values():
        product.argtypes = [number, *[address] * 13, number, address]
        product.restype = None
    return products


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
