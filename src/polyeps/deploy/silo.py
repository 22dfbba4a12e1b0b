"""A silo: it answers messages of contracts it has agreed to, and says "declined" to everything else.

    FOLDER/contracts/DIGEST   every contract that was accepted, signed, as it arrived
    FOLDER/runs/              memory and replies (`transport.client_files`)
    FOLDER/sums/DIGEST/       what is kept of secure sums (`transport.flower_sums`)
    FOLDER/events.jsonl       what was agreed, answered and refused, one JSON object a line
    FOLDER/figures.jsonl      figures on the silo's own test records (`deploy.own_figures`)

A silo that is restarted between any two messages goes on as if it had not been: contracts, charges, memory and replies
are on the disk before the message that depends on them is sent.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from torch import Tensor

from polyeps.client import profiles
from polyeps.core import Payload
from polyeps.deploy.agreement import Agreement, accept_contract, open_ledger, release_ended, today
from polyeps.deploy.contract import Contract, SignedContract
from polyeps.deploy.keys import public_of, read_key, verifies
from polyeps.deploy.own_figures import FIGURES, append_line, figures_of
from polyeps.deploy.policy import Policy
from polyeps.errors import InputError, PolyepsError, escaped
from polyeps.ledger.head_file import replace_file
from polyeps.secagg.messages import Step
from polyeps.transport.flower_client import DECLINED, client_app
from polyeps.transport.flower_sums import Seat, clear_sums

_log = logging.getLogger(__name__)
CONTRACT = "contract"  # the record of a message that holds a signed contract
_PROOF = b"polyeps silo 1\n"  # before the bytes that prove a silo's key


class Silo:
    """One silo, ready to answer messages."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.key = read_key(policy.key)
        self.public = public_of(self.key)
        self.ledger = open_ledger(policy)
        self._contracts = policy.folder / "contracts"
        self._contracts.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._agreed: dict[str, Agreement] = {}
        self._unmeasured: dict[tuple[str, int], Tensor] = {}  # the model of each round that was not measured yet
        self._release_ended()

    def answer(self, message: Message, node: int) -> Message:
        """Return the reply to a message; of whatever goes wrong, the server reads the one word "declined"."""
        try:
            if message.metadata.message_type == MessageType.QUERY:
                return self._enrol(message, node)
            return self._work(message, node)
        except Exception as problem:
            self.refuse(problem)
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, DECLINED), reply_to=message)

    def _enrol(self, message: Message, node: int) -> Message:
        """Check the contract of a message against the policy, and introduce the silo to the contract's server."""
        content = message.content.get(CONTRACT)
        signed = None if content is None else content.get("signed")
        if not isinstance(signed, bytes):
            raise InputError("the server sends no contract; this silo takes part in nothing else")
        contract = SignedContract.decode(signed).contract
        agreement = self._agreement(contract.run) or self._accept(contract, signed)
        (profile,) = profiles(agreement.clients, agreement.algorithm, self.policy.discloses)
        disclosed: dict[str, Any] = {name: value for name, value in asdict(profile).items() if value is not None}
        disclosed["identity"] = bytes.fromhex(self.public)
        disclosed["proof"] = self.key.sign(proof_of(contract, node))
        return Message(RecordDict({"profile": ConfigRecord(disclosed)}), reply_to=message)

    def _accept(self, contract: Contract, signed: bytes) -> Agreement:
        """Agree to a contract, whose price is then reserved, and keep it."""
        self._release_ended()
        agreement = accept_contract(contract, self.policy, self.public, self.ledger)
        replace_file(self._contracts / contract.digest, signed)
        self._agreed[contract.run] = agreement
        self._note("agreed", run=contract.run, signer=self.policy.signer(contract.signer)[0])
        return agreement

    def _agreement(self, run: Any) -> Agreement | None:
        """Return what was agreed for a run, if anything, read from the disk after a restart."""
        if not isinstance(run, str):
            return None
        found = self._agreed.get(run)
        if found is None:
            with suppress(FileNotFoundError):
                contract = SignedContract.decode((self._contracts / _file_name(run)).read_bytes()).contract
                if contract.run == run:
                    found = self._agreed[run] = accept_contract(contract, self.policy, self.public, self.ledger)
        if found is not None and found.contract.ends < today():
            raise InputError(f"the contract of {run!r} ended on {found.contract.ends}")
        return found

    def _work(self, message: Message, node: int) -> Message:
        """Do a task of a run that was agreed to, or take a step of a secure sum.

        What nobody waits for any more is not paid for.
        """
        if message.metadata.created_at + message.metadata.ttl < time.time():
            raise InputError("the task came too late: the server does not wait for its reply any more")
        task, step = message.content.get("task"), message.content.get("sum")
        run = None if task is None else task.get("run")
        if task is None and step is not None and isinstance(name := step.get("run"), str):
            run = "/".join(name.split("/")[:2])  # with which the name of a sum begins (`flower_sums.sum_name`)
        agreement = self._agreement(run)
        if agreement is None:
            raise InputError(f"this silo has agreed to no contract of the run {ascii(run)[:80]}")
        part, seat = (agreement.clients, agreement.algorithm, self.policy.discloses), self._seat(agreement)
        app = client_app(
            lambda _: part,
            None if seat is None else lambda _: seat,
            rehearsal=self.policy.rehearsal,
            notice=self.refuse,
        )
        reply: Message = app(message, Context(0, node, {}, RecordDict(), {}))
        if not reply.has_error():
            if task is None:
                self._note("summed", run=run, round=step.get("round"), step=Step(step.get("step")).name.lower())
                return reply
            answered = bool(reply.content["reply"]["answered"])
            facts = {"run": run, "round": task.get("round"), "action": task.get("action")}
            self._note("answered" if answered else "declined", **facts)
            sent = message.content["payload"].get("model") if answered else None
            if sent is not None and self.policy.data.test is not None:
                self._unmeasured[agreement.contract.run, task["round"]] = torch.from_numpy(sent.numpy().copy())
        return reply

    def write_figures(self) -> None:
        """Measure the models that were sent on the silo's own test records, for its owner alone."""
        while self._unmeasured:
            (run, round), model = self._unmeasured.popitem()
            agreement = self._agreed[run]
            models, own = {"sent": model}, agreement.clients.memory.get("personal")
            if own is not None:
                models["personal"] = own[0]
            try:
                for figures in figures_of(agreement.population, models):
                    append_line(self.policy.folder / FIGURES, {"run": run, "round": round, **figures})
            except Exception:
                _log.warning("the models of round %d could not be measured", round, exc_info=True)

    def _seat(self, agreement: Agreement) -> Seat | None:
        """Return the silo's place in the secure sums of a run; the contract says who the others are."""
        rules, contract = self.policy.sums, agreement.contract
        if agreement.algorithm.trust != "secure-sum" or rules is None:
            return None
        roster = {name: bytes.fromhex(key) for name, key in contract.silos.items()}
        folder = self.policy.folder / "sums" / contract.digest
        colluders = rules.to_withstand(self.policy.name, contract.silos)
        return Seat(self.key, roster, folder, rules.least_silos, colluders)

    def _release_ended(self) -> None:
        """Release what runs that are over have reserved and not used."""
        for contract in kept_contracts(self.policy.folder):
            if contract.ends < today():
                release_ended(contract.run, self.ledger)
                forget_sums(self.policy.folder, contract)

    def refuse(self, problem: Exception) -> None:
        """Log why something was declined, for the silo alone."""
        reason = escaped(str(problem) if isinstance(problem, PolyepsError) else f"{type(problem).__name__}: {problem}")
        _log.warning("declined: %s", reason, exc_info=None if isinstance(problem, PolyepsError) else problem)
        self._note("refused", reason=reason[:500])

    def _note(self, event: str, **facts: Payload | Any) -> None:
        """Append an event to the silo's own log, which is never sent; a log that cannot be written stops nothing."""
        path = self.policy.folder / "events.jsonl"
        try:
            append_line(path, {"event": event, **facts})
        except OSError as problem:
            _log.warning("%s cannot be written: %s", path, problem.strerror)


