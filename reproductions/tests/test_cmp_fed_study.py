"""Paper 004's study: the paper's settings, what methods send, and the arithmetic of its tables."""

from __future__ import annotations

from typing import Any

import pytest
from polyeps_reproductions import cmp_fed as study
from polyeps_reproductions.cmp_fed import METHODS, PARTS, PUBLISHED, RANKS, cells, choice, settings
from polyeps_reproductions.cmp_fed_tables import accuracies, by_epsilon, by_uplink, paper

from polyeps.aggregation.low_rank import low_rank
from polyeps.experiment.config import experiment
from polyeps.methods import certify, cmp_fed
from polyeps.models import mcmahan_cnn


def fake(label: str, rank: int, final: float, *, seed: int = 1, partition: str = "iid", **told: Any) -> dict[str, Any]:
    """What a training might have left: accuracy rises evenly to its final value in 180 rounds."""
    curve = {str(number): final * number / 180 for number in range(20, 181, 20)}
    return {
        "settings": {
            "algorithm": [{"label": label, "rank": rank}],
            "data": {"partition": partition},
            "training": {"learning_rate": 0.05, "clip": 1.0},
            "participation": {"share": 1 / 60},
            "budgets": {"delta": 1e-4},
        },
        "trial": {"seed": seed},
        "final": final,
        "accuracy": curve,
        "spent": 0.9999,
        "scales": [1.0701],
        "rounds": 180,
        "up": 180 * 2_000_000,
        **told,
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
    told = values["algorithm"]
    assert (told["rate_decay"], told["clip_subspace"], told["clip_embedding"], told["split"]) == (0.99, 0.01, 1.0, 0.5)
    assert settings(PUBLISHED, "labels", 16)["data"]["labels_per_client"] == 5


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
@pytest.mark.parametrize("quick", [True, False])
def test_every_method_is_an_experiment(method: study.Method, quick: bool) -> None:
    (read,) = experiment(settings(method, "labels", 4, quick)).algorithm
    assert read.name == method.name
    assert read.options["rank"] == (4 if method.compressed else 0)


def test_ranks_send_what_the_paper_counts() -> None:
    sent = [low_rank(mcmahan_cnn().slices, rank, whole=PUBLISHED.options["whole"]).uplink for rank in RANKS]
    assert sent == [5709, 10_800, 20_982, 41_346, 78_942]


def test_published_noise_is_what_its_account_asks_for() -> None:
    folded = {study.COMPOSED: 1.6760, study.ONE_RELEASE: 1.1850}
    for scale, sigma in folded.items():
        assert scale * 2**0.5 == pytest.approx(sigma, rel=3e-4)
    method = cmp_fed(clients=6000, cohort=100, rounds=180)
    assert certify(method, study.COMPOSED * 2**0.5, 1e-4, "rdp").certified == pytest.approx(1.0, rel=1e-3)
    true = certify(method, study.ONE_RELEASE * 2**0.5, 1e-4).certified
    assert 1.8 < true <= study.UNDERSTATED.budgets["epsilon"]  # what its ledgers are opened with


def test_the_quick_set_is_small() -> None:
    wanted = {cell for part in PARTS for cell in part.trials(True)}
    assert {cell.rank for cell in wanted} == {0, 1, 4}
    assert len(wanted) == 2 * (sum(2 if method.compressed else 1 for method in study.QUICK_METHODS))
    values = settings(METHODS[0], "iid", 1, quick=True)
    assert (values["data"]["clients"], values["rounds"], values["model"]["name"]) == (300, 20, "mlp")
    assert [part.name for part in PARTS] == [
        "cmp-fed-figure-1",
        "cmp-fed-figure-2",
        "cmp-fed-table-1",
        "cmp-fed-table-2",
    ]
    assert len(cells("iid", False)) == 5 * 5 + 6  # five methods at all ranks, three at the largest, three without


def test_forms_of_one_method_take_its_choice_and_tuned_ones_their_own() -> None:
    assert choice(PUBLISHED) == choice(study.UNDERSTATED) == choice(study.CMP_FED)
    assert len(choice(study.DP_FEDAVG).candidates) == 2
    assert len(choice(study.DP_FEDAVG_TUNED).candidates) == len(choice(study.MODEL).candidates) == 5


# Tables


def test_accuracies_stand_beside_the_papers() -> None:
    runs = [
        fake("CMP-Fed", 16, 0.78, seed=1),
        fake("CMP-Fed", 16, 0.80, seed=2),
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
    more = accuracies([*runs, fake("DP-FedAvg", 0, 0.77, seed=2)], False).findings
    assert more[0] == "CMP-Fed, at rank 16, is +2.50 ± 0.50 points from DP-FedAvg"


def test_the_papers_figures_are_found_by_name_and_rank() -> None:
    assert paper("labels", "UV-Fed", 8) == "84.68"
    assert paper("labels", "FedAvg", 0) == "86.49"
    assert paper("iid", "CMP-Fed", 3) == paper("iid", "nobody", 1) == "–"


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
    assert content.points["at random"]["DP-RandAgg"][0] == pytest.approx((80.0, 10.0))


def test_accuracy_by_epsilon_ends_at_the_budget() -> None:
    content = by_epsilon([fake("CMP-Fed", 16, 0.8), fake("CMP-Fed", 16, 0.7, seed=2, partition="labels")], False)
    spent = [float(row[3]) for row in content.rows if row[0] == "at random"]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(1.0, abs=1e-3)
    assert content.rows[-1] == ["five labels each", 16, 180, "1.000", "70.00"]
