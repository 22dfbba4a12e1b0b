"""The audit's table: what was attacked, what is claimed and certified, the ε that was shown, and the verdict."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from polyeps.accounting.certificate import Form
from polyeps.errors import InputError

CONFIDENCE = 0.99  # of the whole table: that no sound row is refuted by chance
_ROUNDING = 1e-6  # of a bound, relative: clips and logarithms are computed in floating point
_MORE = 8  # times the trials of a quick audit

# How a row was attacked.
Attack = Literal["enumeration", "support", "hostile weights", "worst-case pair", "one run", "noise streams"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Effort:
    """How hard to try: the seed of what is simulated, how many trials, and the confidence that each row must have."""

    seed: int = 0
    times: float = 1.0  # the trials of a quick audit
    confidence: float = CONFIDENCE

    def trials(self, quick: int) -> int:
        """Return how many trials to run where a quick audit runs so many."""
        return max(1, round(self.times * quick))

    def seed_for(self, what: str) -> int:
        """Return a seed of a row's own, so that a row is the same whichever other rows are run."""
        return zlib.crc32(f"{self.seed}/{what}".encode())

    def generator(self, what: str) -> np.random.Generator:
        return np.random.default_rng(self.seed_for(what))


@dataclass(frozen=True)
class Shown:
    """What an attack found: the ε that is claimed, the ε we certify, and a lower bound on the true one, at δ."""

    claimed: float
    certified: float
    audited: float
    delta: float = 0.0
    trials: int = 0  # 0 where nothing is left to chance
    estimate: float | None = None  # of the true ε, where an attack gives one besides its bound


@dataclass(frozen=True)
class Case:
    """One attack of the audit."""

    what: str
    form: Form
    attack: Attack
    run: Callable[[Effort], Shown]


@dataclass(frozen=True)
class Row:
    """One line of the table. A sound form is judged by its certificate, a published one by its claim."""

    what: str
    form: Form
    attack: Attack
    shown: Shown

    @property
    def refuted(self) -> bool:
        judged = self.shown.certified if self.form == "sound" else self.shown.claimed
        return self.shown.audited > judged * (1 + _ROUNDING) + 1e-12

    @property
    def verdict(self) -> Literal["refuted", "holds"]:
        return "refuted" if self.refuted else "holds"

    def as_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        shown = self.shown
        row = {"what": self.what, "form": self.form, "claimed": shown.claimed, "certified": shown.certified}
        row |= {"audited": shown.audited, "verdict": self.verdict, "attack": self.attack, "delta": shown.delta}
        return row | {"trials": shown.trials} | ({} if shown.estimate is None else {"estimate": shown.estimate})


def selected(cases: Sequence[Case], pattern: str | None) -> list[Case]:
    """Return the cases whose names contain a pattern, in which * and ? stand for any characters."""
    names = [case.what for case in cases]
    if len(set(names)) != len(names):
        raise InputError("two rows of the audit have the same name; give each its own")
    found = [case for case in cases if pattern is None or fnmatchcase(case.what.lower(), f"*{pattern.lower()}*")]
    if not found:
        raise InputError(f"no row of the audit matches {pattern!r}; leave it out to run all")
    return found


def audit_all(cases: Sequence[Case], seed: int, quick: bool, progress: Progress = lambda *_: None) -> list[Row]:
    """Run attacks. The error is divided among all of them, so that `CONFIDENCE` holds for the whole table."""
    effort = Effort(seed, 1 if quick else _MORE, 1 - (1 - CONFIDENCE) / len(cases))
    rows = []
    for done, case in enumerate(cases, start=1):
        rows.append(Row(case.what, case.form, case.attack, case.run(effort)))
        progress(done, len(cases))
    return rows
