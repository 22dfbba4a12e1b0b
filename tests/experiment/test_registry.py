"""Own parts by name: what they do, what is refused, and that no configuration runs code by surprise."""

import json
import sqlite3
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import refused
from support.federations import experiment, job_of
from torch import Tensor, nn

from polyeps.algorithms import ALGORITHMS, Entry
from polyeps.algorithms.fedavg import fedavg
from polyeps.core import Algorithm
from polyeps.errors import InputError
from polyeps.experiment import run as runs
from polyeps.experiment.journal import Journal
from polyeps.experiment.outcome import read
from polyeps.experiment.population import populate
from polyeps.experiment.progress import Watch
from polyeps.experiment.registry import Code, Parts, entry_of
from polyeps.models import MODELS, Model, mlp
from polyeps.training import Training

SURPRISE = "from pathlib import Path\nPath(__file__).with_name('surprise').touch()\n"
MODULE = (
    SURPRISE
    + """
from polyeps.algorithms.fedavg import fedavg as algorithm
from polyeps.models import mlp
def model(shape, classes): return mlp(64, (4,), classes)
def encoder(): return lambda records: records * 2
def metric(outputs, labels): return 0.25
class Tracker:
    def started(self, experiment): pass
    def round(self, job, number, metrics): pass
    def finished(self, folder): pass
"""
)
EVERY_KEY: dict[str, dict[str, Any]] = {
    "algorithm.name": {"algorithm": {"name": "own:algorithm"}},
    "model.name": {"model": {"name": "own:model"}},
    "model.encoder": {"model": {"encoder": "own:encoder"}},
    "metrics": {"metrics": ["own:metric"]},
    "trackers": {"trackers": ["own:Tracker"]},
}
every_key = pytest.mark.parametrize("key", EVERY_KEY)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with a module that leaves a trace when it runs."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own.py").write_text(MODULE)
    return tmp_path / "code"


class StoppedError(Exception):
    pass


def stop(*_: Any) -> None:
    raise StoppedError


def interrupted(wanted: Any, folder: Path, **own: Any) -> None:
    with pytest.raises(StoppedError):
        runs.run(wanted, folder, watch=Watch(round_done=stop), **own)


@every_key
def test_code_is_refused_by_its_key_unless_it_is_trusted(key: str, code: Path, tmp_path: Path) -> None:
    wanted = experiment(**EVERY_KEY[key])
    said = rf"^{key} = \"own:\w+\" names code, which a configuration cannot run by itself; .*--trust-code"
    with pytest.raises(InputError, match=said):
        runs.run(wanted, tmp_path / "run")
    assert not (code / "surprise").exists()
    assert not (tmp_path / "run").exists()
    runs.run(wanted, tmp_path / "run", code_folder=code)
    assert (code / "surprise").exists()


@every_key
def test_a_run_is_resumed_only_with_the_same_trust(key: str, code: Path, tmp_path: Path) -> None:
    wanted = experiment(**EVERY_KEY[key])
    interrupted(wanted, tmp_path / "run", code_folder=code)
    (code / "surprise").unlink()
    with pytest.raises(InputError, match=rf"^{key} = .* names code"):
        runs.resume(tmp_path / "run")
    assert not (code / "surprise").exists()
    assert runs.resume(tmp_path / "run", trust_code=True).models
    assert (code / "surprise").exists()
    (code / "surprise").unlink()
    runs.resume(tmp_path / "run")  # of a run that is done: nothing to run
    read(tmp_path / "run")
    assert not (code / "surprise").exists()


@pytest.mark.parametrize("change", ["", "# later\n"])
def test_a_module_that_changed_is_refused_before_it_runs(change: str, code: Path, tmp_path: Path) -> None:
    interrupted(experiment(metrics=["own:metric"]), tmp_path / "run", code_folder=code)
    (code / "surprise").unlink()
    (code / "own.py").write_text(MODULE + change)
    if change:
        with pytest.raises(InputError, match=r"own.py has changed since the run began; restore it, or start a new run"):
            runs.resume(tmp_path / "run", trust_code=True)
    else:
        runs.resume(tmp_path / "run", trust_code=True)
    assert (code / "surprise").exists() == (not change)


def test_a_module_that_was_not_there_at_first_is_not_taken_from_the_folder(code: Path) -> None:
    """An installed module named by a run is not replaced by a file that appears in the folder later."""
    loaded = Code(code, {}, resumed=True)
    (code / "statistics.py").write_text(SURPRISE)
    assert callable(loaded.find("metrics", "statistics:fmean"))
    assert not (code / "surprise").exists()


