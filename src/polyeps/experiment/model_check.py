"""What the engine makes of a user's module: is it right, which parts are slow, what does a record cost.

Every figure is measured on random records and weights; no data are read.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyeps.engine.example_rows import candidate_rows
from polyeps.engine.fallback_layers import Lender, LoopedLayer, VmapLayer, leaf_gradients
from polyeps.engine.gradient_checks import CheckedModel, compare_gradients, name_of
from polyeps.engine.layers import Parameterless
from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.network import add_gradients, record_gradients
from polyeps.engine.row_draws import RowDraws
from polyeps.errors import InputError
from polyeps.experiment.model_choice import GivenToModel, own_model
from polyeps.experiment.registry import ModelFactory
from polyeps.models import Model

CLIENTS, RECORDS = 4, 8  # of the step that is timed
CHECKED = 5  # records that `compare_gradients` takes at a time
_SHOWN = 0.1  # share of a record's memory from which a copy of a parameter for each record is worth a word
_SECONDS = 0.5  # for repetitions of a timed step
BATCHED, INSIDE, COPIED, LOOPED = (
    "batched rule",
    "batched rules inside the module",
    "a copy of its parameters for each record",
    "one record after the other",
)


@dataclass(frozen=True)
class PartCheck:
    """How a part of a module runs over the records of all clients."""

    path: str  # of the submodule or parameter; "" is the whole module
    kind: str  # its class
    parameters: int  # trained ones
    way: str
    because: str = ""  # why it is slow

    @property
    def slow(self) -> bool:
        return self.way in (COPIED, LOOPED)


@dataclass(frozen=True)
class ModelCheck:
    """The verdict on a user's module that can be trained."""

    kind: str  # class of the module
    input_shape: tuple[int, ...]
    classes: int
    trained: int  # parameters
    frozen: int
    rows: int  # records whose gradients were compared with autograd, one example at a time
    deviation: float  # the largest difference, as a share of the gradient's length
    sum_deviation: float  # the same for the clipped sums
    parts: tuple[PartCheck, ...]
    random: tuple[str, ...]  # submodules that draw random numbers in training
    bytes_per_record: int  # of a batch, during a step
    bytes_per_client: int
    seconds: dict[str, float]  # for a step of CLIENTS clients with RECORDS records each

    @property
    def verdict(self) -> str:
        """What a user should know first; refused modules have no `ModelCheck`."""
        return "right, slow in parts" if any(part.slow for part in self.parts) else "right"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"verdict": self.verdict, **asdict(self)}


def check_own_model(
    name: str,
    make: ModelFactory,
    shape: tuple[int, ...],
    classes: int,
    kind: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] = lambda *_: None,
    given: GivenToModel | None = None,
) -> ModelCheck:
    """Return the verdict on the module that a function makes; raise `InputError` where it is refused.

    `given` says what else than one tensor it takes, and other targets than classes. Of several inputs, `shape` and
    `kind` are those of the block that holds all.
    """
    with warnings.catch_warnings(record=True) as caught:  # torch's own say what the verdict says
        warnings.simplefilter("always")
        model = own_model(name, make, shape, classes, kind, 1, given)
        slow = [str(one.message) for one in caught if "one row after the other" in str(one.message)]
        return _checked(name, model, classes, slow, progress)


def _checked(
    name: str, model: Model, classes: int, slow: list[str], progress: Callable[[int, int], None]
) -> ModelCheck:
    progress(1, 4)
    generator = torch.Generator().manual_seed(4)
    start = model.start(torch.Generator().manual_seed(1))
    models = start + 0.05 * torch.randn(CLIENTS, model.size, generator=generator)
    tried, labels = _accepted(model, start)
    for first in range(0, len(tried), CHECKED):  # other weights than when the model was made
        block = slice(first, first + CHECKED)
        compare_gradients(model.subject(), model.network, model.loss, models[2:], tried[block], labels[block])
    rows, deviation, sum_deviation = _compare(model, models[:2], tried, labels, generator)
    if not rows:
        raise InputError(f"{name}: no gradient of random records is a finite number; normalise its inputs or outputs")
    progress(2, 4)
    parts = _parts(model, models, tried, slow)
    drawing = _drawing(model, start, tried[:1]) if model.network.random else ()
    progress(3, 4)
    seconds = _timed(model, models, tried, labels)
    progress(4, 4)
    frozen = sum(p.numel() for p in model.module.parameters() if not p.requires_grad)
    return ModelCheck(
        kind=name_of(model.module),
        input_shape=tuple(model.input_shape),
        classes=classes,
        trained=model.size,
        frozen=frozen,
        rows=rows,
        deviation=deviation,
        sum_deviation=sum_deviation,
        parts=parts,
        random=drawing,
        bytes_per_record=4 * model.floats_per_row,
        bytes_per_client=4 * 6 * model.size,
        seconds=seconds,
    )


