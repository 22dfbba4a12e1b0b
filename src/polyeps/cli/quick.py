"""Methods described by a few flags instead of an experiment: the same algorithms, built for one client's price."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import dp_accounting
from dp_accounting.dp_event import DpEvent

from polyeps.accounting import Accountant
from polyeps.accounting.certificate import Certificate, Form, SampledBy, certify
from polyeps.accounting.events import FixedSize, PureDpEvent
from polyeps.accounting.histories import fold_gaussians, split_clip_bit
from polyeps.accounting.known_cohorts import known_draws_epsilon
from polyeps.algorithms._averaging import Course, Federation
from polyeps.algorithms.cmp_fed import cmp_fed
from polyeps.algorithms.fedavg import fedavg
from polyeps.algorithms.fedhdp import fedhdp
from polyeps.algorithms.fedsel import fedsel
from polyeps.algorithms.fedsel_baselines import exact
from polyeps.core import Algorithm
from polyeps.engine.noise import SystemStreams
from polyeps.errors import InputError
from polyeps.experiment.noise_calibration import cost_of
from polyeps.mechanisms import selection, values
from polyeps.mechanisms.selection import SelectName
from polyeps.models import binary_logistic, mlp
from polyeps.training import dp_sgd, sgd

_Value = Literal["pm", "hm", "duchi", "grid-pm", "none", "exact"]


@dataclass(frozen=True)
class Quick:
    """A method, and how its flags count noise."""

    name: str
    build: Callable[[float], Algorithm]  # for a noise multiplier
    uses: int
    form: Form = "sound"
    multiplier: Callable[[float], float] = lambda sigma: sigma  # the algorithm's, for the flags' sigma
    sigma: Callable[[float], float] = lambda multiplier: multiplier  # the reverse
    details: Callable[[float, float], Mapping[str, Any]] = lambda *_: {}  # (sigma, δ) -> more figures
    settings: Mapping[str, float] = field(default_factory=dict)  # of the client

    def price(self, multiplier: float) -> DpEvent:
        """Return what one use costs."""
        return cost_of(self.build(0.0), (), {}).price(multiplier, self.settings)

    def certificate(self, sigma: float, delta: float, accountant: Accountant = "pld") -> Certificate:
        """Return the certificate of all uses with this noise."""
        if not 1e-100 <= sigma <= 1e100:  # beyond, squares have no digits
            raise InputError(f"sigma must be a finite number above 0, between 1e-100 and 1e100, not {sigma}")
        multiplier = self.multiplier(sigma)
        algorithm = self.build(multiplier)
        guaranteed = algorithm.claimed is not None
        event = self.price(multiplier) if guaranteed else dp_accounting.NonPrivateDpEvent()
        return certify(
            algorithm,
            dp_accounting.SelfComposedDpEvent(event, self.uses),
            delta,
            method=self.name,
            claimed=algorithm.claim(multiplier, self.uses, delta, self.settings) if guaranteed else math.inf,
            form=self.form,
            accountant=accountant,
            details=self.details(sigma, delta),
        )


def quick_dp_sgd(*, records: int, batch: int, steps: int, sampler: SampledBy = "poisson") -> Quick:
    """Return the local DP-SGD of one client, as WeiAvg, PFA, PFA+ and PDP-FL use it."""
    _at_least_one(records=records, batch=batch, steps=steps)
    if batch > records:
        raise InputError(f"batch {batch} is larger than the client's {records} records; make it smaller")
    kind: Any = sampler
    local = dp_sgd(binary_logistic(1), steps=steps, clip=1.0, learning_rate=1.0, batch=batch, sampler=kind)
    return Quick(
        "dp-sgd",
        lambda _: fedavg(local),
        uses=1,
        details=lambda sigma, _: {"rate": batch / records, "steps": steps, "sigma": sigma},
        settings={"records": records},
    )


def quick_fedhdp(*, rate: float, rounds: int, clip_bit_sigma: float | None = None) -> Quick:
    """Return one privacy group of FedHDP; sigma is the noise of its sum of updates."""
    _at_least_one(rounds=rounds)
    _rate(rate)
    if clip_bit_sigma is not None and not (math.isfinite(clip_bit_sigma) and clip_bit_sigma > 0):
        raise InputError(f"clip-bit-sigma must be a finite number above 0, not {clip_bit_sigma}")
    bits = math.inf if clip_bit_sigma is None else clip_bit_sigma

    def build(multiplier: float) -> Algorithm:
        federation = _federation(1, rate, rounds, multiplier)
        return fedhdp(federation, personal=False, adaptive=clip_bit_sigma is not None, clip_noise=clip_bit_sigma)

    def details(sigma: float, _: float) -> dict[str, Any]:
        shown = {"rate": rate, "rounds": rounds, "sigma": sigma, "effective_sigma": fold_gaussians(sigma, 2 * bits)}
        if clip_bit_sigma is not None:
            shown["clip_bit_sigma"] = bits
            if 2 * bits > sigma:
                shown["sigma_to_cost_as_without_bit"] = split_clip_bit(sigma, bits)
        return shown

    return Quick(
        "fedhdp",
        build,
        rounds,
        multiplier=lambda sigma: fold_gaussians(sigma, 2 * bits),
        sigma=lambda multiplier: split_clip_bit(multiplier, bits),
        details=details,
    )


def quick_cmp_fed(
    *, clients: int, cohort: int, rounds: int, sampler: SampledBy = "poisson", survivors: int | None = None
) -> Quick:
    """Return CMP-Fed; sigma is the noise of each of a round's two releases when no client drops out.

    Cohorts of a fixed size are priced for comparison only: no algorithm here draws them.
    """
    _at_least_one(clients=clients, cohort=cohort, rounds=rounds)
    honest = cohort if survivors is None else survivors
    if cohort > clients:
        raise InputError(f"cohort {cohort} is larger than the {clients} clients; make it smaller")
    if not 1 <= honest <= cohort:
        raise InputError(f"survivors must be between 1 and the cohort {cohort}, not {honest}")
    left = math.sqrt(honest / cohort)

    def build(multiplier: float) -> Algorithm:
        algorithm = cmp_fed(_federation(clients, cohort / clients, rounds, multiplier), dropouts=0.0)
        if honest < cohort:
            noisy = f"It holds as long as {honest} of the {cohort} clients drawn add their noise and keep it secret."
            algorithm = replace(algorithm, conditions=(noisy, *algorithm.conditions[1:]))
        if sampler == "poisson":
            return algorithm
        price = algorithm.round_price
        assert price is not None
        return replace(
            algorithm, adjacency="replace-one", round_price=lambda noise: FixedSize(clients, cohort, price(noise).event)
        )

    def details(sigma: float, delta: float) -> dict[str, Any]:
        effective, adjacency = fold_gaussians(sigma, sigma) * left, build(0.0).adjacency
        return {
            "rate": cohort / clients,
            "rounds": rounds,
            "sigma": sigma,
            "survivors": honest,
            "effective_sigma": effective,
            "certified_if_always_drawn": known_draws_epsilon(effective, 1.0, rounds, delta, adjacency),
        }

    return Quick(
        "cmp-fed",
        build,
        rounds,
        multiplier=lambda sigma: fold_gaussians(sigma, sigma) * left,
        sigma=lambda multiplier: multiplier * math.sqrt(2) / left,
        details=details,
    )


def quick_fedsel(
    *,
    select: SelectName,
    dimension: int,
    top: int,
    value: _Value,
    reports: int = 1,
    share: float = 0.0,
    form: Form = "sound",
) -> Quick:
    """Return FedSel, of which sigma is one over the ε of a report; `share` of that ε goes to the choice of index.

    Without a value, or with the exact one, all of it does.
    """
    _at_least_one(reports=reports)
    selection.check_selection(dimension, top, 0.0)
    if not 0 <= share <= 1:
        raise InputError(f"share must lie between 0 and 1, not {share}")
    local = sgd(binary_logistic(dimension), rate=1.0, steps=1, learning_rate=1.0)
    course = Course(1.0, 1.0, cohort=1, batches=1, epochs=reports, form=form)
    choice = 1.0 if value in ("none", "exact") else 0.0 if select == "uniform" else share

    def chosen(sigma: float) -> selection.Selection:
        return selection.selection_law(select, dimension, top, 0.0 if select == "uniform" else choice / sigma, form)

    def build(_: float) -> Algorithm:
        if value == "exact":
            return exact(local, course)
        if value != "none":
            return fedsel(local, course, select=select, value=value, share=min(choice, 1 - 1e-12), top=top)
        algorithm = fedsel(local, course, select=select, value="duchi", top=top)
        (report,) = algorithm.actions.values()
        index_only = replace(report, price=lambda noise, _: PureDpEvent(chosen(noise).epsilon))
        return replace(algorithm, actions={"report": index_only})

    def details(sigma: float, _: float) -> dict[str, Any]:
        law, of_value = chosen(sigma), (1 - choice) / sigma
        shown: dict[str, Any] = {
            "probability_top": law.top,
            "probability_rest": law.rest,
            "probability_none": law.none,
            "epsilon_select": 0.0 if select == "uniform" else choice / sigma,
            "certified_select": law.epsilon,
            "epsilon_value": of_value,
            "reports": reports,
        }
        if value != "none" and value != "exact":
            shown["variance_at_0"] = values.variance(value, of_value, 0.0)
            shown["variance_at_1"] = values.variance(value, of_value, 1.0)
        return shown

    return Quick("fedsel", build, reports, form, details=details)


def _federation(clients: int, rate: float, rounds: int, multiplier: float) -> Federation:
    """Return a federation of clients alike, with a small model that has a matrix to compress."""
    return Federation(
        rate=rate,
        rounds=rounds,
        sizes={"all": clients},
        noise_for=lambda _: {"all": multiplier},
        clip=1.0,
        learning_rate=1.0,
        noise=lambda _: SystemStreams(1),
        training=sgd(mlp(features=32, hidden=(32,)), sampler="fixed", batch=1, steps=1, learning_rate=1.0),
    )


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name} must be at least 1, not {count}")


def _rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise InputError(f"rate must be above 0 and at most 1, not {rate}")
