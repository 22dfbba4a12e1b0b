"""Checks of a silo's or a server's set-up: what is wrong, in one sentence each; nothing is changed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from cryptography import x509

from polyeps.data.own_files import load_client
from polyeps.data.schema_files import read_schema
from polyeps.deploy import flower_runtime as flower
from polyeps.deploy.agreement import check_terms, today
from polyeps.deploy.contract import read_signed
from polyeps.deploy.contract_job import check_contract_model
from polyeps.deploy.keys import public_of, read_key, read_secret
from polyeps.deploy.policy import Policy, read_policy
from polyeps.errors import InputError, LedgerError, PolyepsError
from polyeps.ledger import Ledger

_SOON = timedelta(days=30)  # before a certificate expires


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it is right, and a sentence."""

    check: str
    right: bool
    said: str


def _finding(check: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(check, True, look())
    except PolyepsError as problem:
        return Finding(check, False, str(problem))


def check_silo(path: Path, contract: Path | None = None) -> Iterator[Finding]:
    """Check the set-up of a silo and, where one is given, what its policy says about a contract."""
    yield _finding("flower", _flower)
    try:
        policy = read_policy(path)
    except InputError as problem:
        yield Finding("policy", False, str(problem))
        return
    yield Finding("policy", True, f"{policy.name!r} allows {', '.join(policy.algorithms)}")
    yield _finding("key", lambda: f"the silo's key is {public_of(read_key(policy.key))}")
    yield _finding("signers", lambda: _signers(policy))
    yield _finding("records", lambda: _records(policy))
    yield _finding("ledger", lambda: _ledger(policy))
    yield _finding("supernode", lambda: _supernode(policy))
    if contract is not None:
        yield _finding("contract", lambda: _agreeable(policy, contract))


def check_server(kit: Path, superlink: str, contract: Path | None = None) -> Iterator[Finding]:
    """Check the set-up of a server and, where one is given, a contract."""
    yield _finding("flower", _flower)
    yield _finding("certificates", lambda: _certificates(kit))
    yield _finding("superlink", lambda: _superlink(kit, superlink))
    if contract is not None:
        yield _finding("contract", lambda: _servable(contract))


def _flower() -> str:
    flower.check_flower()
    return f"flwr {flower.FLOWER} is installed"


def _signers(policy: Policy) -> str:
    for name, rule in policy.signers.items():
        if rule.key == "0" * 64:
            raise InputError(f"signers.{name}.key is that of the template; ask the contracts' signer for its own")
    return f"contracts are accepted from {', '.join(policy.signers)}"


def _records(policy: Policy) -> str:
    schema = read_schema(policy.data.schema_file)
    dataset = load_client(policy.data.file, schema, policy.name)
    unit = "each by itself" if schema.unit is None else f"protected by {dataset.person}"
    return f"{policy.data.file.name} holds {len(dataset.labels)} records, {unit}"


def _ledger(policy: Policy) -> str:
    if not policy.ledger.exists():
        return f"{policy.ledger.name} will be made with ε = {policy.budget.epsilon:g} in all"
    ledger = Ledger(policy.ledger)
    with closing(ledger):
        ledger.verify()
        account = ledger.account(policy.name)
        if account.terms.budget.epsilon != policy.budget.epsilon:
            held = account.terms.budget.epsilon
            raise LedgerError(f"{policy.ledger} holds ε = {held:g}, and the policy says {policy.budget.epsilon:g}")
        left = max(0.0, account.terms.budget.epsilon - account.spent(account.committed))
        return f"{policy.ledger.name} is as it was written, with ε = {left:.4g} left"


def _supernode(policy: Policy) -> str:
    settings = policy.supernode
    endpoint = flower.Endpoint(settings.address, read_secret(settings.secret), settings.root_certificates)
    _reach(endpoint, "SuperNode", "start it with --isolation process and this --port")
    return f"the SuperNode at {settings.address} takes our secret"


def _reach(endpoint: flower.Endpoint, what: str, remedy: str) -> None:
    """Ask for a task of no kind: the secret is checked, and no task is taken."""
    try:
        with closing(endpoint.runtime()) as client:
            flower.check_secret(client)
    except httpx.HTTPStatusError as problem:
        status = problem.response.status_code
        raise InputError(f"the {what} at {endpoint.address} answers {status}: give it the same secret file") from None
    except httpx.HTTPError as problem:
        reason = type(problem).__name__
        raise InputError(f"the {what} at {endpoint.address} cannot be reached ({reason}); {remedy}") from None


def _certificates(kit: Path) -> str:
    for name in ("ca.crt", "server.crt"):
        try:
            found = x509.load_pem_x509_certificate((kit / name).read_bytes())
        except OSError as problem:
            raise InputError(f"{kit / name} cannot be read: {problem.strerror}; make it with polyeps deploy") from None
        except ValueError:
            raise InputError(f"{kit / name} is not a certificate; make it with polyeps deploy") from None
        if found.not_valid_after_utc < datetime.now(UTC) + _SOON:
            raise InputError(f"{kit / name} expires on {found.not_valid_after_utc:%Y-%m-%d}; make a new one")
    return f"ca.crt and server.crt are valid until {found.not_valid_after_utc:%Y-%m-%d} or longer"


def _superlink(kit: Path, address: str) -> str:
    endpoint = flower.Endpoint(address, read_secret(kit / "superlink.secret"), kit / "ca.crt")
    try:
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError):
        raise InputError(f"nothing listens on {address}; start the SuperLink there") from None
    _reach(endpoint, "SuperLink", "check that server.crt is for this address and signed by ca.crt")
    return f"the SuperLink at {address} shows a certificate of ca.crt and takes our secret"


def _agreeable(policy: Policy, path: Path) -> str:
    signed = read_signed(path)
    check_terms(signed.contract, policy)
    check_contract_model(signed.contract, policy.limits.parameters)
    if signed.contract.silos[policy.name] != (own := public_of(read_key(policy.key))):
        raise InputError(f"the contract enrols {policy.name!r} with another key than this silo's, which is {own}")
    return f"the policy allows {signed.contract.name!r}; its price is checked when the silo enrols"


def _servable(path: Path) -> str:
    contract = read_signed(path).contract
    if contract.ends < today():
        raise InputError(f"the contract ended on {contract.ends}; sign a new one")
    return f"{contract.name!r} is signed, with {len(contract.silos)} silos, until {contract.ends}"
