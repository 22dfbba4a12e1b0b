"""Simulated federations for trials: the only place that knows how the library prepares and serves an experiment."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from polyeps.aggregation.client_groups import split_by_epsilon
from polyeps.aggregation.noise_estimation import estimate_noise_variances
from polyeps.algorithms._personal_models import personal_models
from polyeps.core import Replies, State, Task
from polyeps.data.imdb import load_imdb
from polyeps.experiment import config
from polyeps.experiment.evaluation import by_group, measure
from polyeps.experiment.job import prepare
from polyeps.experiment.population import Population, populate
from polyeps.experiment.registry import Parts
from polyeps.ledger import Ledger
from polyeps.server import Round
from polyeps.transport.memory import InMemory
from polyeps_reproductions.reference_algorithms import ALGORITHMS_OF_CODE
from polyeps_reproductions.reference_models import LENGTH, MODELS_OF_CODE, WORDS

Observe = Callable[[Round, State], None]
MEBIBYTE = 2**20
OF_CODE = Parts(algorithms=ALGORITHMS_OF_CODE, models=MODELS_OF_CODE)


class Listening(InMemory):
    """A transport in memory that counts the values in replies and the bytes of every client."""

    def __init__(self, keeps_norms: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.keeps_norms = keeps_norms
        self.norms: dict[str, list[float]] = {}
        self.noise: dict[str, list[float]] = {}  # standard deviation by coordinate, estimated as PDP-FL's server does
        self.values = 0  # bytes of tensors alone, without framing: PFA's way to count

    def __call__(self, task: Task) -> Replies:
        replies = super().__call__(task)
        self.values += sum(tensor.numel() * tensor.element_size() for tensor in replies.payload.values())
        if self.keeps_norms and "update" in replies.payload:
            lengths = replies.payload["update"].norm(dim=1).tolist()
            for client, length in zip(replies.ids, lengths, strict=True):
                self.norms.setdefault(client, []).append(round(float(length), 6))
            levels = estimate_noise_variances(replies.payload["update"][:, None]).sqrt().tolist()
            for client, level in zip(replies.ids, levels, strict=True):
                self.noise.setdefault(client, []).append(float(f"{level:.6g}"))
        return replies


class Simulated:
    """Clients in this process, prepared and served by the library; their ledger lies in a temporary folder."""

    def __init__(self, experiment: config.Experiment, seed: int, folder: Path, device: str, norms: bool) -> None:
        self.rounds = experiment.rounds
        self.population = population(experiment, seed, device)
        self.job = prepare(experiment, experiment.algorithm[0], self.population, parts=OF_CODE)
        self.ledger = None if self.job.budgets is None else Ledger.create(folder / "ledger.db", self.job.terms)
        self.clients = self.job.clients(self.ledger)
        self.transport = Listening(norms, self.clients, self.job.algorithm, self.job.discloses)
        self.tells_groups = experiment.participation.with_public
        self.traffic: dict[str, list[int]] = {client: [0, 0] for client in self.population.ids}

    def serve(self, rounds: int, run: str, observe: Observe) -> State:
        """Run the rounds and return the last state."""

        def count(round: Round, state: State) -> None:
            for client, (received, sent) in round.traffic.items():
                self.traffic[client][0] += received
                self.traffic[client][1] += sent
            observe(round, state)

        return self.job.serve(self.transport, rounds, run, observe=count)

    def goes_on(self, active: Sequence[str]) -> bool:
        """Return whether a further round can begin with these clients."""
        return self.job.participation.goes_on(active)

    def accuracy(self, state: State) -> float:
        """Return the accuracy of the current model on records that no client trains on."""
        return measure(self.population, state.model)["accuracy"]

    def measured(self, state: State) -> dict[str, Any]:
        """Return privacy, traffic and other measurements after the last round."""
        population = self.population
        found: dict[str, Any] = {**self._traffic(population.ids)}
        if self.tells_groups:
            found |= {f"{way}_private": total for way, total in self._traffic(self._low_epsilon()).items()}
        if population.own_tests is not None:
            found["own"] = by_group(population, state.model, personal_models(self.clients.memory, state.model))
        if self.transport.keeps_norms:
            budgets = [budget.epsilon for budget in population.budgets if budget]
            found |= {"norms": self.transport.norms, "noise": self.transport.noise, "epsilons": budgets}
        return {
            **found,
            **self._spent(),
            "uplink": self.transport.values / MEBIBYTE,
            "noise_multipliers": sorted(set(self.job.noise_multiplier.tolist())),
            "parameters": population.model.size,
            "clients": len(population.ids),
        }

    def _traffic(self, clients: Sequence[str]) -> dict[str, int]:
        return {way: sum(self.traffic[client][place] for client in clients) for place, way in enumerate(("down", "up"))}

    def _low_epsilon(self) -> list[str]:
        """The clients that PFA calls private."""
        public = self.population.high_epsilon
        if self.job.method.form == "published":
            public = split_by_epsilon(np.array([one.epsilon for one in self.population.budgets if one]), "top")
        return [client for client, yes in zip(self.population.ids, public, strict=True) if not yes]

    def _spent(self) -> dict[str, float | None]:
        """The largest ε that a client has spent, and the largest share of a budget; None without a guarantee."""
        if self.ledger is None or self.job.budgets is None:
            return {"spent": None, "spent_share": None}
        each = [
            (self.ledger.spent(client), budget.epsilon)
            for client, budget in zip(self.population.ids, self.job.budgets, strict=True)
            if budget is not None
        ]
        self.ledger.close()
        return {
            "spent": max(spent for spent, _ in each),
            "spent_share": max(spent / epsilon for spent, epsilon in each),
        }


def population(experiment: config.Experiment, seed: int, device: str = "cpu") -> Population:
    """Return the clients of an experiment; those of the last call are kept, since trials come ordered by them."""
    values = experiment.as_dict()
    settings = {name: values[name] for name in ("data", "budgets", "model")}
    return _population(json.dumps(settings, sort_keys=True), seed, device)


@lru_cache(maxsize=1)
def _population(settings: str, seed: int, device: str) -> Population:
    experiment = config.experiment(json.loads(settings))
    reviews = load_imdb(download=None, vocabulary=WORDS, length=LENGTH) if experiment.data.name == "imdb" else None
    return populate(experiment, seed, device, replace(OF_CODE, data=reviews))
