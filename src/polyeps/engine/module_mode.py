"""What torch's functions do while a user's module runs: random numbers come from each row's own draws.

Attention runs on the rows of all clients at once. Everything else runs as torch has it.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyeps.engine.attention import attention_of_rows, plain_attention
from polyeps.engine.client_parameters import ClientParameter, ForwardPass, NoRuleError, outside_vmap
from polyeps.engine.recurrent_rules import RECURRENT
from polyeps.engine.row_draws import RowDraws
from polyeps.engine.stable_functions import SOFTMAX, UNEVEN, frozen_linear, steady_function
from polyeps.engine.written_tensors import NEW, WRITING, own
from polyeps.errors import InputError


class ModuleMode(TorchFunctionMode):
    """Replace random functions, and those that `vmap` cannot run or gets wrong.

    Without a forward pass, the module runs on the one row of the draws, by plain torch wherever it draws nothing.
    """

    def __init__(self, draws: RowDraws, of: ForwardPass | None = None, written: bool = False) -> None:
        super().__init__()
        self.draws, self.of = draws, of
        self.written = written  # whether new tensors are each row's own
        self.random = False  # whether the module drew any number

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        random = _RANDOM.get(func)
        if random is not None:
            return random(self, *args, **kwargs)
        if func in _COMPOSED:
            with self:
                return _COMPOSED[func](*args, **kwargs)
        if func in _ROWS and (self.of is not None or _drops_between_layers(func, args)):
            try:
                return _ROWS[func](self.of or _OneRow(self), *args, **kwargs)
            except NoRuleError:
                pass
        if self.of is not None:
            try:
                if func in UNEVEN:
                    return steady_function(self.of, func, *args, **kwargs)
                if func is functional.linear:
                    return frozen_linear(self.of, *args, **kwargs)
            except NoRuleError:
                pass
        if func in _PLAIN and (self.of is not None or kwargs.get("dropout_p") or len(args) > 4):
            with self:
                return _PLAIN[func](*args, **kwargs)
        if self.of is not None and func in WRITING and not isinstance(args[0], ClientParameter):
            return WRITING[func](*args)
        found = _ALIKE.get(func, func)(*args, **kwargs)
        return own(self.of, found) if self.of is not None and self.written and func in NEW else found

    def seen(self, rows: Tensor) -> Tensor:
        """Return numbers (T, ...) as the module sees them."""
        return rows[0] if self.of is None else self.of.seen(rows)

    def drawn(self, draw: Callable[[], Tensor]) -> Tensor:
        self.random = True
        with outside_vmap():
            rows = draw()
        return self.seen(rows)

    def uniforms(self, shape: tuple[int, ...], like: Any) -> Tensor:
        return self.drawn(lambda: self.draws.uniforms(tuple(shape)).to(**like))

    def normals(self, shape: tuple[int, ...], like: Any) -> Tensor:
        return self.drawn(lambda: self.draws.normals(tuple(shape)).to(**like))

    def kept(self, shape: tuple[int, ...], chance: float, like: Any) -> Tensor:
        return self.drawn(lambda: self.draws.kept(tuple(shape), chance).to(**like))


class _OneRow:
    """A single row, for functions that run on all rows of a forward pass."""

    def __init__(self, mode: ModuleMode) -> None:
        self.mode, self.draws = mode, mode.draws

    def physical(self, values: Tensor) -> Tensor:
        return values[None]

    def seen(self, rows: Tensor) -> Tensor:
        return rows[0]


def _drops_between_layers(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether recurrent layers are called with dropout; torch's kernels compute one row of any others."""
    return func in RECURRENT and len(args) > 6 and bool(args[5]) and bool(args[6])


def _like(values: Tensor, dtype: torch.dtype | None = None) -> dict[str, Any]:
    kind = dtype or (values.dtype if values.is_floating_point() else torch.float32)
    return {"dtype": kind, "device": values.device}


