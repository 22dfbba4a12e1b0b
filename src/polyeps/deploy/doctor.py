"""Checks of a silo's or a server's set-up: what is wrong, in one sentence each with the remedy; nothing is changed."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx

from polyeps.data.own_files import load_client
from polyeps.data.schema_files import read_schema
from polyeps.deploy import flower_runtime as flower
from polyeps.deploy.agreement import accept_contract, open_ledger, today
from polyeps.deploy.certificate_checks import check_pair, check_private, look_at_superlink, read_certificate
from polyeps.deploy.contract import read_signed
from polyeps.deploy.guarded_superlink import check_guarded
from polyeps.deploy.keys import public_of, read_key, read_secret
from polyeps.deploy.policy import Policy, read_policy
from polyeps.errors import InputError, LedgerError, PolyepsError
from polyeps.ledger import Ledger
from polyeps.ledger.head_file import head_path

_ROOM = 64 << 20  # bytes that should be free on a disk that a ledger or a run is written to


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
    except OSError as problem:
        return Finding(check, False, f"{problem.filename or check} cannot be used: {problem.strerror}")


def check_silo(
    path: Path, contract: Path | None = None, superlink: str | None = None, authority: Path | None = None
) -> Iterator[Finding]:
    """Check a silo's set-up; with a contract, whether it would be accepted; with a SuperLink, the way to it."""
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
    yield _finding("folder", lambda: _writable(policy.folder))
    yield _finding("ledger", lambda: _ledger(policy))
    yield _finding("clock", lambda: _clock(policy))
    yield _finding("supernode", lambda: _supernode(policy))
    if contract is not None:
        yield _finding("contract", lambda: _agreeable(policy, contract))
    if superlink is not None:
        place = authority or path.parent / "ca.crt"
        yield _finding("superlink", lambda: look_at_superlink(superlink, place))


def check_server(
    kit: Path, superlink: str, contract: Path | None = None, test: Path | None = None
) -> Iterator[Finding]:
    """Check a server's set-up; with a contract, whether it can be served, and the test records against its schema."""
    yield _finding("flower", _flower)
    host = superlink.rpartition(":")[0].strip("[]")
    yield _finding("certificates", lambda: check_pair(kit, host))
    yield _finding("private files", lambda: _private(kit))
    yield _finding("folder", lambda: _writable(kit))
    yield _finding("superlink", lambda: _superlink(kit, superlink))
    if contract is not None:
        yield _finding("contract", lambda: _servable(contract, test))


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
    if policy.data.file.stat().st_mode & 0o007:
        raise InputError(f"{policy.data.file} can be read by every account; run `chmod 600 {policy.data.file}`")
    return f"{policy.data.file.name} holds {len(dataset.labels)} records, {unit}"


def _writable(folder: Path) -> str:
    """Write a file into a folder, or into the nearest one that exists, and remove it."""
    place = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"0" * 65536)
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        raise InputError(f"{place} cannot be written: {problem.strerror}; make room, or check its owner") from None
    free = shutil.disk_usage(place).free
    if free < _ROOM:
        raise InputError(f"the disk of {place} has {free >> 20} MiB left; make room for at least {_ROOM >> 20}")
    return f"{place} can be written, and has {free >> 30} GiB left"


def _ledger(policy: Policy) -> str:
    if not policy.ledger.exists() and not head_path(policy.ledger).exists():
        if (policy.folder / "contracts").is_dir():
            raise LedgerError(f"{policy.ledger} is missing, though contracts were agreed to; put back its last copy")
        _writable(policy.ledger.parent)
        return f"{policy.ledger.name} will be made with ε = {policy.budget.epsilon:g} in all"
    for path in (policy.ledger, head_path(policy.ledger), policy.ledger.parent):
        if path.exists() and not os.access(path, os.W_OK):
            raise LedgerError(f"{path} cannot be written by this account; run this as the silo's, or change its owner")
    _writable(policy.ledger.parent)
    with closing(Ledger(policy.ledger)) as ledger:
        ledger.verify()
        if policy.name not in ledger.clients:
            raise LedgerError(f"{policy.ledger} has no account of {policy.name!r}; name the silo's own ledger")
        account = ledger.account(policy.name)
        if account.terms.budget.epsilon != policy.budget.epsilon:
            held = account.terms.budget.epsilon
            raise LedgerError(
                f"{policy.ledger} holds ε = {held:g}, and the policy says {policy.budget.epsilon:g}; correct the policy"
            )
        left = max(0.0, account.terms.budget.epsilon - account.spent(account.committed))
        return f"{policy.ledger.name} is as it was written, with ε = {left:.4g} left"


