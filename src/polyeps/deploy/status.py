"""Where a silo or a server stands: contracts and what they have used, rounds and who answered; withdrawal of a silo."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from polyeps.deploy.agreement import release_ended, today
from polyeps.deploy.own_figures import FIGURES
from polyeps.deploy.policy import Policy
from polyeps.deploy.serving import JOURNAL
from polyeps.deploy.silo import forget_sums, kept_contracts
from polyeps.errors import InputError
from polyeps.experiment.journal import Journal
from polyeps.ledger import Ledger

_LAST = 10  # events that are shown


def silo_status(policy: Policy) -> dict[str, Any]:
    """Return the accounts of a silo, its contracts and the last events."""
    if not policy.ledger.exists():
        raise InputError(f"there is no ledger at {policy.ledger} yet; start the silo first")
    contracts = []
    with closing(Ledger(policy.ledger)) as ledger:
        charged = Counter(row.content.get("run") for row in ledger.rows() if row.kind == "charge")
        accounts = [_account(ledger, name) for name in ledger.clients]
        for contract in kept_contracts(policy.folder):
            held = ledger.runs.get(contract.run)
            contracts.append(
                {
                    "contract": contract.name,
                    "digest": contract.digest[:16],
                    "algorithm": contract.algorithm.name,
                    "rounds": contract.rounds,
                    "ends": str(contract.ends),
                    "state": "ended" if contract.ends < today() or held is None or not held.open else "open",
                    "charges": charged[contract.run],
                }
            )
    return {
        "silo": policy.name,
        "accounts": accounts,
        "contracts": contracts,
        "events": _lines(policy, "events.jsonl"),
        "figures": _lines(policy, FIGURES),
    }


def withdraw(policy: Policy, wanted: str) -> dict[str, Any]:
    """End a silo's part in a contract, named by its name or the first digits of its digest; what was spent stays spent.

    What the run has reserved and not used is free again, and no further task of it is answered, whether the silo is
    running or not.
    """
    known = kept_contracts(policy.folder)
    found = [one for one in known if one.name == wanted or (len(wanted) >= 8 and one.digest.startswith(wanted))]
    if len(found) != 1:
        names = ", ".join(f"{one.name} ({one.digest[:16]})" for one in found or known) or "none"
        many = f"{len(found)} contracts are called {wanted!r}" if found else f"no contract is called {wanted!r}"
        raise InputError(f"{many}; this silo has accepted: {names}")
    (contract,) = found
    with closing(Ledger(policy.ledger)) as ledger:
        release_ended(contract.run, ledger)
        forget_sums(policy.folder, contract)
        return {"contract": contract.name, "digest": contract.digest, **_account(ledger, policy.name)}


def _account(ledger: Ledger, name: str) -> dict[str, Any]:
    account = ledger.account(name)
    spent, committed = account.spent(), account.spent(account.committed)
    budget = account.terms.budget
    return {
        "account": name,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "spent": spent,
        "reserved": max(0.0, committed - spent),
        "left": max(0.0, budget.epsilon - committed),
    }


def _lines(policy: Policy, name: str) -> list[dict[str, Any]]:
    path = policy.folder / name
    lines = path.read_text(encoding="utf-8").splitlines()[-_LAST:] if path.exists() else []
    return [json.loads(line) for line in lines]


def server_status(folder: Path) -> dict[str, Any]:
    """Return the rounds of a run, with who answered."""
    with closing(Journal(folder / JOURNAL)) as journal:
        about, (job,) = journal.about(), journal.jobs()
        rounds = journal.query("SELECT round, invited, answered, declined, active, seconds FROM rounds ORDER BY round")
        silos = journal.query(
            "SELECT client AS silo, sum(answered) AS answered, sum(1 - answered) AS missed, sum(sent) AS bytes_sent "
            "FROM answers GROUP BY client ORDER BY client"
        )
    return {
        "contract": about["contract"],
        "name": about["name"],
        "status": job["status"],
        "rounds": f"{len(rounds)} of {job['rounds']}",
        "reason": job["facts"].get("reason", ""),
        "silos": silos,
        "history": [{**row, "round": row["round"] + 1} for row in rounds],
    }
