"""Tasks and replies as Flower messages, on the server's side; `flower_client` is the other.

A SuperNode is one client. One that fails, or sends a message that cannot be read, counts as declining.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from polyeps.core import Profile, Replies, SumTerms, Task, Total, check_name
from polyeps.errors import InputError
from polyeps.secagg.masks import bytes_of
from polyeps.server import Transport
from polyeps.transport import codec
from polyeps.transport.flower_client import arrays, tensors
from polyeps.transport.flower_sums import Asked, run_sum

_log = logging.getLogger(__name__)


@dataclass
class OnFlower(Transport):
    """Clients on Flower SuperNodes, which may join late, restart or fail without ending a run."""

    grid: Grid
    timeout: float | None = None  # seconds to wait for replies; None: for ever
    rehearsal: bool = False  # whether clients are simulated: then a server's secrets may be seeded
    _nodes: dict[str, int] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)  # the node that had each name first
    _identities: dict[str, bytes] = field(default_factory=dict)  # empty for clients without a seat in secure sums

    def __post_init__(self) -> None:
        self.deployed = not self.rehearsal

    def profiles(self) -> tuple[Profile, ...]:
        """Return the profiles of all connected SuperNodes."""
        return tuple(sorted(self._introduced(self._connected()), key=lambda profile: profile.id))

    def newcomers(self) -> tuple[Profile, ...]:
        """Return the profiles of SuperNodes that joined late or were restarted."""
        known = set(self._nodes.values())
        return tuple(self._introduced([node for node in self._connected() if node not in known]))

    def _introduced(self, nodes: Sequence[int]) -> Iterator[Profile]:
        """Yield the profiles of nodes."""
        query = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes]
        yield from self.named(self.grid.send_and_receive(query, timeout=self.timeout) if query else ())

    def named(self, replies: Iterable[Message]) -> Iterator[Profile]:
        """Yield the profiles of nodes that introduced themselves, each name at most once.

        A name belongs to the first node that had it, for the whole run. While that node is not connected, another one
        may replace it, as a restarted SuperNode does: one that shows the same identity key (or none, where there was
        none), while no other replaces it. The first node gets its name back when it returns. A new name that several
        nodes claim at once is given to none of them. Other claims of a name are logged and left out.

        A key that is shown is not proven here: a copy of it is enough for plain tasks, but not for secure sums.
        """
        claims: dict[str, dict[int, tuple[Profile, bytes]]] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                content = reply.content["profile"]
                profile = _profile(content)
                identity = bytes(content.get("identity", b""))
                self.check_profile(node, profile, content)
            except Exception:
                _log.warning("node %d sends no valid profile, and is left out", node)
                continue
            claims.setdefault(profile.id, {})[node] = (profile, identity)
        connected = set(self._connected())
        for client, claimed in claims.items():
            node = self._owner(client, {node: identity for node, (_, identity) in claimed.items()}, connected)
            if others := sorted(claimed.keys() - {node}):
                _log.warning("nodes %s claim the name of client %r, and are left out; rename them", others, client)
            if node is not None:
                self._nodes[client] = node
                self._first.setdefault(client, node)
                profile, self._identities[client] = claimed[node]
                yield profile

    def check_profile(self, node: int, profile: Profile, content: Mapping[str, Any]) -> None:
        """Raise InputError for a profile that a node must not have; any is allowed here."""

    def _owner(self, client: str, claimed: Mapping[int, bytes], connected: Set[int]) -> int | None:
        """Return the node that gets a client's name, of those that claim it with these keys."""
        if client in self._first:
            claimed = {node: identity for node, identity in claimed.items() if identity == self._identities[client]}
        bearers = [self._first.get(client), self._nodes.get(client)]
        for bearer in bearers:
            if bearer in claimed:
                return bearer
        return next(iter(claimed)) if len(claimed) == 1 and connected.isdisjoint(bearers) else None

    def __call__(self, task: Task) -> Replies:
        received = codec.size(task.payload)
        answers: dict[str, Replies] = {}
        for client, reply in self._sent(MessageType.TRAIN, self._asked(task), task.round):
            try:
                answers[client] = _answered(client, reply, received)
            except Exception:
                _log.warning("the reply of client %r cannot be read", client)
                answers[client] = Replies((), {}, (), malformed=(client,))
        # Rows in the order they were asked for, whatever order replies arrived in.
        return codec.stack([answers[client] for client in task.to if client in answers], task.gives)

    def total(self, task: Task, terms: SumTerms) -> Total:
        bits = terms.bits
        if bits is None:
            return super().total(task, terms)
        shapes: dict[str, dict[str, list[int]]] = {}
        for client, reply in self._sent(MessageType.TRAIN, self._asked(task, bits=bits), task.round):
            with contextlib.suppress(Exception):  # one that cannot be read counts as none
                if reply.content["reply"]["answered"]:
                    given = reply.content["shapes"].items()
                    shapes[client] = {name: [int(side) for side in shape] for name, shape in given}
        wanted = {name: list(spec.shape) or [1] for name, spec in (task.gives or {}).items()}
        usual = wanted or (Counter(map(repr, shapes.values())).most_common(1)[0][0] if shapes else "")
        ids = tuple(
            client
            for client in task.to
            if self._identities.get(client) and client in shapes and usual in (shapes[client], repr(shapes[client]))
        )
        received = codec.size(task.payload)
        if not ids:
            return Total((), {}, received)
        sizes = shapes[ids[0]]
        length = sum(map(math.prod, sizes.values()))
        identities = {client: self._identities[client] for client in ids}
        found = run_sum(task, identities, terms.least, bits, length, self._passed_on, terms.colluders)
        sent = length * bytes_of(bits)
        if found is None:
            return Total(ids, {}, received, sent)
        return Total(found.survivors, codec.unflattened(found.total, sizes), received, sent)

    def _asked(self, task: Task, **more: int) -> dict[str, RecordDict]:
        """Return a task as the message to each client."""
        asked = ConfigRecord({"action": task.action, "run": task.run, "round": task.round, **more})
        return dict.fromkeys(task.to, RecordDict({"task": asked, "payload": arrays(task.payload)}))

    def _passed_on(self, asked: Asked, messages: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Yield the answers to one step of a secure sum."""
        contents = {
            client: RecordDict({"sum": ConfigRecord({**asked, "step": int(asked["step"]), "message": message})})
            for client, message in messages.items()
        }
        for client, reply in self._sent(f"{MessageType.TRAIN}.sum", contents, asked["round"]):
            with contextlib.suppress(Exception):  # a message that cannot be read counts as none
                yield client, bytes(reply.content["sum"]["message"])

    def _sent(self, kind: str, contents: Mapping[str, RecordDict], round: int) -> Iterator[tuple[str, Message]]:
        """Yield the replies that are no errors, in any order."""
        clients = {self._nodes[client]: client for client in contents if client in self._nodes}
        messages = [
            Message(contents[client], dst_node_id=node, message_type=kind, group_id=str(round))
            for node, client in clients.items()
        ]
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            if not reply.has_error() and reply.metadata.src_node_id in clients:
                yield clients[reply.metadata.src_node_id], reply

    def _connected(self) -> list[int]:
        return sorted(self.grid.get_node_ids())


def _profile(content: Mapping[str, Any]) -> Profile:
    """Return the profile that a node sent; anything but plain, sensible values is refused."""
    examples, epsilon, group = (content.get(name) for name in ("examples", "epsilon", "group"))
    profile = Profile(content["id"], examples, epsilon, group, content["ready"])
    check_name("a client's id", profile.id)
    if profile.group is not None:
        check_name("a client's group", profile.group)
    sensible = (
        bool(profile.id)
        and isinstance(profile.ready, bool)
        and (profile.examples is None or (type(profile.examples) is int and 0 < profile.examples < 2**53))
        and (profile.epsilon is None or (type(profile.epsilon) in (int, float) and 0 < profile.epsilon < math.inf))
    )
    if not sensible:
        raise InputError(f"client {profile.id!r} has a profile with impossible values; correct it")
    return profile


def _answered(client: str, reply: Message, received: int) -> Replies:
    """Return one client's reply to a task."""
    content = reply.content["reply"]
    if not content["answered"]:
        return Replies((), {}, (), exhausted=() if content["ready"] else (client,))
    payload = tensors(reply.content["payload"])
    rows = {name: tensor[None] for name, tensor in payload.items()}
    return Replies((client,), rows, (bool(content["ready"]),), received, codec.size(payload))
