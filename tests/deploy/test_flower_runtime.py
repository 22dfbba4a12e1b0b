"""What we need of Flower's internals, held to the version that is installed: a new minor version must be looked at."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto import runtime_pb2
from flwr.supercore.constant import TaskType
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from support.silos import being, over_the_wire, tasking

from polyeps.deploy import flower_runtime as flower
from polyeps.deploy.guarded_superlink import OPERATOR, Guard, operator_token, superlink_options
from polyeps.deploy.keys import new_node_key, read_secret
from polyeps.deploy.kits import server_kit
from polyeps.deploy.patient_grid import is_restarted, restarted
from polyeps.deploy.processes import OFFLINE, free_ports, supernode_command
from polyeps.deploy.refusing_bundle import REFUSING
from polyeps.errors import InputError


def test_the_installed_flower_is_the_one_we_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    flower.check_flower()
    for other in ("1.40.0", "1.42.0", "1.4", "2.41.0", "11.41.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, other=other: other)
        with pytest.raises(InputError, match=r"flwr .* is installed, and silos are made for 1.41"):
            flower.check_flower()


def test_flower_has_what_we_use() -> None:
    """Methods, fields and attributes that are no part of Flower's public interface."""
    methods = set(re.findall(r"client\.([A-Z]\w+)", inspect.getsource(flower)))
    assert {"AcquireTask", "PullTaskInput", "PushMessages"} <= methods
    for method in methods:
        assert callable(getattr(RuntimeHttpClient, method))
    fields: dict[Any, str] = {
        runtime_pb2.AcquireTaskRequest: "supported_task_types",
        runtime_pb2.AcquireTaskResponse: "task token",
        runtime_pb2.PullTaskInputResponse: "context run fab task_id",
        runtime_pb2.PullAppMessagesResponse: "messages_list message_object_trees",
        runtime_pb2.PushAppMessagesRequest: "messages_list message_object_trees",
        runtime_pb2.PushAppMessagesResponse: "objects_to_push session_id",
        runtime_pb2.PushTaskOutputRequest: "sub_status details",
    }
    for kind, names in fields.items():
        assert set(names.split()) <= set(kind.DESCRIPTOR.fields_by_name)
    assert TaskType.CLIENT_APP != TaskType.SERVER_APP
    assert "_retry_invoker" in inspect.getsource(HttpGrid._connect)
    for name in ("task_id", "run_id", "node_id"):
        assert name in dir(type(TaskIdentity))


def test_every_process_is_offline_and_without_telemetry(tmp_path: Path) -> None:
    import flwr.supercore.telemetry
    import flwr.supercore.update_check
    from flwr.supercore import constant

    sources = "".join(
        inspect.getsource(module) for module in (flwr.supercore.telemetry, flwr.supercore.update_check, constant)
    )
    for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"):
        assert name in OFFLINE
        assert name in sources  # else Flower has renamed it
    link = superlink_options(tmp_path, "127.0.0.1", 8000)
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(link)
    node = supernode_command(tmp_path, tmp_path / "ca.crt", "127.0.0.1:8000", 9094)
    for command in (link, node):
        assert command[command.index("--isolation") + 1] == "process"
        assert "--insecure" not in command


def test_an_operator_shows_the_secret_of_the_superlink() -> None:
    """Of Flower's routes, those of SuperNodes and executors are let through: there both are asked who they are."""
    from flwr.superlink import extensions, main
    from flwr.superlink.routers.control import router as control

    assert "extensions.get_middleware()" in inspect.getsource(main._get_middleware)  # where the guard is put
    assert callable(extensions.get_middleware)
    app, token = FastAPI(), operator_token(b"secret")
    reached: list[str] = []

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    def reach(path: str) -> None:
        reached.append(path)

    app.add_middleware(Guard, token=token)

    def post(path: str, headers: dict[str, str] | None = None) -> int:
        async def asked() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://link") as client:
                return await client.post(path, headers=headers)

        return asyncio.run(asked()).status_code

    operators = [route.path for route in control.routes]
    assert len(operators) > 10
    for path in (*operators, "/docs", "/openapi.json", "/v1/fleetcontrol", "/v1/fleet/../control/x"):
        for headers in ({}, {OPERATOR: ""}, {OPERATOR: operator_token(b"another")}):
            assert post(path, headers) == 403
    assert reached == []
    assert post(operators[0], {OPERATOR: token}) == 200
    assert post("/v1/fleet/pull-messages") == 200
    assert post("/v1/runtime/acquire-task") == 200


