"""The state of a ledger after its rows: accounts, cohorts, payers and runs; and the rows of a new charge."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any, Literal, NamedTuple, NoReturn

from dp_accounting.dp_event import DpEvent

from polyeps.accounting.events import canonical_json, event_from_dict, event_to_dict
from polyeps.core import Adjacency, Budget, Unit, check_name
from polyeps.errors import BudgetExceeded, InputError, LedgerError, suggest
from polyeps.ledger.account import BudgetTerms, Charge, ClientAccount, Obstacle, Standing, joined
from polyeps.ledger.hash_chain import Draft, LedgerRow

_FEW = 8  # clients written into a charge or with a row for each; larger groups share one
_MANY = 5000  # budgets in one row
_ALIKE = 10_000  # groups of payers to look for again
_Kind = Literal["charge", "reserve"]
# kind, event, uses, unit, person, adjacency, run: all that determines the next state of an account
_Key = tuple[str, str, int, Unit, str, Adjacency | None, str]


class RunReservation(NamedTuple):
    """A run that reserved its price."""

    asked: tuple[tuple[tuple[str, ...], _Key], ...]  # clients and charge, for each charge that was reserved
    open: bool = True

    @property
    def clients(self) -> list[str]:
        return list(dict.fromkeys(client for clients, _ in self.asked for client in clients))


class LedgerState:
    """The state after some rows; `path` is named in errors."""

    def __init__(self, path: object) -> None:
        self.path = path
        self.id = ""
        self.accounts: dict[str, ClientAccount] = {}
        self.runs: dict[str, RunReservation] = {}
        self._payers: dict[str, list[Sequence[str]]] = {}  # by purpose
        self._opened: dict[tuple[Any, ...], Standing] = {}  # by terms: the standing of clients before any charge
        self._cohorts: dict[int, tuple[str, ...]] = {}
        self._alike: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._cohort_rows: dict[tuple[str, ...], int] = {}

    def account(self, client: str) -> ClientAccount:
        if client not in self.accounts:
            raise InputError(
                f"client {client!r} has no budget in {self.path}; {suggest(client, self.accounts, 'set one first')}"
            )
        return self.accounts[client]

    def paid(self, purpose: str) -> set[str]:
        return {client for payers in self._payers.get(purpose, []) for client in payers}

    def unpaid(self, charges: Sequence[Charge], purpose: str) -> list[Charge]:
        """Return charges without the clients that have paid for this purpose."""
        paid = self.paid(purpose)
        left = [replace(c, clients=tuple(client for client in c.clients if client not in paid)) for c in charges]
        return [charge for charge in left if charge.clients]

    def drafts(
        self, kind: _Kind, charges: Sequence[Charge], run: str, labels: Mapping[str, str], end: int
    ) -> list[Draft]:
        """Return the rows for charges or reservations, after row `end`; refuse if one of them does not fit."""
        drafts: list[Draft] = []
        leading: dict[str, Standing] = {}
        for charge in charges:
            if not charge.clients or len(set(charge.clients)) < len(charge.clients):
                raise InputError("a charge needs at least one client, each named once")
            key = charge_key(kind, charge, run)
            for client in charge.clients:
                account = self.account(client)
                standing = leading.get(client, account.standing)
                obstacle, leading[client] = following(standing, key, charge)
                if obstacle and not (obstacle == "budget" and leading[client].within(account.epsilon)):
                    self._refuse(client, ClientAccount(account.epsilon, standing), key, charge, obstacle)
            drafts += self._draft(kind, charge, labels, end + len(drafts))
        return drafts

    def _refuse(self, client: str, account: ClientAccount, key: _Key, charge: Charge, obstacle: Obstacle) -> NoReturn:
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
                self._replay_charge(kind, content)
            case "release":
                self._replay_release(content["run"])
            case _:
                raise LedgerError(f"{self.path}: row {row.seq} is of the unknown kind {row.kind!r}")

    def _replay_charge(self, kind: _Kind, content: Mapping[str, Any]) -> None:
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
        for client in clients:
            account = self.accounts[client]
            obstacle, standing = following(account.standing, key, charge)
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
        self.accounts[client] = ClientAccount(account.epsilon, standing)
        standing.holders += 1
        before.holders -= 1
        if not before.holders:
            before.after.clear()

    def _open(self, clients: Sequence[str], epsilons: Sequence[float], content: Mapping[str, Any]) -> None:
        """Open accounts of clients whose terms differ in ε alone; refuse to open one again, which would forget."""
        if len({*clients}) < len(clients) or not self.accounts.keys().isdisjoint(clients):
            raise ValueError(f"one of the clients {', '.join(map(repr, clients[:5]))} has a budget already")
        first: Standing | None = None
        for client, epsilon in zip(clients, epsilons, strict=True):
            if first is None or first.terms.order is not None:
                terms = _terms(content, epsilon)
                first = self._opened.setdefault(terms.but_epsilon, Standing(terms))
            if type(client) is not str or not 0 < epsilon < inf:
                raise ValueError(f"the budget of {client!r} is {epsilon!r}")
            first.least, first.holders = min(first.least, epsilon), first.holders + 1
            self.accounts[client] = ClientAccount(epsilon, first)


def charge_key(kind: _Kind, charge: Charge, run: str) -> _Key:
    """Return the key of a charge: equal keys lead an account to the same next state."""
    try:
        event = canonical_json(charge.event)
        return kind, event, charge.uses, charge.unit, charge.person, charge.adjacency, run
    except ValueError:
        raise InputError(f"the event {charge.event!r} has a number that is not finite; it cannot be charged") from None


def following(standing: Standing, key: _Key, charge: Charge) -> tuple[Obstacle, Standing]:
    """Return what follows a charge or reservation, and what may forbid it: "budget" if that depends on ε."""
    if key not in standing.after:
        kind, run = key[0], key[-1]
        steps = standing.steps(charge.event, charge.uses, charge.unit, charge.adjacency, charge.person)
        obstacle = standing.obstacle(steps, run, reserving=kind == "reserve")
        if obstacle == "run":
            return obstacle, standing
        after = standing.charged(steps, run) if kind == "charge" else standing.reserving(steps, run)
        standing.after[key] = obstacle, after
    return standing.after[key]


def budget_rows(terms: Mapping[str, BudgetTerms]) -> Iterator[Draft]:
    """Yield the rows that set clients' budgets: one for each client or, of many that differ in ε alone, for thousands.

    The order of a filter follows from ε, so clients with adaptive terms share a row only if they are equal in both.
    """
    check_name("a client's id", *terms)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for client, agreed in terms.items():
        if not client.strip():
            raise InputError("a client needs a name")
        # Plans are compared as objects, which is quick: clients of one price share theirs.
        alike.setdefault((*agreed.but_epsilon[:-2], id(agreed.plan), agreed.person), []).append(client)
    for clients in alike.values():
        shared = _content(terms[clients[0]])
        for first in range(0, len(clients), _MANY):
            some = clients[first : first + _MANY]
            if len(some) <= _FEW:
                for client in some:
                    yield "budget", {"client": client, "epsilon": terms[client].budget.epsilon, **shared}
            else:
                epsilons = [terms[client].budget.epsilon for client in some]
                yield "budgets", {"clients": some, "epsilons": epsilons, **shared}


def _content(terms: BudgetTerms) -> dict[str, Any]:
    """Return the terms of a budget, except its ε, as a row has them."""
    content: dict[str, Any] = {
        "delta": terms.budget.delta,
        "unit": terms.unit,
        "adjacency": terms.adjacency,
        "schedule": terms.schedule,
        "order": terms.order,
    }
    if terms.person:
        content["person"] = terms.person
    if terms.schedule == "fixed":
        content["plan"] = None if terms.plan is None else event_to_dict(terms.plan)
    return content


@lru_cache(maxsize=1 << 12)
def _event_of(text: str) -> DpEvent:
    return event_from_dict(json.loads(text))


def _terms(content: Mapping[str, Any], epsilon: float) -> BudgetTerms:
    plan, schedule = content.get("plan"), content["schedule"]
    if "plan" not in content:  # fixed ledgers of version 0.1 accepted any event, which only a filter allows
        schedule = "adaptive"
    return BudgetTerms(
        Budget(epsilon, content["delta"]),
        content["unit"],
        content["adjacency"],
        schedule,
        content["order"],
        None if plan is None else event_from_dict(plan),
        content.get("person", ""),
    )


def plain_text(text: str, missing: str) -> str:
    """Return text for the record; refuse empty text, and text that cannot be written as UTF-8."""
    if not text.strip():
        raise InputError(missing)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{text!r} cannot be written as UTF-8; use another name") from None
    return text
