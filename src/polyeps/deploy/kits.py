"""What a server and a silo begin with: keys, certificates, secrets, and templates of contract, schema and policy.

Each side makes its own kit on its own machine. Only public things are exchanged: ca.crt, node.pub and public keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from polyeps.core import check_name
from polyeps.data.hospitals import COLUMNS
from polyeps.data.schema import toml_key, toml_text
from polyeps.deploy.agreement import today
from polyeps.deploy.keys import new_authority, new_certificate, new_key, new_node_key, public_of
from polyeps.deploy.processes import new_secret
from polyeps.errors import InputError

SCHEMA = f"""\
# How every silo's columns become numbers. Ranges come from general knowledge, never from all silos' records.
label = "outcome"
classes = ["well", "ill"]
unit = "patient"  # all records of one patient are protected together; without it, each record by itself

[columns]
{COLUMNS}"""
_CONTRACT = """\
# The terms of one run. Sign it with: polyeps deploy sign contract.toml --key signer.key
name = {name}
rounds = {rounds}
delta = 1e-6
seed = 1  # of the first model; not secret
ends = {ends}  # the last day on which silos answer

[silos]  # the public key of every silo, as `polyeps deploy init --silo` prints it
{silos}
[data]
schema = "schema.toml"

[model]
name = "logistic"

[training]
batch = 16
local_steps = 10
learning_rate = 0.3
clip = 1.0

[algorithm]
name = "fedavg"

[patience]  # seconds
enrolment = {enrolment}
reply = {reply}
"""
_POLICY = """\
# The rules of this silo. Nothing a contract or a server says can lift one of them.
name = {name}
key = "silo.key"
folder = "state"
ledger = "ledger.db"
algorithms = ["fedavg"]  # weiavg and pfa need discloses = ["epsilon"]
models = ["logistic"]
discloses = []

[data]
file = "records.csv"
schema = "schema.toml"

[budget]
epsilon = {epsilon}  # the most that each patient, or record, loses in all runs together
delta = 1e-6
epsilon_per_run = {per_run}
schedule = "adaptive"

[limits]
rounds = 100
parameters = 100000
training = {{ batch = [8, 256], local_steps = [1, 100], learning_rate = [1e-4, 1.0], clip = [0.01, 10.0] }}

# Secure sums protect the silo as a whole, not single records: budget.protects = "silo", and
# [sums]
# least_silos = 3
# colluders = 1
# [sums.silos]  # the key of every other silo, from itself

[signers.{signer_name}]
key = {signer}
epsilon = {epsilon}  # the most for all contracts of this signer together

[supernode]
address = {address}
secret = "supernode.secret"
"""


@dataclass(frozen=True)
class ServerTerms:
    """The numbers of a contract's template."""

    rounds: int = 10
    enrolment: float = 600.0
    reply: float = 600.0


@dataclass(frozen=True)
class SiloTerms:
    """The numbers of a policy's template."""

    epsilon: float = 8.0
    per_run: float = 1.0
    signer: str = "0" * 64
    port: int = 9094


def server_kit(
    folder: Path, name: str, hosts: list[str], silos: Mapping[str, str], terms: ServerTerms | None = None
) -> str:
    """Make the kit of a server; return the public key that signs its contracts."""
    terms = terms or ServerTerms()
    _begin(folder)
    new_authority(folder, name)
    new_certificate(folder, name, hosts)
    new_secret(folder / "superlink.secret")
    signer = public_of(new_key(folder / "signer.key"))
    (folder / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    listed = "".join(f"{toml_key(silo)} = {toml_text(key)}\n" for silo, key in silos.items())
    text = _CONTRACT.format(
        name=toml_text(name),
        rounds=terms.rounds,
        ends=today() + timedelta(days=365),
        silos=listed or '# aspen = "..."\n',
        enrolment=f"{terms.enrolment:g}",
        reply=f"{terms.reply:g}",
    )
    (folder / "contract.toml").write_text(text, encoding="utf-8")
    return signer


def silo_kit(folder: Path, name: str, terms: SiloTerms | None = None) -> str:
    """Make the kit of a silo; return its public key."""
    terms = terms or SiloTerms()
    check_name("the name of a silo", name)
    _begin(folder)
    new_node_key(folder / "node.key")
    new_secret(folder / "supernode.secret")
    public = public_of(new_key(folder / "silo.key"))
    (folder / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    text = _POLICY.format(
        name=toml_text(name),
        epsilon=terms.epsilon,
        per_run=terms.per_run,
        signer_name="lab",
        signer=toml_text(terms.signer),
        address=toml_text(f"127.0.0.1:{terms.port}"),
    )
    (folder / "policy.toml").write_text(text, encoding="utf-8")
    return public


def _begin(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; choose another folder, since keys are never replaced")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as problem:
        raise InputError(f"{folder} cannot be made: {problem.strerror}; choose another folder") from None
