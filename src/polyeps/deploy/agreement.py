"""A contract against a policy: a silo's part in the run, or a sentence why there is none.

The silo's ε is its policy's, and its noise is calibrated to it. The price of the whole run is reserved in the ledger
before the first task: for the silo and, under the signer's own limit, for the signer. Nothing that a server sends later
changes noise, clip, rate or price.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import partial

import numpy as np

from polyeps.clients import Clients
from polyeps.core import Algorithm, Budget
from polyeps.data.dataset import Dataset
from polyeps.data.own_files import load_client
from polyeps.data.own_tables import in_words
from polyeps.data.partition import Partition, to_records
from polyeps.data.schema_files import TableDeclaration, read_schema
from polyeps.deploy.contract import Contract
from polyeps.deploy.contract_job import as_agreed, check_contract_model, check_deployable, job_of_contract
from polyeps.deploy.policy import USUAL_RANGES, Policy
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.errors import InputError
from polyeps.experiment.job import Job
from polyeps.experiment.noise_calibration import cost_of
from polyeps.experiment.population import Population
from polyeps.experiment.seeds import seed_for
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge
from polyeps.transport.client_files import Keeping

_SIGNER = "signer: "  # before the name of a signer, in the name of its account


@dataclass(frozen=True)
class Agreement:
    """What a silo has agreed to: itself as a client (n = 1), the algorithm, and the price of the whole run."""

    contract: Contract
    clients: Clients
    algorithm: Algorithm
    price: Charge  # to the silo and to the signer
    population: Population  # the silo's records as everybody's; its test records are its own


def today() -> date:
    """Return today's date, the same everywhere."""
    return datetime.now(UTC).date()


def accept_contract(contract: Contract, policy: Policy, public: str, ledger: Ledger) -> Agreement:
    """Return a silo's part in a run, its whole price reserved; refuse what policy or ledger do not allow.

    `public` is the silo's own key. Repeating an agreement changes nothing.
    """
    check_terms(contract, policy)
    if contract.silos[policy.name] != public:
        raise InputError(f"the contract enrols {policy.name!r} with another key than this silo's, which is {public}")
    check_contract_model(contract, policy.limits.parameters)
    declared = replace(contract.data.declaration, client=read_schema(policy.data.schema_file).client)
    dataset = load_client(policy.data.file, declared, policy.name)
    if policy.data.test is not None:
        own = load_client(policy.data.test, declared, policy.name)
        dataset = replace(dataset, test_features=own.features, test_labels=own.labels)
    dataset = as_agreed(contract, dataset)
    job = job_of_contract(contract, dataset, Budget(policy.budget.epsilon_per_run, contract.delta))
    check_guarantee(job, contract, policy)
    _check_own_work(job, policy)
    for field in job.algorithm.needs:
        if field not in policy.discloses:
            raise InputError(f"{contract.algorithm.name} needs this silo's {field}, which the policy does not disclose")
    row = job.population.ids.index(policy.name)
    price = _price(job, row, (policy.name, _SIGNER + policy.signer(contract.signer)[0]))
    part = _own_part(contract, job, policy, ledger, dataset)
    _reserve(contract, policy, price, ledger)  # last: whatever is wrong is found before
    return Agreement(contract, part, job.algorithm, price, job.population)


def check_terms(contract: Contract, policy: Policy) -> None:
    """Refuse a contract that a policy does not allow; no record is read, and nothing is charged."""
    policy.signer(contract.signer)
    if policy.name not in contract.silos:
        raise InputError(f"the contract does not enrol {policy.name!r}; its silos are {', '.join(contract.silos)}")
    if policy.rehearsal != (contract.rehearsal is not None):
        raise InputError(
            "the contract is not a rehearsal, and this policy is for rehearsals alone"
            if policy.rehearsal
            else "the contract is a rehearsal: its noise can be repeated, so it would protect nobody"
        )
    if contract.ends < today():
        raise InputError(f"the contract ended on {contract.ends}")
    if contract.algorithm.name not in policy.algorithms:
        raise InputError(f"algorithm.name = {contract.algorithm.name!r} is not in the policy's algorithms")
    check_deployable(contract)
    if contract.model.name not in policy.models:
        raise InputError(f"model.name = {contract.model.name!r} is not in the policy's models")
    if contract.model.encoder is not None and contract.model.encoder not in policy.encoders:
        raise InputError(f"model.encoder = {contract.model.encoder!r} is not in the policy's encoders")
    if contract.epsilon is not None and "epsilon" not in policy.discloses:
        raise InputError("the contract states the silo's ε for all to read, and the policy does not disclose it")
    if contract.epsilon is not None and contract.epsilon[policy.name] > policy.budget.epsilon_per_run:
        wanted, most = contract.epsilon[policy.name], policy.budget.epsilon_per_run
        raise InputError(f"epsilon.{policy.name} = {wanted:g} is more than budget.epsilon_per_run = {most:g}")
    if contract.rounds > policy.limits.rounds:
        raise InputError(f"rounds = {contract.rounds} is more than the policy's limits.rounds = {policy.limits.rounds}")
    if len(contract.silos) > policy.limits.silos:
        raise InputError(f"{len(contract.silos)} silos are more than the policy's limits.silos = {policy.limits.silos}")
    if contract.delta > policy.budget.delta:
        raise InputError(f"delta = {contract.delta:g} is more than the policy's budget.delta = {policy.budget.delta:g}")
    settings = contract.training.model_dump(exclude_none=True)
    for key, (low, high) in {**USUAL_RANGES, **policy.limits.training}.items():
        value = settings.get(key)
        if value == "auto":  # the silo's own choice, which is checked when it is made
            continue
        if value is not None and not (isinstance(value, int | float) and low <= value <= high):
            raise InputError(f"training.{key} = {value} is outside the policy's range of {low:g} to {high:g}")
    check_schemas(contract.data.declaration, read_schema(policy.data.schema_file))


