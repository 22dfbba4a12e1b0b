"""What a verified ledger says: accounts, what each run spent, how spending grew, and every row in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyeps.accounting.events import event_from_dict
from polyeps.accounting.histories import History, history_of
from polyeps.ledger import Ledger
from polyeps.ledger.account import ClientAccount, joined
from polyeps.report.ledger_words import rows_in_words

SIGNER = "signer: "  # before the name of a signer, in the name of the account that limits it
_STEPS = 80  # figures of a curve of spending


@dataclass(frozen=True)
class Account:
    """One account at the end of the ledger."""

    name: str
    epsilon: float
    delta: float
    spent: float
    reserved: float  # by open runs, and not charged yet
    charges: int
    unit: str

    @property
    def left(self) -> float:
        """Return what may still be promised to a run."""
        return max(0.0, self.epsilon - self.spent - self.reserved)

    @property
    def used(self) -> float:
        """Return the part of the budget that is spent."""
        return self.spent / self.epsilon if self.epsilon else math.inf if self.spent else 0.0

    @property
    def exceeded(self) -> bool:
        """Whether more is spent than the budget allows."""
        return self.spent > self.epsilon


@dataclass
class RunCharges:
    """What one run, or charges without a run, did to the ledger."""

    run: str  # "" for charges without one
    first: str = ""  # times
    last: str = ""
    signers: dict[str, None] = field(default_factory=dict)
    clients: dict[str, None] = field(default_factory=dict)
    purposes: dict[str, None] = field(default_factory=dict)
    charges: int = 0
    reserved: bool = False
    open: bool = False
    history: History = field(default_factory=dict)  # of the main account
    alone: float = math.nan  # the ε of this run by itself


@dataclass(frozen=True)
class LedgerHistory:
    """A ledger, verified."""

    id: str
    rows: int
    head: str
    first: str
    last: str
    accounts: tuple[Account, ...]
    signers: tuple[Account, ...]
    runs: tuple[RunCharges, ...]
    curve: tuple[tuple[int, str, float, float], ...]  # row, time, spent, budget; of the only account
    lines: tuple[tuple[str, ...], ...]  # row, time, kind, whose, what

    @property
    def main(self) -> Account | None:
        """Return the only account, where there is one; a silo's ledger has more only for its signers."""
        return self.accounts[0] if len(self.accounts) == 1 else None


def read_history(path: Path) -> LedgerHistory:
    """Verify a ledger, row by row, and return what it says; a ledger that was tampered with is refused."""
    with closing(Ledger(path)) as ledger:
        head = ledger.verify()
        rows = [row for row in ledger.rows() if row.seq <= head.seq]
        known: dict[int, tuple[float, float]] = {}
        accounts = [_account(name, ledger.account(name), known) for name in ledger.clients]
        own = [one for one in accounts if not one.name.startswith(SIGNER)] or accounts
        main = own[0].name if len(own) == 1 else ""
        reader = _Reader(ledger, main, _sampled(rows))
        for row in rows:
            reader.read(row)
        told = zip(rows, rows_in_words(rows), strict=True)
        return LedgerHistory(
            id=ledger.id,
            rows=head.seq,
            head=head.hash,
            first=_moment(rows[0].time),
            last=_moment(rows[-1].time),
            accounts=tuple(own),
            signers=tuple(one for one in accounts if one not in own),
            runs=reader.finish(),
            curve=tuple(reader.curve),
            lines=tuple((str(row.seq), _moment(row.time), row.kind, whose, what) for row, (_, _, whose, what) in told),
        )


def _sampled(rows: Sequence[Any]) -> set[int]:
    """Return the charges at which a curve is computed: all while they are few, the last one in any case."""
    charges = [row.seq for row in rows if row.kind in ("charge", "again")]
    step = max(1, math.ceil(len(charges) / _STEPS))
    return {*charges[step - 1 :: step], *charges[-1:]}


def _account(name: str, account: ClientAccount, known: dict[int, tuple[float, float]]) -> Account:
    terms = account.terms
    shared = id(account.standing)  # of many clients
    if shared not in known:
        spent = account.spent()
        known[shared] = spent, max(0.0, account.spent(account.committed) - spent)
    unit = f"all records of one {terms.person}" if terms.person else f"one {terms.unit}"
    budget = terms.budget
    return Account(name, budget.epsilon, budget.delta, *known[shared], account.charges, unit)


class _Reader:
    """Goes through the rows in order."""

    def __init__(self, ledger: Ledger, main: str, sampled: set[int]) -> None:
        self.ledger, self.main, self.sampled = ledger, main, sampled
        self.account = ledger.account(main) if main else None
        self.cohorts: dict[int, list[str]] = {}
        self.charges: dict[int, Mapping[str, Any]] = {}  # by row
        self.runs: dict[str, RunCharges] = {}
        self.history: History = {}
        self.curve: list[tuple[int, str, float, float]] = []
        self.budget = 0.0

    def read(self, row: Any) -> None:
        """Take in a row."""
        content = row.content
        match row.kind:
            case "budget" | "budget-changed" if content["client"] == self.main:
                self.budget = content["epsilon"]
                self.curve.append((row.seq, _moment(row.time), self.curve[-1][2] if self.curve else 0.0, self.budget))
            case "cohort":
                self.cohorts[row.seq] = content["clients"]
            case "charge" | "reserve":
                if row.kind == "charge":
                    self.charges[row.seq] = content
                self._charge(row, content, _moment(row.time))
            case "again":
                repeated = (self.charges.get(seq) for seq in range(content["first"], content["last"] + 1))
                for charge in filter(None, repeated):
                    self._charge(row, {**charge, "purpose": content.get("purpose", "")}, _moment(row.time))
            case "release":
                self._run(content["run"], _moment(row.time)).open = False

    def _charge(self, row: Any, content: Mapping[str, Any], time: str) -> None:
        payers = content["clients"]
        clients = self.cohorts[payers] if isinstance(payers, int) else payers
        run = self._run(content.get("run", ""), time)
        for client in clients:
            if client.startswith(SIGNER):
                run.signers[client.removeprefix(SIGNER)] = None
            else:
                run.clients[client] = None
        if row.kind == "reserve":
            run.reserved = run.open = True
        else:
            run.charges += 1
            if purpose := content.get("purpose"):
                run.purposes[purpose] = None
            if self.account is not None and self.main in clients:
                steps = history_of(event_from_dict(content["event"]), content["uses"])
                run.history = joined(run.history, steps)
                self.history = joined(self.history, steps)
                if row.seq in self.sampled:
                    self.curve.append((row.seq, time, self.account.spent(self.history), self.budget))

    def _run(self, name: str, time: str) -> RunCharges:
        run = self.runs.setdefault(name, RunCharges(name, first=time))
        run.last = time
        return run

    def finish(self) -> tuple[RunCharges, ...]:
        """Return the runs, the last one first, with what each spent by itself."""
        if self.account is not None:
            for run in self.runs.values():
                run.alone = self.account.spent(run.history)
        return tuple(reversed(self.runs.values()))


def _moment(time: str) -> str:
    """Return the time of a row, to the second."""
    return f"{time[:10]} {time[11:19]} UTC"