def _dropout(lead: int | None, alpha: bool = False) -> Callable[..., Tensor]:
    """Return a kind of dropout: of single numbers (None) or of whole channels after `lead` dimensions."""

    def rule(mode: ModuleMode, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        shape = tuple(input.shape)
        if lead is not None:
            shape = (*shape[:lead], *(1,) * (len(shape) - lead))
        kept = mode.kept(shape, 1 - p, _like(input))
        if alpha:
            low = -1.7580993408473766  # what SELU tends to
            scale = 1 / math.sqrt((1 - p) * (1 + p * low**2)) if p < 1 else 0.0
            found = (input * kept + low * (1 - kept)) * scale - scale * low * p
        else:
            found = input * (kept / (1 - p) if p < 1 else kept)
        return input.copy_(found) if inplace else found

    return rule


def _channels(dims: int) -> Callable[..., Tensor]:
    """Return dropout of channels for inputs of `dims` dimensions beside examples and channels."""

    def rule(mode: ModuleMode, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        lead = 1 if input.dim() == dims + 1 and dims != 2 else 2
        return _dropout(lead)(mode, input, p, training, inplace)

    return rule


def _torch_dropout(mode: ModuleMode, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(None)(mode, input, p, train)


def _shape(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)


def _rand(mode: ModuleMode, *size: Any, **kwargs: Any) -> Tensor:
    return mode.uniforms(_shape(size or (kwargs["size"],)), _options(kwargs))


def _randn(mode: ModuleMode, *size: Any, **kwargs: Any) -> Tensor:
    return mode.normals(_shape(size or (kwargs["size"],)), _options(kwargs))


def _rand_like(mode: ModuleMode, input: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return mode.uniforms(tuple(input.shape), _like(input, dtype))


def _randn_like(mode: ModuleMode, input: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return mode.normals(tuple(input.shape), _like(input, dtype))


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("generator") is not None:
        raise InputError("the module draws from a generator of its own, which gives all rows the same; use torch's")
    return {
        "dtype": kwargs.get("dtype") or torch.float32,
        **({"device": kwargs["device"]} if kwargs.get("device") else {}),
    }


def _bernoulli(mode: ModuleMode, input: Tensor, p: float | None = None, **_: Any) -> Tensor:
    uniform = mode.uniforms(tuple(input.shape), _like(input))
    return (uniform < (input if p is None else p)).to(input.dtype)


def _bernoulli_(mode: ModuleMode, input: Tensor, p: float | Tensor = 0.5, **_: Any) -> Tensor:
    return input.copy_((mode.uniforms(tuple(input.shape), _like(input)) < p).to(input.dtype))


def _uniform_(mode: ModuleMode, input: Tensor, a: float = 0.0, b: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(mode.uniforms(tuple(input.shape), _like(input)) * (b - a) + a)


def _normal_(mode: ModuleMode, input: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(mode.normals(tuple(input.shape), _like(input)) * std + mean)


def _randint(mode: ModuleMode, low: int, high: Any = None, size: Any = None, **kwargs: Any) -> Tensor:
    if not isinstance(high, int):  # torch.randint(high, size)
        low, high, size = 0, low, high if size is None else size
    found = mode.uniforms(tuple(kwargs.pop("size", size)), {"device": _options(kwargs).get("device")}).double()
    drawn: Tensor = (found * (high - low) + low).floor().clamp(max=high - 1)
    return drawn.to(kwargs.get("dtype") or torch.int64)


def _randperm(mode: ModuleMode, n: int, **kwargs: Any) -> Tensor:
    found = mode.uniforms((n,), {"device": _options(kwargs).get("device")}).argsort()
    return found.to(kwargs.get("dtype") or torch.int64)


def _normal(mode: ModuleMode, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    tensors = [each for each in (mean, std) if isinstance(each, Tensor)]
    shape = tuple(sum(tensors).shape) if tensors else tuple(size)  # type: ignore[union-attr]
    like = _options(kwargs) if not tensors else _like(tensors[0])
    drawn: Tensor = mode.normals(shape, like) * std + mean
    return drawn


def _multinomial(mode: ModuleMode, input: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
    """Draw by the largest of noisy logarithms (Gumbel)."""
    times = (num_samples,) if replacement else ()
    uniform = mode.uniforms((*input.shape[:-1], *times, input.shape[-1]), _like(input)).clamp(min=2.0**-25)
    noisy = (input.unsqueeze(-2) if replacement else input).log() - (-uniform.log()).log()
    return noisy.argmax(-1) if replacement else noisy.topk(num_samples).indices


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """PReLU; torch's own is wrong under `vmap`: it may pair rows with channels."""
    by_channel = weight.numel() > 1 and input.dim() > 1
    slope = weight.reshape(-1, *(1,) * (input.dim() - 2)) if by_channel else weight
    return torch.where(input > 0, input, slope * input)


def _dense(lookup: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """Return a lookup whose gradient is not sparse; its numbers are the same. `sparse` is the argument at a place."""

    def looked_up(*args: Any, **kwargs: Any) -> Tensor:
        args = tuple(False if number == place else value for number, value in enumerate(args))
        return lookup(*args, **{name: value for name, value in kwargs.items() if name != "sparse"})

    return looked_up


def _without_overrides(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that does not ask whether it is overridden, so that the functions it calls are."""
    assert isinstance(function, types.FunctionType)
    never = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    found = types.FunctionType(function.__code__, {**function.__globals__, **never}, None, function.__defaults__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def _exponential_(mode: ModuleMode, input: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(-torch.log1p(-mode.uniforms(tuple(input.shape), _like(input))) / lambd)


def _log_normal_(mode: ModuleMode, input: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return _normal_(mode, input, mean, std).exp_()


def _randint_like(mode: ModuleMode, input: Tensor, low: int, high: int | None = None, **kwargs: Any) -> Tensor:
    kwargs["dtype"] = kwargs.get("dtype") or input.dtype
    return _randint(mode, *((0, low) if high is None else (low, high)), tuple(input.shape), **kwargs)


def _rrelu(
    mode: ModuleMode,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    slope: Any = (lower + upper) / 2
    if training:
        slope = mode.uniforms(tuple(input.shape), _like(input)) * (upper - lower) + lower
    found = torch.where(input >= 0, input, input * slope)
    return input.copy_(found) if inplace else found


_COMPOSED = {
    each: _without_overrides(each) for each in (functional.multi_head_attention_forward, functional.gumbel_softmax)
}
_ROWS: dict[Any, Callable[..., Any]] = {functional.scaled_dot_product_attention: attention_of_rows, **RECURRENT}
_PLAIN: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: plain_attention,
    torch.prelu: _prelu,
}
_ALIKE: dict[Any, Callable[..., Any]] = {
    functional.embedding: _dense(functional.embedding, 6),
    functional.embedding_bag: _dense(functional.embedding_bag, 7),
    **SOFTMAX,
}
_RANDOM: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout(None),
    torch.dropout: _torch_dropout,
    functional.dropout1d: _channels(1),
    functional.dropout2d: _channels(2),
    functional.dropout3d: _channels(3),
    functional.alpha_dropout: _dropout(None, alpha=True),
    functional.feature_alpha_dropout: _dropout(2, alpha=True),
    torch.rand: _rand,
    torch.randn: _randn,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.randint: _randint,
    torch.randperm: _randperm,
    torch.normal: _normal,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
    Tensor.log_normal_: _log_normal_,
    torch.randint_like: _randint_like,
    functional.rrelu: _rrelu,
}
