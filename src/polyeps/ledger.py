"""The client's purse: a budget set once, each charge on disk before data is touched, refused when it does not fit.

One file per client, or per silo or simulation with many clients. The file is a hash chain (`chain.py`) and outlives
runs: what was spent stays spent. All that a client did composes, whatever methods it took part in.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from dp_accounting.dp_event import DpEvent

from polyeps.accounting import afford
from polyeps.accounting.events import canonical, describe, understand
from polyeps.accounts import Account, Charge, Terms
from polyeps.chain import Chain, Clock, Draft, Row, now
from polyeps.core import Budget, Unit, check_name
from polyeps.errors import BudgetExceeded, InputError, LedgerError
from polyeps.head import Head

_FEW = 8  # clients written into a charge itself; larger groups are written once and referred to


class Ledger:
    """The open ledger at `path`.

    >>> from tempfile import mkdtemp
    >>> from polyeps.accounting.events import Gaussian
    >>> ledger = Ledger.create(Path(mkdtemp()) / "ledger.db", {"hospital": Terms(Budget(1.0, 1e-5))})
    >>> ledger.charge(Gaussian(5.0))
    >>> ledger.charge(Gaussian(5.0))
    Traceback (most recent call last):
    polyeps.errors.BudgetExceeded: client 'hospital' has spent 0.7255 of its ε = 1 and has 0.2745 left; ...
    """

    def __init__(self, path: Path | str, *, clock: Clock = now) -> None:
        self._accounts: dict[str, Account] = {}
        self._shared: dict[Terms, Account] = {}
        self._cohorts: dict[int, tuple[str, ...]] = {}
        self._cohort_rows: dict[tuple[str, ...], int] = {}
        self._payers: dict[str, list[Sequence[str]]] = {}  # by purpose
        self.id = ""
        self._chain = Chain(Path(path), self._replay, clock=clock)

    @classmethod
    def create(cls, path: Path | str, terms: Mapping[str, Terms] | None = None, *, clock: Clock = now) -> "Ledger":
        """Start a ledger, with its first budgets if given."""
        drafts: list[Draft] = [("opened", {"ledger": uuid4().hex})]
        drafts += [_enrolment(client, agreed) for client, agreed in (terms or {}).items()]
        Chain.create(Path(path), drafts, clock=clock)
        return cls(path, clock=clock)

    @property
    def clients(self) -> list[str]:
        return list(self._accounts)

    @property
    def head(self) -> Head:
        """Sequence number and hash of the last row, for a journal to remember."""
        return self._chain.head

    def account(self, client: str) -> Account:
        """A client's terms and history."""
        if client not in self._accounts:
            raise InputError(f"client {client!r} has no budget in {self._chain.path}; set one first")
        return self._accounts[client]

    def spent(self, client: str) -> float:
        """The ε a client has spent in all its runs."""
        return self.account(client).spent()

    def enroll(self, terms: Mapping[str, Terms]) -> None:
        """Set the budgets of new clients; a budget that is already set is not touched."""

        def make() -> list[Draft]:
            for client in terms:
                if client in self._accounts:
                    held = self._accounts[client].terms.budget
                    raise LedgerError(
                        f"client {client!r} has a budget of ε = {held.epsilon:g}, δ = {held.delta:g} already; "
                        "changing it is a separate, logged act of its owner"
                    )
            return [_enrolment(client, agreed) for client, agreed in terms.items()]

        self._chain.append(make)

    def change_budget(self, client: str, budget: Budget, reason: str) -> None:
        """The owner's explicit act: another budget from now on, with the reason on record."""
        if not reason.strip():
            raise InputError(f"changing the budget of client {client!r} needs a reason for the record")

        def make() -> list[Draft]:
            self.account(client)
            content = {
                "client": client,
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "reason": reason.strip(),
            }
            return [("budget-changed", content)]

        self._chain.append(make)

    def charge(
        self,
        event: DpEvent,
        *,
        uses: int = 1,
        clients: Sequence[str] | None = None,
        unit: Unit = "record",
        purpose: str = "",
    ) -> None:
        """Charge one event to some clients (by default the only one): on disk when this returns, or not at all."""
        if clients is None and len(self._accounts) != 1:
            raise InputError(f"{self._chain.path} holds {len(self._accounts)} clients; name those to charge")
        payers = tuple(self._accounts) if clients is None else tuple(clients)
        self.charge_all([Charge(payers, event, uses, unit)], purpose=purpose)

    def charge_all(self, charges: Iterable[Charge], *, purpose: str = "", once: bool = False) -> None:
        """Charge several events, each to its own clients, all or none.

        With `once`, who has paid for this very purpose already is not charged again: for work that is repeated
        with the same random numbers, and so releases nothing new.
        """
        asked = list(charges)

        def make() -> list[Draft]:
            drafts: list[Draft] = []
            leading: dict[str, Account] = {}
            for charge in self._unpaid(asked, purpose) if once else asked:
                if charge.uses < 1 or not charge.clients or len(set(charge.clients)) < len(charge.clients):
                    raise InputError("a charge needs at least one use and at least one client, each named once")
                key = (canonical(charge.event), charge.uses, charge.unit)
                for client in charge.clients:
                    account = leading.get(client) or self.account(client)
                    leading[client] = account.after.get(key) or self._pay(client, account, charge, key)
                drafts += self._drafts(charge, purpose, len(drafts))
            return drafts

        self._chain.append(make)

    def paid(self, purpose: str) -> set[str]:
        """Who was charged for a purpose."""
        return {client for payers in self._payers.get(purpose, []) for client in payers}

    def can_afford(self, charge: Charge) -> list[bool]:
        """For each of a charge's clients, whether it could pay now."""
        key = (canonical(charge.event), charge.uses, charge.unit)
        answers: dict[Account, bool] = {}
        for account in {self.account(client) for client in charge.clients}:
            answers[account] = key in account.after or account.affords(
                account.with_charge(charge.event, charge.uses, charge.unit)
            )
        return [answers[self.account(client)] for client in charge.clients]

    def affordable(self, client: str, event: DpEvent, uses: int = 1, unit: Unit = "record", most: int = 1 << 20) -> int:
        """How many such charges a client could still pay, up to `most`."""
        account = self.account(client)
        return afford.affordable(
            lambda times: times == 0 or account.affords(account.with_charge(event, uses * times, unit)), most
        )

    def refresh(self) -> None:
        """Take notice of what other processes wrote."""
        self._chain.refresh()

    def verify(self) -> Head:
        """Check every row and the head; raise LedgerTampered naming the first that is not as written."""
        return self._chain.verify()

    def rows(self) -> list[Row]:
        """The whole record, verified."""
        return self._chain.rows()

    def close(self) -> None:
        self._chain.close()

    def _pay(self, client: str, account: Account, charge: Charge, key: tuple[str, int, Unit]) -> Account:
        history = account.with_charge(charge.event, charge.uses, charge.unit)
        if not account.affords(history):
            epsilon, spent = account.terms.budget.epsilon, account.spent()
            raise BudgetExceeded(
                f"client {client!r} has spent {spent:.4g} of its ε = {epsilon:g} and has "
                f"{max(0.0, epsilon - spent):.4g} left; this charge would bring it to "
                f"{account.spent(history):.4g}, so nothing was charged"
            )
        account.after[key] = Account(account.terms, history, account.charges + 1)
        return account.after[key]

    def _unpaid(self, charges: list[Charge], purpose: str) -> list[Charge]:
        paid = self.paid(purpose)
        left = [replace(c, clients=tuple(client for client in c.clients if client not in paid)) for c in charges]
        return [charge for charge in left if charge.clients]

    def _drafts(self, charge: Charge, purpose: str, pending: int) -> list[Draft]:
        """A charge row, after a row that names its clients when they are many and new."""
        drafts: list[Draft] = []
        payers: Any = list(charge.clients)
        if len(charge.clients) > _FEW:
            if charge.clients not in self._cohort_rows:
                drafts.append(("cohort", {"clients": payers}))
            payers = self._cohort_rows.get(charge.clients, self._chain.head.seq + pending + 1)
        content = {
            "clients": payers,
            "event": describe(charge.event),
            "uses": charge.uses,
            "unit": charge.unit,
        }
        drafts.append(("charge", content | ({"purpose": purpose} if purpose else {})))
        return drafts

    def _replay(self, row: Row) -> None:
        content = row.content
        match row.kind:
            case "opened":
                self.id = content["ledger"]
            case "budget":
                terms = Terms(
                    Budget(content["epsilon"], content["delta"]),
                    content["unit"],
                    content["adjacency"],
                    content["schedule"],
                    content["order"],
                )
                self._accounts[content["client"]] = self._shared.setdefault(terms, Account(terms))
            case "budget-changed":
                old = self._accounts[content["client"]]
                budget = Budget(content["epsilon"], content["delta"])
                terms = replace(old.terms, budget=budget)
                self._accounts[content["client"]] = Account(terms, old.history, old.charges)
            case "cohort":
                self._cohorts[row.seq] = tuple(content["clients"])
                self._cohort_rows[self._cohorts[row.seq]] = row.seq
            case "charge":
                self._replay_charge(content)
            case _:
                raise LedgerError(f"{self._chain.path}: row {row.seq} is of the unknown kind {row.kind!r}")

    def _replay_charge(self, content: Mapping[str, Any]) -> None:
        payers = content["clients"]
        event, uses, unit = understand(content["event"]), content["uses"], content["unit"]
        key = (canonical(event), uses, unit)
        clients = self._cohorts[payers] if isinstance(payers, int) else payers
        if "purpose" in content:
            self._payers.setdefault(content["purpose"], []).append(clients)
        for client in clients:
            account = self._accounts[client]
            if key not in account.after:
                history = account.with_charge(event, uses, unit)
                account.after[key] = Account(account.terms, history, account.charges + 1)
            self._accounts[client] = account.after[key]


def _enrolment(client: str, terms: Terms) -> Draft:
    if not client.strip():
        raise InputError("a client needs a name")
    check_name("a client's id", client)
    return "budget", {
        "client": client,
        "epsilon": terms.budget.epsilon,
        "delta": terms.budget.delta,
        "unit": terms.unit,
        "adjacency": terms.adjacency,
        "schedule": terms.schedule,
        "order": terms.order,
    }
