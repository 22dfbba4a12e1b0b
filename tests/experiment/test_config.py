"""Experiments read from TOML and Python, changed on the command line, and refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyeps.errors import InputError
from polyeps.experiment import config

FILE = """
rounds = 7
seeds = [4, 2]

[data]
clients = 6

[budgets]
distribution = "mixgauss1"

[training]
clip = 0.5

[[algorithm]]
name = "fedavg"

[[algorithm]]
name = "pfa"
label = "pfa, rank 2"
rank = 2
training = { learning_rate = 0.3 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "wards.toml"
    path.write_text(FILE)
    return path


def test_a_file_says_everything(file: Path) -> None:
    wanted = config.read_experiment(file)
    assert (wanted.name, wanted.rounds, wanted.seeds, wanted.data.clients) == ("wards", 7, (4, 2), 6)
    assert [method.title for method in wanted.algorithm] == ["fedavg", "pfa, rank 2"]
    assert wanted.algorithm[1].options == {"rank": 2}
    assert wanted.training_of(wanted.algorithm[0]).learning_rate == 0.1
    own = wanted.training_of(wanted.algorithm[1])
    assert (own.learning_rate, own.clip) == (0.3, 0.5)  # what it does not change is shared


def test_a_name_in_the_file_wins_over_the_name_of_the_file(file: Path) -> None:
    file.write_text('name = "other"' + FILE)
    assert config.read_experiment(file).name == "other"


@pytest.mark.parametrize("algorithm", ["pfa", ["pfa"], {"name": "pfa"}, [{"name": "pfa"}]])
def test_algorithms_may_be_named_or_described(algorithm: Any) -> None:
    (method,) = config.experiment({"algorithm": algorithm}).algorithm
    assert (method.name, method.title, method.form) == ("pfa", "pfa", "sound")


def test_a_published_form_bears_it_in_its_title() -> None:
    methods = [{"name": "fedavg"}, {"name": "fedavg", "form": "published"}]
    assert [m.title for m in config.experiment({"algorithm": methods}).algorithm] == ["fedavg", "fedavg (published)"]


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ({"name": "fedavg", "budgets": "own"}, "fedavg"),
        ({"name": "fedavg", "budgets": "minimum"}, "fedavg (minimum)"),
        ({"name": "fedavg", "budgets": "minimum", "form": "published"}, "fedavg (minimum, published)"),
        ({"name": "my_module:trimmed_mean", "budgets": "none"}, "trimmed_mean (none)"),
        ({"name": "fedavg", "budgets": "minimum", "label": "strict"}, "strict"),
    ],
)
def test_a_title_says_whose_budgets_are_spent(method: dict[str, Any], title: str) -> None:
    assert config.experiment({"algorithm": method}).algorithm[0].title == title


def test_changes_reach_tables_and_every_algorithm(file: Path) -> None:
    changes = ["training.clip=2", "model.name=mlp", "model.hidden=[8, 8]", "algorithm.training.batch=3", "name=x"]
    wanted = config.read_experiment(file, [*changes, "budgets.disclosed = false", "algorithm.form=published"])
    assert (wanted.training.clip, wanted.model.name, wanted.model.hidden, wanted.name) == (2.0, "mlp", (8, 8), "x")
    assert wanted.budgets.disclosed is False
    assert [wanted.training_of(method).batch for method in wanted.algorithm] == [3, 3]
    assert [wanted.training_of(method).learning_rate for method in wanted.algorithm] == [0.1, 0.3]
    assert {method.form for method in wanted.algorithm} == {"published"}


@pytest.mark.parametrize("given", ['"fedavg"', '["fedavg", "weiavg"]'])
def test_changes_reach_algorithms_that_are_given_by_name(tmp_path: Path, given: str) -> None:
    (tmp_path / "e.toml").write_text(f"algorithm = {given}\n[budgets]\nepsilon = 1.0\n")
    wanted = config.read_experiment(tmp_path / "e.toml", ["algorithm.budgets=minimum"])
    assert {method.budgets for method in wanted.algorithm} == {"minimum"}


def test_a_later_change_wins(file: Path) -> None:
    assert config.read_experiment(file, ["rounds=3", "rounds=4"]).rounds == 4


def test_a_number_of_seeds_counts_from_one() -> None:
    assert config.experiment({"seeds": 3}).seeds == (1, 2, 3)


