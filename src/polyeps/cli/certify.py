"""`polyeps certify`: what an experiment, or a method described by flags, guarantees its clients."""

from typing import TYPE_CHECKING, Annotated

import typer

from polyeps.cli import files, flags
from polyeps.cli.output import Delta, Json, grouped, print_certificate, print_json, print_table, progress, span
from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps.cli.quick import Quick

certify_app = typer.Typer(
    cls=files.FileOrMethod,
    help="Certify an experiment's file, or a method: the paper's ε and ours.\n\n"
    "polyeps certify FILE.toml asks the experiment itself; polyeps certify file --help lists its options.",
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
    as_json: Json = False,
) -> None:
    """Certify every client of every method, before any record is used."""
    from polyeps.experiment.plan import certificates

    methods = []
    with progress("calibrating") as report:
        for job in files.jobs_of(experiment, changes, seed, trust_code, report):
            found = certificates(job, joined)
            budgets = job.budgets or (None,) * len(found)
            methods.append((job, [(c, b, found[c]) for c, b in zip(found, budgets, strict=True)]))
    if as_json:
        shown = [
            files.frame(job)
            | {
                "clients": [
                    {
                        "client": client,
                        "epsilon": budget.epsilon if budget else None,
                        "delta": budget.delta if budget else None,
                        "sigma": one.details["sigma"],
                        "rounds": one.details["rounds"],
                        "claimed": one.claimed,
                        "certified": one.certified,
                        "certified_if_draws_known": one.certified_if_draws_known,
                        "sampler": one.sampler,
                        "accountant": one.accountant,
                        "sentence": one.sentence,
                    }
                    for client, budget, one in rows
                ]
            }
            for job, rows in methods
        ]
        print_json({"experiment": str(experiment), "methods": shown})
        return
    for job, rows in methods:
        uses = job.rounds.expected if joined is None else joined
        print_table(
            ["client", "ε", "σ", "certified ε", "claimed ε"],
            [
                [
                    part[0][0] if len(part) == 1 else f"{len(part)} clients",
                    span([b.epsilon if b else float("inf") for _, b, _ in part]),
                    span([one.details["sigma"] for *_, one in part]),
                    span([one.certified for *_, one in part]),
                    span([one.claimed for *_, one in part if one.claimed is not None]) or "none",
                ]
                for part in grouped(rows, lambda row: row[1].epsilon if row[1] else float("inf"))
            ],
            title=f"{job.method.title}: {uses} of {job.rounds.planned} rounds",
        )
        client, _, strictest = min(rows, key=lambda row: row[2].certified)
        print(f"Client {client}: {strictest.sentence}\n")


def _certify(
    method: "Quick",
    sigma: Annotated[float, typer.Option(help="Noise standard deviation divided by the clip norm.")],
    delta: Delta,
    accountant: flags.AccountantFlag = "pld",
    as_json: Json = False,
) -> None:
    print_certificate(method.certificate(sigma, delta, accountant), as_json)


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
    as_json: Json = False,
) -> None:
    """FedSel: an index and a value per report, trusting nobody."""
    from polyeps.mechanisms import selection, values

    selection.check_selection(dimension, top, epsilon_select)
    first = 0.0 if select == "uniform" else epsilon_select
    second = 0.0 if value in ("none", "exact") else epsilon_value
    if value not in ("none", "exact"):
        values.check_epsilon_value(second)
    if not first + second:
        raise InputError("--epsilon-select is 0, and no value is sent; give the ε of the choice, above 0")
    share = first / (first + second)
    method = flags.fedsel_flags(select, dimension, top, value, share, reports, form)
    print_certificate(method.certificate(1 / (first + second), delta, accountant), as_json)
