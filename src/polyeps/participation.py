"""How the cohort of a round is drawn among the clients that can still afford one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence, Set
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

    def goes_on(self, active: Collection[str]) -> bool:
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
        self, everyone: Sequence[str], active: Collection[str], seed: int | bytes | None, round: int
    ) -> tuple[str, ...]:
        """Draw this round's cohort, in the order of `everyone`: from a seed, which is public, from a server's secret of
        32 bytes, or without either from the system's entropy.

        A set or dictionary of active clients is looked into for those that may be drawn, and not gone through.
        """
        if self.kind == "full":
            return tuple(active)
        everyone = tuple(everyone)
        left = active if isinstance(active, Mapping | Set) else frozenset(active)
        if self.kind == "epoch":
            if not isinstance(seed, int):
                raise InputError("participation: cohorts of one epoch are drawn together; give a seed, which is public")
            batches = self.batches(len(everyone))
            cohort = _shuffled(everyone, seed, round // batches, batches)[round % batches]
            return tuple(everyone[place] for place in cohort if everyone[place] in left)
        lots = _lots(everyone, seed, round)
        if self.kind == "poisson":
            chosen = [place for place in np.flatnonzero(lots < self.share).tolist() if everyone[place] in left]
        else:
            chosen = _smallest(lots, cohort_size(self.share, len(everyone)), lambda place: everyone[place] in left)
        if self.including:
            wanted = [place for place, name in enumerate(everyone) if name in self.including and name in left]
            if wanted and not set(wanted) & set(chosen):
                if self.kind == "uniform" and chosen:
                    chosen.remove(max(chosen, key=lots.__getitem__))
                chosen.append(min(wanted, key=lots.__getitem__))
        return tuple(everyone[place] for place in sorted(chosen))


def _smallest(lots: NDArray[np.float64], size: int, allowed: Callable[[int], bool]) -> list[int]:
    """Return the places of the smallest lots that are allowed: among twice as many first, then among more."""
    taken = 2 * size
    while taken < len(lots):
        found = np.argpartition(lots, taken)[:taken]
        chosen = [place for place in found[np.argsort(lots[found])].tolist() if allowed(place)]
        if len(chosen) >= size:
            return chosen[:size]
        taken *= 4
    return [place for place in np.argsort(lots).tolist() if allowed(place)][:size]


@lru_cache(maxsize=2)
def _ranks(everyone: tuple[str, ...]) -> NDArray[np.int64]:
    """Return each client's rank among the sorted names: the order in which clients are listed must not matter."""
    ranks = np.empty(len(everyone), np.int64)
    ranks[sorted(range(len(everyone)), key=everyone.__getitem__)] = np.arange(len(everyone))
    return ranks


def _lots(everyone: tuple[str, ...], seed: int | bytes | None, round: int) -> NDArray[np.float64]:
    """Return the lot of each client."""
    if seed is None:  # 53 bits of the system's entropy for each client
        words = np.frombuffer(secrets.token_bytes(8 * len(everyone)), np.uint64) >> np.uint64(11)
        return words.astype(np.float64) * 2.0**-53
    if isinstance(seed, bytes):  # the lot of a client does not depend on the others
        return 1 - SecretStreams(derived_key(seed, "cohorts"), everyone, round).uniforms(1)[:, 0]
    return np.random.default_rng([seed, round]).random(len(everyone))[_ranks(everyone)]


@lru_cache(maxsize=2)
def _shuffled(everyone: tuple[str, ...], seed: int, epoch: int, batches: int) -> list[list[int]]:
    """Return the places of an epoch's cohorts, of sizes equal up to one; the order of `everyone` does not matter."""
    places = np.argsort(_ranks(everyone)).astype(object)  # numbers would be shuffled otherwise than names were
    np.random.default_rng([seed, epoch]).shuffle(places)
    return [sorted(part) for part in np.array_split(places, batches)]


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
