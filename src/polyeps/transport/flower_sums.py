"""Secure sums over Flower's messages: a client's seat in them, and the server, which only passes bytes on.

A sum takes six exchanges. First clients do their task and keep the result; then they take the five steps of `secagg`.
A client may be restarted between any two messages, so all it keeps is in a folder of its own, written before the
message it belongs to is sent, and locked while one is answered.

    FOLDER/vector         the result of the last task, until it is masked
    FOLDER/KEY.sum        a sum of the present round: the secrets of its next step, and every answer that was given
    FOLDER/sums           a fingerprint of every sum ever entered

The difference of two sums over one vector could be the vector itself. So a sum, by its name and round, is entered once
and with one setup: it is written to the disk before its first message is sent, and refused for ever after. Asked the
very same again, a client sends the very same bytes, which the server has seen before; so neither a client nor a server
that was restarted loses a sum.

A client trusts its own roster for the identities of others, not the server. With the vector it keeps the terms it
agreed to (`core.SumTerms`), and it takes part only in a sum that cannot be opened with fewer answers than its noise was
made for, nor twice with the help of as many colluders as it allows for. The sum's name holds the fingerprint of all
that was agreed, so that only clients that add the same noise are in it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from polyeps.client import digest
from polyeps.core import AGREED, Algorithm, Payload, SumTerms, Task
from polyeps.errors import InputError, MessageRefused, SumAborted
from polyeps.ledger.head_file import replace_file, sync_folder
from polyeps.secagg import neighbours
from polyeps.secagg.client import SumClient, SumState
from polyeps.secagg.messages import (
    Step,
    SumSetup,
    enough,
    fingerprint,
    lowest_threshold,
    pack,
    pack_table,
    unpack,
    unpack_table,
)
from polyeps.secagg.server import Server, Sum
from polyeps.transport import codec
from polyeps.transport.client_files import locked

_KEY_BYTES = 32  # of a sum's fingerprint
_Words = NDArray[np.uint64]
Asked = Mapping[str, Any]  # what the server says of a step, as plain values
# Sends the same question to clients, with bytes for each, and yields each client's answer.
Exchange = Callable[[Asked, Mapping[str, bytes]], Iterable[tuple[str, bytes]]]


Shapes = Mapping[str, list[int]]  # of the tensors that a vector was made of


@dataclass(frozen=True)
class _Prepared:
    """The vector of a task, and what was agreed about it."""

    name: str  # of the sum
    round: int
    terms: SumTerms
    facts: bytes  # the task's digest and the shapes of its tensors
    vector: _Words = field(repr=False)

    def encode(self) -> bytes:
        terms = self.terms
        numbers = (self.round, terms.bits, terms.clients, terms.least, terms.colluders)
        return pack([self.name.encode(), *(str(one).encode() for one in numbers), self.facts, self.vector.tobytes()])

    @classmethod
    def decode(cls, content: bytes) -> _Prepared:
        name, *numbers, facts, words = unpack(content)
        round, bits, clients, least, colluders = map(int, numbers)
        return cls(
            name.decode(), round, SumTerms(clients, least, colluders, bits), facts, np.frombuffer(words, np.uint64)
        )


@dataclass(frozen=True)
class _Entered:
    """A sum that a client is in: the state of its next step, and the answers it gave, by the question."""

    facts: bytes
    state: bytes = field(repr=False)
    answers: Mapping[str, bytes]

    def encode(self) -> bytes:
        return pack([self.facts, self.state, pack_table(self.answers)])

    @classmethod
    def decode(cls, content: bytes) -> _Entered:
        facts, state, answers = unpack(content)
        return cls(facts, state, unpack_table(answers))


@dataclass(frozen=True)
class Seat:
    """A client's place in secure sums."""

    identity: Ed25519PrivateKey = field(repr=False)
    roster: Mapping[str, bytes]  # every client's public key, as this client knows it from elsewhere
    folder: Path  # of this client alone, for what it keeps between messages
    least: int = 1  # answers with which a sum may be opened, whatever was agreed
    colluders: int = 0  # that every sum must withstand

    @property
    def public(self) -> bytes:
        return self.identity.public_key().public_bytes_raw()

    def check(self, algorithm: Algorithm, task: Task, bits: int) -> Shapes | None:
        """Refuse a task whose result could not be summed; return the shapes of the result if it is kept already."""
        self._terms(algorithm, task, bits)
        with locked(self.folder):
            return self._known(task)

    def prepare(self, algorithm: Algorithm, task: Task, payload: Payload, bits: int) -> Shapes:
        """Keep the vector of this task until it is summed, in place of that of another; return its tensors' shapes."""
        codec.check_integers(payload)
        if not payload:
            raise InputError(f"{task.action!r} gives nothing that could be summed unseen; ask for it plainly")
        terms = self._terms(algorithm, task, bits)
        numbers = torch.cat([tensor.flatten() for tensor in payload.values()]).to(torch.int64).cpu().numpy()
        words = (numbers & (2**bits - 1)).astype(np.uint64)
        shapes = {name: list(tensor.shape) or [1] for name, tensor in payload.items()}
        facts = pack([digest(task.payload).encode(), json.dumps(shapes).encode()])
        with locked(self.folder):
            known = self._known(task)
            if known is not None:
                return known
            prepared = _Prepared(sum_name(task), task.round, terms, facts, words)
            replace_file(self.folder / "vector", prepared.encode())
        return shapes

    def answer(self, name: str, asked: Asked, message: bytes) -> bytes:
        """Return this client's message of a step; asked the very same again, the very same message."""
        setup, step = self._setup(name, asked)
        question = fingerprint(pack([setup.digest, bytes([step]), message])).hex()
        with locked(self.folder):
            file = self._file(setup.run, setup.round)
            held = _Entered.decode(file.read_bytes()) if file.exists() else None
            if held is not None and question in held.answers:
                self._enter(setup.run, setup.round)
                return held.answers[question]
            if held is None or step is Step.ADVERTISE:
                self._check_new(setup.run, setup.round)
            prepared = self._prepared(setup) if step <= Step.MASK else None
            vector = np.zeros(0, np.uint64) if prepared is None else prepared.vector
            kept = None if held is None else SumState.decode(held.state)
            after, answer = SumClient(setup, name, self.identity).take(step, kept, message, vector)
            if held is None:
                assert prepared is not None  # sums begin with the step that needs it
                self._forget_other_rounds(setup.round)
                held = _Entered(prepared.facts, b"", {})
            replace_file(file, _Entered(held.facts, after.encode(), {**held.answers, question: answer}).encode())
            self._enter(setup.run, setup.round)
            if step >= Step.MASK:
                (self.folder / "vector").unlink(missing_ok=True)
                sync_folder(self.folder)
        return answer

    def _terms(self, algorithm: Algorithm, task: Task, bits: int) -> SumTerms:
        """Return what was agreed about the sum of a task, where that is no less than this client insists on."""
        if algorithm.sums is None:
            raise InputError(f"{task.action!r} gives nothing that could be summed unseen; ask for it plainly")
        agreed = algorithm.sums(task.action, task.payload)
        if bits != agreed.bits:
            raise InputError(f"{task.action!r} was agreed to be summed modulo 2^{agreed.bits}, not 2^{bits}")
        if agreed.least < self.least or agreed.colluders < self.colluders:
            raise MessageRefused(
                f"{task.action!r} of round {task.round} would be opened with {agreed.least} answers and withstand "
                f"{agreed.colluders} colluders; this client insists on {self.least} and {self.colluders}"
            )
        return agreed

    def _known(self, task: Task) -> Shapes | None:
        """Return the shapes of a task's result, if it is kept or in a sum; refuse another task of an entered sum."""
        name, round = sum_name(task), task.round
        file, facts = self._file(name, round), None
        if file.exists():
            facts = _Entered.decode(file.read_bytes()).facts
        elif _sum_key(name, round) not in self._entered() and (self.folder / "vector").exists():
            prepared = _Prepared.decode((self.folder / "vector").read_bytes())
            facts = prepared.facts if (prepared.name, prepared.round) == (name, round) else None
        if facts is not None:
            of, shapes = unpack(facts)
            if of == digest(task.payload).encode():
                found: Shapes = json.loads(shapes)
                return found
        self._check_new(name, round)
        return None

    def _check_new(self, name: str, round: int) -> None:
        """Refuse a sum that this client has entered before."""
        if _sum_key(name, round) in self._entered():
            raise MessageRefused(
                f"this client has already taken part in round {round} of {name!r}, and gives one vector into one sum; "
                "start a later round, or a run of another name"
            )

    def _enter(self, name: str, round: int) -> None:
        """Write down that a sum was entered; until then, nothing of it is sent."""
        key, entered = _sum_key(name, round), self._entered()
        if key not in entered:
            replace_file(self.folder / "sums", b"".join(sorted(entered | {key})))

    def _forget_other_rounds(self, round: int) -> None:
        """Forget sums of other rounds, whose answers nobody asks for any more, and secrets of those left unfinished."""
        for file in self.folder.glob("*.sum"):
            if SumState.decode(_Entered.decode(file.read_bytes()).state).round != round:
                file.unlink()

    def _file(self, name: str, round: int) -> Path:
        return self.folder / f"{_sum_key(name, round).hex()}.sum"

    def _entered(self) -> set[bytes]:
        """Return the keys of all sums this client has entered."""
        file = self.folder / "sums"
        content = file.read_bytes() if file.exists() else b""
        if len(content) % _KEY_BYTES:
            raise InputError(f"{file} is damaged; put back a copy of it, or sit this run out")
        return {content[place : place + _KEY_BYTES] for place in range(0, len(content), _KEY_BYTES)}

    def _setup(self, name: str, asked: Asked) -> tuple[SumSetup, Step]:
        """Return the setup and the step that the server names, with identities as this client knows them."""
        try:
            others = [str(other) for other in asked["clients"]]
            numbers = {fact: int(asked[fact]) for fact in ("round", "bits", "length", "threshold")}
            numbers["neighbours"] = int(asked.get("neighbours", 0))
            run, step = str(asked["run"]), Step(int(asked["step"]))
        except (KeyError, TypeError, ValueError):
            raise MessageRefused(f"client {name!r} cannot read which sum it is asked about; ask again") from None
        unknown = [other for other in others if other not in self.roster]
        if unknown or name not in others:
            stranger = repr(unknown[0]) if unknown else "a sum without itself"
            raise MessageRefused(f"client {name!r} does not know {stranger}; list clients of its roster, and it")
        try:
            return SumSetup(run, identities={other: self.roster[other] for other in others}, **numbers), step
        except InputError as problem:
            raise MessageRefused(str(problem)) from None

    def _prepared(self, setup: SumSetup) -> _Prepared:
        """Return the vector for a sum with this setup, if it is as agreed."""
        try:
            kept = _Prepared.decode((self.folder / "vector").read_bytes())
        except FileNotFoundError:
            raise MessageRefused("nothing is kept that could be summed; ask for the task first") from None
        except ValueError:
            raise InputError(f"{self.folder / 'vector'} is damaged; sit this round out") from None
        clients, least, colluders = kept.terms.clients, kept.terms.least, kept.terms.colluders
        about = (kept.name, kept.round, kept.terms.bits, len(kept.vector))
        if about != (setup.run, setup.round, setup.bits, setup.length):
            raise MessageRefused(f"what is kept is for round {kept.round} of {kept.name!r}; ask for the task first")
        if len(setup.identities) > clients:
            raise MessageRefused(
                f"the sum is over {len(setup.identities)} clients, but {clients} were said to be drawn; leave some out"
            )
        if setup.threshold < least:
            raise MessageRefused(
                f"the sum could be opened with {setup.threshold} answers, but the noise is made for {least} or more; "
                "raise the threshold"
            )
        # Of no more clients than colluders each one's noise is enough by itself.
        if clients > colluders and setup.threshold < lowest_threshold(len(setup.identities), colluders):
            raise MessageRefused(f"with {colluders} colluders the sum could be opened twice; raise the threshold")
        near = setup.neighbours
        if near and not neighbours.holds(len(setup.identities), near, setup.threshold, colluders):
            raise MessageRefused(
                f"{near} neighbours of {len(setup.identities)} clients do not protect them from {colluders} colluders; "
                "take more, or 0 for all"
            )
        return kept


