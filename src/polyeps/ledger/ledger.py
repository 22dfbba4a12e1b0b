"""The privacy ledger: a budget is set once; charges are on disk before data is read, and refused beyond the budget.

One file per client, or per silo or simulation with many clients. The file is a hash chain (`hash_chain`) and outlives
runs: what was spent stays spent. All charges of a client compose, whatever algorithms it took part in.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from dp_accounting.dp_event import DpEvent

from polyeps.core import Budget, Unit, check_name
from polyeps.errors import InputError, LedgerError
from polyeps.ledger.account import BudgetTerms, Charge, ClientAccount
from polyeps.ledger.budget_rows import budget_rows, plain_text
from polyeps.ledger.hash_chain import Chain, Draft, LedgerRow
from polyeps.ledger.head_file import Head, StoredHead, read_stored_head
from polyeps.ledger.state import LedgerState, RunReservation, charge_key, following


class Ledger:
    """The open ledger at `path`.

    >>> from tempfile import mkdtemp
    >>> from polyeps.accounting.events import Gaussian
    >>> ledger = Ledger.create(Path(mkdtemp()) / "ledger.db", {"hospital": BudgetTerms(Budget(1.0, 1e-5))})
    >>> ledger.charge(Gaussian(9.0))
    >>> ledger.charge(Gaussian(3.0))
    Traceback (most recent call last):
    polyeps.errors.BudgetExceeded: client 'hospital' has spent ... of its ε = 1 and has ... left; ...
    """

    def __init__(self, path: Path | str) -> None:
        self._state = LedgerState(path)
        self._chain = Chain(Path(path), self._state.replay)

    @classmethod
    def create(cls, path: Path | str, terms: Mapping[str, BudgetTerms] | None = None) -> "Ledger":
        """Create a ledger, with its first budgets if given; refuse an existing file."""
        drafts: list[Draft] = [("opened", {"ledger": uuid4().hex}), *budget_rows(terms or {})]
        Chain.create(Path(path), drafts)
        return cls(path)

    @classmethod
    def open_or_create(cls, path: Path | str, terms: Mapping[str, BudgetTerms]) -> "Ledger":
        """Open the ledger at `path`, whatever its budgets, or create it with these if there is none."""
        if not Path(path).exists():
            try:
                return cls.create(path, terms)
            except LedgerError:
                if not Path(path).exists():  # otherwise another process was first
                    raise
        return cls(path)

    @property
    def id(self) -> str:
        return self._state.id

    @property
    def clients(self) -> list[str]:
        return list(self._state.accounts)

    @property
    def runs(self) -> Mapping[str, RunReservation]:
        """Return the runs that reserved their price, by name."""
        return self._state.runs

    @property
    def head(self) -> Head:
        """Return the sequence number and hash of the last row."""
        return self._chain.head

    def account(self, client: str) -> ClientAccount:
        """Return a client's terms and history."""
        return self._state.account(client)

    def spent(self, client: str) -> float:
        """Return the ε a client has spent in all its runs."""
        return self.account(client).spent()

    def enroll(self, terms: Mapping[str, BudgetTerms]) -> None:
        """Set the budgets of new clients; refuse a client that has one."""

        def make() -> list[Draft]:
            for client in terms:
                if client in self._state.accounts:
                    held = self._state.accounts[client].terms.budget
                    raise LedgerError(
                        f"client {client!r} has a budget of ε = {held.epsilon:g}, δ = {held.delta:g} already; "
                        "its owner can change it with a reason (change_budget)"
                    )
            return list(budget_rows(terms))

        self._chain.append(make)

    def change_budget(self, client: str, budget: Budget, reason: str) -> None:
        """Change a client's budget, with a reason on record: an explicit act of the owner."""
        reason = plain_text(reason, f"changing the budget of client {client!r} needs a reason for the record")

        def make() -> list[Draft]:
            old = self.account(client).terms.budget
            if budget.delta > 0 and not old.delta:
                raise InputError(
                    f"client {client!r} has a budget with δ = 0, under which costs are added; δ = {budget.delta:g} "
                    "needs another rule, fixed beforehand: create another ledger"
                )
            content = {"client": client, "epsilon": budget.epsilon, "delta": budget.delta, "reason": reason}
            return [("budget-changed", content)]

        self._chain.append(make)

    def charge(
        self,
        event: DpEvent,
        *,
        uses: int = 1,
        clients: Sequence[str] | None = None,
        unit: Unit = "record",
        person: str = "",
        purpose: str = "",
        run: str = "",
    ) -> None:
        """Charge one event to some clients (by default the only one): on disk when this returns, or not at all."""
        if clients is None and len(self._state.accounts) != 1:
            raise InputError(f"{self._chain.path} holds {len(self._state.accounts)} clients; name those to charge")
        payers = tuple(self._state.accounts) if clients is None else tuple(clients)
        self.charge_all([Charge(payers, event, uses, unit, person=person)], purpose=purpose, run=run)

    def charge_all(self, charges: Iterable[Charge], *, purpose: str = "", once: bool = False, run: str = "") -> None:
        """Charge several events, each to its own clients, all or none; with a run, from its reservation.

        With `once`, clients that have paid for this purpose are not charged again: for work that is repeated with the
        same random numbers, and so releases nothing new.
        """
        asked = list(charges)
        purpose = plain_text(purpose, "") if purpose else ""

        def make() -> list[Draft]:
            labels = {name: value for name, value in (("purpose", purpose), ("run", run)) if value}
            due = self._state.unpaid(asked, purpose) if once else asked
            return self._state.drafts("charge", due, run, labels, self.head.seq)

        self._chain.append(make)

    def reserve(self, run: str, charges: Iterable[Charge]) -> None:
        """Reserve the whole price of a run, all or nothing, before it begins.

        A reservation counts against every other charge until it is charged with `run=`, or released. Repeating the same
        reservation changes nothing, so it may be repeated after a crash.
        """
        check_name("the name of a run", run)
        run = plain_text(run, "a reservation needs the name of a run")
        asked = list(charges)
        if not asked:
            raise InputError(f"run {run!r} reserves nothing; pass at least one charge")

        def make() -> list[Draft]:
            if run in self.runs:
                if self.runs[run] == RunReservation(
                    tuple((charge.clients, charge_key("reserve", charge, run)) for charge in asked)
                ):
                    return []
                state = "has reserved its price" if self.runs[run].open else "has ended"
                raise InputError(f"run {run!r} {state} already; give every run a name of its own")
            return self._state.drafts("reserve", asked, run, {"run": run}, self.head.seq)

        self._chain.append(make)

    def release(self, run: str) -> None:
        """Release the unused reservation of a run, which then cannot be charged any more; charges stay."""

        def make() -> list[Draft]:
            if run not in self.runs:
                raise InputError(f"run {run!r} has reserved nothing in {self._chain.path}; check its name")
            return [("release", {"run": run})] if self.runs[run].open else []

        self._chain.append(make)

    def paid(self, purpose: str) -> set[str]:
        """Return the clients that were charged for a purpose."""
        return self._state.paid(purpose)

    def can_afford(self, charge: Charge, *, run: str = "") -> list[bool]:
        """Return, for each of a charge's clients, whether it can pay now (with a run: from its reservation)."""
        key = charge_key("charge", charge, run)
        answers, before, accounts = [], None, self._state.accounts
        for client in charge.clients:
            account = accounts.get(client) or self.account(client)
            if account.standing is not before:
                before = account.standing
                obstacle, after = following(before, key, charge)
            answers.append(not obstacle or (obstacle == "budget" and after.within(account.epsilon)))
        return answers

    def surely_affords(self, charges: Sequence[Charge], *, run: str = "") -> bool:
        """Return whether the clients that paid these very charges last can pay them again; False also if not known."""
        return self._state.fits_again(charges, run)

    def refresh(self) -> None:
        """Read what other processes wrote."""
        self._chain.refresh()

    def verify(self, head: Head | StoredHead | Path | str | None = None) -> Head:
        """Check every row and the head; raise LedgerTampered, naming the first that was changed.

        With a head that was stored elsewhere (or the path of its file), check also that the ledger still holds the row
        that it names, and so everything before.
        """
        if isinstance(head, Path | str):
            head = read_stored_head(Path(head))
        return self._chain.verify(StoredHead(head) if isinstance(head, Head) else head)

    @staticmethod
    def verify_file(path: Path | str, head: Path | None = None) -> Head:
        """Check the ledger at `path` as `verify` does, in one pass, without opening its accounts."""
        chain = Chain(Path(path))
        try:
            return chain.verify(None if head is None else read_stored_head(head))
        finally:
            chain.close()

    def rows(self) -> list[LedgerRow]:
        """Return all rows, verified."""
        return self._chain.rows()

    def close(self) -> None:
        self._chain.close()
