"""What each paper's method costs: its price per use, whom it protects, and the figure its paper claims.

Prices follow the rules of docs/soundness.md. Scales (sigma) are noise standard deviations over clip norms.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import dp_accounting as dp
from dp_accounting.dp_event import DpEvent

from polyeps.accounting import Accountant, epsilon, epsilon_if_draws_known
from polyeps.accounting.certificate import PUBLIC_GROUP, SECRET_COHORT, Certificate, Form, Sampler
from polyeps.accounting.events import FixedSize, Gaussian, Poisson, PureDpEvent
from polyeps.accounting.histories import fold_gaussians, history_of, split_clip_bit
from polyeps.accounting.known_cohorts import known_draws_epsilon
from polyeps.core import Adjacency, Arithmetic, Trust, Unit, check_delta
from polyeps.errors import InputError
from polyeps.mechanisms import selection, values
from polyeps.mechanisms.selection import SelectName as SelectName

ValueName = Literal["pm", "hm", "duchi", "grid-pm", "none", "exact"]


@dataclass(frozen=True)
class Method:
    """A priced method: `uses` times `price(scale)`, and the paper's own formula for its ε."""

    name: str
    price: Callable[[float], DpEvent]
    uses: int
    adjacency: Adjacency
    unit: Unit
    sampler: Sampler
    trust: Trust
    claimed: Callable[[float, float], float]  # (scale, delta) ↦ the paper's ε
    form: Form = "sound"
    conditions: tuple[str, ...] = ()
    details: Callable[[float, float], Mapping[str, Any]] = field(default=lambda *_: {})  # (scale, delta)
    arithmetic: Arithmetic = "ideal"
    secret_draws: bool = False  # whether the ε depends on nobody's knowing in which rounds the client was drawn

    def event(self, scale: float) -> DpEvent:
        """Everything one protected unit is exposed to."""
        return dp.SelfComposedDpEvent(self.price(scale), self.uses)


def certify(method: Method, scale: float, delta: float, accountant: Accountant = "pld") -> Certificate:
    """Judge a method at a scale."""
    check_delta(delta)
    if not 1e-100 <= scale <= 1e100:  # beyond, squares have no digits
        raise InputError(f"sigma must be a finite number above 0, between 1e-100 and 1e100, not {scale}")
    return Certificate(
        method=method.name,
        form=method.form,
        claimed=method.claimed(scale, delta),
        certified=epsilon(method.event(scale), delta, adjacency=method.adjacency, accountant=accountant),
        delta=delta,
        adjacency=method.adjacency,
        unit=method.unit,
        sampler=method.sampler,
        trust=method.trust,
        accountant=accountant,
        details=method.details(scale, delta),
        conditions=method.conditions,
        arithmetic=method.arithmetic,
        certified_if_draws_known=(
            epsilon_if_draws_known(history_of(method.event(scale)), delta, method.adjacency)
            if method.secret_draws
            else None
        ),
    )


def dp_sgd(*, records: int, batch: int, steps: int, sampler: Sampler = "poisson") -> Method:
    """Local DP-SGD of one client, as WeiAvg, PFA, PFA+ and PDP-FL use it (papers 000 and 002).

    Guarantee: record inside this client; the server sees every noisy update. Poisson batches under zero-out, or
    fixed-size batches under replace-one. The claim is the closed form of paper 000's reference code.
    """
    _at_least_one(records=records, batch=batch, steps=steps)
    if batch > records:
        raise InputError(f"batch {batch} is larger than the client's {records} records; make it smaller")
    rate = batch / records
    fixed = sampler == "fixed"
    return Method(
        name="dp-sgd",
        price=(lambda sigma: FixedSize(records, batch, Gaussian(sigma))) if fixed else _poisson_gaussian(rate),
        uses=steps,
        adjacency="replace-one" if fixed else "zero-out",
        unit="record",
        sampler=sampler,
        trust="nobody",
        claimed=lambda sigma, delta: (
            10 * rate * math.sqrt(steps * math.log10(1 / delta)) / sigma if delta else math.inf
        ),
        details=lambda sigma, _: {"rate": rate, "steps": steps, "sigma": sigma},
        arithmetic="ideal" if fixed else "exact-when-deployed",
    )


def fedhdp(*, rate: float, rounds: int, clip_bit_sigma: float | None = None) -> Method:
    """One privacy group of FedHDP (paper 003): a noisy clipped sum and a noisy clip bit from one Poisson sample.

    Guarantee: client; the server sees updates and bits; sums are divided by the public expected count. The claim
    leaves the clip bit uncharged, as the paper does.
    """
    _at_least_one(rounds=rounds)
    _rate(rate)
    if clip_bit_sigma is not None and not (math.isfinite(clip_bit_sigma) and clip_bit_sigma > 0):
        raise InputError(f"clip-bit-sigma must be a finite number above 0, not {clip_bit_sigma}")

    def effective(sigma: float) -> float:
        return sigma if clip_bit_sigma is None else fold_gaussians(sigma, 2 * clip_bit_sigma)

    def details(sigma: float, _: float) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "rate": rate,
            "rounds": rounds,
            "sigma": sigma,
            "effective_sigma": effective(sigma),
        }
        if clip_bit_sigma is not None:
            shown["clip_bit_sigma"] = clip_bit_sigma
            if 2 * clip_bit_sigma > sigma:
                shown["sigma_to_cost_as_without_bit"] = split_clip_bit(sigma, clip_bit_sigma)
        return shown

    uncharged = _poisson_gaussian(rate)
    return Method(
        name="fedhdp",
        price=lambda sigma: Poisson(rate, Gaussian(effective(sigma))),
        uses=rounds,
        adjacency="zero-out",
        unit="client",
        sampler="poisson",
        trust="server",
        conditions=(PUBLIC_GROUP, SECRET_COHORT) if rate < 1 else (PUBLIC_GROUP,),
        arithmetic="exact",
        secret_draws=rate < 1,
        claimed=lambda sigma, delta: epsilon(dp.SelfComposedDpEvent(uncharged(sigma), rounds), delta, accountant="rdp"),
        details=details,
    )