def test_a_journal_from_elsewhere_runs_no_code(code: Path, tmp_path: Path) -> None:
    """Not even if it says that it is trusted, or names code where the run had none."""
    interrupted(experiment(), tmp_path / "run")
    journal = sqlite3.connect(tmp_path / "run" / "journal.db")
    (text,) = journal.execute("SELECT value FROM about WHERE key = 'experiment'").fetchone()
    forged = json.dumps({**json.loads(text), "metrics": ["own:metric"]})
    place = json.dumps({"folder": str(code), "digests": {}})
    journal.execute("UPDATE about SET value = ? WHERE key = 'experiment'", (forged,))
    journal.execute("UPDATE about SET value = ? WHERE key = 'code'", (place,))
    journal.commit()
    journal.close()
    refused("run", "--resume", str(tmp_path / "run"), naming=("metrics", "--trust-code"))
    with pytest.raises(InputError, match="cannot be loaded: ModuleNotFoundError"):  # not a module of that run
        runs.resume(tmp_path / "run", trust_code=True)
    assert not (code / "surprise").exists()


@pytest.mark.parametrize(
    "name", ["../own:metric", "/tmp/own:metric", "own.py:metric:x", "own:", ":metric", "own:a.b", "öwn:x"]
)
def test_only_names_of_modules_are_looked_for(name: str, code: Path) -> None:
    with pytest.raises(InputError, match='write "module:name"'):
        Parts(code=Code(code)).measuring(experiment(metrics=[name]))
    assert not (code / "surprise").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent:x", "there is no absent.py in .*; correct the name"),
        ("own:absent", "own defines no 'absent'; correct the name"),
        ("needing:x", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("unset:x", "AttributeError: 'NoneType' object has no attribute 'real'"),
        ("broken:x", "ZeroDivisionError: division by zero"),
        ("spoilt:x", "SyntaxError"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(name: str, said: str, code: Path) -> None:
    (code / "broken.py").write_text("1 / 0")
    (code / "spoilt.py").write_text("x = (")
    (code / "needing.py").write_text("import no_such_package")
    (code / "unset.py").write_text("x = None.real")
    with pytest.raises(InputError, match=f'metrics = "{name}" cannot be loaded: {said}'):
        Parts(code=Code(code)).measuring(experiment(metrics=[name]))


def test_modules_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    found = []
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(f"value = {value}")
        found.append(Code(tmp_path / folder).find("metrics", "own:value"))
    assert found == [1, 2]


def mine(training: Training, *, trim: float = 0.25, times: int) -> Algorithm:
    """Mean of all updates.

    A second line.
    """
    assert (trim, times) == (0.5, 3)
    return fedavg(training)


def test_an_algorithm_is_a_function_or_an_entry() -> None:
    parts = Parts(algorithms={"mine": mine, "other": Entry(mine, "other", ("minimum", "none"))})
    for name, budgets in (("mine", ("own",)), ("other", ("minimum", "none"))):
        method = experiment({"name": name, "trim": 0.5, "times": 3}).algorithm[0]
        assert entry_of(method, parts).budgets == budgets
    assert entry_of(experiment({"name": "mine"}).algorithm[0], parts).summary == "Mean of all updates"
    with pytest.raises(InputError, match=r"algorithm \(mine\).times: field required"):
        runs._Work(experiment({"name": "mine"}), Path(), "cpu", Watch(), parts).job(
            experiment({"name": "mine"}).algorithm[0], 1
        )


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("algorithms", "fedavg", "algorithms: 'fedavg' is built in; choose another name"),
        ("algorithms", "minimum", "algorithms: 'minimum' is built in"),
        ("models", "mlp", "models: 'mlp' is built in"),
        ("metrics", "accuracy", "metrics: 'accuracy' is built in"),
        ("metrics", "own accuracy", "is no name; use letters"),
        ("algorithms", "../x", "is no name; use letters"),
        ("encoders", "a:b", "is no name; use letters"),
    ],
)
def test_names_are_new_and_plain(kind: str, name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        runs.run(experiment(), tmp_path / "run", **{kind: {name: mine}})  # type: ignore[arg-type]


def test_a_run_is_resumed_with_the_parts_it_was_started_with(tmp_path: Path) -> None:
    def half(outputs: Tensor, labels: Tensor) -> float:
        return 0.5

    interrupted(experiment(), tmp_path / "run", metrics={"half": half})
    with pytest.raises(InputError, match=r"was started with metrics = \{'half': \.\.\.\}; resume it with the same"):
        runs.resume(tmp_path / "run")
    runs.resume(tmp_path / "run", metrics={"half": half})
    journal = Journal(tmp_path / "run" / "journal.db")
    assert [row["value"] for row in journal.query("SELECT value FROM metrics WHERE name = 'half'")] == [0.5] * 3


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("minimum", 'name = "fedavg" with budgets = "minimum"'),
        ("maximum", 'name = "fedavg" with budgets = "maximum"'),
        ("non-private", 'name = "fedavg" with budgets = "none"'),
        ("dp-fedavg", 'name = "fedhdp" with budgets = "minimum"'),
        ("fedhdp-open", 'name = "fedhdp" with budgets = "none"'),
        ("uv-fed", 'name = "cmp-fed" with budgets = "none"'),
        ("randagg", 'name = "dp-randagg" with budgets = "none"'),
    ],
)
def test_former_names_say_what_to_write(name: str, instead: str) -> None:
    with pytest.raises(InputError, match=f'algorithm.name = "{name}" is now {instead}'):
        job_of(experiment(name))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("budgets", ["own", "minimum", "maximum", "none"])
