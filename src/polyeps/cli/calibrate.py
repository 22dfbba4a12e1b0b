"""`polyeps calibrate METHOD`: the noise that spends a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyeps.cli import options as o
from polyeps.cli.output import Delta, Json, parse_epsilons, print_json, print_table, progress

if TYPE_CHECKING:
    from polyeps.methods import Method

app = typer.Typer(help="Find the noise that spends a budget, and no more.", no_args_is_help=True)
Epsilon = Annotated[str, typer.Option(help="One budget, or several with commas between.")]


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
    from polyeps import methods

    _answer(
        methods.dp_sgd(records=records, batch=batch, steps=steps, sampler=sampler), epsilon, delta, accountant, as_json
    )


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
    from polyeps import methods

    _answer(
        methods.fedhdp(rate=rate, rounds=rounds, clip_bit_sigma=clip_bit_sigma), epsilon, delta, accountant, as_json
    )


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
    from polyeps import methods

    method = methods.cmp_fed(clients=clients, cohort=cohort, rounds=rounds, sampler=sampler, survivors=survivors)
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
    """FedSel; the answer is ε of each report's two steps, and sigma is empty because there is no noise scale."""
    from polyeps import methods

    method = methods.fedsel(
        select=select, dimension=dimension, top=top, value=value, reports=reports, form=form, share=share
    )
    _answer(method, epsilon, delta, accountant, as_json, tolerance=1e-6)


def _answer(
    method: Method, epsilon: str, delta: float, accountant: Any, as_json: bool, tolerance: float = 1e-4
) -> None:
    """Calibrate for each ε and print one frame for all."""
    from polyeps import methods
    from polyeps.accounting import cache
    from polyeps.accounting.calibration import calibrate
    from polyeps.core import Budget

    budgets = [Budget(value, delta) for value in parse_epsilons(epsilon)]
    with progress("calibrating") as report:
        answer = calibrate(
            budgets,
            method.price,
            method.uses,
            adjacency=method.adjacency,
            accountant=accountant,
            tolerance=tolerance,
            directory=cache.default_directory(),
            progress=report,
        )
    certificates = [methods.certify(method, float(scale), delta, accountant) for scale in answer.noise_multiplier]
    noisy = method.name != "fedsel"
    results = [
        {"epsilon": budget.epsilon, "sigma": float(scale) if noisy else None, "certified": certificate.certified}
        | {"claimed": certificate.claimed}
        | ({} if noisy else {key: certificate.details[key] for key in ("epsilon_select", "epsilon_value")})
        for budget, scale, certificate in zip(budgets, answer.noise_multiplier, certificates, strict=True)
    ]
    if as_json:
        frame = certificates[0].as_dict()
        for key in ("claimed", "certified", "sentence"):
            frame.pop(key)
        print_json(frame | {"results": results})
        return
    print_table(list(results[0]), [list(result.values()) for result in results])