def cmp_fed(
    *, clients: int, cohort: int, rounds: int, sampler: Sampler = "poisson", survivors: int | None = None
) -> Method:
    """CMP-Fed (paper 004): two noisy sums per round from one cohort, over a secure sum.

    Guarantee: client; only sums are seen, and at least `survivors` honest clients of the cohort add their share of
    noise (so dropouts and colluders count as missing). The claim is the paper's theorem 1.
    """
    _at_least_one(clients=clients, cohort=cohort, rounds=rounds)
    honest = cohort if survivors is None else survivors
    if cohort > clients:
        raise InputError(f"cohort {cohort} is larger than the {clients} clients; make it smaller")
    if not 1 <= honest <= cohort:
        raise InputError(f"survivors must be between 1 and the cohort {cohort}, not {honest}")
    rate = cohort / clients
    fixed = sampler == "fixed"
    adjacency: Adjacency = "replace-one" if fixed else "zero-out"

    def price(sigma: float) -> DpEvent:
        one = Gaussian(sigma * math.sqrt(honest / cohort))
        both = dp.ComposedDpEvent([one, one])
        return FixedSize(clients, cohort, both) if fixed else Poisson(rate, both)

    def theorem_1(sigma: float, delta: float) -> float:
        # σ² = 14 q² T (ε + 2 ln(1/δ))/ε², solved for ε
        if delta == 0:
            return math.inf
        a = rate * math.sqrt(14 * rounds) / sigma
        return a * (a / 2 + math.sqrt(a * a / 4 + 2 * math.log(1 / delta)))

    def details(sigma: float, delta: float) -> dict[str, Any]:
        folded = fold_gaussians(sigma, sigma) * math.sqrt(honest / cohort)
        return {
            "rate": rate,
            "rounds": rounds,
            "sigma": sigma,
            "survivors": honest,
            "effective_sigma": folded,
            "certified_if_always_drawn": known_draws_epsilon(folded, 1.0, rounds, delta, adjacency),
        }

    adding = f"{honest} of the {cohort} clients drawn" if honest < cohort else "all clients drawn"
    noisy = f"It holds as long as {adding} add their noise and keep it to themselves."
    return Method(
        name="cmp-fed",
        price=price,
        uses=rounds,
        adjacency=adjacency,
        unit="client",
        sampler=sampler,
        trust="secure-sum",
        conditions=(noisy, SECRET_COHORT) if rate < 1 else (noisy,),
        secret_draws=rate < 1,
        claimed=theorem_1,
        details=details,
    )


def fedsel(
    *,
    select: SelectName,
    dimension: int,
    top: int,
    value: ValueName,
    reports: int = 1,
    share: float = 0.0,
    form: Form = "sound",
    epsilon_select: float | None = None,
    epsilon_value: float | None = None,
) -> Method:
    """FedSel (paper 001): each report is one index chosen at ε₁ and one value perturbed at ε₂.

    Guarantee: everything the client holds; nobody is trusted. Its scale is 1/ε' of one report, of which `share` goes
    to the selection, unless ε₁ and ε₂ are given. `value="none"` sends the index alone; `"exact"` sends the value
    as it is, for which nothing can be promised.
    """
    _at_least_one(reports=reports)
    selection.check_selection(dimension, top, 0.0)
    if not 0 <= share <= 1:
        raise InputError(f"share must lie between 0 and 1, not {share}")

    def split(scale: float) -> tuple[float, float]:
        nothing = value in ("none", "exact")
        first = epsilon_select if epsilon_select is not None else (1 if nothing else share) / scale
        second = epsilon_value if epsilon_value is not None else (1 - share) / scale
        selection.check_selection(dimension, top, first)
        if not nothing:
            values.check_epsilon_value(second)
        return (0.0 if select == "uniform" else first), (0.0 if nothing else second)

    def law(first: float) -> selection.Selection:
        return selection.selection_law(select, dimension, top, first, form)

    def price(scale: float) -> DpEvent:
        first, second = split(scale)
        if value == "exact":
            return dp.NonPrivateDpEvent()
        # One report is one adaptive composition of two pure steps, so its log-ratios add.
        return PureDpEvent(law(first).epsilon + second)

    def details(scale: float, _: float) -> dict[str, Any]:
        first, second = split(scale)
        chosen = law(first)
        shown: dict[str, Any] = {
            "probability_top": chosen.top,
            "probability_rest": chosen.rest,
            "probability_none": chosen.none,
            "epsilon_select": first,
            "certified_select": chosen.epsilon,
            "epsilon_value": second,
            "reports": reports,
        }
        if value != "none" and value != "exact":
            shown["variance_at_0"] = values.variance(value, second, 0.0)
            shown["variance_at_1"] = values.variance(value, second, 1.0)
        return shown

    return Method(
        name="fedsel",
        form=form,
        price=price,
        uses=reports,
        adjacency="replace-one",
        unit="client",
        sampler="none",
        trust="nobody",
        claimed=lambda scale, _: math.inf if value == "exact" else reports * sum(split(scale)),
        details=details,
        arithmetic="ideal" if value in values.IDEAL_ONLY else "exact",
    )


def _poisson_gaussian(rate: float) -> Callable[[float], DpEvent]:
    return lambda sigma: Poisson(rate, Gaussian(sigma))


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name} must be at least 1, not {count}")


def _rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise InputError(f"rate must be above 0 and at most 1, not {rate}")
