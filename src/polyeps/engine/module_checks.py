"""Checks of a model's module and loss before training: the engine against autograd, one example at a time.

Two clients have different weights and rows of several magnitudes; outputs, every record's gradient and the clipped sums
must equal those of autograd. A module that `vmap` cannot run is looped over, with a warning; a module that still
differs is refused.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from polyeps.data.named_inputs import Inputs
from polyeps.engine.example_rows import CHECKED_ROWS, MAGNITUDES
from polyeps.engine.fallback_layers import LoopedLayer, VmapLayer, evaluating
from polyeps.engine.gradient_checks import CheckedModel, check_layout, compare_gradients, name_of
from polyeps.engine.losses import Loss, RowWiseLoss, is_row_wise_loss, per_row_error
from polyeps.engine.network import Network
from polyeps.engine.row_draws import RowDraws
from polyeps.errors import InputError

_SEEN = (0, *(1, 2, 3, 4) * 3, 0)  # rows in the order in which a module sees them, the first one twice


def check_model(
    subject: CheckedModel,
    network: Network,
    start: Tensor,
    candidates: list[Tensor],
    targets: Tensor | None = None,
) -> tuple[Network, Loss]:
    """Return the network and loss to train with; refuse a model whose gradients are not those of autograd.

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
        _check_alone(subject, models[0], rows[:1])
    _check_keeps_nothing(subject, models[0], rows)
    with _deterministic(subject.module, "in training"):
        loss, labels = _checked_loss(subject.loss, outputs.detach(), generator, targets)
        network = _agreeing(subject, network, loss, models, rows, labels)
    return network, loss


def _agreeing(
    subject: CheckedModel, network: Network, loss: Loss, models: Tensor, rows: Tensor, labels: Tensor
) -> Network:
    """Return the fastest network that agrees with autograd: the given one, the module as a whole, or a loop."""
    module = subject.module
    ways = (network, Network((VmapLayer(module, inputs=False),)), Network((LoopedLayer(module, inputs=False),)))
    failed: Exception | None = None
    for way in ways:
        try:
            settled = _settled(way, models, rows)
            drawing = compare_gradients(subject, settled, loss, models, rows, labels)
        except Exception as error:  # of a rule, or of user code under vmap
            failed = failed or error
            continue
        if failed is not None and way is ways[-1]:
            _warn_slow(name_of(module), failed)
        # a loop may draw on a branch that no check takes
        looped = any(isinstance(layer, LoopedLayer) for layer in settled.layers)
        return Network(settled.layers, drawing or looped)
    assert failed is not None
    if isinstance(failed, InputError):
        raise failed
    raise InputError(f"{name_of(module)} cannot be trained: {failed}") from failed


def _checked_loss(
    loss: Loss, outputs: Tensor, generator: torch.Generator, targets: Tensor | None
) -> tuple[Loss, Tensor]:
    """Return a row-wise loss, and labels it accepts; refuse a loss in which a row depends on another row."""
    spread = torch.randn(outputs.shape, generator=generator).to(outputs)
    magnitudes = torch.tensor(MAGNITUDES).to(outputs).reshape(-1, *(1,) * (outputs.dim() - 1))
    outputs = outputs.nan_to_num(0.0, 0.0, 0.0).clamp(-100, 100) + spread * magnitudes
    labels = _labels(loss, outputs, generator, targets)
    if is_row_wise_loss(loss):
        return loss, labels
    leaf = outputs.clone().requires_grad_()
    with torch.enable_grad():
        together = loss(leaf, labels)
    if not isinstance(together, Tensor) or together.shape != labels.shape[:1]:
        raise InputError(per_row_error(together, len(labels)))
    if not together.requires_grad:
        raise InputError(
            "autograd cannot differentiate the loss by the outputs; compute it from them with torch operations"
        )
    (gradients,) = torch.autograd.grad(together.sum(), leaf)
    looped = RowWiseLoss(loss, looped=True)
    alone = [looped._autograd(output, label) for output, label in zip(outputs, labels, strict=True)]
    if not _close(together.detach(), looped(outputs, labels)) or not _close(gradients, torch.stack(alone)):
        raise InputError(
            "a row's loss depends on the other rows of the batch, so no row can be clipped on its own;"
            " return one number per row from that row's outputs and label alone"
        )
    if not _close(looped._autograd(outputs[0], labels[0]), alone[0]):
        raise InputError("a row's loss depends on the rows that were seen before; keep nothing of them in the loss")
    apart: Loss = looped
    try:
        apart = RowWiseLoss(loss)
        found = apart.gradients(outputs, labels)
    except InputError:
        raise
    except Exception as error:  # any error of user code under vmap
        _warn_slow(f"the loss {name_of(loss)}", error)
        apart = looped
        found = looped.gradients(outputs, labels)
    if found.shape != gradients.shape or not _close(found, gradients):
        raise InputError(f"`gradients` of {name_of(loss)} does not return what autograd does; correct it or remove it")
    return apart, labels


