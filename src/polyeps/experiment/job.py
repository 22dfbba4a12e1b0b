"""Turn an experiment into jobs: algorithm, clients and calibrated noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.accounting.calibration import ProgressCallback
from polyeps.accounting.certificate import Form
from polyeps.algorithms import Entry
from polyeps.algorithms._averaging import Course, Federation
from polyeps.algorithms._server_optimiser import ServerOptimiser, with_server_optimiser
from polyeps.clients import Clients
from polyeps.core import Algorithm, Budget, Field, PerClient, State
from polyeps.engine.noise import SecretStreams, SeededStreams
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.effective_budgets import effective_budgets, guaranteed, whose_budgets
from polyeps.experiment.noise_calibration import Cost, claimed_noise, cost_of, expected_rounds, real_costs, sound_noise
from polyeps.experiment.population import Population
from polyeps.experiment.rate_calibration import rates_by_budget
from polyeps.experiment.registry import BUILT_IN, Parts, checked_options, entry_of
from polyeps.experiment.seeds import seed_for
from polyeps.experiment.work_plan import WorkPlanner, check_planned, gains_of_plan, planned_work, plans_work
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.participation import Participation, check_secret_cohorts, cohort_size
from polyeps.server import Transport, serve
from polyeps.training import Training, dp_sgd, sgd, whole_gradient


@dataclass(frozen=True)
class Rounds:
    """The rounds of a run, and how many of them a client is charged for."""

    planned: int
    share: float  # the probability that a client is charged for a round
    expected: int  # the number of rounds that noise is calibrated for
    fixed: bool = False  # whether every client is charged for exactly those: cohorts of an epoch


@dataclass(frozen=True, eq=False)
class Job:
    """One method with one seed, ready to run: its algorithm, and the budgets and noise of its clients."""

    name: str
    entry: Entry
    method: config.Method
    algorithm: Algorithm
    population: Population
    budgets: tuple[Budget | None, ...] | None  # effective ones; None: no guarantee, for one client or for all
    noise_multiplier: NDArray[np.float64]
    settings: PerClient  # public numbers that differ between clients
    participation: Participation
    rounds: Rounds
    discloses: tuple[Field, ...]
    groups: tuple[str, ...] | None = None  # effective privacy groups, where an algorithm has groups
    # -> how many times less noise each client has than without planning; None where no work is planned
    gains: Callable[[], list[float]] | None = None

    def clients(self, ledger: Ledger | None) -> Clients:
        """Return the private side of all clients."""
        population = self.population
        declared = None
        if self.method.form == "published" and self.budgets is not None:
            # A published form weights by the claimed ε; its ledgers hold the real cost.
            claimed = guaranteed(effective_budgets(self.method, self.entry, population) or ())
            declared = np.array([budget.epsilon for budget in claimed])
        found = Clients(
            ids=population.ids,
            data=population.records,
            noise_multiplier=self.noise_multiplier,
            streams=partial(SeededStreams, seed_for(population.seed, "noise")),
            repeatable=True,
            ledger=ledger,
            settings=self.settings,
            groups=self.groups,
            guaranteed=np.array([client in self.terms for client in population.ids]),
            declared=declared,
        )
        found.make_room(self.algorithm)
        return found

    def serve(self, transport: Transport, rounds: int, run: str, state: State | None = None, **others: Any) -> State:
        """Run the rounds of the job, from the beginning or from a state; others are as `server.serve` takes them."""
        return serve(
            self.algorithm,
            transport,
            (state or self.state).to(self.population.device),
            rounds=rounds,
            participation=self.participation,
            seed=seed_for(self.population.seed, "participation"),
            run=run,
            **others,
        )

    @cached_property
    def terms(self) -> dict[str, BudgetTerms]:
        """The terms of each client's account: a budget and, since it serves this one run, the run's one price."""
        if self.budgets is None:
            return {}
        cost = cost_of(self.algorithm, self.population.ids, self.settings)
        return cost.terms_of_all(self.budgets, self.noise_multiplier)

    @property
    def whose_budgets(self) -> str:
        """Whose budgets are effective; where all clients have the same one, the strictest is each client's own."""
        if self.method.form != "sound":
            return "published"
        return "own" if self.budgets == self.population.budgets else whose_budgets(self.method, self.entry)

    @property
    def state(self) -> State:
        return State(self.population.start)


