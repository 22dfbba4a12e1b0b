"""Certificates: what a method guarantees a client, claimed by its paper and certified here, in figures and in words."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Literal

from dp_accounting.dp_event import DpEvent

from polyeps.accounting import Accountant, epsilon_if_draws_known
from polyeps.accounting.affordability import known_epsilon
from polyeps.accounting.events import FixedSize, Poisson
from polyeps.accounting.histories import History, history_of
from polyeps.core import Adjacency, Algorithm, Arithmetic, Trust, Unit, check_delta, person_of

Form = Literal["sound", "published"]
SampledBy = Literal["poisson", "fixed", "none"]

# Conditions of guarantees.
PUBLIC_GROUP = "The client's privacy level is public, and not protected."
SECRET_COHORT = "It holds against everyone who does not know in which rounds the client was drawn."

SEVERAL_CLIENTS = "A {person} with records at several clients is protected by each separately, and their ε add up."

_ANY_CHANGE = {
    ("record", "zero-out"): "replacing any one record of this client by an empty one",
    ("record", "add-remove"): "adding or removing any one record of this client",
    ("record", "replace-one"): "replacing any one record of this client by another",
    ("person", "zero-out"): "adding or blanking all records of any one {person} of this client",
    ("person", "add-remove"): "adding or removing all records of any one {person} of this client",
    ("person", "replace-one"): "replacing all records of any one {person} of this client by others",
    ("client", "zero-out"): "replacing everything this client contributes by nothing",
    ("client", "add-remove"): "this client's taking part with its data or staying away",
    ("client", "replace-one"): "replacing everything this client holds by anything else",
}
_HOLDS_FOR = {
    "exact": "It holds for the very numbers that are released.",
    "exact-when-deployed": "It holds for the very numbers that a deployed client releases; a simulation draws noise in "
    "floating point, for which ideal arithmetic is assumed.",
    "ideal": "It assumes ideal arithmetic: the low digits of noise in floating point may reveal more.",
}
_PLAIN = 14  # the ε up to which a factor e^ε is written out, about a million
_ZEROS = 9  # of a probability, beyond which a power of ten reads better
_WHO = {
    "nobody": "anyone, the server included,",
    "secure-sum": "anyone who sees only the sums, as long as secure aggregation is not broken,",
    "server": "anyone but the server, which is trusted with updates without noise,",
}


@dataclass(frozen=True)
class Certificate:
    """`claimed` is the paper's figure, if it has one; `certified` is proved for what is run, else infinity."""

    method: str
    form: Form
    claimed: float | None
    certified: float
    delta: float
    adjacency: Adjacency
    unit: Unit
    sampler: SampledBy
    trust: Trust
    accountant: Accountant
    details: Mapping[str, Any]
    conditions: tuple[str, ...] = ()  # sentences on what the guarantee assumes or does not cover
    arithmetic: Arithmetic = "ideal"
    # The ε for those who know in which rounds the client was drawn; None where there is no such secret.
    certified_if_draws_known: float | None = None
    person: str = ""  # what a person is called, where the unit is one

    def __post_init__(self) -> None:
        object.__setattr__(self, "person", person_of(self.unit, self.person))

    def as_dict(self) -> dict[str, Any]:
        """All fields and the sentence, ready for JSON."""
        return {**asdict(self), "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """The guarantee in words."""
        change = _ANY_CHANGE[self.unit, self.adjacency].format(person=self.person)
        if not math.isfinite(self.certified):
            return f"Nothing is guaranteed: the outcome may reveal with certainty the effect of {change}."
        epsilon = rounded_up(self.certified)
        factor = rounded_up(math.exp(self.certified)) if self.certified < _PLAIN else f"e^{epsilon}"
        exception = f", except with probability at most {one_in(self.delta)}" if self.delta else ", without exception"
        return " ".join(
            [
                f"Whatever {_WHO[self.trust]} learns from all of this client's answers together, {change} changes how "
                f"likely that is by a factor of at most {factor} (ε = {epsilon}){exception}.",
                *((SEVERAL_CLIENTS.format(person=self.person),) if self.person else ()),
                *(sentence for sentence in self.conditions if sentence != SECRET_COHORT),
                *self._against_those_who_know(),
                _HOLDS_FOR[self.arithmetic],
            ]
        )

    def _against_those_who_know(self) -> tuple[str, ...]:
        """State the guarantee against the server that draws cohorts, where these are secret."""
        if self.certified_if_draws_known is None:
            return (SECRET_COHORT,) if SECRET_COHORT in self.conditions else ()
        who = "those who know" if self.trust == "server" else "those who know, the server that draws among them"
        known = self.certified_if_draws_known
        left = f"ε = {rounded_up(known)}" if math.isfinite(known) else "nothing is guaranteed"
        return (f"{SECRET_COHORT[:-1]}; against {who}, {left}.",)


def certify(
    algorithm: Algorithm,
    event: DpEvent,
    delta: float,
    *,
    method: str,
    claimed: float | None,
    form: Form = "sound",
    accountant: Accountant = "pld",
    details: Mapping[str, Any] | None = None,
) -> Certificate:
    """Return the certificate of a client on whom an algorithm spends an event, all of its rounds together."""
    check_delta(delta)
    history = history_of(event)
    secret = SECRET_COHORT in algorithm.conditions
    return Certificate(
        method=method,
        form=form,
        claimed=claimed,
        certified=known_epsilon(history, delta, algorithm.adjacency, accountant),
        delta=delta,
        adjacency=algorithm.adjacency,
        unit=algorithm.unit,
        person=algorithm.person,
        sampler=sampler_of(history),
        trust=algorithm.trust,
        accountant=accountant,
        details=details or {},
        conditions=algorithm.conditions,
        arithmetic=algorithm.arithmetic,
        certified_if_draws_known=epsilon_if_draws_known(history, delta, algorithm.adjacency) if secret else None,
    )


def sampler_of(history: History) -> SampledBy:
    """Return how the records or clients behind a history were sampled."""
    kinds = {type(step) for step in history}
    return "poisson" if Poisson in kinds else "fixed" if FixedSize in kinds else "none"


def rounded_up(value: float) -> str:
    """Return a bound in four digits, never below its value.

    >>> rounded_up(1.00001), rounded_up(22494.2), rounded_up(0.5), rounded_up(0.0)
    ('1.001', '22 500', '0.5', '0')
    """
    return f"{_upwards(value, 4):,f}".replace(",", " ")


def one_in(delta: float) -> str:
    """Return a probability in words, never below its value.

    >>> one_in(1e-5), one_in(0.00123), one_in(0.25), one_in(1e-12)
    ('1 in 100 000', '13 in 10 000', '25 in 100', '1 in 10^12')
    """
    _, digits, power = _upwards(delta, 2).as_tuple()
    times, zeros = int("".join(map(str, digits))), -int(power)
    return f"{times} in {10**zeros:,}".replace(",", " ") if zeros <= _ZEROS else f"{times} in 10^{zeros}"


def _upwards(value: float, digits: int) -> Decimal:
    # Through the shortest text of the float: 1e-5 is meant, not the binary number next to it.
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value))).normalize()
    return up if up.is_zero() or int(up.as_tuple().exponent) <= 0 else up.quantize(Decimal(1))