def test_paths_are_beside_the_file_wherever_one_stands(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[data]\nfile = "own.csv"\n[budgets]\nfile = "/elsewhere/b.csv"\n')
    monkeypatch.chdir(file.parent)
    wanted = config.read_experiment(Path(file.name))
    assert wanted.data.file == file.parent / "own.csv"
    assert wanted.budgets.file == Path("/elsewhere/b.csv")


def test_what_json_holds_is_the_same_experiment(file: Path) -> None:
    wanted = config.read_experiment(file, ["budgets.file=b.csv"])
    assert config.experiment(json.loads(json.dumps(wanted.as_dict()))) == wanted
    assert "label" not in wanted.as_dict()["algorithm"][0]  # what was not said is not kept


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"round": 3}, "there is no setting 'round'; did you mean 'rounds'?"),
        ({"training": {"batch_size": 3}}, "there is no setting 'training.batch_size'; did you mean 'batch'?"),
        (
            {"model": {"zzz": 3}},
            "there is no setting 'model.zzz'; known are encoder,",
        ),
        ({"rounds": 1.5}, "rounds: input should be a valid integer"),
        ({"rounds": 0}, "rounds: input should be greater than or equal to 1, not 0"),
        ({"training": {"clip": "wide"}}, "training.clip: input should be a valid number"),
        ({"training": 3}, "training: input should be a valid dictionary"),
        (
            {"participation": {"kind": "some"}},
            "participation.kind: input should be 'uniform', 'poisson', 'full' or 'epoch'",
        ),
        ({"budgets": {"delta": 1}}, "budgets.delta is 1; it must be a number at least 0 and below 1"),
        ({"seeds": 0}, "seeds: must be different whole numbers, at least one"),
        ({"seeds": []}, "seeds: must be different whole numbers, at least one"),
        ({"seeds": [1, 1]}, "seeds: must be different"),
        ({"seeds": [-1]}, "none negative"),
        ({"seeds": [2**63]}, "all below 2^63"),
        ({"seeds": True}, "seeds: must be a number, not True"),
        ({"algorithm": []}, "algorithm: name at least one"),
        ({"algorithm": 3}, "algorithm: must be [[algorithm]] tables, or names of algorithms, not 3"),
        ({"algorithm": [{"rank": 1}]}, "algorithm.0.name: field required"),
        ({"algorithm": ["pfa", "pfa"]}, "algorithm: two are called 'pfa'; give each its own label"),
        ({"budgets": {"scale": 1.0}}, "budgets.scale is now budgets.noise_multiplier; rename it"),
        ({"budgets": {"menu": []}}, "budgets.menu is now budgets.levels; rename it"),
        (
            {"algorithm": {"name": "fedavg", "budgets": "strictest"}},
            "algorithm.0.budgets: input should be 'own', 'minimum', 'maximum' or 'none', not 'strictest'",
        ),
        ({"algorithm": {"name": "pfa", "form": "loud"}}, "algorithm.0.form: input should be 'sound' or 'published'"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        config.experiment(values)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_methods_own_training_is_checked_too() -> None:
    wanted = config.experiment({"algorithm": {"name": "pfa", "training": {"clipp": 1}}})
    with pytest.raises(InputError, match=r"no setting 'algorithm.training.clipp'; did you mean 'clip'"):
        wanted.training_of(wanted.algorithm[0])


@pytest.mark.parametrize(
    "text", ["a/b", "a\\b", "..", ".hidden", "", " x", "-x", "a\0b", "a\nb", "a:b", 'a"b', "x" * 101]
)
def test_titles_that_cannot_be_file_names_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"algorithm\.0\.label: becomes part of file names"):
        config.experiment({"algorithm": {"name": "pfa", "label": text}})
    with pytest.raises(InputError, match=r"^name: becomes part of file names"):
        config.experiment({"name": text})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rounds": True}, "rounds: must be a number, not True"),
        ({"seeds": [True, 2]}, "seeds: must be numbers"),
        ({"training": {"clip": True}}, "training.clip: must be a number, not True"),
        ({"budgets": {"epsilons": [True, 2.0]}}, "budgets.epsilons: must be numbers"),
        ({"model": {"hidden": [False]}}, "model.hidden: must be numbers"),
        ({"algorithm": {"name": "fedavg", "epsilon": True}}, "algorithm.0.epsilon: must be a number, not True"),
        ({"training": {"clip": float("inf")}}, "training.clip: input should be a finite number, not inf"),
        ({"training": {"decay": float("nan")}}, "training.decay: input should be a finite number, not nan"),
        ({"algorithm": {"name": "fedavg", "epsilon": float("inf")}}, "algorithm.0.epsilon: input should be a finite"),
    ],
)
def test_only_finite_numbers_are_numbers(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        config.experiment(values)
    assert str(refusal.value).startswith(said)


def test_truth_values_stay_what_they_are() -> None:
    assert config.experiment({"budgets": {"disclosed": False}}).budgets.disclosed is False


@pytest.mark.parametrize("text", ["pfa, ε = 1 (strict)", "η=0.5", "a.b-c_d+e"])
def test_titles_may_be_readable(text: str) -> None:
    assert config.experiment({"name": text, "algorithm": {"name": "pfa", "label": text}}).algorithm[0].title == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("training.clip", "--set takes KEY=VALUE, such as training.clip=0.5, not 'training.clip'"),
        ("=3", "--set takes KEY=VALUE"),
        ("rounds.more=3", "--set rounds.more=3: rounds is a value, not a table"),
        ("rounds.more.still=3", "--set rounds.more.still=3: rounds is a value, not a table"),
        ("algorithm.name.x=3", "algorithm.name is a value, not a table"),
        ("trainig.clip=3", "there is no setting 'trainig'; did you mean 'training'?"),
    ],
)
def test_changes_that_cannot_be_made(file: Path, change: str, said: str) -> None:
    with pytest.raises(InputError) as refusal:
        config.read_experiment(file, [change])
    assert said in str(refusal.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.toml cannot be read: No such file.*give the path of a TOML file"):
        config.read_experiment(tmp_path / "none.toml")
    for content in (b"rounds = [", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(InputError, match=r"bad.toml is not TOML"):
            config.read_experiment(tmp_path / "bad.toml")


def test_a_number_or_a_word_is_refused_with_both() -> None:
    with pytest.raises(InputError, match=r"^training\.batch: input should be a valid integer or 'auto', not 'big'$"):
        config.Experiment(training={"batch": "big"}, budgets={"epsilon": 1.0})
