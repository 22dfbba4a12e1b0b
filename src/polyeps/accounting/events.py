"""Privacy as values: the events our mechanisms cost, and the normal form every judge reads.

Events are dp-accounting's, plus three of ours. Everywhere in polyeps a Gaussian's `noise_multiplier` is the
standard deviation divided by the *clip norm*, whatever the adjacency: under replace-one a value can move by
twice the clip norm, and it is the judge that knows this. (The library's own accountants disagree with each
other here, which is why none of its events reaches them unless this package has translated it.)
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import attrs
import dp_accounting as dp
from dp_accounting.dp_event import DpEvent, RepeatAndSelectDpEvent

from polyeps.errors import InputError, UnknownEvent

History = Mapping[DpEvent, int]  # what was done, and how often


@attrs.frozen
class PureDpEvent(DpEvent):
    """A release whose probabilities change by at most e^epsilon, whatever two inputs are compared."""

    epsilon: float


@attrs.frozen
class SkellamDpEvent(DpEvent):
    """Sum of integer vectors plus Skellam noise; sensitivities and variance are in grid units.

    For integer vectors v_i with ‖v_i‖₁ ≤ l1_sensitivity and ‖v_i‖₂ ≤ l2_sensitivity and noise
    z ~ Skellam of the given variance in each coordinate, the release is Σ v_i + z.
    """

    l1_sensitivity: float
    l2_sensitivity: float
    variance: float


@attrs.frozen
class DiscreteGaussianSumDpEvent(DpEvent):
    """Sum of integer vectors to which each of `agents` honest clients added discrete Gaussian noise.

    `deviation` is one agent's, in grid units like the sensitivity. A sum of discrete Gaussians is only nearly
    a discrete Gaussian, and the price of that grows with the dimension.
    """

    l2_sensitivity: float
    deviation: float
    agents: int
    dimension: int


@attrs.frozen
class TogetherDpEvent(DpEvent):
    """Several releases about one sample, integer noise among them: whoever was drawn for one was drawn for all.

    So their costs add up before sampling amplifies them, not after.
    """

    events: tuple[DpEvent, ...] = attrs.field(converter=tuple)


@attrs.frozen
class RareFailureDpEvent(DpEvent):
    """A release that reveals everything with a small probability, and nothing otherwise: it is (0, probability)-DP.

    Its probability is taken from the δ of all that is released, whatever unit and adjacency are compared.
    """

    probability: float


Gaussian = dp.GaussianDpEvent
Poisson = dp.PoissonSampledDpEvent
FixedSize = dp.SampledWithoutReplacementDpEvent
Truncated = dp.TruncatedSubsampledGaussianDpEvent

# All that a ledger may hold. Adding a line here is a promise that some judge can price it.
KNOWN: dict[str, type[DpEvent]] = {
    "none": dp.NoOpDpEvent,
    "non-private": dp.NonPrivateDpEvent,
    "gaussian": Gaussian,
    "poisson": Poisson,
    "fixed-size": FixedSize,
    "truncated-poisson": Truncated,
    "pure": PureDpEvent,
    "skellam": SkellamDpEvent,
    "discrete-gaussian-sum": DiscreteGaussianSumDpEvent,
    "together": TogetherDpEvent,
    "rare-failure": RareFailureDpEvent,
    "repeat-and-select": RepeatAndSelectDpEvent,
    "composed": dp.ComposedDpEvent,
    "self-composed": dp.SelfComposedDpEvent,
}
_NAMES = {kind: name for name, kind in KNOWN.items()}


def fold(*noise_multipliers: float) -> float:
    """The one Gaussian that costs as much as several on the same sample: (Σ σᵢ⁻²)^(-1/2).

    >>> fold(1.0, 1.0)
    0.7071067811865475
    """
    return 1 / math.hypot(*(1 / sigma for sigma in noise_multipliers))


def split_clip_bit(noise_multiplier: float, clip_bit_sigma: float) -> float:
    """The noise left for the update when a clip bit, released with it, shares one total multiplier.

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
    """Flatten an event tree into its steps and their counts, folding Gaussians that share a sample."""
    history: Counter[DpEvent] = Counter()
    _add(history, event, uses)
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
                _add(history, event.event, uses * _whole(event.count))
        case Poisson(sampling_probability=0.0):
            return
        case Poisson(sampling_probability=1.0):
            _add(history, event.event, uses)
        case Poisson():
            if not 0 < event.sampling_probability < 1:
                raise InputError(f"a sampling rate must lie between 0 and 1, not {event.sampling_probability}")
            _add_sampled(history, event.event, uses, lambda inner: Poisson(event.sampling_probability, inner))
        case dp.RandomizedResponseDpEvent():
            # Trap X1: the library's PLD accountant forgets how often this event was repeated. Ours never
            # sees it: with k buckets and noise p the output odds are at most (1 - p + p/k) / (p/k).
            share = event.noise_parameter / event.num_buckets
            if share <= 0:
                _add(history, dp.NonPrivateDpEvent(), uses)
            elif event.num_buckets > 1:
                _add(history, PureDpEvent(math.log((1 - event.noise_parameter + share) / share)), uses)
        case Gaussian() if event.noise_multiplier == 0:
            history[dp.NonPrivateDpEvent()] += uses
        case FixedSize():
            if not 0 < event.sample_size <= event.source_dataset_size:
                raise InputError(f"cannot draw {event.sample_size} of {event.source_dataset_size} without replacement")
            size, drawn = event.source_dataset_size, event.sample_size
            _add_sampled(history, event.event, uses, lambda inner: FixedSize(size, drawn, inner))
        case _:
            if type(event) not in _NAMES:
                raise UnknownEvent(f"no accountant here knows the event {type(event).__name__}")
            for field in attrs.fields(type(event)):
                value = getattr(event, field.name)
                if isinstance(value, float | int) and not value >= 0:  # NaN fails this too
                    raise InputError(f"{field.name} of a {_NAMES[type(event)]} event must be at least 0, not {value}")
            history[event] += uses


