"""A hostile server inside a secure sum over a contract: lies are declined and logged, and the honest sum goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from support.silos import NAMES, SiloGrid, Sites, being, enrolling, over_the_wire, tasking
from support.summing import quick_polls, summing_sites, terms_of

from polyeps.accounting import epsilon_if_draws_known
from polyeps.algorithms._secure_sums import DRAWN
from polyeps.core import AGREED, ENTER, Payload
from polyeps.deploy.agreement import accept_contract
from polyeps.deploy.contract import SignedContract, contract_of
from polyeps.deploy.keys import new_key, public_of
from polyeps.deploy.serving import serve_contract
from polyeps.deploy.silo import Silo
from polyeps.errors import InputError
from polyeps.ledger import Ledger
from polyeps.secagg.messages import Step, SumSetup, open_stamped, pack_names, pack_table, stamp, unpack_table
from polyeps.transport.flower_client import tensors

NODE = 100


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_polls(monkeypatch)


def other_tasks(message: Message) -> Iterator[tuple[str, Message]]:
    """Variations of an honest task that no server may ask."""
    asked, payload = dict(message.content["task"]), tensors(message.content["payload"])
    bits = {"bits": asked["bits"]} if "bits" in asked else {}

    def task(payload: Payload, **changes: Any) -> Message:
        terms = {**asked, **changes}
        return tasking(terms.pop("run"), payload, terms.pop("round"), terms.pop("action"), NODE, **terms)

    yield "another run", task(payload, run=asked["run"][:-1])
    yield "an action that is none", task(payload, action="reveal")
    yield "further tensors", task({**payload, "clip": torch.tensor(100.0)})
    if asked["action"] == ENTER:
        return
    plain = {key: value for key, value in asked.items() if key != "bits"}
    yield "in the clear", tasking(plain["run"], payload, plain["round"], plain["action"], NODE)
    yield "other integers", task(payload, bits=bits["bits"] + 1)
    yield "floats", task(payload, bits=2)
    yield "a round that is not paid for", task(payload, round=asked["round"] + 1)
    for drawn in (0, 1, 2, len(NAMES) + 1, 10**9):
        yield f"{drawn} silos", task({**payload, DRAWN: torch.tensor(drawn)})
    yield "other terms", task({**payload, AGREED: payload[AGREED] + 1})
    yield "no terms", task({key: value for key, value in payload.items() if key not in (AGREED, DRAWN)})


def other_steps(message: Message, contract: Any) -> Iterator[tuple[str, Message]]:
    """Variations of an honest step."""
    asked = dict(message.content["sum"])
    step, content = Step(asked["step"]), asked["message"]

    def changed(**changes: Any) -> Message:
        being(1)
        record = RecordDict({"sum": ConfigRecord({**asked, **changes})})
        return over_the_wire(Message(record, dst_node_id=NODE, message_type="train.sum"))

    yield "fewer silos", changed(clients=["aspen", "birch"], threshold=2)
    yield "itself alone", changed(clients=["aspen"], threshold=1)
    yield "a silo that is not enrolled", changed(clients=[*NAMES, "mallory"])
    yield "a sum without itself", changed(clients=["birch", "cedar"], threshold=2)
    yield "a lower threshold", changed(threshold=2)
    yield "other integers", changed(bits=asked["bits"] + 1)
    yield "another length", changed(length=asked["length"] + 1)
    yield "another round", changed(round=asked["round"] + 1)
    yield "another sum", changed(run=asked["run"][:-2] + "00")
    yield "another run", changed(run="elsewhere/" + asked["run"].partition("/")[2])
    yield "no sum", changed(run="")
    for other in Step:
        if other > step:
            yield f"step {other.name} too early", changed(step=int(other))
    if step is Step.ADVERTISE:
        return
    yield "nothing", changed(message=b"")
    yield "a changed byte", changed(message=content[:-1] + bytes([content[-1] ^ 1]))
    setup = setup_of(asked, contract)

    def said(body: bytes) -> Message:
        return changed(message=stamp(setup, step, "aspen", body))

    body = open_stamped(setup, step, "aspen", content)
    if step is Step.CONFIRM:
        yield "two of three are in the sum", said(pack_names(["aspen", "birch"]))
        yield "itself has dropped out", said(pack_names(["birch", "cedar"]))
        yield "itself alone is in the sum", said(pack_names(["aspen"]))
        return
    table = unpack_table(body)
    yield "keys, letters or signatures of too few", said(pack_table({name: table[name] for name in [*table][:1]}))
    swapped = dict(zip(table, [*table.values()][1:] + [*table.values()][:1], strict=True))
    yield "those of one silo as another's", said(pack_table(swapped))
    forged = {name: one[:-1] + bytes([one[-1] ^ 1]) for name, one in table.items()}
    yield "forged ones", said(pack_table({**table, "birch": forged["birch"]}))
    yield "those of the server's own making", said(pack_table({**table, "mallory": table["birch"]}))


def after_an_answer(message: Message, contract: Any) -> Iterator[tuple[str, Message]]:
    """What no server may ask once a task or a step was answered: the same with other content."""
    if "task" in message.content:
        asked, payload = dict(message.content["task"]), tensors(message.content["payload"])
        if asked["action"] != ENTER:
            name = next(key for key in payload if key not in (AGREED, DRAWN))
            other = {**payload, name: payload[name] + 0.5}
            yield (
                f"a second {asked['action']}",
                tasking(asked["run"], other, asked["round"], asked["action"], NODE, bits=asked["bits"]),
            )
        return
    asked = dict(message.content["sum"])
    setup, step = setup_of(asked, contract), Step(asked["step"])
    others = {
        Step.CONFIRM: ("a second list", pack_names(["aspen", "birch"])),
        Step.UNMASK: ("a second set of signatures", pack_table({})),
    }
    if step in others:
        what, body = others[step]
        being(1)
        record = RecordDict({"sum": ConfigRecord({**asked, "message": stamp(setup, step, "aspen", body)})})
        yield what, over_the_wire(Message(record, dst_node_id=NODE, message_type="train.sum"))


def setup_of(asked: dict[str, Any], contract: Any) -> SumSetup:
    identities = {name: bytes.fromhex(contract.silos[name]) for name in asked["clients"]}
    numbers = {key: asked[key] for key in ("round", "bits", "length", "threshold")}
    return SumSetup(asked["run"], identities=identities, **numbers)


def refuses(silo: Silo, what: str, message: Message) -> None:
    """Check that a message gets the one word, or "not answered", and nothing else."""
    being(NODE)
    reply = over_the_wire(silo.answer(message, NODE))
    if reply.has_error():
        assert reply.error.reason == "declined", what
    else:
        assert list(reply.content) == ["reply"], what
        assert not reply.content["reply"]["answered"], what


@pytest.mark.parametrize("method", ["cmp-fed", "fedhdp"])
def test_every_lie_inside_a_sum_is_declined_and_the_sum_goes_on(method: str, tmp_path: Path) -> None:
    sites = summing_sites(tmp_path)
    signed = sites.signed(rounds=2, **terms_of(method))
    grid = SiloGrid(sites)
    tried, last = list[str](), list[Message]()

    def attack(node: int, message: Message) -> None:
        if node != NODE or not ("task" in message.content or "sum" in message.content):
            return
        silo = sites.silo()
        attacks = list(after_an_answer(last[-1], signed.contract)) if last else []
        attacks += other_tasks(message) if "task" in message.content else other_steps(message, signed.contract)
        for what, lie in attacks:
            refuses(silo, what, lie)
            tried.append(what)
        last[:] = [message]
        being(1)

    grid.before = attack
    found = serve_contract(signed, grid.connected, tmp_path / "run")
    assert (found.rounds, found.reason) == (2, "all rounds were run")
    assert len(tried) > 150
    assert {
        "in the clear",
        "fewer silos",
        "a second list",
        "a second set of signatures",
        "2 silos",
        "two of three are in the sum",
    } <= set(tried)
    assert ("a second embed" in tried) == (method == "cmp-fed")
    lines = [json.loads(line) for line in (tmp_path / "aspen" / "state" / "events.jsonl").read_text().splitlines()]
    logged = [line for line in lines if line["event"] in ("refused", "declined")]
    assert len(logged) == len(tried)
    assert all(line["event"] == "declined" or line["reason"] for line in logged)
    ledger = Ledger(tmp_path / "aspen" / "ledger.db")
    assert ledger.account("aspen").charges == 2
    assert ledger.spent("aspen") <= sites.policy().budget.epsilon


def test_another_roster_is_another_contract(tmp_path: Path) -> None:
    """The keys of the others are the contract's: with any other key it is another run, which nobody has agreed to."""
    sites = summing_sites(tmp_path)
    signed = sites.signed(**terms_of("dp-fedavg"))
    stranger = new_key(tmp_path / "stranger.key")
    silos = {**signed.contract.silos, "birch": public_of(stranger)}
    values = {**json.loads(signed.contract.canonical), "silos": silos}
    altered, own = contract_of(values), contract_of({**values, "signer": public_of(stranger)})
    silo = sites.silo()
    for lie in (
        SignedContract(altered, signed.signature),  # the signature is of the other roster
        SignedContract.sign(own, stranger),
    ):
        refuses(silo, "another roster", enrolling(lie.encode()))
    assert not Ledger(tmp_path / "aspen" / "ledger.db").runs


