"""A network of its own for a silo: a namespace with one cable to this machine, which can be pulled out."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from pathlib import Path

_HOSTS = Path("/etc/netns")  # what `ip netns exec` shows in place of files of /etc


def can_separate() -> bool:
    """Return whether networks can be made here."""
    try:
        probe = Namespace()
    except (OSError, subprocess.CalledProcessError):
        return False
    probe.close()
    return True


class Namespace:
    """A network in which `localhost` is this machine, and nothing else can be reached."""

    def __init__(self) -> None:
        self.name, word = f"polyeps-{secrets.token_hex(3)}", secrets.token_bytes(2)
        self.inside = ["ip", "netns", "exec", self.name]  # before a command
        self._cable, far = f"pe{secrets.token_hex(4)}", f"pe{secrets.token_hex(4)}"
        here, there = (f"10.{word[0]}.{word[1]}.{host}" for host in (1, 2))
        try:
            for command in (
                f"netns add {self.name}",
                f"link add {self._cable} type veth peer name {far} netns {self.name}",
                f"addr add {here}/30 dev {self._cable}",
                f"link set {self._cable} up",
                f"-n {self.name} addr add {there}/30 dev {far}",
                f"-n {self.name} link set {far} up",
                f"-n {self.name} link set lo up",
            ):
                subprocess.run(["ip", *command.split()], check=True, capture_output=True)
            (_HOSTS / self.name).mkdir(parents=True)
            (_HOSTS / self.name / "hosts").write_text(f"{here} localhost\n")
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Pull the cable out: whatever is sent gets lost."""
        subprocess.run(["ip", "link", "set", self._cable, "down"], check=True)

    def mend(self) -> None:
        subprocess.run(["ip", "link", "set", self._cable, "up"], check=True)

    def close(self) -> None:
        for kind, name in (("link", self._cable), ("netns", self.name)):
            with contextlib.suppress(OSError):
                subprocess.run(["ip", kind, "del", name], check=False, capture_output=True)
        (_HOSTS / self.name / "hosts").unlink(missing_ok=True)
        for folder in (_HOSTS / self.name, _HOSTS):  # the second is the system's own if it is not empty
            with contextlib.suppress(OSError):
                folder.rmdir()
