"""What a silo keeps beside its ledger, found by its policy: the contracts it accepted, and its log."""

from __future__ import annotations

from pathlib import Path

from polyeps.deploy.contract import SignedContract
from polyeps.deploy.policy import read_policy
from polyeps.errors import InputError
from polyeps.report.ledger_page import SiloRecords


def silo_records(policy_file: Path) -> tuple[Path, SiloRecords]:
    """Return the ledger of a silo, and what it keeps beside it; contracts that cannot be read are left out."""
    policy = read_policy(policy_file)
    signers = {rule.key: name for name, rule in policy.signers.items()}
    found: dict[str, dict[str, str]] = {}
    for path in sorted((policy.folder / "contracts").glob("[0-9a-f]*")):
        try:
            contract = SignedContract.decode(path.read_bytes()).contract
        except (InputError, OSError):
            continue
        found[contract.run] = {
            "contract": contract.name,
            "signer": signers.get(contract.signer, f"{contract.signer[:16]}…, no longer in the policy"),
            "algorithm": contract.algorithm.name,
            "rounds": str(contract.rounds),
            "ends": str(contract.ends),
        }
    return policy.ledger, SiloRecords(policy.name, found, policy.folder / "events.jsonl")
