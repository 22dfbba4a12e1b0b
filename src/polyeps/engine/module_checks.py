"""Checks of a model's module and loss before training: the engine against autograd, one example at a time.

Two clients have different weights and rows of several magnitudes; outputs, every record's gradient and the clipped sums
must equal those of autograd. A module that `vmap` cannot run is looped over, with a warning; a module that still
differs is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyeps.data.named_inputs import Inputs
from polyeps.engine.example_rows import CHECKED_ROWS
from polyeps.engine.fallback_layers import LoopedLayer, VmapLayer, evaluating
from polyeps.engine.gradient_checks import CheckedModel, check_layout, compare_gradients, name_of
from polyeps.engine.layers import Layer
from polyeps.engine.loss_checks import checked_loss, nearly
from polyeps.engine.losses import Loss
from polyeps.engine.module_mode import ModuleMode
from polyeps.engine.network import Network
from polyeps.engine.row_draws import MiddlingDraws, RowDraws
from polyeps.engine.slow_modules import HalfPrecisionError, first_sentence, slow_part, warn_slow
from polyeps.errors import InputError


class OneAtATimeError(InputError):
    """A module keeps records apart if it gets one at a time: it branches on all of a batch, or takes no batches."""


_REMEDY = "replace what mixes examples, for instance batch normalisation by GroupNorm or LayerNorm"
_SEEN = (0, *(1, 2, 3, 4) * 3, 0)  # rows in the order in which a module sees them, the first one twice


def check_model(
    subject: CheckedModel,
    network: Network,
    start: Tensor,
    candidates: list[Tensor],
    targets: Tensor | None = None,
) -> tuple[Network, Loss, Tensor]:
    """Return the network and loss to train with, and a row; refuse a model whose gradients are not those of autograd.

    Weights are drawn around start (d,). Of the candidate rows, the first that the module accepts are used. Targets
    (R, ...) are examples of what the loss takes.
    """
    generator = torch.Generator().manual_seed(0)
    spread = 0.1 * torch.randn(2, len(start), generator=generator).to(start.device)
    models = spread.add_(start)  # in place: large models take much memory
    with _deterministic(subject.module, "in eval mode"), evaluating(subject.module):
        rows, outputs = _run(subject, models[0], candidates)
    with evaluating(subject.module):
        _check_rows_apart(subject, models[0], rows, outputs)
    with _deterministic(subject.module, "in training"):
        in_half = _check_alone(subject, models[0], rows)
    _check_keeps_nothing(subject, models[0], rows)
    with _deterministic(subject.module, "in training"):
        _check_rows_apart_in_training(subject, models[0], rows)
    with _deterministic(subject.module, "in training"):
        loss, labels = checked_loss(subject.loss, outputs.detach(), generator, targets)
        network = _agreeing(subject, network, loss, models, rows, labels, in_half)
    return network, loss, rows[1:2].cpu()


def _agreeing(
    subject: CheckedModel,
    network: Network,
    loss: Loss,
    models: Tensor,
    rows: Tensor,
    labels: Tensor,
    in_half: bool,
) -> Network:
    """Return the fastest network that agrees with autograd: the given one, the module as a whole, or a loop."""
    module = subject.module
    ways: tuple[Network, ...] = (
        network,
        Network((VmapLayer(module, inputs=False),)),
        Network((LoopedLayer(module, inputs=False),)),
    )
    failed: Exception | None = None
    if in_half:
        failed, ways = HalfPrecisionError(), ways[2:]
    for way in ways:
        try:
            settled = _settled(way, models, rows)
            drawing = compare_gradients(subject, settled, loss, models, rows, labels)
        except Exception as error:  # of a rule, or of user code under vmap
            failed = failed or error
            continue
        if failed is not None and way is ways[-1]:
            warn_slow(name_of(module), failed, getattr(module, "alone", False))
        # a loop may draw on a branch that no check takes
        looped = any(isinstance(layer, LoopedLayer) for layer in settled.layers)
        return Network(settled.layers, drawing or looped)
    assert failed is not None
    if isinstance(failed, InputError):
        raise failed
    raise InputError(f"{name_of(module)} cannot be trained: {first_sentence(failed)}") from failed


def _run(subject: CheckedModel, vector: Tensor, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the first candidate that the module accepts, and its outputs."""
    failed: Exception | None = None
    for rows in candidates:
        try:
            with torch.no_grad():
                outputs = subject.outputs(vector, rows)
        except InputError:
            raise
        except Exception as error:
            failed = failed or error
            continue
        if outputs.dtype != torch.float32:
            raise InputError(
                f"{name_of(subject.module)} returns {outputs.dtype}; outputs must be float32: return outputs.float(), "
                "and call float() on parts and buffers of other types"
            )
        return rows, outputs
    given = f"one tensor of {CHECKED_ROWS} rows of shape {tuple(candidates[0].shape[1:])} and {candidates[0].dtype}"
    inputs = getattr(subject.module, "inputs", None)
    if isinstance(inputs, Inputs):
        given = "inputs " + ", ".join(f"{part.name} {(CHECKED_ROWS, *part.shape)} {part.kind}" for part in inputs.parts)
        given += "; forward takes inputs by these names"
    assert failed is not None
    late = [
        name for name, part in subject.module.named_parameters() if part.requires_grad and name not in subject.shapes
    ]
    if late:
        raise InputError(
            f"{name_of(subject.module)} makes its parameter '{late[0]}' only when it runs; make all layers in __init__"
        )
    if not getattr(subject.module, "alone", False) and _runs_alone(subject, vector, candidates):
        raise OneAtATimeError(f"{name_of(subject.module)} takes one example at a time")
    remedy = "leave out double() and half(), since all numbers are float32" if "dtype" in str(failed) else ""
    raise InputError(
        f"{name_of(subject.module)} cannot be run on {given}, the only input it gets: {first_sentence(failed)};"
        f" {remedy or 'forward must take any number of such examples'}"
    )