def prepare(
    experiment: config.Experiment,
    method: config.Method,
    population: Population,
    progress: ProgressCallback | None = None,
    parts: Parts = BUILT_IN,
    secret: bytes | None = None,
    *,
    known: NDArray[np.float64] | None = None,
) -> Job:
    """Build one method's algorithm for a population and calibrate its noise, without looking at records.

    A deployed server's noise comes from its secret, otherwise from the seed. `known` noise needs no calibration.
    """
    entry = entry_of(method, parts)
    settings = experiment.training_of(method)
    budgets = effective_budgets(method, entry, population)
    participation = _participation(experiment, population)
    uses = expected_rounds(experiment, participation, len(population.ids))
    options = checked_options(method, entry)
    optimiser = ServerOptimiser(**experiment.server_of(method).model_dump())
    if settings.rate is not None and entry.local != "training":
        raise InputError(f"training.rate has no effect on {method.name}, which protects whole clients; leave it out")
    if settings.kind == "gradient" and entry.local != "training":
        why = "protects sums of whole updates" if entry.local == "sums" else "has a gradient step of its own"
        raise InputError(
            f'training.kind = "gradient" does not apply to {method.name}, which {why}; give this algorithm '
            'training = { kind = "sgd" }'
        )
    if plans_work(settings):
        check_planned(settings, method, entry.local, experiment.budgets.noise_multiplier)
    if entry.rates:
        _check_rates_are_free(settings, method)
    groups = gains = None
    noise = np.zeros(len(population.ids))
    own: dict[str, NDArray[Any]] = {"records": population.sizes}
    if entry.local == "sums":
        groups = _groups(population, budgets)

        def noise_for(price: Callable[[float], Any]) -> Mapping[str, float]:
            """Calibrate every client's noise to the algorithm's own price; all clients of a group have the same."""
            if known is not None:
                noise[:] = known
            elif budgets is not None:
                cost = Cost(lambda multiplier, _: price(multiplier), population.ids, own, "client", "zero-out")
                noise[:] = sound_noise(experiment, budgets, cost, experiment.rounds, progress)
            largest: dict[str, float] = {}
            for name, one in zip(groups, noise.tolist(), strict=True):
                largest[name] = max(one, largest.get(name, 0.0))
            noise[:] = [largest[name] for name in groups]  # one noise for a sum, whatever δ its clients have
            return largest

        federation = _federation(experiment, method, population, participation, budgets, groups, noise_for, secret)
        given: tuple[Any, ...] = (federation,)
    elif entry.local == "gradient":
        course = Course(
            learning_rate=settings.learning_rate,
            clip=settings.clip,
            cohort=cohort_size(participation.share, len(population.ids)),
            batches=participation.batches(len(population.ids)),
            epochs=uses,
            form=method.form,
        )
        given = (sgd(population.trained, rate=1.0, steps=1, learning_rate=1.0, decay=settings.decay), course)
    else:
        training = _training(settings, population, budgets is not None, method.form)
        if plans_work(settings) and known is None:
            planner = None
            if budgets is not None:
                planner = WorkPlanner(training, population.sizes, guaranteed(budgets), uses, progress)
            own |= planned_work(planner, settings, len(population.ids))
            gains = None if planner is None else partial(gains_of_plan, planner, settings, own)
        given = (replace(training, reach=training.reach * optimiser.gain),)
    try:
        algorithm = with_server_optimiser(entry.build(*given, **options), optimiser, common=entry.common)
        cost = cost_of(algorithm, population.ids, own) if budgets is not None else None
    except InputError as problem:
        raise InputError(f"algorithm ({method.title}): {problem}") from None
    if algorithm.unit != "client" and algorithm.person != population.trained.person:
        raise InputError(
            f"algorithm ({method.title}) protects each {algorithm.person or algorithm.unit}, but data.unit is "
            f"{population.trained.person or 'a record'}; give it unit=training.unit, person=training.model.person"
        )
    all_pay = algorithm.round_price is not None  # drawn or not
    if all_pay:
        check_secret_cohorts(participation)
        uses = experiment.rounds
    if known is not None:
        noise = known
    elif budgets is not None and cost is not None and entry.local != "sums":
        if method.form == "published" or whose_budgets(method, entry) == "exceeded":
            claimed = guaranteed(budgets)
            noise = claimed_noise(claimed, cost, uses)
            budgets = real_costs(noise, claimed, cost, uses)
        elif entry.rates:
            common, batch = experiment.budgets.noise_multiplier, float(settings.batch)
            noise, own["rate"] = rates_by_budget(budgets, cost, population.sizes, batch, uses, common, progress)
        else:
            noise = sound_noise(experiment, budgets, cost, uses, progress)
    discloses: tuple[Field, ...] = ("epsilon", "examples") if experiment.budgets.disclosed else ()
    return Job(
        name=f"{method.title}-{population.seed}",
        entry=entry,
        method=method,
        algorithm=algorithm,
        population=population,
        budgets=budgets,
        noise_multiplier=noise,
        settings=own,
        participation=participation,
        rounds=Rounds(
            experiment.rounds,
            1.0 if all_pay else participation.charged(len(population.ids)),
            uses,
            participation.kind == "epoch",
        ),
        discloses=(*discloses, "group") if "group" in algorithm.needs else discloses,
        groups=groups,
        gains=gains,
    )


