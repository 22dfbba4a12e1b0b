"""Local optimisation: `sgd` and `dp_sgd` take a model per client and return an update per client.

Every number is one for all clients, unless a client has its own under the same name in its settings (`PerClient`).
Batches are Poisson, or of a fixed size as `published` forms take them. A cohort is trained in chunks that fit into
memory; the result does not depend on the chunks beyond float rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from polyeps.core import Adjacency, Arithmetic, PerClient, Records, Streams, Unit
from polyeps.engine.cuda_graphs import CudaGraphs, train_on_device
from polyeps.engine.deployed_training import train_deployed
from polyeps.engine.full_batches import train_on_all
from polyeps.engine.loop import Settings, drift_per_step, train_on_cpu
from polyeps.engine.memory import chunks, rows_at_once, threads_of
from polyeps.engine.per_client import Batching, CohortSettings, Sampler, settings_of
from polyeps.engine.threads import side_by_side
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import check_clip
from polyeps.models import Model

_NONE: Mapping[str, Any] = {}


class Trainer(Protocol):
    """Train a cohort; the update of a client is its model after training minus its model before."""

    def __call__(
        self,
        starts: Tensor,  # (n, d), or (d,) for all alike
        records: Records,
        streams: Streams,
        noise_multiplier: ArrayLike | None = None,  # (n,) or one for all; None where no noise is added
        anchor: Tensor | None = None,  # (n, d) or (d,): where `sgd` pulls to; None: the starts
        *,
        settings: PerClient = _NONE,  # the clients' own numbers
        rate_factor: float = 1.0,  # multiplies all learning rates, for rates that fall from round to round
        drift: Tensor | None = None,  # (n, d): added to each model in equal parts, one after each of its steps
    ) -> Tensor: ...  # (n, d)


@dataclass(frozen=True)
class Training:
    """A way to train, and what one run of it costs a client's records in privacy."""

    model: Model
    run: Trainer
    # (noise multiplier, a client's settings) -> DpEvent of one run, for one record or person; None: no guarantee
    price: Callable[..., Any] | None
    adjacency: Adjacency = "zero-out"  # of the price
    arithmetic: Arithmetic = "ideal"
    # (noise multiplier, runs, δ, a client's settings) -> the ε that a paper states for them
    claimed: Callable[[float, int, float, Mapping[str, float]], float] | None = None
    reach: float = math.inf  # how far a round can move the model, noise aside

    @property
    def unit(self) -> Unit:
        """What the price protects: a record, or all records of a person."""
        return "person" if self.model.person else "record"


