"""`polyeps plan`: what a federation would cost each client, before any data is touched."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyeps.cli.output import Json, figure, print_json, print_table, progress, remark
from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps.core import Budget
    from polyeps.plan import ClientPlan, Schedule

_MOST_LINES = 30


def plan(
    batch: Annotated[int, typer.Option(help="Expected batch size of a local step.")],
    local_steps: Annotated[int, typer.Option(help="Local steps per round.")],
    rounds: Annotated[int, typer.Option(help="Rounds of the run.")],
    budgets: Annotated[Path | None, typer.Option(help="CSV: client, epsilon and, if wanted, delta, records.")] = None,
    distribution: Annotated[
        str | None, typer.Option(help="uniform, gauss, pareto, mixgauss1 to 4, or a variant.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients to draw from the distribution.")] = None,
    records: Annotated[int | None, typer.Option(help="Records per client, where the file does not say.")] = None,
    participation: Annotated[float, typer.Option(help="Share of clients in each round.")] = 1.0,
    delta: Annotated[float, typer.Option(help="δ, where the file does not say.")] = 1e-5,
    sigma: Annotated[float | None, typer.Option(help="One noise for all clients instead of each its own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat a draw; without it one is drawn and told.")] = None,
    as_json: Json = False,
) -> None:
    """Say, for every client, its noise, how many rounds it can afford and what it will have spent."""
    import numpy as np

    from polyeps.accounting import cache
    from polyeps.core import Budget
    from polyeps.data.budgets import DISTRIBUTIONS, draw_budgets, read_budgets
    from polyeps.plan import Schedule
    from polyeps.plan import plan as make_plan

    schedule = Schedule(batch, local_steps, rounds, participation)
    if (budgets is None) == (distribution is None):
        raise InputError("give either --budgets FILE.csv or --distribution NAME")
    people: list[tuple[str, Budget, int]]
    if budgets is not None:
        people = [
            (row.client, row.budget, _known(row.client, row.records, records)) for row in read_budgets(budgets, delta)
        ]
    else:
        if clients is None or distribution is None:
            raise InputError("a distribution needs --clients, the number to draw")
        seed = secrets.randbits(32) if seed is None else seed
        drawn = draw_budgets(distribution, clients, np.random.default_rng(seed))
        remark(f"budgets drawn from {distribution}: {DISTRIBUTIONS[distribution].summary}, --seed {seed}")
        if drawn.warning:
            remark(drawn.warning)
        people = [
            (f"client-{number}", Budget(float(epsilon), delta), _known(f"client-{number}", None, records))
            for number, epsilon in enumerate(drawn.epsilons)
        ]
    with progress("planning") as report:
        plans = make_plan(people, schedule, sigma=sigma, directory=cache.default_directory(), progress=report)
    if as_json:
        print_json({**asdict(schedule), "seed": seed, "clients": [asdict(row) for row in plans]})
    else:
        _draw(plans, schedule)


def _known(client: str, own: int | None, for_all: int | None) -> int:
    count = own if own is not None else for_all
    if count is None:
        raise InputError(f"client {client!r} has no number of records; give --records or a records column")
    if count < 1:
        raise InputError(f"client {client!r} must have at least 1 record, not {count}")
    return count


def _draw(plans: Sequence[ClientPlan], schedule: Schedule) -> None:
    """One line per client, or per group of similar budgets when there are many."""
    ordered = sorted(plans, key=lambda row: row.epsilon)
    groups = [[row] for row in ordered]
    if len(ordered) > _MOST_LINES:
        width = math.log(ordered[-1].epsilon / ordered[0].epsilon) / _MOST_LINES or 1.0
        groups = []
        for row in ordered:
            if not groups or math.log(row.epsilon / groups[-1][0].epsilon) > width:
                groups.append([])
            groups[-1].append(row)
    print_table(
        ["client", "ε", "σ", "spent", "of budget", "rounds it can afford", "limit"],
        [
            [
                group[0].client if len(group) == 1 else f"{len(group)} clients",
                _range([row.epsilon for row in group]),
                _range([row.sigma for row in group]),
                _range([row.spent for row in group]),
                _bar(min(row.spent / row.epsilon for row in group), 10),
                f"{_bar(min(row.rounds_affordable for row in group) / schedule.rounds, 20)} "
                + _range([row.rounds_affordable for row in group]),
                " or ".join(sorted({row.limit for row in group})),
            ]
            for group in groups
        ],
        title=f"{len(plans)} clients, {schedule.rounds} rounds of {schedule.local_steps} local steps, "
        f"each joined with probability {schedule.participation:g} ({schedule.expected_rounds} rounds expected)",
    )
    idle = sum(row.limit == "rounds" for row in plans)
    none = sum(row.rounds_affordable == 0 for row in plans)
    print(f"{len(plans) - idle} clients are limited by their budget, {idle} by the number of rounds.")
    if none:
        print(f"{none} clients cannot afford a single round.")


def _range(values: Sequence[float]) -> str:
    low, high = figure(min(values)), figure(max(values))
    return low if low == high else f"{low} – {high}"


def _bar(share: float, width: int) -> str:
    full = round(min(1.0, share) * width)
    return "█" * full + "░" * (width - full)