def _clock(policy: Policy) -> str:
    """Compare the clock with what was written before: a contract that has ended must not begin again."""
    now, seen = datetime.now(UTC), list[datetime]()
    events = policy.folder / "events.jsonl"
    if events.exists() and (lines := events.read_text(encoding="utf-8").splitlines()):
        seen.append(datetime.fromisoformat(json.loads(lines[-1])["time"]))
    if policy.ledger.exists():
        seen.append(datetime.fromtimestamp(policy.ledger.stat().st_mtime, UTC))
    last = max(seen, default=now)
    if last > now + timedelta(seconds=5):
        raise InputError(
            f"this machine's clock says {now:%Y-%m-%d %H:%M}, and the silo has written at {last:%Y-%m-%d %H:%M}; "
            "let it follow a time server"
        )
    return f"{now:%Y-%m-%d %H:%M} UTC, after all that the silo has written"


def _supernode(policy: Policy) -> str:
    settings = policy.supernode
    secret = read_secret(settings.secret)
    if settings.root_certificates is not None:
        read_certificate(settings.root_certificates)
    _reach(
        flower.Endpoint(settings.address, secret, settings.root_certificates),
        "SuperNode",
        "start it with --isolation process and this --port",
    )
    return f"the SuperNode at {settings.address} takes our secret"


def _reach(endpoint: flower.Endpoint, what: str, remedy: str) -> None:
    """Ask for a task of no kind: the secret is checked, and no task is taken."""
    try:
        with closing(endpoint.runtime()) as client:
            flower.check_secret(client)
    except httpx.HTTPStatusError as problem:
        status = problem.response.status_code
        if status in (401, 403):
            raise InputError(
                f"the {what} at {endpoint.address} answers {status}: give it the same secret file, and the same clock"
            ) from None
        reason = f"it answers {status}"
    except httpx.ConnectError as problem:
        raise InputError(f"the {what} at {endpoint.address} cannot be reached ({problem}); {remedy}") from None
    except (httpx.HTTPError, ValueError) as problem:
        reason = type(problem).__name__
    else:
        return
    raise InputError(f"what listens on {endpoint.address} is no {what} ({reason}); stop it, or take another port")


def _private(kit: Path) -> str:
    read_secret(kit / "superlink.secret")
    some = [kit / name for name in ("server.key", "ca.key", "signer.key") if (kit / name).exists()]
    return check_private(some)


def _superlink(kit: Path, address: str) -> str:
    endpoint = flower.Endpoint(address, read_secret(kit / "superlink.secret"), kit / "ca.crt")
    said = look_at_superlink(address, kit / "ca.crt")
    _reach(endpoint, "SuperLink", "start it with `polyeps superlink`")
    check_guarded(endpoint)
    return f"{said}; it takes our secret, and asks for it"


def _agreeable(policy: Policy, path: Path) -> str:
    """Agree to a contract with a copy of the ledger: whatever the silo would refuse is found, and nothing is kept."""
    signed = read_signed(path)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "ledger.db"
        if policy.ledger.exists():
            with (
                closing(sqlite3.connect(f"file:{policy.ledger}?mode=ro", uri=True)) as source,
                closing(sqlite3.connect(copy)) as target,
            ):
                shutil.copy(head_path(policy.ledger), head_path(copy))
                source.backup(target)
        tried = policy.model_copy(update={"ledger": copy, "folder": Path(folder)})
        with closing(open_ledger(tried)) as ledger:
            try:
                accept_contract(signed.contract, tried, public_of(read_key(policy.key)), ledger)
            except PolyepsError as why:
                raise InputError(f"the silo would decline: {why}; ask for other terms, or change the policy") from None
            account = ledger.account(policy.name)
            left = max(0.0, account.terms.budget.epsilon - account.spent(account.committed))
    return f"the policy allows {signed.contract.name!r}; with it agreed, ε = {left:.4g} would be left"


def _servable(path: Path, test: Path | None) -> str:
    contract = read_signed(path).contract
    if contract.ends < today():
        raise InputError(f"the contract ended on {contract.ends}; sign a new one")
    held = "" if test is None else f", {len(load_client(test, contract.data.declaration, 'test').labels)} test records"
    return f"{contract.name!r} is signed, with {len(contract.silos)} silos, until {contract.ends}{held}"