def dp_sgd(
    model: Model,
    *,
    rate: float | None = None,
    steps: float,
    clip: float,
    learning_rate: float,
    batch: float | None = None,
    momentum: float = 0.0,
    decay: float = 0.0,
    memory: int | None = None,
    sampler: Sampler = "poisson",
    hide_records: bool = False,
) -> Training:
    """DP-SGD with Poisson batches; gradient sums are divided by the public batch size, never by the realised one.

    Guarantee: record, zero-out. Each step releases the sum of gradients clipped to `clip`, with Gaussian noise of
    standard deviation noise_multiplier · clip in every coordinate. Momentum and decay only process what was released.
    The number of records is public, so `rate` and `batch` may depend on it. Without `rate` it is batch/records; without
    `batch` the divisor is rate · records.

    With `hide_records` the guarantee is add-remove: the caller states that `rate` and `batch`, which must both be
    given, were chosen without looking at how many records there are.

    With sampler "fixed" there is no `rate`: a batch is exactly `batch` records, and so is the divisor. Guarantee:
    record, replace-one.

    With a model of persons (`models.of_units`) all of the above is said of persons instead of records: a person's
    gradient is that of the mean loss over its own records, and is clipped as a whole.
    """
    batching = Batching(sampler, rate, batch)
    if hide_records and (rate is None or batch is None):
        raise InputError(
            "hide_records needs Poisson batches of a given rate, and a batch to divide by, for all clients"
        )
    common = {"steps": steps, "learning_rate": learning_rate, "momentum": momentum, "decay": decay}
    _check_clips(np.array([clip]))

    def read(cohort: CohortSettings, noise_multiplier: ArrayLike | None) -> Settings:
        if noise_multiplier is None:
            raise InputError("dp_sgd needs a noise multiplier for every client; give 0 to train without noise")
        bounds = cohort.each("clip", clip)
        _check_clips(bounds)
        multipliers = CohortSettings(cohort.clients, {}).each("noise_multiplier", noise_multiplier)
        if np.any(np.isinf(bounds) & (multipliers > 0)):
            raise InputError("noise needs a finite clip: without one the noise multiplier has nothing to multiply")
        if cohort.has("batch", batch):
            divisor = cohort.above_zero("batch", batch)
        else:
            divisor = batching.rates(cohort) * cohort.each("records", None)
        deviation = multipliers * np.where(np.isinf(bounds), 0, bounds) if multipliers.any() else None
        bounded = None if np.isinf(bounds).all() else bounds
        return _settings(cohort, batching, common, divisor=divisor, clip=bounded, deviation=deviation)

    def price(noise_multiplier: float, settings: Mapping[str, float] = _NONE) -> Any:
        from dp_accounting.dp_event import GaussianDpEvent, SelfComposedDpEvent

        client = CohortSettings.of_one(settings)
        sampled = batching.event(GaussianDpEvent(noise_multiplier), client)
        return SelfComposedDpEvent(sampled, int(client.whole("steps", steps)[0]))

    def claimed(noise_multiplier: float, runs: int, delta: float, settings: Mapping[str, float]) -> float:
        # The closed form in PFA's reference code (Liu et al., VLDB 2022): σ = 10·(B/N)·√(T·log10(1/δ))/ε
        if not delta:
            return math.inf
        client = CohortSettings.of_one(settings)
        total = runs * int(client.whole("steps", steps)[0])
        return batching.expected_share(client, 10) * math.sqrt(total * math.log10(1 / delta)) / noise_multiplier

    adjacency: Adjacency = "replace-one" if batching.fixed else "add-remove" if hide_records else "zero-out"
    arithmetic: Arithmetic = "ideal" if batching.fixed else "exact-when-deployed"
    # A client that hides how many records it has must not stand out by having none.
    reach = learning_rate * steps * clip / (1 - momentum)
    return Training(
        model, _runner(model, memory, read, empty=hide_records), price, adjacency, arithmetic, claimed, reach
    )


def sgd(
    model: Model,
    *,
    rate: float | None = None,
    steps: float,
    learning_rate: float,
    batch: float | None = None,
    momentum: float = 0.0,
    decay: float = 0.0,
    pull: float = 0.0,
    memory: int | None = None,
    sampler: Sampler = "poisson",
) -> Training:
    """Plain SGD on the mean loss of batches, stepping as torch.optim.SGD; rate 1 is full batch.

    Batches are Poisson at `rate`, by default batch/records, or, with sampler "fixed", exactly `batch` records.

    With `pull` the loss is plus pull/2 · ‖model - anchor‖². Ditto starts at the client's personal model, with the
    received one as anchor. FedProx starts at the received model, which is then the anchor too (the default).
    """
    batching = Batching(sampler, rate, batch)
    if rate is not None and batch is not None:
        raise InputError('batch is the exact size of batches with sampler="fixed"; give Poisson batches one of the two')
    common = {"steps": steps, "learning_rate": learning_rate, "momentum": momentum, "decay": decay, "pull": pull}

    def read(cohort: CohortSettings, noise_multiplier: ArrayLike | None) -> Settings:
        if noise_multiplier is not None:
            raise InputError("this training adds no noise, so it takes no noise multiplier; use dp_sgd for a guarantee")
        divisor = cohort.above_zero("batch", batch) if batching.fixed else None
        return _settings(cohort, batching, common, divisor=divisor, clip=None, deviation=None)

    return Training(model, _runner(model, memory, read), price=None)


