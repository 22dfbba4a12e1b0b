"""`polyeps certify METHOD`: what a method promises at a given noise."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from polyeps.cli import options as o
from polyeps.cli.output import Delta, Json, print_certificate, print_json, print_table
from polyeps.errors import InputError

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
    sigma: Annotated[float | None, typer.Option(help="Noise deviation of a release over its clip norm.")] = None,
    delta: Delta = 1e-4,
    sampler: o.Sampler = "poisson",
    survivors: o.Survivors = None,
    accountant: o.Accountant = "pld",
    table: Annotated[bool, typer.Option("--table", help="Compare all accounts of this setting instead.")] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="For the table: the ε that every account is asked for; 1 by default.")
    ] = None,
    coordinates: Annotated[
        int | None, typer.Option(help="For the table: of each release, with integer noise; 60000 by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """CMP-Fed; sigma is the noise of each of a round's two releases.

    With --table: the sigma that every account asks for, and what it truly costs with cohorts of either kind; what
    dropouts and integer noise cost.
    """
    if table == (sigma is not None):
        raise InputError("give either --sigma, for a certificate, or --table, to compare accounts")
    if sigma is None:
        others = {
            "sampler": sampler != "poisson",
            "survivors": survivors is not None,
            "accountant": accountant != "pld",
        }
        _unused("--table", **others)
        chosen = 1.0 if epsilon is None else epsilon
        _compare(clients, cohort, rounds, chosen, delta, 60_000 if coordinates is None else coordinates, as_json)
        return
    _unused("--sigma", epsilon=epsilon is not None, coordinates=coordinates is not None)
    from polyeps import methods

    method = methods.cmp_fed(clients=clients, cohort=cohort, rounds=rounds, sampler=sampler, survivors=survivors)
    print_certificate(methods.certify(method, sigma, delta, accountant), as_json)


def _unused(asked: str, **given: bool) -> None:
    """Refuse options, by whether they were given, that say nothing about what is asked for."""
    for name, yes in given.items():
        if yes:
            raise InputError(f"--{name} changes nothing about what {asked} shows; leave it out")


def _compare(
    clients: int, cohort: int, rounds: int, epsilon: float, delta: float, coordinates: int, as_json: bool
) -> None:
    from polyeps_reproductions import cmp_fed_noise

    from polyeps.accounting import cache
    from polyeps.core import Budget

    setting = cmp_fed_noise.Setting(
        clients, cohort, rounds, Budget(epsilon, delta), coordinates, cache.default_directory()
    )
    found = cmp_fed_noise.table(setting)
    if as_json:
        print_json(found)
        return
    goal = f"ε = {epsilon:g}, δ = {delta:g}"
    print_table(
        ["account", "σ", "true ε, Poisson", "true ε, fixed size", "true ε, draws known", "enough for"],
        [[*list(row.values())[:-2], _enough(row)] for row in found["accounts"]],
        f"Noise of each release that accounts ask for, {goal}",
    )
    print_table(
        ["dropped", "true ε", "σ that allows for them"],
        [[f"{100 * row['dropped']:g} %", row["true"], row["sigma_to_allow_for_them"]] for row in found["dropouts"]],
        "Poisson cohorts of which some drop out or tell their noise",
    )
    print_table(
        ["noise", "steps in a clip norm", "true ε at the σ of Rényi", f"σ for {goal}"],
        [list(row.values()) for row in found["integers"]],
        f"Noise on integers, {coordinates} coordinates a release, Poisson cohorts; Skellam by Rényi, the other exactly",
    )


def _enough(account: Mapping[str, Any]) -> str:
    """What an account's noise is enough for, and whether the account could be trusted to say so."""
    return (" and ".join(account["enough_for"]) or "neither") + (
        "" if account["conditions_hold"] else ", but its conditions fail"
    )


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
