"""The server of a contract: waits for its silos, runs its rounds over Flower, and can be stopped and continued.

    FOLDER/contract           the signed contract
    FOLDER/serving.db         what happened, and the state after every complete round (`experiment.journal`)
    FOLDER/flower-run         the number of Flower's run, while it goes on
    FOLDER/secret             the server's own noise, cohorts and public dice follow from it
    FOLDER/models/JOB.safetensors

A round that was cut off is asked for again with the same tasks: all that is random follows from the secret. Silos that
have answered them send the same replies again, free of charge.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from polyeps import __version__
from polyeps.core import Profile, State
from polyeps.deploy.agreement import today
from polyeps.deploy.contract import Contract, SignedContract
from polyeps.deploy.contract_job import check_contract_model, server_job
from polyeps.deploy.keys import read_secret
from polyeps.deploy.patient_grid import PatientGrid, is_restarted
from polyeps.deploy.silo import CONTRACT, check_proof
from polyeps.engine.noise import SERVER_SECRET_BYTES
from polyeps.errors import InputError
from polyeps.experiment.evaluation import measure
from polyeps.experiment.job import Job
from polyeps.experiment.journal import ClientRow, Journal
from polyeps.experiment.journal_entries import facts, state_after, write_round
from polyeps.experiment.model_metadata import write_model
from polyeps.experiment.outcome import model_path
from polyeps.experiment.seeds import seed_for
from polyeps.ledger.head_file import replace_file
from polyeps.server import ALL_ROUNDS, Round, serve
from polyeps.transport.client_files import only_one
from polyeps.transport.flower import OnFlower

_ASK_AGAIN = 30.0  # seconds after which a node that declined a contract is asked again: its owner may have changed it
JOURNAL = "serving.db"  # another name than that of a simulation's journal, which is read and resumed otherwise
Progress = Callable[[str], None]


@dataclass
class EnrolledSilos(OnFlower):
    """The silos of a contract, each proving its key; others are left out."""

    signed: SignedContract = field(kw_only=True)
    progress: Progress = field(default=lambda _: None, kw_only=True)
    poll: float = 0.5  # seconds between two looks for silos
    _queried: dict[str, int] = field(default_factory=dict)  # messages that wait for a reply, and their nodes
    _again: dict[int, float] = field(default_factory=dict)  # nodes that declined, and when to ask them again
    _enrolled: tuple[Profile, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._greeting = RecordDict({CONTRACT: ConfigRecord({"signed": self.signed.encode()})})

    def check_profile(self, node: int, profile: Profile, content: Mapping[str, Any]) -> None:
        check_proof(self.signed.contract, profile.id, node, content)

    def profiles(self) -> tuple[Profile, ...]:
        """Wait for the contract's silos and return their profiles."""
        contract, found = self.signed.contract, dict[str, Profile]()
        if self._enrolled:
            return self._enrolled
        deadline, said = time.monotonic() + contract.patience.enrolment, -1
        while len(found) < len(contract.silos):
            found |= {profile.id: profile for profile in self.newcomers()}
            if len(found) != said:
                said = len(found)
                self.progress(f"{said} of {len(contract.silos)} silos have enrolled")
            if time.monotonic() > deadline:
                break
            time.sleep(self.poll)
        if len(found) < (contract.least_silos or len(contract.silos)):
            missing = ", ".join(sorted(set(contract.silos) - set(found)))
            refused = f"; {len(self._again)} connected nodes declined, and their logs say why" if self._again else ""
            raise InputError(
                f"{len(found)} of {len(contract.silos)} silos enrolled within {contract.patience.enrolment:g} s, "
                f"without {missing}{refused}; start them and serve again"
            )
        self._enrolled = tuple(sorted(found.values(), key=lambda profile: profile.id))
        return self._enrolled

    def newcomers(self) -> tuple[Profile, ...]:
        """Return the profiles of silos that have answered since the last call; nobody is waited for."""
        now = time.monotonic()
        busy = {*self._nodes.values(), *self._queried.values()}
        ready = [node for node in self._connected() if node not in busy and self._again.get(node, 0.0) <= now]
        if ready:
            messages = [Message(self._greeting, dst_node_id=node, message_type=MessageType.QUERY) for node in ready]
            names = zip(self.grid.push_messages(messages), ready, strict=True)
            self._queried |= {name: node for name, node in names if name}  # one that was not accepted has none
        replies = list(self.grid.pull_messages(list(self._queried))) if self._queried else []
        for reply in replies:
            node = self._queried.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                self._again[node] = now if is_restarted(reply) else now + _ASK_AGAIN
        found = tuple(self.named(reply for reply in replies if not reply.has_error()))
        for profile in found:
            self._again.pop(self._nodes[profile.id], None)
        return found


@dataclass(frozen=True)
class Served:
    """What came of serving a contract."""

    folder: Path
    rounds: int  # that are done
    reason: str  # why it stopped
    model: Path | None  # None: not done yet
    metrics: Mapping[str, float]  # of the last round, on the server's own test records


class _NoAnswerError(InputError):
    """A round without a single reply; it is not counted."""


