"""Privacy events: the types a mechanism can cost, the numbers they may hold, and their JSON form.

Events are those of dp-accounting and five more. Everywhere in polyeps a Gaussian's `noise_multiplier` is the standard
deviation divided by the *clip norm*, whatever the adjacency: under replace-one a value can move by twice the clip norm,
and the accountant applies that factor. (The accountants of dp-accounting disagree with each other here, so none of
its events reaches them without translation.)
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, get_args

import attrs
import dp_accounting as dp
import numpy as np
from dp_accounting.dp_event import DpEvent, RepeatAndSelectDpEvent

from polyeps.core import Adjacency
from polyeps.errors import InputError, UnknownEvent

_DEEPEST = 64  # levels of an event tree
_LARGEST = 1 << 20  # events in a tree, each counted as often as it occurs


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
EVENT_TYPES: dict[str, type[DpEvent]] = {
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
NAMES = {kind: name for name, kind in EVENT_TYPES.items()}


def _number(value: Any) -> bool:
    """Whether a value is a finite number of full precision, and not a truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no double holds
        return False


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number of an integer type: neither 2.0 nor True is one."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _event(value: Any) -> bool:
    return isinstance(value, DpEvent)


Rule = tuple[Callable[[Any], bool], str]
_NOT_NEGATIVE: Rule = (lambda value: _number(value) and value >= 0, "a finite number, at least 0")
_PROBABILITY: Rule = (lambda value: _number(value) and 0 <= value <= 1, "a number between 0 and 1")
_COUNT: Rule = (lambda value: is_whole(value) and value >= 0, "a whole number, at least 0")
_SIZE: Rule = (lambda value: is_whole(value) and _number(value) and value >= 1, "a whole number, at least 1")
_MEAN: Rule = (lambda value: _number(value) and value >= 1, "a finite number, at least 1")
_SHAPE: Rule = (lambda value: value == math.inf or _NOT_NEGATIVE[0](value), "a number, at least 0")
_EVENT: Rule = (_event, "an event")
_EVENTS: Rule = (lambda value: isinstance(value, list | tuple) and all(map(_event, value)), "a list of events")
_RULES: dict[str, Rule] = {
    "noise_multiplier": _NOT_NEGATIVE,
    "epsilon": _NOT_NEGATIVE,
    "l1_sensitivity": _NOT_NEGATIVE,
    "l2_sensitivity": _NOT_NEGATIVE,
    "variance": _NOT_NEGATIVE,
    "deviation": _NOT_NEGATIVE,
    "sampling_probability": _PROBABILITY,
    "probability": _PROBABILITY,
    "noise_parameter": _PROBABILITY,
    "count": _COUNT,
    "agents": _SIZE,
    "dimension": _SIZE,
    "source_dataset_size": _SIZE,
    "sample_size": _SIZE,
    "dataset_size": _SIZE,
    "truncated_batch_size": _SIZE,
    "num_buckets": _SIZE,
    "mean": _MEAN,
    "shape": _SHAPE,
    "event": _EVENT,
    "events": _EVENTS,
}
# Randomised response is understood but never stored: it becomes a pure event.
_FIELDS = {kind: [field.name for field in attrs.fields(kind)] for kind in [*NAMES, dp.RandomizedResponseDpEvent]}


def check_uses(uses: Any, least: int = 0) -> int:
    """Return how often an event is used, as an int; refuse what is not a whole number of at least `least`."""
    if not (is_whole(uses) and uses >= least):
        raise InputError(f"an event can only be used a whole number of times, at least {least}, not {uses!r}")
    return int(uses)


def check_adjacency(adjacency: Any) -> None:
    """Refuse a relation between data sets that no accountant knows: what is unknown must not pass for the mildest."""
    if adjacency not in get_args(Adjacency):
        raise InputError(f"adjacency must be one of {', '.join(get_args(Adjacency))}, not {adjacency!r}")


def check_event(event: DpEvent) -> None:
    """Refuse an event tree that holds an unknown kind, an impossible number, or more levels or parts than sense has."""
    _check(event, 1, {})


