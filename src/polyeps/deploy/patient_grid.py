"""A grid that waits for replies for a finite time, and asks silos that were restarted again.

A SuperLink of Flower 1.41 knows which node it talks to, and not whether a reply bears that node's number: a silo could
speak for another one. So a reply counts only from the node that was asked. Whoever replies names the question, and the
name of another node's question cannot be guessed: it is a digest of the message, which holds a random word. And a reply
that Flower cannot read is that of one node, and ends the run of none.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

_log = logging.getLogger(__name__)
_USUAL_PATIENCE = 600.0  # seconds
_CLOCKS = 10.0  # seconds by which clocks may differ: Flower turns a SuperNode away that is more than 5 s ahead
_GONE = 40.0  # seconds after which a node that is not connected is not waited for; a SuperNode is heard every 24 s
_MOST_TRIES = 5  # of one message to a silo that is restarted


def restarted(message: Message) -> Message:
    """Return the reply of a silo that was restarted in the middle of a task: the server may ask again."""
    return Message(Error(ErrorCode.CLIENT_APP_CRASHED, "restarted"), reply_to=message)


def is_restarted(reply: Message) -> bool:
    """Return whether a silo was restarted or lost in the middle of a task."""
    return bool(reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_CRASHED)


@dataclass
class PatientGrid:
    """What the transport needs of a Flower grid, without its long sleeps."""

    grid: Grid
    poll: float = 0.5  # seconds between two looks for replies
    _absent: dict[int, float] = field(default_factory=dict)  # nodes that are not connected, and since when
    _wary: bool = False  # whether some reply could not be read
    _asked: dict[str, int] = field(default_factory=dict)  # the nodes of questions without a reply, by their names

    def get_node_ids(self) -> Iterable[int]:
        return list(self.grid.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        some = list(messages)
        for message in some:
            message.metadata.group_id = f"{message.metadata.group_id}/{secrets.token_hex(16)}"
        names = list(self.grid.push_messages(some))
        self._asked |= {name: one.metadata.dst_node_id for name, one in zip(names, some, strict=True) if name}
        return names

    def pull_messages(self, names: Iterable[str]) -> Iterable[Message]:
        """Return the replies to questions of these names; one in the name of another node than was asked is none."""
        replies = []
        for reply in self._pulled(list(names)):
            asked, says = self._asked.pop(reply.metadata.reply_to_message_id, None), reply.metadata.src_node_id
            if reply.has_error() or asked == says:  # an error may be the SuperLink's own
                replies.append(reply)
            else:
                _log.warning("node %s replies as if it were node %s, which is no reply", asked, says)
        return replies

    def _pulled(self, names: list[str]) -> Iterator[Message]:
        """Yield replies; those that cannot be read are none, and from the first one on each is read by itself."""
        if not self._wary:
            try:
                yield from list(self.grid.pull_messages(names))
                return
            except httpx.HTTPError:  # of the way to the SuperLink, not of a reply
                raise
            except Exception:
                self._wary = True
        for name in names:
            try:
                yield from list(self.grid.pull_messages([name]))
            except httpx.HTTPError:
                raise
            except Exception as problem:
                _log.warning("node %s sends what cannot be read (%s)", self._asked.get(name), type(problem).__name__)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that come in time; a silo that was restarted is asked again.

        A message that is not on its way to its silo when nobody waits for the reply any more is dropped, so no silo
        pays for work that is not wanted. A silo that has been away for a while is not waited for.
        """
        contents = {message.metadata.dst_node_id: message for message in messages}
        patience = _USUAL_PATIENCE if timeout is None else timeout
        deadline, looked = time.monotonic() + patience, -_GONE
        tries = dict.fromkeys(contents, 1)
        waiting = self._sent(contents.values(), patience)
        replies = []
        while waiting and time.monotonic() < deadline:
            for reply in self.pull_messages(waiting):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is None:
                    continue
                if is_restarted(reply) and tries[node] < _MOST_TRIES:
                    tries[node] += 1
                    old = contents[node]
                    kind, group = old.metadata.message_type, old.metadata.group_id
                    again = Message(old.content, dst_node_id=node, message_type=kind, group_id=group)
                    waiting |= self._sent([again], deadline - time.monotonic())
                else:
                    replies.append(reply)
            if waiting and time.monotonic() > looked + _GONE / 4:
                looked, gone = time.monotonic(), self._gone(contents)
                waiting = {name: node for name, node in waiting.items() if node not in gone}
            if waiting:
                time.sleep(self.poll)
        return replies

    def _gone(self, nodes: Iterable[int]) -> set[int]:
        """Return which of some nodes have not been connected for a while."""
        now, connected = time.monotonic(), set(self.get_node_ids())
        self._absent = {node: self._absent.get(node, now) for node in nodes if node not in connected}
        return {node for node, since in self._absent.items() if since <= now - _GONE}

    def _sent(self, messages: Iterable[Message], patience: float) -> dict[str, int]:
        """Send messages; return the nodes that are waited for, by the names of the messages."""
        some = list(messages)
        for message in some:
            message.metadata.ttl = max(0.0, patience) + _CLOCKS
        names = zip(self.push_messages(some), some, strict=True)
        return {name: message.metadata.dst_node_id for name, message in names if name}
