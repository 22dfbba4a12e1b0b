"""The server of a secure sum: it passes messages on, and learns the sum of the vectors, or nothing.

For each step it receives messages one by one and refuses bad ones; their senders count as dropped out unless a good
message follows. Then `advance` returns the messages that ask for the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import SumAborted
from polyeps.secagg import masks, messages, shamir
from polyeps.secagg.client import ADVERTISED, LETTER_BYTES
from polyeps.secagg.messages import Step, SumSetup, fingerprint, pack_names, pack_table, refused, unpack_table

_Item = TypeVar("_Item")


class Sum(NamedTuple):
    """The sum modulo 2^bits, and the clients whose vectors are in it."""

    total: NDArray[np.uint64]
    survivors: tuple[str, ...]


class Server:
    """The server of one sum."""

    def __init__(self, setup: SumSetup) -> None:
        self.setup = setup
        self.step: Step | None = Step.ADVERTISE  # None once it is over
        self._invited = set(setup.identities)  # clients that may answer this step
        self._answers: dict[str, bytes] = {}  # what each answered, opened
        self._signed: dict[str, bytes] = {}  # the same as it came, to pass on where others check the signature
        self._keys: dict[str, list[bytes]] = {}
        self._shared: tuple[str, ...] = ()  # clients whose secrets are shared: every mask in a sum is with one of these
        self._survivors: tuple[str, ...] = ()
        self._total: masks.Words = np.zeros(setup.length, masks.word(setup.bits))

    def receive(self, sender: str, content: bytes) -> None:
        """Take one client's answer to the present step, or refuse it."""
        step = self.step
        if step is None:
            raise refused(Step.UNMASK, sender, "comes after the end", "wait for the next round")
        if sender not in self._invited:
            raise refused(step, sender, "is from a client that was not asked", "let it take part in the next round")
        if sender in self._answers:
            raise refused(step, sender, "comes twice", "the first one counts")
        body = messages.open_signed(self.setup, step, sender, content)
        try:
            self._check(step, sender, body)
        except ValueError as problem:
            raise refused(step, sender, f"does not hold what it should ({problem})", "leave it out") from None
        if step is Step.MASK:
            self._total += masks.from_bytes(body, self.setup.bits)
        small = step in (Step.ADVERTISE, Step.CONFIRM)
        self._answers[sender] = b"" if step is Step.MASK else body  # a vector is kept in the total only
        self._signed[sender] = content if small else b""

    def advance(self) -> dict[str, bytes]:
        """End the present step; return the message to each remaining client, which asks for the next one."""
        setup, step = self.setup, self.step
        if step is None or step is Step.UNMASK:
            raise SumAborted("there is no step after this one; start a new round")
        self._require(setup.signatures if step is Step.CONFIRM else setup.least)
        answered = tuple(sorted(self._answers))
        if step is Step.ADVERTISE:
            self._keys = {name: messages.split_body(body, ADVERTISED) for name, body in self._answers.items()}
        elif step is Step.SHARE:
            self._shared = answered
        elif step is Step.MASK:
            self._survivors = answered
        if step is Step.SHARE:
            bodies = self._letters()
        elif step is Step.ADVERTISE and setup.neighbours:
            bodies = {name: pack_table(self._near(name, self._signed)) for name in answered}
        else:
            bodies = dict.fromkeys(answered, self._notice(step))
        self.step = Step(step + 1)
        self._invited, self._answers, self._signed = set(answered), {}, {}
        return {name: messages.stamp(setup, self.step, name, bodies[name]) for name in answered}

    def finish(self) -> Sum:
        """Return the sum without masks. All secrets are restored and checked first, so there is a sum or nothing."""
        setup = self.setup
        if self.step is not Step.UNMASK:
            raise SumAborted("the steps are not all done, or it is over; advance to the last one, or start a new round")
        self._require(setup.threshold)
        secrets = self._restored()
        masking, survivors = masks.Masking(self._total), dict.fromkeys(self._survivors)
        for name in self._survivors:
            masking.put(masks.self_mask_key(setup, name, secrets[name]), plus=False)
        for name in self._dropped:
            private = masks.private_key(secrets[name])
            for other in self._near(name, survivors):
                secret = masks.agree(private, self._keys[other][1])
                masking.put(masks.pair_mask_key(setup, name, other, secret), plus=other > name)
        self.step = None
        return Sum(masks.cut(masking.words, setup.bits).astype(np.uint64), self._survivors)

    @property
    def _dropped(self) -> tuple[str, ...]:
        """The clients that shared secrets and then sent no vector: masks with them are left in the sum."""
        survivors = set(self._survivors)
        return tuple(name for name in self._shared if name not in survivors)

    def _check(self, step: Step, sender: str, body: bytes) -> None:
        setup = self.setup
        if step is Step.ADVERTISE:
            for key in messages.split_body(body, ADVERTISED)[:2]:
                masks.check_public(key)
        elif step is Step.SHARE:
            _check_table(body, (self._keys.keys() & setup.around(sender)) - {sender}, LETTER_BYTES)
        elif step is Step.MASK:
            messages.split_body(body, [setup.length * masks.bytes_of(setup.bits)])
            if int(masks.from_bytes(body, setup.bits).max()) >= 2**setup.bits:
                raise ValueError(f"a number is not below 2^{setup.bits}")
        elif step is Step.CONFIRM:
            if body != fingerprint(self._notice(Step.MASK)):
                raise ValueError("another list of clients than was sent")
        else:
            _check_table(body, set(self._shared) & setup.around(sender), shamir.SHARE_BYTES)

    def _notice(self, step: Step) -> bytes:
        """Return what all clients are sent at the end of a step."""
        return pack_names(self._survivors) if step is Step.MASK else pack_table(self._signed)

    def _letters(self) -> dict[str, bytes]:
        """Return each client's letters from all others that wrote."""
        written = {name: unpack_table(body) for name, body in self._answers.items()}
        return {
            to: pack_table({n: sent[to] for n, sent in self._near(to, written).items() if n != to}) for to in written
        }

    def _near(self, name: str, table: Mapping[str, _Item]) -> dict[str, _Item]:
        """Return the part of a table that is about a client and those it works with."""
        if not self.setup.neighbours:
            return dict(table)
        return {other: table[other] for other in self.setup.around(name) if other in table}

    def _require(self, least: int) -> None:
        step, left = self.step, len(self._answers)
        if left < least:
            self._forget()
            raise SumAborted(
                f"step {step.name.lower() if step else ''}: {left} clients are left of at least {least}; "
                "there is no sum, start a new round"
            )

    def _restored(self) -> dict[str, bytes]:
        """Return the seeds of clients in the sum and the mask keys of dropouts, from the shares that were given."""
        setup = self.setup
        given = {name: unpack_table(body) for name, body in sorted(self._answers.items())}
        weights: dict[tuple[int, ...], dict[int, int]] = {}  # of holders' points, which many secrets have in common
        secrets, survivors = {}, set(self._survivors)
        for name in self._shared:
            held = {setup.point(name, holder): table[name] for holder, table in self._near(name, given).items()}
            points = tuple(sorted(held)[: setup.shares])
            if len(points) < setup.shares:
                self._forget()
                raise SumAborted(
                    f"step unmask: {len(points)} neighbours of client {name!r} are left of at least {setup.shares}; "
                    "there is no sum, start a new round"
                )
            if points not in weights:
                weights[points] = shamir.weights(points)
            secret = shamir.join(held, weights[points])
            _, mask_key, committed = self._keys[name]
            if secret is not None and name in survivors:
                fits = masks.commitment(setup, name, secret) == committed
            else:
                fits = secret is not None and masks.public_key(secret) == mask_key
            if secret is None or not fits:
                self._forget()
                raise SumAborted(
                    f"step unmask: the shares of the secret of client {name!r} do not fit what it advertised; "
                    "there is no sum, start a new round without the client at fault"
                )
            secrets[name] = secret
        return secrets

    def _forget(self) -> None:
        self.step = None
        self._answers, self._total = {}, np.zeros_like(self._total)


def _check_table(body: bytes, names: set[str], size: int) -> None:
    table = unpack_table(body)
    if table.keys() != names or any(len(item) != size for item in table.values()):
        raise ValueError(f"not {size} bytes for each of {len(names)} clients")
