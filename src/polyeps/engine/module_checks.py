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

from polyeps.engine.fallback_layers import LoopedLayer, VmapLayer, evaluating
from polyeps.engine.gradient_checks import CheckedModel, check_layout, compare_gradients, name_of
from polyeps.engine.losses import Loss, RowWiseLoss, is_row_wise_loss, per_row_error
from polyeps.engine.network import Network
from polyeps.engine.row_draws import RowDraws
from polyeps.errors import InputError

_ROWS = 5  # two of one client and three of another
_MAGNITUDES = (0.3, 1.0, 30.0, 3.0, 0.03)


def check_model(
    subject: CheckedModel, network: Network, start: Tensor, candidates: list[Tensor]
) -> tuple[Network, Loss]:
    """Return the network and loss to train with; refuse a model whose gradients are not those of autograd.

    Weights are drawn around start (d,). Of the candidate rows, the first that the module accepts are used.
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
    with _deterministic(subject.module, "in training"):
        loss, labels = _checked_loss(subject.loss, outputs.detach(), generator)
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


def _checked_loss(loss: Loss, outputs: Tensor, generator: torch.Generator) -> tuple[Loss, Tensor]:
    """Return a row-wise loss, and labels it accepts; refuse a loss in which a row depends on another row."""
    spread = torch.randn(outputs.shape, generator=generator).to(outputs)
    magnitudes = torch.tensor(_MAGNITUDES).to(outputs).reshape(-1, *(1,) * (outputs.dim() - 1))
    outputs = outputs.nan_to_num(0.0, 0.0, 0.0).clamp(-100, 100) + spread * magnitudes
    labels = _labels(loss, outputs, generator)
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


def _labels(loss: Loss, outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Return labels that a loss accepts: its own examples, classes or, if it refuses them, numbers."""
    example = getattr(loss, "example_labels", None)
    if example is not None:
        found: Tensor = example(outputs, generator)
        return found
    classes = outputs.shape[1] if outputs.dim() > 1 and outputs.shape[1] > 1 else 2
    as_classes = torch.randint(0, classes, (len(outputs),), generator=generator).to(outputs.device)
    as_numbers = torch.randn(len(outputs), generator=generator).to(outputs.device)
    failed: Exception | None = None
    for labels in (as_classes, as_numbers):
        try:
            loss(outputs, labels)
        except Exception as error:
            failed = failed or error
        else:
            return labels
    raise InputError(
        f"the loss cannot be called with outputs of shape {tuple(outputs.shape)} and labels of shape"
        f" ({len(outputs)},), classes or numbers: {failed}"
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
        if not outputs.is_floating_point():
            raise InputError(f"{name_of(subject.module)} returns {outputs.dtype}; outputs must be float32")
        return rows, outputs
    raise InputError(
        f"{name_of(subject.module)} cannot be run on one tensor of {_ROWS} rows of shape"
        f" {tuple(candidates[0].shape[1:])} and {candidates[0].dtype}, the only input it gets: {failed}"
    )


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
    found, trace = type(module).__name__, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            found = f"{type(module).__name__} (because of {type(owner).__name__} at '{paths[id(owner)]}')"
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


def candidate_rows(
    module: nn.Module, shape: tuple[int, ...], kind: torch.dtype, example: Tensor | None
) -> list[Tensor]:
    """Return rows to check a model on: random ones of several magnitudes, and milder ones in case it refuses those."""
    generator = torch.Generator().manual_seed(1)
    size = (_ROWS, *shape)
    if not kind.is_floating_point:
        if example is not None:
            picked = torch.randint(0, example.numel(), size, generator=generator)
            return [example.flatten().cpu()[picked], example[torch.arange(_ROWS) % len(example)].cpu()]
        tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
        return [torch.randint(0, min(tables, default=2), size, generator=generator).to(kind)]
    magnitudes = torch.tensor(_MAGNITUDES).reshape(-1, *(1,) * len(shape))
    rows = [torch.randn(size, generator=generator) * magnitudes, torch.rand(size, generator=generator)]
    if example is not None:
        rows.append(example[torch.arange(_ROWS) % len(example)].cpu())
    return rows
