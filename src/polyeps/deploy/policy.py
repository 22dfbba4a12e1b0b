"""The policy of a silo: what it takes part in, with which data, and for how much privacy at most.

The policy belongs to the silo alone. Nothing a contract or a server says can lift a rule of it, and what it does not
know is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from polyeps.core import Field as ProfileField
from polyeps.core import check_name
from polyeps.data.schema_files import read_toml
from polyeps.deploy.keys import check_public_key
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.sections import Section
from polyeps.ledger.account import Schedule

Bounds = tuple[float, float]
USUAL_RANGES: Mapping[str, Bounds] = {"batch": (1, 100_000), "local_steps": (1, 10_000)}  # unless the policy has others


class PolicyData(Section):
    """The silo's records."""

    file: Path
    schema_file: Path = Field(alias="schema")
    test: Path | None = None  # further records, for figures that the silo alone sees


class PolicyBudget(Section):
    """The most privacy the silo's units lose, ever, and in one run."""

    # records: each record, or each person where the schema has a unit. silo: everything the silo holds together, which
    # is what secure sums protect.
    protects: Literal["records", "silo"] = "records"

    epsilon: float = Field(gt=0)  # in all runs together: the budget of the ledger
    delta: float = Field(gt=0, lt=1)
    epsilon_per_run: float = Field(gt=0)
    # adaptive: any number of contracts, each after the last one's results. fixed: one contract, at its exact price.
    schedule: Schedule = "adaptive"

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.epsilon_per_run > self.epsilon:
            raise InputError(
                f"budget.epsilon_per_run is {self.epsilon_per_run:g}, more than budget.epsilon = {self.epsilon:g}; "
                "lower it"
            )
        return self


class SignerRule(Section):
    """A signer whose contracts the silo considers."""

    key: Annotated[str, AfterValidator(partial(check_public_key, "signers: key"))]
    epsilon: float = Field(gt=0)  # the most for all contracts of this signer together


class PolicyLimits(Section):
    """What contracts may ask for; they are refused beyond it."""

    rounds: int = Field(ge=1)
    silos: int = Field(default=100, ge=1)  # of a contract; each costs memory for as many records as this silo's
    parameters: int = Field(default=1_000_000, ge=1)
    message_bytes: int = Field(default=64_000_000, ge=1000)
    training: dict[str, Bounds] = Field(default_factory=dict)  # the range of each number in [training]

    @field_validator("training")
    @classmethod
    def _known(cls, value: dict[str, Bounds]) -> dict[str, Bounds]:
        for key, (low, high) in value.items():
            if key not in config.TrainingSettings.model_fields:
                raise InputError(
                    config.unknown_key(f"limits.training.{key}", key, config.TrainingSettings.model_fields)
                )
            if low > high:
                raise InputError(f"limits.training.{key} is [{low:g}, {high:g}]; put the smaller number first")
        return value


class SumRules(Section):
    """Secure sums that the silo takes part in."""

    least_silos: int = Field(default=3, ge=1)  # whose vectors are in every sum that is opened
    # Other silos whose noise an observer may know, which every sum must withstand: each of them knows its own.
    colluders: int = Field(default=1, ge=0)
    # Whether prices may assume that nobody learns who was drawn: the server draws, so no such price holds against it.
    secret_cohorts: bool = False
    # The keys of other silos, from themselves: whoever signs a contract could invent silos. One that is not known here
    # counts as a further colluder.
    silos: dict[str, str] = Field(default_factory=dict)

    @field_validator("silos")
    @classmethod
    def _keys(cls, value: dict[str, str]) -> dict[str, str]:
        return {name: check_public_key(f"sums.silos.{name}", key) for name, key in value.items()}

    def to_withstand(self, name: str, enrolled: Mapping[str, str]) -> int:
        """Return how many colluders a sum must withstand for the silo of a name, given the keys of all enrolled."""
        others = {one: key for one, key in enrolled.items() if one != name}
        for one, key in others.items():
            if self.silos.get(one, key) != key:
                raise InputError(f"the contract enrols {one!r} with another key than the policy's sums.silos.{one}")
        return self.colluders + len(others.keys() - self.silos.keys())


class SuperNodeSettings(Section):
    """The SuperNode beside the silo."""

    address: str = "127.0.0.1:9094"  # of its Runtime API (--host, --port)
    secret: Path  # the file given to it as --superexec-auth-secret-file
    root_certificates: Path | None = None  # None: plain HTTP, on this machine alone


class Policy(Section):
    """The rules of one silo."""

    name: str  # of the silo, as contracts name it
    key: Path  # its private key
    folder: Path  # where it keeps contracts, memory and replies
    ledger: Path
    data: PolicyData
    budget: PolicyBudget
    algorithms: tuple[str, ...] = Field(min_length=1)
    models: tuple[str, ...] = ("logistic",)
    encoders: tuple[str, ...] = ()  # built-in ones, which need no trust; others are unknown to contracts
    limits: PolicyLimits
    discloses: tuple[ProfileField, ...] = ()
    signers: dict[str, SignerRule]
    supernode: SuperNodeSettings
    sums: SumRules | None = None  # None: it takes part in none
    rehearsal: bool = False  # whether it takes part in rehearsals, which protect nobody, and in nothing else

    @field_validator("name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        check_name("name", value)
        return value

    @field_validator("signers")
    @classmethod
    def _distinct(cls, value: dict[str, SignerRule]) -> dict[str, SignerRule]:
        if not value:
            raise InputError("signers names nobody, so no contract could be accepted; add [signers.NAME] key, epsilon")
        if len({rule.key for rule in value.values()}) < len(value):
            raise InputError("signers: two signers have the same key; name each once")
        return value

    def signer(self, key: str) -> tuple[str, SignerRule]:
        """Return the name of a signer and the rule for it."""
        for name, rule in self.signers.items():
            if rule.key == key:
                return name, rule
        raise InputError(f"the contract is signed by {key[:16]}…, whom the policy does not know; add it to [signers]")


def read_policy(path: Path) -> Policy:
    """Return the policy of a TOML file; paths in it are relative to the file."""
    values = read_toml(path, f"the policy {path}", "give the path of a policy")
    try:
        found = config.checked(Policy, values)
    except InputError as problem:
        raise InputError(f"{path}: {problem}") from None
    folder = path.parent.absolute()

    def beside(section: Section) -> dict[str, Any]:
        given = {key: value for key, value in section if isinstance(value, Path)}
        return {key: folder / path for key, path in given.items()}

    nested = {key: getattr(found, key).model_copy(update=beside(getattr(found, key))) for key in ("data", "supernode")}
    return found.model_copy(update={**beside(found), **nested})
