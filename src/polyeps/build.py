"""Experiment -> algorithm, clients, calibrated noise: where the names of a file become objects that run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray

from polyeps import config
from polyeps.accounting import cache
from polyeps.accounting.afford import known_epsilon
from polyeps.accounting.calibration import Progress, calibrate_each
from polyeps.accounting.events import history_of
from polyeps.accounts import Account, Terms
from polyeps.algorithms import ALGORITHMS, Entry
from polyeps.algorithms.blocks import Course
from polyeps.certificate import Form
from polyeps.client import Cohort
from polyeps.core import Action, Algorithm, Budget, Field, State
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.grouping import split_by_epsilon
from polyeps.ledger import Ledger
from polyeps.populate import Population, seed_for
from polyeps.server import Participation, cohort_size
from polyeps.training import Training, dp_sgd, sgd


@dataclass(frozen=True, eq=False)
class Job:
    """One method with one seed, ready to run: what is public about it, and the private scales of its clients."""

    name: str
    entry: Entry
    method: config.Method
    algorithm: Algorithm
    population: Population
    budgets: tuple[Budget, ...] | None  # in force; None: nothing is promised
    scale: NDArray[np.float64]
    participation: Participation
    tells: tuple[Field, ...]

    def cohort(self, ledger: Ledger | None) -> Cohort:
        """The private side of all clients."""
        people = self.population
        streams = partial(SeededStreams, seed_for(people.seed, "noise"))
        memory = {
            name: torch.zeros(len(people.ids), *shape, device=people.device)
            for name, shape in self.algorithm.memory.items()
        }
        declared = None
        if self.method.form == "published" and self.budgets is not None:
            # A published form weighs by what is claimed; its ledgers hold what that really costs.
            claimed = _in_force(self.method, self.entry, people.budgets) or ()
            declared = {client: budget.epsilon for client, budget in zip(people.ids, claimed, strict=True)}
        return Cohort(people.ids, people.records, self.scale, streams, True, ledger, declared, memory=memory)

    @property
    def terms(self) -> dict[str, Terms]:
        """What each client's ledger is opened with."""
        agreed = zip(self.population.ids, self.budgets or (), strict=self.budgets is not None)
        return {client: Terms(budget, self.algorithm.unit, self.algorithm.adjacency) for client, budget in agreed}

    @property
    def state(self) -> State:
        return State(self.population.start)


def prepare(
    experiment: config.Experiment, method: config.Method, population: Population, progress: Progress | None = None
) -> Job:
    """One method for a population: algorithm built, noise calibrated; no record was looked at."""
    entry = entry_of(method)
    settings = experiment.training_of(method)
    budgets = _in_force(method, entry, population.budgets)
    participation = _participation(experiment, population)
    uses = expected_rounds(experiment, participation, len(population.ids))
    if entry.local == "gradient":
        course = Course(
            learning_rate=settings.learning_rate,
            clip=settings.clip,
            cohort=cohort_size(participation.share, len(population.ids)),
            batches=participation.batches(len(population.ids)),
            epochs=uses,
            form=method.form,
        )
        local = sgd(population.model, rate=1.0, steps=1, learning_rate=1.0, decay=settings.decay)
        algorithm = entry.build(local, course, **checked_options(method, entry))
    else:
        local = _training(settings, population, budgets is not None, method.form)
        algorithm = entry.build(local, **checked_options(method, entry))
    scale = np.zeros(len(population.ids))
    if budgets is not None:
        if method.form == "published" or entry.budgets == "exceeded":
            scale = _claimed_scales(settings, budgets, population, algorithm, uses)
            budgets = _real_costs(scale, budgets, algorithm, uses, population.ids)
        else:
            scale = _scales(experiment, budgets, population, algorithm, uses, progress)
    return Job(
        name=f"{method.title}-{population.seed}",
        entry=entry,
        method=method,
        algorithm=algorithm,
        population=population,
        budgets=budgets,
        scale=scale,
        participation=participation,
        tells=("epsilon", "examples") if experiment.budgets.disclosed else (),
    )


def _participation(experiment: config.Experiment, population: Population) -> Participation:
    share = _share(experiment)
    wanted = cohort_size(share, len(population.ids))
    # With scales of their own all clients leave at about the same time, and a few stragglers would end the run
    # with a noisy mean; under a common scale leaving early is the rule, and the rest go on.
    quorum = experiment.participation.quorum or (1 if experiment.budgets.scale else wanted)
    including: frozenset[str] = frozenset()
    if experiment.participation.with_public:
        liberal = split_by_epsilon(np.array([budget.epsilon for budget in population.budgets]))
        including = frozenset(client for client, yes in zip(population.ids, liberal, strict=True) if yes)
    return Participation(experiment.participation.kind, share, min(quorum, wanted), including)


def entry_of(method: config.Method) -> Entry:
    if method.name not in ALGORITHMS:
        raise InputError(config.unknown_key(f"algorithm.name = {method.name}", method.name, ALGORITHMS))
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
    shape: type[pydantic.BaseModel] = pydantic.create_model("Options", **fields)
    return {**config.checked(shape, method.options, f"algorithm ({method.name})").__dict__, **entry.options}


