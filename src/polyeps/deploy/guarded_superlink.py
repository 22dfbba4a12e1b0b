"""Flower's SuperLink, whose operator must know a secret.

As it comes, Flower 1.41 serves three APIs on one port, and the one for operators asks nobody who he is: whoever reaches
the port may register a SuperNode, take others out, list runs and stop them. Here everything but the APIs of SuperNodes
and executors, which authenticate both, needs a token that follows from the secret of `--superexec-auth-secret-file`.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx

from polyeps.deploy.bounded_http import bounded_client
from polyeps.deploy.keys import read_secret
from polyeps.errors import InputError

OPERATOR = "x-polyeps-operator"  # the header that holds the token
_OPEN = ("/v1/fleet/", "/v1/runtime/")
_Scope = MutableMapping[str, Any]
_Send = Callable[[_Scope], Awaitable[None]]


def as_operator(client: Any, secret: bytes) -> Any:
    """Return a client of a SuperLink that shows the token of its secret."""
    client._client.headers[OPERATOR] = operator_token(secret)
    return client


def operator_token(secret: bytes) -> str:
    """Return what an operator shows a SuperLink with this secret."""
    return hmac.new(secret, b"polyeps operator 1", hashlib.sha256).hexdigest()


class Guard:
    """ASGI middleware that turns away requests without the operator's token."""

    def __init__(self, app: Callable[[_Scope, Any, _Send], Awaitable[None]], token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: _Scope, receive: Any, send: _Send) -> None:
        shown = [value for name, value in scope.get("headers", ()) if name == OPERATOR.encode()]
        known = len(shown) == 1 and hmac.compare_digest(shown[0], self._token)
        if scope["type"] == "lifespan" or known or (scope["type"] == "http" and scope["path"].startswith(_OPEN)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})


def check_guarded(endpoint: Any) -> None:
    """Refuse a SuperLink that takes orders from whoever reaches it."""
    with bounded_client(endpoint.certificates, 1 << 20) as client:
        if client.post(f"https://{endpoint.address}/v1/control/list-nodes").status_code != httpx.codes.FORBIDDEN:
            raise InputError(
                f"whoever reaches {endpoint.address} may register nodes and stop runs there; start it with `polyeps "
                "superlink`"
            )


def run_superlink(kit: Path, host: str, port: int) -> None:
    """Be the SuperLink of a kit, with TLS and authenticated SuperNodes, until it is stopped."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    usual, token = extensions.get_middleware, operator_token(read_secret(kit / "superlink.secret"))
    extensions.get_middleware = lambda: (Middleware(Guard, token=token), *usual())  # the first to see a request
    sys.argv = ["flower-superlink", *superlink_options(kit, host, port)]
    flower_superlink()


def superlink_options(kit: Path, host: str, port: int) -> list[str]:
    """Return the options of `flower-superlink`; `polyeps serve` executes its runs."""
    return [
        *("--ssl-ca-certfile", str(kit / "ca.crt")),
        *("--ssl-certfile", str(kit / "server.crt")),
        *("--ssl-keyfile", str(kit / "server.key")),
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(kit / "superlink.secret")),
        *("--database", str(kit / "superlink.db")),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        *("--host", host),
        *("--port", str(port)),
    ]
