"""`polyeps calibrate`: the noise that spends a budget, for an experiment's clients or a method described by flags."""

from typing import TYPE_CHECKING, Annotated

import typer

from polyeps.cli import files, flags
from polyeps.cli.output import Delta, Json, grouped, parse_epsilons, print_json, print_table, progress, span

if TYPE_CHECKING:
    from polyeps.cli.quick import Quick

calibrate_app = typer.Typer(
    cls=files.FileOrMethod,
    help="Find the noise that spends a budget, and no more.\n\n"
    "polyeps calibrate FILE.toml asks the experiment itself; polyeps calibrate file --help lists its options.",
    no_args_is_help=True,
)


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

    with progress("calibrating") as report:
        methods = [(job, plan(job)) for job in files.jobs_of(experiment, changes, seed, trust_code, report)]
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


def _calibrate(
    method: "Quick",
    epsilon: Annotated[str, typer.Option(help="One budget, or several with commas between.")],
    delta: Delta,
    accountant: flags.AccountantFlag = "pld",
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
    print_table(list(results[0]), [list(result.values()) for result in results])


flags.add_methods(calibrate_app, _calibrate)