RULES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"sums": None}, {}, "needs secure sums, which the policy does not allow"),
    ({"sums": {"least_silos": 4}}, {}, "could be opened with 3 of them"),
    ({"sums": {"colluders": 1}}, {}, "withstands 0 colluders; the policy wants 3 .* and 1 "),
    (
        {"sums": {"colluders": None}},
        {},
        "withstands 0 colluders; the policy wants 3 .* and 1 ",
    ),  # each knows its own noise
    ({}, {"participation": {"kind": "poisson", "share": 0.5}}, "and the server, which draws, knows"),
    ({"sums": {"silos": {}}}, {}, "withstands 0 colluders; the policy wants 3 .* and 2 "),  # they may be invented
    ({"sums": {"silos": {"birch": "0" * 64}}}, {}, "enrols 'birch' with another key than the policy's"),
    ({"budget": {"protects": "records"}}, {}, "protects the silo as a whole, and budget.protects = 'records'"),
    ({"discloses": ["group"]}, {}, "the policy does not disclose it"),
    ({"budget": {"epsilon_per_run": 0.5}}, {}, "epsilon.aspen = 1 is more than budget.epsilon_per_run = 0.5"),
    ({}, {"epsilon": None}, "each must know the ε of all"),
    ({}, {"algorithm": {"name": "fedhdp"}}, 'set algorithm.trust = "secure-sum"'),
    ({}, {"algorithm": {"name": "dp-randagg", "noise": "gaussian"}}, "a secure sum is one of integers"),
    ({}, {"algorithm": {"name": "fedavg"}, "epsilon": None}, "protects single records or persons"),
    ({}, {"algorithm": {"name": "dp-randagg", "noise": "skellam", "dropouts": 0.34}}, "could be opened with 2 of them"),
    ({}, {"participation": {"kind": "uniform", "share": 0.5}}, "every client is drawn independently"),
    ({}, {"noise_multiplier": 1.0}, "noise_multiplier has no effect"),
]


