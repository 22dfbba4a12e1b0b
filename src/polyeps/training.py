"""Local optimisation as values: `sgd`, `dp_sgd` and `proximal`, a model per row in, an update per row out.

Numbers that may differ between clients (`PerClient`) are given as one number for all or as one per row. A
cohort is trained in chunks that fit into memory; the answer does not depend on the chunks beyond float
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from polyeps.core import Records
from polyeps.engine.captured import Graphs, train_on_device
from polyeps.engine.loop import Floats, Settings, train_on_cpu
from polyeps.engine.noise import Streams
from polyeps.errors import InputError
from polyeps.models import Model

PerClient = float | Sequence[float] | Floats
# On the CPU a chunk larger than this gains nothing more: 1 GiB holds a thousand small models' step.
CPU_MEMORY = 1 << 30


class Run(Protocol):
    """Train a cohort; the update of a client is its model after training less its model before."""

    def __call__(
        self,
        starts: Tensor,  # (n, d), or (d,) for all alike
        records: Records,
        streams: Streams,
        scale: PerClient | None = None,  # noise multipliers; None where no noise is added
        anchor: Tensor | None = None,  # (n, d) or (d,): where `proximal` pulls to; None for the starts
    ) -> Tensor: ...  # (n, d)


@dataclass(frozen=True)
class Training:
    """A way to train, and what one run of it costs a client's records in privacy."""

    run: Run
    # price(scale) -> DpEvent of one run, for one record, add-remove; None: no guarantee is given.
    price: Callable[..., Any] | None


def dp_sgd(
    model: Model,
    *,
    rate: PerClient,
    steps: PerClient,
    clip: PerClient,
    learning_rate: PerClient,
    batch: PerClient | None = None,
    momentum: PerClient = 0.0,
    decay: PerClient = 0.0,
    memory: int | None = None,
) -> Training:
    """DP-SGD with true Poisson batches, whose sums are divided by the public batch size, never the realised one.

    Guarantee: record, add-remove. Each step releases the sum of gradients clipped to `clip`, with Gaussian
    noise of standard deviation scale · clip in every coordinate. Momentum and decay only process what was
    released. Without `batch` the divisor is rate · records: then a client's number of records counts as public,
    which it strictly is not where neighbours differ by one record.
    """

    def settings_for(records: Records, scale: PerClient | None) -> Settings:
        if scale is None:
            raise InputError("dp_sgd needs a noise scale for every client; give 0 to train without noise")
        clients = records.clients
        bound, scales = _each("clip", clip, clients), _each("scale", scale, clients)
        if np.any(np.isinf(bound) & (scales > 0)):
            raise InputError("noise needs a finite clip: without one the scale has nothing to multiply")
        counts = np.diff(records.offsets.cpu().numpy())
        rates = _each("rate", rate, clients)
        return Settings(
            rate=rates,
            steps=_whole("steps", steps, clients),
            learning_rate=_each("learning_rate", learning_rate, clients),
            divisor=rates * counts if batch is None else _above_zero("batch", batch, clients),
            clip=None if np.isinf(bound).all() else bound,
            deviation=scales * np.where(np.isinf(bound), 0, bound) if scales.any() else None,
            momentum=_unless_zero("momentum", momentum, clients),
            decay=_unless_zero("decay", decay, clients),
            pull=None,
        )

    def price(scale: float, row: int | None = None) -> Any:
        import dp_accounting

        sampled = dp_accounting.PoissonSampledDpEvent(_of_row("rate", rate, row), dp_accounting.GaussianDpEvent(scale))
        return dp_accounting.SelfComposedDpEvent(sampled, int(_of_row("steps", steps, row)))

    return Training(_runner(model, memory, settings_for), price)


def sgd(
    model: Model,
    *,
    rate: PerClient,
    steps: PerClient,
    learning_rate: PerClient,
    momentum: PerClient = 0.0,
    decay: PerClient = 0.0,
    memory: int | None = None,
) -> Training:
    """Plain SGD on the mean loss of Poisson batches, stepping as torch.optim.SGD; rate 1 is full batch."""
    return proximal(
        model,
        rate=rate,
        steps=steps,
        learning_rate=learning_rate,
        pull=0.0,
        momentum=momentum,
        decay=decay,
        memory=memory,
    )


def proximal(
    model: Model,
    *,
    rate: PerClient,
    steps: PerClient,
    learning_rate: PerClient,
    pull: PerClient,
    momentum: PerClient = 0.0,
    decay: PerClient = 0.0,
    memory: int | None = None,
) -> Training:
    """SGD on the loss plus pull/2 · ‖model - anchor‖²: Ditto's personal step.

    Ditto starts at the client's personal model, with the received one as anchor. FedProx starts at the
    received model, which is then the anchor too (the default).
    """

    def settings_for(records: Records, scale: PerClient | None) -> Settings:
        if scale is not None:
            raise InputError("this training adds no noise, so it takes no scale; use dp_sgd for a guarantee")
        clients = records.clients
        return Settings(
            rate=_each("rate", rate, clients),
            steps=_whole("steps", steps, clients),
            learning_rate=_each("learning_rate", learning_rate, clients),
            divisor=None,
            clip=None,
            deviation=None,
            momentum=_unless_zero("momentum", momentum, clients),
            decay=_unless_zero("decay", decay, clients),
            pull=_unless_zero("pull", pull, clients),
        )

    return Training(_runner(model, memory, settings_for), price=None)


