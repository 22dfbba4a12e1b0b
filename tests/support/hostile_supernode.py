"""A SuperNode in the hands of a hostile server: Flower's Runtime API over real HTTP, saying whatever a test wants."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest, PushObjectResponse
from flwr.proto.runtime_pb2 import (
    AcquireTaskResponse,
    PullAppMessagesResponse,
    PullTaskInputResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
    SendTaskHeartbeatResponse,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

NODE = 100
Handler = http.server.BaseHTTPRequestHandler
Raw = Callable[[Handler], None]  # writes an answer of its own, headers included


def endless(size: int, head: bytes = b"", **headers: str) -> Raw:
    """Return an answer of so many bytes, of which none but a small piece is in memory at once."""

    def write(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/x-protobuf")
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(head)
        piece = b"\0" * (1 << 20)
        for _ in range(size // len(piece)):
            handler.wfile.write(piece)

    return write


@dataclass
class HostileSuperNode:
    """Hands out messages, one task after the other, and keeps the replies."""

    waiting: Queue[tuple[Message, dict[str, Raw]]] = field(default_factory=Queue)
    replies: Queue[Message] = field(default_factory=Queue)
    address: str = ""
    taken: list[str] = field(default_factory=list)  # the paths that were asked for

    def ask(self, message: Message, seconds: float = 60.0, **instead: Raw) -> Message:
        """Send a message, and return the reply; some methods may answer something else instead."""
        self.waiting.put((message, instead))
        return self.replies.get(timeout=seconds)

    def ask_all(self, messages: Iterable[Message]) -> list[Message]:
        """Send messages at once, and return the replies in order."""
        some = list(messages)
        for message in some:
            self.hand_out(message)
        return [self.replies.get(timeout=60) for _ in some]

    def hand_out(self, message: Message, **instead: Raw) -> None:
        """Send a message to which no reply is expected."""
        self.waiting.put((message, instead))

    @contextmanager
    def listening(self) -> Iterator[HostileSuperNode]:
        answering = _Answering(self)
        handler = type("Answer", (_Handler,), {"answering": answering})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            server.daemon_threads = True
            server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the silo hangs up on some answers
            self.address = f"127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


class _Answering:
    """The methods of the Runtime API, by the names of their paths."""

    def __init__(self, node: HostileSuperNode) -> None:
        self.node, self.message, self.instead = node, Message.__new__(Message), dict[str, Raw]()
        self.objects: dict[str, bytes] = {}
        self.pushed: dict[str, bytes] = {}
        self.top = ""

    def acquire_task(self, _: bytes) -> Any:
        if self.node.waiting.empty():
            return AcquireTaskResponse()
        self.message, self.instead = self.node.waiting.get()
        self.objects = {name: one.deflate() for name, one in get_all_nested_objects(self.message).items()}
        self.pushed, self.top = {}, ""
        answer = AcquireTaskResponse(token="token")
        answer.task.task_id = 7
        return answer

    def pull_task_input(self, _: bytes) -> Any:
        answer = PullTaskInputResponse(task_id=7)
        answer.context.node_id, answer.context.run_id, answer.run.run_id = NODE, 1, 1
        return answer

    def pull_messages(self, _: bytes) -> Any:
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(self.message)], message_object_trees=[get_object_tree(self.message)]
        )

    def pull_object(self, content: bytes) -> Any:
        wanted = PullObjectRequest.FromString(content).object_id
        return PullObjectResponse(object_found=True, object_available=True, object_content=self.objects[wanted])

    def push_messages(self, content: bytes) -> Any:
        asked = PushAppMessagesRequest.FromString(content)
        (tree,), (header,) = asked.message_object_trees, asked.messages_list
        self.top = tree.object_id
        if header.HasField("error"):
            self.node.replies.put(message_from_proto(header))
            return PushAppMessagesResponse(message_ids=[self.top])
        wanted = [one.object_id for one in iterate_object_tree(tree)]
        return PushAppMessagesResponse(message_ids=[self.top], objects_to_push=wanted, session_id="s")

    def push_object(self, content: bytes) -> Any:
        asked = PushObjectRequest.FromString(content)
        self.pushed[asked.object_id] = asked.object_content
        return PushObjectResponse(stored=True)

    def push_task_output(self, _: bytes) -> Any:
        if self.pushed:
            reply = inflate_object_from_contents(self.top, dict(self.pushed))
            assert isinstance(reply, Message)
            self.node.replies.put(reply)
        return SendTaskHeartbeatResponse(success=True)

    def send_task_heartbeat(self, _: bytes) -> Any:
        return SendTaskHeartbeatResponse(success=True)

    confirm_message_received = send_task_heartbeat


class _Handler(http.server.BaseHTTPRequestHandler):
    answering: _Answering
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.rpartition("/")[2].replace("-", "_")
        self.answering.node.taken.append(self.path)
        if name in self.answering.instead:
            self.close_connection = True
            self.answering.instead.pop(name)(self)
            return
        answer = getattr(self.answering, name)(content).SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None: ...