def serve_contract(
    signed: SignedContract,
    connect: Callable[[], AbstractContextManager[Grid]],
    folder: Path,
    *,
    test: Path | None = None,
    progress: Progress = lambda _: None,
) -> Served:
    """Serve a contract, from the beginning or from where it was stopped, over the grid that `connect` opens."""
    contract = signed.contract
    if contract.ends < today():
        raise InputError(f"the contract ended on {contract.ends}; sign a new one")
    check_contract_model(contract)
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder, f"another process serves {folder}; stop it first"):
        secret = None if contract.rehearsal is not None else _secret(folder)
        job = server_job(contract, test, secret)
        journal = _open_journal(signed, job, folder)
        try:
            (row,) = journal.jobs()
            if row["status"] == "done":
                return _summary(journal, job, folder)
            with connect() as grid:
                silos = EnrolledSilos(
                    PatientGrid(grid),
                    contract.patience.reply,
                    contract.rehearsal is not None,
                    signed=signed,
                    progress=progress,
                )
                _run(job, contract, secret, silos, journal, folder, progress)
            return _summary(journal, job, folder)
        finally:
            journal.close()


def _open_journal(signed: SignedContract, job: Job, folder: Path) -> Journal:
    """Open the journal of a folder, or create it; refuse that of another contract."""
    path, contract = folder / JOURNAL, signed.contract
    if not path.exists():
        replace_file(folder / "contract", signed.encode())
        about = {
            "name": contract.name,
            "experiment": contract.experiment.as_dict(),
            "version": __version__,
            "command": "polyeps serve",
            "contract": contract.digest,
        }
        jobs = [(job.name, job.method.name, job.method.title, contract.seed, contract.rounds)]
        Journal.create(path, about, jobs).close()
    journal = Journal(path)
    if journal.about().get("contract") != contract.digest:
        journal.close()
        raise InputError(f"{folder} holds the run of another contract; choose another folder with --output")
    return journal


def _secret(folder: Path) -> bytes:
    """Return the server's secret of a run; it is drawn once, from the system's entropy."""
    path = folder / "secret"
    if not path.exists():
        replace_file(path, os.urandom(SERVER_SECRET_BYTES))
    return read_secret(path)


def _run(
    job: Job,
    contract: Contract,
    secret: bytes | None,
    silos: EnrolledSilos,
    journal: Journal,
    folder: Path,
    progress: Progress,
) -> None:
    """Run the rounds that are left, and write the model."""
    known = silos.profiles()
    rows = [ClientRow(one.id, one.epsilon, contract.delta, one.epsilon, one.examples or 0, None) for one in known]
    (row,), checkpoint, state = journal.jobs(), journal.checkpoint(job.name), job.state
    begun = {one.id for one in known} if row["status"] == "running" else set()
    if checkpoint is None:
        journal.begin(job.name, rows, {**facts(job, contract.experiment), "remarks": []})
    else:
        state = state_after(checkpoint)
        progress(f"continuing after round {checkpoint.round} of {contract.rounds}")
    # A silo that has paid for its last round already, and was not heard, still has the reply.
    unheard = begun if checkpoint is None else checkpoint.active or ()
    active = [one.id for one in known if one.ready or one.id in unheard]
    before = {one.id for one in known}

    def observe(round: Round, now: State) -> None:
        if round.invited and not round.traffic and round.active:
            raise _NoAnswerError(
                f"no silo answered round {round.number + 1}: they declined it or did not reply within "
                f"{contract.patience.reply:g} s; the model is as it was after round {round.number}"
            )
        left = before - set(round.active)
        before.clear()
        before.update(round.active)
        metrics = measure(job.population, now.model) if len(job.population.dataset.test_labels) else {}
        write_round(journal, job.name, round, now, left, metrics, round.active)
        shown = "".join(f", {name} {value:.4g}" for name, value in metrics.items())
        progress(
            f"round {round.number + 1} of {contract.rounds}: {len(round.traffic)} of {len(round.invited)} silos "
            f"answered in {round.seconds:.1f} s{shown}"
        )

    state = serve(
        job.algorithm,
        silos,
        state,
        rounds=contract.rounds,
        participation=job.participation,
        # Where a price assumes that cohorts are secret, they are the server's own; else they follow from the contract.
        seed=seed_for(contract.seed, "participation") if secret is None or not job.algorithm.round_price else secret,
        run=contract.run,
        active=active,
        observe=observe,
    )
    stopped = "rounds" if state.stopped == ALL_ROUNDS else "early"
    ended: tuple[dict[str, float], dict[str, Any]] = ({}, {"stopped": stopped, "reason": state.stopped})
    if state.round:
        # A job without budgets: what each silo has spent is in its own ledger.
        path = model_path(folder, job.name)
        write_model(path, replace(job, budgets=None), contract.experiment, state.model, state.round, None, ended)
    journal.finish(job.name, *ended)


def _summary(journal: Journal, job: Job, folder: Path) -> Served:
    (row,) = journal.jobs()
    rounds = journal.query("SELECT max(round) + 1 AS done FROM rounds")[0]["done"] or 0
    metrics = journal.query("SELECT name, value FROM metrics WHERE round = ?", (rounds - 1,))
    path = model_path(folder, job.name)
    return Served(
        folder,
        rounds,
        row["facts"].get("reason", ""),
        path if path.exists() else None,
        {one["name"]: one["value"] for one in metrics},
    )