def _runner(model: Model, memory: int | None, settings_for: Callable[[Records, PerClient | None], Settings]) -> Run:
    """Train in the way `settings_for` describes; device graphs live as long as the training."""
    graphs = Graphs()

    def run(
        starts: Tensor,
        records: Records,
        streams: Streams,
        scale: PerClient | None = None,
        anchor: Tensor | None = None,
    ) -> Tensor:
        settings = settings_for(records, scale)
        return _train(model, starts, anchor, records, streams, settings, memory, graphs)

    return run


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def _train(
    model: Model,
    starts: Tensor,
    anchor: Tensor | None,
    records: Records,
    streams: Streams,
    settings: Settings,
    memory: int | None,
    graphs: Graphs,
) -> Tensor:
    clients, device = records.clients, records.features.device
    _check(model, starts, records, streams)
    features = records.features.reshape(-1, *model.input_shape)  # a linear model takes an image as one row
    starts = starts.to(device).expand(clients, model.size)
    pulled_to = starts if anchor is None else anchor.to(device).expand(clients, model.size)
    updates = torch.empty(clients, model.size, device=device)
    for rows in _chunks(model, records, settings, memory):
        mine = Records(features, records.labels, records.offsets[rows.start : rows.stop + 1])
        some = streams.select(range(rows.start, rows.stop))
        before, fixed = starts[rows].contiguous(), pulled_to[rows]
        if device.type == "cpu":
            after = train_on_cpu(model, before, fixed, mine, some, settings.select(rows))
        else:
            after = train_on_device(model, before, fixed, mine, some, settings.select(rows), graphs)
        torch.sub(after, before, out=updates[rows])
    return updates


def _chunks(model: Model, records: Records, settings: Settings, memory: int | None) -> list[slice]:
    """Slices of clients whose step fits into memory (bytes), all about equally large."""
    counts = np.diff(records.offsets.cpu().numpy())
    rows = float(np.max(settings.rate * counts, initial=0.0))
    # models, gradient, their framed copies and room for noise
    per_client = 4 * (6 * model.size + math.ceil(rows * model.floats_per_row * 1.2))
    if memory is None:
        on_device = records.features.is_cuda
        # Of all the device's memory, not of what is free: chunks must stay the same from round to round.
        memory = torch.cuda.mem_get_info()[1] // 3 if on_device else CPU_MEMORY
    most = max(1, memory // per_client)
    pieces = max(1, math.ceil(records.clients / most))
    edges = np.linspace(0, records.clients, pieces + 1).round().astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(edges) if b > a]


def _check(model: Model, starts: Tensor, records: Records, streams: Streams) -> None:
    if starts.shape not in ((model.size,), (records.clients, model.size)):
        raise InputError(
            f"starts must be ({model.size},) or ({records.clients}, {model.size}), not {tuple(starts.shape)}"
        )
    if math.prod(records.features.shape[1:]) != math.prod(model.input_shape):
        raise InputError(
            f"the model takes records of shape {model.input_shape}, but these are {tuple(records.features.shape[1:])}"
        )
    if streams.clients != records.clients:
        raise InputError(f"{records.clients} clients have records, but {streams.clients} have a random stream")
    empty = torch.nonzero(records.offsets.diff() <= 0)
    if len(empty):
        raise InputError(f"client in row {int(empty[0])} has no records; leave it out of the cohort")


def _each(name: str, values: PerClient, clients: int) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.shape not in ((), (clients,)):
        raise InputError(f"{name} must be one number or {clients} of them, not of shape {array.shape}")
    if np.isnan(array).any() or (array < 0).any():
        raise InputError(f"{name} must be at least 0 for every client, not {np.min(array)}")
    return np.broadcast_to(array, (clients,)).copy()


def _whole(name: str, values: ArrayLike, clients: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = _each(name, np.asarray(values, dtype=np.float64), clients)
    if (array != np.floor(array)).any():
        raise InputError(f"{name} must be whole numbers, not {array}")
    return array.astype(np.int64)


def _above_zero(name: str, values: PerClient, clients: int) -> Floats:
    array = _each(name, values, clients)
    if (array == 0).any():
        raise InputError(f"{name} must be above 0 for every client")
    return array


def _unless_zero(name: str, values: PerClient, clients: int) -> Floats | None:
    array = _each(name, values, clients)
    return array if array.any() else None


def _of_row(name: str, values: PerClient, row: int | None) -> float:
    array = np.unique(np.asarray(values, dtype=np.float64)) if row is None else np.asarray(values).ravel()
    if row is None and len(array) > 1:
        raise InputError(f"{name} differs between clients; say whose price is asked with row=")
    return float(array[0] if row is None or len(array) == 1 else array[row])
