"""Experiment -> algorithm, clients, calibrated noise: where the names of a file become objects that run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, get_type_hints

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray

from polyeps.accounting.calibration import ProgressCallback
from polyeps.accounting.certificate import Form
from polyeps.algorithms import ALGORITHMS, Entry
from polyeps.algorithms._averaging import Course, Federation
from polyeps.clients import Clients
from polyeps.core import Algorithm, Budget, Field, State
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.effective_budgets import all_promised, in_force
from polyeps.experiment.noise_calibration import claimed_scales, expected_rounds, priced, real_costs, sound_scales
from polyeps.experiment.population import Population, seed_for
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.server import Participation, Transport, check_secret_cohorts, cohort_size, serve
from polyeps.training import Training, dp_sgd, proximal, sgd


@dataclass(frozen=True, eq=False)
class Job:
    """One method with one seed, ready to run: what is public about it, and the private scales of its clients."""

    name: str
    entry: Entry
    method: config.Method
    algorithm: Algorithm
    population: Population
    budgets: tuple[Budget | None, ...] | None  # in force; None: nothing is promised, to a client or to any
    scale: NDArray[np.float64]
    participation: Participation
    tells: tuple[Field, ...]
    groups: tuple[str, ...] | None = None  # in force, where algorithms tell groups apart

    def cohort(self, ledger: Ledger | None) -> Clients:
        """The private side of all clients."""
        people = self.population
        streams = partial(SeededStreams, seed_for(people.seed, "noise"))
        memory = {
            name: torch.zeros(len(people.ids), *shape, device=people.device)
            for name, shape in self.algorithm.keeps.items()
        }
        declared = None
        if self.method.form == "published" and self.budgets is not None:
            # A published form weighs by what is claimed; its ledgers hold what that really costs.
            claimed = in_force(self.method, self.entry, people) or ()
            declared = {client: budget.epsilon for client, budget in zip(people.ids, claimed, strict=True) if budget}
        return Clients(
            ids=people.ids,
            data=people.records,
            scale=self.scale,
            streams=streams,
            repeatable=True,
            ledger=ledger,
            declared=declared,
            groups={} if self.groups is None else dict(zip(people.ids, self.groups, strict=True)),
            open=frozenset(people.ids) - self.terms.keys(),
            memory=memory,
        )

    def serve(self, transport: Transport, rounds: int, run: str, state: State | None = None, **others: Any) -> State:
        """The rounds of the job, from the beginning or from a state; others are as `server.serve` takes them."""
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
        """What each client's ledger is opened with: a budget and, since it serves this one run, the run's one price."""
        unit, adjacency = self.algorithm.unit, self.algorithm.adjacency
        return {
            client: BudgetTerms(
                budget, unit, adjacency, "fixed", plan=priced(self.algorithm)(float(self.scale[row]), row)
            )
            for row, (client, budget) in enumerate(zip(self.population.ids, self.budgets or (), strict=False))
            if budget is not None
        }

    @property
    def state(self) -> State:
        return State(self.population.start)


def prepare(
    experiment: config.Experiment,
    method: config.Method,
    population: Population,
    progress: ProgressCallback | None = None,
) -> Job:
    """One method for a population: algorithm built, noise calibrated; no record was looked at."""
    entry = entry_of(method)
    settings = experiment.training_of(method)
    budgets = in_force(method, entry, population)
    participation = _participation(experiment, population)
    uses = expected_rounds(experiment, participation, len(population.ids))
    options = checked_options(method, entry)
    if settings.rate is not None and entry.local != "training":
        raise InputError(
            f"training.rate changes nothing about {method.name}, which protects whole clients; leave it out"
        )
    groups = None
    scale = np.zeros(len(population.ids))
    if entry.local == "sums":
        uses = experiment.rounds  # everybody pays for every round
        federation = _federation(experiment, method, population, participation, budgets)
        groups = federation.groups
        build = partial(_built_for, method, entry, federation, options)
        algorithm = build(scale)
    elif entry.local == "gradient":
        course = Course(
            learning_rate=settings.learning_rate,
            clip=settings.clip,
            cohort=cohort_size(participation.share, len(population.ids)),
            batches=participation.batches(len(population.ids)),
            epochs=uses,
            form=method.form,
        )
        local = sgd(population.model, rate=1.0, steps=1, learning_rate=1.0, decay=settings.decay)
        with _naming(method):
            algorithm = entry.build(local, course, **options)
    else:
        local = _training(settings, population, budgets is not None, method.form)
        with _naming(method):
            algorithm = entry.build(local, **options)
    if budgets is not None:
        if method.form == "published" or entry.budgets == "exceeded":
            promised = all_promised(budgets)
            scale = claimed_scales(settings, promised, population, algorithm, uses)
            budgets = real_costs(scale, promised, algorithm, uses, population.ids)
        else:
            scale = sound_scales(experiment, budgets, population, algorithm, uses, progress)
    if entry.local == "sums":
        algorithm = build(scale)  # now that the noise is known, which the server's part needs
    tells: tuple[Field, ...] = ("epsilon", "examples") if experiment.budgets.disclosed else ()
    return Job(
        name=f"{method.title}-{population.seed}",
        entry=entry,
        method=method,
        algorithm=algorithm,
        population=population,
        budgets=budgets,
        scale=scale,
        participation=participation,
        tells=(*tells, "group") if "group" in algorithm.needs else tells,
        groups=groups,
    )


def _federation(
    experiment: config.Experiment,
    method: config.Method,
    population: Population,
    participation: Participation,
    budgets: Sequence[Budget | None] | None,
) -> Federation:
    """What is public about a federation that protects whole clients; its noise is not known yet."""
    if method.form == "published":
        raise InputError(
            f"{method.name} has no published form: what its paper does cannot be certified; leave out form"
        )
    check_secret_cohorts(participation)
    settings = experiment.training_of(method)
    check_batches(settings, population)

    def training(learning_rate: Any, pull: Any) -> Training:
        return proximal(
            population.model,
            sampler="fixed",  # whole clients are protected, so how they draw batches is their own affair
            batch=settings.batch,
            steps=settings.local_steps,
            learning_rate=learning_rate,
            pull=pull,
            momentum=settings.momentum,
            decay=settings.decay,
        )

    everyone = budgets or (None,) * len(population.ids)
    own = population.groups if tuple(everyone) == population.budgets else None
    groups = own or tuple("open" if budget is None else f"ε = {budget.epsilon:g}" for budget in everyone)
    noise = partial(SeededStreams, seed_for(population.seed, "server noise"), sorted(set(groups)))
    return Federation(
        rate=participation.share if participation.kind == "poisson" else 1.0,
        rounds=experiment.rounds,
        groups=groups,
        scales=dict.fromkeys(sorted(set(groups)), 0.0),
        clip=settings.clip,
        learning_rate=settings.learning_rate,
        noise=noise,
        training=training,
        delta=min((budget.delta for budget in everyone if budget is not None), default=0.0),
    )


def _built_for(
    method: config.Method, entry: Entry, federation: Federation, options: dict[str, Any], scale: NDArray[np.float64]
) -> Algorithm:
    """The algorithm for a federation with this noise, by client."""
    of_group = dict(zip(federation.groups, scale.tolist(), strict=True))
    with _naming(method):
        return entry.build(replace(federation, scales={name: of_group[name] for name in federation.scales}), **options)


@contextmanager
def _naming(method: config.Method) -> Iterator[None]:
    """Say which of several methods something is wrong with."""
    try:
        yield
    except InputError as problem:
        raise InputError(f"algorithm ({method.title}): {problem}") from None


def _participation(experiment: config.Experiment, population: Population) -> Participation:
    share = _share(experiment)
    wanted = cohort_size(share, len(population.ids))
    # With scales of their own all clients leave at about the same time, and a few stragglers would end the run
    # with a noisy mean; under a common scale leaving early is the rule, and the rest go on.
    quorum = experiment.participation.quorum or (1 if experiment.budgets.scale else wanted)
    if quorum > len(population.ids):
        raise InputError(
            f"participation.quorum is {quorum}, more than the {len(population.ids)} clients there are, so no round "
            "could begin; lower it"
        )
    including: frozenset[str] = frozenset()
    if experiment.participation.with_public:
        including = frozenset(client for client, yes in zip(population.ids, population.liberal, strict=True) if yes)
    return Participation(experiment.participation.kind, share, quorum, including)


def entry_of(method: config.Method) -> Entry:
    if method.name not in ALGORITHMS:
        raise InputError(config.unknown_key(method.name, method.name, ALGORITHMS, "algorithm"))
    return ALGORITHMS[method.name]


def checked_options(method: config.Method, entry: Entry) -> dict[str, Any]:
    """An algorithm's own options, checked against what its builder takes."""
    parameters = inspect.signature(entry.build).parameters.values()
    own = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in entry.options]
    hints = get_type_hints(entry.build, include_extras=True)
    fields: dict[str, Any] = {one.name: (hints[one.name], one.default) for one in own}
    for key in method.options:
        if key not in fields:
            known = [*fields, *config.Method.model_fields]
            raise InputError(config.unknown_key(f"algorithm.{key} (of {method.name})", key, known))
        if key in entry.idle:
            raise InputError(f"algorithm.{key} changes nothing about {method.name}, which adds no noise; leave it out")
    shape: type[config.Section] = pydantic.create_model("Options", __base__=config.Section, **fields)
    return {**config.checked(shape, method.options, f"algorithm ({method.name})").__dict__, **entry.options}