def whole_gradient(
    model: Model, *, clip: float | None = None, decay: float = 0.0, memory: int | None = None
) -> Training:
    """One step on all records of a client, with learning rate 1: the update is minus the gradient of the mean loss.

    Guarantee: record, zero-out. With `clip` this is `dp_sgd` at rate 1, a Gaussian release without subsampling: each
    record's gradient is clipped, and the noisy sum is divided by the number of records, which is public. Without `clip`
    it is `sgd`, and there is no guarantee.
    """
    step: dict[str, Any] = {"rate": 1.0, "steps": 1, "learning_rate": 1.0, "decay": decay, "memory": memory}
    if clip is None:
        return sgd(model, **step)
    return replace(dp_sgd(model, clip=clip, **step), claimed=None)  # no paper states an ε for it


def _settings(cohort: CohortSettings, batching: Batching, common: Mapping[str, float], **others: Any) -> Settings:
    """Return the settings of a cohort; the common numbers hold for clients without a setting of their own."""
    return Settings(
        at_once=None,
        rate=batching.rates(cohort),
        steps=cohort.whole("steps", common["steps"]),
        learning_rate=cohort.each("learning_rate", common["learning_rate"]),
        batch=batching.sizes(cohort),
        **{name: cohort.unless_zero(name, common.get(name, 0.0)) for name in ("momentum", "decay", "pull")},
        **others,
    )


def _check_clips(bounds: np.ndarray[Any, Any]) -> None:
    for bound in np.unique(bounds[~np.isinf(bounds)]):
        check_clip("clip", float(bound))


def _runner(
    model: Model,
    memory: int | None,
    read: Callable[[CohortSettings, ArrayLike | None], Settings],
    *,
    empty: bool = False,
) -> Trainer:
    """Return the function that trains with the settings which `read` returns; device graphs live as long as it."""
    graphs = CudaGraphs()

    def run(
        starts: Tensor,
        records: Records,
        streams: Streams,
        noise_multiplier: ArrayLike | None = None,
        anchor: Tensor | None = None,
        *,
        settings: PerClient = _NONE,
        rate_factor: float = 1.0,
        drift: Tensor | None = None,
    ) -> Tensor:
        cohort = settings_of(records, settings, empty=empty)
        numbers = read(cohort, noise_multiplier)
        factor = CohortSettings(cohort.clients, {}).above_zero("rate_factor", rate_factor)
        numbers = replace(numbers, learning_rate=numbers.learning_rate * factor)
        _check_examples(model, records)
        _check_targets(model, records)
        try:
            _check(model, starts, records, streams)
            # Where the number of records is hidden, full batches are drawn like others: their shape depends on it.
            settled = not empty and drift is None and records.units is None and numbers.batch is None
            full = (numbers.rate == 1) & settled
            if full.all() or not full.any():
                whole = bool(full.all())
                return _train(model, starts, anchor, records, streams, numbers, memory, graphs, drift, full=whole)
            updates = torch.empty(records.clients, model.size, device=records.features.device)
            for some, yes in ((np.flatnonzero(full), True), (np.flatnonzero(~full), False)):
                begin = starts if starts.ndim == 1 else starts[some]
                pulled = anchor if anchor is None or anchor.ndim == 1 else anchor[some]
                only, own = records.select(some), streams.select(some.tolist())
                mine = numbers.select(some)
                updates[some] = _train(model, begin, pulled, only, own, mine, memory, graphs, None, full=yes)
            return updates
        except Exception:
            if not streams.exact or numbers.deviation is not None:
                raise
            # Noise is added to what a deployed client learnt here; a failure for some data alone would reveal them.
            logging.getLogger(__name__).warning("local training failed under the model received; the update is zero")
            return torch.zeros(records.clients, model.size, device=records.features.device)

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
    graphs: CudaGraphs,
    drift: Tensor | None,
    *,
    full: bool,  # every batch holds all records
) -> Tensor:
    clients, device = records.clients, records.features.device
    features = records.features.reshape(_shape(model, records))  # a linear model takes an image as one row
    starts = starts.to(device).expand(clients, model.size)
    pulled_to = starts if anchor is None else anchor.to(device).expand(clients, model.size)
    moved = None
    if drift is not None:
        if drift.shape != (clients, model.size):
            raise InputError(f"drift must be ({clients}, {model.size}), not {tuple(drift.shape)}")
        moved = drift_per_step(drift.to(device), settings)
    updates = torch.empty(clients, model.size, device=device)
    settings = replace(settings, at_once=rows_at_once(model, records, memory))
    threads = 1 if streams.exact else threads_of(model, records, settings, memory)

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def train(rows: slice) -> None:
        mine = replace(records, features=features, offsets=records.spans[rows])
        some = streams.select(range(rows.start, rows.stop))
        before, fixed = starts[rows], pulled_to[rows]
        apart = None if moved is None else moved[rows]
        if some.exact and settings.deviation is not None:
            after = train_deployed(model, before, mine, some, settings.select(rows), drift=apart)
        elif full:
            after = train_on_all(model, before, fixed, mine, some, settings.select(rows), memory)
        elif device.type == "cpu":
            after = train_on_cpu(model, before, fixed, mine, some, settings.select(rows), drift=apart)
        else:
            after = train_on_device(model, before, fixed, mine, some, settings.select(rows), graphs, drift=apart)
        torch.sub(after, before, out=updates[rows])

    with side_by_side(threads) as mapped:
        list(mapped(train, chunks(model, records, settings, memory, threads)))
    return updates


