"""Attack ledgers at scale: racing creations, kills, deaths at every system call, flipped bytes.

    python benchmarks/ledger_attacks.py [--creations 60] [--kills 500] [--flips 2000] [--appends 2000]

No ledger may become unusable, no acknowledged charge or reservation may be lost, and all damage must be reported in one
sentence. The test suite does the same with fewer repeats; triggers and forged rows are in
`tests/ledger/test_ledger_attacks.py`.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.crash import TERMS, die_charging, die_creating, flip, kill, race

from polyeps.accounting.events import Gaussian
from polyeps.core import Budget
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in (("creations", 60), ("kills", 500), ("flips", 2000), ("appends", 2000), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=count)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polyeps-") as name:
        folder = Path(name)
        raced = race(folder, wanted.creations, 4, wanted.seed)
        told = kill(folder / "ledger.db", wanted.kills, wanted.seed)
        ledger = Ledger(folder / "ledger.db")
        rows = ledger.rows()
        written = {row.content["purpose"] for row in rows if row.kind == "charge"}
        account = ledger.account("client")
        found = {
            "creations": wanted.creations,
            "bricked": len(raced["bricked"]),
            "more than one winner": sum(count > 1 for count in raced["winners"]),
            "kills": told["killed"],
            "charges acknowledged": len(told["acknowledged"]),
            "of those lost": len(set(told["acknowledged"]) - written),
            "reservations acknowledged": len(told["reserved"]),
            "of those, lost": len(set(told["reserved"]) - ledger.runs.keys()),
            "spent and reserved, of 2": account.spent(account.committed),
            "deaths survived while creating": die_creating(folder),
            "deaths survived while charging": die_charging(folder),
            "flips": wanted.flips,
            "flips refused, all in a sentence": flip(folder, wanted.flips, wanted.seed),
            **timed(folder, wanted.appends),
        }
    print(json.dumps(found, indent=2))


def timed(folder: Path, appends: int) -> dict[str, float]:
    """Return the seconds for many charges, one after the other, and for a ledger of 10 000 clients."""
    began = time.perf_counter()
    Ledger.create(
        folder / "many.db", {str(k): BudgetTerms(Budget(1 + k / 10_000, 1e-5)) for k in range(10_000)}
    ).close()
    created = time.perf_counter()
    ledger = Ledger.create(folder / "timed.db", TERMS)
    for _ in range(appends):
        ledger.charge(Gaussian(1e6))
    return {
        "seconds for 10 000 clients": created - began,
        f"seconds for {appends} charges": time.perf_counter() - created,
    }


if __name__ == "__main__":
    main()
