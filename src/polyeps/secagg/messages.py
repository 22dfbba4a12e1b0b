"""The setup that all sides of a secure sum agree on beforehand, and the envelopes of their messages.

Everything is a list of byte strings, each behind its length in four bytes. There is one way to write a value, so that
signer and verifier see the same bytes. Every envelope names the step, its client and the digest of the setup: a message
of another run, round, roster or step is refused. A client signs its envelopes with a key known beforehand. The server
does not: no client trusts it, so a checksum against damage is all it needs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from polyeps.errors import InputError, MessageRefused
from polyeps.secagg import neighbours

_FORMAT = b"polyeps secure sum 1"
_SIGNATURE_BYTES = 64
_CHECKSUM_BYTES = 32
_LENGTH_BYTES = 4
# Messages up to this size are remembered once checked: those that the server passes on to every client.
_SMALL_BYTES = 4096
SERVER = "the server"


class Step(IntEnum):
    """The steps of a client, in order; the server's message of a step brings the input for it."""

    ADVERTISE = 0  # public keys of this round
    SHARE = 1  # shares of its secrets, encrypted to each other client
    MASK = 2  # its masked vector
    CONFIRM = 3  # a signature on the list of who is in the sum, of which it sends the fingerprint
    UNMASK = 4  # for each client in the sum its self-mask share, for each that dropped out its key share


@dataclass(frozen=True)
class SumSetup:
    """One sum: who may take part, over what, and how many must be left at the end.

    `threshold` shares restore a secret. A server that lists a client as in the sum to some and as dropped out to others
    collects both kinds of its shares, and with both restores its vector. An honest client gives one kind, the colluders
    give both: two thresholds must not fit into clients + colluders, so the threshold is above half of that number.

    A sum needs at least `least` = max(threshold, honest + colluders) vectors. With that many, at least `honest` of
    them carry noise the server and the colluders do not know: `honest` is the number by which to divide the noise.

    With `neighbours`, each client shares secrets and masks with so many others alone, as `secagg.neighbours` says, and
    `shares` among these and itself restore a secret; `threshold` is then that of signatures, of which a list needs
    `least`. 0: with all others.

    `identities` must reach each client by a way the server cannot change, or it could seat clients of its own. The sum
    over one client is its vector: it takes part in that only if all of the noise it needs is its own.
    """

    run: str
    round: int
    identities: Mapping[str, bytes]  # each client's Ed25519 public key
    bits: int  # the sum is modulo 2^bits
    length: int  # coordinates of a vector
    threshold: int
    honest: int = 1
    colluders: int = 0
    neighbours: int = 0

    def __post_init__(self) -> None:
        clients = len(self.identities)
        if clients < 1 or not all(self.identities):
            raise InputError("a secure sum needs clients, each with a name; list who takes part")
        if any(len(key) != 32 for key in self.identities.values()):
            raise InputError("an identity is an Ed25519 public key of 32 bytes; give each client's raw public key")
        if len(set(self.identities.values())) < clients:
            raise InputError("two clients of a secure sum have one identity; give each its own")
        if not 1 <= self.bits <= 64:
            raise InputError(f"bits must be 1 to 64, not {self.bits}")
        if not 1 <= self.length < 2**29 or self.round < 0:
            raise InputError("a vector has 1 to 2^29 - 1 coordinates, and rounds count from 0")
        if self.honest < 1 or self.colluders < 0:
            raise InputError("honest must be at least 1, colluders at least 0")
        if not lowest_threshold(clients, self.colluders) <= self.threshold <= clients:
            raise InputError(
                f"the threshold of {clients} clients with {self.colluders} colluders must be "
                f"{lowest_threshold(clients, self.colluders)} to {clients}, not {self.threshold}"
            )
        if self.least > clients:
            raise InputError(
                f"{self.honest} honest clients and {self.colluders} colluders are more than the {clients} there are; "
                "ask for fewer"
            )
        if self.neighbours and not neighbours.holds(clients, self.neighbours, self.threshold, self.colluders):
            raise InputError(
                f"{self.neighbours} neighbours of {clients} clients do not protect them from {self.colluders} "
                f"colluders and a threshold of {self.threshold}; take more, or 0 for all"
            )

    @property
    def least(self) -> int:
        """The fewest vectors of a sum; with fewer there is none."""
        return max(self.threshold, self.honest + self.colluders)

    @cached_property
    def shares(self) -> int:
        """The number of shares that restore a secret: as many as are left of any neighbourhood, whoever is missing."""
        if not self.neighbours:
            return self.threshold
        return self.neighbours + 1 - (len(self.identities) - self.threshold)

    @property
    def signatures(self) -> int:
        """The fewest signatures on the list of who is in the sum."""
        return self.least if self.neighbours else self.threshold

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(sorted(self.identities), start=1)}

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self.identities)

    def around(self, name: str) -> Set[str]:
        """Return a client and those that it shares secrets and masks with."""
        if not self.neighbours:
            return self.identities.keys()
        first, names = self._places[name] - 1 - self.neighbours // 2, self._names
        return {names[(first + step) % len(names)] for step in range(self.neighbours + 1)}

    def point(self, owner: str, holder: str) -> int:
        """Return the point of a holder's shares of an owner's secrets; never 0, where the secret is.

        Among neighbours it says how far the holder is from the owner, so that weights serve many secrets.
        """
        if not self.neighbours:
            return self._places[holder]
        return 1 + (self._places[holder] - self._places[owner]) % len(self._places)

    @cached_property
    def digest(self) -> bytes:
        """The fingerprint of the setup."""
        numbers = [self.round, self.bits, self.length, self.threshold, self.honest, self.colluders]
        if self.neighbours:
            numbers.append(self.neighbours)
        parts = [_FORMAT, self.run.encode(), *(str(number).encode() for number in numbers)]
        return fingerprint(pack([*parts, pack_table(self.identities)]))

    def context(self, purpose: str, first: str, second: str) -> bytes:
        """Return the context that a key of one purpose between two clients is bound to."""
        names = (purpose, self.run, str(self.round), first, second)
        return pack([self.digest, *(name.encode() for name in names)])


