"""What a client agrees to, before it pays: each action once per period and in order, at its own price."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.transports import alone

from polyeps.accounting.events import PureDpEvent
from polyeps.client import answer, profiles
from polyeps.clients import Clients
from polyeps.core import Action, Algorithm, Budget, Payload, PerClient, Records, Task, Work
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError, TaskRefused
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.messages import whole_number

IDS = ("a", "b", "c", "d")


def run(work: Work) -> tuple[Payload, Payload]:
    return {"seen": torch.ones(work.clients)}, {}


def federation(
    path: Path, noise: list[float], once_per: str = "season", settings: PerClient | None = None
) -> tuple[Algorithm, Clients]:
    """Two actions, to be done in turn and once in every season; the price grows with a setting `steps`."""
    takes = {"season": whole_number(1, 100)}
    action = Action(run, lambda noise, own: PureDpEvent(own.get("steps", 1.0) / noise), takes=takes)
    algorithm = Algorithm({"first": action, "second": action}, lambda state, _: state, once_per=once_per, unit="client")
    terms = {client: BudgetTerms(Budget(3.0, 0.0), "client", "zero-out") for client in IDS}
    clients = Clients(
        IDS,
        Records(torch.zeros(4, 1), torch.zeros(4), torch.arange(5)),
        np.array(noise),
        lambda ids, round: SeededStreams(1, ids, round),
        True,
        Ledger.create(path, terms),
        settings=settings or {},
    )
    return algorithm, clients


def ask(name: str, to: tuple[str, ...], season: int = 1, round: int = 0) -> Task:
    return Task(name, to, {"season": torch.tensor(season)}, "run", round)


def spent(clients: Clients) -> list[float]:
    assert clients.ledger is not None
    return [clients.ledger.spent(client) for client in IDS]


def test_a_second_action_only_after_the_first(tmp_path: Path) -> None:
    algorithm, clients = federation(tmp_path / "a.db", [1.0, 1.0, 0.5, 1.0])
    assert answer(clients, algorithm, ask("second", IDS)).ids == ()
    assert spent(clients) == [0.0] * 4
    assert answer(clients, algorithm, ask("first", ("b", "c"))).ids == ("b", "c")
    assert answer(clients, algorithm, ask("second", ("d", "c", "b", "a"))).ids == ("b",)  # c can pay no more
    assert spent(clients) == [0.0, 2.0, 2.0, 0.0]
    assert answer(clients, algorithm, ask("first", IDS, round=1)).ids == ("a", "d")


def test_each_action_once_in_a_period_and_none_of_a_period_gone_by(tmp_path: Path) -> None:
    algorithm, clients = federation(tmp_path / "a.db", [4.0] * 4)
    assert answer(clients, algorithm, ask("first", IDS, season=2)).ids == IDS
    for round, (name, season) in enumerate([("first", 2), ("first", 1), ("second", 1), ("second", 3)], start=1):
        assert answer(clients, algorithm, ask(name, IDS, season, round)).ids == ()
    assert answer(clients, algorithm, ask("second", IDS, season=2)).ids == IDS
    assert answer(clients, algorithm, ask("second", IDS, season=2, round=1)).ids == ()
    assert spent(clients) == [0.5] * 4
    assert answer(clients, algorithm, ask("first", ("b",), season=9)).ids == ("b",)
    assert answer(alone(clients, "b"), algorithm, ask("first", ("b",), season=5)).ids == ()


def test_the_period_may_be_the_round(tmp_path: Path) -> None:
    algorithm, clients = federation(tmp_path / "a.db", [4.0] * 4, once_per="round")
    assert answer(clients, algorithm, ask("first", IDS, season=1)).ids == IDS
    assert answer(clients, algorithm, ask("first", IDS, season=2)).ids == ()
    assert answer(clients, algorithm, ask("second", IDS, round=1)).ids == ()
    assert answer(clients, algorithm, ask("first", IDS, round=1)).ids == IDS


def test_a_period_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    algorithm, clients = federation(tmp_path / "a.db", [1.0] * 4)
    strange = Task("first", IDS, {"season": torch.ones(5, 1, dtype=torch.int64)}, "run", 0)
    with pytest.raises(TaskRefused, match="'season' must be a single number of int64"):
        answer(clients, algorithm, strange)
    assert spent(clients) == [0.0] * 4


def charged(clients: Clients) -> list[list[str]]:
    assert clients.ledger is not None
    charges = [row.content for row in clients.ledger.rows() if row.kind == "charge"]
    return sorted(sorted(charge["clients"]) for charge in charges)


def test_clients_with_equal_noise_multipliers_pay_alike_in_one_charge(tmp_path: Path) -> None:
    algorithm, clients = federation(tmp_path / "a.db", [1.0, 0.5, 1.0, 0.25])
    assert [profile.ready for profile in profiles(clients, algorithm, ())] == [True, True, True, False]
    assert answer(clients, algorithm, ask("first", ("c", "d", "b", "a"))).ids == ("c", "b", "a")
    assert charged(clients) == [["a", "c"], ["b"]]


def test_clients_pay_by_their_own_settings_whoever_is_asked_with_them(tmp_path: Path) -> None:
    algorithm, clients = federation(tmp_path / "a.db", [1.0] * 4, settings={"steps": np.array([1, 2, 1, 3])})
    assert answer(clients, algorithm, ask("first", ("c", "b", "a"))).ids == ("c", "b", "a")
    assert answer(alone(clients, "d"), algorithm, ask("first", ("d",))).ids == ("d",)
    assert charged(clients) == [["a", "c"], ["b"], ["d"]]
    assert spent(clients) == [1.0, 2.0, 1.0, 3.0]


def test_settings_are_one_number_for_each_client_and_the_records_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="steps must be one number for each of 4 clients"):
        federation(tmp_path / "a.db", [1.0] * 4, settings={"steps": np.array([1, 2])})
    _, clients = federation(tmp_path / "b.db", [1.0] * 4, settings={"records": np.full(4, 10**6)})
    assert clients.settings["records"].tolist() == [1] * 4  # no price can assume more than there are


def test_prices_of_another_algorithm_are_not_remembered(tmp_path: Path) -> None:
    algorithm, clients = federation(tmp_path / "a.db", [1.0] * 4)
    assert answer(clients, algorithm, ask("first", ("a",))).ids == ("a",)
    dear = replace(algorithm.actions["first"], price=lambda noise, _: PureDpEvent(2 / noise))
    other = replace(algorithm, actions={"first": dear})
    assert answer(clients, other, ask("first", ("b",))).ids == ("b",)
    assert spent(clients) == [1.0, 2.0, 0.0, 0.0]
