"""Payloads as bytes, in the safetensors format: no code travels, and a damaged message is refused."""

from __future__ import annotations

from collections.abc import Sequence

import safetensors
import safetensors.torch
import torch

from polyeps.core import Payload, Replies, Total
from polyeps.errors import InputError


def encode(payload: Payload) -> bytes:
    """A payload's bytes.

    >>> decode(encode({"update": torch.ones(2)}))
    {'update': tensor([1., 1.])}
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in payload.items()}
    return bytes(safetensors.torch.save(held))


def decode(content: bytes) -> Payload:
    """The payload some bytes stand for."""
    try:
        return dict(safetensors.torch.load(content))
    except (safetensors.SafetensorError, ValueError, KeyError) as problem:
        raise InputError(f"a message of {len(content)} bytes is damaged ({problem}); ask for it again") from problem


def size(payload: Payload) -> int:
    """How many bytes a payload is on the wire."""
    return len(encode(payload))


def row(payload: Payload, place: int) -> Payload:
    """One client's part of stacked replies."""
    return {name: tensor[place] for name, tensor in payload.items()}


def stack(answers: Sequence[Replies]) -> Replies:
    """Answers of single clients as the rows of one; clients that declined are left out."""
    given = [answer for answer in answers if answer.ids]
    if not given:
        return Replies((), {}, ())
    payload = {name: torch.cat([answer.payload[name] for answer in given]) for name in given[0].payload}
    return Replies(
        ids=tuple(client for answer in given for client in answer.ids),
        payload=payload,
        ready=tuple(ready for answer in given for ready in answer.ready),
        received=given[0].received,
        sent=given[0].sent,
    )


def add(replies: Replies, least: int = 1) -> Total:
    """The sum of replies, if there are enough of them."""
    enough = len(replies.ids) >= max(1, least)
    payload = {name: tensor.sum(0) for name, tensor in replies.payload.items()} if enough else {}
    return Total(replies.ids, payload, replies.received, replies.sent)