def _in_force(method: config.Method, entry: Entry, own: Sequence[Budget]) -> tuple[Budget, ...] | None:
    """The budgets a method runs under: the clients' own, or those a control pretends."""
    if method.epsilon is not None:
        if entry.budgets not in ("strictest", "most-liberal"):
            raise InputError(
                f"algorithm.epsilon is for the controls minimum and maximum; {method.name} runs under "
                + ("no budget" if entry.budgets == "none" else "the clients' own budgets")
            )
        return tuple(Budget(method.epsilon, budget.delta) for budget in own)
    match entry.budgets:
        case "none":
            return None
        case "strictest":
            return (min(own),) * len(own)
        case "most-liberal":
            return (max(own),) * len(own)
        case _:
            return tuple(own)


def _training(settings: config.Training, population: Population, private: bool, form: Form) -> Training:
    sizes = population.partition.sizes
    for client, size in zip(population.ids, sizes.tolist(), strict=True):
        if size < settings.batch:
            raise InputError(
                f"client {client!r} has {size} records, fewer than training.batch = {settings.batch}; "
                "make the batch smaller"
            )
    if form == "published":
        drawing: dict[str, Any] = {"sampler": "fixed", "batch": settings.batch}
        priced: dict[str, Any] = {"records_held": sizes}
    else:
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
    return 1.0 if experiment.participation.kind == "full" else experiment.participation.share


def expected_rounds(experiment: config.Experiment, participation: Participation, clients: int) -> int:
    """How many rounds a client joins on average, rounded up: what its noise is calibrated for."""
    if participation.kind == "epoch":
        return math.ceil(experiment.rounds / participation.batches(clients))
    return math.ceil(experiment.rounds * participation.share - 1e-9)


def _claimed_scales(
    settings: config.Training, claimed: Sequence[Budget], population: Population, algorithm: Algorithm, rounds: int
) -> NDArray[np.float64]:
    """The noise a paper takes for a claimed budget.

    For local training the closed form of paper 000's code, σ = 10·(B/N)·√(T·log10(1/δ))/ε. With that code's batches
    of fixed size the sound cost is not the ε it claims: below it where ε is small, above it where ε is large.
    """
    if _priced(algorithm).pure:
        return _pure_scales(claimed, rounds)
    steps = rounds * settings.local_steps
    return np.array(
        [
            10 * settings.batch / size * math.sqrt(steps * math.log10(1 / budget.delta)) / budget.epsilon
            for size, budget in zip(population.partition.sizes.tolist(), claimed, strict=True)
        ]
    )


def _real_costs(
    scale: NDArray[np.float64], claimed: Sequence[Budget], algorithm: Algorithm, rounds: int, ids: Sequence[str]
) -> tuple[Budget, ...]:
    """The budgets some noise really takes: ledgers are opened with them, so that a run can be as the paper's was."""
    price = priced_action(algorithm)
    costs = [
        known_epsilon(history_of(price(float(sigma), row), rounds), budget.delta, algorithm.adjacency, "pld")
        for row, (sigma, budget) in enumerate(zip(scale, claimed, strict=True))
    ]
    if math.inf in costs:
        row = costs.index(math.inf)
        who = f"client {ids[row]!r}: the published noise for ε = {claimed[row].epsilon:g}"
        raise InputError(f"{who} is too small for anything to be certified; run more rounds, or the sound form")
    return tuple(Budget(cost, budget.delta) for cost, budget in zip(costs, claimed, strict=True))


def _pure_scales(budgets: Sequence[Budget], uses: int) -> NDArray[np.float64]:
    """Where costs simply add, every use may cost ε/uses; a few last digits less, so that float sums stay within ε."""
    return uses / np.array([budget.epsilon for budget in budgets]) * (1 + 2.0**-48)


def _priced(algorithm: Algorithm) -> Action:
    return next(action for action in algorithm.actions.values() if action.price is not None)


def priced_action(algorithm: Algorithm) -> Callable[[float, int], Any]:
    """What a round costs: a client does one of the priced actions in a round, and they all cost the same."""
    price = _priced(algorithm).price
    assert price is not None
    return price


def _scales(
    experiment: config.Experiment,
    budgets: Sequence[Budget],
    population: Population,
    algorithm: Algorithm,
    uses: int,
    progress: Progress | None,
) -> NDArray[np.float64]:
    """Every client's noise: what spends its budget over the rounds it can expect, or one scale for all."""
    price = priced_action(algorithm)
    common = experiment.budgets.scale
    if common is None and _priced(algorithm).pure and (uses == 1 or not any(budget.delta for budget in budgets)):
        return _pure_scales(budgets, uses)
    if common is None:
        try:
            return calibrate_each(
                budgets,
                price,
                uses,
                adjacency=algorithm.adjacency,
                directory=cache.default_directory(),
                progress=progress,
            ).scale
        except InputError as problem:
            strictest = min(budgets)
            client = population.ids[list(budgets).index(strictest)]
            raise InputError(
                f"client {client!r} cannot afford the plan with ε = {strictest.epsilon:g}, δ = {strictest.delta:g}: "
                f"{problem}; Gaussian noise needs a delta above 0"
            ) from None
    for row, (client, budget) in enumerate(zip(population.ids, budgets, strict=True)):
        account = Account(Terms(budget, algorithm.unit, algorithm.adjacency))
        once = account.with_charge(price(common, row), 1, algorithm.unit)
        if not account.affords(once):
            raise InputError(
                f"client {client!r} cannot afford a single round: with budgets.scale = {common:g} one costs "
                f"ε = {account.spent(once):.4g}, and its budget is {budget.epsilon:g}; raise the scale, or leave it "
                "out so that every client gets its own"
            )
    return np.full(len(budgets), common)
