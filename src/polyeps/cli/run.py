"""`polyeps run` and `polyeps demo`: train federations, show their progress, and resume interrupted runs."""

from __future__ import annotations

import gc
import shlex
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyeps.cli import files
from polyeps.cli.output import Json, remark, showing
from polyeps.cli.run_output import print_outcome
from polyeps.cli.sweep import begin_sweep, continue_sweep
from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps.experiment.config import Experiment

Device = Annotated[str, typer.Option(help="cpu, or cuda where there is one.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the run; runs/NAME by default.")]


def run_command(
    experiment: Annotated[Path | None, typer.Argument(help="A TOML file.")] = None,
    changes: files.Changes = None,
    seeds: Annotated[int | None, typer.Option(help="Run this many seeds instead of those in the file.")] = None,
    device: Device = "cpu",
    output: Output = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Also train every client by itself, to see whether joining is worth it.")
    ] = False,
    resume: Annotated[Path | None, typer.Option(help="Continue the interrupted run in this folder.")] = None,
    track: Annotated[list[str] | None, typer.Option(help="Log to mlflow, tensorboard or wandb as well.")] = None,
    trust_code: files.TrustCode = False,
    shards: Annotated[int, typer.Option(help="Train clients in this many processes of their own; 0: in this one.")] = 0,
    ray: Annotated[
        str | None, typer.Option(help="Shards are actors of the Ray cluster at this address; local: start one here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train every method of an experiment with every seed, each client within its own budget."""
    check_device(device)
    sharding = _sharding(shards, ray)
    if (experiment is None) == (resume is None):
        raise InputError("give either an experiment to run, or --resume with the folder of an interrupted one")
    if experiment is None:
        if changes or seeds is not None or output or alone or track:
            named = "--set, --seeds, --output, --alone and --track"
            raise InputError(f"a run is resumed with the settings it began with; leave out {named}")
        assert resume is not None
        _resume(resume, device, as_json, trust_code, sharding)
        return
    _import_all()
    from polyeps.experiment.sweep import plan_sweep

    every = [*(changes or []), *([] if seeds is None else [f"seeds={seeds}"])]
    own = {"code_folder": experiment.parent} if trust_code else {}
    sweep = plan_sweep(experiment, every, track or (), own.get("code_folder"))
    if alone:
        runs = tuple(replace(one, experiment=_with_alone(one.experiment)) for one in sweep.runs)
        sweep = replace(sweep, runs=runs)
    folder = output or _free_folder(Path("runs") / sweep.name)
    if len(sweep.runs) == 1:
        _perform(sweep.runs[0].experiment, folder, device, as_json, {**own, **sharding})
    elif sharding:
        raise InputError("--shards and --ray are for a single run, and these settings are a sweep; leave them out")
    else:
        begin_sweep(sweep, folder, device, as_json)


def _import_all() -> None:
    """Import what every run needs; Python's collector would look at it again and again, and find nothing."""
    if "torch" in sys.modules:
        return
    gc.disable()
    import polyeps.experiment.run  # noqa: F401

    gc.freeze()
    gc.enable()


def _sharding(shards: int, ray: str | None) -> dict[str, Any]:
    if not shards and ray is None:
        return {}
    from polyeps.experiment.shards import Sharding

    return {"sharding": Sharding(shards, ray)}


def _resume(folder: Path, device: str, as_json: bool, trust_code: bool, sharding: dict[str, Any]) -> None:
    """Continue a run or a sweep."""
    _import_all()
    from polyeps.experiment.sweep import read_sweep

    sweep = read_sweep(folder)
    if sweep is None:
        _perform(None, folder, device, as_json, {"trust_code": trust_code, **sharding})
    else:
        trusted = sweep if trust_code else replace(sweep, code_folder=None)
        continue_sweep(trusted, folder, device, as_json)


def demo(
    output: Output = None,
    page: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("demo.html"),
    as_json: Json = False,
) -> None:
    """Train twenty-four clients with very different budgets on real digits, with ten methods."""
    from importlib import resources

    import torch

    from polyeps.experiment import config
    from polyeps.report.page import write_page

    with resources.as_file(resources.files("polyeps") / "demo.toml") as path:
        wanted = config.read_experiment(path)
    if not page.parent.is_dir():  # found before the run, not after it
        raise InputError(f"--page {page}: the folder {page.parent} does not exist; make it, or choose another")
    folder = output or _free_folder(Path("runs") / wanted.name)
    torch.set_num_threads(1)  # models this small gain nothing from more, and threads wait for busy neighbours
    _perform(wanted, folder, "cpu", as_json, {})
    write_page([folder], page)
    remark(f"open {page} in a browser to look at it")


def _perform(wanted: Experiment | None, folder: Path, device: str, as_json: bool, own: dict[str, Any]) -> None:
    """Run or resume, show progress, print the summary; `own` says which code is trusted, and who trains."""
    from polyeps.experiment import run as runs
    from polyeps.experiment.journal import Journal

    trust = " --trust-code" if own.get("code_folder") or own.get("trust_code") else ""
    stopped = f"stopped; continue with: polyeps run --resume {shlex.quote(str(folder))}{trust}"
    try:
        with showing() as watch:
            if wanted is None:
                runs.resume(folder, device=device, watch=watch, **own)
            else:
                command = shlex.join(["polyeps", *sys.argv[1:]])
                runs.run(wanted, folder, device=device, command=command, watch=watch, **own)
    except KeyboardInterrupt:
        remark(stopped if (folder / "journal.db").exists() else "stopped before anything had begun")
        raise typer.Exit(130) from None
    with closing(Journal(folder / "journal.db")) as journal:
        print_outcome(journal, folder, as_json)


def _with_alone(wanted: Experiment) -> Experiment:
    """Return the experiment with the methods in which clients train alone, those it does not have yet."""
    from polyeps.experiment.config import Method

    known = {(method.name, method.budgets or "own") for method in wanted.algorithm}
    added = [Method(name="alone")] if ("alone", "own") not in known else []
    if ("alone", "none") not in known:
        added.append(Method(name="alone", budgets="none", label="alone at home"))
    return type(wanted)(
        **{**wanted.model_dump(), "algorithm": [one.model_dump() for one in (*wanted.algorithm, *added)]}
    )


def _free_folder(wanted: Path) -> Path:
    folder, number = wanted, 2
    while folder.exists():
        folder, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return folder


def check_device(device: str) -> None:
    """Refuse a device this machine does not have."""
    if device == "cpu":
        return
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(f"--device {device}: this machine has no such device; use cpu") from None
