"""The estimate of accuracy: it equals the run where data are public, and reads nothing private where they are not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from support.commands import refused, run, run_json
from support.federations import experiment

from polyeps.data.dataset import Dataset, without_test
from polyeps.data.schema import Column, Schema
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment import estimate as estimating
from polyeps.experiment import run as runs
from polyeps.experiment.estimate import LEARNABLE, estimate
from polyeps.ledger import Ledger


def test_the_estimate_of_a_public_data_set_is_the_run(tmp_path: Path) -> None:
    wanted = experiment(["fedavg", "weiavg", "fedavg (none)"], seeds=[1, 2])
    found = estimate(wanted, seeds=2)
    outcome = runs.run(wanted, tmp_path / "run")
    assert found.source == "public"
    assert found.seeds == (1, 2)
    for row in found.methods:
        last = [outcome.accuracy[row.method, seed][-1] for seed in (1, 2)]
        assert row.accuracy == pytest.approx(np.mean(last), abs=1e-12)
        assert row.deviation == pytest.approx(np.std(last, ddof=1), abs=1e-12)
        free = [outcome.accuracy["fedavg (none)", seed][-1] for seed in (1, 2)]
        assert row.without_privacy == pytest.approx(np.mean(free), abs=1e-12)
        assert row.cost == row.without_privacy - row.accuracy


def own(folder: Path, seed: int = 0, name: str = "own.csv", scale: float = 1.0) -> Path:
    """A table of three clients with two numbers and two labels."""
    rng = np.random.default_rng(seed)
    lines = ["client,a,b,label"]
    for client, count in (("x", 40), ("y", 60), ("z", 80)):
        for _ in range(count):
            a, b = rng.uniform(-1, 1, 2)
            lines.append(f"{client},{scale * a},{scale * b},{int(a + b > 0)}")
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def planned(file: Path, **changes: Any) -> config.Experiment:
    values: dict[str, Any] = {
        "rounds": 3,
        "data": {"file": file},
        "budgets": {"epsilon": 8.0},
        "training": {"batch": 8, "local_steps": 20, "learning_rate": 1.0},
    }
    return config.experiment(values | changes)


def test_private_records_have_no_part_in_an_estimate_on_drawn_ones(tmp_path: Path) -> None:
    one = estimate(planned(own(tmp_path)), seeds=1)
    other = estimate(planned(own(tmp_path, 99, "other.csv", scale=1e6)), seeds=1)
    assert one.source == other.source == "drawn"
    assert one.methods == other.methods  # bit for bit, though every number differs
    (row,) = one.methods
    assert row.majority < 0.65
    assert row.without_privacy > 0.75
    assert "not what your records can teach" in one.worth


def test_budgets_and_numbers_of_records_matter(tmp_path: Path) -> None:
    (loose,) = estimate(planned(own(tmp_path))).methods
    (strict,) = estimate(planned(own(tmp_path), budgets={"epsilon": 0.05})).methods
    assert strict.without_privacy == loose.without_privacy
    assert strict.cost > loose.cost + 0.05


def test_no_ledger_is_left_and_none_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    create = Ledger.open_or_create

    def watched(path: Path, terms: Any) -> Any:
        opened.append(path)
        return create(path, terms)

    monkeypatch.setattr(Ledger, "open_or_create", watched)
    monkeypatch.chdir(tmp_path)
    estimate(planned(own(tmp_path)), seeds=1)
    assert len(opened) == 1
    assert not opened[0].parent.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["own.csv"]


def test_a_stand_in_is_dealt_out_to_the_planned_clients(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    asked = own(tmp_path, 5, "mine.csv")
    found = estimate(planned(own(tmp_path)), stand_in=asked, seeds=2, progress=lambda *one: seen.append(one))
    assert found.source == "file"
    assert found.stand_in == "mine.csv"
    assert "on the records of mine.csv" in found.worth
    assert found.methods[0].without_privacy > 0.85  # what can be learned from it exactly
    assert seen[-1] == (12, 12)
    assert found.methods != estimate(planned(own(tmp_path)), stand_in=own(tmp_path, 6, "m.csv"), seeds=2).methods
    small = tmp_path / "few.csv"
    small.write_text("\n".join(asked.read_text().splitlines()[:41]) + "\n")
    assert estimate(planned(own(tmp_path)), stand_in=small, seeds=1).methods[0].without_privacy > 0.6


def test_a_stand_in_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    narrow, more = tmp_path / "narrow.csv", tmp_path / "more.csv"
    narrow.write_text("client,a,label\n" + "x,0.5,1\nx,0.1,0\n" * 20)
    with pytest.raises(InputError, match=r"records of shape \(1,\), but the experiment's have \(2,\)"):
        estimate(planned(own(tmp_path)), stand_in=narrow)
    more.write_text("client,a,b,label\n" + "x,0.5,0.2,0\nx,0.5,0.2,1\nx,0.5,0.2,2\n" * 20)
    with pytest.raises(InputError, match="the stand-in has 3 labels, but the experiment's records have 2"):
        estimate(planned(own(tmp_path)), stand_in=more)
    with pytest.raises(InputError, match="there is no such file"):
        estimate(planned(own(tmp_path)), stand_in=tmp_path / "none.csv")
    with pytest.raises(InputError, match="at least 1 seed"):
        estimate(planned(own(tmp_path)), seeds=0)


def like(schema: Schema, classes: int) -> Dataset:
    width = len(schema.outputs)
    names = tuple(str(number) for number in range(classes))
    blank = without_test("own:x", np.zeros((1, width), np.float32), np.zeros(1, np.int64), names)
    return replace(blank, schema=schema)


@pytest.mark.parametrize(("classes", "missed"), [(2, 0.02), (4, 0.05)])  # no logistic model: labels are flipped evenly
def test_drawn_records_follow_the_schema_and_are_as_learnable_as_stated(classes: int, missed: float) -> None:
    schema = Schema(
        (Column("age", range=(0, 110), missing="mean-of-range"), Column("sex", categories=("m", "f")),
         *(Column(f"n{number}", range=(0, 1)) for number in range(4)))
    )  # fmt: skip
    drawn = estimating._drawn(like(schema, classes), 20_000, np.random.default_rng(1))
    numbers = drawn.features[:, [0, *range(5, 9)]]
    assert np.abs(numbers).max() <= 1
    assert numbers.std() == pytest.approx(1 / np.sqrt(3), rel=0.02)
    assert (drawn.features[:, 1] == 0).all()  # nothing is missing
    assert np.array_equal(np.unique(drawn.features[:, 2:5], axis=0), [[0, 1, 0], [1, 0, 0]])
    model = LogisticRegression(C=100, max_iter=1000).fit(drawn.features, drawn.labels)
    deviation = np.sqrt(LEARNABLE * (1 - LEARNABLE) / len(drawn.test_labels))
    found = model.score(drawn.test_features, drawn.test_labels)
    assert LEARNABLE - missed - 3 * deviation < found < LEARNABLE + 3 * deviation


def test_the_command_prints_the_estimate_and_what_it_is_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path / "cache"))
    own(tmp_path)
    file = tmp_path / "plan.toml"
    file.write_text('rounds = 2\n[data]\nfile = "own.csv"\n[budgets]\nepsilon = 4.0\n')
    spoken = run("plan", str(file), "--accuracy")
    assert "Estimated test accuracy" in spoken.stdout
    assert "can be told apart in 85% of cases at best" in spoken.stdout
    assert "Estimated" not in run("plan", str(file)).stdout
    shown = run_json("plan", str(file), "--stand-in", str(tmp_path / "own.csv"))
    assert shown["accuracy"]["stand_in"] == "own.csv"
    assert set(shown["accuracy"]["methods"][0]) == {"method", "accuracy", "deviation", "without_privacy", "majority"}
    assert "accuracy" not in run_json("plan", str(file))
    options = ["--batch", "8", "--local-steps", "1", "--rounds", "1", "--budgets", "b.csv"]
    refused("plan", *options, "--accuracy", naming=("name the file",))


def test_a_stand_in_may_hold_persons_and_need_not_name_clients(tmp_path: Path) -> None:
    rows = [line.split(",") for line in own(tmp_path).read_text().splitlines()]
    for name, columns in {"all.csv": range(len(rows[0])), "mine.csv": range(1, len(rows[0]))}.items():
        lines = [[*(row[place] for place in columns), f"p{number // 2}"] for number, row in enumerate(rows)]
        lines[0][-1] = "patient"
        (tmp_path / name).write_text("\n".join(",".join(line) for line in lines) + "\n")
    assert rows[0][0] == "client"
    wanted = planned(tmp_path / "all.csv")
    wanted = wanted.model_copy(update={"data": wanted.data.model_copy(update={"unit": "patient"})})
    found = [estimate(wanted, stand_in=tmp_path / name, seeds=1) for name in ("all.csv", "mine.csv")]
    assert [one.source for one in found] == ["file", "file"]
    assert all(one.methods[0].without_privacy > 0.6 for one in found)
