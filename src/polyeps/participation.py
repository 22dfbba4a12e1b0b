"""How the cohort of a round is drawn among the clients that can still afford one."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.engine.noise import SecretStreams, derived_key
from polyeps.errors import InputError


@dataclass(frozen=True)
class Participation:
    """How a round's cohort is drawn among the clients that can still afford a round.

    uniform: a fixed share of all clients, without replacement; poisson: every client independently, with that
    probability; full: all clients; epoch: all clients are shuffled into cohorts of about that share, and each client is
    asked once before any is asked again. A client's draw depends on the seed, the round and the set of all clients
    alone, so methods compared under one seed draw the same cohorts as long as the same clients are left.
    """

    kind: Literal["uniform", "poisson", "full", "epoch"] = "full"
    share: float = 1.0
    quorum: int = 1  # the run ends when fewer clients than this can afford a round
    including: frozenset[str] = frozenset()  # at least one of these is in every cohort; without any, the run ends

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"participation.share must be above 0 and at most 1, not {self.share}")
        if self.quorum < 1:
            raise InputError(f"participation.quorum must be at least 1, not {self.quorum}")
        if self.kind == "epoch" and self.including:
            raise InputError("participation: in an epoch every client is asked once, so none can be in every cohort")

    def goes_on(self, active: Sequence[str]) -> bool:
        """Return whether a round can begin: enough clients are left, and one that must be in every cohort."""
        missing = bool(self.including) and self.including.isdisjoint(active)
        return len(active) >= self.quorum and not missing

    def batches(self, clients: int) -> int:
        """Return the number of rounds in which an epoch asks every client once; 1 for other kinds."""
        return clients // cohort_size(self.share, clients) if self.kind == "epoch" else 1

    def charged(self, clients: int) -> float:
        """Return the share of rounds that a client is drawn for."""
        return 1 / self.batches(clients) if self.kind == "epoch" else self.share

    def draw(
        self, everyone: Sequence[str], active: Sequence[str], seed: int | bytes | None, round: int
    ) -> tuple[str, ...]:
        """Draw this round's cohort, in the order of `active`: from a seed, which is public, from a server's secret of
        32 bytes, or without either from the system's entropy.
        """
        if self.kind == "full":
            return tuple(active)
        if self.kind == "epoch":
            if not isinstance(seed, int):
                raise InputError("participation: cohorts of one epoch are drawn together; give a seed, which is public")
            batches = self.batches(len(everyone))
            cohort = _shuffled(tuple(everyone), seed, round // batches, batches)[round % batches]
            return tuple(client for client in active if client in cohort)
        places = _places(tuple(everyone))
        lots = _lots(places, seed, round)[np.fromiter(map(places.__getitem__, active), np.int64, len(active))]
        if self.kind == "poisson":
            chosen = np.flatnonzero(lots < self.share)
        else:
            size = cohort_size(self.share, len(places))
            chosen = np.argpartition(lots, size - 1)[:size] if size < len(lots) else np.arange(len(lots))
        if self.including:
            wanted = [place for place, client in enumerate(active) if client in self.including]
            if wanted and not np.isin(wanted, chosen).any():
                if self.kind == "uniform" and len(chosen):
                    chosen = np.delete(chosen, lots[chosen].argmax())
                chosen = np.append(chosen, min(wanted, key=lots.__getitem__))
        return tuple(active[place] for place in np.sort(chosen).tolist())


@lru_cache(maxsize=2)
def _places(everyone: tuple[str, ...]) -> dict[str, int]:
    """Return each client's place among all names: the order in which clients are listed must not matter."""
    return {client: place for place, client in enumerate(sorted(everyone))}


def _lots(names: Collection[str], seed: int | bytes | None, round: int) -> NDArray[np.float64]:
    if seed is None:  # 53 bits of the system's entropy for each client
        words = np.frombuffer(secrets.token_bytes(8 * len(names)), np.uint64) >> np.uint64(11)
        return words.astype(np.float64) * 2.0**-53
    if isinstance(seed, bytes):  # the lot of a client does not depend on the others
        return 1 - SecretStreams(derived_key(seed, "cohorts"), tuple(names), round).uniforms(1)[:, 0]
    return np.random.default_rng([seed, round]).random(len(names))


@lru_cache(maxsize=2)
def _shuffled(everyone: tuple[str, ...], seed: int, epoch: int, batches: int) -> list[frozenset[str]]:
    """Return an epoch's cohorts, their sizes equal up to one; the order in which clients are listed does not matter."""
    names = np.array(sorted(everyone), dtype=object)
    np.random.default_rng([seed, epoch]).shuffle(names)
    return [frozenset(part) for part in np.array_split(names, batches)]


def cohort_size(share: float, clients: int) -> int:
    """Return the number of clients of a share, at least one; 0.8 of 50 is 40 despite float rounding."""
    return max(1, int(share * clients + 1e-9))


def check_secret_cohorts(participation: Participation) -> None:
    """Refuse cohorts that a round price does not cover: it assumes Poisson or full participation."""
    if participation.kind not in ("poisson", "full") or participation.including:
        raise InputError(
            "participation: the price of noise on a sum assumes that every client is drawn independently; "
            f"drawn as {participation.kind}{' with chosen clients' if participation.including else ''}, one client "
            'takes the place of another, which costs more; use kind = "poisson" or "full", without with_public'
        )
