"""Everything that crosses the loopback interface, as somebody on the wire would see it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

_EVERYTHING = 0x0003  # ETH_P_ALL
_SENT = 4  # PACKET_OUTGOING: on loopback, every packet is seen twice


def can_capture() -> bool:
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    except (OSError, AttributeError):
        return False
    return True


@dataclass
class Capture:
    """The bytes of each direction of each TCP connection, by the ports of its ends."""

    streams: dict[tuple[int, int], dict[int, bytes]] = field(default_factory=dict)  # by sequence number

    def add(self, frame: bytes) -> None:
        packet = frame[14:]
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        whole = int.from_bytes(packet[2:4], "big") or len(packet)  # 0 for segments that the kernel did not split
        segment = packet[(packet[0] & 15) * 4 : whole]
        content = segment[(segment[12] >> 4) * 4 :]
        ends = int.from_bytes(segment[:2], "big"), int.from_bytes(segment[2:4], "big")
        if content:
            self.streams.setdefault(ends, {})[int.from_bytes(segment[4:8], "big")] = content

    def crossed(self, *ports: int) -> bytes:
        """Return all bytes to or from these ports, each direction of each connection in order."""
        chosen = [stream for ends, stream in self.streams.items() if set(ends) & set(ports)]
        return b"\0\xff".join(b"".join(stream[number] for number in sorted(stream)) for stream in chosen)


@contextlib.contextmanager
def capturing() -> Iterator[Capture]:
    """Capture while the body of the `with` runs."""
    found, over = Capture(), threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERYTHING)) as wire:
        wire.bind(("lo", 0))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        wire.settimeout(0.2)

        def listen() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    frame, where = wire.recvfrom(1 << 17)
                    if where[2] == _SENT:
                        found.add(frame)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield found
        finally:
            over.set()
            thread.join()