def _check_own_work(job: Job, policy: Policy) -> None:
    """Refuse a batch or a number of steps that was found for this silo, and that the policy does not allow."""
    row = job.population.ids.index(policy.name)
    found = {
        "batch": job.settings["rate"][row] * job.population.sizes[row] if "rate" in job.settings else None,
        "local_steps": job.settings["steps"][row] if "steps" in job.settings else None,
    }
    for key, (low, high) in {**USUAL_RANGES, **policy.limits.training}.items():
        value = found.get(key)
        if value is not None and not low <= value <= high:
            raise InputError(
                f"training.{key}, found for this silo's budget, is {value:g}, outside the policy's range of {low:g} to "
                f"{high:g}"
            )


def check_guarantee(job: Job, contract: Contract, policy: Policy) -> None:
    """Refuse a job that protects another unit than the policy's budget, or by sums that it does not allow."""
    algorithm, sums = job.algorithm, job.algorithm.trust == "secure-sum"
    if sums and policy.sums is None:
        raise InputError(f"{job.method.name} needs secure sums, which the policy does not allow; add [sums] to it")
    # A pure ε for the whole silo holds for its records, too: the ledger decides.
    if policy.budget.protects != ("silo" if sums else "records") and (sums or algorithm.unit != "client"):
        what = "the silo as a whole" if sums else "single records or persons"
        raise InputError(
            f"{job.method.name} protects {what}, and budget.protects = {policy.budget.protects!r}; a silo that takes "
            "part in both needs a second policy, with a ledger of its own"
        )
    if not sums or policy.sums is None:
        return
    if job.participation.kind != "full" and job.participation.share < 1 and not policy.sums.secret_cohorts:
        raise InputError(
            f"participation.share = {job.participation.share:g} makes a round cheap because nobody knows who is drawn, "
            'and the server, which draws, knows; ask for participation.kind = "full", or set sums.secret_cohorts if '
            "the server is trusted with that"
        )
    together = job.groups is None or "" in algorithm.largest_sums
    group = "" if together or job.groups is None else job.groups[job.population.ids.index(policy.name)]
    colluders = policy.sums.to_withstand(policy.name, contract.silos)
    for terms in algorithm.largest_sums[group]:
        if terms.least < policy.sums.least_silos or terms.colluders < colluders:
            raise InputError(
                f"a sum over {terms.clients} silos could be opened with {terms.least} of them and withstands "
                f"{terms.colluders} colluders; the policy wants {policy.sums.least_silos} (sums.least_silos) and "
                f"{colluders} (sums.colluders, and each silo whose key is not in [sums.silos])"
            )


def check_schemas(agreed: TableDeclaration, own: TableDeclaration) -> None:
    """Refuse a contract whose schema is not the silo's, naming the first difference."""
    for key in ("label", "unit", "classes"):
        theirs, ours = getattr(agreed, key), getattr(own, key)
        if theirs != ours:
            raise InputError(f"data.{key} is {theirs!r} in the contract and {ours!r} in the policy's schema")
    columns = [
        {} if one.schema is None else {column.name: column for column in one.schema.columns} for one in (agreed, own)
    ]
    for name in (*columns[0], *columns[1]):
        if columns[0].get(name) != columns[1].get(name):
            raise InputError(f"data.columns: {name!r} is not the same in the contract and in the policy's schema")


