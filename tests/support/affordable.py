"""How much a ledger's client can still pay."""

from dp_accounting.dp_event import DpEvent

from polyeps.accounting import affordability
from polyeps.ledger import Ledger


def affordable(ledger: Ledger, event: DpEvent, uses: int = 1, run: str = "") -> int:
    """How many such charges client a can still pay."""
    account = ledger.account("a")

    def within(times: int) -> bool:
        return times == 0 or not account.obstacle(account.standing.steps(event, uses * times, "record"), run)

    return affordability.affordable(within, 1 << 20)