def test_budgets_that_an_algorithm_does_not_spend_are_refused(name: str, budgets: Any) -> None:
    if budgets in ALGORITHMS[name].budgets:
        return
    with pytest.raises(InputError, match=f'algorithm.budgets = "{budgets}" is not for {name}; (choose|leave it out)'):
        job_of(experiment({"name": name, "budgets": budgets}, participation={"kind": "poisson", "share": 0.5}))


def test_nobody_changes_the_built_in_parts() -> None:
    for table in (ALGORITHMS, MODELS):
        with pytest.raises(TypeError, match="does not support item assignment"):
            table["mine"] = mine  # type: ignore[index]


def net(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 5), nn.Tanh(), nn.Linear(5, classes))


def test_an_own_model_starts_from_the_seed_and_leaves_torchs_generator_alone() -> None:
    parts = Parts(models={"net": net})
    state = torch.random.get_rng_state()
    one, same, other = (populate(experiment(model={"name": "net"}), seed, parts=parts).start for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.layer((rows - rows.mean(0)).flatten(1))
        return found


def unchecked(shape: tuple[int, ...], classes: int) -> Model:
    return Model(Mixing(), mlp().loss, (64,), check=False)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda *_: Mixing(), "depends on the other examples of the batch"),
        (unchecked, "depends on the other examples of the batch"),  # its author did not check it
        (lambda *_: nn.BatchNorm1d(64), "mixes the examples"),
        (lambda shape, _: net(shape, 3), "model.name = own has 3 outputs for 10 classes"),
        (lambda _, classes: mlp(7, (4,), classes), "own takes records of shape"),
        (lambda *_: "model", "model.name = own returned a str, not a Model or an nn.Module"),
        (lambda *_: 1 / 0, "model.name = own failed: ZeroDivisionError"),
    ],
)
def test_own_models_are_checked(factory: Callable[..., Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        populate(experiment(model={"name": "own"}), 1, parts=Parts(models={"own": factory}))


def test_an_own_model_may_be_a_built_in_one_of_another_size() -> None:
    parts = Parts(models={"wide": lambda shape, classes: mlp(prod(shape), (9,), classes)})
    assert populate(experiment(model={"name": "wide"}), 1, parts=parts).model.size == 65 * 9 + 10 * 10


def encoded(make: Callable[[], Callable[[Tensor], Any]]) -> Any:
    return populate(experiment(model={"encoder": "own"}), 1, parts=Parts(encoders={"own": make}))


def test_an_encoder_is_applied_to_training_and_test_records() -> None:
    plain = populate(experiment(), 1)
    found = encoded(lambda: lambda records: torch.cat([records.flatten(1), -records.flatten(1)], 1))
    assert found.model.input_shape == (128,)
    assert torch.equal(found.records.features[:, :64], plain.records.features.flatten(1))
    assert torch.equal(found.test[0][:, 64:], -plain.test[0])
    assert found.budgets == plain.budgets


def fitted_at_first() -> Callable[[Tensor], Tensor]:
    means: list[Tensor] = []

    def encode(records: Tensor) -> Tensor:
        if not means:
            means.append(records.mean(0))
        return records - means[0]

    return encode


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lambda records: records - records.mean(0), "differently with other records beside it"),
        (lambda: lambda records: records / records.abs().max(), "differently with other records beside it"),
        (fitted_at_first, "differently when it is made anew"),
        (lambda: lambda records: records + torch.rand(1), "differently with other records beside it"),
        (lambda: lambda records: records[:5], "one row for each record"),
        (lambda: lambda records: records.sum((1, 2, 3)), "one row for each record"),
        (lambda: lambda records: records / 0, "finite features"),
        (lambda: 1 / 0, "model.encoder = own failed: ZeroDivisionError"),
        (lambda: lambda _: "x", "model.encoder = own failed: TypeError"),
    ],
)
def test_encoders_that_mix_records_are_refused(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        encoded(make)


def test_a_metric_that_fails_is_found_before_anybody_is_charged(tmp_path: Path) -> None:
    def bad(outputs: Tensor, labels: Tensor) -> float:
        raise KeyError("label")

    with pytest.raises(InputError, match="metric 'bad' failed: KeyError: 'label'"):
        runs.run(experiment(), tmp_path / "run", metrics={"bad": bad})
    assert not (tmp_path / "run").exists()


def test_a_metric_sees_all_test_records_and_can_spoil_none(tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def spoils(outputs: Tensor, labels: Tensor) -> float:
        seen.append((*outputs.shape, len(labels)))
        outputs.zero_()
        labels.zero_()
        return float("inf") if len(seen) == 3 else 1.0

    with_it = runs.run(experiment(), tmp_path / "a", metrics={"spoils": spoils})
    without = runs.run(experiment(), tmp_path / "b")
    assert with_it.accuracy == without.accuracy
    assert set(seen) == {(297, 10, 297)}
    journal = Journal(tmp_path / "a" / "journal.db")
    values = [row["value"] for row in journal.query("SELECT value FROM metrics WHERE name = 'spoils' ORDER BY round")]
    assert values == [1.0, None, 1.0]


class Recording:
    def __init__(self, fails_at: str = "") -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.fails_at = fails_at

    def _hear(self, event: str, *rest: Any) -> None:
        self.heard.append((event, *rest))
        if event == self.fails_at:
            raise ConnectionError("no network")

    def started(self, experiment: Any) -> None:
        self._hear("started", experiment["name"])

    def round(self, job: str, number: int, metrics: Any) -> None:
        self._hear("round", job, number, sorted(metrics))

    def finished(self, folder: Path) -> None:
        self._hear("finished", folder)


def test_trackers_hear_of_every_round(tmp_path: Path) -> None:
    tracker = Recording()
    runs.run(experiment(evaluate_every=2), tmp_path / "run", trackers=[tracker])
    measured = ["accuracy", "loss"]
    assert tracker.heard == [
        ("started", "small"),
        *(("round", "fedavg-1", number, measured if number else []) for number in range(3)),
        ("finished", tmp_path / "run"),
    ]


@pytest.mark.parametrize("event", ["started", "round", "finished"])
def test_a_tracker_that_fails_loses_no_run(event: str, tmp_path: Path) -> None:
    failing, other = Recording(event), Recording()
    with pytest.warns(RuntimeWarning, match=r"tracker Recording failed \(ConnectionError: no network\); the run goes"):
        outcome = runs.run(experiment(), tmp_path / "run", trackers=[failing, other])
    assert len(outcome.models) == 1
    assert [one[0] for one in failing.heard].count(event) == 1  # it is not asked again
    assert len(other.heard) == 5


def test_a_tracker_that_cannot_be_made_loses_no_run(code: Path, tmp_path: Path) -> None:
    (code / "far.py").write_text("class Away:\n    def __init__(self): raise TimeoutError('no answer')\n")
    with pytest.warns(RuntimeWarning, match=r"tracker Away failed \(TimeoutError: no answer\)"):
        assert runs.run(experiment(trackers=["far:Away"]), tmp_path / "run", code_folder=code).models


def test_types_of_options_must_be_there(code: Path, tmp_path: Path) -> None:
    (code / "typed.py").write_text("def build(training, *, rank: 'Rank' = 1): pass\n")
    with pytest.raises(InputError, match=r"typed:build: name 'Rank' is not defined; import the types"):
        runs.run(experiment({"name": "typed:build"}), tmp_path / "run", code_folder=code)


def test_every_job_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"populate": 0, "prepare": 0}
    for name in counts:
        real = getattr(runs, name)

        def counted(*arguments: Any, name: str = name, real: Any = real) -> Any:
            counts[name] += 1
            return real(*arguments)

        monkeypatch.setattr(runs, name, counted)
    wanted = experiment(["fedavg", "weiavg", "fedavg (none)"], seeds=2, rounds=1)
    first = runs.run(wanted, tmp_path / "once")
    assert counts == {"populate": 2, "prepare": 6}
    monkeypatch.setattr(runs, "_KEPT", -1)  # as if records were too large to be held for all seeds
    again = runs.run(wanted, tmp_path / "twice")
    assert counts == {"populate": 2 + 4, "prepare": 6 + 12}
    assert all(torch.equal(model, again.models[key]) for key, model in first.models.items())
