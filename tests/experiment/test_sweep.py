"""Sweeps: combinations, folders, and runs that are the same as without a sweep."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.outcome import read
from polyeps.experiment.run import run
from polyeps.experiment.sweep import (
    SWEEP,
    Sweep,
    _folders,
    check_runs,
    combinations,
    create_sweep,
    do_run,
    plan_sweep,
    read_sweep,
    run_folders,
)

FILE = """
rounds = 2
[data]
clients = 3
size = 60
[budgets]
epsilon = 2.0
[training]
batch = 6
local_steps = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "wards.toml"
    path.write_text(FILE)
    return path


def test_a_sweep_is_the_product_of_all_values() -> None:
    found = combinations(["a.b=1,2", "c=x", "d=[1,2],[3],[4]"])
    assert found == [{"a.b": b, "d": d} for b, d in product(["1", "2"], ["[1,2]", "[3]", "[4]"])]
    assert combinations(["a=1", "a=2"]) == [{}]  # the later one holds, as before there were sweeps


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["a=1,2", "a=3"], "--set a is given twice"),
        (["a=1,2,1.0,1"], "--set a has the value 1 twice"),
        (["a=0.1,0.10"], "--set a has the value 0.1 twice"),
        ([f"{name}={','.join(map(str, range(11)))}" for name in "abc"], "has 1331 runs, more than 1000"),
    ],
)
def test_what_is_no_sweep_is_refused(changes: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        combinations(changes)


def test_folders_say_what_differs(file: Path) -> None:
    sweep = plan_sweep(file, ["training.learning_rate=0.1,0.3", "training.clip=1,2", "rounds=1"])
    assert [one.folder for one in sweep.runs] == [
        f"learning_rate={rate}, clip={clip}" for rate in ("0.1", "0.3") for clip in ("1", "2")
    ]
    assert [one.experiment.training.learning_rate for one in sweep.runs] == [0.1, 0.1, 0.3, 0.3]
    assert {one.experiment.rounds for one in sweep.runs} == {1}
    assert sweep.name == "wards"
    assert sweep.runs[0].experiment.name == "wards, learning_rate=0.1, clip=1"
    both = plan_sweep(file, ["training.rate=0.1,0.2", "algorithm.name=fedavg", "budgets.epsilon=1,2"]).runs
    assert both[0].folder == "rate=0.1, epsilon=1"


@pytest.mark.parametrize(
    ("change", "folders"),
    [
        ("name=../../x,y", ["name=.._.._x", "name=y"]),
        ("name=a/b,a:b", ["run 1", "run 2"]),  # which would be one folder
        ("name=A,a", ["run 1", "run 2"]),  # and these, on some file systems
        (f"name={'a' * 99},b", ["run 1", "run 2"]),
    ],
)
def test_folders_stay_inside_and_apart(change: str, folders: list[str]) -> None:
    assert _folders(combinations([change])) == folders


def test_keys_of_the_same_name_are_told_apart(file: Path) -> None:
    sweep = plan_sweep(file, ["data.label=a,b", "data.name=digits,usps", "name=x,y"])
    assert sweep.runs[0].folder == "label=a, data.name=digits, name=x"


def test_one_run_is_no_sweep(file: Path) -> None:
    sweep = plan_sweep(file, ['name="a,b"', "training.clip=2"], ["tensorboard"])
    (one,) = sweep.runs
    assert one.experiment == config.read_experiment(file, ['name="a,b"', "training.clip=2"]).model_copy(
        update={"trackers": ("tensorboard",)}
    )
    assert sweep.name == "a,b"


def test_other_readers_refuse_several_values(file: Path) -> None:
    with pytest.raises(InputError, match=r"--set training.clip=1,2: several values are a sweep, for polyeps run alone"):
        config.read_experiment(file, ["training.clip=1,2"])


def test_every_run_is_checked_before_the_first(file: Path) -> None:
    sweep = plan_sweep(file, ["training.batch=6,60,61"])
    with pytest.raises(InputError, match=r"^batch=61: .*61"):
        check_runs(sweep)
    seen: list[tuple[int, int]] = []
    check_runs(plan_sweep(file, ["training.batch=6,60"]), lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2)]


def test_runs_of_a_sweep_equal_single_runs_and_resume(file: Path, tmp_path: Path) -> None:
    sweep = plan_sweep(file, ["training.learning_rate=0.1,0.3"])
    folder = tmp_path / "sweep"
    create_sweep(folder, sweep)
    assert read_sweep(folder) == sweep
    with pytest.raises(InputError, match=r"no run of the sweep in .* has begun"):
        run_folders([folder])
    do_run(folder, sweep.runs[1], None)
    assert run_folders([folder, tmp_path]) == [folder / "learning_rate=0.3", tmp_path]
    again = read_sweep(folder)
    assert again
    for one in again.runs:  # one of them is done
        do_run(folder, one, None)
    for rate in (0.1, 0.3):
        alone = run(config.read_experiment(file, [f"training.learning_rate={rate}"]), tmp_path / f"alone {rate}")
        found = read(folder / f"learning_rate={rate}")
        assert torch.equal(found.models["fedavg", 1], alone.models["fedavg", 1])
        assert found.spent == alone.spent
    with pytest.raises(InputError, match="holds a run already"):
        create_sweep(folder, sweep)
    with pytest.raises(InputError, match="holds a run already"):
        create_sweep(folder / "learning_rate=0.1", sweep)
    (folder / SWEEP).unlink()
    with pytest.raises(InputError, match=r"holds a run already \(learning_rate=0.1\)"):
        create_sweep(folder, sweep)  # whose runs would be continued with other settings


@pytest.mark.parametrize("content", ["", "{", "[]", '{"runs": []}', '{"name": "x", "code": null, "runs": [{}]}'])
def test_a_damaged_list_of_runs_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / SWEEP).write_text(content)
    with pytest.raises(InputError, match=r"sweep.json cannot be read"):
        read_sweep(tmp_path)


@pytest.mark.parametrize("folder", ["../other", "/tmp/x", "..", ".", ""])
def test_a_list_of_runs_cannot_lead_elsewhere(folder: str, file: Path, tmp_path: Path) -> None:
    sweep = plan_sweep(file, ["training.clip=1,2"])
    create_sweep(tmp_path / "sweep", sweep)
    path = tmp_path / "sweep" / SWEEP
    content = json.loads(path.read_text())
    content["runs"][0]["folder"] = folder
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="not inside the sweep's"):
        read_sweep(tmp_path / "sweep")


def test_code_is_not_trusted_by_a_file(file: Path, tmp_path: Path) -> None:
    sweep = plan_sweep(file, ["training.clip=1,2"], code_folder=tmp_path)
    create_sweep(tmp_path / "sweep", sweep)
    found = read_sweep(tmp_path / "sweep")
    assert isinstance(found, Sweep)
    assert found.code_folder == tmp_path.absolute()  # which only --trust-code makes use of


@pytest.mark.parametrize(("disclosed", "shown"), [("true", "wards, epsilon=1.125"), ("false", "wards, run 1")])
def test_names_do_not_tell_budgets_that_are_not_disclosed(disclosed: str, shown: str, file: Path) -> None:
    changes = ["budgets.epsilon=1.125,2", f"budgets.disclosed={disclosed}", "algorithm=fedavg"]
    assert plan_sweep(file, changes).runs[0].experiment.name == shown
