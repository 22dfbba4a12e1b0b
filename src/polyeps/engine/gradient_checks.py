"""A network's gradients against autograd, one example at a time: every record's own, and the clipped sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polyeps.engine.fallback_layers import Lender, check_one_tensor, leaf_gradients
from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.losses import Loss
from polyeps.engine.module_mode import ModuleMode
from polyeps.engine.network import Network, add_gradients, record_gradients
from polyeps.engine.row_draws import RowDraws
from polyeps.errors import InputError

_OWNER = (0, 0, 1, 1, 1)  # two rows of one client and three of another
_ALLOWED = 2e-3  # largest difference, as a share of a gradient's length
_TIMES = 8  # of what rounding may change, measured by moving weights and rows by one digit


@dataclass(frozen=True)
class CheckedModel:
    """A module to check, the shapes of its trainable parameters by name, and its loss."""

    module: nn.Module
    shapes: dict[str, tuple[int, ...]]
    loss: Loss

    def outputs(self, vector: Tensor, rows: Tensor) -> Tensor:
        """Return the module's outputs under weights (d,); refuse them unless there is one row for each input."""
        with Lender(self.module).lend_copies(vector):
            return check_one_tensor(self.module, self.module(rows.clone()), len(rows))

    def trained(self, vector: Tensor, row: Tensor, draws: RowDraws) -> Tensor:
        """Return the outputs (1, ...) of one row (1, ...) as in training, with its own random numbers."""
        with ModuleMode(draws):
            return self.outputs(vector, row)

    def gradient(
        self, vector: Tensor, row: Tensor, draws: RowDraws, loss_of: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """Return the gradient (d,) of one row's loss by plain autograd; None if it depends on no parameter."""
        leaf = vector.clone().requires_grad_()
        with torch.enable_grad(), Lender(self.module).lend_copies(leaf):
            with ModuleMode(draws):
                outputs = check_one_tensor(self.module, self.module(row.clone()), 1)
            return leaf_gradients(loss_of(outputs), [leaf])[0]


def compare_gradients(
    subject: CheckedModel, network: Network, loss: Loss, models: Tensor, rows: Tensor, labels: Tensor
) -> bool:
    """Refuse a network whose per-record gradients or clipped sums are not those of autograd; return if it is random."""
    draws = RowDraws.fixed(len(_OWNER), rows.device)
    reference = _Reference(subject, models, rows, labels, draws)
    expected = reference.gradients
    for client, of in enumerate((slice(0, 2), slice(2, 5))):
        found = record_gradients(network, loss, models[client], rows[of], labels[of], draws.of_rows(list(range(5)[of])))
        for row, one in enumerate(found, of.start):
            _same(subject, one, expected[row], lambda row=row: reference.rounding()[row], "every record's gradient")  # type: ignore[misc]
        del found, one  # gradients of large models take much memory
    norms = torch.linalg.vector_norm(expected, dim=1, dtype=torch.float64)
    usable = norms[norms.isfinite() & (norms > 0)]
    limit = float(usable.median()) / 2 if len(usable) else 1.0
    factors = torch.where(norms.isfinite(), (limit / norms.clamp(min=1e-300)).clamp(max=1.0), 0.0)
    clip = torch.full((2,), limit, device=rows.device)
    for groups, picked in ((((0, 1, 2), (1, 2, 3)), [0, 1, 2, 3, 4]), (((0, 2, 2),), [0, 1, 2, 3])):
        sums = torch.zeros_like(models)
        layout = replace(check_layout(groups, rows.device), draws=draws.of_rows(picked))
        with torch.no_grad():
            add_gradients(network, loss, models, rows[picked], labels[picked], layout, None, clip, sums)
        for client in range(2):
            mine = [row for row in picked if _OWNER[row] == client]
            total = torch.zeros_like(sums[client], dtype=torch.float64)
            for row in mine:
                total.add_(expected[row].nan_to_num(0.0, 0.0, 0.0), alpha=float(factors[row]))

            def rounding(mine: list[int] = mine) -> Tensor:
                return (2 * reference.rounding() * factors).clamp(max=2 * limit)[mine].sum()

            _same(subject, sums[client], total.float(), rounding, "the clipped sum")
    return reference.random


class _Reference:
    """The gradients of five rows by autograd, one at a time."""

    def __init__(self, subject: CheckedModel, models: Tensor, rows: Tensor, labels: Tensor, draws: RowDraws) -> None:
        self.subject, self.models, self.rows, self.labels, self.draws = subject, models, rows, labels, draws
        self.random = False
        self.gradients = self._all(models, rows)  # (5, d)
        self._rounding: Tensor | None = None

    def rounding(self) -> Tensor:
        """Return how far weights and rows that differ in their last digit move each gradient, (5,) float64.

        Where large terms cancel, as behind a normalisation of two numbers, a gradient consists of rounding.
        """
        if self._rounding is None:
            generator = torch.Generator().manual_seed(3)

            def nudged(values: Tensor) -> Tensor:
                digits = torch.randint(-1, 2, values.shape, generator=generator).to(values)
                return values * (1 + digits * 2.0**-23) if values.is_floating_point() else values

            lengths = []
            for _ in range(4):
                moved = (
                    self._all(nudged(self.models), nudged(self.rows)).sub_(self.gradients).nan_to_num_(0.0, 0.0, 0.0)
                )
                lengths.append(torch.stack([torch.linalg.vector_norm(one.double()) for one in moved]))
            self._rounding = torch.stack(lengths).amax(0)
        return self._rounding

    def _all(self, models: Tensor, rows: Tensor) -> Tensor:
        found = torch.empty(len(_OWNER), models.shape[1], device=models.device)
        for place, client in enumerate(_OWNER):
            found[place] = self._one(models[client], rows[place], place)
        return found

    def _one(self, vector: Tensor, row: Tensor, place: int) -> Tensor:
        draws, label = self.draws.of_row(place), self.labels[place : place + 1]
        found = self.subject.gradient(vector, row[None], draws, lambda outputs: self.subject.loss(outputs, label).sum())
        self.random |= draws.calls > 0
        return torch.zeros_like(vector) if found is None else found


def _same(subject: CheckedModel, found: Tensor, expected: Tensor, rounding: Callable[[], Tensor], what: str) -> None:
    """Refuse a gradient (d,) that differs by more than rounding; name the parameters."""
    sizes = [torch.Size(shape).numel() for shape in subject.shapes.values()]
    length = torch.linalg.vector_norm(expected.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64)
    wrong: list[str] = []
    for name, one, wanted in zip(subject.shapes, found.split(sizes), expected.split(sizes), strict=True):  # type: ignore[no-untyped-call]
        apart = (one.double() - wanted.double()).abs()
        off = (apart > _ALLOWED * length) & wanted.isfinite()
        if off.any() and bool((off & (apart > _ALLOWED * length + _TIMES * rounding())).any()):
            wrong.append(name)
    if wrong:
        raise InputError(
            f"for {name_of(subject.module)}, {what} is not what autograd gives one example at a time, in"
            f" {', '.join(repr(name) for name in wrong[:3])}; its rows cannot be clipped correctly, so it is refused"
        )


def check_layout(groups: tuple[tuple[int, int, int], ...], device: torch.device) -> Layout:
    """Return a layout of groups (first, last, width)."""
    made: list[RowGroup] = []
    owner: list[int] = []
    for first, last, width in groups:
        made.append(RowGroup(first, last, width, len(owner)))
        owner += [client for client in range(first, last) for _ in range(width)]
    return Layout(2, tuple(made), torch.tensor(owner, device=device))


def name_of(thing: nn.Module | Callable[..., object]) -> str:
    return getattr(thing, "__name__", type(thing).__name__)
