"""Pages about a federation of silos: the server's report, and a silo's own ledger page."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from support.commands import refused, run_json
from support.journals import ABOUT, new_journal, write_job
from support.pages import page, words
from support.silos import SiloGrid, Sites, being, enrolling

from polyeps.deploy.serving import serve_contract
from polyeps.experiment.journal import ClientRow
from polyeps.ledger import Ledger


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    """Three silos after one round of a contract, one of which refused another contract twice."""
    sites = Sites(tmp_path_factory.mktemp("silos"))
    grid = SiloGrid(sites, anew=False)
    test = sites.folder / "aspen" / "records.csv"
    serve_contract(sites.signed(rounds=1), grid.connected, sites.folder / "run", test=test)
    for _ in range(2):
        being(100)
        grid.open[100].answer(enrolling(sites.signed(name="greedy", rounds=50).encode()), 100)
    return sites


def test_a_silos_page_names_contracts_signers_and_refusals(sites: Sites, tmp_path: Path) -> None:
    policy, output = sites.folder / "aspen" / "policy.toml", tmp_path / "page.html"
    shown = run_json("ledger", "page", "--policy", str(policy), "-o", str(output))
    ledger = Ledger(sites.policy().ledger)
    assert shown["accounts"][0]["spent"] == ledger.spent("aspen") > 0
    assert [run["signers"] for run in shown["runs"]] == [["lab"]]
    (refusal,) = shown["refused"]
    assert (refusal["times"], "limits.rounds = 20" in refusal["reason"]) == (2, True)
    said = unescape(words(output.read_text(encoding="utf-8")))
    assert "Privacy ledger of aspen" in said
    digest = shown["runs"][0]["run"].rpartition("/")[2]
    assert f"readmission ({digest[:8]}) lab fedavg 1 2100-01-01" in said
    assert "rounds = 50 is more than the policy's limits.rounds = 20 2 " in said
    both = ("ledger", "page", "--file", str(sites.folder / "birch" / "ledger.db"), "--policy", str(policy))
    refused(*both, "-o", str(output), naming=("give one of the two",))


def test_the_servers_page_claims_nothing_about_spending(sites: Sites) -> None:
    said = words(page(sites.folder / "run"))
    assert "3 clients with budgets from ε 1 to 3 trained" in said
    assert "Each silo's own ledger refuses what exceeds its budget" in said
    assert "the server does not see what was spent" in said
    for claim in ("Every client stayed", "Spending is not known", "kept by all", "weak guarantee", "Budget exceeded"):
        assert claim not in said
    assert "on test records that the server holds" in said
    assert "in simulation" not in said


def test_budgets_that_are_not_disclosed_are_not_called_absent(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run", {**ABOUT, "contract": "0" * 64})
    silent = [ClientRow(name, None, 1e-5, None, 0, None) for name in ("aspen", "birch")]
    write_job(journal, clients=silent, spent={})
    journal.close()
    said = words(page(tmp_path / "run"))
    assert "2 clients with budgets that they do not disclose trained" in said
    assert "not disclosed" in said
    assert not re.search(r"chose|no protection|without a guarantee|∞", said)