def _runs_alone(subject: CheckedModel, vector: Tensor, candidates: list[Tensor]) -> bool:
    """Return whether a module runs on each row of a candidate alone."""
    for rows in candidates:
        with suppress(Exception), torch.no_grad():  # any error of user code
            for row in rows:
                subject.outputs(vector, row[None])
            return True
    return False


class _Precision(TorchFunctionMode):
    """Notes whether anything is computed with few digits."""

    half = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.half |= isinstance(found, Tensor) and found.dtype in (torch.float16, torch.bfloat16)
        return found


def _check_alone(subject: CheckedModel, vector: Tensor, rows: Tensor) -> bool:
    """Refuse a module that autograd cannot differentiate for one example in training; return if it uses few digits."""
    draws, precision = RowDraws.fixed(1, rows.device), _Precision()
    try:
        with precision:
            subject.gradient(vector, rows[:1], draws.again(), torch.sum)
        gradients = [subject.gradient(vector, row[None], draws.again(), torch.sum) for row in rows]
    except InputError:
        raise
    except Exception as error:  # any error of user code
        raise InputError(
            f"{name_of(subject.module)} has no gradient for one example in training mode, by plain autograd: "
            f"{first_sentence(error)}{f'; {_REMEDY}' if 'more than 1 value per channel' in str(error) else ''}"
        ) from error
    if all(each is None for each in gradients):
        raise InputError(
            f"the outputs of {name_of(subject.module)} depend on no parameter that requires a gradient, so there is"
            " nothing to train; compute them with torch operations, without detach, no_grad or numpy"
        )
    return precision.half


def _check_rows_apart(subject: CheckedModel, vector: Tensor, rows: Tensor, together: Tensor) -> None:
    try:
        with torch.no_grad():
            apart = torch.cat([subject.outputs(vector, row[None]) for row in rows])
    except InputError:
        raise
    except Exception as error:  # any error of user code
        raise InputError(
            f"{name_of(subject.module)} takes {len(rows)} examples, but not one alone: {first_sentence(error)};"
            f" {_REMEDY}, and keep nothing of examples in attributes"
        ) from error
    if together.shape == apart.shape and nearly(together, apart):
        return
    if not getattr(subject.module, "alone", False) and _branches(subject, vector, rows):
        raise OneAtATimeError(f"{name_of(subject.module)} branches on all examples of a batch")
    again = None
    with suppress(Exception), torch.no_grad():  # any error of user code
        again = subject.outputs(vector, rows)
    if again is None or not nearly(together, again):
        raise InputError(_remembers(subject.module))
    _refuse_mixing(subject.module, "")


def _check_rows_apart_in_training(subject: CheckedModel, vector: Tensor, rows: Tensor) -> None:
    """Refuse a module that mixes rows in training only, where each gets the same, middling random numbers."""
    if getattr(subject.module, "alone", False):
        return

    def outputs(some: Tensor) -> Tensor:
        with torch.no_grad(), ModuleMode(MiddlingDraws.fixed(1, rows.device)):
            return subject.outputs(vector, some)

    try:
        together, apart = outputs(rows), torch.cat([outputs(row[None]) for row in rows])
    except Exception:  # some run on one record only in training, which is all that they get
        return
    if together.shape != apart.shape or not nearly(together, apart):
        if _branches(subject, vector, rows):
            return  # a branch on the whole batch, such as one that checks for a single record
        _refuse_mixing(subject.module, " in training")


