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
from typing import Any, TypeVar, get_args

import attrs
import numpy as np
from dp_accounting import dp_event as dp
from dp_accounting.dp_event import DpEvent, RepeatAndSelectDpEvent

from polyeps.core import Adjacency
from polyeps.errors import InputError, UnknownEvent

_DEEPEST = 64  # levels of an event tree
_LARGEST = 1 << 20  # events in a tree, each counted as often as it occurs


@attrs.frozen
class PureDpEvent(DpEvent):
    """A release whose probabilities change by a factor of at most e^epsilon between any two inputs."""

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
    """Sum of integer vectors to which each of `clients` honest clients added discrete Gaussian noise.

    `deviation` is one client's, in grid units like the sensitivity. A sum of discrete Gaussians is only nearly a
    discrete Gaussian, and the cost of the difference grows with the dimension.
    """

    l2_sensitivity: float
    deviation: float
    clients: int
    dimension: int


@attrs.frozen
class TogetherDpEvent(DpEvent):
    """Several releases about one sample, integer noise among them: a client drawn for one was drawn for all.

    So their costs add up before amplification by sampling, not after.
    """

    events: tuple[DpEvent, ...] = attrs.field(converter=tuple)


@attrs.frozen
class RareFailureDpEvent(DpEvent):
    """A release that reveals everything with a small probability and nothing otherwise: (0, probability)-DP.

    Its probability is subtracted from the δ of the whole history, for every unit and adjacency.
    """

    probability: float


Gaussian = dp.GaussianDpEvent
Poisson = dp.PoissonSampledDpEvent
FixedSize = dp.SampledWithoutReplacementDpEvent

# All events that a ledger may hold: for each, at least one accountant must have a rule.
EVENT_TYPES: dict[str, type[DpEvent]] = {
    "none": dp.NoOpDpEvent,
    "non-private": dp.NonPrivateDpEvent,
    "gaussian": Gaussian,
    "poisson": Poisson,
    "fixed-size": FixedSize,
    "pure": PureDpEvent,
    "skellam": SkellamDpEvent,
    "discrete-gaussian-sum": DiscreteGaussianSumDpEvent,
    "together": TogetherDpEvent,
    "rare-failure": RareFailureDpEvent,
    "repeat-and-select": RepeatAndSelectDpEvent,
    "composed": dp.ComposedDpEvent,
    "self-composed": dp.SelfComposedDpEvent,
}
_NAMES = {kind: name for name, kind in EVENT_TYPES.items()}
_REMEMBERED = 1 << 14  # events
_T = TypeVar("_T")


def _number(value: Any) -> bool:
    """Return whether a value is a finite number of full precision, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond a double's range
        return False


def _is_whole(value: Any) -> bool:
    """Return whether a value is of an integer type: neither 2.0 nor True is."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _event(value: Any) -> bool:
    return isinstance(value, DpEvent)


_Rule = tuple[Callable[[Any], bool], str]
_NOT_NEGATIVE: _Rule = (lambda value: _number(value) and value >= 0, "a finite number, at least 0")
_PROBABILITY: _Rule = (lambda value: _number(value) and 0 <= value <= 1, "a number between 0 and 1")
_COUNT: _Rule = (lambda value: _is_whole(value) and value >= 0, "a whole number, at least 0")
_SIZE: _Rule = (lambda value: _is_whole(value) and _number(value) and value >= 1, "a whole number, at least 1")
_MEAN: _Rule = (lambda value: _number(value) and value >= 1, "a finite number, at least 1")
_SHAPE: _Rule = (lambda value: value == math.inf or _NOT_NEGATIVE[0](value), "a number, at least 0")
_EVENT: _Rule = (_event, "an event")
_EVENTS: _Rule = (lambda value: isinstance(value, list | tuple) and all(map(_event, value)), "a list of events")
_REALS = ("noise_multiplier", "epsilon", "l1_sensitivity", "l2_sensitivity", "variance", "deviation")
_SIZES = ("clients", "dimension", "source_dataset_size", "sample_size", "num_buckets")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_REALS, _NOT_NEGATIVE),
    **dict.fromkeys(("sampling_probability", "probability", "noise_parameter"), _PROBABILITY),
    **dict.fromkeys(_SIZES, _SIZE),
    "count": _COUNT,
    "mean": _MEAN,
    "shape": _SHAPE,
    "event": _EVENT,
    "events": _EVENTS,
}
# Randomised response is accepted but never stored: it becomes a pure event.
_FIELDS = {kind: [field.name for field in attrs.fields(kind)] for kind in [*_NAMES, dp.RandomizedResponseDpEvent]}


