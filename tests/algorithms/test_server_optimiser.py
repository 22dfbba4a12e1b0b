"""The server's optimiser: torch's SGD, closed-form averages, rounds without an answer, and the clients of `alone`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.federations import experiment, finish, job_of
from torch import Tensor

from polyeps.algorithms._server_optimiser import ServerOptimiser, with_server_optimiser
from polyeps.core import Algorithm, Ask, State
from polyeps.errors import InputError
from polyeps.experiment import run as runs
from polyeps.experiment.journal import Journal
from polyeps.experiment.progress import Watch
from polyeps.transport import codec

RECIPE: dict[str, Any] = {"training": {"kind": "gradient"}}


def moving(updates: list[Tensor | None], seen: list[Tensor]) -> Algorithm:
    """An algorithm that aggregates the updates of a list, one per round; None: nobody answers."""

    def round(state: State, _: Ask) -> State:
        seen.append(state.model)
        update = updates[state.round]
        if update is None:
            return state
        return replace(state, model=state.model + update, kept={"own": torch.tensor(float(state.round))})

    return Algorithm({}, round)


def after(updates: list[Tensor | None], optimiser: ServerOptimiser) -> tuple[list[State], list[Tensor]]:
    """The states after every round, each written to bytes and read again, and the models that clients train from."""
    seen: list[Tensor] = []
    algorithm = with_server_optimiser(moving(updates, seen), optimiser)
    state, states = State(torch.arange(3.0)), []
    for number in range(len(updates)):
        state = algorithm.round(replace(state, round=number), None)  # type: ignore[arg-type]
        held = codec.decode(codec.encode({"model": state.model, **state.kept}))
        state = State(held["model"], {name: kept for name, kept in held.items() if name != "model"})
        states.append(state)
    return states, seen


SETTINGS = st.builds(
    ServerOptimiser,
    learning_rate=st.floats(0.01, 3.0),
    momentum=st.sampled_from([0.0, 0.3, 0.9]),
    averaging=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
)


@settings(deadline=None)
@given(SETTINGS, st.lists(st.lists(st.floats(-2, 2, width=32), min_size=3, max_size=3), min_size=1, max_size=12))
def test_it_steps_as_torch_does_and_averages_with_the_closed_form_weights(
    optimiser: ServerOptimiser, rows: list[list[float]]
) -> None:
    states, seen = after([torch.tensor(row) for row in rows], optimiser)
    weight = torch.nn.Parameter(torch.arange(3.0, dtype=torch.float64))
    sgd = torch.optim.SGD([weight], lr=optimiser.learning_rate, momentum=optimiser.momentum)
    iterates = [weight.detach().clone()]
    for row in rows:
        weight.grad = -torch.tensor(row, dtype=torch.float64)
        sgd.step()
        iterates.append(weight.detach().clone())
    for place, (state, received) in enumerate(zip(states, seen, strict=True)):
        torch.testing.assert_close(received.double(), iterates[place], rtol=1e-4, atol=1e-4)
        powers = optimiser.averaging ** torch.arange(place, -1, -1, dtype=torch.float64)
        average = (powers[:, None] * torch.stack(iterates[1 : place + 2])).sum(0) / powers.sum()
        torch.testing.assert_close(state.model.double(), average, rtol=1e-4, atol=1e-4)
        assert state.kept["own"] == place  # what the algorithm itself keeps


@settings(deadline=None)
@given(SETTINGS, st.integers(0, 3))
def test_a_round_without_an_answer_changes_nothing(optimiser: ServerOptimiser, place: int) -> None:
    updates: list[Tensor | None] = [torch.tensor([0.5, -1.0, 2.0]) * (1 + number) for number in range(3)]
    without, _ = after(updates, optimiser)
    states, _ = after([*updates[:place], None, *updates[place:]], optimiser)
    states.pop(place)
    for one, other in zip(states, without, strict=True):
        assert torch.equal(one.model, other.model)
        for name in set(one.kept) - {"own"}:
            assert torch.equal(one.kept[name], other.kept[name])


def test_by_default_an_algorithm_is_left_as_it_is() -> None:
    algorithm = moving([], [])
    assert with_server_optimiser(algorithm, ServerOptimiser()) is algorithm
    for bad in ({"learning_rate": 0.0}, {"momentum": 1.0}, {"averaging": -0.1}, {"learning_rate": float("nan")}):
        with pytest.raises(InputError, match=f"server.{next(iter(bad))} must be"):
            ServerOptimiser(**bad)


@pytest.mark.parametrize("name", ["fedavg", "pfa-plus", "pdp-fl-plus", "fedhdp", "cmp-fed", "alone"])
def test_a_run_that_was_interrupted_ends_with_the_same_models(name: str, tmp_path: Path) -> None:
    kind = RECIPE if name not in ("fedhdp", "cmp-fed") else {}
    server = {"learning_rate": 0.3, "momentum": 0.5, "averaging": 0.9}
    wanted = experiment({"name": name, **kind}, rounds=4, server=server)
    runs.run(wanted, tmp_path / "whole")

    def stop(_job: str, round: Any, *_: Any) -> None:
        if round.number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(wanted, tmp_path / "parts", watch=Watch(round_done=stop))
    runs.resume(tmp_path / "parts")
    accuracy = "SELECT job, round, name, value FROM metrics ORDER BY job, round, name"
    first, second = (Journal(tmp_path / folder / "journal.db").query(accuracy) for folder in ("whole", "parts"))
    assert first == second
    for path in (tmp_path / "whole" / "models").glob("*"):
        assert path.read_bytes() == (tmp_path / "parts" / "models" / path.name).read_bytes()


def test_the_evaluated_and_saved_model_is_the_average(tmp_path: Path) -> None:
    method = {"name": "fedavg", "budgets": "none", **RECIPE}
    plain = [finish(job_of(experiment(method)), tmp_path / "a.db", rounds=rounds).state.model for rounds in (1, 2, 3)]
    averaged = finish(job_of(experiment({**method, "server": {"averaging": 0.5}})), tmp_path / "b.db")
    expected = (plain[0] + 2 * plain[1] + 4 * plain[2]) / 7
    torch.testing.assert_close(averaged.state.model, expected, rtol=1e-5, atol=1e-6)
    outcome = runs.run(experiment({**method, "server": {"averaging": 0.5}}), tmp_path / "run")
    torch.testing.assert_close(outcome.models["fedavg (none)", 1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("budgets", ["own", "none"])
def test_alone_each_client_is_its_own_server(budgets: str, tmp_path: Path) -> None:
    server = {"learning_rate": 0.4, "momentum": 0.6, "averaging": 0.8}

    def method(name: str) -> dict[str, Any]:
        return {"name": name, "budgets": budgets, "server": server, **RECIPE}

    together = finish(job_of(experiment(method("alone"))), tmp_path / "a.db")
    for place in range(3):
        single = finish(job_of(experiment(method("fedavg"))), tmp_path / f"{place}.db", order=[place])
        torch.testing.assert_close(together.cohort.memory["personal"][place], single.state.model, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_price_does_not_depend_on_it(share: float, tmp_path: Path) -> None:
    spent: list[dict[str, float]] = []
    for server in ({}, {"momentum": 0.9, "averaging": 0.9}):
        wanted = experiment("weiavg", server=server, participation={"kind": "poisson", "share": share})
        spent.append(finish(job_of(wanted), tmp_path / f"{len(spent)}.db").spent())
    assert spent[0] == spent[1]
