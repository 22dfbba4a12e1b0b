"""`polyeps audit`: one table, refuted or holds, and what the exit code says."""

import json
import math

import pytest

from polyeps.audit import attacks
from polyeps.audit.results import Attack, Evidence, run_attacks, select_attacks
from polyeps.cli import execute
from polyeps.errors import InputError

FIELDS = {"name", "form", "claimed", "certified", "audited", "verdict"}


def test_figures_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["audit", "--quick", "--json", "--only", "law of"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["confidence"], found["seed"], found["quick"]) == (0.99, 0, True)
    assert len(found["rows"]) == 6
    for row in found["rows"]:
        assert row.keys() >= FIELDS
        assert row["verdict"] == "holds"
        assert row["audited"] == pytest.approx(row["certified"])


def test_published_forms_are_refuted(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["audit", "--quick", "--json", "--only", "s[12356] ?[emx]*"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {name for name, row in found.items() if row["verdict"] == "refuted"} == set(found)
    assert found["S6 PM: possible answers in floating point"]["audited"] == math.inf


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["audit", "--quick", "--only", "tied ranks averaged"]) == 0
    shown = capsys.readouterr().out
    for word in ("audited", "published", "enumeration", "1.0407", "refuted"):
        assert word in shown


def test_a_refuted_certificate_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = [Attack("broken", "sound", "support", lambda _: Evidence(1.0, 1.0, math.inf))]
    monkeypatch.setattr(attacks, "all_attacks", lambda: broken)
    assert execute(["audit", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"][0]["verdict"] == "refuted"
    monkeypatch.setattr(
        attacks, "all_attacks", lambda: [Attack("claim", "published", "support", lambda _: Evidence(1.0, 3.0, 2.0))]
    )
    assert execute(["audit"]) == 0


def test_no_such_row() -> None:
    assert execute(["audit", "--only", "nothing is called this"]) == 2


def test_names_are_unique_and_the_error_is_shared() -> None:
    listed = attacks.all_attacks()
    assert select_attacks(listed, None) == listed
    assert len(listed) > 100
    with pytest.raises(InputError, match="same name"):
        select_attacks([listed[0], listed[0]], None)
    asked = []
    spy = Attack("spy", "sound", "support", lambda effort: asked.append(effort) or Evidence(1.0, 1.0, 0.0))  # type: ignore[func-returns-value]
    run_attacks([spy, spy], seed=3, quick=False)
    assert [(effort.seed, effort.times) for effort in asked] == [(3, 8), (3, 8)]
    assert asked[0].confidence == pytest.approx(1 - 0.01 / 2)


@pytest.mark.parametrize(("audited", "verdict"), [(1.0, "holds"), (1 + 1e-7, "holds"), (1.001, "refuted")])
def test_what_is_judged(audited: float, verdict: str) -> None:
    sound = Attack("sound", "sound", "support", lambda _: Evidence(9.0, 1.0, audited))
    published = Attack("published", "published", "support", lambda _: Evidence(1.0, 9.0, audited))
    assert [row.verdict for row in run_attacks([sound, published], 0, True)] == [verdict, verdict]
