"""The same tasks and replies as Flower messages, on the server's side; `flower_client` is the other.

A node is one client. A node that fails, or sends what cannot be read, counts as one that declined.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from polyeps.core import Profile, Replies, Task, Total, check_name
from polyeps.errors import InputError
from polyeps.secagg.masks import bytes_of
from polyeps.server import Transport
from polyeps.transport import codec
from polyeps.transport.flower_client import arrays, tensors
from polyeps.transport.flower_client import client_app as client_app
from polyeps.transport.flower_sums import Asked, run_sum

log = logging.getLogger(__name__)


def server_app(federate: Callable[[Transport, Context], None], timeout: float | None = None) -> ServerApp:
    """A ServerApp that gives `federate` a transport to the nodes of its grid."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator,unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        federate(OnFlower(grid, timeout), context)

    return app


@dataclass
class OnFlower(Transport):
    """Clients on Flower nodes. Nodes may join late, restart or fail; none of it ends a run."""

    grid: Grid
    timeout: float | None = None  # seconds to wait for replies; None: for ever
    rehearsal: bool = False  # whether clients are simulated: then a server's secrets may be seeded
    _nodes: dict[str, int] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)  # the node that bore each name first
    _identities: dict[str, bytes] = field(default_factory=dict)  # empty for clients without a seat in secure sums

    def __post_init__(self) -> None:
        self.deployed = not self.rehearsal

    def profiles(self) -> tuple[Profile, ...]:
        """Ask every connected node who it is."""
        return tuple(sorted(self._introduced(self._connected()), key=lambda face: face.id))

    def newcomers(self) -> tuple[Profile, ...]:
        """Ask the nodes that are connected and not known yet: those that joined late or were restarted."""
        known = set(self._nodes.values())
        return tuple(self._introduced([node for node in self._connected() if node not in known]))

    def _introduced(self, nodes: Sequence[int]) -> Iterator[Profile]:
        """Yield who nodes say they are, each name at most once; other claims of a name are logged and left out.

        A name belongs to the first node that bore it, for the whole run. While that node is not connected, another one
        may stand in for it, as a restarted SuperNode does: one that shows the same identity key (or none, where there
        was none), while no other stands in. The first node has its name back when it returns. A name that was nobody's
        before, and that several nodes claim at once, stays nobody's.

        A key that is shown is not proven here: whoever copies it can stand in for plain tasks, not in secure sums.
        """
        claims: dict[str, dict[int, tuple[Profile, bytes]]] = {}
        query = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes]
        for reply in self.grid.send_and_receive(query, timeout=self.timeout) if query else ():
            node = reply.metadata.src_node_id
            try:
                told = reply.content["profile"]
                face = _profile(told)
                identity = bytes(told.get("identity", b""))
            except Exception:
                log.warning("node %d does not introduce itself as a client does, and is left out", node)
                continue
            claims.setdefault(face.id, {})[node] = (face, identity)
        connected = set(self._connected())
        for client, claimed in claims.items():
            node = self._owner(client, {node: identity for node, (_, identity) in claimed.items()}, connected)
            if others := sorted(claimed.keys() - {node}):
                log.warning(
                    "nodes %s call themselves client %r, and are left out; give each its own name", others, client
                )
            if node is not None:
                self._nodes[client] = node
                self._first.setdefault(client, node)
                face, self._identities[client] = claimed[node]
                yield face

    def _owner(self, client: str, claimed: Mapping[int, bytes], connected: Set[int]) -> int | None:
        """Return which of the nodes that claim a client's name, with these keys, has it."""
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
                log.warning("the reply of client %r cannot be read", client)
                answers[client] = Replies((), {}, (), malformed=(client,))
        # Rows in the order they were asked for, whatever order replies arrived in.
        return codec.stack([answers[client] for client in task.to if client in answers], task.gives)

    def total(self, task: Task, least: int = 1, bits: int | None = None) -> Total:
        if bits is None:
            return super().total(task, least, bits)
        shapes: dict[str, dict[str, list[int]]] = {}
        for client, reply in self._sent(MessageType.TRAIN, self._asked(task, bits=bits), task.round):
            with contextlib.suppress(Exception):  # one that cannot be read counts as none
                if reply.content["reply"]["answered"]:
                    shapes[client] = {
                        name: [int(side) for side in shape] for name, shape in reply.content["shapes"].items()
                    }
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
        found = run_sum(task, identities, least, bits, length, self._passed_on)
        sent = length * bytes_of(bits)
        if found is None:
            return Total(ids, {}, received, sent)
        return Total(found.survivors, codec.unflattened(found.total, sizes), received, sent)

    def _asked(self, task: Task, **more: int) -> dict[str, RecordDict]:
        """Return a task as the message to each client."""
        asked = ConfigRecord({"action": task.action, "run": task.run, "round": task.round, **more})
        return dict.fromkeys(task.to, RecordDict({"task": asked, "payload": arrays(task.payload)}))

    def _passed_on(self, asked: Asked, messages: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """A step of a secure sum, with those who are in it."""
        contents = {
            client: RecordDict({"sum": ConfigRecord({**asked, "step": int(asked["step"]), "message": message})})
            for client, message in messages.items()
        }
        for client, reply in self._sent(f"{MessageType.TRAIN}.sum", contents, asked["round"]):
            with contextlib.suppress(Exception):  # a message that cannot be read counts as none
                yield client, bytes(reply.content["sum"]["message"])

    def _sent(self, kind: str, contents: Mapping[str, RecordDict], round: int) -> Iterator[tuple[str, Message]]:
        """Replies without those that are errors, in any order."""
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


def _profile(told: Mapping[str, Any]) -> Profile:
    """Return what a node says of itself; anything but plain, sensible values is refused."""
    face = Profile(told["id"], told.get("examples"), told.get("epsilon"), told.get("group"), told["ready"])
    check_name("a client's id", face.id)
    if face.group is not None:
        check_name("a client's group", face.group)
    sensible = (
        bool(face.id)
        and isinstance(face.ready, bool)
        and (face.examples is None or (type(face.examples) is int and 0 < face.examples < 2**53))
        and (face.epsilon is None or (type(face.epsilon) in (int, float) and 0 < face.epsilon < math.inf))
    )
    if not sensible:
        raise InputError(f"client {face.id!r} introduces itself with impossible values")
    return face


def _answered(client: str, reply: Message, received: int) -> Replies:
    """Return one client's reply to a task."""
    told = reply.content["reply"]
    if not told["answered"]:
        return Replies((), {}, (), exhausted=() if told["ready"] else (client,))
    payload = tensors(reply.content["payload"])
    rows = {name: tensor[None] for name, tensor in payload.items()}
    return Replies((client,), rows, (bool(told["ready"]),), received, codec.size(payload))
