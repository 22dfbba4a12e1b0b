"""A client as a Flower ClientApp: it opens its own files, answers tasks, and discloses nothing about its errors.

Flower starts a new process per message, so the function it is given must open whatever a client keeps (ledger, memory)
from files the client owns. Replies meant for a sum go into secure sums and nowhere else: alone, a reply has only this
client's part of the noise.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from polyeps.client import answer, profiles
from polyeps.clients import Clients
from polyeps.core import ENTER, Algorithm, Field, Payload, Task
from polyeps.engine.noise import SystemStreams
from polyeps.errors import InputError
from polyeps.transport import codec
from polyeps.transport.flower_sums import Seat

_log = logging.getLogger(__name__)
DECLINED = "declined"  # all that a server learns about an error at a client
MOST_BITS = 62  # of an integer that is summed
Handler = Callable[[Message, Context], Message]
# Opens a client for a message: itself (n = 1), the algorithm, and the fields it discloses.
Open = Callable[[Context], tuple[Clients, Algorithm, Iterable[Field]]]


def client_app(
    open_client: Open,
    open_seat: Callable[[Context], Seat] | None = None,
    *,
    rehearsal: bool = False,
    notice: Callable[[Exception], None] | None = None,
) -> ClientApp:
    """Return a ClientApp that answers tasks, takes the steps of secure sums, and introduces itself when queried.

    A client must draw its noise from the system's entropy, have a keeper for its memory and replies, and name the run
    it takes part in (`Clients.run`): it answers no other. A `rehearsal` lifts these rules: it is a simulation over
    Flower's messages, and protects no client.

    Of any error at a client, the server reads the one word "declined"; the details are in the client's own log, or are
    given to `notice`.
    """
    app = ClientApp()
    discreetly = functools.partial(_discreet, notice)

    def opened(context: Context) -> tuple[Clients, Algorithm, Iterable[Field]]:
        clients, algorithm, discloses = open_client(context)
        if not rehearsal:
            _check_deployed(clients)
        return clients, algorithm, discloses

    @app.query()  # type: ignore[untyped-decorator,unused-ignore]
    @discreetly
    def introduce(message: Message, context: Context) -> Message:
        (profile,) = profiles(*opened(context))
        disclosed = {name: value for name, value in asdict(profile).items() if value is not None}
        disclosed |= {"identity": open_seat(context).public} if open_seat else {}
        return Message(RecordDict({"profile": ConfigRecord(disclosed)}), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator,unused-ignore]
    @discreetly
    def work(message: Message, context: Context) -> Message:
        clients, algorithm, _ = opened(context)
        asked = message.content["task"]
        bits = asked.get("bits")
        if bits is not None and (type(bits) is not int or not 2 <= bits <= MOST_BITS):
            raise InputError(f"a sum must be of 2 to {MOST_BITS} bits, not of {bits!r}")
        task = Task(
            asked["action"],
            clients.ids,
            tensors(message.content["payload"]),
            asked["run"],
            asked["round"],
            summed=bits is not None and open_seat is not None,
        )
        seat = open_seat(context) if open_seat is not None and task.summed and task.action != ENTER else None
        shapes = None if seat is None or bits is None else seat.check(algorithm, task, bits)  # before it is paid for
        replies = answer(clients, algorithm, task)
        ready = all(replies.ready) and not replies.exhausted
        content: dict[str, Any] = {"reply": ConfigRecord({"answered": bool(replies.ids), "ready": ready})}
        if replies.ids and seat is not None and bits is not None:
            if shapes is None:
                shapes = seat.prepare(algorithm, task, codec.row(replies.payload, 0), bits)
            if clients.keeper is not None:
                clients.keeper.forget(task)  # now it is kept by the seat, until it is masked
            content["shapes"] = ConfigRecord({name: list(shape) for name, shape in shapes.items()})
        elif replies.ids:
            content["payload"] = arrays(codec.row(replies.payload, 0))
        return Message(RecordDict(content), reply_to=message)

    @app.train("sum")  # type: ignore[untyped-decorator,unused-ignore]
    @discreetly
    def take_part(message: Message, context: Context) -> Message:
        if open_seat is None:
            raise InputError("this client has no seat in secure sums; give client_app one")
        (name,) = opened(context)[0].ids
        asked = dict(message.content["sum"])
        answered = open_seat(context).answer(name, asked, bytes(asked["message"]))
        return Message(RecordDict({"sum": ConfigRecord({"message": answered})}), reply_to=message)

    return app


def _discreet(notice: Callable[[Exception], None] | None, handle: Handler) -> Handler:
    """Answer "declined" in place of any exception: Flower would send its text, which may be private."""

    @functools.wraps(handle)
    def handled(message: Message, context: Context) -> Message:
        try:
            return handle(message, context)
        except Exception as problem:
            if notice is None:
                _log.exception("a task was declined")
            else:
                notice(problem)
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, DECLINED), reply_to=message)

    return handled


def _check_deployed(clients: Clients) -> None:
    """Refuse clients whose noise could be repeated, whose memory ends with the process, or that answer any run."""
    name = clients.ids[0]
    if clients.repeatable or not isinstance(clients.streams(clients.ids, 0), SystemStreams):
        raise InputError(
            f"client {name!r} draws noise that can be repeated, which protects no deployed client; "
            "give it SystemStreams and repeatable = False"
        )
    if clients.keeper is None:
        raise InputError(f"client {name!r} has no keeper, so it would forget between messages; give it one")
    if not clients.run:
        raise InputError(
            f"client {name!r} names no run, so it would answer every server's; set Clients.run to the one it "
            "takes part in"
        )


def arrays(payload: Payload) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in payload.items()})


def tensors(record: ArrayRecord) -> Payload:
    # Arrays that arrived are read-only; a tensor must own its memory.
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}
