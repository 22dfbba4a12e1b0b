"""A grid that waits for replies for a finite time, and asks silos that were restarted again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

_USUAL_PATIENCE = 600.0  # seconds
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

    def get_node_ids(self) -> Iterable[int]:
        return list(self.grid.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return list(self.grid.push_messages(list(messages)))

    def pull_messages(self, names: Iterable[str]) -> Iterable[Message]:
        return list(self.grid.pull_messages(list(names)))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that come in time; a silo that was restarted is asked again."""
        contents = {message.metadata.dst_node_id: message for message in messages}
        deadline = time.monotonic() + (_USUAL_PATIENCE if timeout is None else timeout)
        tries = dict.fromkeys(contents, 1)
        waiting = self._sent(contents.values())
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
                    waiting |= self._sent([Message(old.content, dst_node_id=node, message_type=kind, group_id=group)])
                else:
                    replies.append(reply)
            if waiting:
                time.sleep(self.poll)
        return replies

    def _sent(self, messages: Iterable[Message]) -> dict[str, int]:
        """Send messages; return the nodes that are waited for, by the names of the messages."""
        some = list(messages)
        names = zip(self.push_messages(some), some, strict=True)
        return {name: message.metadata.dst_node_id for name, message in names if name}
