"""Flower's internals, all in this file: tasks of a SuperNode or a SuperLink, executed by us and not by Flower.

With `--isolation process`, SuperNode and SuperLink start no app: whoever acquires a task over their Runtime API, with
the secret of `--superexec-auth-secret-file`, executes it. Flower's own executor would unpack and import the bundle of
the run; this one takes the message and leaves the bundle alone.

Written for flwr 1.41; `tests/deploy/test_flower_runtime.py` holds it to what that version has.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import ipaddress
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, push_objects
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import RetryInvoker, constant
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from polyeps.deploy.bounded_http import bounded_client
from polyeps.deploy.guarded_superlink import as_operator
from polyeps.deploy.keys import read_node_key
from polyeps.deploy.refusing_bundle import REFUSING
from polyeps.errors import InputError
from polyeps.ledger.head_file import replace_file

FLOWER = "1.41"
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
_HEARTBEAT = 8.0  # seconds; a task is given up after 30 without one
_OVERHEAD = 100  # bytes that are counted for every part of a message


def check_flower() -> None:
    """Refuse another minor version of Flower than this file was written for."""
    found = importlib.metadata.version("flwr")
    if not found.startswith(f"{FLOWER}."):
        raise InputError(f"flwr {found} is installed, and silos are made for {FLOWER}; pip install 'flwr=={FLOWER}.*'")


@dataclass(frozen=True)
class Endpoint:
    """The HTTP address of a SuperNode or SuperLink."""

    address: str  # host:port
    secret: bytes = b""  # of its --superexec-auth-secret-file
    root_certificates: Path | None = None  # None: plain HTTP, on this machine alone
    most_bytes: int = 1 << 28  # of one answer

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^/@?#\s]+:[0-9]{1,5}", self.address):
            raise InputError(f"{self.address!r} is not an address; write HOST:PORT")
        if self.root_certificates is None and not _is_local(self.address):
            raise InputError(f"{self.address} is not on this machine, so it needs TLS; name root_certificates")

    @property
    def certificates(self) -> bytes | None:
        try:
            return None if self.root_certificates is None else self.root_certificates.read_bytes()
        except OSError as problem:
            raise InputError(f"{self.root_certificates} cannot be read: {problem.strerror}") from None

    def runtime(self, token: str = "") -> RuntimeHttpClient:
        """Return a client of the Runtime API: for a task, with its token; else to acquire tasks."""
        signing = SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=_ACQUIRE)
        return self._client(RuntimeHttpClient, RuntimeTokenHttpInterceptor(token) if token else signing)

    def control(self) -> ControlHttpClient:
        """Return a client of the Control API of a SuperLink."""
        return as_operator(self._client(ControlHttpClient), self.secret)

    def _client(self, kind: Any, *interceptors: Any) -> Any:
        certificates = self.certificates
        try:
            bounded = bounded_client(certificates, self.most_bytes)
        except (ssl.SSLError, ValueError):
            raise InputError(f"{self.root_certificates} holds no certificate; give the server's ca.crt") from None
        both = [RuntimeVersionHttpInterceptor(component_name="polyeps"), *interceptors]
        found = kind(f"http{'s' * bool(certificates)}://{self.address}", interceptors=both)
        found._client.close()  # unused: it would read anything
        found._client = bounded
        return found


def _is_local(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# The silo's side


class Assignment:
    """One task of a SuperNode: a message, and how to reply to it."""

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        self.token, self.node, self.run = token, 0, 0
        self.client = endpoint.runtime(token)
        self.header: ProtoMessage | None = None

    def open(self) -> Message:
        """Claim the task and return its message, still without content."""
        given = self.client.PullTaskInput(PullTaskInputRequest())  # its bundle, in given.fab, is not looked at
        self.node, self.run = given.context.node_id, given.run.run_id
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = given.task_id, self.run, self.node
        pulled = self.client.PullMessages(PullAppMessagesRequest())
        if not pulled.messages_list:
            self.give_up()
            raise InputError("the SuperNode has a task without a message")
        self.header, self._tree = pulled.messages_list[0], pulled.message_object_trees[0]
        return _readable(self.header)

    def content(self, most_bytes: int, waiting: Callable[[], None]) -> Message:
        """Return the message with its content, of so many bytes at most.

        `waiting` is called while the SuperNode does not have all of it. A SuperNode that receives a message of a run
        which has just ended never gets its content, and keeps the task all the same.
        """
        node, contents, pulled = Node(node_id=self.node), dict[str, bytes](), 0
        for name in dict.fromkeys(tree.object_id for tree in iterate_object_tree(self._tree)):
            wanted = PullObjectRequest(node=node, run_id=self.run, object_id=name)
            while not (found := self.client.PullObject(wanted)).object_available:
                waiting()
            contents[name] = found.object_content
            pulled += len(contents[name]) + _OVERHEAD
            if pulled > most_bytes:
                raise InputError(f"the message has more than limits.message_bytes = {most_bytes} bytes")
        top = self._tree.object_id
        received = ConfirmMessageReceivedRequest(node=node, run_id=self.run, message_object_id=top)
        self.client.ConfirmMessageReceived(received)
        message = inflate_object_from_contents(top, contents)
        if not isinstance(message, Message):
            raise InputError(f"the SuperNode sends a {type(message).__name__}, not a message")
        message.metadata.__dict__["_message_id"] = top
        return message

    def give_up(self) -> None:
        """End a task without a reply: only one that its SuperNode does not wait for."""
        _end(self.client, SubStatus.FAILED, "given up")

    def push(self, reply: Message) -> None:
        """Send a reply, and end the task."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            pushed = self.client.PushMessages(
                PushAppMessagesRequest(
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                )
            )
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(
                    self.client.PushObject, Node(node_id=self.node), run_id=self.run, session_id=pushed.session_id
                ),
                object_ids_to_push=set(pushed.objects_to_push),
            )
        # Only after the reply: a SuperNode waits for ever for the reply to a task that has ended without one.
        self.client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))

    def note(self) -> bytes:
        """Return what another process needs to reply to this task: this one may be killed."""
        assert self.header is not None
        header = base64.b64encode(self.header.SerializeToString()).decode()
        return json.dumps({"token": self.token, "node": self.node, "run": self.run, "header": header}).encode()


