"""The contract of a run: every term that silos agree to, signed with Ed25519.

A draft is a TOML file. Signing resolves it (the schema, the model's digest, the signer's key) and writes a signed
contract: its canonical bytes and the signature. Two contracts are the same if, and only if, their canonical bytes are.
The name of the run holds their digest, so nobody can change a term and keep the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import AfterValidator, Field, field_validator, model_validator

from polyeps.core import check_name
from polyeps.data.schema_files import SCHEMA_KEYS, TableDeclaration, read_schema_values, read_toml, schema_of
from polyeps.deploy.keys import check_public_key, public_of, verifies
from polyeps.encoders import ENCODER_NAMES
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.sections import Section, Title
from polyeps.messages import MOST_ROUNDS

_SIGNED = b"polyeps contract 1\n"  # before the bytes that are signed, so that a signature of anything else is none
LARGEST_CONTRACT = 1 << 20  # bytes
# Of the model, that `contract_job` knows: a setting that it ignored would be agreed to in vain.
_MODEL_KEYS = {"name", "hidden", "encoder", "encoder_size", "encoder_bandwidth"}
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


class DataTerms(Section):
    """The schema that every silo's records are read by."""

    label: str
    unit: str | None = None  # the column that names the person of each record
    classes: tuple[str, ...]
    # Kept in the order of their names, which is that of the features.
    columns: Annotated[dict[str, dict[str, Any]], AfterValidator(lambda columns: dict(sorted(columns.items())))]

    @property
    def declaration(self) -> TableDeclaration:
        return TableDeclaration(self.label, None, self.unit, schema_of(self.columns), self.classes)

    @model_validator(mode="after")
    def _valid(self) -> Self:
        assert self.declaration
        return self


class Patience(Section):
    """How long the server waits, in seconds."""

    enrolment: Seconds = 600.0  # for silos to enrol
    reply: Seconds = 600.0  # for replies to a task; a silo that is later misses the round


class Contract(Section):
    """The terms of one run."""

    format: Literal[1] = 1
    name: Title
    rounds: int = Field(ge=1, le=MOST_ROUNDS)
    delta: float = Field(gt=0, lt=1)  # at which each silo's noise is calibrated
    seed: int = Field(ge=0, lt=2**31)  # of public dice: the first model, and cohorts that are not secret
    ends: date  # the last day on which a silo answers
    signer: Annotated[str, AfterValidator(partial(check_public_key, "signer"))]
    silos: dict[str, str]  # the public key of every enrolled silo
    # The ε of every silo for this run, where all must know them: silos in secure sums add noise for one another.
    epsilon: dict[str, Annotated[float, Field(gt=0)]] | None = None
    noise_multiplier: float | None = Field(default=None, gt=0)  # one for all, where silos differ in their rates (idp)
    least_silos: int | None = Field(default=None, ge=1)  # that must enrol before the run begins; None: all
    data: DataTerms
    model: config.ModelSettings = Field(default_factory=config.ModelSettings)
    model_digest: str
    training: config.TrainingSettings = Field(default_factory=config.TrainingSettings)
    server: config.ServerSettings = Field(default_factory=config.ServerSettings)
    participation: config.ParticipationSettings = Field(default_factory=config.ParticipationSettings)
    algorithm: config.Method
    patience: Patience = Field(default_factory=Patience)
    # A rehearsal draws all noise from this seed and so protects nobody: for tests, and for policies that say so.
    rehearsal: int | None = Field(default=None, ge=0, lt=2**31)

    @field_validator("silos")
    @classmethod
    def _named_silos(cls, value: dict[str, str]) -> dict[str, str]:
        if not value:
            raise InputError("silos names no silo; give each its public key: [silos] NAME = KEY")
        for name, key in value.items():
            check_name("silos: the name of a silo", name)
            check_public_key(f"silos.{name}", key)
        if len(set(value.values())) < len(value):
            raise InputError("silos: two silos have the same key; give each its own")
        return value

    @model_validator(mode="after")
    def _deployable(self) -> Self:
        method = self.algorithm
        if method.budgets not in (None, "own", "minimum") or method.form != "sound" or method.epsilon is not None:
            raise InputError(
                "algorithm: a deployed silo spends its own budget, in the sound form; leave out budgets, form, epsilon"
            )
        if self.epsilon is not None and self.epsilon.keys() != self.silos.keys():
            odd = sorted(self.epsilon.keys() ^ self.silos.keys())[0]
            raise InputError(f"epsilon and silos must name the same silos; {odd!r} is in one of them alone")
        if method.budgets == "minimum" and self.epsilon is None:
            raise InputError('algorithm.budgets = "minimum" is that of all silos; state them: [epsilon] NAME = ε')
        for table in ("training", "server"):
            if getattr(method, table):
                raise InputError(f"algorithm.{table}: a contract has one method; put its settings into [{table}]")
        if others := sorted(self.model.model_fields_set - _MODEL_KEYS):
            raise InputError(f"model.{others[0]} is not for contracts yet; leave it out")
        if (encoder := self.model.encoder) is not None and encoder not in ENCODER_NAMES:
            names = ", ".join(ENCODER_NAMES)
            raise InputError(f"model.encoder = {encoder!r} is code that a contract does not bring; choose {names}")
        if self.participation.with_public:
            raise InputError("participation.with_public needs every silo's budget, which a contract does not have")
        if (self.least_silos or 1) > len(self.silos):
            raise InputError(f"least_silos is {self.least_silos}, but there are {len(self.silos)} silos; lower it")
        return self

    @cached_property
    def canonical(self) -> bytes:
        """The bytes that are signed: JSON with sorted keys, without blanks and without settings that are None."""
        values = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.canonical).hexdigest()

    @property
    def run(self) -> str:
        """The name of the run, by which silos know its contract."""
        return f"{self.name}/{self.digest}"

    @property
    def experiment(self) -> config.Experiment:
        """The settings of the run as those of an experiment, without records or budgets."""
        return config.Experiment(
            name=self.name,
            rounds=self.rounds,
            seeds=(self.seed,),
            data=config.DataSettings(**self.data.model_dump()),
            budgets=config.BudgetSettings(disclosed=False, noise_multiplier=self.noise_multiplier),
            model=self.model,
            training=self.training,
            server=self.server,
            participation=self.participation,
            algorithm=(self.algorithm,),
        )


