"""Histories of events in normal form: steps and how often each occurred. Every accountant reads these."""

import math
from collections import Counter
from collections.abc import Callable, Mapping

from dp_accounting import dp_event as dp
from dp_accounting.dp_event import DpEvent, RepeatAndSelectDpEvent

from polyeps.accounting.events import (
    DiscreteGaussianSumDpEvent,
    FixedSize,
    Gaussian,
    Poisson,
    PureDpEvent,
    RareFailureDpEvent,
    SkellamDpEvent,
    TogetherDpEvent,
    check_event,
    check_uses,
    remembered,
)
from polyeps.errors import InputError, UnknownEvent

History = Mapping[DpEvent, int]  # steps, and how often each occurred


def fold_gaussians(*noise_multipliers: float) -> float:
    """Return the multiplier of one Gaussian that costs as much as several on the same sample: (Σ σᵢ⁻²)^(-1/2).

    >>> fold_gaussians(1.0, 1.0)
    0.7071067811865475
    """
    if min(noise_multipliers) <= 0:
        return 0.0
    return 1 / math.hypot(*(1 / sigma for sigma in noise_multipliers))


def split_clip_bit(noise_multiplier: float, clip_bit_sigma: float) -> float:
    """Return the noise multiplier left for an update that shares a total multiplier with its clip bit.

    The bit is counted as ±1/2, so its own multiplier is twice its standard deviation.

    >>> round(split_clip_bit(1.0, 5.0), 7)
    1.0050378
    """
    left = noise_multiplier**-2 - (2 * clip_bit_sigma) ** -2
    if left <= 0:
        raise InputError(
            f"the clip bit's noise {clip_bit_sigma} alone costs more than the total multiplier {noise_multiplier} "
            f"allows; make clip-bit-sigma larger than {noise_multiplier / 2:g}"
        )
    return 1 / math.sqrt(left)


def history_of(event: DpEvent, uses: int = 1) -> Counter[DpEvent]:
    """Flatten an event tree into its steps and their counts, folding Gaussians that share a sample.

    Malformed events and counts are refused here, before any accountant sees them.
    """
    steps, times = _steps(event), check_uses(uses)
    return Counter({step: count * times for step, count in steps.items()} if times else {})


@remembered
def _steps(event: DpEvent) -> Counter[DpEvent]:
    check_event(event)
    history: Counter[DpEvent] = Counter()
    _add(history, event, 1)
    return history


def _add(history: Counter[DpEvent], event: DpEvent, uses: int) -> None:
    match event:
        case dp.NoOpDpEvent():
            return
        case dp.ComposedDpEvent() | TogetherDpEvent():
            for part in event.events:
                _add(history, part, uses)
        case dp.SelfComposedDpEvent():
            if event.count > 0:
                _add(history, event.event, uses * int(event.count))
        case Poisson(sampling_probability=1.0):
            _add(history, event.event, uses)
        case Poisson():
            _add_sampled(history, event.event, uses, lambda inner: Poisson(event.sampling_probability, inner))
        case dp.RandomizedResponseDpEvent():
            # dp-accounting's PLD accountant ignores how often this event was repeated, so it becomes a pure event:
            # with k buckets and noise p the output odds are at most (1 - p + p/k) / (p/k).
            share = event.noise_parameter / event.num_buckets
            if share <= 0:
                history[dp.NonPrivateDpEvent()] += uses
            elif event.num_buckets > 1:
                history[PureDpEvent(math.log1p((1 - event.noise_parameter) / share))] += uses
        case Gaussian() if event.noise_multiplier == 0:
            history[dp.NonPrivateDpEvent()] += uses
        case FixedSize():
            size, drawn = event.source_dataset_size, event.sample_size
            _add_sampled(history, event.event, uses, lambda inner: FixedSize(size, drawn, inner))
        case RepeatAndSelectDpEvent():
            parts = [dp.SelfComposedDpEvent(step, times) for step, times in history_of(event.event).items()]
            if parts:  # as a tuple in a fixed order, so that equal ones are counted together
                inside = TogetherDpEvent(sorted(parts, key=repr))
                history[RepeatAndSelectDpEvent(inside, event.mean, event.shape)] += uses
        case _:
            history[event] += uses


def _add_sampled(history: Counter[DpEvent], event: DpEvent, uses: int, sampled: Callable[[DpEvent], DpEvent]) -> None:
    """Add what is done to one sample. Failures may reveal the sample itself, so sampling does not amplify them."""
    inside, failure = without_failures(history_of(event))
    if failure:
        history[RareFailureDpEvent(failure)] += uses
    if inside:
        step = sampled(_as_one(inside))
        if not (isinstance(step, Poisson) and step.sampling_probability == 0):
            history[step] += uses


def on_one_sample(event: DpEvent) -> DpEvent:
    """Return releases about one sample as one event: several Gaussians become one before amplification."""
    inside, failure = without_failures(history_of(event))
    if not inside:
        return RareFailureDpEvent(failure) if failure else dp.NoOpDpEvent()
    return TogetherDpEvent([_as_one(inside), RareFailureDpEvent(failure)]) if failure else _as_one(inside)


def _as_one(inside: Counter[DpEvent]) -> DpEvent:
    if dp.NonPrivateDpEvent() in inside:
        return dp.NonPrivateDpEvent()
    if len(inside) == 1 and inside.total() == 1:
        return next(iter(inside))
    if all(isinstance(step, Gaussian) for step in inside):
        return Gaussian(fold_gaussians(*(step.noise_multiplier / math.sqrt(uses) for step, uses in inside.items())))
    if all(isinstance(step, Gaussian | SkellamDpEvent | DiscreteGaussianSumDpEvent) for step in inside):
        return TogetherDpEvent(sorted(inside.elements(), key=repr))
    raise UnknownEvent("only noisy sums can share one sample; account the others separately")


def without_failures(history: History) -> tuple[Counter[DpEvent], float]:
    """Return a history without its rare failures, and a bound on the probability that any of them happens."""
    rest, failure = Counter[DpEvent](), 0.0
    for step, uses in history.items():
        if isinstance(step, RareFailureDpEvent):
            failure += uses * step.probability
        else:
            rest[step] = uses
    return rest, min(failure, 1.0)


def is_pure(history: History) -> bool:
    """Return whether every step holds for any two inputs, so that unit and adjacency do not matter."""
    return all(isinstance(step, PureDpEvent) for step in history)


def pure_sum(history: History) -> float:
    """Return the ε of a history at δ = 0, by addition: infinite unless every step is pure."""
    try:
        return sum(step.epsilon * uses for step, uses in history.items()) if is_pure(history) else math.inf
    except OverflowError:  # more uses than a double can hold
        return math.inf
