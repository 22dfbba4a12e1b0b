"""Rows an attacker writes into a ledger's file."""

import sqlite3
from pathlib import Path
from typing import Any

from polyeps.ledger import hash_chain as chain
from polyeps.ledger.head_file import Head


def forge(path: Path, *contents: dict[str, Any], kind: str = "note") -> None:
    """Append rows with right hashes, as an attacker can who writes to the file but not to its head."""
    with sqlite3.connect(path) as connection:
        for content in contents:
            seq, previous = connection.execute("SELECT seq, hash FROM rows ORDER BY seq DESC").fetchone()
            (row,) = chain._chained([(kind, content)], Head(seq, previous))
            connection.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?)", row)
    connection.close()
