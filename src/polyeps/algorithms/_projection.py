"""Shared by PFA, PFA+ and PDP-FL: directions from the public updates, and the mean over both groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyeps.aggregation import subspace as aggregation
from polyeps.aggregation.subspace import Basis, basis_from_tensors, random_basis
from polyeps.algorithms._averaging import ask_updates, mean, step, updates_of
from polyeps.core import Action, Ask, Payload, Spec, Specs, State, Task, Work
from polyeps.messages import LARGEST, update, vector
from polyeps.training import Training

Rank = Annotated[int, Field(ge=1)] | Literal["auto"]  # an option of a file: checked before any client is asked
SubspaceOf = Literal["set", "mean", "centred"]
Projection = Literal["subspace", "gaussian", "sparse"]
BASIS = ("basis", "ranks", "centre")  # the tensors a basis travels as
_UNIT = 1.01  # entries of an orthonormal basis, with what float32 may add to them
# (public updates, their weights, round) -> the directions private updates are projected onto
Directions = Callable[[Tensor, Sequence[float], int], Basis]


def directions_of(
    training: Training, rank: Rank, subspace: SubspaceOf, per_tensor: bool, projection: Projection = "subspace"
) -> Directions:
    """Return the subspace of the public updates or, as the paper's control, random directions, new in every round."""
    slices = training.model.slices if per_tensor else None

    def directions(public: Tensor, weights: Sequence[float], round: int) -> Basis:
        if projection == "subspace":
            weighted = torch.tensor(weights, dtype=torch.float64)
            return aggregation.subspace(public, slices, rank=rank, kind=subspace, weights=weighted)
        # Not secret: the server could choose any. Drawn on the CPU, so that every device has the same ones.
        generator = torch.Generator().manual_seed(round)
        drawn = random_basis(public.shape[1], slices, 1 if rank == "auto" else rank, generator, projection)
        parts = tuple(part._replace(matrix=part.matrix.to(public.device)) for part in drawn.parts)
        return Basis(parts, drawn.centre.to(public.device))

    return directions


def combine(
    rows: Tensor, weights: Sequence[float], public: Collection[int], directions: Directions, round: int
) -> tuple[Tensor, Basis | None]:
    """Return the mean of the public mean and the projected private mean, by the groups' weights; and the directions.

    Without public rows, or if they are all zero, there is nothing to project onto, and without private ones nothing
    to project: then it is the weighted mean of all.
    """
    chosen = sorted(set(public))
    private = sorted(set(range(len(rows))) - set(public))
    of_public, of_private = [weights[place] for place in chosen], [weights[place] for place in private]
    basis = unless_empty(directions(rows[chosen], of_public, round)) if chosen else None
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
    """Run a round in which public clients upload in full, and the others their coordinates in the kept subspace.

    Without a kept subspace, that of this round's public clients is used; without any of them, all upload in full.
    """
    full = ask_updates(state, ask, [client for client in state.roster if client.id in public])
    private = [client for client in state.roster if client.id not in public]
    groups: list[tuple[Tensor, float]] = []
    renewed: Payload = {}
    if full.ids:
        rows, weights = full.payload["update"], weigh(full.ids)
        groups.append((mean(rows, weights), sum(weights)))
        renewed = kept_basis(unless_empty(directions(rows, weights, state.round)))
    known = {name: kept for name, kept in (state.kept if "basis" in state.kept else renewed).items() if name in BASIS}
    if known:
        thin = ask(Task("project", tuple(client.id for client in private), {"model": state.model, **known}))
    else:
        thin = ask_updates(state, ask, private)
    if thin.ids:
        weights = weigh(thin.ids)
        if known:
            basis = received_basis(training, known, per_tensor)
            groups.append((basis.rebuild(mean(thin.payload["coordinates"], weights)), sum(weights)))
        else:
            groups.append((mean(thin.payload["update"], weights), sum(weights)))
    return step(state, _together(groups), **renewed) if groups else state


def unless_empty(basis: Basis) -> Basis | None:
    """Return a basis if it has a direction or a centre: public updates of zero give neither."""
    return basis if any(basis.ranks) or bool(basis.centre.any()) else None


def kept_basis(basis: Basis | None) -> dict[str, Tensor]:
    """Return a basis as the state keeps it; without one, the last one stays."""
    return {} if basis is None else basis.to_tensors()


def _together(groups: Sequence[tuple[Tensor, float]]) -> Tensor:
    return mean(torch.stack([row for row, _ in groups]), [weight for _, weight in groups])


def project_locally(training: Training, per_tensor: bool) -> Action:
    """Return the action that trains with all the noise and sends the update's coordinates in the subspace received."""

    def run(work: Work) -> tuple[Payload, Payload]:
        device = work.data.features.device
        basis = received_basis(training, {name: work.payload[name].to(device) for name in BASIS}, per_tensor)
        return {"coordinates": basis.coordinates(updates_of(training, work))}, {}

    def fits(payload: Payload) -> None:
        received_basis(training, payload, per_tensor)

    def gives(payload: Payload) -> Specs:
        return {"coordinates": update(int(payload["ranks"].sum()))}

    size = training.model.size
    takes = {
        "model": vector(size),
        "basis": Spec((None,), "float32", -_UNIT, _UNIT),
        "ranks": Spec((len(training.model.slices) if per_tensor else 1,), "int64", 0, size),
        "centre": Spec((None,), "float32", -LARGEST, LARGEST),
    }
    return Action(run, training.price, takes=takes, fits=fits, gives=gives)


def received_basis(training: Training, tensors: Payload, per_tensor: bool) -> Basis:
    """Return the basis that some tensors stand for; refuse tensors that do not fit the model."""
    slices = training.model.slices if per_tensor else None
    return basis_from_tensors({name: tensors[name] for name in BASIS}, slices, training.model.size)
