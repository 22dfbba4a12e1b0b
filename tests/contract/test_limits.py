"""Contract 8: what algorithms must come down to where their papers' cases meet, and where the papers say nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.federated import Vector
from support.federations import experiment, finish, job_of
from support.prescribed import MODEL, TRAINING, Prescribed, Updates, drawn
from torch import Tensor

from polyeps.algorithms import ALGORITHMS
from polyeps.core import Algorithm, Replies
from polyeps.errors import InputError
from polyeps.server import finite_replies

EPSILONS = (0.5, 8.0, 0.6, 9.0, 0.7, 10.0, 0.55)
START = torch.linspace(-1, 1, MODEL.size)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
PROJECTING = ("pfa", "pfa-plus", "pdp-fl", "pdp-fl-plus")
# Those whose clients train; gradients of single records have limits of their own (tests/algorithms/test_fedsel.py).
every_algorithm = pytest.mark.parametrize(
    "name", [name for name, entry in ALGORITHMS.items() if entry.local == "training" and entry.common]
)
every_projecting = pytest.mark.parametrize("name", PROJECTING)


def built(name: str, **options: Any) -> Algorithm:
    return ALGORITHMS[name].build(TRAINING, **ALGORITHMS[name].options, **options)


def after(name: str, updates: Updates, epsilons: Any = EPSILONS, rounds: int = 1, **options: Any) -> Tensor:
    return Prescribed(epsilons, updates).run(built(name, **options), rounds, start=START).model


def constant(row: Vector) -> Updates:
    return lambda *_: row


# Where methods meet


@pytest.mark.parametrize("name", ["weiavg", "pfa", "pfa-plus", "public-only"])
@pytest.mark.parametrize("budget", [0.3, 1.7])
def test_equal_budgets_make_it_fedavg_to_the_bit(name: str, budget: float, tmp_path: Path) -> None:
    """All are then public, and nobody is projected."""
    equal = {"epsilons": (budget,) * 6}
    plain = finish(job_of(experiment("fedavg", budgets=equal)), tmp_path / "a.db")
    other = finish(job_of(experiment(name, budgets=equal)), tmp_path / "b.db")
    assert len(plain.rounds) == 3
    assert torch.equal(other.state.model, plain.state.model)


@pytest.mark.parametrize("name", ["pfa", "pfa-plus"])
@pytest.mark.parametrize("per_tensor", [True, False])
def test_a_full_basis_makes_it_weiavg(name: str, per_tensor: bool) -> None:
    epsilons = [*np.linspace(8, 10, MODEL.size + 1), *np.linspace(0.4, 0.5, 9)]
    clients = Prescribed(epsilons, drawn(), per_tensor)
    projected = clients.run(built(name, rank=MODEL.size, per_tensor=per_tensor), 3, start=START).model
    torch.testing.assert_close(projected, after("weiavg", drawn(), epsilons, 3), **CLOSE)


def test_the_warm_up_round_of_pfa_plus_is_pfa() -> None:
    assert torch.equal(after("pfa-plus", drawn()), after("pfa", drawn()))
    in_turn = after("pfa-plus", drawn(), warm_up="in-turn")
    torch.testing.assert_close(in_turn, after("pfa", drawn()), **CLOSE)  # means and projections change places


def test_in_turn_private_clients_never_upload_in_full() -> None:
    clients = Prescribed(EPSILONS, drawn())
    clients.run(built("pfa-plus", warm_up="in-turn"), 4)
    full = {client for task in clients.tasks if task.action == "train" for client in task.to}
    assert full == {"1", "3", "5"}
    thin = Prescribed(EPSILONS, drawn(), silent=lambda client, _: client in "135")
    thin.run(built("pfa-plus", warm_up="in-turn"), 2)  # nobody showed a way, so the others upload in full
    assert {task.action for task in thin.tasks} == {"train"}


# Groups of every size


def test_no_public_client_ever_is_weiavg() -> None:
    for name in ("pfa", "pfa-plus"):
        silent = Prescribed(EPSILONS, drawn(), silent=lambda client, _: client in "135")
        weighed = Prescribed(EPSILONS, drawn(), silent=lambda client, _: client in "135")
        model = silent.run(built(name), 3, start=START).model
        assert torch.equal(model, weighed.run(built("weiavg"), 3, start=START).model)


def test_a_round_without_public_client_goes_on_with_the_last_subspace() -> None:
    clients = Prescribed(EPSILONS, drawn(), silent=lambda client, number: client in "135" and number > 0)
    state = clients.run(built("pfa-plus"), 3, start=START)
    kept = [task.payload["basis"] for task in clients.tasks if task.action == "project"]
    assert len(kept) == 2
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(state.kept["basis"], kept[0])


def test_one_public_client() -> None:
    """The set, the mean and the centred updates of one client span the same line."""
    epsilons = (0.5, 9.0, 0.6, 0.7, 0.55)
    models = [after("pfa", drawn(), epsilons, 2, subspace=kind) for kind in ("set", "mean", "centred")]
    torch.testing.assert_close(models[0], models[1], **CLOSE)
    torch.testing.assert_close(models[0], models[2], **CLOSE)
    assert not torch.allclose(models[0], after("weiavg", drawn(), epsilons, 2), **CLOSE)


def test_all_public_and_one_private() -> None:
    everybody = after("pfa", drawn(), rounds=2, split="threshold", split_at=0.1)
    assert torch.equal(everybody, after("weiavg", drawn(), rounds=2))
    alone = after("pfa", drawn(), (8.0, 9.0, 0.5, 10.0, 9.5), rounds=2)
    assert torch.isfinite(alone).all()
    assert not torch.allclose(alone, after("weiavg", drawn(), (8.0, 9.0, 0.5, 10.0, 9.5), rounds=2), **CLOSE)


def test_a_rule_of_splitting_is_refused_before_the_first_round() -> None:
    for name in ("pfa", "pfa-plus", "public-only"):
        with pytest.raises(InputError, match="needs split_at"):
            built(name, split="threshold")
        with pytest.raises(InputError, match="takes no"):
            built(name, split="mixture", split_at=0.5)
        with pytest.raises(InputError, match="share must be"):
            built(name, split="top", split_at=2.0)


# Updates of every kind


@every_algorithm
def test_identical_updates_are_their_own_mean(name: str) -> None:
    """Of a projected method too: they lie in the subspace they span."""
    row = np.random.default_rng(1).normal(size=MODEL.size)
    torch.testing.assert_close(after(name, constant(row), rounds=5), START + 5 * torch.from_numpy(row).float(), **CLOSE)


@every_projecting
@pytest.mark.parametrize("subspace", ["set", "mean", "centred"])
def test_identical_updates_with_every_subspace(name: str, subspace: str) -> None:
    row = np.random.default_rng(1).normal(size=MODEL.size)
    found = after(name, constant(row), rounds=5, subspace=subspace)
    torch.testing.assert_close(found, START + 5 * torch.from_numpy(row).float(), **CLOSE)


@every_algorithm
def test_zero_updates_move_nothing(name: str) -> None:
    assert torch.equal(after(name, constant(np.zeros(MODEL.size)), rounds=5), START)


@pytest.mark.parametrize("warm_up", ["full", "in-turn"])
def test_public_updates_of_zero_show_no_direction(warm_up: str) -> None:
    """There is nothing to project onto, as without public clients; and the last subspace is kept."""

    def updates(client: str, number: int, model: Vector) -> Vector:
        return drawn()(client, number, model) * (0.0 if client in "135" and number != 1 else 1.0)

    assert torch.equal(after("pfa", updates), after("weiavg", updates))
    clients = Prescribed(EPSILONS, updates)
    clients.run(built("pfa-plus", warm_up=warm_up), 4, start=START)
    thin = [task for task in clients.tasks if task.action == "project"]
    assert {task.round for task in thin} == ({2, 3} if warm_up == "full" else {1, 2, 3})
    assert all(torch.equal(task.payload["basis"], thin[0].payload["basis"]) for task in thin)


@every_algorithm
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spoilt", ["2", "3"])  # a low-ε and a high-ε client
def test_a_reply_that_is_not_finite_counts_as_none(name: str, bad: float, spoilt: str) -> None:
    def updates(client: str, number: int, model: Vector) -> Vector:
        row = drawn()(client, number, model)
        if client == spoilt and number == 4:
            row[5] = bad
        return row

    clients = Prescribed(EPSILONS, updates)
    poisoned = clients.run(built(name), 5, start=START)
    absent = Prescribed(EPSILONS, drawn(), silent=lambda client, number: client == spoilt and number == 4)
    assert torch.equal(poisoned.model, absent.run(built(name), 5, start=START).model)
    assert torch.isfinite(poisoned.model).all()
    heard = spoilt in clients.traffic[4].traffic
    assert clients.traffic[4].discarded == ((spoilt,) if heard else ())  # its bytes have travelled all the same
    assert spoilt in clients.traffic[4].active or not heard
    assert not any(torch.isnan(kept).any() for kept in poisoned.kept.values())


def test_only_replies_that_are_not_finite_are_left_out() -> None:
    rows = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [3.0, 4.0]])
    counts = torch.tensor([7, 8, 9])
    kept = finite_replies(Replies(("a", "b", "c"), {"update": rows, "count": counts}, (True, False, False), 5, 6))
    assert kept.ids == ("a", "c")
    assert kept.ready == (True, False)
    assert torch.equal(kept.payload["update"], rows[[0, 2]])
    assert kept.payload["count"].tolist() == [7, 9]
    nobody = finite_replies(Replies(("b",), {"update": rows[1:2]}, (True,)))
    assert nobody.ids == ()
    assert finite_replies(Replies((), {}, ())).ids == ()


@every_algorithm
def test_nobody_answers(name: str) -> None:
    clients = Prescribed(EPSILONS, drawn(), silent=lambda *_: True)
    state = clients.run(built(name), 3, start=START)
    assert torch.equal(state.model, START)
    # A client that fails to answer is missed, and asked again in the next round.
    assert set(clients.traffic[-1].active) == {str(place) for place in range(len(EPSILONS))}
    assert {task.round for task in clients.tasks} == {0, 1, 2}
