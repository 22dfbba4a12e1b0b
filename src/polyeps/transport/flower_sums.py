"""Secure sums over Flower's messages: a client's seat in them, and the server, which only passes bytes on.

A sum takes six exchanges. First clients do their task and keep the result; then they take the five steps of `secagg`.
Between messages a client does not run, so its state is in a folder of its own, written before the message it belongs to
is sent, and locked while one is answered.

    FOLDER/vector         the result of the last task, until it is masked
    FOLDER/kept           the state of the last sum (`secagg.client.SumState`)
    FOLDER/sums           a fingerprint of every sum ever entered

The difference of two sums over one vector could be the vector itself. So a sum, by its name and round, is entered once
and with one setup: it is written to the disk before its first message is sent, and refused for ever after.

A client trusts its own roster for the identities of others, not the server. With the vector it keeps the terms it
agreed to (`core.SumTerms`), and it takes part only in a sum that cannot be opened with fewer answers than its noise was
made for, nor twice with the help of as many colluders as it allows for. The sum's name holds the fingerprint of all
that was agreed, so that only clients that add the same noise are in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from polyeps.core import AGREED, Algorithm, Payload, Task
from polyeps.errors import InputError, MessageRefused, SumAborted
from polyeps.ledger.head_file import replace_file
from polyeps.secagg.client import SumClient, SumState
from polyeps.secagg.messages import Step, SumSetup, enough, fingerprint, lowest_threshold, pack, unpack
from polyeps.secagg.protocol import take_step
from polyeps.secagg.server import Server, Sum
from polyeps.transport import codec
from polyeps.transport.client_files import locked

_OWNERS = 0o600  # the mode of files that hold secrets
_KEY_BYTES = 32  # of a sum's fingerprint
_Words = NDArray[np.uint64]
Asked = Mapping[str, Any]  # what the server says of a step, as plain values
# Sends the same question to clients, with bytes for each, and yields each client's answer.
Exchange = Callable[[Asked, Mapping[str, bytes]], Iterable[tuple[str, bytes]]]


@dataclass(frozen=True)
class Seat:
    """A client's place in secure sums."""

    identity: Ed25519PrivateKey = field(repr=False)
    roster: Mapping[str, bytes]  # every client's public key, as this client knows it from elsewhere
    folder: Path  # of this client alone, for what it keeps between messages

    @property
    def public(self) -> bytes:
        return self.identity.public_key().public_bytes_raw()

    def prepare(self, algorithm: Algorithm, task: Task, payload: Payload, bits: int) -> None:
        """Keep the vector of this task until it is summed, in place of that of another."""
        codec.check_integers(payload)
        if not payload or algorithm.sums is None:
            raise InputError(f"{task.action!r} gives nothing that could be summed unseen; ask for it plainly")
        agreed = algorithm.sums(task.action, task.payload)
        if bits != agreed.bits:
            raise InputError(f"{task.action!r} was agreed to be summed modulo 2^{agreed.bits}, not 2^{bits}")
        numbers = torch.cat([tensor.flatten() for tensor in payload.values()]).to(torch.int64).cpu().numpy()
        words = (numbers & (2**bits - 1)).astype(np.uint64)
        facts = (sum_name(task), task.round, bits, agreed.clients, agreed.least, agreed.colluders)
        with locked(self.folder):
            self.check_new(sum_name(task), task.round)
            replace_file(self._vector, pack([*(str(fact).encode() for fact in facts), words.tobytes()]), _OWNERS)

    def check_new(self, name: str, round: int) -> None:
        """Refuse a sum that this client has entered before."""
        if _sum_key(name, round) in self._entered():
            raise MessageRefused(
                f"this client has already taken part in round {round} of {name!r}, and gives one vector into one sum; "
                "start a later round, or a run of another name"
            )

    def answer(self, name: str, asked: Asked, message: bytes) -> bytes:
        """Return this client's message of a step."""
        setup, step = self._setup(name, asked)
        with locked(self.folder):
            if step is Step.ADVERTISE:
                self.check_new(setup.run, setup.round)
            vector = self._prepared(setup) if step <= Step.MASK else np.zeros(0, np.uint64)
            kept = SumState.decode(self._kept.read_bytes()) if self._kept.exists() else None
            after, answer = take_step(SumClient(setup, name, self.identity), step, kept, message, vector)
            key, entered = _sum_key(setup.run, setup.round), self._entered()
            if key not in entered:
                replace_file(self._sums, b"".join(sorted(entered | {key})), _OWNERS)
            replace_file(self._kept, after.encode(), _OWNERS)
            if step is Step.MASK:
                self._vector.unlink()
        return answer

    def _entered(self) -> set[bytes]:
        """Return the keys of all sums this client has entered."""
        content = self._sums.read_bytes() if self._sums.exists() else b""
        if len(content) % _KEY_BYTES:
            raise InputError(f"{self._sums} is damaged; put back a copy of it, or sit this run out")
        return {content[place : place + _KEY_BYTES] for place in range(0, len(content), _KEY_BYTES)}

    def _setup(self, name: str, asked: Asked) -> tuple[SumSetup, Step]:
        """Return the setup and the step that the server names, with identities as this client knows them."""
        try:
            others = [str(other) for other in asked["clients"]]
            numbers = {fact: int(asked[fact]) for fact in ("round", "bits", "length", "threshold")}
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

    def _prepared(self, setup: SumSetup) -> _Words:
        """Return the vector for a sum with this setup, if it is as agreed."""
        try:
            name, *numbers, content = unpack(self._vector.read_bytes())
        except FileNotFoundError:
            raise MessageRefused("nothing is kept that could be summed; ask for the task first") from None
        run, vector = name.decode(), np.frombuffer(content, np.uint64)
        round, bits, clients, least, colluders = map(int, numbers)
        if (run, round, bits, len(vector)) != (setup.run, setup.round, setup.bits, setup.length):
            raise MessageRefused(f"what is kept is for round {round} of {run!r}; ask for the task first")
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
        return vector

    @property
    def _vector(self) -> Path:
        return self.folder / "vector"

    @property
    def _kept(self) -> Path:
        return self.folder / "kept"

    @property
    def _sums(self) -> Path:
        return self.folder / "sums"


def _sum_key(name: str, round: int) -> bytes:
    return fingerprint(pack([name.encode(), str(round).encode()]))


def sum_name(task: Task) -> str:
    """Return the name of a sum within its round: an algorithm may ask for several."""
    agreed = task.payload.get(AGREED)
    return f"{task.run}/{task.action}" + ("" if agreed is None else f"/{agreed.cpu().numpy().tobytes().hex()}")


def run_sum(
    task: Task, identities: Mapping[str, bytes], least: int, bits: int, length: int, exchange: Exchange
) -> Sum | None:
    """Run all steps with the clients that have done the task; return None where too few are left."""
    threshold = enough(len(identities), least)
    if len(identities) < threshold:
        return None
    server = Server(SumSetup(sum_name(task), task.round, identities, bits, length, threshold))
    asked = {"run": sum_name(task), "round": task.round, "clients": sorted(identities), "bits": bits}
    waiting = dict.fromkeys(sorted(identities), b"")
    try:
        for step in Step:
            for client, message in exchange({**asked, "length": length, "threshold": threshold, "step": step}, waiting):
                with contextlib.suppress(MessageRefused):  # it counts as dropped out
                    server.receive(client, message)
            if step is not Step.UNMASK:
                waiting = server.advance()
        return server.finish()
    except SumAborted:
        return None
