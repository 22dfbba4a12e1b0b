"""Secure sums over Flower's messages: the bits of the plain sum, dropouts, and clients that give nothing away."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.federations import Finished, LocalGrid, experiment, finish, job_of, ledger_of
from support.summed import MODEL
from support.transports import AsBytes, Securely

from polyeps.algorithms._secure_sums import DRAWN
from polyeps.core import ENTER, Ask, Replies, SumTerms, Task
from polyeps.errors import InputError, MessageRefused
from polyeps.experiment.job import Job
from polyeps.secagg import masks
from polyeps.secagg.client import SumState
from polyeps.secagg.messages import Step, unpack
from polyeps.transport.flower import OnFlower
from polyeps.transport.flower_sums import Seat

METHODS: dict[str, dict[str, Any]] = {
    "directions from the model": {"name": "cmp-fed", "rank": 2, "directions": "model", "noise": "skellam"},
    "paid directions": {"name": "cmp-fed", "rank": 2, "noise": "skellam"},
    "all coordinates": {"name": "dp-randagg", "rank": 0, "noise": "skellam"},
    "groups": {"name": "fedhdp", "trust": "secure-sum", "personal": False, "noise": "discrete-gaussian"},
}
CHANGES: dict[str, Any] = {
    "budgets": {"epsilons": (8.0,) * 6},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"batch": 6, "local_steps": 2, "learning_rate": 0.2, "clip": 1.0},
    "participation": {"kind": "full"},
}


def job(method: str = "directions from the model", **options: Any) -> Job:
    return job_of(experiment({**METHODS[method], "dropouts": 0.34, **options}, **CHANGES))


def on_flower(wanted: Job, folder: Path, lost: Mapping[Step, set[str]] | None = None) -> tuple[Finished, LocalGrid]:
    grids: list[LocalGrid] = []

    def wrap(cohort: Any, made: Job) -> OnFlower:
        grids.append(LocalGrid(cohort, made, folder / "seats"))
        grids[0].lost = lost or {}
        return OnFlower(grids[0], rehearsal=True)

    return finish(wanted, folder / "flower.db", wrap, rounds=2), grids[0]


@dataclass
class OneByOne(AsBytes, Securely):
    """Clients that train alone, as on their own machines: in a batch the last digit of an update may differ."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [None, *Step], ids=lambda step: "nobody lost" if step is None else step.name)
def test_the_same_bits_as_the_protocol_in_one_process(method: str, step: Step | None, tmp_path: Path) -> None:
    lost = {} if step is None else {step: {"1", "4"}}
    found, _ = on_flower(job(method), tmp_path, lost)

    def together(cohort: Any, made: Job) -> Securely:
        return OneByOne(cohort, made.algorithm, made.discloses, dropouts=lost)

    wanted = finish(job(method), tmp_path / "memory.db", together, rounds=2)
    assert torch.equal(found.state.model, wanted.state.model)
    assert found.state.model.any()
    assert found.spent() == wanted.spent()


def test_with_too_few_left_there_is_no_sum(tmp_path: Path) -> None:
    wanted = job()
    found, _ = on_flower(wanted, tmp_path, {Step.MASK: {"1", "2", "4"}})
    assert torch.equal(found.state.model, wanted.state.model)


def test_nothing_but_masked_numbers_leaves_a_client(tmp_path: Path) -> None:
    """Clients draw the same noise again, as this is a simulation: so what they mask is known here."""
    _, grid = on_flower(job(), tmp_path)
    sent = b"".join(grid.carried)
    for seat in done(job(), tmp_path / "again").values():
        _, _, bits, *_, content = unpack((seat.folder / "vector").read_bytes())
        words = np.frombuffer(content, np.uint64).astype(masks.word(int(bits)))
        plainly = masks.to_bytes(words, int(bits))
        assert len(plainly) == 256 * masks.bytes_of(int(bits))
        assert not any(plainly[place : place + 16] in sent for place in range(0, len(plainly), 16))


