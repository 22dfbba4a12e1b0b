"""Payloads as bytes, in the safetensors format: no code travels, and a damaged message is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.core import Payload, Replies, Specs, SumTerms, Total
from polyeps.errors import InputError
from polyeps.messages import usable_rows
from polyeps.secagg.masks import bytes_of


def encode(payload: Payload) -> bytes:
    """Return a payload's bytes.

    >>> decode(encode({"update": torch.ones(2)}))
    {'update': tensor([1., 1.])}
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in payload.items()}
    return bytes(safetensors.torch.save(held))


def encode_each(name: str, tensor: Tensor) -> Iterator[bytes]:
    """Yield each row's bytes, as `encode` gives them: alike but for the numbers, which come last.

    >>> list(encode_each("kept", torch.eye(2))) == [encode({"kept": row}) for row in torch.eye(2)]
    True
    """
    held = tensor.detach().cpu().contiguous()
    if not held.numel():
        yield from (encode({name: row}) for row in held)
        return
    before = encode({name: torch.zeros_like(held[0])})[: -held[0].nbytes]
    for row in held.reshape(len(held), -1).view(torch.uint8).numpy():
        yield before + row.tobytes()


def decode(content: bytes) -> Payload:
    """Return the payload that some bytes stand for."""
    try:
        return dict(safetensors.torch.load(content))
    except (safetensors.SafetensorError, ValueError, KeyError) as problem:
        raise InputError(f"a message of {len(content)} bytes is damaged ({problem}); ask for it again") from problem


def size(payload: Payload) -> int:
    """Return the number of bytes of a payload on the wire, which depends on names, types and shapes alone."""
    return _size(_kind(payload))


@lru_cache(maxsize=256)
def _size(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> int:
    return len(encode({name: torch.zeros(shape, dtype=kind) for name, kind, shape in tensors}))


def row(payload: Payload, place: int) -> Payload:
    """Return one client's part of stacked replies."""
    return {name: tensor[place] for name, tensor in payload.items()}


def stack(answers: Sequence[Replies], gives: Specs | None = None) -> Replies:
    """Return answers of single clients as the rows of one; clients that declined are left out.

    Answers that are not as `gives` says, or else not like most of the others, are left out as malformed.
    """
    exhausted = tuple(client for answer in answers for client in answer.exhausted)
    malformed = [client for answer in answers for client in answer.malformed]
    given = [answer for answer in answers if answer.ids]
    fitting = [answer for answer in given if bool(usable_rows(answer.payload, 1, gives).all())]
    kinds = Counter(_kind(answer.payload) for answer in fitting)
    usual = kinds.most_common(1)[0][0] if kinds else ()
    rows = [answer for answer in fitting if _kind(answer.payload) == usual]
    heard = {client for answer in rows for client in answer.ids}
    malformed += [client for answer in given for client in answer.ids if client not in heard]
    if not rows:
        return Replies((), {}, (), exhausted=exhausted, malformed=tuple(malformed))
    return Replies(
        ids=tuple(client for answer in rows for client in answer.ids),
        payload={name: torch.cat([answer.payload[name] for answer in rows]) for name in rows[0].payload},
        ready=tuple(ready for answer in rows for ready in answer.ready),
        received=rows[0].received,
        sent=rows[0].sent,
        exhausted=exhausted,
        malformed=tuple(malformed),
    )


def _kind(payload: Payload) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    return tuple(sorted((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in payload.items()))


def add(replies: Replies, terms: SumTerms) -> Total:
    """Return the sum of replies, if there are enough of them; of integers modulo 2^bits, if bits are given."""
    enough, bits = len(replies.ids) >= max(1, terms.least), terms.bits
    payload = {name: tensor.sum(0) for name, tensor in replies.payload.items()} if enough else {}
    if bits is not None:
        check_integers(replies.payload)
        payload = {name: total & (2**bits - 1) for name, total in payload.items()}
    return Total(replies.ids, payload, replies.received, sent(replies, bits))


def unflattened(total: NDArray[np.uint64], shapes: Mapping[str, Sequence[int]]) -> Payload:
    """Return a sum of flattened payloads as the tensors it was made of."""
    pieces = torch.split(torch.from_numpy(total.astype(np.int64)), [math.prod(shape) for shape in shapes.values()])
    return {name: piece.reshape(tuple(shape)) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def sent(replies: Replies, bits: int | None) -> int:
    """Return the bytes of one reply to be summed; integers of a few bits are packed as in `masks.to_bytes`.

    Keys, shares and signatures of the secure sum are not counted.
    """
    if bits is None or not replies.ids:
        return replies.sent
    return sum(tensor[0].numel() for tensor in replies.payload.values()) * bytes_of(bits)


def check_integers(payload: Payload) -> None:
    """Refuse tensors that cannot be summed modulo 2^bits."""
    for name, tensor in payload.items():
        if tensor.is_floating_point():
            raise InputError(
                f"{name!r} holds floats, of which there is no secure sum: a mask would not hide all digits; "
                'choose integer noise, such as noise = "discrete-gaussian"'
            )