def lowest_threshold(clients: int, colluders: int = 0) -> int:
    """Return the least number of shares that may restore a secret.

    >>> lowest_threshold(100), lowest_threshold(100, colluders=10)
    (51, 56)
    """
    return (clients + colluders) // 2 + 1


def enough(clients: int, least: int) -> int:
    """Return how many of some clients must stay, where the noise in their vectors needs at least `least`."""
    return max(least, lowest_threshold(clients))


def refused(step: Step, sender: str, why: str, remedy: str) -> MessageRefused:
    """Return the error for a message, which names its sender and its step."""
    who = sender if sender == SERVER else f"client {sender!r}"
    return MessageRefused(f"step {step.name.lower()}: the message of {who} {why}; {remedy}")


def sign(setup: SumSetup, step: Step, sender: str, identity: Ed25519PrivateKey, body: bytes) -> bytes:
    """Return a client's envelope."""
    content = _envelope(setup, step, sender, body)
    return content + identity.sign(content)


def open_signed(setup: SumSetup, step: Step, sender: str, content: bytes) -> bytes:
    """Return the content of a client's envelope, if it is from that client, for this step of this setup."""
    body = _opened(setup, step, sender, sender, content, _SIGNATURE_BYTES)
    check = _is_signed_remembered if len(content) <= _SMALL_BYTES else _is_signed
    if not check(setup.identities[sender], content):
        raise refused(step, sender, "is not signed by its identity", "it is damaged or forged, ask for it again")
    return body


def _is_signed(identity: bytes, content: bytes) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(identity)
        key.verify(content[-_SIGNATURE_BYTES:], content[:-_SIGNATURE_BYTES])
    except (InvalidSignature, ValueError):
        return False
    return True


