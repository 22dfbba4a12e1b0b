"""`polyeps plan`: what a federation would cost each client, before any record is used."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyeps.cli import files
from polyeps.cli.output import Json, grouped, print_json, print_table, progress, remark, span
from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps.core import Budget
    from polyeps.experiment.estimate import Estimates
    from polyeps.experiment.job import Rounds
    from polyeps.experiment.plan import ClientPlan


def plan_command(
    experiment: Annotated[Path | None, typer.Argument(help="A TOML file, as for polyeps run; or use flags.")] = None,
    changes: files.Changes = None,
    trust_code: files.TrustCode = False,
    batch: Annotated[int | None, typer.Option(help="Expected batch size of a local step.")] = None,
    local_steps: Annotated[int | None, typer.Option(help="Local steps per round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the run.")] = None,
    budgets: Annotated[Path | None, typer.Option(help="CSV: client, epsilon; optional: delta, records.")] = None,
    distribution: Annotated[str | None, typer.Option(help="uniform, gauss, pareto, mixgauss1 to 4, or others.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients to draw from the distribution.")] = None,
    records: Annotated[int | None, typer.Option(help="Records per client, unless the file has them.")] = None,
    participation: Annotated[float, typer.Option(help="Share of clients in each round.")] = 1.0,
    delta: Annotated[float, typer.Option(help="δ, unless the file has it.")] = 1e-5,
    sigma: Annotated[float | None, typer.Option(help="One noise multiplier for all clients.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for drawing budgets; chosen and printed if omitted.")] = None,
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Estimate the accuracy on stand-in records.")] = False,
    stand_in: Annotated[
        Path | None, typer.Option(help="Estimate on this table: your own records, or public ones like them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan an experiment, or DP-SGD by options: every client's noise, affordable rounds and final ε."""
    described: dict[str, Any] = {"batch": batch, "local_steps": local_steps, "rounds": rounds}
    others = (budgets, distribution, clients, records, sigma)
    if experiment is not None:
        if any(value is not None for value in (*described.values(), *others)):
            raise InputError("the file describes the whole experiment; leave out the flags, or change it with --set")
        _plan_file(experiment, changes, seed, trust_code, accuracy or stand_in is not None, stand_in, as_json)
        return
    if accuracy or stand_in is not None:
        raise InputError("--accuracy is for the file of an experiment, which says what is trained; name the file")
    if changes:
        raise InputError("--set changes a setting of an experiment's file; name the file")
    if missing := [name.replace("_", "-") for name, value in described.items() if value is None]:
        raise InputError(f"--{missing[0]} is missing; give it, or the file of an experiment")
    from polyeps.experiment.plan import plan_dp_sgd

    described["participation"] = participation
    population, seed = _clients(budgets, distribution, clients, records, delta, seed)
    with progress("planning") as report:
        found, plans = plan_dp_sgd(population, **described, sigma=sigma, progress=report)
    if as_json:
        print_json({**described, "seed": seed, "clients": [asdict(row) for row in plans]})
    else:
        _draw(plans, found, f"{local_steps} local steps a round: ")


def _plan_file(
    experiment: Path,
    changes: list[str] | None,
    seed: int | None,
    trust_code: bool,
    accuracy: bool,
    stand_in: Path | None,
    as_json: bool,
) -> None:
    from polyeps.experiment.plan import plan as plan_job
    from polyeps.experiment.remarks import remarks

    with progress("planning") as report:
        methods = [(job, plan_job(job, report)) for job in files.jobs_of(experiment, changes, seed, trust_code, report)]
    found = _estimated(experiment, changes, trust_code, stand_in) if accuracy else None
    if as_json:
        more = {} if found is None else {"accuracy": {**asdict(found), "worth": found.worth}}
        files.print_jobs(experiment, [(job, [asdict(row) for row in rows]) for job, rows in methods], more)
        return
    for said in dict.fromkeys(said for job, _ in methods for said in remarks(job)):
        remark(said)
    for titles, job, rows in files.with_same_figures(methods):
        if rows:
            _draw(rows, job.rounds, f"{titles}: ")
            if said := files.protected(job):
                print(said)
        else:
            print(f"{titles}: no client has a guarantee, so no budget is spent.")
    if found is not None:
        _draw_estimates(found)


def _estimated(experiment: Path, changes: list[str] | None, trust_code: bool, stand_in: Path | None) -> Estimates:
    from polyeps.experiment import config
    from polyeps.experiment.estimate import estimate
    from polyeps.experiment.registry import Code, Parts

    parts = Parts(code=Code(experiment.parent.absolute()) if trust_code else None)
    wanted = config.read_experiment(experiment, changes or [])
    with progress("estimating accuracy") as report:
        return estimate(wanted, stand_in=stand_in, progress=report, parts=parts)


