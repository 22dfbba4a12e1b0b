"""The check of a user's module and loss before anybody trains: the engine against autograd, one example at a time.

Two clients with different weights and rows of several magnitudes; outputs, every record's gradient and the clipped
sums must be those of autograd. A module that `vmap` cannot follow is looped over, with a warning; whatever then still
differs is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyeps.engine.layout import Group, Layout
from polyeps.engine.looped import Looped
from polyeps.engine.losses import Apart, Loss, per_row, treats_rows_apart
from polyeps.engine.mapped import Mapped, call, one_tensor
from polyeps.engine.network import Network, add_gradients, record_gradients
from polyeps.errors import InputError

ROWS = 5  # of two clients: two and three
MAGNITUDES = (0.3, 1.0, 30.0, 3.0, 0.03)


@dataclass(frozen=True)
class Subject:
    """What is checked: a module, the shapes of its trainable parameters by name, and its loss."""

    module: nn.Module
    shapes: dict[str, tuple[int, ...]]
    loss: Loss

    def outputs(self, vector: Tensor, rows: Tensor) -> Tensor:
        """The module's outputs under weights (d,), refused unless there is one row for each."""
        parts = torch.split(vector, [torch.Size(shape).numel() for shape in self.shapes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return one_tensor(self.module, call(self.module, values, rows.clone()), len(rows))


def checked(subject: Subject, network: Network, start: Tensor, candidates: list[Tensor]) -> tuple[Network, Loss]:
    """The network and loss to train with; refused where they are not those of autograd.

    Weights are drawn around start (d,). Candidates are rows (ROWS, ...) to try: the first that the module takes.
    """
    generator = torch.Generator().manual_seed(0)
    spread = 0.1 * torch.randn(2, len(start), generator=generator).to(start.device)
    models = start + spread
    with _deterministic(subject.module):
        rows, outputs = _run(subject, models[0], candidates)
    with _deterministic(subject.module):
        _check_rows_apart(subject, models[0], rows, outputs)
        loss, labels = checked_loss(subject.loss, outputs.detach(), generator)
        network = _settled(network, models, rows)
        _compare(subject, network, loss, models, rows, labels)
    return network, loss


def checked_loss(loss: Loss, outputs: Tensor, generator: torch.Generator) -> tuple[Loss, Tensor]:
    """A loss that treats rows apart, and labels it takes; refused where a row's loss depends on another row."""
    spread = torch.randn(outputs.shape, generator=generator).to(outputs)
    magnitudes = torch.tensor(MAGNITUDES).to(outputs).reshape(-1, *(1,) * (outputs.dim() - 1))
    outputs = outputs.nan_to_num(0.0, 0.0, 0.0).clamp(-100, 100) + spread * magnitudes
    labels = _labels(loss, outputs, generator)
    if treats_rows_apart(loss):
        return loss, labels
    leaf = outputs.clone().requires_grad_()
    with torch.enable_grad():
        together = loss(leaf, labels)
    if not isinstance(together, Tensor) or together.shape != labels.shape[:1]:
        raise InputError(per_row(together, len(labels)))
    if not together.requires_grad:
        raise InputError("autograd cannot follow the loss to the outputs; compute it from them by operations of torch")
    (gradients,) = torch.autograd.grad(together.sum(), leaf)
    looped = Apart(loss, looped=True)
    alone = [looped._autograd(output, label) for output, label in zip(outputs, labels, strict=True)]
    if not _close(together.detach(), looped(outputs, labels)) or not _close(gradients, torch.stack(alone)):
        raise InputError(
            "a row's loss depends on the other rows of the batch, so no row can be clipped on its own;"
            " return one number per row from that row's outputs and label alone"
        )
    apart: Loss = looped
    try:
        apart = Apart(loss)
        found = apart.gradients(outputs, labels)
    except InputError:
        raise
    except Exception as error:  # whatever a user's code raises under vmap
        _warn_slow(f"the loss {_name(loss)}", error)
        apart = looped
        found = looped.gradients(outputs, labels)
    if found.shape != gradients.shape or not _close(found, gradients):
        raise InputError(f"`gradients` of {_name(loss)} does not return what autograd does; correct it or remove it")
    return apart, labels


def _labels(loss: Loss, outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Labels (T,) that a loss takes: classes, or where it refuses them numbers."""
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


def _run(subject: Subject, vector: Tensor, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The first candidate that the module takes, and its outputs."""
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
            raise InputError(f"{_name(subject.module)} returns {outputs.dtype}, where float32 outputs are allowed")
        return rows, outputs
    raise InputError(
        f"{_name(subject.module)} cannot be run on one tensor of {ROWS} rows of shape {tuple(candidates[0].shape[1:])}"
        f" and {candidates[0].dtype}, the only input it gets: {failed}"
    )


def _check_rows_apart(subject: Subject, vector: Tensor, rows: Tensor, together: Tensor) -> None:
    with torch.no_grad():
        apart = torch.cat([subject.outputs(vector, row[None]) for row in rows])
    if together.shape != apart.shape or not _close(together, apart):
        raise InputError(
            "the model's output for an example depends on the other examples of the batch; "
            "replace what mixes them, for instance batch normalisation by GroupNorm or LayerNorm"
        )


def _settled(network: Network, models: Tensor, rows: Tensor) -> Network:
    """The network with its mapped layers looped where `vmap` cannot run them."""
    layout = _layout(((0, 1, 2), (1, 2, 3)), rows.device)
    layers = []
    for layer, weights in zip(network.layers, network.columns(models), strict=True):
        found = layer
        try:
            outputs, saved = found.forward(weights, rows, layout)
            found.backward(weights, saved, torch.ones_like(outputs), layout, True)
        except Exception as error:
            if not isinstance(layer, Mapped) or isinstance(error, InputError):
                raise
            _warn_slow(_name(layer.module), error)
            found = Looped(layer.module)
            outputs, _ = found.forward(weights, rows, layout)
        layers.append(found)
        rows = outputs
    return Network(tuple(layers))


def _compare(subject: Subject, network: Network, loss: Loss, models: Tensor, rows: Tensor, labels: Tensor) -> None:
    """Refuse a network whose gradients, of records alone or in clipped sums, are not those of autograd."""
    owner = torch.tensor([0, 0, 1, 1, 1], device=rows.device)
    expected = torch.stack([_autograd(subject, models[i], rows[k], labels[k]) for k, i in enumerate(owner.tolist())])
    found = torch.cat(
        [record_gradients(network, loss, models[i], rows[owner == i], labels[owner == i]) for i in range(2)]
    )
    _same(subject, found, expected, "every record's gradient")
    norms = torch.linalg.vector_norm(expected.double(), dim=1)
    usable = norms[norms.isfinite() & (norms > 0)]
    limit = float(usable.median()) / 2 if len(usable) else 1.0
    factors = torch.where(norms.isfinite(), (limit / norms.clamp(min=1e-300)).clamp(max=1.0), 0.0)
    each = expected.nan_to_num(0.0, 0.0, 0.0).double() * factors[:, None]
    clip = torch.full((2,), limit, device=rows.device)
    for groups, picked in ((((0, 1, 2), (1, 2, 3)), [0, 1, 2, 3, 4]), (((0, 2, 2),), [0, 1, 2, 3])):
        sums = torch.zeros_like(models)
        layout = _layout(groups, rows.device)
        with torch.no_grad():
            add_gradients(network, loss, models, rows[picked], labels[picked], layout, None, clip, sums)
        of_clients = torch.zeros_like(models, dtype=torch.float64).index_add_(0, owner[picked], each[picked])
        _same(subject, sums, of_clients.float(), "the clipped sum")


def _autograd(subject: Subject, vector: Tensor, row: Tensor, label: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = vector.clone().requires_grad_()
        loss = subject.loss(subject.outputs(leaf, row[None]), label[None]).sum()
    (found,) = torch.autograd.grad(loss, leaf, allow_unused=True) if loss.requires_grad else (None,)
    return torch.zeros_like(leaf) if found is None else found


def _same(subject: Subject, found: Tensor, expected: Tensor, what: str) -> None:
    """Refuse gradients that differ by more than rounding, naming the parameters."""
    sizes = [torch.Size(shape).numel() for shape in subject.shapes.values()]
    length = torch.linalg.vector_norm(expected.nan_to_num(0.0, 0.0, 0.0).double(), dim=1, keepdim=True)
    off = (found.double() - expected.double()).abs() > 2e-3 * length
    off &= expected.isfinite()
    wrong = [name for name, part in zip(subject.shapes, torch.split(off, sizes, dim=1), strict=True) if part.any()]
    if wrong:
        raise InputError(
            f"for {_name(subject.module)}, {what} is not what autograd gives one example at a time, in"
            f" {', '.join(repr(name) for name in wrong[:3])}; its rows cannot be clipped correctly, so it is refused"
        )


@contextmanager
def _deterministic(module: nn.Module) -> Iterator[None]:
    """Refuse a module that draws random numbers or changes its buffers; leave torch's generator as it was."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    state = torch.random.get_rng_state()
    try:
        yield
        drawn = not torch.equal(torch.random.get_rng_state(), state)
        changed = [name for name, buffer in module.named_buffers() if name in before and _differ(buffer, before[name])]
    finally:
        torch.random.set_rng_state(state)
        for name, buffer in module.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.data.copy_(before[name])
    if drawn:
        raise InputError(
            f"{_name(module)} draws from torch's global generator, so runs could not be repeated; remove what is"
            " random, or call eval() on it"
        )
    if changed:
        raise InputError(f"the model changes its buffer '{changed[0]}' when it sees examples; it must keep nothing")


def _differ(first: Tensor, second: Tensor) -> bool:
    return first.shape != second.shape or not torch.equal(first, second)


def _layout(groups: tuple[tuple[int, int, int], ...], device: torch.device) -> Layout:
    """A layout of groups (first, last, width)."""
    made: list[Group] = []
    owner: list[int] = []
    for first, last, width in groups:
        made.append(Group(first, last, width, len(owner)))
        owner += [client for client in range(first, last) for _ in range(width)]
    return Layout(2, tuple(made), torch.tensor(owner, device=device))


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-3, atol=1e-5, equal_nan=True)


def _warn_slow(what: str, error: Exception) -> None:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    warnings.warn(f"{what} runs one row after the other, which is slow: vmap cannot follow it ({reason})", stacklevel=2)


def _name(thing: nn.Module | Callable[..., object]) -> str:
    return getattr(thing, "__name__", type(thing).__name__)