def interrupted(endpoint: Endpoint, note: bytes) -> tuple[Assignment, Message]:
    """Return a task that another process has begun, and its message without content."""
    held = json.loads(note)
    task = Assignment(endpoint, held["token"])
    task.node, task.run = held["node"], held["run"]
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 0, task.run, task.node
    task.header = ProtoMessage.FromString(base64.b64decode(held["header"]))
    return task, _readable(task.header)


def _readable(header: ProtoMessage) -> Message:
    """Return a message that can be replied to, though its content is elsewhere."""
    found = message_from_proto(header)
    return make_message(metadata=found.metadata, content=RecordDict())


def acquire(endpoint: Endpoint, client: RuntimeHttpClient, kind: str = TaskType.CLIENT_APP) -> Assignment | None:
    """Return the oldest task that waits for an executor, if there is one."""
    found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    return Assignment(endpoint, found.token) if found.HasField("task") and found.token else None


def check_secret(client: RuntimeHttpClient) -> None:
    """Ask for a task of no kind: the secret is checked, and no task is taken."""
    client.AcquireTask(AcquireTaskRequest(supported_task_types=[]))


@contextlib.contextmanager
def heartbeats(client: RuntimeHttpClient) -> Iterator[None]:
    """Tell Flower while the body of the `with` runs that the task is alive."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT):
            with contextlib.suppress(httpx.HTTPError):
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=1)


# The server's side


def register_node(endpoint: Endpoint, public_key: Path) -> int:
    """Register a SuperNode's public key with a SuperLink; return the number of the node."""
    content = public_key_to_bytes(read_node_key(public_key))
    try:
        with contextlib.closing(endpoint.control()) as control:
            return int(control.RegisterNode(RegisterNodeRequest(public_key=content)).node_id)
    except httpx.HTTPError as problem:
        why = "it has it already, or it" if isinstance(problem, httpx.HTTPStatusError) else "it"
        raise InputError(f"{endpoint.address} did not register {public_key}; {why} is no running SuperLink") from None