def _price(job: Job, row: int, payers: tuple[str, ...]) -> Charge:
    """Return the price of the whole run for the silo in a row."""
    algorithm = job.algorithm
    event = cost_of(algorithm, job.population.ids, job.settings).event(float(job.noise_multiplier[row]), row)
    return Charge(payers, event, job.rounds.expected, algorithm.unit, algorithm.adjacency, algorithm.person)


def _own_part(contract: Contract, job: Job, policy: Policy, ledger: Ledger, dataset: Dataset) -> Clients:
    """Return the silo as the one client it is."""
    rows = np.arange(len(dataset.labels))
    own = Partition((policy.name,), rows, np.array([0, len(rows)]))
    rehearsed, row = contract.rehearsal, job.population.ids.index(policy.name)
    epsilon = policy.budget.epsilon_per_run if contract.epsilon is None else contract.epsilon[policy.name]
    return Clients(
        ids=(policy.name,),
        data=to_records(dataset, own),
        noise_multiplier=job.noise_multiplier[row : row + 1],
        streams=(lambda ids, _: SystemStreams(len(ids)))
        if rehearsed is None
        else partial(SeededStreams, seed_for(rehearsed, "noise")),
        repeatable=rehearsed is not None,
        ledger=ledger,
        settings={name: values[row : row + 1] for name, values in job.settings.items()},
        groups=None if job.groups is None else (job.groups[row],),
        declared=np.array([epsilon]),
        keeper=Keeping(policy.folder / "runs"),
        run=contract.run,
        reservation=contract.run,
    )


# The ledger


def open_ledger(policy: Policy) -> Ledger:
    """Open the silo's ledger, or create it with the policy's budget; refuse one with another budget."""
    terms = _terms(policy, policy.budget.epsilon)
    ledger = Ledger.open_or_create(policy.ledger, {policy.name: terms})
    if policy.name not in ledger.clients:
        ledger.enroll({policy.name: terms})
    _check_account(ledger, policy, policy.name, terms)
    return ledger


def _terms(policy: Policy, epsilon: float) -> BudgetTerms:
    unit = read_schema(policy.data.schema_file).unit
    budget, word = Budget(epsilon, policy.budget.delta), "" if unit is None else in_words(unit)
    schedule = policy.budget.schedule
    if policy.budget.protects == "silo":
        return BudgetTerms(budget, "client", "zero-out", schedule)
    return BudgetTerms(budget, "record" if unit is None else "person", "zero-out", schedule, person=word)


def _check_account(ledger: Ledger, policy: Policy, account: str, terms: BudgetTerms) -> None:
    """Refuse an account that was opened under other terms than the policy's."""
    held = ledger.account(account).terms
    if any(getattr(held, name) != getattr(terms, name) for name in ("budget", "unit", "person", "schedule")):
        epsilon, delta = held.budget.epsilon, held.budget.delta
        raise InputError(
            f"{policy.ledger} was opened for {account!r} with ε = {epsilon:g}, δ = {delta:g}, unit {held.unit} and the "
            f"{held.schedule} schedule, and the policy says otherwise; correct the policy, or change the budget with "
            "`polyeps ledger set-budget --raise --reason ...`"
        )


def _reserve(contract: Contract, policy: Policy, price: Charge, ledger: Ledger) -> None:
    """Reserve the price of a run for the silo and its signer, both or neither; again, it changes nothing."""
    ledger.refresh()
    _silo, account = price.clients
    terms = _terms(policy, policy.signer(contract.signer)[1].epsilon)
    if account not in ledger.clients:
        ledger.enroll({account: terms})
    _check_account(ledger, policy, account, terms)
    held = ledger.runs.get(contract.run)
    try:
        ledger.reserve(contract.run, [price])
    except InputError:
        if held is None:
            raise
        if not held.open:
            raise InputError(
                f"the contract {contract.name!r} has ended already, or this silo has withdrawn from it; it is not "
                "answered again"
            ) from None
        raise InputError(
            f"the price of {contract.name!r} is another than was agreed to: the policy, the records or polyeps have "
            f"changed since; put back what was, or leave with `polyeps deploy withdraw {contract.name}`"
        ) from None


def release_ended(run: str, ledger: Ledger) -> None:
    """Release what a run has reserved and not used; its signer is charged for as much as the silo was."""
    ledger.refresh()
    held = ledger.runs.get(run)
    if held is None or not held.open:
        return
    ((silo, signer), _), *_ = held.asked
    left, whole = (ledger.account(client).reserved.get(run, {}) for client in (silo, signer))
    terms = ledger.account(signer).terms
    used = {step: count - left.get(step, 0) for step, count in whole.items()}
    charges = [Charge((signer,), step, n, terms.unit, person=terms.person) for step, n in used.items() if n]
    ledger.charge_all(charges, purpose=f"{run}/ended", once=True, run=run)
    ledger.release(run)
