"""Writing into tensors under `vmap`, which cannot write a row's values into a tensor that all rows share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyeps.engine.client_parameters import ForwardPass, outside_vmap


def own(of: ForwardPass, found: Tensor) -> Tensor:
    """Return a new tensor as each row's own."""
    if torch._C._functorch.is_batchedtensor(found):
        return found
    rows = of.physical(found)
    with outside_vmap():
        rows = rows.clone()
    return of.seen(rows)


def _set_item(values: Tensor, key: Any, value: Any) -> None:
    """Write into a tensor; where a mask says so, by the function that `vmap` can run."""
    masked = isinstance(key, Tensor) and key.dtype == torch.bool and key.shape == values.shape[: key.dim()]
    if masked and (not isinstance(value, Tensor) or not value.dim()):
        values.masked_fill_(key.reshape(*key.shape, *(1,) * (values.dim() - key.dim())), value)
    else:
        values[key] = value


WRITING: dict[Any, Callable[..., Any]] = {
    Tensor.__setitem__: _set_item,
    Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]
}
NEW = frozenset(
    [getattr(torch, name) for name in ("zeros", "ones", "empty", "full", "tensor", "clone")]
    + [getattr(torch, f"{name}_like") for name in ("zeros", "ones", "empty", "full")]
    + [getattr(Tensor, f"new_{name}") for name in ("zeros", "ones", "empty", "full", "tensor")]
    + [Tensor.new, Tensor.clone]
)
