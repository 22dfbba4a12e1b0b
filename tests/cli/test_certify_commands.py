import json
import math

import pytest
from support.commands import refused, run, run_json

from polyeps.accounting.certificate import rounded_up

DP_SGD = ["dp-sgd", "--records", "1200", "--batch", "8", "--steps", "8000"]
FEDSEL = ["fedsel", "--select", "pe", "--dimension", "123", "--top", "12"]
CMP_FED = ["cmp-fed", "--clients", "6000", "--cohort", "100", "--rounds", "180"]
FRAME = {"method", "form", "delta", "adjacency", "unit", "sampler", "trust", "accountant", "details"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_dp_sgd() -> None:
    shown = run_json("certify", *DP_SGD, "--sigma", "2.35", "--delta", "1e-5")
    assert set(shown) >= FRAME | {"claimed", "certified"}
    assert shown["certified"] == pytest.approx(1.0, abs=1e-3)
    fixed = run_json("certify", *DP_SGD, "--sigma", "2.35", "--sampler", "fixed")
    assert fixed["adjacency"] == "replace-one"
    renyi = run_json("certify", *DP_SGD, "--sigma", "1", "--accountant", "rdp")
    assert renyi["certified"] == pytest.approx(3.7442, abs=1e-3)


def test_fedsel() -> None:
    shown = run_json("certify", *FEDSEL, "--epsilon-select", "1", "--value", "pm", "--epsilon-value", "1")
    assert shown["certified"] == pytest.approx(2.0, abs=1e-9)
    details = shown["details"]
    total = 12 * details["probability_top"] + 111 * details["probability_rest"] + details["probability_none"]
    assert total == pytest.approx(1)
    options = ["--epsilon-select", "1", "--value", "none", "--form", "published"]
    assert run_json("certify", *FEDSEL, *options)["certified"] == pytest.approx(1.012204, abs=1e-6)
    exact = run("certify", *FEDSEL, "--epsilon-select", "1", "--value", "exact", "--json")
    assert json.loads(exact.stdout)["certified"] == math.inf


def test_fedhdp() -> None:
    options = ["--rate", "0.05", "--sigma", "1", "--clip-bit-sigma", "5", "--rounds", "100", "--delta", "1e-4"]
    assert run_json("certify", "fedhdp", *options)["certified"] == pytest.approx(2.900, abs=1e-3)


def test_cmp_fed() -> None:
    shown = run_json("certify", *CMP_FED, "--sigma", "1.5134", "--delta", "1e-4")
    assert shown["certified"] == pytest.approx(1.0, rel=3e-4)
    assert run_json("certify", *CMP_FED, "--sigma", "1.5134", "--survivors", "90")["certified"] == pytest.approx(
        1.123, abs=1e-3
    )


def test_cmp_fed_says_what_it_assumes_and_what_holds_against_the_server() -> None:
    shown = run_json("certify", *CMP_FED, "--sigma", "1.5134", "--survivors", "90")
    assert "90 of the 100 clients drawn" in shown["conditions"][0]
    figure = rounded_up(shown["certified_if_draws_known"])
    assert f"against those who know, the server that draws among them, ε = {figure}." in shown["sentence"]
    everybody = run_json("certify", *CMP_FED[:3], "--cohort", "6000", "--rounds", "1", "--sigma", "1.5134")
    assert len(everybody["conditions"]) == 1
    assert everybody["certified_if_draws_known"] is None  # nothing is secret where everybody is drawn
    assert "those who know" not in everybody["sentence"]
    assert shown["certified"] < shown["certified_if_draws_known"]
    assert shown["certified_if_draws_known"] < shown["details"]["certified_if_always_drawn"]


@pytest.mark.parametrize("sigma", ["1e-7", "1e-5", "1e-4", "1e-3", "0.02", "1e99"])
def test_cmp_fed_with_hardly_any_noise_or_far_too_much(sigma: str) -> None:
    for accountant in ("pld", "rdp"):
        shown = run_json("certify", *CMP_FED, "--sigma", sigma, "--accountant", accountant)
        assert math.isfinite(shown["certified"])
        if accountant == "pld":
            assert shown["certified"] <= shown["certified_if_draws_known"] * (1 + 1e-12)


def test_a_budget_next_to_nothing_has_its_noise() -> None:
    shown = run_json("calibrate", *CMP_FED, "--epsilon", "1e-8")
    assert 0 < shown["results"][0]["certified"] <= 1e-8
    assert shown["results"][0]["sigma"] == pytest.approx(1261.5, rel=1e-3)


def test_the_terminal_gets_a_table_and_a_sentence() -> None:
    spoken = run("certify", *DP_SGD, "--sigma", "2.35")
    assert "0.99995" in spoken.stdout
    assert "replacing any one record of this client by an empty one" in spoken.stdout
    assert spoken.stderr == ""


def test_calibrate() -> None:
    shown = run_json("calibrate", *DP_SGD, "--epsilon", "1,10")
    assert set(shown) >= FRAME
    assert [row["epsilon"] for row in shown["results"]] == [1.0, 10.0]
    assert [row["sigma"] for row in shown["results"]] == pytest.approx([2.350, 0.650], abs=1e-3)
    assert all(0.999 * row["epsilon"] <= row["certified"] <= row["epsilon"] for row in shown["results"])
    shown = run_json("calibrate", *CMP_FED, "--epsilon", "1", "--delta", "1e-4")
    assert shown["results"][0]["sigma"] == pytest.approx(1.5134, rel=3e-4)
    shown = run_json(
        "calibrate", "fedhdp", "--rate", "0.05", "--rounds", "100", "--clip-bit-sigma", "5", "--epsilon", "2.9"
    )
    assert shown["results"][0]["sigma"] == pytest.approx(1.0, abs=1e-3)
    shown = run_json("calibrate", *FEDSEL, "--epsilon", "2", "--reports", "4")
    assert shown["results"][0]["sigma"] is None
    assert shown["results"][0]["epsilon_select"] == pytest.approx(0.05, rel=1e-4)
    assert "2.3499" in run("calibrate", *DP_SGD, "--epsilon", "1").stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["certify", *DP_SGD, "--sigma", "0"], "sigma"),
        (["certify", *DP_SGD, "--sigma", "nan"], "sigma"),
        (["certify", *CMP_FED, "--sigma", "1e-200"], "sigma must be a finite number above 0, between 1e-100 and 1e100"),
        (["calibrate", *CMP_FED, "--epsilon", "1e12"], "lower the budget"),
        (["certify", *DP_SGD, "--sigma", "1", "--delta", "1"], "delta"),
        (["certify", *DP_SGD, "--sigma", "1", "--delta", "nan"], "delta"),
        (["certify", *DP_SGD, "--sigma", "1", "--sampler", "magic"], "--sampler"),
        (["certify", "dp-sgd", "--records", "5", "--batch", "8", "--steps", "1", "--sigma", "1"], "batch 8"),
        (["certify", *FEDSEL[:-1], "124"], "top"),
        (["certify", *FEDSEL, "--epsilon-select", "-1"], "epsilon-select"),
        (["certify", *FEDSEL, "--epsilon-select", "1", "--value", "pm", "--epsilon-value", "0"], "epsilon-value"),
        (["certify", "fedhdp", "--rate", "1.5", "--sigma", "1", "--rounds", "1"], "rate"),
        (["certify", *CMP_FED, "--sigma", "1", "--survivors", "101"], "survivors"),
        (["certify", *CMP_FED], "--sigma"),
        (["certify", "fedavg"], "fedavg"),
        (["calibrate", *DP_SGD, "--epsilon", "0"], "epsilon"),
        (["calibrate", *DP_SGD, "--epsilon", "-1"], "epsilon"),
        (["calibrate", *DP_SGD, "--epsilon", "nan"], "epsilon"),
        (["calibrate", *DP_SGD, "--epsilon", "1,many"], "epsilon"),
        (["calibrate", *DP_SGD, "--epsilon", "1", "--delta", "1"], "delta"),
        (["frobnicate"], "frobnicate"),
        (["certify", *DP_SGD, "--sigma", "1", "--colour", "red"], "--colour"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], named: str) -> None:
    refused(*arguments, naming=(named,))


def test_no_noise_reaches_an_epsilon_at_delta_zero() -> None:
    spoken = run("calibrate", *CMP_FED, "--epsilon", "1", "--delta", "0", status=2)
    assert "give a delta above 0" in spoken.stderr