def _labels(loss: Loss, outputs: Tensor, generator: torch.Generator, targets: Tensor | None) -> Tensor:
    """Return targets that a loss accepts: those that are stated, its own examples, classes or numbers."""
    example = getattr(loss, "example_labels", None)
    if targets is None and example is not None:
        found: Tensor = example(outputs, generator)
        return found
    classes = outputs.shape[1] if outputs.dim() > 1 and outputs.shape[1] > 1 else 2
    as_classes = torch.randint(0, classes, (len(outputs),), generator=generator).to(outputs.device)
    as_numbers = torch.randn(len(outputs), generator=generator).to(outputs.device)
    tried = [as_classes, as_numbers]
    if targets is not None:
        if not len(targets):
            raise InputError("the example targets are empty; give at least one, like those of the records")
        tried = [targets[torch.arange(len(outputs)) % len(targets)].to(outputs.device)]
    failed: Exception | None = None
    for labels in tried:
        try:
            loss(outputs, labels)
        except InputError:
            raise
        except Exception as error:
            failed = failed or error
        else:
            return labels
    shape, remedy = f"({len(outputs)},), classes or numbers", "; state others by giving example targets"
    if targets is not None:
        shape, remedy = str((len(outputs), *targets.shape[1:])), ""
    raise InputError(
        f"the loss cannot be called with outputs of shape {tuple(outputs.shape)} and targets of shape"
        f" {shape}: {failed}{remedy}"
    )


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
    raise InputError(f"{name_of(subject.module)} cannot be run on {given}, the only input it gets: {failed}")


def _check_alone(subject: CheckedModel, vector: Tensor, row: Tensor) -> None:
    """Refuse a module that autograd cannot differentiate for one example in training mode."""
    try:
        with torch.enable_grad():
            leaf = vector.clone().requires_grad_()
            total = subject.trained(leaf, row, RowDraws.fixed(1, row.device)).sum()
        if total.requires_grad:
            torch.autograd.grad(total, leaf, allow_unused=True)
    except InputError:
        raise
    except Exception as error:  # any error of user code
        raise InputError(
            f"{name_of(subject.module)} has no gradient for one example in training mode, by plain autograd: {error}"
        ) from error


def _check_rows_apart(subject: CheckedModel, vector: Tensor, rows: Tensor, together: Tensor) -> None:
    with torch.no_grad():
        apart = torch.cat([subject.outputs(vector, row[None]) for row in rows])
    if together.shape != apart.shape or not _close(together, apart):
        raise InputError(
            "the model's output for an example depends on the other examples of the batch; "
            "replace what mixes them, for instance batch normalisation by GroupNorm or LayerNorm"
        )


def _check_keeps_nothing(subject: CheckedModel, vector: Tensor, rows: Tensor) -> None:
    """Refuse a module whose output for an example changes after it has seen others, wherever it keeps them."""
    with torch.no_grad():
        first, *_, last = (subject.trained(vector, rows[i : i + 1], RowDraws.fixed(1, rows.device)) for i in _SEEN)
    if first.shape != last.shape or not _close(first, last):
        raise InputError(
            f"the output of {name_of(subject.module)} for an example depends on the examples it saw before, so no row"
            " can be clipped on its own; keep nothing of them in attributes or elsewhere"
        )


def _settled(network: Network, models: Tensor, rows: Tensor) -> Network:
    """Return the network with its vmap layers looped where `vmap` cannot run them."""
    layout = check_layout(((0, 1, 2), (1, 2, 3)), rows.device)
    layers = []
    for layer, weights in zip(network.layers, network.columns(models), strict=True):
        found = layer
        try:
            outputs, saved = found.forward(weights, rows, layout)
            found.backward(weights, saved, torch.ones_like(outputs), layout, getattr(found, "inputs", True))
        except Exception as error:
            if not isinstance(layer, VmapLayer) or isinstance(error, InputError):
                raise
            _warn_slow(_slow_part(layer.module, error), error)
            found = LoopedLayer(layer.module)
            outputs, _ = found.forward(weights, rows, layout)
        layers.append(found)
        rows = outputs
    return Network(tuple(layers))


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
        raise InputError(
            f"{name_of(module)} draws from a global generator {when}, so runs could not be repeated; use torch's"
            " dropout or torch.rand, with training=self.training, or remove its random parts"
        )
    if changed:
        raise InputError(f"the model changes its buffer '{changed[0]}' when it sees examples; remove that state")


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-3, atol=1e-5, equal_nan=True)


def _warn_slow(what: str, error: Exception) -> None:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    warnings.warn(f"{what} runs one row after the other, which is slow: vmap cannot run it ({reason})", stacklevel=2)


def _slow_part(module: nn.Module, error: Exception) -> str:
    """Return the name of the innermost module in which an error was raised."""
    paths = {id(part): path for path, part in module.named_modules()}
    found, trace = name_of(module), error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            found = f"{name_of(module)} (because of {type(owner).__name__} at '{paths[id(owner)]}')"
        trace = trace.tb_next
    return found


def check_module(module: nn.Module) -> None:
    """Refuse parts that mix rows of a batch, draw from a global generator or are not float32; name a remedy."""
    for name, part in module.named_modules():
        kind = type(part).__name__
        where = f"{kind} at '{name}'" if name else kind
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None):
            raise InputError(
                f"{where} mixes the examples of a batch, so no example's gradient can be clipped on its own;"
                " use GroupNorm or LayerNorm instead, or call eval() on it to keep its statistics"
            )
        if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats:
            raise InputError(f"{where} keeps statistics across examples; build it with track_running_stats=False")
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and (part.max_norm is not None or part.sparse):
            raise InputError(f"{where} has max_norm or sparse gradients, which change weights as a whole; use neither")
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise InputError(f"parameter '{name}' has no shape yet; run the module once before making a model of it")
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise InputError(f"parameter '{name}' is {parameter.dtype}; models are float32: call float() on the module")
        if parameter._backward_hooks:
            raise InputError(f"parameter '{name}' has hooks on its gradient, which are not run here; remove them")
