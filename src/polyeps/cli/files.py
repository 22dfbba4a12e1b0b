"""Commands that take an experiment's file: `certify`, `calibrate` and `plan` ask the jobs a run would do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from polyeps.cli.output import print_json
from polyeps.errors import InputError

if TYPE_CHECKING:
    import click

    from polyeps.accounting.calibration import ProgressCallback
    from polyeps.experiment.job import Job

Shown = TypeVar("Shown")
ExperimentFile = Annotated[Path, typer.Argument(help="A TOML file, as for polyeps run.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: training.clip=0.5")]
TrustCode = Annotated[bool, typer.Option("--trust-code", help='Run code that the experiment names as "module:name".')]
Seed = Annotated[int | None, typer.Option(help="Seed to use; by default the first one of the file.")]


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
    if seed is not None and seed not in experiment.seeds:
        raise InputError(f"--seed {seed}: the file's seeds are {', '.join(map(str, experiment.seeds))}; choose one")
    parts = Parts(code=Code(file.parent.absolute()) if trust_code else None)
    population = populate(experiment, experiment.seeds[0] if seed is None else seed, parts=parts, plans=True)
    for method in experiment.algorithm:
        yield prepare(experiment, method, population, progress, parts)


def title(job: Job) -> str:
    """Return the title of a job, with the budgets that are effective where clients' own are not."""
    named, whose = job.method.title, job.whose_budgets
    return named if whose == "own" or whose in named else f"{named} (budgets: {whose})"


def with_same_figures(jobs: Iterable[tuple[Job, list[Shown]]]) -> list[tuple[str, Job, list[Shown]]]:
    """Return the jobs whose figures differ, each with the titles of all that share them."""
    found: list[tuple[list[str], Job, list[Shown]]] = []
    for job, rows in jobs:
        for titles, first, same in found:
            terms = ("rounds", "algorithm.unit", "method.form", "whose_budgets")
            if rows == same and all(attrgetter(term)(first) == attrgetter(term)(job) for term in terms):
                titles.append(title(job))
                break
        else:
            found.append(([title(job)], job, rows))
    return [(", ".join(titles), job, rows) for titles, job, rows in found]


def protected(job: Job) -> str:
    """Return what the budgets of a job protect, in a sentence; "" where it is single records, as usual."""
    person = job.population.trained.person
    if not person or job.budgets is None:
        return ""
    if job.algorithm.unit == "client":
        return f"Budgets protect whole clients, and so every {person}; an example is all records of one {person}."
    return f"Budgets protect all records of any one {person} together; sizes and batches count {person}s."


def print_jobs(
    experiment: Path, jobs: Iterable[tuple[Job, list[dict[str, Any]]]], more: Mapping[str, Any] | None = None
) -> None:
    """Print jobs and their clients as JSON, with the budgets that clients set, and more figures."""
    methods = [_frame(job, clients) for job, clients in jobs]
    print_json({"experiment": str(experiment), "methods": methods, **(more or {})})


def _frame(job: Job, clients: list[dict[str, Any]]) -> dict[str, Any]:
    from polyeps.experiment.remarks import remarks

    own = dict(zip(job.population.ids, job.population.budgets, strict=True))
    return {
        "method": job.method.title,
        "form": job.method.form,
        "budgets": job.whose_budgets,
        "seed": job.population.seed,
        "rounds": job.rounds.planned,
        "rounds_expected": job.rounds.expected,
        "unit": job.algorithm.unit,
        "person": job.population.trained.person,
        "adjacency": job.algorithm.adjacency,
        "trust": job.algorithm.trust,
        "arithmetic": job.algorithm.arithmetic,
        "conditions": job.algorithm.conditions,
        "remarks": remarks(job),
        "clients": [{**row, "own_epsilon": b.epsilon if (b := own[row["client"]]) else None} for row in clients],
    }