def _add_sampled(history: Counter[DpEvent], event: DpEvent, uses: int, sampled: Callable[[DpEvent], DpEvent]) -> None:
    """Add what is done to one sample. Failures reveal the sample too, so sampling makes them no cheaper."""
    inside, failure = without_failures(history_of(event))
    if failure:
        history[RareFailureDpEvent(failure)] += uses
    if inside:
        history[sampled(_as_one(inside))] += uses


def _whole(count: float) -> int:
    if int(count) != count:
        raise InputError(f"an event can only be repeated a whole number of times, not {count}")
    return int(count)


def on_one_sample(event: DpEvent) -> DpEvent:
    """What is done to one sample, as one event: several Gaussians become one before amplification."""
    inside, failure = without_failures(history_of(event))
    if not inside:
        return RareFailureDpEvent(failure) if failure else dp.NoOpDpEvent()
    return TogetherDpEvent([_as_one(inside), RareFailureDpEvent(failure)]) if failure else _as_one(inside)


def _as_one(inside: Counter[DpEvent]) -> DpEvent:
    if dp.NonPrivateDpEvent() in inside:
        return dp.NonPrivateDpEvent()
    if all(isinstance(step, Gaussian) for step in inside):
        return Gaussian(fold(*(step.noise_multiplier / math.sqrt(uses) for step, uses in inside.items())))
    if len(inside) == 1 and inside.total() == 1:
        return next(iter(inside))
    if all(isinstance(step, Gaussian | SkellamDpEvent | DiscreteGaussianSumDpEvent) for step in inside):
        return TogetherDpEvent(sorted(inside.elements(), key=repr))
    raise UnknownEvent("only noisy sums can share one sample; account the others separately")


def without_failures(history: History) -> tuple[Counter[DpEvent], float]:
    """A history without its rare failures, and the probability that any of them happens (at most)."""
    rest, failure = Counter[DpEvent](), 0.0
    for step, uses in history.items():
        if isinstance(step, RareFailureDpEvent):
            failure += uses * step.probability
        else:
            rest[step] = uses
    return rest, min(failure, 1.0)


def is_pure(history: History) -> bool:
    """Whether every step holds for any two inputs, so that unit and adjacency do not matter."""
    return all(isinstance(step, PureDpEvent) for step in history)


def pure_sum(history: History) -> float:
    """What a history costs by mere addition, at δ = 0: infinite unless every step is pure."""
    return sum(step.epsilon * uses for step, uses in history.items()) if is_pure(history) else math.inf


def describe(event: DpEvent) -> dict[str, Any]:
    """An event as plain JSON data, the inverse of `understand`."""
    if type(event) not in _NAMES:
        raise UnknownEvent(f"no accountant here knows the event {type(event).__name__}")
    return {"kind": _NAMES[type(event)]} | {
        field.name.lstrip("_"): _plain(getattr(event, field.name)) for field in attrs.fields(type(event))
    }


def _plain(value: Any) -> Any:
    if isinstance(value, DpEvent):
        return describe(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def understand(data: Mapping[str, Any]) -> DpEvent:
    """Rebuild an event from its description; what is not known is refused.

    >>> understand(describe(Poisson(0.01, Gaussian(2.0))))
    PoissonSampledDpEvent(sampling_probability=0.01, event=GaussianDpEvent(noise_multiplier=2.0))
    """
    kind = data.get("kind")
    if kind not in KNOWN:
        raise UnknownEvent(f"no accountant here knows an event of kind {kind!r}")
    fields = {name: _rich(value) for name, value in data.items() if name != "kind"}
    try:
        return KNOWN[kind](**fields)
    except TypeError as problem:
        raise InputError(f"the description of a {kind} event is malformed: {problem}") from None


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return understand(value)
    return [_rich(item) for item in value] if isinstance(value, list) else value


def canonical(event: DpEvent) -> str:
    """One string per event, the same on every machine: the key of caches and the text that is hashed."""
    try:
        return _remembered(event)
    except TypeError:  # a composition holds a list and cannot be a key
        return _spell(event)


def _spell(event: DpEvent) -> str:
    return json.dumps(describe(event), sort_keys=True, separators=(",", ":"), allow_nan=False)


_remembered = lru_cache(maxsize=1 << 14)(_spell)  # a cohort pays the same events round after round