def _shape(model: Model, records: Records) -> tuple[int, ...]:
    """Return the shape that a model needs the features in: records (R, ...), or persons (P, L, ...) if padded."""
    if not model.person:
        return -1, *model.input_shape
    return -1, *(() if records.units is not None else records.labels.shape[1:2]), *model.input_shape[1:]


def _check_examples(model: Model, records: Records) -> None:
    """Refuse persons where the model takes single records, and single records where it takes persons."""
    if records.of_persons != bool(model.person):
        raise InputError(
            f"the model takes {'persons' if model.person else 'single records'} as examples, but these are "
            f"{'persons' if records.of_persons else 'single records'}; `models.of_units` makes a model of persons"
        )


def _check_targets(model: Model, records: Records) -> None:
    """Refuse targets of another shape than the model's loss was checked with, where that was stated."""
    shape = tuple(records.labels.shape[2 if records.padded else 1 :])
    if model.targets is not None and shape != tuple(model.targets.shape[1:]):
        raise InputError(
            f"the model's loss takes targets of shape {tuple(model.targets.shape[1:])} for each record, but these are "
            f"{shape}; give the targets it was made for"
        )


def _check(model: Model, starts: Tensor, records: Records, streams: Streams) -> None:
    if starts.shape not in ((model.size,), (records.clients, model.size)):
        raise InputError(
            f"starts must be ({model.size},) or ({records.clients}, {model.size}), not {tuple(starts.shape)}"
        )
    shape = _shape(model, records)[1:]
    if math.prod(records.features.shape[1:]) != math.prod(shape):
        raise InputError(f"the model takes records of shape {shape}, but these are {tuple(records.features.shape[1:])}")
    if records.features.is_floating_point() and records.features.dtype != torch.float32:
        raise InputError(f"records are {records.features.dtype}; models are float32: call float() on the features")
    if streams.clients != records.clients:
        raise InputError(f"{records.clients} clients have records, but {streams.clients} have a random stream")
