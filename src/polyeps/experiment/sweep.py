"""Sweeps: one experiment with every combination of some values, each in a folder of its own.

    FOLDER/sweep.json              the combinations, and the settings of each run
    FOLDER/learning_rate=0.1/      a run
    FOLDER/learning_rate=0.3/      another one

All runs are checked and calibrated before the first begins. Every run spends each client's budget anew: a simulation
may do so, a federation of real clients may not.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from polyeps.accounting.calibration import ProgressCallback
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.changes import parsed, split_change
from polyeps.experiment.job import prepare
from polyeps.experiment.population import populate
from polyeps.experiment.registry import Code, Parts
from polyeps.experiment.run import resume, run

SWEEP = "sweep.json"
_MOST = 1000  # runs of a sweep
_LONGEST = 100  # letters of a folder's name


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, and the folder of the code that they name, if it is trusted."""

    name: str
    runs: tuple[SweepRun, ...]
    code_folder: Path | None


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: the values in which it differs from the others, its folder in the sweep's, its settings."""

    values: Mapping[str, Any]
    folder: str
    experiment: config.Experiment


def combinations(changes: Sequence[str]) -> list[dict[str, str]]:
    """Return every combination of the values of some changes, by key; only keys with several values are in them.

    >>> combinations(["rounds=5", "training.clip=1,2", "seeds=1"])
    [{'training.clip': '1'}, {'training.clip': '2'}]
    """
    split = [split_change(change) for change in changes]
    times = Counter(key for key, _ in split)
    several = {key: values for key, values in split if len(values) > 1}
    for key, values in several.items():
        if times[key] > 1:
            raise InputError(f"--set {key} is given twice; give all its values at once, separated by commas")
        read = [json.dumps(parsed(value), default=str) for value in values]
        if twice := [value for value, same in zip(values, read, strict=True) if read.count(same) > 1]:
            raise InputError(f"--set {key} has the value {twice[0]} twice; leave out one")
    count = 1
    for values in several.values():
        count *= len(values)
    if count > _MOST:
        raise InputError(f"this sweep has {count} runs, more than {_MOST}; give fewer values")
    return [dict(zip(several, chosen, strict=True)) for chosen in product(*several.values())]


def plan_sweep(
    file: Path, changes: Sequence[str], trackers: Sequence[str] = (), code_folder: Path | None = None
) -> Sweep:
    """Return the sweep over an experiment's file; it has one run, without differences, where no key has two values."""
    combined = combinations(changes)
    fixed = [change for change in changes if split_change(change)[0] not in combined[0]]
    runs, name = [], file.stem
    for number, (values, folder) in enumerate(zip(combined, _folders(combined), strict=True), start=1):
        found = config.read_experiment(file, [*fixed, *(f"{key}={text}" for key, text in values.items())])
        update: dict[str, Any] = {"trackers": tuple(dict.fromkeys((*found.trackers, *trackers)))}
        if "name" not in values:
            name = found.name
            # Trackers and model files show the name, and not the budgets where these are not disclosed.
            hidden = not found.budgets.disclosed and any(key.startswith(("budgets", "algorithm")) for key in values)
            titled = f"{name}, {f'run {number}' if hidden else folder}"
            if values and len(titled.encode()) <= _LONGEST:  # what a name may have
                update["name"] = titled
        read = {key: parsed(text) for key, text in values.items()}
        runs.append(SweepRun(read, folder, found.model_copy(update=update)))
    return Sweep(name, tuple(runs), code_folder)


def _folders(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a folder for each combination: keys without their table where that is enough, and values."""
    last = Counter(key.rpartition(".")[2] for key in runs[0])
    short = {key: name if last[name := key.rpartition(".")[2]] == 1 else key for key in runs[0]}
    named = [", ".join(f"{short[key]}={_plain(text)}" for key, text in values.items()) for values in runs]
    fit = all(len(name.encode()) <= _LONGEST for name in named) and len({name.lower() for name in named}) == len(named)
    return named if fit else [f"run {number}" for number in range(1, len(named) + 1)]


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")


def check_runs(sweep: Sweep, progress: ProgressCallback | None = None) -> None:
    """Prepare the jobs of the first seed of every run, so that a sweep does not end in the middle for bad settings."""
    for place, one in enumerate(sweep.runs):
        if progress:
            progress(place, len(sweep.runs))
        parts = Parts(code=None if sweep.code_folder is None else Code(sweep.code_folder.absolute()))
        try:
            parts.tracking(one.experiment, Path(one.folder))
            parts.measuring(one.experiment)
            population = populate(one.experiment, one.experiment.seeds[0], parts=parts, plans=True)
            for method in one.experiment.algorithm:
                prepare(one.experiment, method, population, parts=parts)
        except InputError as problem:
            raise InputError(f"{one.folder}: {problem}") from None


def create_sweep(folder: Path, sweep: Sweep) -> None:
    """Make the folder of a sweep, and write down its runs."""
    for taken in (folder / SWEEP, folder / "journal.db", *(folder / one.folder for one in sweep.runs)):
        if taken.exists():
            raise InputError(f"{folder} holds a run already ({taken.name}); resume it, or choose another folder")
    listed = [
        {"values": dict(one.values), "folder": one.folder, "experiment": one.experiment.as_dict()} for one in sweep.runs
    ]
    code = None if sweep.code_folder is None else str(sweep.code_folder.absolute())
    content = {"version": 1, "name": sweep.name, "code": code, "runs": listed}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{SWEEP}.part"
        partial.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
        partial.replace(folder / SWEEP)
    except OSError as problem:
        raise InputError(f"{folder} cannot be made: {problem.strerror}; choose another folder") from None


def read_sweep(folder: Path) -> Sweep | None:
    """Return the runs of the sweep in a folder; None where it holds no sweep."""
    path = folder / SWEEP
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        code = None if content["code"] is None else Path(content["code"])
        runs = [
            SweepRun(one["values"], str(one["folder"]), config.experiment(one["experiment"])) for one in content["runs"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{path} cannot be read ({type(problem).__name__}: {problem}); restore it") from None
    for one in runs:
        if not one.folder or Path(one.folder).name != one.folder or one.folder == "..":
            raise InputError(f"{path} names the folder {one.folder!r}, which is not inside the sweep's; restore it")
    return Sweep(str(content["name"]), tuple(runs), code)


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of runs, with those of a sweep that have begun in the place of the sweep's."""
    found: list[Path] = []
    for folder in folders:
        sweep = read_sweep(folder)
        if sweep is None:
            found.append(folder)
            continue
        begun = [folder / one.folder for one in sweep.runs if (folder / one.folder / "journal.db").exists()]
        if not begun:
            raise InputError(f"no run of the sweep in {folder} has begun; continue it with polyeps run --resume")
        found += begun
    return found


def do_run(folder: Path, one: SweepRun, code_folder: Path | None, command: str = "", **options: Any) -> None:
    """Begin one run of a sweep, or resume it; `options` are as `run` and `resume` take them."""
    own = folder / one.folder
    if (own / "journal.db").exists():
        resume(own, trust_code=code_folder is not None, **options)
    else:
        run(one.experiment, own, command=command, code_folder=code_folder, **options)
