"""CMP-Fed's study: the paper's settings, the uplink of its methods, and the arithmetic of its tables."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

import dp_accounting as dp
import pytest
from polyeps_reproductions import cmp_fed as study
from polyeps_reproductions.cmp_fed import METHODS, PARTS, PUBLISHED, RANKS, cell, cells, settings
from polyeps_reproductions.cmp_fed_noise import poisson, true_epsilon
from polyeps_reproductions.cmp_fed_tables import accuracies, by_epsilon, by_uplink, paper

from polyeps.accounting import epsilon
from polyeps.aggregation.low_rank import low_rank
from polyeps.experiment.config import experiment
from polyeps.models import mcmahan_cnn


def fake(label: str, rank: int, *finals: float, partition: str = "iid", **others: Any) -> dict[str, Any]:
    """A record as seeds might have left it: accuracy rises evenly to its final value in 180 rounds."""
    seeds = {str(seed): final for seed, final in enumerate(finals, 1)}
    return {
        "partition": partition,
        "method": label,
        "rank": rank,
        "share": 1 / 60,
        "delta": 1e-4,
        "paper": paper(partition, label, rank),
        "mean": fmean(finals),
        "deviation": stdev(finals) if len(finals) > 1 else 0.0,
        "count": len(finals),
        "finals": seeds,
        "curves": {seed: {str(n): final * n / 180 for n in range(20, 181, 20)} for seed, final in seeds.items()},
        "learning_rate": 0.05,
        "clip": 1.0,
        "spent": 0.9999,
        "noise_multipliers": [1.0701],
        "rounds": 180,
        "up": 180 * 2_000_000,
        **others,
    }


# Settings


def test_the_full_setting_is_the_papers() -> None:
    values = settings(PUBLISHED, "iid", 16)
    assert values["rounds"] == 180
    assert values["data"] == {"name": "fashion-mnist", "clients": 6000, "size": 10}
    assert values["training"] == {"batch": 10, "local_steps": 10, "learning_rate": 0.1, "momentum": 0.5, "clip": 1.0}
    assert values["participation"] == {"kind": "poisson", "share": 100 / 6000}
    assert values["model"] == {"name": "mcmahan_cnn"}
    assert (values["budgets"]["epsilon"], values["budgets"]["delta"]) == (1.0, 1e-4)
    used = values["algorithm"]
    assert (used["rate_decay"], used["clip_subspace"], used["clip_embedding"], used["split"]) == (0.99, 0.01, 1.0, 0.5)
    assert settings(PUBLISHED, "labels", 16)["data"]["labels_per_client"] == 5


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
@pytest.mark.parametrize("quick", [True, False])
def test_every_method_is_an_experiment(method: study.Method, quick: bool) -> None:
    (read,) = experiment(settings(method, "labels", 4, quick)).algorithm
    assert read.label == method.label
    assert read.options["rank"] == (0 if method.ranks == study.NONE else 4)


def test_ranks_send_what_the_paper_counts() -> None:
    sent = [low_rank(mcmahan_cnn().slices, rank, whole=PUBLISHED.options["whole"]).uplink for rank in RANKS]
    assert sent == [5709, 10_800, 20_982, 41_346, 78_942]


def test_published_noise_is_what_its_account_asks_for() -> None:
    folded = {study.COMPOSED: 1.6760, study.ONE_RELEASE: 1.1850}
    for scale, sigma in folded.items():
        assert scale * 2**0.5 == pytest.approx(sigma, rel=3e-4)
    composed = dp.SelfComposedDpEvent(poisson(study.COMPOSED * 2**0.5), 180)
    assert epsilon(composed, 1e-4, accountant="rdp") == pytest.approx(1.0, rel=1e-3)
    true = true_epsilon(poisson, study.ONE_RELEASE * 2**0.5)
    assert 1.8 < true <= study.UNDERSTATED.budgets["epsilon"]  # what its ledgers are opened with


def test_the_quick_set_is_small() -> None:
    wanted = {one.trial: one.labels["rank"] for part in PARTS for one in part.cells(True)}
    assert set(wanted.values()) == {0, 1, 4}
    assert len(wanted) == 2 * sum(1 if method.ranks == study.NONE else 2 for method in study.QUICK_METHODS)
    values = settings(METHODS[0], "iid", 1, quick=True)
    assert (values["data"]["clients"], values["rounds"], values["model"]["name"]) == (300, 20, "mlp")
    tables = ("1", "2", "accounts", "dropouts", "bits", "integers")
    assert [part.name for part in PARTS] == ["figure-1", "figure-2", *(f"table-{name}" for name in tables)]
    assert (
        len(cells(["iid"], METHODS, False)) == 5 * 5 + 6
    )  # five methods at all ranks, three at the largest, three without


def test_forms_of_one_method_take_its_choice_and_tuned_ones_their_own() -> None:
    chosen = {one.label: cell(one, "labels", one.ranks[-1], False).trial.choice for one in METHODS}
    assert chosen[PUBLISHED.label] == chosen[study.UNDERSTATED.label] == chosen[study.CMP_FED.label]
    counts = {label: len(choice.candidates) for label, choice in chosen.items() if choice is not None}
    assert counts[study.DP_FEDAVG.label] == 2
    assert counts[study.DP_FEDAVG_TUNED.label] == counts[study.MODEL.label] == 5
    assert cell(study.CMP_FED, "iid", 1, True).trial.choice is None


# Tables


def test_accuracies_stand_beside_the_papers() -> None:
    runs = [
        fake("CMP-Fed", 16, 0.78, 0.80),
        fake("CMP-Fed, published", 16, 0.77),
        fake("DP-FedAvg", 0, 0.76),
        fake("DP-RandAgg", 16, 0.74, spent=None),
        fake("CMP-Fed", 4, 0.70),
    ]
    content = accuracies(runs, False)
    rows = {(row[0], row[1]): dict(zip(content.columns, row, strict=True)) for row in content.rows}
    assert rows["CMP-Fed", 16]["accuracy %"] == "79.00 ± 1.41"
    assert (rows["CMP-Fed", 16]["paper"], rows["CMP-Fed, published", 16]["paper"]) == ("78.87", "78.87")
    assert rows["DP-FedAvg", "–"]["paper"] == "77.65"
    assert rows["CMP-Fed", 16]["certified ε"] == "1"
    assert rows["DP-RandAgg", 16]["certified ε"] == "–"
    assert rows["CMP-Fed", 16]["uplink MB a round"] == "2.00"
    assert content.findings == [
        "CMP-Fed, at rank 16, is +2.00 points from DP-FedAvg",
        "CMP-Fed, at rank 16, is +4.00 points from DP-RandAgg",
    ]
    runs[2] = fake("DP-FedAvg", 0, 0.76, 0.77)
    more = accuracies(runs, False).findings
    assert more[0] == "CMP-Fed, at rank 16, is +2.50 ± 0.50 points from DP-FedAvg"


def test_the_papers_figures_are_found_by_name_and_rank() -> None:
    assert paper("labels", "UV-Fed", 8) == "84.68"
    assert paper("labels", "FedAvg", 0) == "86.49"
    assert paper("iid", "CMP-Fed", 3) is paper("iid", "nobody", 1) is None


def test_uplink_until_the_target() -> None:
    runs = [
        fake("CMP-Fed", 16, 0.80),  # reaches 0.74 after 180 of 180 rounds: 160/180 · 0.8 is 0.711
        fake("CMP-Fed", 4, 0.90),  # not the largest rank
        fake("DP-RandAgg", 16, 0.90, up=180 * 4_000_000),  # after 160 rounds
        fake("DP-FedAvg", 0, 0.70),
    ]
    content = by_uplink(runs, False)
    rows = {row[1]: row for row in content.rows}
    assert set(rows) == {"CMP-Fed", "DP-RandAgg", "DP-FedAvg"}
    assert rows["CMP-Fed"][3:] == ["360.0", "–", "–", "–"]
    assert rows["DP-RandAgg"][3:] == ["640.0", "44", "–", 69]
    assert rows["DP-FedAvg"][3:] == ["not reached", "–", "–", 90]
    ours = fake("CMP-Fed, directions from the model", 16, 0.80, up=180 * 1_000_000)
    assert by_uplink([*runs, ours], False).rows[1][3:] == ["640.0", "44", "72", 69]
    (drawn,) = content.panels
    (series,) = (one for one in drawn["series"] if one["name"] == "DP-RandAgg")
    assert (drawn["title"], series["x"][0], series["y"][0]) == ("at random", pytest.approx(80.0), pytest.approx(10.0))
    assert len(series["error"]) == len(series["x"])


def test_accuracy_by_epsilon_ends_at_the_budget() -> None:
    content = by_epsilon([fake("CMP-Fed", 16, 0.8), fake("CMP-Fed", 16, 0.7, partition="labels")], False)
    spent = [float(row[3]) for row in content.rows if row[0] == "at random"]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(1.0, abs=1e-3)
    assert content.rows[-1] == ["five labels each", 16, 180, "1.000", "70.00"]