def test_plain_http_stays_on_this_machine() -> None:
    for address in ("127.0.0.1:9094", "localhost:9094", "[::1]:9094", "127.8.8.8:1"):
        flower.Endpoint(address)
    for address in ("10.0.0.4:9094", "silo.example:9094", "0.0.0.0:9094", "[2001:db8::1]:1", "127.0.0.1.example:1"):
        with pytest.raises(InputError, match="needs TLS"):
            flower.Endpoint(address)
    for address in ("", "127.0.0.1", "http://127.0.0.1:1", "127.0.0.1:1/x", "127.0.0.1:port", "me@127.0.0.1:1"):
        with pytest.raises(InputError, match="write HOST:PORT"):
            flower.Endpoint(address)


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    endpoint = flower.Endpoint("silo.example:1", b"secret", authority)
    with pytest.raises(InputError, match=r"ca.crt cannot be read"):
        endpoint.runtime()
    for content in (b"no certificate", b"\xff\xfe", b""):
        authority.write_bytes(content)
        with pytest.raises(InputError, match=r"ca.crt holds no certificate"):
            endpoint.control()


def test_a_secret_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with pytest.raises(InputError, match="cannot be read"):
        read_secret(secret)
    secret.write_bytes(b"x" * 32)
    secret.chmod(0o644)
    with pytest.raises(InputError, match="can be read by everybody"):
        read_secret(secret)
    secret.chmod(0o640)  # the SuperNode runs under another account of the group
    assert read_secret(secret) == b"x" * 32
    secret.write_bytes(b"")
    with pytest.raises(InputError, match="is empty"):
        read_secret(secret)


def test_what_is_no_node_key_is_not_registered(tmp_path: Path) -> None:
    key, authority = tmp_path / "node.pub", tmp_path / "server"
    server_kit(authority, "study", ["127.0.0.1"], {})
    nobody = flower.Endpoint(f"127.0.0.1:{free_ports(1)[0]}", b"secret", authority / "ca.crt")
    for content, said in [(None, "cannot be read"), (b"nonsense", "is not the public key of a SuperNode")]:
        if content is not None:
            key.write_bytes(content)
        with pytest.raises(InputError, match=said):
            flower.register_node(nobody, key)
    new_node_key(tmp_path / "node.key")
    with pytest.raises(InputError, match="did not register"):
        flower.register_node(nobody, key)


def test_an_interrupted_task_can_be_replied_to_by_another_process() -> None:
    being(1)
    message = tasking("run", {})
    task = flower.Assignment(flower.Endpoint("127.0.0.1:1", b"secret"), "token")
    task.node, task.run, task.header = 100, 5, message_to_proto(message)
    other, bare = flower.interrupted(flower.Endpoint("127.0.0.1:1", b"secret"), task.note())
    assert (other.token, other.node, other.run) == ("token", 100, 5)
    reply = over_the_wire(restarted(bare))
    assert is_restarted(reply)
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert reply.metadata.dst_node_id == message.metadata.src_node_id
    assert not is_restarted(Message(message.content, reply_to=bare))


def test_the_bundle_of_a_run_refuses_to_be_imported() -> None:
    with pytest.raises(ImportError, match="for polyeps silos"):
        exec(REFUSING["refusing.py"])