def check_uses(uses: Any, least: int = 0) -> int:
    """Return the number of uses of an event as an int; refuse anything but a whole number of at least `least`."""
    if not (_is_whole(uses) and uses >= least):
        raise InputError(f"an event can only be used a whole number of times, at least {least}, not {uses!r}")
    return int(uses)


def check_adjacency(adjacency: Any) -> None:
    """Refuse an unknown adjacency, which must not be mistaken for the weakest one."""
    if adjacency not in get_args(Adjacency):
        raise InputError(f"adjacency must be one of {', '.join(get_args(Adjacency))}, not {adjacency!r}")


def remembered(of: Callable[[DpEvent], _T]) -> Callable[[DpEvent], _T]:
    """Return a function that works once for each event that cannot change: for the object, not for those equal to it.

    A cohort pays the same events round after round; an equal event may be written in a way that is refused.
    """
    known: dict[int, tuple[DpEvent, _T]] = {}

    def look_up(event: DpEvent) -> _T:
        held = known.get(id(event))
        if held is not None and held[0] is event:
            return held[1]
        found = of(event)
        try:
            hash(event)
        except TypeError:  # a composition holds a list, which may change
            return found
        if len(known) >= _REMEMBERED:
            known.clear()
        known[id(event)] = event, found
        return found

    return look_up


@remembered
def check_event(event: DpEvent) -> None:
    """Refuse an event tree with an unknown event, an impossible number, or too many levels or parts."""
    _check(event, 1, {})


def _check(event: DpEvent, level: int, seen: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the height and size of a tree; parts that occur twice are checked once."""
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
    return f"a {_NAMES[type(event)]} event" if type(event) in _NAMES else f"a {type(event).__name__}"


def event_to_dict(event: DpEvent) -> dict[str, Any]:
    """Return an event as plain JSON data; `event_from_dict` is the inverse."""
    check_event(event)
    return _to_dict(event)


def _to_dict(event: DpEvent) -> dict[str, Any]:
    if type(event) not in _NAMES:
        raise UnknownEvent(f"a {type(event).__name__} cannot be stored; use a pure event in its place")
    return {"kind": _NAMES[type(event)]} | {
        field.name: _plain(getattr(event, field.name)) for field in attrs.fields(type(event))
    }


def _plain(value: Any) -> Any:
    if isinstance(value, DpEvent):
        return _to_dict(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if _is_whole(value) else float(value)


def event_from_dict(data: Mapping[str, Any]) -> DpEvent:
    """Rebuild an event from its JSON data; refuse unknown or malformed events.

    >>> event_from_dict(event_to_dict(Poisson(0.01, Gaussian(2.0))))
    PoissonSampledDpEvent(sampling_probability=0.01, event=GaussianDpEvent(noise_multiplier=2.0))
    """
    try:
        event = _from_dict(data)
    except RecursionError:
        raise InputError(f"this event is nested too deeply; it can have at most {_DEEPEST} levels") from None
    check_event(event)
    return event


def _from_dict(data: Any) -> DpEvent:
    if not isinstance(data, Mapping):
        raise InputError(f"an event is described by an object with a kind, not by {type(data).__name__}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in EVENT_TYPES:
        raise UnknownEvent(f"no accountant here knows an event of kind {kind!r}")
    fields = {name: value for name, value in data.items() if name != "kind"}
    if "agents" in fields and "clients" not in fields:  # as version 0.1 wrote sums of discrete Gaussians
        fields["clients"] = fields.pop("agents")
    if "event" in fields:
        fields["event"] = _from_dict(fields["event"])
    if isinstance(fields.get("events"), list | tuple):
        fields["events"] = [_from_dict(item) for item in fields["events"]]
    try:
        return EVENT_TYPES[kind](**fields)
    except TypeError as problem:
        raise InputError(f"the description of a {kind} event is malformed: {problem}") from None


def canonical_json(event: DpEvent) -> str:
    """Return one string per event, the same on every machine: the key of caches and of charges."""
    check_event(event)
    try:
        return _cached_json(event)
    except TypeError:  # a composition holds a list and cannot be a key
        return _json(event)


def _json(event: DpEvent) -> str:
    return json.dumps(_to_dict(event), sort_keys=True, separators=(",", ":"), allow_nan=False)


_cached_json = lru_cache(maxsize=1 << 14)(_json)  # a cohort pays the same events round after round