# With all clients in one process, each signature is checked by every one of them; the answer is always the same.
_is_signed_remembered = lru_cache(maxsize=1 << 13)(_is_signed)


def stamp(setup: SumSetup, step: Step, to: str, body: bytes) -> bytes:
    """Return the server's envelope to one client."""
    content = _envelope(setup, step, to, body)
    return content + fingerprint(content)


def open_stamped(setup: SumSetup, step: Step, to: str, content: bytes) -> bytes:
    """Return the content of the server's envelope, if it is undamaged, to that client, for this step of this setup."""
    body = _opened(setup, step, to, SERVER, content, _CHECKSUM_BYTES)
    if fingerprint(content[:-_CHECKSUM_BYTES]) != content[-_CHECKSUM_BYTES:]:
        raise refused(step, SERVER, "is damaged", "ask for it again")
    return body


def pack(items: Iterable[bytes]) -> bytes:
    """Return a list of byte strings as bytes."""
    return b"".join(part for item in items for part in (len(item).to_bytes(_LENGTH_BYTES, "big"), item))


def unpack(content: bytes) -> list[bytes]:
    """Return the list that some bytes stand for; ValueError where they stand for none.

    >>> unpack(pack([b"one", b"", b"two"]))
    [b'one', b'', b'two']
    """
    items, place = [], 0
    while place < len(content):
        begin = place + _LENGTH_BYTES
        place = begin + int.from_bytes(content[place:begin], "big")
        if begin > len(content) or place > len(content):
            raise ValueError("the bytes end too soon")
        items.append(content[begin:place])
    return items


def pack_table(table: Mapping[str, bytes]) -> bytes:
    """Return byte strings by name as bytes, in the order of the names."""
    return pack(item for name in sorted(table) for item in (name.encode(), table[name]))


def unpack_table(content: bytes) -> dict[str, bytes]:
    """Return the table that some bytes stand for; ValueError where they stand for none."""
    items = unpack(content)
    names = unpack_names(pack(items[::2]))
    return dict(zip(names, items[1::2], strict=True))


def pack_names(names: Iterable[str]) -> bytes:
    """Names in their order."""
    return pack(name.encode() for name in sorted(names))


def unpack_names(content: bytes) -> tuple[str, ...]:
    """Names in their order; ValueError where one is not a name, comes twice or is out of order."""
    names = tuple(item.decode() for item in unpack(content))
    if any(first >= second for first, second in itertools.pairwise(names)):
        raise ValueError("names are not in order")
    return names


def _envelope(setup: SumSetup, step: Step, client: str, body: bytes) -> bytes:
    return pack([_FORMAT, bytes([step]), setup.digest, client.encode(), body])


def _opened(setup: SumSetup, step: Step, client: str, sender: str, content: bytes, trailer: int) -> bytes:
    try:
        kind, number, digest, name, body = unpack(content[:-trailer])
    except ValueError:
        raise refused(step, sender, f"of {len(content)} bytes is damaged", "ask for it again") from None
    wrong = [
        (kind != _FORMAT, "is none of a secure sum"),
        (digest != setup.digest, "belongs to another run, round or roster"),
        (number != bytes([step]), "belongs to another step"),
        (name != client.encode(), "is from or for another client"),
    ]
    for is_wrong, why in wrong:
        if is_wrong:
            raise refused(step, sender, why, f"send that of step {step.name.lower()} of this round")
    return body


def fingerprint(content: bytes) -> bytes:
    """Return a short fingerprint that no other bytes have."""
    return hashlib.sha256(content).digest()


def split_body(body: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Return consecutive parts of fixed sizes; ValueError where the body is not as long as all of them."""
    if len(body) != sum(sizes):
        raise ValueError(f"{len(body)} bytes instead of {sum(sizes)}")
    parts, place = [], 0
    for size in sizes:
        parts.append(body[place : place + size])
        place += size
    return parts
