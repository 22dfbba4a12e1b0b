"""The same tasks and replies as Flower messages: a ClientApp, a ServerApp and nothing that computes.

A node is one client. Flower starts a new process per message, so whatever a client keeps (ledger, memory) must
be opened by the function it is given, from files the client owns. A node that fails counts as one that declined.

What an algorithm wants summed unseen, a client gives into secure sums and nowhere else: alone, it has only this
client's part of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from polyeps.client import Cohort, answer, profiles
from polyeps.core import ENTER, Algorithm, Field, Payload, Profile, Replies, Task, Total
from polyeps.errors import InputError
from polyeps.server import Transport
from polyeps.transport import codec
from polyeps.transport.flower_sums import Asked, Seat, run_sum
from polyeps.transport.masks import bytes_of

# What a node opens for a message: itself as a cohort of one, what it is asked to run, and what it tells.
Open = Callable[[Context], tuple[Cohort, Algorithm, Iterable[Field]]]


def client_app(open_client: Open, open_seat: Callable[[Context], Seat] | None = None) -> ClientApp:
    """A ClientApp that answers tasks, takes the steps of secure sums, and introduces itself when queried."""
    app = ClientApp()

    @app.query()  # type: ignore[untyped-decorator,unused-ignore]
    def introduce(message: Message, context: Context) -> Message:
        (face,) = profiles(*open_client(context))
        told = {"id": face.id, "ready": face.ready}
        told |= {name: value for name in ("examples", "epsilon", "group") if (value := getattr(face, name)) is not None}
        told |= {"identity": open_seat(context).public} if open_seat else {}
        return Message(RecordDict({"profile": ConfigRecord(told)}), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator,unused-ignore]
    def work(message: Message, context: Context) -> Message:
        cohort, algorithm, _ = open_client(context)
        asked = message.content["task"]
        payload = _tensors(message.content["payload"])
        task = Task(str(asked["action"]), cohort.ids, payload, str(asked["run"]), int(asked["round"]))
        bits = asked.get("bits")
        if algorithm.trust == "secure-sum" and task.action != ENTER and (bits is None or open_seat is None):
            raise InputError(f"client {cohort.ids[0]!r} gives {task.action!r} into secure sums alone; ask for a sum")
        replies = answer(cohort, algorithm, task)
        told: dict[str, Any] = {"answered": bool(replies.ids), "ready": all(replies.ready)}
        content: dict[str, Any] = {"reply": ConfigRecord(told)}
        if replies.ids:
            own = codec.row(replies.payload, 0)
            if bits is None:
                content["payload"] = _arrays(own)
            else:
                assert open_seat is not None
                open_seat(context).prepare(algorithm, task, own, int(bits))
                content["shapes"] = _shapes(own)
        return Message(RecordDict(content), reply_to=message)

    @app.train("sum")  # type: ignore[untyped-decorator,unused-ignore]
    def take_part(message: Message, context: Context) -> Message:
        if open_seat is None:
            raise InputError("this client has no seat in secure sums; give client_app one")
        (name,) = open_client(context)[0].ids
        asked = dict(message.content["sum"])
        answered = open_seat(context).answer(name, asked, bytes(asked["message"]))
        return Message(RecordDict({"sum": ConfigRecord({"message": answered})}), reply_to=message)

    return app


def server_app(federate: Callable[[Transport, Context], None], timeout: float | None = None) -> ServerApp:
    """A ServerApp that gives `federate` a transport to the nodes of its grid."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator,unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        federate(OnFlower(grid, timeout), context)

    return app


