"""`polyeps certify METHOD`: what a method promises at a given noise."""

from typing import Annotated

import typer

from polyeps.cli import options as o
from polyeps.cli.output import Delta, Json, print_certificate

app = typer.Typer(help="Say what a method promises: the paper's figure and ours.", no_args_is_help=True)


@app.command("dp-sgd")
def dp_sgd(
    records: o.Records,
    batch: o.Batch,
    steps: o.Steps,
    sigma: o.Sigma,
    delta: Delta = 1e-5,
    sampler: o.Sampler = "poisson",
    accountant: o.Accountant = "pld",
    as_json: Json = False,
) -> None:
    """Local DP-SGD of one client (WeiAvg, PFA, PFA+, PDP-FL)."""
    from polyeps import methods

    method = methods.dp_sgd(records=records, batch=batch, steps=steps, sampler=sampler)
    print_certificate(methods.certify(method, sigma, delta, accountant), as_json)


@app.command("fedhdp")
def fedhdp(
    rate: o.Rate,
    sigma: o.Sigma,
    rounds: o.Rounds,
    clip_bit_sigma: o.ClipBitSigma = None,
    delta: Delta = 1e-4,
    accountant: o.Accountant = "pld",
    as_json: Json = False,
) -> None:
    """One privacy group of FedHDP; sigma is the noise added to the updates."""
    from polyeps import methods

    method = methods.fedhdp(rate=rate, rounds=rounds, clip_bit_sigma=clip_bit_sigma)
    print_certificate(methods.certify(method, sigma, delta, accountant), as_json)


@app.command("cmp-fed")
def cmp_fed(
    clients: o.Clients,
    cohort: o.Cohort,
    rounds: o.Rounds,
    sigma: o.Sigma,
    delta: Delta = 1e-4,
    sampler: o.Sampler = "poisson",
    survivors: o.Survivors = None,
    accountant: o.Accountant = "pld",
    as_json: Json = False,
) -> None:
    """CMP-Fed; sigma is the noise of each of a round's two releases."""
    from polyeps import methods

    method = methods.cmp_fed(clients=clients, cohort=cohort, rounds=rounds, sampler=sampler, survivors=survivors)
    print_certificate(methods.certify(method, sigma, delta, accountant), as_json)


@app.command("fedsel")
def fedsel(
    select: o.Select,
    dimension: o.Dimension,
    top: o.Top,
    epsilon_select: Annotated[float, typer.Option(help="ε of the choice of index.")] = 0.0,
    value: o.Value = "grid-pm",
    epsilon_value: Annotated[float, typer.Option(help="ε of the value.")] = 0.0,
    reports: o.Reports = 1,
    form: o.Form = "sound",
    delta: Delta = 0.0,
    accountant: o.Accountant = "pld",
    as_json: Json = False,
) -> None:
    """FedSel: an index and a value per report, trusting nobody."""
    from polyeps import methods

    method = methods.fedsel(
        select=select,
        dimension=dimension,
        top=top,
        value=value,
        reports=reports,
        form=form,
        epsilon_select=epsilon_select,
        epsilon_value=epsilon_value,
    )
    print_certificate(methods.certify(method, 1.0, delta, accountant), as_json)