@dataclass(frozen=True)
class SignedContract:
    """A contract and the signature of its signer."""

    contract: Contract
    signature: bytes

    @classmethod
    def sign(cls, contract: Contract, key: Ed25519PrivateKey) -> SignedContract:
        """Return a contract signed with the key of its signer."""
        if contract.signer != public_of(key):
            raise InputError("the contract names another signer than this key; sign with the signer's own key")
        return cls(contract, key.sign(_SIGNED + contract.canonical))

    def encode(self) -> bytes:
        """Return the bytes of a signed contract: one line for the signature, then the canonical bytes."""
        return self.signature.hex().encode() + b"\n" + self.contract.canonical + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> SignedContract:
        """Return a contract whose signature holds; anything else is refused."""
        if len(content) > LARGEST_CONTRACT:
            raise InputError(f"the contract has {len(content)} bytes, more than {LARGEST_CONTRACT}")
        signature, _, canonical = content.removesuffix(b"\n").partition(b"\n")
        try:
            values = json.loads(canonical)
            found = cls(contract_of(values), bytes.fromhex(signature.decode("ascii")))
        except InputError:
            raise
        except (ValueError, RecursionError):
            raise InputError("this is not a signed contract; sign the draft with `polyeps deploy sign`") from None
        if found.contract.canonical != canonical:
            raise InputError("the contract is not written as this version of polyeps writes it; sign it again")
        if not verifies(found.contract.signer, found.signature, _SIGNED + canonical):
            raise InputError("the signature of the contract does not hold: it was altered, or signed by someone else")
        return found


def contract_of(values: Any) -> Contract:
    """Return a contract from plain values; errors name the key."""
    if not isinstance(values, Mapping):
        raise InputError("a contract must be a table of settings")
    return config.checked(Contract, values)


def read_draft(path: Path, signer: str, model_digest: Any) -> Contract:
    """Return the contract that a TOML file drafts; `model_digest` gives the digest of a contract's model."""
    values = read_toml(path, f"the contract {path}", "give the path of a draft")
    for key in ("signer", "model_digest"):
        if key in values:
            raise InputError(f"{path}: {key} is filled in when the contract is signed; leave it out")
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("schema"), str):
        read = read_schema_values(path.parent / data.pop("schema"))
        if twice := [key for key in read if key in data]:
            raise InputError(f"{path}: data.{twice[0]} is also in the schema; keep one of them")
        data |= {key: read[key] for key in SCHEMA_KEYS if key in read and key != "client"}
    draft = contract_of({**values, "signer": signer, "model_digest": ""})
    return draft.model_copy(update={"model_digest": model_digest(draft)})


def signed_path(path: Path) -> Path:
    """Return where the signed form of a draft lies."""
    return path.with_name(f"{path.name}.signed")


def read_signed(path: Path) -> SignedContract:
    """Return the signed contract at a path, or beside the draft at that path."""
    place = signed_path(path) if path.suffix == ".toml" else path
    try:
        content = place.read_bytes()
    except OSError as problem:
        raise InputError(
            f"the signed contract {place} cannot be read: {problem.strerror}; sign the draft with `polyeps deploy sign`"
        ) from None
    return SignedContract.decode(content)
