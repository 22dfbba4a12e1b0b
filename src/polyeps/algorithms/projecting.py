"""What PFA, PFA+ and PDP-FL share: directions from the public updates, and the mean over both groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyeps import aggregation
from polyeps.aggregation import Basis, basis_from_tensors, random_basis
from polyeps.algorithms.blocks import ask_updates, mean, step, updates_of
from polyeps.core import Action, Ask, Payload, State, Task, Work
from polyeps.training import Training

Rank = Annotated[int, Field(ge=1)] | Literal["auto"]  # an option of a file: checked before anybody is asked
SubspaceOf = Literal["set", "mean", "centred"]
Projection = Literal["subspace", "gaussian", "sparse"]
BASIS = ("basis", "ranks", "centre")  # the tensors a basis travels as
# (public updates, their weights, round) -> the directions private updates are projected onto
Directions = Callable[[Tensor, Sequence[float], int], Basis]


def directions_of(
    training: Training, rank: Rank, subspace: SubspaceOf, per_tensor: bool, projection: Projection = "subspace"
) -> Directions:
    """The subspace of the public updates, or random directions, fresh every round, as the paper's control."""
    slices = training.model.slices if per_tensor else None

    def directions(public: Tensor, weights: Sequence[float], round: int) -> Basis:
        if projection == "subspace":
            weighted = torch.tensor(weights, dtype=torch.float64)
            return aggregation.subspace(public, slices, rank=rank, kind=subspace, weights=weighted)
        generator = torch.Generator(public.device).manual_seed(round)  # not secret: the server could choose any
        return random_basis(public.shape[1], slices, 1 if rank == "auto" else rank, generator, projection)

    return directions


def combine(
    rows: Tensor, weights: Sequence[float], public: Collection[int], directions: Directions, round: int
) -> tuple[Tensor, Basis | None]:
    """The public mean and the projected private mean, each with the weight of its group; and the directions.

    Without public rows there is nothing to project onto, without private ones nothing to project: then it is the
    weighted mean of all.
    """
    chosen = sorted(public)
    private = [place for place in range(len(rows)) if place not in public]
    of_public, of_private = [weights[place] for place in chosen], [weights[place] for place in private]
    basis = directions(rows[chosen], of_public, round) if public else None
    if basis is None or not private:
        return mean(rows, weights), basis
    projected = basis.project(mean(rows[private], of_private))
    return _together([(mean(rows[chosen], of_public), sum(of_public)), (projected, sum(of_private))]), basis


def thin_round(
    state: State,
    ask: Ask,
    public: Collection[str],
    weigh: Callable[[tuple[str, ...]], list[float]],
    directions: Directions,
    training: Training,
    per_tensor: bool,
) -> State:
    """Public clients upload in full, the others their coordinates in the subspace the state holds."""
    full = ask_updates(state, ask, [client for client in state.roster if client.id in public])
    private = tuple(client.id for client in state.roster if client.id not in public)
    known = {name: state.kept[name] for name in BASIS}
    thin = ask(Task("project", private, {"model": state.model, **known}))
    groups: list[tuple[Tensor, float]] = []
    renewed: Payload = {}
    if full.ids:
        rows, weights = full.payload["update"], weigh(full.ids)
        groups.append((mean(rows, weights), sum(weights)))
        renewed = directions(rows, weights, state.round).to_tensors()
    if thin.ids:
        weights = weigh(thin.ids)
        basis = received_basis(training, known, per_tensor)
        groups.append((basis.rebuild(mean(thin.payload["coordinates"], weights)), sum(weights)))
    return step(state, _together(groups), **renewed) if groups else state


def _together(groups: Sequence[tuple[Tensor, float]]) -> Tensor:
    return mean(torch.stack([row for row, _ in groups]), [weight for _, weight in groups])


def project_locally(training: Training, per_tensor: bool) -> Action:
    """Train as ever, with all the noise; send only the update's coordinates in the subspace received."""

    def run(work: Work) -> tuple[Payload, Payload]:
        basis = received_basis(training, work.payload, per_tensor)
        return {"coordinates": basis.coordinates(updates_of(training, work))}, {}

    return Action(run, training.price)


def received_basis(training: Training, tensors: Payload, per_tensor: bool) -> Basis:
    """The basis some tensors stand for; what does not fit the model is refused."""
    slices = training.model.slices if per_tensor else None
    return basis_from_tensors({name: tensors[name] for name in BASIS}, slices, training.model.size)
