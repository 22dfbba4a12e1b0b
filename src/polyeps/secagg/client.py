"""A client in a secure sum: five steps, each from what it kept and what arrived to what it keeps and what it sends.

Between steps a client need not run: what it keeps is a value that goes to bytes and back, and holds secrets. **Store
what a step returns before sending its message**: a client that starts again from an older value could be talked into
answering a step twice. Each step forgets the secrets that later ones do not need.

A client answers each step once and in order. It never gives both kinds of shares of one peer: both come from the one
list of clients it confirmed, and it gives them only when enough others have signed the very same list.
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
from polyeps.secagg import masks, shamir
from polyeps.secagg.messages import (
    SERVER,
    Step,
    Terms,
    fingerprint,
    open_signed,
    open_stamped,
    pack,
    pack_names,
    pack_table,
    refused,
    sign,
    split_body,
    unpack,
    unpack_names,
    unpack_table,
)
from polyeps.secagg.shamir import SHARE_BYTES, Entropy

# What a client advertises: the key others encrypt to, the key masks are agreed with, the commitment to its seed.
ADVERTISED = (masks.KEY_BYTES, masks.KEY_BYTES, masks.KEY_BYTES)
_BOTH_SHARES = (SHARE_BYTES, SHARE_BYTES)
_INBOX = (masks.KEY_BYTES, masks.KEY_BYTES)
_LEAVE_OUT = "leave that client out"
LETTER_BYTES = sum(_BOTH_SHARES) + masks.TAG_BYTES


@dataclass(frozen=True)
class Kept:
    """What a client keeps between the steps of a round. It is secret, and stays on the client's own disk."""

    step: Step  # the last one answered
    run: str
    round: int
    terms: bytes
    letter_key: bytes = field(default=b"", repr=False)
    mask_key: bytes = field(default=b"", repr=False)
    seed: bytes = field(default=b"", repr=False)
    inbox: Mapping[str, bytes] = field(
        default_factory=dict, repr=False
    )  # of each other: its letter's key, its mask key
    shares: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # of each client's mask key, and of its seed
    survivors: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The bytes to keep."""
        secrets = [self.letter_key, self.mask_key, self.seed]
        tables = [pack_table(self.inbox), pack_table(self.shares), pack_names(self.survivors)]
        return pack([bytes([self.step]), self.run.encode(), str(self.round).encode(), self.terms, *secrets, *tables])

    @classmethod
    def decode(cls, content: bytes) -> Kept:
        """What was kept."""
        try:
            step, run, round, terms, letter_key, mask_key, seed, inbox, shares, survivors = unpack(content)
            return cls(
                step=Step(step[0]),
                run=run.decode(),
                round=int(round),
                terms=terms,
                letter_key=letter_key,
                mask_key=mask_key,
                seed=seed,
                inbox=unpack_table(inbox),
                shares=unpack_table(shares),
                survivors=unpack_names(survivors),
            )
        except (ValueError, IndexError):
            raise InputError(
                f"what was kept of a secure sum, {len(content)} bytes, is damaged; sit this round out"
            ) from None


@dataclass(frozen=True)
class Agent:
    """One client under the terms of one sum."""

    terms: Terms
    name: str
    identity: Ed25519PrivateKey = field(repr=False)
    entropy: Entropy = field(default=os.urandom, repr=False)  # anything but the system's own is for tests

    def __post_init__(self) -> None:
        if self.terms.identities.get(self.name) != self.identity.public_key().public_bytes_raw():
            raise InputError(f"the terms do not list client {self.name!r} with this identity; ask for the right terms")

    def advertise(self, before: Kept | None = None) -> tuple[Kept, bytes]:
        """Fresh keys for this round. `before` is what the client kept last: no round is entered twice."""
        terms = self.terms
        if before and before.run == terms.run and before.round >= terms.round:
            raise MessageRefused(
                f"client {self.name!r} has already taken part in round {before.round} of run {terms.run!r}; "
                "start a later round"
            )
        letter_key, mask_key, seed = (self.entropy(masks.KEY_BYTES) for _ in ADVERTISED)
        kept = Kept(Step.ADVERTISE, terms.run, terms.round, terms.digest, letter_key, mask_key, seed)
        return kept, self._signed(Step.ADVERTISE, self._advertised(kept))

    def share(self, kept: Kept, content: bytes) -> tuple[Kept, bytes]:
        """From all clients' keys: to each a letter with its shares of this client's two secrets."""
        terms = self.terms
        signed = self._table(kept, Step.SHARE, content)
        if self.name not in signed or len(signed) < terms.least:
            raise self._refused(Step.SHARE, f"brings keys of {len(signed)} clients", "wait for more of them")
        keys = {name: open_signed(terms, Step.ADVERTISE, name, message) for name, message in signed.items()}
        if keys.pop(self.name) != self._advertised(kept):
            raise self._refused(Step.SHARE, "brings other keys for this client than its own", "send its own")
        points = [terms.points[name] for name in signed]
        halves = [shamir.split(secret, points, terms.threshold, self.entropy) for secret in (kept.mask_key, kept.seed)]
        shares = {name: key + seed for name, key, seed in zip(signed, *halves, strict=True)}
        letters, inbox, private = {}, {}, masks.private_key(kept.letter_key)
        for peer, advertised in keys.items():
            letter_public, mask_public, _ = self._parts(peer, advertised)
            secret = self._agreed(private, letter_public, peer)
            there, back = terms.context("letter", self.name, peer), terms.context("letter", peer, self.name)
            letters[peer] = masks.encrypt(masks.derive(secret, there), shares[peer], there)
            inbox[peer] = masks.derive(secret, back) + mask_public
        kept = replace(kept, step=Step.SHARE, letter_key=b"", inbox=inbox, shares={self.name: shares[self.name]})
        return kept, self._signed(Step.SHARE, pack_table(letters))

    def mask(self, kept: Kept, content: bytes, vector: NDArray[np.uint64]) -> tuple[Kept, bytes]:
        """From the letters to this client: its vector under its own mask and one with each client that wrote."""
        terms = self.terms
        letters = self._table(kept, Step.MASK, content)
        if not letters.keys() <= kept.inbox.keys() or len(letters) + 1 < terms.least:
            raise self._refused(Step.MASK, f"brings letters of {len(letters)} clients", "wait for more of them")
        masking = masks.Masking(self._words(vector))
        masking.put(masks.self_mask_key(terms, self.name, kept.seed))
        shares = dict(kept.shares)
        private = masks.private_key(kept.mask_key)
        for peer, letter in letters.items():
            key, mask_public = split_body(kept.inbox[peer], _INBOX)
            opened = masks.decrypt(key, letter, terms.context("letter", peer, self.name))
            if opened is None or len(opened) != sum(_BOTH_SHARES):
                raise refused(Step.SHARE, peer, "holds a letter that cannot be read", _LEAVE_OUT)
            shares[peer] = opened
            secret = self._agreed(private, mask_public, peer)
            masking.put(masks.pair_mask_key(terms, self.name, peer, secret), plus=self.name < peer)
        body = masks.to_bytes(masks.cut(masking.words, terms.bits), terms.bits)
        kept = replace(kept, step=Step.MASK, mask_key=b"", seed=b"", inbox={}, shares=shares)
        return kept, self._signed(Step.MASK, body)

    def confirm(self, kept: Kept, content: bytes) -> tuple[Kept, bytes]:
        """From the list of clients in the sum: this client's signature on it, its only one."""
        body = self._opened(kept, Step.CONFIRM, content)
        try:
            survivors = unpack_names(body)
        except ValueError as problem:
            raise self._refused(Step.CONFIRM, f"cannot be read ({problem})", "ask for it again") from None
        if self.name not in survivors or not kept.shares.keys() >= set(survivors):
            raise self._refused(Step.CONFIRM, "lists other clients than those that sent shares", "list those")
        if len(survivors) < self.terms.least:
            raise self._refused(
                Step.CONFIRM, f"lists {len(survivors)} clients of at least {self.terms.least}", "abort the round"
            )
        return replace(kept, step=Step.CONFIRM, survivors=survivors), self._signed(Step.CONFIRM, fingerprint(body))

    def unmask(self, kept: Kept, content: bytes) -> tuple[Kept, bytes]:
        """From others' signatures on the same list: the shares that take the masks off the sum, and nothing else."""
        signed = self._table(kept, Step.UNMASK, content)
        if not signed.keys() <= set(kept.survivors) or len(signed) < self.terms.threshold:
            raise self._refused(
                Step.UNMASK, f"brings {len(signed)} signatures of at least {self.terms.threshold}", "abort the round"
            )
        same = fingerprint(pack_names(kept.survivors))
        for peer, message in signed.items():
            if open_signed(self.terms, Step.CONFIRM, peer, message) != same:
                raise refused(
                    Step.CONFIRM, peer, "lists other clients", "the server tells two stories, abort the round"
                )
        given = {}
        for name, both in kept.shares.items():
            of_key, of_seed = split_body(both, _BOTH_SHARES)
            given[name] = of_seed if name in kept.survivors else of_key
        return replace(kept, step=Step.UNMASK, shares={}), self._signed(Step.UNMASK, pack_table(given))

    def _opened(self, kept: Kept, step: Step, content: bytes) -> bytes:
        if kept.terms != self.terms.digest:
            raise self._refused(step, "is about terms this client holds nothing of", "send it in its own round")
        if kept.step != step - 1:
            raise self._refused(
                step, f"comes after step {kept.step.name.lower()}", "steps are answered once and in order"
            )
        return open_stamped(self.terms, step, self.name, content)

    def _table(self, kept: Kept, step: Step, content: bytes) -> dict[str, bytes]:
        try:
            table = unpack_table(self._opened(kept, step, content))
        except ValueError as problem:
            raise self._refused(step, f"cannot be read ({problem})", "ask for it again") from None
        for name in table.keys() - self.terms.identities.keys():
            raise self._refused(step, f"speaks of {name!r}, who is not in the roster", "leave it out")
        return table

    def _refused(self, step: Step, why: str, remedy: str) -> MessageRefused:
        return refused(step, SERVER, f"to {self.name!r} {why}", remedy)

    def _signed(self, step: Step, body: bytes) -> bytes:
        return sign(self.terms, step, self.name, self.identity, body)

    def _advertised(self, kept: Kept) -> bytes:
        public = masks.public_key(kept.letter_key) + masks.public_key(kept.mask_key)
        return public + masks.commitment(self.terms, self.name, kept.seed)

    def _parts(self, peer: str, advertised: bytes) -> list[bytes]:
        try:
            return split_body(advertised, ADVERTISED)
        except ValueError as problem:
            raise refused(Step.ADVERTISE, peer, f"is not of the right length ({problem})", _LEAVE_OUT) from None

    def _agreed(self, private: X25519PrivateKey, public: bytes, peer: str) -> bytes:
        try:
            return masks.agree(private, public)
        except ValueError:
            raise refused(Step.ADVERTISE, peer, "holds a key that is none", _LEAVE_OUT) from None

    def _words(self, vector: NDArray[np.uint64]) -> masks.Words:
        bits, length = self.terms.bits, self.terms.length
        if vector.dtype != np.uint64 or vector.shape != (length,) or int(vector.max()) >= 2**bits:
            raise InputError(
                f"client {self.name!r} must give {length} uint64 numbers below 2^{bits}; reduce them first"
            )
        return vector.astype(masks.word(bits))