def done(wanted: Job, folder: Path, said: int | None = None) -> dict[str, Seat]:
    """Clients that have done their task in the first round, and were not heard of again."""
    folder.mkdir()
    cohort = wanted.clients(ledger_of(wanted, folder / "a.db"))
    grid = LocalGrid(cohort, wanted, folder / "seats")
    grid.lost = {Step.ADVERTISE: set(cohort.ids)}
    transport = OnFlower(grid)
    roster = transport.profiles()
    transport(Task(ENTER, cohort.ids, {}, "test", 0))
    wanted.algorithm.round(replace(wanted.state, roster=roster), _Asked(transport, said))
    return grid.seats


class _Asked(Ask):
    """An ask that says which run and round it is."""

    def __init__(self, transport: OnFlower, said: int | None = None) -> None:
        self.transport, self.said = transport, said

    def __call__(self, task: Task) -> Replies:
        raise AssertionError(task)

    def total(self, task: Task, terms: SumTerms) -> Any:
        if self.said is not None:
            task = replace(task, payload={**task.payload, DRAWN: torch.tensor(self.said)})
        return self.transport.total(replace(task, run="test", round=0), terms)


def test_a_client_gives_nothing_in_the_clear(tmp_path: Path) -> None:
    wanted = job()
    cohort = wanted.clients(ledger_of(wanted, tmp_path / "a.db"))
    for folder in (tmp_path / "seats", None):
        transport = OnFlower(LocalGrid(cohort, wanted, folder))
        transport.profiles()
        task = Task(ENTER, cohort.ids, {}, "test", 0)
        assert transport(task).ids == cohort.ids
        plainly = Task("embed", cohort.ids, {"model": wanted.state.model, "left": torch.ones(16)}, "test", 0)
        assert transport(plainly).ids == ()
        if folder is None:
            assert transport.total(plainly, SumTerms(2, 2, 0, 16)).ids == ()


def test_floats_are_not_summed(tmp_path: Path) -> None:
    wanted = job(noise="gaussian")
    with pytest.raises(InputError, match="which this transport cannot do"):
        on_flower(wanted, tmp_path)


