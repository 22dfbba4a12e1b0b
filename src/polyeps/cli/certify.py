"""`polyeps certify` and `polyeps calibrate`: guarantees and noise, of an experiment or a method described by flags."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyeps.cli import files, flags
from polyeps.cli.output import (
    Delta,
    Json,
    grouped,
    parse_epsilons,
    print_facts,
    print_json,
    print_table,
    progress,
    span,
)
from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps.accounting.certificate import Certificate
    from polyeps.cli.quick import Quick

_FILE_TOO = "polyeps {0} FILE.toml asks the experiment itself; polyeps {0} file --help lists its options."
_SHOWN = ("claimed", "certified", "certified_if_draws_known", "sampler", "accountant", "sentence")
_OF_A_REPORT = {"epsilon_select": "ε of the choice", "epsilon_value": "ε of the value"}
Claimed = Annotated[bool, typer.Option("--claimed", help="Show also the figure of the paper's formula.")]
certify_app = typer.Typer(
    cls=files.FileOrMethod,
    help=f"Certify an experiment, or one method, in words and figures.\n\n{_FILE_TOO.format('certify')}",
    no_args_is_help=True,
)
calibrate_app = typer.Typer(
    cls=files.FileOrMethod,
    help=f"Find the noise that spends a budget, and no more.\n\n{_FILE_TOO.format('calibrate')}",
    no_args_is_help=True,
)


@certify_app.command("file")
def certify_file(
    experiment: files.ExperimentFile,
    joined: Annotated[
        int | None, typer.Option(min=1, help="Rounds a client joins; by default those its noise is calibrated for.")
    ] = None,
    changes: files.Changes = None,
    seed: files.Seed = None,
    trust_code: files.TrustCode = False,
    claimed: Claimed = False,
    as_json: Json = False,
) -> None:
    """Certify every client of every method, before any record is used."""
    from polyeps.experiment.plan import certificates

    methods = []
    with progress("calibrating") as report:
        for job in files.jobs_of(experiment, changes, seed, trust_code, report):
            found = certificates(job, joined)
            budgets = job.budgets or (None,) * len(found)
            rows = [
                {
                    "client": client,
                    "epsilon": budget.epsilon if budget else None,
                    "delta": budget.delta if budget else None,
                    "sigma": one.details["sigma"],
                    "rounds": one.details["rounds"],
                    **{name: getattr(one, name) for name in _SHOWN},
                }
                for (client, one), budget in zip(found.items(), budgets, strict=True)
            ]
            methods.append((job, rows))
    if as_json:
        files.print_jobs(experiment, methods)
        return
    columns = {"epsilon": "ε", "sigma": "σ", "certified": "certified ε"}
    for titles, job, rows in files.with_same_figures(methods):
        uses = job.rounds.expected if joined is None else joined
        strictest = min(rows, key=lambda row: row["certified"])
        whose = "" if job.budgets is None else f", client {strictest['client']}"
        print(f"{titles}{whose}: {strictest['sentence']}\n")
        if job.budgets is None:
            continue  # no noise, no guarantee, no figures
        paper = {"claimed": "the paper claims"} if claimed or job.method.form == "published" else {}
        _print_clients(columns | paper, rows, f"{titles}: {uses} of {job.rounds.planned} rounds")


@calibrate_app.command("file")
def calibrate_file(
    experiment: files.ExperimentFile,
    changes: files.Changes = None,
    seed: files.Seed = None,
    trust_code: files.TrustCode = False,
    as_json: Json = False,
) -> None:
    """Calibrate the noise of every client of every method to its budget."""
    from polyeps.experiment.plan import plan

    columns = {"epsilon": "ε", "delta": "δ", "records": "records", "sigma": "σ", "spent": "spent"}
    with progress("calibrating") as report:
        methods = [
            (job, [{key: getattr(row, key) for key in ("client", *columns)} for row in plan(job)])
            for job in files.jobs_of(experiment, changes, seed, trust_code, report)
        ]
    if as_json:
        files.print_jobs(experiment, methods)
        return
    for titles, job, rows in files.with_same_figures(methods):
        title = f"{titles}: noise for {job.rounds.expected} of {job.rounds.planned} rounds"
        if rows:
            person = job.population.trained.person
            _print_clients({**columns, "records": f"{person}s"} if person else columns, rows, title)
        else:
            print(f"{titles}: no client has a guarantee, so no noise is added.\n")


def _print_clients(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print one line per client, or per group of similar budgets when there are many."""
    unknown = {"epsilon": "∞", "claimed": "none"}
    print_table(
        ["client", *columns.values()],
        [
            [
                part[0]["client"] if len(part) == 1 else f"{len(part)} clients",
                *(span([row[key] for row in part if row[key] is not None]) or unknown[key] for key in columns),
            ]
            for part in grouped(rows, lambda row: row["epsilon"] or float("inf"))
        ],
        title=title,
    )