def _draw_estimates(found: Estimates) -> None:
    from polyeps.report.formatting import percent

    print_table(
        ["method", "accuracy", "without privacy", "majority class", "privacy costs"],
        [
            [
                row.method,
                percent(row.accuracy, row.deviation),
                percent(row.without_privacy),
                percent(row.majority),
                f"{100 * row.cost:.1f} points",
            ]
            for row in found.methods
        ],
        title=f"Estimated test accuracy after the last round, {len(found.seeds)} seeds",
    )
    print(found.worth)


def _clients(
    budgets: Path | None,
    distribution: str | None,
    clients: int | None,
    records: int | None,
    delta: float,
    seed: int | None,
) -> tuple[list[tuple[str, Budget, int]], int | None]:
    """Return names, budgets and numbers of records, from a file or drawn; and the seed they were drawn by."""
    import numpy as np

    from polyeps.core import Budget
    from polyeps.data.budgets import DISTRIBUTIONS, draw_budgets, read_budgets

    if (budgets is None) == (distribution is None):
        raise InputError("give either --budgets FILE.csv or --distribution NAME")
    if budgets is not None:
        listed = read_budgets(budgets, delta)
        return [(row.client, row.budget, _known(row.client, row.records, records)) for row in listed], seed
    if clients is None or distribution is None:
        raise InputError("a distribution needs --clients, the number to draw")
    seed = secrets.randbits(32) if seed is None else seed
    drawn = draw_budgets(distribution, clients, np.random.default_rng(seed))
    remark(f"budgets drawn from {distribution}: {DISTRIBUTIONS[distribution].summary}, --seed {seed}")
    if drawn.warning:
        remark(drawn.warning)
    return [
        (f"client-{number}", Budget(float(epsilon), delta), _known(f"client-{number}", None, records))
        for number, epsilon in enumerate(drawn.epsilons)
    ], seed


def _known(client: str, own: int | None, for_all: int | None) -> int:
    count = own if own is not None else for_all
    if count is None:
        raise InputError(f"client {client!r} has no number of records; give --records or a records column")
    if count < 1:
        raise InputError(f"client {client!r} must have at least 1 record, not {count}")
    return count


def _draw(plans: Sequence[ClientPlan], rounds: Rounds, about: str) -> None:
    """Print one line per client, or per group of similar budgets when there are many."""
    planned = any(row.gain is not None for row in plans)
    work = ["batch", "steps", "less noise"] if planned else []
    print_table(
        ["client", "ε", *work, "σ", "spent", "of budget", "rounds it can afford", "limit"],
        [
            [
                group[0].client if len(group) == 1 else f"{len(group)} clients",
                span([row.epsilon for row in group]),
                *(_work(group) if planned else []),
                span([row.sigma for row in group]),
                span([row.spent for row in group]),
                _bar(min(row.spent / row.epsilon for row in group), 10),
                f"{_bar(min(row.rounds_affordable for row in group) / rounds.planned, 20)} "
                + span([row.rounds_affordable for row in group]),
                " or ".join(sorted({row.limit for row in group})),
            ]
            for group in grouped(plans, lambda row: row.epsilon)
        ],
        title=f"{about}{len(plans)} clients, {rounds.planned} rounds, each joined with probability {rounds.share:g} "
        f"({rounds.expected} rounds expected)",
    )
    if planned:
        print("Batch and steps are planned by budget; less noise: than with the batch and steps that are not planned.")
    idle = sum(row.limit == "rounds" for row in plans)
    none = sum(row.rounds_affordable == 0 for row in plans)
    print(f"{len(plans) - idle} clients are limited by their budget, {idle} by the number of rounds.")
    if none:
        print(f"{none} clients cannot afford a single round.")


def _work(group: Sequence[ClientPlan]) -> list[str]:
    """Return the work of some clients that was planned by their budgets: batch, steps, and what it gains."""
    gains = [row.gain or 1.0 for row in group]
    low, high = f"{min(gains):.1f}", f"{max(gains):.1f}"
    return [
        span([round(row.batch or 0) for row in group]),
        span([row.local_steps or 0 for row in group]),
        f"{low}x" if low == high else f"{low}x to {high}x",
    ]


def _bar(share: float, width: int) -> str:
    full = round(min(1.0, share) * width)
    return "█" * full + "░" * (width - full)
