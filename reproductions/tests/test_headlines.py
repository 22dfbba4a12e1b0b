"""Claims and counts on "Five papers, reproduced" follow from the results."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polyeps_reproductions.census import counted, finished, values
from polyeps_reproductions.explanations import UNEXPLAINED
from polyeps_reproductions.headlines import (
    HOLDS,
    NOT,
    NOT_RUN,
    PART,
    Outcome,
    Results,
    headlines,
    number,
    numbers,
    outcome,
    signed,
    table,
    verdict,
)
from polyeps_reproductions.page_tables import RESULTS
from polyeps_reproductions.studies import STUDIES

KEPT = Results(RESULTS)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Results]:
    """Results of which one part is changed."""

    def make(part: str, change: Callable[[dict[str, Any]], None]) -> Results:
        for path in RESULTS.glob("*.json"):
            shutil.copy(path, tmp_path)
        path = tmp_path / f"{part}.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        change(found)
        path.write_text(json.dumps(found), encoding="utf-8")
        return Results(tmp_path)

    return make


def judged(results: Results, start: str) -> str:
    (one,) = (one for one in headlines() if one.claim.startswith(start))
    return one.judged(results)[1]


def test_a_verdict_is_a_count() -> None:
    some = {"all": Outcome(2, 2, ""), "half": Outcome(1, 2, ""), "none": Outcome(0, 2, ""), "empty": Outcome(0, 0, "")}
    assert verdict([some["all"], some["empty"]]) == HOLDS
    assert verdict([some["all"], some["none"]]) == verdict([some["half"]]) == PART
    assert verdict([some["none"]]) == NOT
    assert verdict([some["empty"]]) == verdict([]) == NOT_RUN


def test_numbers_of_tables() -> None:
    assert number("92.08 ± 0.59") == 92.08
    assert numbers("-0.28 ± 0.77") == [-0.28, 0.77]
    assert numbers("–") == []
    assert (signed(-1.25), signed(0.04), signed(3.04)) == ("−1.2", "0.0", "+3.0")
    assert outcome([1.0, -2.0], lambda one: one > 0) == Outcome(1, 2, "−2.0 to +1.0 points; 1 of 2 cells")


def test_every_paper_has_claims_with_reasons() -> None:
    found = list(headlines())
    assert {one.study for one in found} == set(STUDIES)
    assert all(one.claim and one.paper and one.where and one.reason for one in found)
    assert len({one.claim for one in found}) == len(found)


def test_nothing_holds_without_results(tmp_path: Path) -> None:
    rows = table(Results(tmp_path), STUDIES)
    assert {row[4] for row in rows[1:]} == {f"**{NOT_RUN}**"}


def test_a_verdict_changes_with_its_results(changed: Callable[..., Results]) -> None:
    start = "CMP-Fed at rank 16 is above DP-FedAvg"
    assert judged(KEPT, start) == NOT

    def worse(found: dict[str, Any]) -> None:
        place = found["columns"].index("accuracy %")
        for row in found["table"]:
            row[place] = "50.00 ± 1.00" if row[0] == "DP-FedAvg" else row[place]

    assert judged(changed("cmp-fed-table-1", worse), start) == PART

    def random(found: dict[str, Any]) -> None:
        for one in found["records"]:
            one["mean"] = 0.1 if one["method"] == "pfa" else one["mean"]
            one["finals"] = None

    assert judged(KEPT, "The gap to FedAvg is smaller") == HOLDS
    assert judged(changed("pfa-figure-3", random), "The gap to FedAvg is smaller") == NOT


def test_a_cell_counts_once_and_only_with_results(changed: Callable[..., Results]) -> None:
    every = counted(KEPT)
    assert all(0 < one.run <= one.cells for one in every.values())
    assert all(one.near <= one.values and one.sound_near <= one.sound_values for one in every.values())

    def without(found: dict[str, Any]) -> None:
        found["records"] = [one for one in found["records"] if one["clients"] != 40]

    fewer = finished(changed("pfa-figure-11", without), "pfa")
    # Figure 8 repeats cells of figures 11 and 12 with 30 clients; with 40 there are eight methods, two forms, two
    # models and two data sets. Networks without noise are those of figure 12.
    assert every["pfa"].run - sum(fewer.values()) == 8 * 2 * 2 * 2 - 2 * 2


def test_a_miss_is_explained_by_an_experiment_or_said_to_be_unexplained(changed: Callable[..., Results]) -> None:
    some = values(KEPT)
    assert all(bool(one.why) is not one.near for one in some)
    explained = {one.why for one in some if one.why and one.why != UNEXPLAINED}
    assert all(re.search(r"\((figure|table) |^chance: ", why) for why in explained)

    def drop(found: dict[str, Any]) -> None:
        found["records"] = []

    without = values(changed("pfa-figure-3-one-rate", drop))
    assert not any("(figure 3-one-rate:" in one.why for one in without)
    assert sum("(figure 3-one-rate:" in one.why for one in some) > 0


def budgets_by_epsilon(made: dict[str, float], epsilon: float, epochs: int) -> list[dict[str, Any]]:
    """Records of figure 2(f) or 2(g) with these accuracies on two folds."""
    labels = {"data": "bank", "model": "svm", "epsilon": epsilon, "epochs": epochs, "rate": "own", "form": "sound"}
    return [{**labels, "method": name, "finals": {"1": mean, "2": mean + 0.01}} for name, mean in made.items()]


@pytest.mark.parametrize(
    ("one_epoch", "two_epochs", "expected", "shown"),
    [
        ({"exp-pm": 0.80, "ps-pm": 0.79}, {"exp-pm": 0.76}, HOLDS, "+6.0 to +10.0 points; 3 of 3 cells"),
        ({"exp-pm": 0.80, "ps-pm": 0.704}, {"exp-pm": 0.66}, PART, "−4.0 to +10.0 points; 1 of 3 cells"),
        ({"exp-pm": 0.70, "ps-pm": 0.704}, {}, NOT, "0.0 to +0.4 points; 0 of 2 cells"),
    ],
)
def test_fedsels_lead_at_every_budget_comes_from_the_records(
    tmp_path: Path, one_epoch: dict[str, float], two_epochs: dict[str, float], expected: str, shown: str
) -> None:
    """Made-up records: a lead of half a point or less is none, and one figure without results does not count."""
    for part, epochs, made in (("2f", 1, one_epoch), ("2g", 2, two_epochs)):
        if made:
            found = {"records": budgets_by_epsilon({"pm": 0.70, **made}, 0.5, epochs)}
            # A method without PM at the same ε is compared with nothing.
            found["records"] += budgets_by_epsilon({"exp-pm": 0.99}, 4.0, epochs)
            (tmp_path / f"fedsel-figure-{part}.json").write_text(json.dumps(found), encoding="utf-8")
    (one,) = (one for one in headlines() if one.claim.startswith("X-PM is above PM at every"))
    outcomes, judged = one.judged(Results(tmp_path))
    assert (judged, outcomes["sound"].text) == (expected, shown)