def _branches(subject: CheckedModel, vector: Tensor, rows: Tensor) -> bool:
    """Return whether a module branches on the values of the records that it gets."""
    try:
        VmapLayer(subject.module, inputs=False).forward(
            vector[None], rows, check_layout(((0, 1, len(rows)),), rows.device)
        )
    except Exception as error:  # any error of user code under vmap
        return any(words in str(error) for words in ("data-dependent control flow", ".item()"))
    return False


def _refuse_mixing(module: nn.Module, when: str) -> None:
    remedy = _REMEDY
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase | nn.MultiheadAttention) and not part.batch_first:
            where = f"{type(part).__name__} at '{path}'" if path else type(part).__name__
            remedy = f"{where} takes the first dimension for positions: build it with batch_first=True, or transpose"
            break
    raise InputError(
        f"the output of {name_of(module)} for an example depends on the other examples of the batch{when}; {remedy}"
    )


def _check_keeps_nothing(subject: CheckedModel, vector: Tensor, rows: Tensor) -> None:
    """Refuse a module whose output for an example changes after it has seen others, wherever it keeps them."""
    with torch.no_grad():
        first, *_, last = (subject.trained(vector, rows[i : i + 1], RowDraws.fixed(1, rows.device)) for i in _SEEN)
    if first.shape != last.shape or not nearly(first, last):
        raise InputError(_remembers(subject.module))


def _remembers(module: nn.Module) -> str:
    return (
        f"the output of {name_of(module)} for an example depends on the examples it saw before, so no row can be"
        " clipped on its own; keep nothing of them in attributes or elsewhere"
    )


def _settled(network: Network, models: Tensor, rows: Tensor) -> Network:
    """Return the network with its vmap layers looped where `vmap` cannot run them."""
    layout = check_layout(((0, 1, 2), (1, 2, 3)), rows.device)
    layers = []
    for layer, weights in zip(network.layers, network.columns(models), strict=True):
        found, outputs, failed = layer, None, None
        for way in _ways(layer):
            try:
                outputs, saved = way.forward(weights, rows, layout)
                way.backward(weights, saved, torch.ones_like(outputs), layout, getattr(way, "inputs", True))
                found = way
                break
            except Exception as error:
                if not isinstance(layer, VmapLayer) or isinstance(error, InputError):
                    raise
                outputs, failed = None, error
        if outputs is None:
            assert isinstance(layer, VmapLayer)
            assert failed is not None
            warn_slow(slow_part(layer.module, failed), failed, getattr(layer.module, "alone", False))
            found = LoopedLayer(layer.module)
            outputs, _ = found.forward(weights, rows, layout)
        layers.append(found)
        rows = outputs
    return Network(tuple(layers))


def _ways(layer: Layer) -> list[Layer]:
    """Return the ways to run a layer at once on all rows, the fastest first."""
    if type(layer) is not VmapLayer:
        return [layer]
    return [layer, replace(layer, written=True)]


@contextmanager
def _deterministic(module: nn.Module, when: str) -> Iterator[None]:
    """Refuse a module that draws global random numbers or changes its buffers; restore the generators."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    state, others = torch.random.get_rng_state(), (random.getstate(), np.random.get_state())  # noqa: NPY002
    try:
        yield
        drawn = not torch.equal(torch.random.get_rng_state(), state) or random.getstate() != others[0]
        drawn = drawn or not all(map(np.array_equal, np.random.get_state(), others[1]))  # noqa: NPY002
        changed = [
            name for name, buffer in module.named_buffers() if name in before and not torch.equal(buffer, before[name])
        ]
    finally:
        torch.random.set_rng_state(state)
        random.setstate(others[0])
        np.random.set_state(others[1])  # noqa: NPY002
        for name, buffer in module.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.data.copy_(before[name])
    if drawn:
        remedy = (
            "draw in training alone: functional.dropout(x, p, self.training), or torch.rand after `if self.training`"
            if "eval" in when
            else "use torch's dropout or torch.rand, or remove its random parts"
        )
        raise InputError(
            f"{name_of(module)} draws from a global generator {when}, so runs could not be repeated; {remedy}"
        )
    if changed:
        path, _, name = changed[0].rpartition(".")
        owner = type(module.get_submodule(path)).__name__ + (f" at '{path}'" if path else "")
        raise InputError(
            f"{owner} changes its buffer '{name}' when it sees examples; call eval() on that part, or remove that state"
        )
