"""The same tasks and replies as Flower messages: a ClientApp, a ServerApp and nothing that computes.

A node is one client. Flower starts a new process per message, so whatever a client keeps (ledger, memory) must
be opened by the function it is given, from files the client owns. A node that fails counts as one that declined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from polyeps.client import Cohort, answer, profiles
from polyeps.core import Algorithm, Field, Payload, Profile, Replies, Task
from polyeps.errors import InputError
from polyeps.server import Transport
from polyeps.transport import codec

# What a node opens for a message: itself as a cohort of one, what it is asked to run, and what it tells.
Open = Callable[[Context], tuple[Cohort, Algorithm, Iterable[Field]]]


def client_app(open_client: Open) -> ClientApp:
    """A ClientApp that answers tasks, and introduces itself when queried."""
    app = ClientApp()

    @app.query()  # type: ignore[untyped-decorator,unused-ignore]
    def introduce(message: Message, context: Context) -> Message:
        (face,) = profiles(*open_client(context))
        told = {"id": face.id, "ready": face.ready}
        told |= {name: value for name in ("examples", "epsilon", "group") if (value := getattr(face, name)) is not None}
        return Message(RecordDict({"profile": ConfigRecord(told)}), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator,unused-ignore]
    def work(message: Message, context: Context) -> Message:
        cohort, algorithm, _ = open_client(context)
        asked = message.content["task"]
        payload = _tensors(message.content["payload"])
        task = Task(str(asked["action"]), cohort.ids, payload, str(asked["run"]), int(asked["round"]))
        replies = answer(cohort, algorithm, task)
        content = {"reply": ConfigRecord({"answered": bool(replies.ids), "ready": all(replies.ready)})}
        if replies.ids:
            content["payload"] = _arrays(codec.row(replies.payload, 0))
        return Message(RecordDict(content), reply_to=message)

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
            faces.append(face)
        return tuple(sorted(faces, key=lambda face: face.id))

    def __call__(self, task: Task) -> Replies:
        asked = ConfigRecord({"action": task.action, "run": task.run, "round": task.round})
        content = RecordDict({"task": asked, "payload": _arrays(task.payload)})
        clients = {self._nodes[client]: client for client in task.to}
        messages = [
            Message(content, dst_node_id=node, message_type=MessageType.TRAIN, group_id=str(task.round))
            for node in clients
        ]
        received = codec.size(task.payload)
        answers: dict[str, Replies] = {}
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            if reply.has_error() or not reply.content["reply"]["answered"]:
                continue
            client = clients[reply.metadata.src_node_id]
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

    def _connected(self) -> list[int]:
        return sorted(self.grid.get_node_ids())


def _arrays(payload: Payload) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in payload.items()})


def _tensors(record: ArrayRecord) -> Payload:
    # Arrays that arrived are read-only; a tensor must own its memory.
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}
