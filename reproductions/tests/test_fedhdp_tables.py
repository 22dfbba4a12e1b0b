"""Paper 003's tables, made of results that were never trained."""

from __future__ import annotations

import json
from typing import Any

import pytest
from polyeps_reproductions import fedhdp
from polyeps_reproductions.fedhdp_tables import (
    AUTO,
    MNIST,
    OPEN,
    OURS,
    PAPER,
    PLAIN,
    SKEWED,
    WRITERS,
    Row,
    compared,
    row_of,
)

FINALS: dict[tuple[str, float | str | None], float] = {(OPEN, None): 0.95, (PLAIN, None): 0.88, (OURS, AUTO): 0.92}


def results(part: str, quick: bool = False, seeds: int = 1) -> list[dict[str, Any]]:
    """What the trials of a part might have brought: accuracies by method, a little more for every further seed."""
    found = []
    for trial in fedhdp.trials([part], quick, seeds):
        settings = json.loads(trial.settings)
        method = settings["algorithm"][0]
        final = FINALS.get((method["name"], method.get("ratio")), 0.9) + 0.002 * (trial.seed - 1)
        own = {
            f"{kind} accuracy{what}{group}": 0.02 if what else final
            for kind in ("own", "personal")
            for what in ("", " variance")
            for group in ("", " (private)", " (open)")
        }
        settings["training"] |= {"learning_rate": 0.5, "local_steps": 1}
        name = {"name": trial.name, "seed": trial.seed}
        found.append({"trial": name, "settings": settings, "final": final, "own": own, "spent": 3.589})
    return found


@pytest.mark.parametrize("part", [MNIST, SKEWED, WRITERS])
def test_every_trial_finds_its_row_and_papers_rows_are_all_there(part: str) -> None:
    rows = {row_of(result) for result in results(part)}
    assert len(rows) == len(results(part))
    named = {(row.clients, row.method, row.ratio) for row in rows}
    assert {key for key in PAPER if key[0] == part} <= named


def test_rows_say_what_the_paper_has_and_what_we_have() -> None:
    content = compared(results(MNIST, seeds=3), quick=False)
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
    assert all(ratio > 0 for lines in content.points.values() for points in lines.values() for ratio, _ in points)


def test_one_seed_has_no_spread_and_small_runs_have_no_paper_beside_them() -> None:
    content = compared(results(SKEWED, quick=True), quick=True)
    assert "±" not in str(content.rows) + str(content.findings)
    assert {row[-1] for row in content.rows} == {""}
    assert "In small" in content.findings[0]


def test_all_ratios_share_the_choice_of_auto_and_skewed_controls_are_not_tried_twice() -> None:
    wanted = fedhdp.trials([MNIST, SKEWED], False, 1)
    judged = {(trial.name, trial.judged.name) for trial in wanted if trial.judged is not None}
    assert {by for name, by in judged if "one-digit-fedhdp-0" in name} == {Row(MNIST, OURS, AUTO).name}
    assert (Row(SKEWED, PLAIN, None).name, Row(MNIST, PLAIN, None).name) in judged
    assert all("pull" not in trial.judged.settings for trial in wanted if trial.judged is not None)
