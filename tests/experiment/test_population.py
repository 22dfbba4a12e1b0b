"""Clients with their records, budgets and model: drawn from one seed, or refused in a sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.federations import EPSILONS, experiment, guaranteed

from polyeps.data.dataset import Dataset
from polyeps.data.imdb import FIRST_WORD
from polyeps.errors import InputError
from polyeps.experiment.evaluation import measure
from polyeps.experiment.population import populate


def own_file(path: Path, clients: dict[str, int]) -> Path:
    """Records of two features whose sign tells the label."""
    chance = np.random.default_rng(3)
    lines = ["client,a,b,label"]
    for client, count in clients.items():
        for label in chance.integers(0, 2, count):
            a, b = chance.normal(4 * label - 2, 1, 2)
            lines.append(f"{client},{a:.4f},{b:.4f},{'yes' if label else 'no'}")
    path.write_text("\n".join(lines))
    return path


def test_one_seed_draws_one_population() -> None:
    one, same, other = (populate(experiment(), seed) for seed in (1, 1, 2))
    assert one.ids == ("0", "1", "2", "3", "4", "5")
    assert [budget.epsilon for budget in guaranteed(one.budgets)] == list(EPSILONS)
    assert torch.equal(one.records.features, same.records.features)
    assert not torch.equal(one.records.features, other.records.features)


def test_drawing_budgets_does_not_move_records() -> None:
    drawn = experiment(budgets={"epsilons": None, "distribution": "mixgauss1"})
    assert torch.equal(populate(drawn, 1).records.features, populate(experiment(), 1).records.features)
    assert populate(drawn, 1).budgets != populate(drawn, 2).budgets


def test_as_many_clients_as_budgets_when_no_number_is_given(tmp_path: Path) -> None:
    assert len(populate(experiment(data={"clients": None, "size": None}), 1).ids) == len(EPSILONS)
    (tmp_path / "b.csv").write_text("client,epsilon\n" + "".join(f"{place},1\n" for place in range(4)))
    from_file = experiment(data={"clients": None}, budgets={"epsilons": None, "file": tmp_path / "b.csv"})
    assert len(populate(from_file, 1).ids) == 4


def test_own_tables_with_named_clients_and_their_own_deltas(tmp_path: Path) -> None:
    file = own_file(tmp_path / "own.csv", {"ward": 80, "lab": 50})
    (tmp_path / "b.csv").write_text("client,epsilon,delta\nlab,2,1e-4\nward,1,\n")
    wanted = experiment(
        data={"file": file, "clients": None, "size": None, "test_share": 0.25},
        budgets={"epsilons": None, "file": tmp_path / "b.csv"},
    )
    population = populate(wanted, 1)
    assert set(population.ids) == {"lab", "ward"}
    held = dict(zip(population.ids, guaranteed(population.budgets), strict=True))
    assert (held["lab"].epsilon, held["lab"].delta, held["ward"].delta) == (2.0, 1e-4, 1e-3)
    sizes = dict(zip(population.ids, population.partition.sizes.tolist(), strict=True))
    assert sizes == {"lab": 50 - round(0.25 * 50), "ward": 80 - round(0.25 * 80)}
    (tmp_path / "b.csv").write_text("client,epsilon\nlab,2\nwarf,1\nward,1\n")
    with pytest.raises(InputError, match=r"b.csv names 'warf', but no client has that name"):
        populate(wanted, 1)
    assert population.model.size == 2 * 2 + 2
    assert population.dataset.classes == ("no", "yes")


def test_validation_judges_on_training_records_alone() -> None:
    tested, validated = populate(experiment(), 1), populate(experiment(data={"validation": 0.2}), 1)
    training = {row.tobytes() for row in tested.dataset.features}
    assert len(validated.test[1]) == round(0.2 * len(tested.dataset.labels))
    assert all(row.tobytes() in training for row in validated.dataset.test_features)
    assert len(validated.dataset.labels) + len(validated.test[1]) == len(tested.dataset.labels)


def test_a_model_is_judged_on_every_test_record(monkeypatch: pytest.MonkeyPatch) -> None:
    population = populate(experiment(), 1)
    vector = torch.randn(population.model.size, generator=torch.Generator().manual_seed(1))
    outputs = population.model.outputs(vector, population.test[0])
    whole = measure(population, vector)
    assert whole["accuracy"] == pytest.approx(float((outputs.argmax(-1) == population.test[1]).double().mean()))
    monkeypatch.setattr("polyeps.experiment.evaluation.EVALUATED_AT_ONCE", 7)
    assert measure(population, vector) == pytest.approx(whole)


def test_an_lstm_fits_the_texts_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tuple(f"word-{number}" for number in range(7))
    texts = np.random.default_rng(1).integers(0, FIRST_WORD + len(words), (60, 12))
    labels = np.arange(60) % 2
    made = Dataset("short", texts, labels, texts[:10], labels[:10], ("bad", "good"), words=words)
    monkeypatch.setattr("polyeps.experiment.population._loaded", lambda *_: made)
    population = populate(experiment(data={"size": 10}, model={"name": "lstm"}), 1)
    assert population.model.input_shape == (12,)
    assert 0 <= measure(population, population.start)["accuracy"] <= 1
    with pytest.raises(InputError, match="logistic takes numbers, but the records of short are words; choose lstm"):
        populate(experiment(data={"size": 10}), 1)


def test_synthetic_records_are_made_from_the_seed() -> None:
    one, again, other = (populate(experiment(data={"name": "syn-l"}), seed).dataset for seed in (1, 1, 2))
    assert np.array_equal(one.features, again.features)
    assert not np.array_equal(one.features, other.features)
    assert (len(one.labels), len(one.test_labels)) == (48_000, 12_000)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"name": "cnn"}}, ("model.name: cnn takes records of shape", "choose logistic or mlp")),
        ({"model": {"name": "lstm"}}, ("lstm reads words, but digits has none", "choose logistic or mlp, or imdb")),
        ({"model": {"name": "mpl"}}, ("there is no model 'mpl'", "did you mean 'mlp'?")),
        ({"data": {"name": "mnist"}}, ("mnist is not here", "polyeps data fetch mnist")),
        ({"data": {"name": "mnits"}}, ("no data set 'mnits'", "did you mean 'mnist'?")),
        ({"data": {"partition": "iidd"}}, ("no partition 'iidd'", "did you mean 'iid'?")),
        ({"data": {"clients": 5}}, ("budgets.epsilons names 6 budgets for 5 clients", "one for each")),
        ({"data": {"file": "absent.csv"}}, ("absent.csv does not exist",)),
        ({"budgets": {"epsilons": None}}, ("exactly one of distribution, file, epsilons, epsilon and levels",)),
        (
            {"budgets": {"distribution": "mixgauss1"}},
            ("exactly one of distribution, file, epsilons, epsilon and levels",),
        ),
        ({"budgets": {"epsilons": (1, 1, 1, 0, 1, 1)}}, ("client '3'", "epsilon must be a finite number above 0")),
        ({"budgets": {"epsilons": (1, 1, 1, 1, 1, float("inf"))}}, ("budgets.epsilons.5", "finite")),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any], said: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POLYEPS_DATA", raising=False)
    with pytest.raises(InputError) as refusal:
        populate(experiment(**changes), 1)
    for part in said:
        assert part in str(refusal.value)


def test_a_client_without_a_line_in_the_budgets_file(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("client,epsilon\n0,1\n1,1\n3,1\n4,1\n5,1\n")
    with pytest.raises(InputError, match=r"client '2' has no budget in .*b.csv; add a line for it"):
        populate(experiment(budgets={"epsilons": None, "file": tmp_path / "b.csv"}), 1)