@contextlib.contextmanager
def started_run(
    endpoint: Endpoint,
    note: Path | None = None,
    *,
    patience: float = 60.0,
    bundle: Mapping[str, bytes] = REFUSING,
) -> Iterator[Grid]:
    """Start a run on a SuperLink, execute its server task here, and end it; other tasks there are refused.

    The number of the run is noted in a file. One that is still there was cut off, and its SuperNodes may wait: stop it.
    """
    check_flower()
    try:
        if note is not None and note.exists():
            _stop(endpoint, int(note.read_text()))
        with _started(endpoint, patience, bundle) as grid:
            if note is not None:
                replace_file(note, str(grid.run.run_id).encode())
            yield grid
        if note is not None:
            note.unlink()
    except httpx.TransportError as problem:
        reason = f"the SuperLink at {endpoint.address} cannot be reached ({type(problem).__name__})"
        raise InputError(f"{reason}; start it, then serve again to continue") from None
    except httpx.HTTPStatusError as problem:
        raise InputError(
            f"the SuperLink at {endpoint.address} answers {problem.response.status_code}: check the secret, and that "
            "the run was not stopped there, then serve again to continue"
        ) from None


@contextlib.contextmanager
def _started(endpoint: Endpoint, patience: float, bundle: Mapping[str, bytes]) -> Iterator[Grid]:
    content, _ = build_fab_from_files(bundle)
    built = Fab(hashlib.sha256(content).hexdigest(), content, {})
    with contextlib.closing(endpoint.control()) as control:
        run = control.StartRun(StartRunRequest(fab=fab_to_proto(built))).run_id
    task, given = _server_task(endpoint, run, patience)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = given.task_id, run, given.context.node_id
    grid = HttpGrid(endpoint.address, endpoint.root_certificates is None, endpoint.certificates, token=task.token)
    # Flower's own invoker tries for ever, and interrupts the process when a token has expired.
    grid._retry_invoker = RetryInvoker(lambda: constant(1.0), httpx.TransportError, max_tries=None, max_time=patience)
    grid.set_run(run_from_proto(given.run))
    status, details = SubStatus.FAILED, "stopped"
    try:
        with heartbeats(task.client):
            yield grid
        status, details = SubStatus.COMPLETED, ""
    finally:
        with contextlib.suppress(httpx.HTTPError):
            _end(task.client, status, details)
        grid.close()
        task.client.close()


def _stop(endpoint: Endpoint, run: int) -> None:
    """Stop a run, if it is still there."""
    with contextlib.closing(endpoint.control()) as control, contextlib.suppress(httpx.HTTPStatusError):
        control.StopRun(StopRunRequest(run_id=run))


def _server_task(endpoint: Endpoint, run: int, patience: float) -> tuple[Assignment, Any]:
    """Acquire the server task of a run, and its input; end the server tasks of other runs."""
    deadline = time.monotonic() + patience
    with contextlib.closing(endpoint.runtime()) as acquiring:
        while time.monotonic() < deadline:
            task = acquire(endpoint, acquiring, TaskType.SERVER_APP)
            if task is None:
                time.sleep(0.2)
                continue
            given = task.client.PullTaskInput(PullTaskInputRequest())
            if given.run.run_id == run:
                return task, given
            _end(task.client, SubStatus.FAILED, "this SuperLink serves runs of polyeps")
            task.client.close()
    raise InputError(
        f"{endpoint.address} does not give us the run's task; start the SuperLink with --isolation process"
    )


def _end(client: RuntimeHttpClient, status: str, details: str) -> None:
    client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