@pytest.mark.parametrize(("rules", "terms", "said"), RULES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_policy_allows_sums_on_its_own_terms(
    rules: dict[str, Any], terms: dict[str, Any], said: str, tmp_path: Path
) -> None:
    sites = summing_sites(tmp_path)
    contract = sites.contract(**{**terms_of("dp-fedavg"), **terms})
    given: dict[str, Any] = {"budget": {"protects": "silo"}, "discloses": ["epsilon", "group"], "models": ["mlp"]}
    for key, value in rules.items():
        given[key] = {**given.get(key, {}), **value} if isinstance(value, dict) else value
    sites.write_policy("aspen", **given)
    silo = sites.silo()
    with pytest.raises(InputError, match=said):
        accept_contract(contract, sites.policy(), public_of(sites.keys["aspen"]), silo.ledger)
    assert not silo.ledger.runs


def test_whom_a_price_holds_against_is_the_policys_choice(tmp_path: Path) -> None:
    """Sampling makes a round cheap for those who do not know who is drawn; the server does. Each silo knows its noise.

    Against the server ε is 3.6, where the sampled price is 1.
    """
    sites = summing_sites(tmp_path)
    noisier = {"name": "dp-randagg", "rank": 0, "noise": "discrete-gaussian", "colluders": 0.3}
    others: dict[str, Any] = {"budget": {"protects": "silo"}, "discloses": ["epsilon"], "models": ["mlp"]}
    with closing(sites.silo().ledger) as ledger:
        for rules, terms in (
            ({"colluders": None}, {"algorithm": noisier}),
            ({"least_silos": 1, "secret_cohorts": True}, {"participation": {"kind": "poisson", "share": 0.1}}),
        ):
            sites.write_policy("aspen", sums=rules, **others)
            contract = sites.contract(**{**terms_of("dp-fedavg"), **terms})
            price = accept_contract(contract, sites.policy(), public_of(sites.keys["aspen"]), ledger).price
    known = epsilon_if_draws_known({price.event: price.uses}, contract.delta, "zero-out")
    assert known > 3 * sites.policy().budget.epsilon_per_run


def test_a_contract_names_every_silos_epsilon(tmp_path: Path) -> None:
    sites = Sites(tmp_path)
    for wrong in ({"aspen": 1.0}, {**dict.fromkeys(NAMES, 1.0), "dogwood": 1.0}):
        with pytest.raises(InputError, match="must name the same silos"):
            sites.contract(epsilon=wrong)
    with pytest.raises(InputError, match="that of all silos; state them"):
        sites.contract(algorithm={"name": "fedavg", "budgets": "minimum"})
