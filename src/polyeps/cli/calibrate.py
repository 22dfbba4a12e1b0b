"""`polyeps calibrate`: the noise that spends a budget, for an experiment's clients or a method described by flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyeps.cli import files
from polyeps.cli import options as o
from polyeps.cli.output import Delta, Json, grouped, parse_epsilons, print_json, print_table, progress, span

if TYPE_CHECKING:
    from polyeps.cli.quick import Quick

app = typer.Typer(
    cls=files.FileOrMethod,
    help="Find the noise that spends a budget, and no more.\n\n"
    "polyeps calibrate FILE.toml asks the experiment itself; polyeps calibrate file --help lists its options.",
    no_args_is_help=True,
)
Epsilon = Annotated[str, typer.Option(help="One budget, or several with commas between.")]


@app.command("file")
def calibrate_file(
    experiment: files.Experiment, changes: files.Changes = None, seed: files.Seed = None, as_json: Json = False
) -> None:
    """Calibrate the noise of every client of every method to its budget."""
    from polyeps.experiment.plan import plan

    with progress("calibrating") as report:
        methods = [(job, plan(job)) for job in files.jobs_of(experiment, changes, seed, report)]
    if as_json:
        keys = ("client", "epsilon", "delta", "records", "sigma", "spent")
        shown = [
            files.frame(job) | {"clients": [{key: getattr(row, key) for key in keys} for row in rows]}
            for job, rows in methods
        ]
        print_json({"experiment": str(experiment), "methods": shown})
        return
    for job, rows in methods:
        if not rows:
            print(f"{job.method.title}: no client has a guarantee, so no noise is added.\n")
            continue
        print_table(
            ["client", "ε", "δ", "records", "σ", "spent"],
            [
                [
                    part[0].client if len(part) == 1 else f"{len(part)} clients",
                    *(
                        span([getattr(row, key) for row in part])
                        for key in ("epsilon", "delta", "records", "sigma", "spent")
                    ),
                ]
                for part in grouped(rows, lambda row: row.epsilon)
            ],
            title=f"{job.method.title}: noise for {job.rounds.expected} of {job.rounds.planned} rounds",
        )


@app.command("dp-sgd")
def dp_sgd(
    records: o.Records,
    batch: o.Batch,
    steps: o.Steps,
    epsilon: Epsilon,
    delta: Delta = 1e-5,
    sampler: o.Sampler = "poisson",
    accountant: o.Accountant = "pld",
    as_json: Json = False,
) -> None:
    """Local DP-SGD of one client (WeiAvg, PFA, PFA+, PDP-FL)."""
    from polyeps.cli.quick import quick_dp_sgd

    method = quick_dp_sgd(records=records, batch=batch, steps=steps, sampler=sampler)
    _answer(method, epsilon, delta, accountant, as_json)


@app.command("fedhdp")
def fedhdp(
    rate: o.Rate,
    rounds: o.Rounds,
    epsilon: Epsilon,
    clip_bit_sigma: o.ClipBitSigma = None,
    delta: Delta = 1e-4,
    accountant: o.Accountant = "pld",
    as_json: Json = False,
) -> None:
    """One privacy group of FedHDP; the answer is the noise to add to the updates."""
    from polyeps.cli.quick import quick_fedhdp

    method = quick_fedhdp(rate=rate, rounds=rounds, clip_bit_sigma=clip_bit_sigma)
    _answer(method, epsilon, delta, accountant, as_json)


@app.command("cmp-fed")
def cmp_fed(
    clients: o.Clients,
    cohort: o.Cohort,
    rounds: o.Rounds,
    epsilon: Epsilon,
    delta: Delta = 1e-4,
    sampler: o.Sampler = "poisson",
    survivors: o.Survivors = None,
    accountant: o.Accountant = "pld",
    as_json: Json = False,
) -> None:
    """CMP-Fed; the answer is the noise of each of a round's two releases."""
    from polyeps.cli.quick import quick_cmp_fed

    method = quick_cmp_fed(clients=clients, cohort=cohort, rounds=rounds, sampler=sampler, survivors=survivors)
    _answer(method, epsilon, delta, accountant, as_json)


@app.command("fedsel")
def fedsel(
    select: o.Select,
    dimension: o.Dimension,
    top: o.Top,
    epsilon: Epsilon,
    value: o.Value = "grid-pm",
    share: Annotated[float, typer.Option(help="Part of a report's ε that goes to the choice of index.")] = 0.1,
    reports: o.Reports = 1,
    form: o.Form = "sound",
    delta: Delta = 0.0,
    accountant: o.Accountant = "pld",
    as_json: Json = False,
) -> None:
    """FedSel; the answer is ε of each report's two steps, and sigma is empty because there is no noise multiplier."""
    from polyeps.cli.quick import quick_fedsel

    method = quick_fedsel(
        select=select, dimension=dimension, top=top, value=value, reports=reports, form=form, share=share
    )
    _answer(method, epsilon, delta, accountant, as_json, tolerance=1e-6)


def _answer(method: Quick, epsilon: str, delta: float, accountant: Any, as_json: bool, tolerance: float = 1e-4) -> None:
    """Calibrate for each ε and print one frame for all."""
    from polyeps.accounting import cache
    from polyeps.accounting.calibration import calibrate
    from polyeps.core import Budget

    budgets = [Budget(value, delta) for value in parse_epsilons(epsilon)]
    with progress("calibrating") as report:
        answer = calibrate(
            budgets,
            method.price,
            method.uses,
            adjacency=method.build(0.0).adjacency,
            accountant=accountant,
            tolerance=tolerance,
            directory=cache.default_directory(),
            progress=report,
        )
    sigmas = [method.sigma(float(multiplier)) for multiplier in answer.scale]
    certificates = [method.certificate(sigma, delta, accountant) for sigma in sigmas]
    noisy = method.name != "fedsel"
    results = [
        {"epsilon": budget.epsilon, "sigma": sigma if noisy else None, "certified": certificate.certified}
        | {"claimed": certificate.claimed}
        | ({} if noisy else {key: certificate.details[key] for key in ("epsilon_select", "epsilon_value")})
        for budget, sigma, certificate in zip(budgets, sigmas, certificates, strict=True)
    ]
    if as_json:
        frame = certificates[0].as_dict()
        for key in ("claimed", "certified", "sentence"):
            frame.pop(key)
        print_json(frame | {"results": results})
        return
    print_table(list(results[0]), [list(result.values()) for result in results])