def _accepted(model: Model, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return random records that the module takes, and labels that its loss takes."""
    taken = []
    for rows in candidate_rows(model.module, model.input_shape, model.input_type, None):
        try:
            outputs = model.outputs(vector, rows)
        except Exception:  # of the user's module: another candidate was accepted before
            continue
        taken.append(rows)
    found, generator = torch.cat(taken), torch.Generator().manual_seed(5)
    outputs = model.outputs(vector, found)
    stated, example = getattr(model, "targets", None), getattr(model.loss, "example_labels", None)
    if stated is not None:
        return found, stated[torch.arange(len(found)) % len(stated)]
    if example is not None:
        return found, example(outputs, generator)
    classes = torch.randint(0, max(2, outputs.shape[-1]), (len(found),), generator=generator)
    try:
        model.loss(outputs, classes)
    except Exception:  # a loss of numbers, as the check before found
        return found, torch.randn(len(found), generator=generator)
    return found, classes


def _one_by_one(
    subject: CheckedModel, vector: Tensor, rows: Tensor, labels: Tensor, draws: RowDraws, places: range
) -> Tensor:
    """Return the gradients of some records by autograd, one example at a time, (T, d)."""
    found = []
    for place in places:
        label = labels[place : place + 1]
        gradient = subject.gradient(
            vector,
            rows[place : place + 1],
            draws.of_row(place),
            lambda outputs, label=label: subject.loss(outputs, label).sum(),  # type: ignore[misc]
        )
        found.append(torch.zeros_like(vector) if gradient is None else gradient)
    return torch.stack(found)


def _compare(
    model: Model, models: Tensor, rows: Tensor, labels: Tensor, generator: torch.Generator
) -> tuple[int, float, float]:
    """Return how many gradients were compared, and the largest deviations of one and of a clipped sum."""
    subject, order = model.subject(), torch.randperm(len(rows), generator=generator)
    rows, labels = rows[order], labels[order]
    draws = RowDraws.fixed(len(rows), rows.device)
    clients = len(models)
    single, sums = 0.0, torch.zeros_like(models, dtype=torch.float64)
    compared, limits = 0, []
    for client, vector in enumerate(models):
        expected = _one_by_one(subject, vector, rows, labels, draws, range(len(rows))).double()
        found = record_gradients(model.network, model.loss, vector, rows, labels, draws.again()).double()
        finite = expected.isfinite().all(1)
        compared += int(finite.sum())
        norms = torch.linalg.vector_norm(expected, dim=1)
        apart = torch.linalg.vector_norm(found - expected, dim=1) / norms.clamp(min=1e-12)
        single = max(single, float(apart[finite].amax()) if finite.any() else 0.0)
        limits.append(float(norms[finite].median()) / 2 or 1.0 if finite.any() else 1.0)
        factors = (limits[-1] / norms.clamp(min=1e-300)).clamp(max=1.0)
        sums[client] = (expected.nan_to_num(0.0, 0.0, 0.0) * torch.where(finite, factors, 0.0)[:, None]).sum(0)
    into, clip = torch.zeros_like(models), torch.tensor(limits)
    repeated = draws.of_rows(torch.arange(len(rows)).repeat(clients))
    layout = _layout(clients, len(rows), repeated)
    with torch.no_grad():
        all_rows, all_labels = torch.cat([rows] * clients), torch.cat([labels] * clients)
        add_gradients(model.network, model.loss, models, all_rows, all_labels, layout, None, clip, into)
    lengths = torch.linalg.vector_norm(sums, dim=1).clamp(min=1e-12)
    return compared, single, float((torch.linalg.vector_norm(into.double() - sums, dim=1) / lengths).amax())


def _layout(clients: int, records: int, draws: RowDraws | None = None) -> Layout:
    owner = torch.arange(clients).repeat_interleave(records)
    return Layout(clients, (RowGroup(0, clients, records, 0),), owner, draws)


def _parts(model: Model, models: Tensor, rows: Tensor, slow: list[str]) -> tuple[PartCheck, ...]:
    """Return how each part with trained parameters runs, in the order of the parameters."""
    network, modules = model.network, dict(model.module.named_modules())
    names, place, found = list(model.slices), 0, list[PartCheck]()
    layout = _layout(2, 1)
    values, columns = rows[:2], network.columns(models[:2])
    for layer, weights in zip(network.layers, columns, strict=True):
        values, saved = layer.forward(weights, values, layout)
        if not layer.size:
            continue
        mine, size = list[str](), 0
        while size < layer.size:
            mine.append(names[place])
            size += weights_of(model, names[place])
            place += 1
        path = _common(mine)
        part = modules[path]
        kind, way, because = type(part).__name__, BATCHED, ""
        if isinstance(layer, LoopedLayer):
            way, because = LOOPED, "; ".join(slow)
        elif isinstance(layer, VmapLayer):
            way = INSIDE
            copied = [mine[number] for number in sorted(saved.run.copies)]
            large = [name for name in copied if weights_of(model, name) >= _SHOWN * model.floats_per_row]
            if large:
                found += [_copied(model, modules, name) for name in large]
                size -= sum(weights_of(model, name) for name in large)
        elif isinstance(layer, Parameterless):
            continue
        if size:
            found.append(PartCheck(path, kind, size, way, because))
    return tuple(found)


def weights_of(model: Model, name: str) -> int:
    """Return the size of a trained parameter."""
    part = model.slices[name]
    return part.stop - part.start


def _copied(model: Model, modules: dict[str, nn.Module], name: str) -> PartCheck:
    owner = type(modules[name.rpartition(".")[0]]).__name__
    because = f"there is no batched rule for what {owner} does with {name!r}"
    return PartCheck(name, f"Parameter of {owner}", weights_of(model, name), COPIED, because)


def _common(names: list[str]) -> str:
    """Return the path of the innermost module that has all these parameters."""
    paths = [name.split(".")[:-1] for name in names]
    shortest = min(paths, key=len)
    length = next((i for i in range(len(shortest)) if len({path[i] for path in paths}) > 1), len(shortest))
    return ".".join(shortest[:length])


def _drawing(model: Model, vector: Tensor, row: Tensor) -> tuple[str, ...]:
    """Return the innermost submodules that draw random numbers for a record in training."""
    draws, found, began, handles = RowDraws.fixed(1, row.device), list[str](), list[tuple[int, int]](), list[Any]()

    def before(*_: Any) -> None:
        began.append((draws.calls, len(found)))

    def after(path: str) -> Callable[..., None]:
        def note(part: nn.Module, *_: Any) -> None:
            calls, known = began.pop()
            if draws.calls > calls and len(found) == known:
                found.append(f"{type(part).__name__} at '{path}'" if path else type(part).__name__)

        return note

    try:
        for path, part in model.module.named_modules():
            handles += [part.register_forward_pre_hook(before), part.register_forward_hook(after(path))]
        model.subject().trained(vector, row, draws)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(dict.fromkeys(found))


def _timed(model: Model, models: Tensor, rows: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the seconds of one step: ours, plain autograd without clipping, and one example at a time."""
    count = CLIENTS * RECORDS
    picked = torch.arange(count) % len(rows)
    rows, labels = rows[picked], labels[picked]
    draws, subject = RowDraws.fixed(count, rows.device), model.subject()
    layout, clip = _layout(CLIENTS, RECORDS, draws), torch.ones(CLIENTS)

    def ours() -> None:
        with torch.no_grad():
            into = torch.zeros_like(models)
            add_gradients(model.network, model.loss, models, rows, labels, layout, None, clip, into)

    def plain() -> None:
        for client, vector in enumerate(models):
            mine = slice(client * RECORDS, (client + 1) * RECORDS)
            leaves = [part.clone().requires_grad_() for part in model.unflatten(vector).values()]
            with Lender(model.module).lend(leaves):
                loss = model.loss(model.module(rows[mine].clone()), labels[mine]).sum()
                leaf_gradients(loss, leaves)

    few = 4  # examples are alike, so a few are enough

    def single() -> None:
        _one_by_one(subject, models[0], rows, labels, draws, range(few))

    with torch.random.fork_rng(devices=[]):  # plain torch draws from its global generator
        without = _seconds(plain)
    return {"polyeps": _seconds(ours), "autograd": without, "one_by_one": _seconds(single) * count / few}


def _seconds(act: Callable[[], None]) -> float:
    """Return the shortest of some runs."""
    best, began, ran = float("inf"), time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS or ran == 0:
        first = time.perf_counter()
        act()
        best, ran = min(best, time.perf_counter() - first), ran + 1
    return best