def clear_sums(folder: Path) -> None:
    """Forget every secret in a seat's folder; which sums were entered stays known."""
    with locked(folder):
        for file in (folder / "vector", *folder.glob("*.sum")):
            file.unlink(missing_ok=True)
        sync_folder(folder)


def _sum_key(name: str, round: int) -> bytes:
    return fingerprint(pack([name.encode(), str(round).encode()]))


def sum_name(task: Task) -> str:
    """Return the name of a sum within its round: an algorithm may ask for several."""
    agreed = task.payload.get(AGREED)
    return f"{task.run}/{task.action}" + ("" if agreed is None else f"/{agreed.cpu().numpy().tobytes().hex()}")


def run_sum(
    task: Task, identities: Mapping[str, bytes], least: int, bits: int, length: int, exchange: Exchange, colluders: int
) -> Sum | None:
    """Run all steps with the clients that have done the task; return None where too few are left.

    Of very many clients, each works with so many neighbours as protect it from `colluders`.
    """
    threshold = enough(len(identities), least)
    if len(identities) < threshold:
        return None
    near = neighbours.fewest(len(identities), threshold, colluders)
    server = Server(SumSetup(sum_name(task), task.round, identities, bits, length, threshold, neighbours=near))
    asked = {"run": sum_name(task), "round": task.round, "clients": sorted(identities), "bits": bits}
    asked |= {"length": length, "threshold": threshold, "neighbours": near}
    waiting = dict.fromkeys(sorted(identities), b"")
    try:
        for step in Step:
            for client, message in exchange({**asked, "step": step}, waiting):
                with contextlib.suppress(MessageRefused):  # it counts as dropped out
                    server.receive(client, message)
            if step is not Step.UNMASK:
                waiting = server.advance()
        return server.finish()
    except SumAborted:
        return None
