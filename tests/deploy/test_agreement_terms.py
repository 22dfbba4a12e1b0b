"""A contract against a policy: every rule is enforced before anything is charged, and the whole price is reserved."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.silos import Sites, simulated

from polyeps.accounting.affordability import known_epsilon
from polyeps.accounting.histories import history_of
from polyeps.deploy.agreement import Agreement, accept_contract, open_ledger, release_ended
from polyeps.deploy.contract import Contract
from polyeps.deploy.keys import new_key, public_of
from polyeps.errors import BudgetExceeded, InputError
from polyeps.ledger import Ledger
from polyeps.ledger.account import Charge


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return Sites(tmp_path)


def agreed(sites: Sites, contract: Contract, name: str = "aspen") -> tuple[Agreement, Ledger]:
    policy = sites.policy(name)
    ledger = open_ledger(policy)
    return accept_contract(contract, policy, public_of(sites.keys[name]), ledger), ledger


def refused(sites: Sites, contract: Contract, said: str) -> None:
    """Check that a contract is refused with these words, and that nothing was charged or reserved."""
    with pytest.raises(InputError, match=said):
        agreed(sites, contract)
    ledger = open_ledger(sites.policy())
    assert not ledger.runs
    assert not any(row.kind in ("charge", "reserve") for row in ledger.rows())


def test_the_whole_price_is_reserved_for_silo_and_signer(sites: Sites) -> None:
    contract = sites.contract()
    found, ledger = agreed(sites, contract)
    assert found.price.clients == ("aspen", "signer: lab")
    assert found.price.uses == contract.rounds
    assert ledger.runs[contract.run].open
    assert ledger.spent("aspen") == 0
    for account in found.price.clients:
        assert ledger.account(account).committed == history_of(found.price.event, contract.rounds)
    # The run alone costs no more than the policy's ε for a run, by the exact accountant, and nearly all of it.
    exact = known_epsilon(history_of(found.price.event, contract.rounds), 1e-5, "zero-out", "pld")
    assert 0.98 < exact <= 1.0


def test_agreeing_again_changes_nothing(sites: Sites) -> None:
    contract = sites.contract()
    first, ledger = agreed(sites, contract)
    rows = ledger.head.seq
    again, ledger = agreed(sites, contract)
    assert ledger.head.seq == rows
    assert again.clients.noise_multiplier == first.clients.noise_multiplier


def test_the_noise_is_that_of_a_simulation_with_all_silos(sites: Sites) -> None:
    """The silo knows its own records and budget alone, and calibrates as the simulation of everybody does."""
    contract = sites.contract(algorithm={"name": "weiavg"}, participation={"kind": "uniform", "share": 0.67})
    job = simulated(sites, contract)
    assert len(set(job.noise_multiplier)) == 3
    for place, name in enumerate(job.population.ids):
        own, _ = agreed(sites, contract, name)
        assert own.clients.noise_multiplier[0] == job.noise_multiplier[place]
        assert own.price.uses == job.rounds.expected == 3
        assert own.clients.data.counts.tolist() == [job.population.sizes[place]]


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"rounds": 21}, "rounds = 21 is more than the policy's limits.rounds = 20"),
        ({"delta": 1e-4}, "delta = 0.0001 is more than"),
        ({"ends": date(2020, 1, 1)}, "ended on 2020-01-01"),
        ({"algorithm": {"name": "fedsel-exact"}}, "not in the policy's algorithms"),
        ({"algorithm": {"name": "fedhdp"}}, "each must know the ε of all"),
        ({"model": {"name": "mlp"}}, "not in the policy's models"),
        ({"rehearsal": 3}, "its noise can be repeated"),
        ({"training": {"local_steps": 20_000}}, "outside the policy's range"),
        ({"training": {"batch": 1000}}, "fewer than training.batch = 1000"),
        ({"data": {"label": "returned"}}, "data.label is 'returned' in the contract and 'readmitted'"),
        ({"data": {"classes": ["yes", "no"]}}, "data.classes"),
        ({"data": {"unit": "patient"}}, "data.unit"),
        ({"data": {"columns": {"age": {"range": [0, 100]}, "stay": {"range": [0, 30]}}}}, "'age' is not the same"),
        ({"data": {"columns": {"age": {"range": [0, 110]}}}}, "'stay' is not the same"),
    ],
)
def test_a_contract_beyond_the_policy_is_refused(sites: Sites, terms: dict[str, Any], said: str) -> None:
    refused(sites, sites.contract(**terms), said)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"algorithms": ["weiavg"]}, "algorithm.name = 'fedavg' is not in"),
        ({"limits": {"rounds": 2}}, "limits.rounds = 2"),
        ({"limits": {"silos": 2}}, "3 silos are more than the policy's limits.silos = 2"),
        ({"limits": {"parameters": 5}}, "6 parameters, more than"),
        ({"limits": {"training": {"clip": [0.1, 0.5]}}}, "training.clip = 1.0 is outside"),
        ({"rehearsal": True}, "for rehearsals alone"),
        ({"name": "dogwood"}, "does not enrol 'dogwood'"),
        ({"budget": {"epsilon_per_run": 0.01}}, "cannot afford the plan|."),
    ],
)
def test_a_policy_comes_first(sites: Sites, rules: dict[str, Any], said: str) -> None:
    contract = sites.contract()
    sites.write_policy("aspen", **rules)
    if "name" in rules:
        with pytest.raises(InputError, match=said):
            agreed(sites, contract)
    elif "budget" in rules:  # strict, not impossible: all the noise it takes
        found, _ = agreed(sites, contract)
        assert found.clients.noise_multiplier[0] > 10
    else:
        refused(sites, contract, said)


def test_an_unknown_signer_or_another_key_is_refused(sites: Sites, tmp_path: Path) -> None:
    contract = sites.contract()
    stranger = public_of(new_key(tmp_path / "stranger.key"))
    refused(sites, contract.model_copy(update={"signer": stranger}), "whom the policy does not know")
    policy = sites.policy()
    with pytest.raises(InputError, match="with another key than this silo's"):
        accept_contract(contract, policy, stranger, open_ledger(policy))


def test_an_algorithm_that_needs_more_than_is_disclosed_is_refused(sites: Sites) -> None:
    sites.write_policy("aspen", discloses=["examples"])
    refused(sites, sites.contract(algorithm={"name": "weiavg"}), "needs this silo's epsilon")


def test_another_model_under_the_same_name_is_refused(sites: Sites) -> None:
    contract = sites.contract().model_copy(update={"model_digest": "0" * 64})
    refused(sites, contract, "builds another model")


def test_a_huge_model_is_refused_before_it_is_built(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    sites.write_policy("aspen", models=["mlp"])
    contract = sites.contract(model={"name": "mlp", "hidden": [8]})
    monkeypatch.setattr("polyeps.deploy.contract_job.model_for", lambda *_: pytest.fail("built"))
    for hidden in [(10**9,), (5000, 5000), (10**7, 10**7), (1,) * 10_000]:
        model = contract.model.model_copy(update={"hidden": hidden})
        refused(sites, contract.model_copy(update={"model": model}), "makes more parameters|has 10000 layers")


# Budgets over several contracts


def test_the_budget_holds_over_all_contracts(sites: Sites) -> None:
    sites.write_policy("aspen", budget={"epsilon": 2.5})
    accepted: list[Ledger] = []

    def accept(many: int) -> None:
        accepted.extend(agreed(sites, sites.contract(name=f"run {number}"))[1] for number in range(many))

    with pytest.raises(BudgetExceeded, match=r"client 'aspen' has spent.*nothing was reserved"):
        accept(12)
    assert len(accepted) >= 2
    ledger = accepted[-1]
    account = ledger.account("aspen")
    assert account.spent(account.committed) <= 2.5
    assert account.spent() == 0


def test_a_signer_has_a_limit_of_its_own(sites: Sites, tmp_path: Path) -> None:
    other = new_key(tmp_path / "other.key")
    sites.write_policy(
        "aspen",
        signers={
            "lab": {"key": public_of(sites.signer), "epsilon": 1.4},
            "b": {"key": public_of(other), "epsilon": 6.0},
        },
    )
    agreed(sites, sites.contract(name="one"))
    with pytest.raises(BudgetExceeded, match="client 'signer: lab' has spent"):
        agreed(sites, sites.contract(name="two"))
    ledger = open_ledger(sites.policy())
    assert len(ledger.runs) == 1  # of the silo's own account, too, nothing was reserved
    agreed(sites, sites.contract(name="two").model_copy(update={"signer": public_of(other)}))


def test_a_policy_that_was_changed_does_not_keep_an_older_agreement(sites: Sites) -> None:
    contract = sites.contract()
    agreed(sites, contract)
    sites.write_policy("aspen", budget={"epsilon_per_run": 1.5})
    with pytest.raises(InputError, match="the policy, the records or polyeps have changed since"):
        agreed(sites, contract)
    sites.write_policy("aspen", budget={"epsilon": 60.0})
    with pytest.raises(InputError, match=r"ε = 6, δ = 1e-05.*the policy says otherwise"):
        open_ledger(sites.policy())


def test_a_fixed_schedule_takes_one_contract_at_its_exact_price(sites: Sites) -> None:
    budget = {"epsilon": 1.0, "epsilon_per_run": 1.0, "schedule": "fixed"}
    signers = {"lab": {"key": public_of(sites.signer), "epsilon": 1.0}}
    sites.write_policy("aspen", budget=budget, signers=signers)
    _, ledger = agreed(sites, sites.contract())
    account = ledger.account("aspen")
    assert 0.98 < account.spent(account.committed) <= 1.0
    with pytest.raises(BudgetExceeded):
        agreed(sites, sites.contract(name="another"))


def test_what_an_ended_run_did_not_use_is_free_again(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = sites.contract()
    found, ledger = agreed(sites, contract)
    charge = Charge(("aspen",), found.price.event, 1)
    ledger.charge_all([charge], run=contract.run)
    release_ended(contract.run, ledger)
    release_ended(contract.run, ledger)
    release_ended("never heard of", ledger)
    one = history_of(found.price.event, 1)
    for account in found.price.clients:
        assert ledger.account(account).history == one
        assert ledger.account(account).committed == one
    with pytest.raises(InputError, match="has ended already"):
        agreed(sites, contract)
    assert np.isclose(ledger.spent("aspen"), ledger.account("aspen").spent(one))
