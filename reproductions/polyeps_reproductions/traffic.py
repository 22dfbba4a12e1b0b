"""What PFA and PFA+ send: as paper 000 counts it (figure 7), and as bytes really encoded, in both directions.

The paper counts four bytes for every number uploaded, over all participants, and calls 2²⁰ bytes a megabyte. Its
totals of 113 and 377 are those of 95 rounds of 40 clients. It leaves out that a private client of PFA+ must be sent
the subspace: rank times as many numbers as the model has. With rank one, what it saves on the way up it pays on the
way down, to within the warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polyeps.errors import InputError
from polyeps.transport import codec

MEBIBYTE = 1 << 20
FLOAT = 4  # bytes
# Figure 7 (M = 50): totals in MiB of PFA and PFA+, read off the paper.
PRINTED = {"logistic": (113, 12), "cnn": (377, 40)}


@dataclass(frozen=True)
class Totals:
    """A run's traffic in MiB."""

    pfa: float
    pfa_plus: float

    @property
    def reduction(self) -> float:
        """The share of PFA's traffic that PFA+ saves; negative where it needs more."""
        return 1 - self.pfa_plus / self.pfa


@dataclass(frozen=True)
class Both:
    """The same in both directions, seen from the clients."""

    up: Totals
    down: Totals

    @property
    def together(self) -> Totals:
        return Totals(self.up.pfa + self.down.pfa, self.up.pfa_plus + self.down.pfa_plus)


def published(
    parameters: int,
    tensors: int,
    *,
    rank: int = 1,
    rounds: int = 95,
    clients: int = 40,
    public: float = 4.0,
    warm_up: int = 1,
) -> Totals:
    """The uplink of all clients as the paper counts it, `clients` in a round of which `public` on average are public.

    >>> logistic = published(7850, 2)
    >>> int(logistic.pfa), int(logistic.pfa_plus)
    (113, 12)
    """
    _check(rounds, warm_up)
    full = rounds * clients * parameters
    in_full = rounds * public + warm_up * (clients - public)
    thin = (rounds - warm_up) * (clients - public) * tensors * rank
    return Totals(full * FLOAT / MEBIBYTE, (in_full * parameters + thin) * FLOAT / MEBIBYTE)


def private_client(sizes: Sequence[int], *, rank: int = 1, rounds: int = 100, warm_up: int = 1) -> Both:
    """What one private client sends and receives in as many rounds, by the bytes of our messages.

    `sizes` are those of the model's tensors; `warm_up` 0 is PFA+ with its warm-up in turn.
    """
    _check(rounds, warm_up)
    message = _messages(sizes, rank)
    thin = rounds - warm_up
    up = Totals(rounds * message.update / MEBIBYTE, (warm_up * message.update + thin * message.thin) / MEBIBYTE)
    down = Totals(rounds * message.model / MEBIBYTE, (warm_up * message.model + thin * message.subspace) / MEBIBYTE)
    return Both(up, down)


def everybody(
    sizes: Sequence[int],
    *,
    rank: int = 1,
    rounds: int = 95,
    clients: int = 40,
    public: float = 4.0,
    warm_up: int = 1,
) -> Both:
    """What all clients of a round send and receive together, by the bytes of our messages."""
    message = _messages(sizes, rank)
    one = private_client(sizes, rank=rank, rounds=rounds, warm_up=warm_up)

    def total(each: int, private: Totals) -> Totals:
        of_public = rounds * public * each / MEBIBYTE
        others = clients - public
        return Totals(of_public + others * private.pfa, of_public + others * private.pfa_plus)

    return Both(total(message.update, one.up), total(message.model, one.down))


@dataclass(frozen=True)
class _Messages:
    """Bytes of each kind of message."""

    model: int
    update: int
    thin: int
    subspace: int  # with the model


def _messages(sizes: Sequence[int], rank: int) -> _Messages:
    if rank < 1 or not sizes or min(sizes) < 1:
        raise InputError("traffic needs the sizes of a model's tensors, each at least 1, and a rank of at least 1")
    parameters = sum(sizes)
    ranks = [min(rank, size) for size in sizes]
    model = {"model": torch.empty(parameters)}
    basis = {
        "basis": torch.empty(sum(count * size for count, size in zip(ranks, sizes, strict=True))),
        "ranks": torch.tensor(ranks),
        "centre": torch.empty(0),
    }
    return _Messages(
        model=codec.size(model),
        update=codec.size({"update": torch.empty(parameters)}),
        thin=codec.size({"coordinates": torch.empty(sum(ranks))}),
        subspace=codec.size({**model, **basis}),
    )


def _check(rounds: int, warm_up: int) -> None:
    if not 0 <= warm_up <= rounds or rounds < 1:
        raise InputError(f"warm_up must be from 0 to the {rounds} rounds, of which there is at least one")