def check_batches(settings: config.Training, population: Population) -> None:
    """Refuse a batch that some client cannot fill."""
    for client, size in zip(population.ids, population.partition.sizes.tolist(), strict=True):
        if size < settings.batch:
            raise InputError(
                f"client {client!r} has {size} records, fewer than training.batch = {settings.batch}; "
                "make the batch smaller"
            )


def _training(settings: config.Training, population: Population, private: bool, form: Form) -> Training:
    sizes = population.partition.sizes
    if settings.rate is not None:
        if form == "published":
            raise InputError("training.rate: a published form draws batches of a fixed size; leave out rate")
        drawing: dict[str, Any] = {"rate": settings.rate}
        priced: dict[str, Any] = {"batch": settings.batch, "hide_records": True}
    elif form == "published":
        check_batches(settings, population)
        drawing, priced = {"sampler": "fixed", "batch": settings.batch}, {"records_held": sizes}
    else:
        check_batches(settings, population)
        drawing, priced = {"rate": settings.batch / sizes}, {"batch": settings.batch}
    shared: dict[str, Any] = {
        **drawing,
        "steps": settings.local_steps,
        "learning_rate": settings.learning_rate,
        "momentum": settings.momentum,
        "decay": settings.decay,
    }
    if not private:
        return sgd(population.model, **shared)
    return dp_sgd(population.model, clip=settings.clip, **priced, **shared)


def _share(experiment: config.Experiment) -> float:
    told = experiment.participation
    if told.kind == "full" and told.share != 1:
        raise InputError(
            f'participation.share = {told.share:g} changes nothing with kind = "full", which asks everybody; leave it '
            "out, or choose another kind"
        )
    return told.share
