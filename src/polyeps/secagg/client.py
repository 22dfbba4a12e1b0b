"""A client in a secure sum: five steps, each from its state and a message to a new state and a reply.

Between steps a client need not run: its state is a value that goes to bytes and back, and holds secrets. **Store the
state that a step returns before sending its reply**: a client that starts again from an older state could be made to
answer a step twice. Each step forgets the secrets that later ones do not need.

A client answers each step once and in order. It never gives both kinds of shares of another client: both come from the
one list of clients it confirmed, and it gives them only when enough others have signed the very same list.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from polyeps.errors import InputError, MessageRefused
from polyeps.secagg import masks, messages, shamir
from polyeps.secagg.messages import SERVER, Step, SumSetup, fingerprint, pack_names, pack_table, refused, unpack_table
from polyeps.secagg.shamir import SHARE_BYTES, Entropy

# What a client advertises: the key others encrypt to, the key masks are agreed with, the commitment to its seed.
ADVERTISED = (masks.KEY_BYTES, masks.KEY_BYTES, masks.KEY_BYTES)
_BOTH_SHARES = (SHARE_BYTES, SHARE_BYTES)
_INBOX = (masks.KEY_BYTES, masks.KEY_BYTES)
_LEAVE_OUT = "leave that client out"
LETTER_BYTES = sum(_BOTH_SHARES) + masks.TAG_BYTES
Vector = NDArray[np.uint64]  # of one client, modulo 2^bits


@dataclass(frozen=True)
class SumState:
    """The state of a client between the steps of a round. It is secret, and stays on the client's own disk."""

    step: Step  # the last one answered
    run: str
    round: int
    setup: bytes
    letter_key: bytes = field(default=b"", repr=False)
    mask_key: bytes = field(default=b"", repr=False)
    seed: bytes = field(default=b"", repr=False)
    inbox: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # of each other: its letter's and mask key
    shares: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # of each client's mask key, and of its seed
    survivors: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the state as bytes."""
        secrets = [self.letter_key, self.mask_key, self.seed]
        tables = [pack_table(self.inbox), pack_table(self.shares), pack_names(self.survivors)]
        facts = [bytes([self.step]), self.run.encode(), str(self.round).encode(), self.setup]
        return messages.pack([*facts, *secrets, *tables])

    @classmethod
    def decode(cls, content: bytes) -> SumState:
        """Return the state that some bytes stand for."""
        try:
            step, run, round, setup, letter_key, mask_key, seed, inbox, shares, survivors = messages.unpack(content)
            tables = unpack_table(inbox), unpack_table(shares), messages.unpack_names(survivors)
            return cls(Step(step[0]), run.decode(), int(round), setup, letter_key, mask_key, seed, *tables)
        except (ValueError, IndexError):
            raise InputError(f"the kept state, {len(content)} bytes, is damaged; sit this round out") from None


@dataclass(frozen=True)
class SumClient:
    """One client of one sum."""

    setup: SumSetup
    name: str
    identity: Ed25519PrivateKey = field(repr=False)
    entropy: Entropy = field(default=os.urandom, repr=False)  # anything but the system's own is for tests

    def __post_init__(self) -> None:
        if self.setup.identities.get(self.name) != self.identity.public_key().public_bytes_raw():
            raise InputError(f"the setup does not list client {self.name!r} with this identity; ask for the right one")

    def take(self, step: Step, kept: SumState | None, message: bytes, vector: Vector) -> tuple[SumState, bytes]:
        """Return the state and the answer after a step: for transports, which do not read the messages."""
        if step is Step.ADVERTISE:
            return self.advertise(kept)
        if kept is None:
            raise InputError(f"client {self.name!r} is asked to {step.name.lower()} before it advertised; begin there")
        if step is Step.MASK:
            return self.mask(kept, message, vector)
        later = {Step.SHARE: self.share, Step.CONFIRM: self.confirm, Step.UNMASK: self.unmask}
        return later[step](kept, message)

    def advertise(self, before: SumState | None = None) -> tuple[SumState, bytes]:
        """Send fresh keys for this round; `before` is the last state, so that no round is entered twice."""
        setup = self.setup
        if before and before.run == setup.run and before.round >= setup.round:
            raise MessageRefused(
                f"client {self.name!r} has already taken part in round {before.round} of run {setup.run!r}; "
                "start a later round"
            )
        letter_key, mask_key, seed = (self.entropy(masks.KEY_BYTES) for _ in ADVERTISED)
        kept = SumState(Step.ADVERTISE, setup.run, setup.round, setup.digest, letter_key, mask_key, seed)
        return kept, self._signed(Step.ADVERTISE, self._advertised(kept))

    def share(self, kept: SumState, content: bytes) -> tuple[SumState, bytes]:
        """Receive all clients' keys; send each a letter with its shares of this client's two secrets."""
        setup = self.setup
        signed = self._table(kept, Step.SHARE, content)
        if self.name not in signed or len(signed) < self._fewest:
            raise self._refused(Step.SHARE, f"brings keys of {len(signed)} clients", "wait for more of them")
        keys = {name: messages.open_signed(setup, Step.ADVERTISE, name, message) for name, message in signed.items()}
        if keys.pop(self.name) != self._advertised(kept):
            raise self._refused(Step.SHARE, "brings other keys for this client than its own", "send its own")
        points = {setup.point(self.name, name): name for name in signed}
        places = sorted(points)
        halves = [shamir.split(secret, places, setup.shares, self.entropy) for secret in (kept.mask_key, kept.seed)]
        shares = {points[place]: key + seed for place, key, seed in zip(places, *halves, strict=True)}
        letters, inbox, private = {}, {}, masks.private_key(kept.letter_key)
        for other, advertised in keys.items():
            letter_public, mask_public, _ = self._parts(other, advertised)
            secret = self._agreed(private, letter_public, other)
            there, back = setup.context("letter", self.name, other), setup.context("letter", other, self.name)
            letters[other] = masks.encrypt(masks.derive(secret, there), shares[other], there)
            inbox[other] = masks.derive(secret, back) + mask_public
        kept = replace(kept, step=Step.SHARE, letter_key=b"", inbox=inbox, shares={self.name: shares[self.name]})
        return kept, self._signed(Step.SHARE, pack_table(letters))

    def mask(self, kept: SumState, content: bytes, vector: Vector) -> tuple[SumState, bytes]:
        """Receive the letters to this client; send its vector under its own mask and one for each client that wrote."""
        setup = self.setup
        letters = self._table(kept, Step.MASK, content)
        if not letters.keys() <= kept.inbox.keys() or len(letters) + 1 < self._fewest:
            raise self._refused(Step.MASK, f"brings letters of {len(letters)} clients", "wait for more of them")
        masking = masks.Masking(self._words(vector))
        masking.put(masks.self_mask_key(setup, self.name, kept.seed))
        shares = dict(kept.shares)
        private = masks.private_key(kept.mask_key)
        for other, letter in letters.items():
            key, mask_public = messages.split_body(kept.inbox[other], _INBOX)
            opened = masks.decrypt(key, letter, setup.context("letter", other, self.name))
            if opened is None or len(opened) != sum(_BOTH_SHARES):
                raise refused(Step.SHARE, other, "holds a letter that cannot be read", _LEAVE_OUT)
            shares[other] = opened
            secret = self._agreed(private, mask_public, other)
            masking.put(masks.pair_mask_key(setup, self.name, other, secret), plus=self.name < other)
        body = masks.to_bytes(masks.cut(masking.words, setup.bits), setup.bits)
        kept = replace(kept, step=Step.MASK, mask_key=b"", seed=b"", inbox={}, shares=shares)
        return kept, self._signed(Step.MASK, body)

    def confirm(self, kept: SumState, content: bytes) -> tuple[SumState, bytes]:
        """Receive the list of clients in the sum; send this client's signature on it, its only one."""
        body = self._opened(kept, Step.CONFIRM, content)
        try:
            survivors = messages.unpack_names(body)
        except ValueError as problem:
            raise self._refused(Step.CONFIRM, f"cannot be read ({problem})", "ask for it again") from None
        near = self.setup.around(self.name) & set(survivors)
        if (
            self.name not in near
            or not kept.shares.keys() >= near
            or not set(survivors) <= self.setup.identities.keys()
        ):
            raise self._refused(Step.CONFIRM, "lists other clients than those that sent shares", "list those")
        if len(survivors) < self.setup.least or len(near) < self._fewest:
            few = f"lists {len(survivors)} clients of at least {self.setup.least}"
            if len(survivors) >= self.setup.least:
                few = f"lists {len(near)} of its neighbours, of at least {self._fewest}"
            raise self._refused(Step.CONFIRM, few, "abort the round")
        return replace(kept, step=Step.CONFIRM, survivors=survivors), self._signed(Step.CONFIRM, fingerprint(body))

    def unmask(self, kept: SumState, content: bytes) -> tuple[SumState, bytes]:
        """Receive others' signatures on the same list; send the shares that take the masks off the sum, and no more."""
        signed = self._table(kept, Step.UNMASK, content, from_all=True)
        if not signed.keys() <= set(kept.survivors) or len(signed) < self.setup.signatures:
            few = f"brings {len(signed)} signatures of at least {self.setup.signatures}"
            raise self._refused(Step.UNMASK, few, "abort the round")
        same = fingerprint(pack_names(kept.survivors))
        for other, message in signed.items():
            if messages.open_signed(self.setup, Step.CONFIRM, other, message) != same:
                lie = "the server sends different lists, abort the round"
                raise refused(Step.CONFIRM, other, "lists other clients", lie)
        given = {}
        for name, both in kept.shares.items():
            of_key, of_seed = messages.split_body(both, _BOTH_SHARES)
            given[name] = of_seed if name in kept.survivors else of_key
        return replace(kept, step=Step.UNMASK, shares={}), self._signed(Step.UNMASK, pack_table(given))

    def _opened(self, kept: SumState, step: Step, content: bytes) -> bytes:
        if kept.setup != self.setup.digest:
            raise self._refused(step, "is about a sum that this client has no state of", "send it in its own round")
        if kept.step != step - 1:
            last = kept.step.name.lower()
            raise self._refused(step, f"comes after step {last}", "steps are answered once and in order")
        return messages.open_stamped(self.setup, step, self.name, content)

    @property
    def _fewest(self) -> int:
        """The fewest clients, with itself, that must be left of those it works with."""
        return self.setup.shares if self.setup.neighbours else self.setup.least

    def _table(self, kept: SumState, step: Step, content: bytes, *, from_all: bool = False) -> dict[str, bytes]:
        try:
            table = unpack_table(self._opened(kept, step, content))
        except ValueError as problem:
            raise self._refused(step, f"cannot be read ({problem})", "ask for it again") from None
        for name in table.keys() - (self.setup.identities.keys() if from_all else self.setup.around(self.name)):
            where = "one of its neighbours" if name in self.setup.identities else "in the roster"
            raise self._refused(step, f"names {name!r}, who is not {where}", "leave it out")
        return table

    def _refused(self, step: Step, why: str, remedy: str) -> MessageRefused:
        return refused(step, SERVER, f"to {self.name!r} {why}", remedy)

    def _signed(self, step: Step, body: bytes) -> bytes:
        return messages.sign(self.setup, step, self.name, self.identity, body)

    def _advertised(self, kept: SumState) -> bytes:
        public = masks.public_key(kept.letter_key) + masks.public_key(kept.mask_key)
        return public + masks.commitment(self.setup, self.name, kept.seed)

    def _parts(self, other: str, advertised: bytes) -> list[bytes]:
        try:
            return messages.split_body(advertised, ADVERTISED)
        except ValueError as problem:
            raise refused(Step.ADVERTISE, other, f"is not of the right length ({problem})", _LEAVE_OUT) from None

    def _agreed(self, private: X25519PrivateKey, public: bytes, other: str) -> bytes:
        try:
            return masks.agree(private, public)
        except ValueError:
            raise refused(Step.ADVERTISE, other, "holds a key that is none", _LEAVE_OUT) from None

    def _words(self, vector: Vector) -> masks.Words:
        bits, length = self.setup.bits, self.setup.length
        if vector.dtype != np.uint64 or vector.shape != (length,) or int(vector.max()) >= 2**bits:
            raise InputError(f"client {self.name!r} must give {length} uint64 numbers below 2^{bits}; reduce them")
        return vector.astype(masks.word(bits))
