"""Every error polyeps raises on purpose::

    PolyepsError
    ├── InputError          something the caller gave is wrong; nothing was changed
    │   ├── DataError       a data file or data set is missing, damaged or malformed
    │   └── TaskRefused     a client refuses what a server asks; nothing was charged
    ├── UnknownEvent        an accountant has no rule for an event
    ├── BudgetExceeded      a charge would pass a client's budget; nothing was charged
    ├── JournalError        a run's journal cannot be read or written
    ├── ShardLost           the worker of a shard ended again and again
    ├── SecureSumError      a secure sum stopped; no client's values were revealed
    │   ├── MessageRefused  a message of a secure sum is damaged, forged, late or not allowed
    │   └── SumAborted      too few clients are left, or their messages are inconsistent
    └── LedgerError         a ledger cannot be used
        └── LedgerTampered  a ledger, or its head, was changed

Each message is one sentence that names the client, field or file and the remedy.
"""

import difflib
from collections.abc import Iterable


class PolyepsError(Exception):
    """The root of all errors raised on purpose."""


class InputError(PolyepsError, ValueError):
    """Something the caller gave is wrong; nothing was changed."""


class DataError(InputError):
    """A data file or data set is missing, damaged or malformed."""


class TaskRefused(InputError):  # noqa: N818
    """A client refuses what a server asks; nothing was charged."""


class UnknownEvent(PolyepsError):  # noqa: N818 - a refusal, not a malfunction
    """An accountant has no rule for an event."""


class BudgetExceeded(PolyepsError):  # noqa: N818
    """A charge would pass a client's budget; nothing was charged."""


class JournalError(PolyepsError):
    """A run's journal cannot be read or written."""


class ShardLost(PolyepsError):  # noqa: N818
    """The worker of a shard ended again and again; the run can be resumed."""


class SecureSumError(PolyepsError):
    """A secure sum stopped; no client's values were revealed."""


class MessageRefused(SecureSumError):  # noqa: N818
    """A message of a secure sum is damaged, forged, late or not allowed."""


class SumAborted(SecureSumError):  # noqa: N818
    """Too few clients are left in a secure sum, or their messages are inconsistent."""


class LedgerError(PolyepsError):
    """A ledger cannot be used."""


class LedgerTampered(LedgerError):  # noqa: N818
    """A ledger, or its head, was changed."""


def escaped(text: str) -> str:
    """Return a text of others in which nothing ends a line or steers a terminal.

    >>> print(escaped("one\\nline\\x1b[2J"))
    one\\nline\\x1b[2J
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def suggest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return the end of a refusal of an unknown name: the one that may be meant, or else those there are.

    >>> suggest("weiagv", ["fedavg", "weiavg"]), suggest("sgd", ["fedavg", "weiavg"])
    ("did you mean 'weiavg'?", 'choose one of fedavg, weiavg')
    """
    names = list(known)
    plain = {one.lower().replace("_", "-"): one for one in reversed(names)}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), plain, n=1, cutoff=0.65)
    if near:
        return f"did you mean {plain[near[0]]!r}?"
    return otherwise or (f"choose one of {', '.join(names)}" if names else "there is none")
