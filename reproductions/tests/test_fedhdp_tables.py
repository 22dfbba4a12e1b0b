"""FedHDP's tables, made of results that were never trained."""

from __future__ import annotations

import json
from typing import Any

import dp_accounting as dp
import pytest
from polyeps_reproductions.fedhdp import AS_NOISY, COHORT, EPSILONS, cells, less_noise, own_rate, table_one
from polyeps_reproductions.fedhdp_tables import AUTO, MNIST, OPEN, OURS, PAPER, PLAIN, SKEWED, WRITERS, compared
from polyeps_reproductions.studies import record

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian, Poisson

FINALS: dict[tuple[str, float | str | None], float] = {(OPEN, None): 0.95, (PLAIN, None): 0.88, (OURS, AUTO): 0.92}


def records(part: str, quick: bool = False, seeds: int = 1) -> list[dict[str, Any]]:
    """The records of a part as trials might have left them: a little more accuracy for every further seed."""
    found = []
    for cell in cells(part, quick):
        results = []
        for seed in range(1, seeds + 1):
            final = FINALS.get((cell.labels["method"], cell.labels["ratio"]), 0.9) + 0.002 * (seed - 1)
            own = {
                f"{kind} accuracy{what}{group}": 0.02 if what else final
                for kind in ("own", "personal")
                for what in ("", " variance")
                for group in ("", " (private)", " (open)")
            }
            settings = {"training": {"learning_rate": 0.5, "local_steps": 1}}
            measured = {"spent": 3.589, "accuracy": {}, "clients": 2000}
            results.append({"seed": seed, "settings": settings, "version": "0", "final": final, "own": own, **measured})
        found.append(record(cell, results))
    return found


@pytest.mark.parametrize("part", [MNIST, SKEWED, WRITERS])
def test_the_papers_rows_are_all_there(part: str) -> None:
    found = {(one["clients"], one["method"], one["ratio"]): one["paper"] for one in records(part)}
    assert len(found) == len(records(part))
    assert {key: value for key, value in PAPER.items() if key[0] == part}.items() <= found.items()


def test_rows_show_the_papers_numbers_and_ours() -> None:
    content = compared(records(MNIST, seeds=3), quick=False)
    rows = {(row[2], row[1]): dict(zip(content.columns, row, strict=True)) for row in content.rows}
    auto, plain, nobody = rows[OURS, AUTO], rows[PLAIN, ""], rows[OPEN, ""]
    assert auto["Acc_g"] == "92.20 ± 0.20"
    assert auto["Acc_g,p"] == "92.20 ± 0.20 (2.00)"
    assert auto["Δ_g"] == "0.00 ± 0.00"
    assert plain["Acc_g,np"] == plain["Δ_g"] == nobody["Acc_g,p"] == "–"
    assert plain[content.columns[-1]] == PAPER[MNIST, PLAIN, None]
    assert rows[OURS, 0.01][content.columns[-1]] == PAPER[MNIST, OURS, 0.01]
    assert "has +4.00 ± 0.00 points over dp-fedavg" in content.findings[0]
    assert "at most 3.589" in content.findings[1]
    drawn = [series for panel in content.panels for series in panel["series"]]
    assert all(at > 0 for series in drawn for at in series["x"])
    assert all(abs(error - 0.2) < 1e-9 for series in drawn for error in series["error"])  # points, over three seeds


def test_one_seed_has_no_spread_and_quick_runs_have_no_paper_beside_them() -> None:
    content = compared(records(SKEWED, quick=True), quick=True)
    assert "±" not in str(content.rows) + str(content.findings)
    assert {row[-1] for row in content.rows} == {""}
    assert content.findings[0].startswith("Quick")


def test_ratios_but_one_share_the_choice_of_auto_and_skewed_controls_are_not_tried_twice() -> None:
    choices = {
        (one.labels["clients"], one.labels["method"], one.labels["ratio"]): one.trial for one in table_one(False)
    }
    assert {choices[MNIST, OURS, ratio].choices() for ratio in (AUTO, 0.0, 0.9)} == {
        choices[MNIST, OURS, 0.1].choices()
    }
    assert choices[MNIST, OURS, 1.0].choices() == choices[MNIST, PLAIN, None].choices()
    assert choices[SKEWED, OURS, 1.0].choices() == choices[MNIST, PLAIN, None].choices()
    assert choices[SKEWED, PLAIN, None].choices() == choices[MNIST, PLAIN, None].choices()
    assert choices[SKEWED, OURS, AUTO].choices() != choices[MNIST, OURS, AUTO].choices()
    for trial in choices.values():
        tried = json.loads(trial.choices()[0].settings)["algorithm"]
        assert "pull" not in tried
        assert tried["personal"] is False


def test_pulls_are_the_papers() -> None:
    rows = {
        (one.labels["method"], one.labels["ratio"]): json.loads(one.trial.settings) for one in cells(WRITERS, False)
    }
    pulls = {key: values["algorithm"]["pull"] for key, values in rows.items()}
    assert pulls[OURS, 0.01] == pulls[OURS, AUTO] == {"open": 0.005, "private": 0.05}
    assert pulls[OURS, 1.0] == 0.005
    assert pulls[PLAIN, None] == pulls[OPEN, None] == 0.05


def test_writers_with_equal_weights_take_the_rate_of_dp_fedavg() -> None:
    (one,) = own_rate(False)
    assert (one.labels["method"], one.labels["ratio"]) == (OURS, 1.0)
    assert one.trial.recorded == '{"training.learning_rate": 0.005, "training.local_steps": 5}'


def test_a_negative_gain_of_opting_out_is_said() -> None:
    found = records(WRITERS)
    for one in found:
        for run in one["own"].values():
            run["personal accuracy (open)"] -= 0.01 if one["ratio"] in (AUTO, 1.0) else 0.0
    assert compared(found, quick=False).findings[0].endswith("private clients', at r = auto, 1.0")


def test_writers_with_less_noise_have_that_of_the_papers_clients() -> None:
    def spent(clients: int, noise_multiplier: float) -> float:
        round = Poisson(COHORT / clients, Gaussian(noise_multiplier))
        return epsilon(dp.SelfComposedDpEvent(round, 500), 1e-4)

    assert spent(3383, 3.455) == pytest.approx(EPSILONS[WRITERS], rel=0.01)
    assert spent(539, 3.455) == pytest.approx(AS_NOISY, rel=0.01)
    some = less_noise(False)
    assert [(one.labels["method"], one.labels["ratio"]) for one in some] == [(PLAIN, None), (OURS, 1.0)]
    assert {one.trial.recorded for one in some} == {'{"training.learning_rate": 0.02, "training.local_steps": 5}'}
    assert {json.loads(one.trial.settings)["budgets"]["levels"][0]["epsilon"] for one in some} == {AS_NOISY}
