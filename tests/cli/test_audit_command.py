"""`polyeps audit`: every published mistake is refuted, nothing that we certify is."""

import json

import pytest

from polyeps.cli import run


def test_what_is_refuted_and_what_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "--trials", "20000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {case["trials"] for case in found["cases"]} == {20000}
    for case in found["cases"]:
        assert case["shown"] <= case["certified"]
        if case["refuted"]:
            assert case["shown"] > case["claimed"]
    refuted = {case["mechanism"] for case in found["cases"] if case["refuted"]}
    assert len(refuted) >= 4  # those that take few trials
    assert all(case["claimed"] < case["certified"] for case in found["cases"] if case["mechanism"] in refuted)


def test_the_table_says_which_claims_stand(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "--trials", "2000", "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    assert "refuted" in shown
    assert "stands" in shown
    assert run(["audit", "--trials", "10"]) == 2
