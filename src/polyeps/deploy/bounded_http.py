"""An HTTP client for what others decide the size of: answers are read up to a limit, and never unpacked or redirected.

Flower's own client reads an answer of any size into memory, unpacks what calls itself compressed, follows redirects,
and sends plain HTTP through whatever proxy the environment names, though it was meant for this machine alone.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator

import httpx

from polyeps.errors import InputError

_LONGEST = 600.0  # seconds that one answer may take to arrive
_TIMEOUT = 30.0  # seconds without a byte


def bounded_client(certificates: bytes | None, most_bytes: int) -> httpx.Client:
    """Return a client that trusts these root certificates alone, and reads so many bytes of an answer at most."""
    verify: ssl.SSLContext | bool = False  # plain HTTP
    if certificates is not None:
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        verify.load_verify_locations(cadata=certificates.decode("ascii"))
    return httpx.Client(
        transport=_Bounded(verify, most_bytes),
        headers={"accept-encoding": "identity"},
        timeout=_TIMEOUT,
        follow_redirects=False,
        trust_env=False,
    )


class _Bounded(httpx.HTTPTransport):
    def __init__(self, verify: ssl.SSLContext | bool, most_bytes: int) -> None:
        super().__init__(verify=verify, trust_env=False)
        self._most = most_bytes

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()
            raise InputError(f"{request.url.host} answers with packed bytes, which are not unpacked")
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _Counted(response.stream, self._most)
        return response


class _Counted(httpx.SyncByteStream):
    """The bytes of an answer, up to a limit."""

    def __init__(self, stream: httpx.SyncByteStream, most: int) -> None:
        self._stream, self._most = stream, most

    def __iter__(self) -> Iterator[bytes]:
        read, end = 0, time.monotonic() + _LONGEST
        for piece in self._stream:
            read += len(piece)
            if read > self._most:
                raise InputError(f"an answer has more than {self._most} bytes, and is not read to its end")
            if time.monotonic() > end:
                raise httpx.ReadTimeout(f"an answer has not arrived within {_LONGEST:g} s")
            yield piece

    def close(self) -> None:
        self._stream.close()
