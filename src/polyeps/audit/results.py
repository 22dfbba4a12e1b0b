"""The audit's table: every attack, the claimed and the certified ε, the audited ε, and the verdict."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from polyeps.accounting.certificate import Form
from polyeps.errors import InputError, suggest

CONFIDENCE = 0.99  # that no sound form in the whole table is refuted by chance
_ROUNDING = 1e-6  # of a bound, relative: clips and logarithms are computed in floating point
_FULL = 8  # times the trials of a quick audit

AttackKind = Literal["enumeration", "support", "hostile weights", "worst-case pair", "one run", "noise streams"]


@dataclass(frozen=True)
class Effort:
    """The seed of simulations, the number of trials, the confidence of each result, and the attack they are for."""

    seed: int = 0
    times: float = 1.0  # the trials of a quick audit
    confidence: float = CONFIDENCE
    attack: str = ""

    def trials(self, quick: int) -> int:
        """Return the number of trials, given that of a quick audit."""
        return max(1, round(self.times * quick))

    def seed_for(self, part: str = "") -> int:
        """Return the seed of a part of the attack; it does not depend on the other attacks that are run."""
        return zlib.crc32("/".join([str(self.seed), self.attack, *filter(None, [part])]).encode())


@dataclass(frozen=True)
class Evidence:
    """The ε that is claimed, the ε that we certify, and the lower bound on the true ε that an attack found, at δ."""

    claimed: float
    certified: float
    audited: float
    delta: float = 0.0
    trials: int = 0  # 0: the attack is deterministic
    estimate: float | None = None  # of the true ε, where an attack gives one besides its bound


@dataclass(frozen=True)
class Attack:
    """One attack of the audit."""

    name: str
    form: Form
    kind: AttackKind
    run: Callable[[Effort], Evidence]

    def audit(self, effort: Effort) -> AuditResult:
        """Run the attack with seeds of its own."""
        return AuditResult(self.name, self.form, self.kind, self.run(replace(effort, attack=self.name)))


@dataclass(frozen=True)
class AuditResult:
    """A line of the table. Sound forms are compared with their certificate, published forms with their claim."""

    name: str
    form: Form
    kind: AttackKind
    evidence: Evidence

    @property
    def refuted(self) -> bool:
        """Whether the audited ε is above the figure it is compared with."""
        stated = self.evidence.certified if self.form == "sound" else self.evidence.claimed
        return self.evidence.audited > stated * (1 + _ROUNDING) + 1e-12

    @property
    def verdict(self) -> Literal["refuted", "holds"]:
        """Return the verdict in a word."""
        return "refuted" if self.refuted else "holds"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        found = self.evidence
        row = {"name": self.name, "form": self.form, "claimed": found.claimed, "certified": found.certified}
        row |= {"audited": found.audited, "verdict": self.verdict, "attack": self.kind, "delta": found.delta}
        return row | {"trials": found.trials} | ({} if found.estimate is None else {"estimate": found.estimate})


def attack(name: str, form: Form, kind: AttackKind, run: Callable[..., Evidence], *given: Any) -> Attack:
    """Return an attack that runs a function with some arguments, and the effort last."""
    return Attack(name, form, kind, partial(run, *given))


def select_attacks(attacks: Sequence[Attack], pattern: str | None) -> list[Attack]:
    """Return the attacks whose names contain a pattern, in which * and ? stand for any characters."""
    names = [attack.name for attack in attacks]
    if len(set(names)) != len(names):
        raise InputError("two attacks of the audit have the same name; give each its own")
    wanted = "*" if pattern is None else f"*{pattern.lower()}*"
    found = [attack for attack in attacks if fnmatchcase(attack.name.lower(), wanted)]
    if not found:
        words = {word.strip(",:") for name in names for word in name.lower().split()}
        near = suggest(str(pattern), sorted(words), "leave it out to run all")
        raise InputError(f"no attack of the audit matches {pattern!r}; {near}")
    return found


def run_attacks(
    attacks: Sequence[Attack], seed: int, quick: bool, progress: Callable[[int, int], None] = lambda *_: None
) -> list[AuditResult]:
    """Run attacks. All share the error, so that `CONFIDENCE` holds for the whole table."""
    effort = Effort(seed, 1 if quick else _FULL, 1 - (1 - CONFIDENCE) / len(attacks))
    results = []
    for done, attack in enumerate(attacks, start=1):
        results.append(attack.audit(effort))
        progress(done, len(attacks))
    return results