@dataclass
class OnFlower(Transport):
    """Clients on Flower nodes."""

    grid: Grid
    timeout: float | None = None  # seconds to wait for replies; None: for ever
    _nodes: dict[str, int] = field(default_factory=dict)
    _identities: dict[str, bytes] = field(default_factory=dict)  # of clients with a seat in secure sums

    def profiles(self) -> tuple[Profile, ...]:
        """Ask every connected node who it is."""
        query = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in self._connected()]
        faces = []
        for reply in self.grid.send_and_receive(query, timeout=self.timeout):
            if reply.has_error():
                continue
            told = reply.content["profile"]
            face = Profile(
                id=str(told["id"]),
                examples=told.get("examples"),
                epsilon=told.get("epsilon"),
                group=told.get("group"),
                ready=bool(told["ready"]),
            )
            if self._nodes.setdefault(face.id, reply.metadata.src_node_id) != reply.metadata.src_node_id:
                raise InputError(f"two nodes call themselves client {face.id!r}; give each its own name")
            if "identity" in told:
                self._identities[face.id] = bytes(told["identity"])
            faces.append(face)
        return tuple(sorted(faces, key=lambda face: face.id))

    def __call__(self, task: Task) -> Replies:
        received = codec.size(task.payload)
        answers: dict[str, Replies] = {}
        for client, reply in self._done(task):
            payload = _tensors(reply.content["payload"])
            answers[client] = Replies(
                ids=(client,),
                payload={name: tensor[None] for name, tensor in payload.items()},
                ready=(bool(reply.content["reply"]["ready"]),),
                received=received,
                sent=codec.size(payload),
            )
        # Rows in the order they were asked for, whatever order replies arrived in.
        return codec.stack([answers[client] for client in task.to if client in answers])

    def total(self, task: Task, least: int = 1, bits: int | None = None) -> Total:
        if bits is None:
            return super().total(task, least, bits)
        shapes = {client: reply.content["shapes"] for client, reply in self._done(task, bits=bits)}
        ids = tuple(client for client in task.to if client in shapes and client in self._identities)
        received = codec.size(task.payload)
        if not ids:
            return Total((), {}, received)
        sizes = {name: [int(side) for side in shape] for name, shape in shapes[ids[0]].items()}
        length = sum(map(math.prod, sizes.values()))
        identities = {client: self._identities[client] for client in ids}
        found = run_sum(task, identities, least, bits, length, self._passed_on)
        sent = length * bytes_of(bits)
        if found is None:
            return Total(ids, {}, received, sent)
        return Total(found.survivors, codec.unflattened(found.total, sizes), received, sent)

    def _done(self, task: Task, **more: int) -> Iterator[tuple[str, Message]]:
        """Who did the task, with the reply."""
        asked = ConfigRecord({"action": task.action, "run": task.run, "round": task.round, **more})
        content = RecordDict({"task": asked, "payload": _arrays(task.payload)})
        for client, reply in self._sent(MessageType.TRAIN, dict.fromkeys(task.to, content), task.round):
            if reply.content["reply"]["answered"]:
                yield client, reply

    def _passed_on(self, asked: Asked, messages: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """A step of a secure sum, with those who are in it."""
        contents = {
            client: RecordDict({"sum": ConfigRecord({**asked, "step": int(asked["step"]), "message": message})})
            for client, message in messages.items()
        }
        for client, reply in self._sent(f"{MessageType.TRAIN}.sum", contents, asked["round"]):
            yield client, bytes(reply.content["sum"]["message"])

    def _sent(self, kind: str, contents: Mapping[str, RecordDict], round: int) -> Iterator[tuple[str, Message]]:
        """Replies without those that are errors, in any order."""
        clients = {self._nodes[client]: client for client in contents}
        messages = [
            Message(contents[client], dst_node_id=node, message_type=kind, group_id=str(round))
            for node, client in clients.items()
        ]
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            if not reply.has_error():
                yield clients[reply.metadata.src_node_id], reply

    def _connected(self) -> list[int]:
        return sorted(self.grid.get_node_ids())


def _arrays(payload: Payload) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in payload.items()})


def _shapes(payload: Payload) -> ConfigRecord:
    return ConfigRecord({name: list(tensor.shape) or [1] for name, tensor in payload.items()})


def _tensors(record: ArrayRecord) -> Payload:
    # Arrays that arrived are read-only; a tensor must own its memory.
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}