def prepared(tmp_path: Path, said: int | None = None, **options: Any) -> tuple[Seat, dict[str, Any]]:
    """A client that has done its task, and what it would be asked first; `said`: how many it was told were drawn."""
    seat = done(job(**options), tmp_path / "one", said)["0"]
    run, round, bits, *_, content = unpack((seat.folder / "vector").read_bytes())
    asked = {"run": run.decode(), "round": int(round), "bits": int(bits), "length": len(content) // 8}
    return seat, {**asked, "clients": sorted(seat.roster), "threshold": 4, "step": int(Step.ADVERTISE)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": ["0", "1", "2"], "threshold": 3}, "the noise is made for 4 or more"),
        ({"clients": ["0", "1", "somebody"], "threshold": 3}, "does not know 'somebody'"),
        ({"round": 1}, "what is kept is for round 0"),
        ({"run": "test/subspace"}, "what is kept is for round 0"),
        ({"bits": 3}, "what is kept is for round 0"),
        ({"length": 3}, "what is kept is for round 0"),
        ({"clients": ["1", "2", "3", "4"]}, "a sum without itself"),
        ({"threshold": 3}, "must be 4 to 6"),
        ({"threshold": "many"}, "cannot read which sum"),
        ({"step": 9}, "cannot read which sum"),
        ({"clients": 5}, "cannot read which sum"),
    ],
)
def test_a_client_takes_part_only_where_its_noise_is_enough(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    seat, asked = prepared(tmp_path)
    with pytest.raises(MessageRefused, match=said):
        seat.answer("0", {**asked, **changes}, b"")
    assert not list(seat.folder.glob("*.sum"))
    assert seat.answer("0", asked, b"")


@pytest.mark.parametrize("said", [2, 3, 4, 5])
def test_fewer_clients_than_were_said_to_be_drawn_or_none(said: int, tmp_path: Path) -> None:
    """A server that claims a small cohort, and then sums all of them with a threshold made for the small one."""
    seat, asked = prepared(tmp_path, said, colluders=0.3, dropouts=0.34)
    for threshold in range(1, 7):
        with pytest.raises(MessageRefused, match=r"were said to be drawn|must be 4 to 6"):
            seat.answer("0", {**asked, "threshold": threshold}, b"")
    few = sorted(seat.roster)[:said]
    with pytest.raises(MessageRefused):
        seat.answer("0", {**asked, "clients": few, "threshold": said // 2 + 1 if said > 3 else 1}, b"")
    assert seat.answer("0", {**asked, "clients": few, "threshold": said}, b"")


@pytest.mark.parametrize(("colluders", "enough"), [(0.0, 4), (0.1, 4), (0.3, 5), (0.5, 5), (0.8, 6)])
def test_the_threshold_is_above_what_colluders_could_open_twice(colluders: float, enough: int, tmp_path: Path) -> None:
    """The server says nothing of colluders: how many there may be is what the client agreed to."""
    seat, asked = prepared(tmp_path, colluders=colluders, dropouts=min(0.34, (1 - colluders) / 2))
    for threshold in range(4, enough):
        with pytest.raises(MessageRefused, match="the noise is made for"):
            seat.answer("0", {**asked, "threshold": threshold}, b"")
    assert seat.answer("0", {**asked, "threshold": enough}, b"")


def test_a_larger_cohort_than_there_is_gives_no_sum(tmp_path: Path) -> None:
    for lie in (7, 10**6, 0, -1):
        done(job(), tmp_path / str(lie), lie)
        assert not any((tmp_path / str(lie)).glob("seats/*/vector"))  # whoever is told so declines


def test_one_identity_cannot_sit_on_two_chairs(tmp_path: Path) -> None:
    seat, asked = prepared(tmp_path)
    doubled = replace(seat, roster={**seat.roster, "5": seat.roster["4"]})
    with pytest.raises(MessageRefused, match="have one identity"):
        doubled.answer("0", asked, b"")


def test_a_vector_is_in_one_sum(tmp_path: Path) -> None:
    seat, asked = prepared(tmp_path)
    first = seat.answer("0", asked, b"")
    assert seat.answer("0", asked, b"") == first  # the server was restarted: it reads what it has read before
    for other in ({**asked, "threshold": 5}, {**asked, "clients": asked["clients"][:5]}):
        with pytest.raises(MessageRefused, match="has already taken part in round 0"):
            seat.answer("0", other, b"")
    with pytest.raises(MessageRefused, match="has already taken part in round 0"):
        seat.answer("0", asked, b"more")


def test_without_a_vector_there_is_no_sum(tmp_path: Path) -> None:
    seat, asked = prepared(tmp_path)
    (seat.folder / "vector").unlink()
    with pytest.raises(MessageRefused, match="ask for the task first"):
        seat.answer("0", asked, b"")


def test_what_is_kept_is_the_owners_and_holds_no_secret_in_the_end(tmp_path: Path) -> None:
    _, grid = on_flower(job(), tmp_path)
    for seat in grid.seats.values():
        files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in seat.folder.iterdir()}
        (entered,) = seat.folder.glob("*.sum")
        assert files == {entered.name: 0o600, "sums": 0o600}
        kept = SumState.decode(unpack(entered.read_bytes())[1])
        assert (kept.step, kept.round, kept.mask_key, kept.seed, dict(kept.shares)) == (Step.UNMASK, 1, b"", b"", {})


def test_an_algorithm_without_such_sums_cannot_be_prepared(tmp_path: Path) -> None:
    seat, _ = prepared(tmp_path)
    plain = job_of(experiment("fedavg")).algorithm
    with pytest.raises(InputError, match="nothing that could be summed unseen"):
        seat.prepare(plain, Task("train", ("0",), {}), {"update": torch.zeros(MODEL.size, dtype=torch.int64)}, 16)
