"""The last charges of a ledger. Paid again by the same clients, they take one row, and accounts only count them.

A federation in which everybody takes part charges the same prices round after round. What each account holds then
follows from how often, and is worked out when somebody looks at an account.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_

from polyeps.core import Adjacency, Unit
from polyeps.ledger.account import Charge

# kind, event, uses, unit, person, adjacency, run: all that determines the next state of an account
ChargeKey = tuple[str, str, int, Unit, str, Adjacency | None, str]


@dataclass
class Repeats:
    """Charges that were written together, and how often the same clients have paid them again."""

    first: int = 0  # rows
    last: int = 0
    written: tuple[str, ...] = ()  # when, for which purpose and run
    charges: list[tuple[Charge, ChargeKey]] = field(default_factory=list)
    countable: bool = True  # whether no reservation pays for them
    complete: bool = False  # whether they were paid again: what is charged from then on does not belong to them
    times: int = 0  # how often they were paid since accounts were brought up to date
    sure: int | None = None  # how often they can be paid from then on, as far as is known without accounting
    _asked: tuple[Charge, ...] = ()  # as somebody asked for them

    @property
    def payers(self) -> tuple[str, ...]:
        return tuple(client for charge, _ in self.charges for client in charge.clients)

    def content(self) -> dict[str, int]:
        """Return what a row says that repeats these charges."""
        return {"first": self.first, "last": self.last}

    def add(self, row: int, charge: Charge, key: ChargeKey) -> None:
        self.first, self.last = self.first or row, row
        self.charges.append((charge, key))

    def are(self, asked: Sequence[Charge], keys: Sequence[ChargeKey] | None = None) -> bool:
        """Return whether these are the very charges asked for; with their keys, also whether they say the same."""
        if len(asked) != len(self.charges) or len(asked) < 2 or not self.countable:
            return False
        if len(self._asked) == len(asked) and all(map(is_, asked, self._asked)):
            return True
        if keys is None:
            return False
        pairs = zip(self.charges, asked, keys, strict=True)
        if not all(held == key and mine.clients == one.clients for (mine, held), one, key in pairs):
            return False
        try:
            hash(tuple(charge.event for charge in asked))
        except TypeError:  # a composition holds a list, which may change
            return True
        self._asked = tuple(asked)
        return True
