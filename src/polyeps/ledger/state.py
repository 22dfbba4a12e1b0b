"""The state of a ledger after its rows: accounts, cohorts, payers and runs; and the rows of a new charge."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any, Literal, NamedTuple, NoReturn

from dp_accounting.dp_event import DpEvent

from polyeps.accounting.events import canonical_json, event_from_dict, event_to_dict
from polyeps.core import Budget
from polyeps.errors import BudgetExceeded, InputError, LedgerError, suggest
from polyeps.ledger.account import Charge, ClientAccount, Obstacle, Standing, joined
from polyeps.ledger.budget_rows import terms_of
from polyeps.ledger.hash_chain import Draft, LedgerRow
from polyeps.ledger.repeats import ChargeKey, Repeats

_FEW = 8  # clients written into a charge or with a row for each; larger groups share one
_MANY = 5000  # budgets in one row
_ALIKE = 10_000  # groups of payers to look for again
_Kind = Literal["charge", "reserve"]


class RunReservation(NamedTuple):
    """A run that reserved its price."""

    asked: tuple[tuple[tuple[str, ...], ChargeKey], ...]  # clients and charge, for each charge that was reserved
    open: bool = True

    @property
    def clients(self) -> list[str]:
        return list(dict.fromkeys(client for clients, _ in self.asked for client in clients))


class LedgerState:
    """The state after some rows; `path` is named in errors."""

    def __init__(self, path: object) -> None:
        self.path = path
        self.id = ""
        self._accounts: dict[str, ClientAccount] = {}
        self._lock = threading.RLock()  # whoever looks at accounts may bring them up to date
        self._repeats = Repeats()
        self.runs: dict[str, RunReservation] = {}
        self._payers: dict[str, list[Sequence[str]]] = {}  # by purpose
        self._opened: dict[tuple[Any, ...], Standing] = {}  # by terms: the standing of clients before any charge
        self._cohorts: dict[int, tuple[str, ...]] = {}
        self._alike: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._cohort_rows: dict[tuple[str, ...], int] = {}

    @property
    def accounts(self) -> dict[str, ClientAccount]:
        """All accounts, up to date."""
        with self._lock:
            if self._repeats.times:
                self._settle()
            return self._accounts

    def _settle(self) -> None:
        repeats = self._repeats
        times, repeats.times = repeats.times, 0
        if times:
            repeats.sure = None
            for charge, key in repeats.charges:
                self._apply(charge, key, times)

    def account(self, client: str) -> ClientAccount:
        accounts = self.accounts
        if client not in accounts:
            raise InputError(
                f"client {client!r} has no budget in {self.path}; {suggest(client, accounts, 'set one first')}"
            )
        return accounts[client]

    def paid(self, purpose: str) -> set[str]:
        return {client for payers in self._payers.get(purpose, []) for client in payers}

    def unpaid(self, charges: Sequence[Charge], purpose: str) -> list[Charge]:
        """Return charges without the clients that have paid for this purpose."""
        if not (paid := self.paid(purpose)):
            return list(charges)
        left = [replace(c, clients=tuple(client for client in c.clients if client not in paid)) for c in charges]
        return [charge for charge in left if charge.clients]

    def drafts(
        self, kind: _Kind, charges: Sequence[Charge], run: str, labels: Mapping[str, str], end: int
    ) -> list[Draft]:
        """Return the rows for charges or reservations, after row `end`; refuse if one of them does not fit."""
        if self.fits_again(charges, run) and kind == "charge":
            return [("again", {**self._repeats.content(), **labels})]
        drafts: list[Draft] = []
        leading: dict[str, Standing] = {}
        keys: list[ChargeKey] = []
        accounts = self.accounts
        for charge in charges:
            if not charge.clients or len(set(charge.clients)) < len(charge.clients):
                raise InputError("a charge needs at least one client, each named once")
            keys.append(key := charge_key(kind, charge, run))
            for client in charge.clients:
                account = accounts.get(client) or self.account(client)
                standing = leading.get(client, account.standing)
                obstacle, leading[client] = following(standing, key, charge)
                if obstacle and not (obstacle == "budget" and leading[client].within(account.epsilon)):
                    self._refuse(client, ClientAccount(account.epsilon, standing), key, charge, obstacle)
            drafts += self._draft(kind, charge, labels, end + len(drafts))
        if not run and self._repeats.are(charges, keys):
            return [("again", {**self._repeats.content(), **labels})]
        return drafts

    def fits_again(self, charges: Sequence[Charge], run: str) -> bool:
        """Return whether the clients that paid these very charges last can pay them again, known without accounting."""
        with self._lock:
            repeats = self._repeats
            if run or not repeats.are(charges):
                return False
            if repeats.sure is None:
                everyone, accounts = repeats.payers, self.accounts
                alone = len(set(everyone)) == len(everyone)
                repeats.sure = min(_sure(charge, accounts) for charge, _ in repeats.charges) if alone else 0
            return repeats.times < repeats.sure

    def _refuse(
        self, client: str, account: ClientAccount, key: ChargeKey, charge: Charge, obstacle: Obstacle
    ) -> NoReturn:
        kind, run = key[0], key[-1]
        steps = account.standing.steps(charge.event, charge.uses, charge.unit, charge.adjacency, charge.person)
        nothing = "nothing was charged" if kind == "charge" else "nothing was reserved"
        remedy = 'use a ledger with schedule = "adaptive" where requests are not planned beforehand'
        match obstacle:
            case "budget":
                epsilon, spent, committed = account.epsilon, account.spent(), account.committed
                taken = account.spent(committed)
                held = f", holds {taken - spent:.4g} in reserve" if account.reserved else ""
                would = account.spent(joined(committed, steps))
                raise BudgetExceeded(
                    f"client {client!r} has spent {spent:.4g} of its ε = {epsilon:g}{held} and has "
                    f"{max(0.0, epsilon - taken):.4g} left; this charge would bring it to {would:.4g}, so {nothing}"
                )
            case "run":
                known = self.runs.get(run)
                unreserved = f"has not reserved this for client {client!r}, or used it up"
                state = "has ended" if known and not known.open else unreserved
                raise BudgetExceeded(
                    f"run {run or account.standing.planned!r} {state}, so {nothing}; reserve its price first"
                )
            case _ if account.terms.plan is None and not account.standing.planned:
                raise BudgetExceeded(
                    f"client {client!r} has a fixed schedule and no plan yet, so {nothing}; reserve the whole run "
                    f"first, or {remedy}"
                )
            case _:
                planned = f"client {client!r} has a fixed schedule, and this is not in its plan"
                raise BudgetExceeded(f"{planned}, so {nothing}; {remedy}")

    def _draft(self, kind: _Kind, charge: Charge, labels: Mapping[str, str], end: int) -> list[Draft]:
        """Return the row of a charge, preceded by a row that names its clients if they are many and new."""
        drafts: list[Draft] = []
        payers: Any = list(charge.clients)
        if len(charge.clients) > _FEW:
            if charge.clients not in self._cohort_rows:
                drafts.append(("cohort", {"clients": payers}))
            payers = self._cohort_rows.get(charge.clients, end + 1)
        content = {"clients": payers, "event": event_to_dict(charge.event), "uses": charge.uses, "unit": charge.unit}
        if charge.person:
            content["person"] = charge.person
        if charge.adjacency is not None:
            content["adjacency"] = charge.adjacency
        drafts.append((kind, {**content, **labels}))
        return drafts

    def replay(self, row: LedgerRow) -> None:
        """Apply one row."""
        content = row.content
        if row.kind not in ("again", "cohort", "charge"):
            self._begin_anew(())
        match row.kind:
            case "opened":
                self.id = content["ledger"]
            case "budget":
                self._open([content["client"]], [content["epsilon"]], content)
            case "budgets":
                self._open(content["clients"], content["epsilons"], content)
            case "budget-changed":
                old = self.accounts[content["client"]]
                terms = replace(old.terms, budget=Budget(content["epsilon"], content["delta"]))
                standing = replace(old.standing, terms=terms, after={}, _kept=[0.0, inf], least=inf, holders=0)
                self._move(content["client"], ClientAccount(terms.budget.epsilon, old.standing), standing)
            case "cohort":
                self._cohorts[row.seq] = tuple(content["clients"])
                self._cohort_rows[self._cohorts[row.seq]] = row.seq
            case "charge" | "reserve" as kind:
                self._replay_charge(kind, row, content)
            case "again":
                self._replay_again(content)
            case "release":
                self._replay_release(content["run"])
            case _:
                raise LedgerError(f"{self.path}: row {row.seq} is of the unknown kind {row.kind!r}")

    def _begin_anew(self, written: tuple[str, ...]) -> None:
        """Have accounts up to date, and look for charges that are repeated from here on."""
        with self._lock:
            self._settle()
            self._repeats = Repeats(written=written)

    def _replay_again(self, content: Mapping[str, Any]) -> None:
        with self._lock:
            repeats = self._repeats
            if content.get("run") or not (repeats.charges and repeats.countable):
                raise ValueError("a reservation cannot be charged by repetition")
            if (content["first"], content["last"]) != (repeats.first, repeats.last):
                raise ValueError(
                    f"the charges before it are not those of the rows {content['first']} to {content['last']}"
                )
            if "purpose" in content:
                self._payers.setdefault(content["purpose"], []).append(repeats.payers)
            repeats.times, repeats.complete = repeats.times + 1, True

    def _replay_charge(self, kind: _Kind, row: LedgerRow, content: Mapping[str, Any]) -> None:
        payers = content["clients"]
        clients = self._cohorts[payers] if isinstance(payers, int) else tuple(payers)
        if clients in self._alike or len(self._alike) < _ALIKE:  # who pays in every round is kept once
            clients = self._alike.setdefault(clients, clients)
        event, compared = _event_of(json.dumps(content["event"], sort_keys=True)), content.get("adjacency")
        charge = Charge(clients, event, content["uses"], content["unit"], compared, content.get("person", ""))
        key = charge_key(kind, charge, content.get("run", ""))
        if "purpose" in content:
            self._payers.setdefault(content["purpose"], []).append(clients)
        if kind == "reserve":
            before = self.runs.get(content["run"], RunReservation(()))
            self.runs[content["run"]] = RunReservation((*before.asked, (clients, key)))
        if kind == "charge":
            written = (row.time, content.get("purpose", ""), content.get("run", ""))
            if self._repeats.written != written or self._repeats.complete:
                self._begin_anew(written)
            self._repeats.add(row.seq, charge, key)
            self._repeats.countable &= not (self.runs and any(self._accounts[client].reserved for client in clients))
        self._apply(charge, key)

    def _apply(self, charge: Charge, key: ChargeKey, times: int = 1) -> None:
        """Charge or reserve what a row says, so many times over."""
        for client in charge.clients:
            account = self._accounts[client]
            obstacle, standing = following(account.standing, key, charge, times)
            if obstacle == "run":
                raise ValueError(f"run {key[-1]!r} has not reserved this for client {client!r}")
            self._move(client, account, standing)

    def _replay_release(self, run: str) -> None:
        self.runs[run] = self.runs[run]._replace(open=False)
        for client in self.runs[run].clients:
            account = self.accounts[client]
            after, key = account.standing.after, ("release", run)
            if key not in after:
                after[key] = "", account.standing.released(run)
            self._move(client, account, after[key][1])

    def _move(self, client: str, account: ClientAccount, standing: Standing) -> None:
        """Give a client another standing; one that nobody has any more forgets what followed it, or all would stay."""
        before = account.standing
        self._accounts[client] = ClientAccount(account.epsilon, standing)
        standing.holders += 1
        before.holders -= 1
        if not before.holders:
            before.after.clear()

    def _open(self, clients: Sequence[str], epsilons: Sequence[float], content: Mapping[str, Any]) -> None:
        """Open accounts of clients whose terms differ in ε alone; refuse to open one again, which would forget."""
        if len({*clients}) < len(clients) or not self._accounts.keys().isdisjoint(clients):
            raise ValueError(f"one of the clients {', '.join(map(repr, clients[:5]))} has a budget already")
        first: Standing | None = None
        for client, epsilon in zip(clients, epsilons, strict=True):
            if first is None or first.terms.order is not None:
                terms = terms_of(content, epsilon)
                first = self._opened.setdefault(terms.but_epsilon, Standing(terms))
            if type(client) is not str or not 0 < epsilon < inf:
                raise ValueError(f"the budget of {client!r} is {epsilon!r}")
            first.least, first.holders = min(first.least, epsilon), first.holders + 1
            self._accounts[client] = ClientAccount(epsilon, first)


def _sure(charge: Charge, accounts: Mapping[str, ClientAccount]) -> int:
    """Return how often clients can pay a charge, as far as is known without accounting."""
    least: dict[Standing, float] = {}
    for account in map(accounts.__getitem__, charge.clients):
        least[account.standing] = min(account.epsilon, least.get(account.standing, inf))
    return min(standing.sure_of(charge, epsilon) for standing, epsilon in least.items())


def charge_key(kind: _Kind, charge: Charge, run: str) -> ChargeKey:
    """Return the key of a charge: equal keys lead an account to the same next state."""
    try:
        event = canonical_json(charge.event)
        return kind, event, charge.uses, charge.unit, charge.person, charge.adjacency, run
    except ValueError:
        raise InputError(f"the event {charge.event!r} has a number that is not finite; it cannot be charged") from None


def following(standing: Standing, key: ChargeKey, charge: Charge, times: int = 1) -> tuple[Obstacle, Standing]:
    """Return what follows a charge or reservation, and what may forbid it: "budget" if that depends on ε."""
    known = key if times == 1 else (*key, times)
    if known not in standing.after:
        kind, run = key[0], key[-1]
        steps = standing.steps(charge.event, charge.uses * times, charge.unit, charge.adjacency, charge.person)
        obstacle = standing.obstacle(steps, run, reserving=kind == "reserve")
        if obstacle == "run":
            return obstacle, standing
        after = standing.charged(steps, run, times) if kind == "charge" else standing.reserving(steps, run)
        standing.after[known] = obstacle, after
    return standing.after[known]


@lru_cache(maxsize=1 << 12)
def _event_of(text: str) -> DpEvent:
    return event_from_dict(json.loads(text))