def _check_rates_are_free(settings: config.TrainingSettings, method: config.Method) -> None:
    """Refuse settings of the sampling rate for an algorithm that finds a rate for every client's budget."""
    fixed = {
        "training.rate": settings.rate is not None,
        "form": method.form == "published",
        'training.kind = "gradient"': settings.kind == "gradient",
        'training.batch = "auto" and local_steps = "auto"': plans_work(settings),
    }
    if given := [name for name, yes in fixed.items() if yes]:
        raise InputError(f"{method.name} finds a sampling rate for every client's budget; leave out {given[0]}")


def _groups(population: Population, budgets: Sequence[Budget | None] | None) -> tuple[str, ...]:
    """Return every client's privacy group: the level it chose, or else its effective ε."""
    everyone = tuple(budgets or (None,) * len(population.ids))
    own = population.groups if everyone == population.budgets else None
    return own or tuple("open" if budget is None else f"ε = {budget.epsilon:g}" for budget in everyone)


def _federation(
    experiment: config.Experiment,
    method: config.Method,
    population: Population,
    participation: Participation,
    budgets: Sequence[Budget | None] | None,
    groups: Sequence[str],
    noise_for: Callable[[Callable[[float], Any]], Mapping[str, float]],
    secret: bytes | None,
) -> Federation:
    """Return the public settings of a federation that protects whole clients."""
    if method.form == "published":
        raise InputError(f"{method.name} has no published form: its paper's cannot be certified; leave out form")
    check_secret_cohorts(participation)
    settings = experiment.training_of(method)
    check_batches(settings, population)
    counts = Counter(groups)
    return Federation(
        rate=participation.share if participation.kind == "poisson" else 1.0,
        rounds=experiment.rounds,
        sizes={name: counts[name] for name in sorted(counts)},
        noise_for=noise_for,
        clip=settings.clip,
        noise=partial(SeededStreams, seed_for(population.seed, "server noise"), sorted(counts))
        if secret is None
        else partial(SecretStreams, secret, sorted(counts)),
        # Whole clients are protected, so the way they draw batches does not matter to the guarantee.
        training=sgd(population.trained, sampler="fixed", **_shared(settings), **_drawing(settings)),
        learning_rate=settings.learning_rate,
        delta=min((budget.delta for budget in budgets or () if budget is not None), default=0.0),
    )


def _participation(experiment: config.Experiment, population: Population) -> Participation:
    given = experiment.participation
    if given.kind == "full" and given.share != 1:
        raise InputError(
            f'participation.share = {given.share:g} changes nothing with kind = "full", which asks all clients; leave '
            "it out, or choose another kind"
        )
    # With noise calibrated to each client, all leave at about the same time, and the last few would end the run with a
    # noisy mean; under one noise multiplier for all, leaving early is the rule, and the rest go on.
    wanted = cohort_size(given.share, len(population.ids))
    quorum = given.quorum or (1 if experiment.budgets.noise_multiplier else wanted)
    if quorum > len(population.ids):
        raise InputError(
            f"participation.quorum is {quorum}, more than the {len(population.ids)} clients there are, so no round "
            "could begin; lower it"
        )
    including: frozenset[str] = frozenset()
    if given.with_public:
        including = frozenset(one for one, high in zip(population.ids, population.high_epsilon, strict=True) if high)
    return Participation(given.kind, given.share, quorum, including)


def check_batches(settings: config.TrainingSettings, population: Population) -> None:
    """Refuse a batch that some client cannot fill."""
    held = f"{population.trained.person or 'record'}s"
    size, client = min(zip(population.sizes.tolist(), population.ids, strict=True))
    if settings.batch != "auto" and size < settings.batch:
        raise InputError(
            f"client {client!r} has {size} {held} to train on, fewer than training.batch = {settings.batch}; make the "
            f"batch {size} or less"
        )


def _training(settings: config.TrainingSettings, population: Population, private: bool, form: Form) -> Training:
    if settings.kind == "gradient":
        if form == "published":
            raise InputError('training.kind = "gradient" is in no paper, so it has no published form; leave out form')
        return whole_gradient(population.trained, clip=settings.clip if private else None, decay=settings.decay)
    if settings.rate is not None:
        if form == "published":
            raise InputError("training.rate: a published form draws batches of a fixed size; leave out rate")
        drawing: dict[str, Any] = {"rate": settings.rate}
        hiding: dict[str, Any] = {**_drawing(settings), "hide_records": True}
    else:
        check_batches(settings, population)
        drawing = {**_drawing(settings), "sampler": "fixed" if form == "published" else "poisson"}
        hiding = {}
    if not private:
        return sgd(population.trained, **drawing, **_shared(settings))
    return dp_sgd(population.trained, clip=settings.clip, **drawing, **hiding, **_shared(settings))


def _drawing(settings: config.TrainingSettings) -> dict[str, Any]:
    """Return the batch of all clients, unless each has its own."""
    return {} if plans_work(settings) else {"batch": settings.batch}


def _shared(settings: config.TrainingSettings) -> dict[str, Any]:
    return {
        "steps": 1 if settings.local_steps == "auto" else settings.local_steps,
        "learning_rate": settings.learning_rate,
        "momentum": settings.momentum,
        "decay": settings.decay,
    }
