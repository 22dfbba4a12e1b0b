"""The server's side of papers 000 and 002 as slow plain loops over clients, in numpy and float64.

Updates are what is added to a model (the papers subtract the opposite). A client's update comes from a function
of (client, round, model); cohorts, groups and budgets are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Updates = Callable[[str, int, Vector], Vector]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Choice:
    """How a subspace is found, and by what clients are weighed."""

    rank: int | Literal["auto"] = 1
    subspace: str = "set"
    spans: Spans = ((0, -1),)
    weights: Mapping[str, float] | None = None  # by client; None: all alike

    def weight(self, client: str) -> float:
        return 1.0 if self.weights is None else self.weights[client]


@dataclass(frozen=True)
class Subspace:
    """For every span: directions as rows (k, size), and the centre they go through."""

    spans: Spans
    directions: list[NDArray[np.float64]]
    centres: list[Vector]

    def coordinates(self, vector: Vector) -> list[Vector]:
        """V_kᵀ (Δx - centre), span by span."""
        found = []
        for (a, b), directions, centre in zip(self.spans, self.directions, self.centres, strict=True):
            found.append(np.array([float(np.dot(row, vector[a:b] - centre)) for row in directions]))
        return found

    def rebuild(self, coordinates: Sequence[Vector]) -> Vector:
        """V_k times coordinates, plus the centre, span by span."""
        pieces = []
        for directions, centre, numbers in zip(self.directions, self.centres, coordinates, strict=True):
            piece = centre.copy()
            for row, number in zip(directions, numbers, strict=True):
                piece = piece + number * row
            pieces.append(piece)
        return np.concatenate(pieces)


def subspace_of(public: Mapping[str, Vector], choice: Choice) -> Subspace:
    """Algorithm 3, lines 2 to 4, in its three readings, by a full singular value decomposition."""
    clients = list(public)
    total = sum(choice.weight(client) for client in clients)
    directions, centres = [], []
    for a, b in choice.spans:
        centre = np.zeros(b - a)
        if choice.subspace == "mean":
            mean = np.zeros(b - a)
            for client in clients:
                mean += choice.weight(client) / total * public[client][a:b]
            matrix = mean[None]
        elif choice.subspace == "set":
            matrix = np.array([math.sqrt(choice.weight(c) / total) * public[c][a:b] for c in clients])
        else:
            if len(clients) > 1:
                for client in clients:
                    centre += public[client][a:b] / len(clients)
            matrix = np.array([public[client][a:b] - centre for client in clients])
        _, values, rows = np.linalg.svd(matrix, full_matrices=False)
        size = max(float(np.linalg.norm(public[client][a:b])) for client in clients)
        present = int((values > 1e-6 * size).sum())
        if choice.rank == "auto":  # Remark 3 with c = 1
            count = 0
            while count < present and (count == 0 or values[:count].sum() < values[count:present].sum()):
                count += 1
        else:
            count = min(choice.rank, present)
        directions.append(rows[:count])
        centres.append(centre)
    return Subspace(choice.spans, directions, centres)


def weighted_mean(updates: Mapping[str, Vector], choice: Choice) -> Vector:
    """Equation 4: Σ ε_m Δx_m / Σ ε_m."""
    total = sum(choice.weight(client) for client in updates)
    mean = np.zeros(len(next(iter(updates.values()))))
    for client, update in updates.items():
        mean += choice.weight(client) / total * update
    return mean


def weiavg(start: Vector, cohorts: Sequence[Sequence[str]], updates: Updates, choice: Choice) -> Vector:
    """WeiAvg, paper 000 algorithm 1; with equal weights FedAvg."""
    model = start.copy()
    for number, cohort in enumerate(cohorts):
        answers = {client: updates(client, number, model) for client in cohort}
        if answers:
            model = model + weighted_mean(answers, choice)
    return model


def projected_average(
    answers: Mapping[str, Vector], public: frozenset[str], choice: Choice
) -> tuple[Vector, Subspace | None]:
    """Paper 000 algorithm 3, paper 002 function PFA: each private update projected, then everybody averaged."""
    chosen = {client: update for client, update in answers.items() if client in public}
    if not chosen:
        return weighted_mean(answers, choice), None
    found = subspace_of(chosen, choice)
    changed = {}
    for client, update in answers.items():
        changed[client] = update if client in public else found.rebuild(found.coordinates(update))
    return weighted_mean(changed, choice), found


def pfa(
    start: Vector, cohorts: Sequence[Sequence[str]], updates: Updates, public: frozenset[str], choice: Choice
) -> Vector:
    """PFA, paper 000 algorithm 2."""
    model = start.copy()
    for number, cohort in enumerate(cohorts):
        answers = {client: updates(client, number, model) for client in cohort}
        if answers:
            model = model + projected_average(answers, public, choice)[0]
    return model


def pfa_plus(
    start: Vector, cohorts: Sequence[Sequence[str]], updates: Updates, public: frozenset[str], choice: Choice
) -> Vector:
    """PFA+, paper 000 algorithms 4 and 5: each private client sends coordinates in the last subspace."""
    model, before = start.copy(), None
    for number, cohort in enumerate(cohorts):
        answers = {client: updates(client, number, model) for client in cohort}
        if not answers:
            continue
        if before is None:  # warm-up
            step, before = projected_average(answers, public, choice)
            model = model + step
            continue
        changed = {}
        for client, update in answers.items():
            if client in public:
                changed[client] = update
            else:
                sent = before.coordinates(update)
                changed[client] = before.rebuild(sent)
        model = model + weighted_mean(changed, choice)
        chosen = {client: update for client, update in answers.items() if client in public}
        if chosen:
            before = subspace_of(chosen, choice)
    return model


def pdp_fl(
    start: Vector,
    cohorts: Sequence[Sequence[str]],
    updates: Updates,
    groups: Sequence[frozenset[str]],
    choices: Sequence[Choice],
) -> Vector:
    """Paper 002 algorithm 1, given each round's public group and weights."""
    model = start.copy()
    for number, cohort in enumerate(cohorts):
        answers = {client: updates(client, number, model) for client in cohort}
        if answers:
            model = model + projected_average(answers, groups[number], choices[number])[0]
    return model


def spans_of(model: Any, per_tensor: bool) -> Spans:
    """The tensors of a model as stretches of its vector, or all of it as one."""
    return [(part.start, part.stop) for part in model.slices.values()] if per_tensor else [(0, model.size)]