def _check(event: DpEvent, level: int, seen: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Height and size of a tree; parts that occur twice are looked at once."""
    if id(event) in seen:
        height, size = seen[id(event)]
    else:
        if level > _DEEPEST:
            raise InputError(f"an event can have at most {_DEEPEST} levels; compose its parts side by side")
        if type(event) not in _FIELDS:
            raise UnknownEvent(f"no accountant here knows the event {type(event).__name__}")
        height, size = 0, 1
        for name in _FIELDS[type(event)]:
            value = getattr(event, name)
            holds, allowed = _RULES[name]
            if not holds(value):
                shown = type(value).__name__ if isinstance(value, list | tuple | DpEvent) else repr(value)
                raise InputError(f"{name} of {_name(event)} must be {allowed}, not {shown}")
            for part in (value,) if name == "event" else value if name == "events" else ():
                part_height, part_size = _check(part, level + 1, seen)
                height, size = max(height, part_height), size + part_size
        height += 1
        if isinstance(event, FixedSize) and event.sample_size > event.source_dataset_size:
            raise InputError(f"cannot draw {event.sample_size} of {event.source_dataset_size} without replacement")
        seen[id(event)] = height, size
    if level + height - 1 > _DEEPEST:
        raise InputError(f"an event can have at most {_DEEPEST} levels; compose its parts side by side")
    if size > _LARGEST:
        raise InputError(f"an event can have at most {_LARGEST} parts; use self-composed events for repetitions")
    return height, size


def _name(event: DpEvent) -> str:
    return f"a {NAMES[type(event)]} event" if type(event) in NAMES else f"a {type(event).__name__}"


def event_to_dict(event: DpEvent) -> dict[str, Any]:
    """An event as plain JSON data, the inverse of `understand`."""
    check_event(event)
    return _described(event)


def _described(event: DpEvent) -> dict[str, Any]:
    if type(event) not in NAMES:
        raise UnknownEvent(f"a {type(event).__name__} cannot be stored; use a pure event in its place")
    return {"kind": NAMES[type(event)]} | {
        field.name: _plain(getattr(event, field.name)) for field in attrs.fields(type(event))
    }


def _plain(value: Any) -> Any:
    if isinstance(value, DpEvent):
        return _described(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if is_whole(value) else float(value)


def event_from_dict(data: Mapping[str, Any]) -> DpEvent:
    """Rebuild an event from its description; what is unknown or malformed is refused.

    >>> understand(describe(Poisson(0.01, Gaussian(2.0))))
    PoissonSampledDpEvent(sampling_probability=0.01, event=GaussianDpEvent(noise_multiplier=2.0))
    """
    try:
        event = _rich(data)
    except RecursionError:
        raise InputError("the description of an event is nested too deeply") from None
    check_event(event)
    return event


def _rich(data: Any) -> DpEvent:
    if not isinstance(data, Mapping):
        raise InputError(f"an event is described by an object with a kind, not by {type(data).__name__}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in EVENT_TYPES:
        raise UnknownEvent(f"no accountant here knows an event of kind {kind!r}")
    fields = {name: value for name, value in data.items() if name != "kind"}
    if "event" in fields:
        fields["event"] = _rich(fields["event"])
    if isinstance(fields.get("events"), list | tuple):
        fields["events"] = [_rich(item) for item in fields["events"]]
    try:
        return EVENT_TYPES[kind](**fields)
    except TypeError as problem:
        raise InputError(f"the description of a {kind} event is malformed: {problem}") from None


def canonical_json(event: DpEvent) -> str:
    """One string per event, the same on every machine: the key of caches and the text that is hashed."""
    check_event(event)
    try:
        return _remembered(event)
    except TypeError:  # a composition holds a list and cannot be a key
        return _spell(event)


def _spell(event: DpEvent) -> str:
    return json.dumps(_described(event), sort_keys=True, separators=(",", ":"), allow_nan=False)


_remembered = lru_cache(maxsize=1 << 14)(_spell)  # a cohort pays the same events round after round
