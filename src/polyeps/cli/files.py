"""Commands that take an experiment's file: `certify`, `calibrate` and `plan` ask the jobs a run would do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    import click

    from polyeps.accounting.calibration import ProgressCallback
    from polyeps.experiment.job import Job

ExperimentFile = Annotated[Path, typer.Argument(help="A TOML file, as for polyeps run.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: training.clip=0.5")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help='Run the code that the experiment names as "module:name".')
]
Seed = Annotated[int | None, typer.Option(help="Of the file's seeds, the one to ask about; the first by default.")]


class FileOrMethod(TyperGroup):
    """A group of methods that takes an experiment's file in the place of a method."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Ask the experiment where a file is named."""
        named = args[0]
        if named not in self.commands and (named.endswith(".toml") or Path(named).is_file()):
            args = ["file", *args]
        return super().resolve_command(ctx, args)


def jobs_of(
    file: Path, changes: list[str] | None, seed: int | None, trust_code: bool, progress: ProgressCallback | None
) -> Iterator[Job]:
    """Yield the job of each method of an experiment, calibrated; no record has been used."""
    from polyeps.experiment import config
    from polyeps.experiment.job import prepare
    from polyeps.experiment.population import populate
    from polyeps.experiment.registry import Code, Parts

    experiment = config.read_experiment(file, changes or [])
    parts = Parts(code=Code(file.parent.absolute()) if trust_code else None)
    population = populate(experiment, experiment.seeds[0] if seed is None else seed, parts=parts)
    for method in experiment.algorithm:
        yield prepare(experiment, method, population, progress, parts)


def frame(job: Job) -> dict[str, Any]:
    """Return what is the same for all clients of a job."""
    algorithm = job.algorithm
    return {
        "method": job.method.title,
        "form": job.method.form,
        "seed": job.population.seed,
        "rounds": job.rounds.planned,
        "rounds_expected": job.rounds.expected,
        "unit": algorithm.unit,
        "adjacency": algorithm.adjacency,
        "trust": algorithm.trust,
        "arithmetic": algorithm.arithmetic,
        "conditions": algorithm.conditions,
    }