def _print_certificate(certificate: "Certificate", claimed: bool, as_json: bool) -> None:
    """Print a certificate: its sentence, then its figures; the paper's among them only where it is asked for."""
    if as_json:
        print_json(certificate.as_dict())
        return
    shown = certificate.as_dict()
    details, sentence = shown.pop("details"), shown.pop("sentence")
    del shown["conditions"]  # the sentence ends with them
    if not claimed and certificate.form != "published":
        del shown["claimed"]
    print(f"{sentence}\n")
    print_facts({**shown, **details})


def _certify(
    method: "Quick",
    sigma: Annotated[float, typer.Option(help="Noise standard deviation divided by the clip norm.")],
    delta: Delta,
    accountant: flags.AccountantFlag = "pld",
    claimed: Claimed = False,
    as_json: Json = False,
) -> None:
    _print_certificate(method.certificate(sigma, delta, accountant), claimed, as_json)


flags.add_methods(certify_app, _certify, skip=("fedsel",))


@certify_app.command("fedsel")
def certify_fedsel(
    select: flags.SelectFlag,
    dimension: flags.DimensionFlag,
    top: flags.TopFlag,
    epsilon_select: Annotated[float, typer.Option(help="ε of the choice of index.")] = 0.0,
    value: flags.ValueFlag = "grid-pm",
    epsilon_value: Annotated[float, typer.Option(help="ε of the value.")] = 0.0,
    reports: flags.ReportsFlag = 1,
    form: flags.FormFlag = "sound",
    delta: Delta = 0.0,
    accountant: flags.AccountantFlag = "pld",
    claimed: Claimed = False,
    as_json: Json = False,
) -> None:
    """FedSel: an index and a value per report, trusting nobody."""
    from polyeps.cli.quick import quick_fedsel
    from polyeps.mechanisms import selection, values

    selection.check_selection(dimension, top, epsilon_select)
    first = 0.0 if select == "uniform" else epsilon_select
    second = 0.0 if value in ("none", "exact") else epsilon_value
    if value not in ("none", "exact"):
        values.check_epsilon_value(second)
    if not first + second:
        raise InputError("--epsilon-select is 0, and no value is sent; give the ε of the choice, above 0")
    share = first / (first + second)
    method = quick_fedsel(
        select=select, dimension=dimension, top=top, value=value, share=share, reports=reports, form=form
    )
    _print_certificate(method.certificate(1 / (first + second), delta, accountant), claimed, as_json)


def _calibrate(
    method: "Quick",
    epsilon: Annotated[str, typer.Option(help="One budget, or several separated by commas.")],
    delta: Delta,
    accountant: flags.AccountantFlag = "pld",
    claimed: Claimed = False,
    as_json: Json = False,
) -> None:
    """Calibrate for each ε and print one frame for all."""
    from polyeps.accounting import cache
    from polyeps.accounting.calibration import calibrate
    from polyeps.core import Budget

    noisy = method.name != "fedsel"  # whose answer is the ε of each report's two steps
    budgets = [Budget(value, delta) for value in parse_epsilons(epsilon)]
    with progress("calibrating") as report:
        answer = calibrate(
            budgets,
            method.price,
            method.uses,
            adjacency=method.build(0.0).adjacency,
            accountant=accountant,
            tolerance=1e-4 if noisy else 1e-6,
            directory=cache.default_directory(),
            progress=report,
        )
    sigmas = [method.sigma(float(multiplier)) for multiplier in answer.noise_multiplier]
    certificates = [method.certificate(sigma, delta, accountant) for sigma in sigmas]
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
    headings = {"epsilon": "ε", "sigma": "σ", "certified": "certified ε"} | ({} if noisy else _OF_A_REPORT)
    if claimed or certificates[0].form == "published":
        headings["claimed"] = "the paper claims"
    if not noisy:
        del headings["sigma"]
    print_table(list(headings.values()), [[result[key] for key in headings] for result in results])


flags.add_methods(calibrate_app, _calibrate)
