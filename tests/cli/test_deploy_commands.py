"""`polyeps silo`, `serve` and `deploy`: kits, signatures, checks, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Message
from support.commands import refused, run, run_json
from support.silos import SiloGrid, Sites

from polyeps.deploy.contract import read_signed
from polyeps.deploy.serving import serve_contract


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return Sites(tmp_path, records=40)


def test_kits_of_a_server_and_a_silo_fit_together(tmp_path: Path) -> None:
    server = run_json("deploy", "init", str(tmp_path / "server"), "--name", "study", "--host", "10.0.0.4")
    assert {"ca.crt", "ca.key", "server.crt", "signer.key", "superlink.secret", "contract.toml"} <= set(server["files"])
    silo = run_json("deploy", "init", str(tmp_path / "aspen"), "--silo", "aspen", "--signer", server["key"])
    assert {"silo.key", "node.key", "node.pub", "policy.toml", "supernode.secret"} <= set(silo["files"])
    for path in tmp_path.rglob("*.key"):
        assert path.stat().st_mode & 0o077 == 0
    draft = tmp_path / "server" / "contract.toml"
    key = ("--key", str(tmp_path / "server" / "signer.key"))
    refused("deploy", "sign", str(draft), *key, naming=("silos",))
    draft.write_text(draft.read_text().replace('# aspen = "..."', f'aspen = "{silo["key"]}"'))
    signed = run_json("deploy", "sign", str(draft), *key)
    assert read_signed(draft).contract.digest == signed["digest"]
    assert signed["signer"] == server["key"]
    records = tmp_path / "aspen" / "records.csv"
    records.write_text(
        "patient,age,bp,sex,smoker,outcome\n" + "".join(f"p{number},50,120,m,True,ill\n" for number in range(20))
    )
    records.chmod(0o600)
    policy = str(tmp_path / "aspen" / "policy.toml")
    findings = json.loads(
        run("deploy", "doctor", "--policy", policy, "--contract", str(draft), "--json", status=1).stdout
    )
    assert {one["check"]: one["right"] for one in findings} == {
        "flower": True,
        "policy": True,
        "key": True,
        "signers": True,
        "records": True,
        "folder": True,
        "ledger": True,
        "clock": True,
        "supernode": False,  # nobody has started it
        "contract": True,
    }
    refused("deploy", "init", str(tmp_path / "server"), naming=("not empty", "keys are never replaced"))


def test_a_template_that_was_not_filled_in_is_found(tmp_path: Path) -> None:
    run("deploy", "init", str(tmp_path / "aspen"), "--silo", "aspen")
    spoken = run("deploy", "doctor", "--policy", str(tmp_path / "aspen" / "policy.toml"), status=1)
    wrong = [line for line in spoken.stdout.splitlines() if line.startswith("WRONG")]
    assert [line.split()[1] for line in wrong] == ["signers:", "records:", "supernode:"]
    spoken = run("deploy", "doctor", "--kit", str(tmp_path), "--superlink", "127.0.0.1:1", status=1)
    wrong = [line for line in spoken.stdout.splitlines() if line.startswith("WRONG")]
    assert [line.split()[1] for line in wrong] == ["certificates:", "private", "superlink:"]


def test_what_is_wrong_is_said_in_one_sentence(sites: Sites, tmp_path: Path) -> None:
    refused("silo", "--policy", str(tmp_path / "none.toml"), naming=("none.toml", "cannot be read"))
    sites.write_policy("aspen", color="red")
    refused("silo", "--policy", str(tmp_path / "aspen" / "policy.toml"), naming=("policy.toml", "'color'"))
    refused("serve", str(tmp_path / "contract.toml"), naming=("contract.toml.signed", "deploy sign"))
    sites.contract()
    refused("deploy", "sign", str(tmp_path / "contract.toml"), "--key", str(tmp_path / "no.key"), naming=("no.key",))
    (tmp_path / "contract.toml.signed").write_bytes(sites.signed().encode())
    refused("serve", str(tmp_path / "contract.toml"), naming=("superlink.secret",))
    refused("deploy", "doctor", naming=("--policy", "--kit"))
    refused("deploy", "status", naming=("--policy",))
    refused("deploy", "status", str(tmp_path), naming=("serving.db",))
    refused("deploy", "status", "--policy", str(tmp_path / "birch" / "policy.toml"), naming=("no ledger",))


def test_the_status_of_a_run_and_of_a_silo(sites: Sites, tmp_path: Path) -> None:
    signed, grid = sites.signed(rounds=2), SiloGrid(sites)
    serve_contract(signed, grid.connected, tmp_path / "run")
    found = run_json("deploy", "status", str(tmp_path / "run"))
    assert (found["status"], found["rounds"], found["reason"]) == ("done", "2 of 2", "all rounds were run")
    assert {row["silo"]: row["answered"] for row in found["silos"]} == {"aspen": 2, "birch": 2, "cedar": 2}
    policy = str(tmp_path / "cedar" / "policy.toml")
    silo = run_json("deploy", "status", "--policy", policy)
    assert [one["account"] for one in silo["accounts"]] == ["cedar", "signer: lab"]
    (contract,) = silo["contracts"]
    assert (contract["contract"], contract["state"], contract["charges"]) == ("readmission", "open", 2)
    assert [event["event"] for event in silo["events"]] == ["agreed", "answered", "answered"]
    assert "all rounds were run" in run("deploy", "status", str(tmp_path / "run")).stdout
    assert "signer: lab" in run("deploy", "status", "--policy", policy).stdout


def test_a_silo_withdraws_from_a_contract(sites: Sites, tmp_path: Path) -> None:
    """While it is running: what was spent stays spent, the rest is free, and the run goes on without it."""
    signed, grid = sites.signed(), SiloGrid(sites, anew=False)
    policy = ("--policy", str(tmp_path / "cedar" / "policy.toml"))

    def leave(node: int, message: Message) -> None:
        if node == 102 and message.metadata.group_id.startswith("1/"):
            withdrawn = run_json("deploy", "withdraw", signed.contract.digest[:12], *policy)
            assert (withdrawn["contract"], withdrawn["reserved"]) == ("readmission", 0)
            assert 0 < withdrawn["spent"] < withdrawn["epsilon"] - withdrawn["left"] + 1e-9
            grid.before = lambda *_: None

    grid.before = leave
    assert serve_contract(signed, grid.connected, tmp_path / "run").rounds == 3
    silos = {row["silo"]: row["answered"] for row in run_json("deploy", "status", str(tmp_path / "run"))["silos"]}
    assert silos == {"aspen": 3, "birch": 3, "cedar": 1}
    found = run_json("deploy", "status", *policy)
    assert [one["state"] for one in found["contracts"]] == ["ended"]
    spent = {one["account"]: one["spent"] for one in found["accounts"]}
    assert spent["cedar"] > 0
    assert spent["signer: lab"] > 0  # charged for as much as the silo was
    run("deploy", "withdraw", "readmission", *policy)  # again: nothing more happens
    refused("deploy", "withdraw", "another", *policy, naming=("no contract is called 'another'", "readmission ("))