def kept_contracts(folder: Path) -> list[Contract]:
    """Return the contracts that a silo has accepted; one that this version cannot read is left out."""
    found = []
    for path in sorted((folder / "contracts").glob("[0-9a-f]*")):
        try:
            found.append(SignedContract.decode(path.read_bytes()).contract)
        except InputError as problem:
            _log.warning("the contract %s is left out: %s", path, problem)
    return found


def forget_sums(folder: Path, contract: Contract) -> None:
    """Forget all secrets of a run's secure sums."""
    place = folder / "sums" / contract.digest
    if place.exists():
        clear_sums(place)


def _file_name(run: str) -> str:
    """Return the name of the file that holds a run's contract; one that exists nowhere for a run of another form."""
    digest = run.rpartition("/")[2]
    return digest if len(digest) == 64 and set(digest) <= set("0123456789abcdef") else "none"


def proof_of(contract: Contract, node: int) -> bytes:
    """Return the bytes that a silo signs to show that it is at a node, for this contract alone."""
    return _PROOF + contract.digest.encode() + f" {node}".encode()


def check_proof(contract: Contract, name: str, node: int, content: Any) -> None:
    """Refuse a profile that is not of an enrolled silo, or without a proof of the silo's key."""
    key = contract.silos.get(name)
    if key is None:
        raise InputError(f"node {node} calls itself {name!r}, which the contract does not enrol")
    shown, proof = content.get("identity"), content.get("proof")
    proven = isinstance(proof, bytes) and verifies(key, proof, proof_of(contract, node))
    if shown != bytes.fromhex(key) or not proven:
        raise InputError(f"node {node} does not prove that it is {name!r}")
