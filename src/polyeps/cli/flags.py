"""Methods described by flags: each is written once, and is a command of `certify` and one of `calibrate`."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from polyeps.cli.quick import Quick

SamplerFlag = Annotated[Literal["poisson", "fixed"], typer.Option(help="How batches or cohorts are drawn.")]
AccountantFlag = Annotated[Literal["pld", "rdp"], typer.Option(help="Exact privacy losses, or Rényi.")]
RoundsFlag = Annotated[int, typer.Option(help="RoundsFlag of the run.")]
SelectFlag = Annotated[Literal["exp", "pe", "ps", "uniform"], typer.Option(help="How the index is chosen.")]
DimensionFlag = Annotated[int, typer.Option(help="Coordinates to choose from.")]
TopFlag = Annotated[int, typer.Option(help="How many coordinates count as the largest.")]
ValueFlag = Annotated[
    Literal["pm", "hm", "duchi", "grid-pm", "none", "exact"],
    typer.Option(help="How the value is perturbed; none sends the index alone, exact sends it as it is."),
]
ReportsFlag = Annotated[int, typer.Option(help="Reports one client sends.")]
FormFlag = Annotated[Literal["sound", "published"], typer.Option(help="Ours, or the paper's as printed.")]


def dp_sgd_flags(
    records: Annotated[int, typer.Option(help="Records the client holds.")],
    batch: Annotated[int, typer.Option(help="Expected (poisson) or exact (fixed) batch size.")],
    steps: Annotated[int, typer.Option(help="Local steps in all rounds together.")],
    sampler: SamplerFlag = "poisson",
) -> "Quick":
    """Local DP-SGD of one client (WeiAvg, PFA, PFA+, PDP-FL)."""
    from polyeps.cli.quick import quick_dp_sgd

    return quick_dp_sgd(records=records, batch=batch, steps=steps, sampler=sampler)


def fedhdp_flags(
    rate: Annotated[float, typer.Option(help="Probability that a client is in a round's cohort.")],
    rounds: RoundsFlag,
    clip_bit_sigma: Annotated[
        float | None, typer.Option(help="Noise of the clip bit; leave out with a fixed clip norm.")
    ] = None,
) -> "Quick":
    """One privacy group of FedHDP; sigma is the noise added to the updates."""
    from polyeps.cli.quick import quick_fedhdp

    return quick_fedhdp(rate=rate, rounds=rounds, clip_bit_sigma=clip_bit_sigma)


def cmp_fed_flags(
    clients: Annotated[int, typer.Option(help="Clients enrolled.")],
    cohort: Annotated[int, typer.Option(help="Expected (poisson) or exact (fixed) cohort size.")],
    rounds: RoundsFlag,
    sampler: SamplerFlag = "poisson",
    survivors: Annotated[
        int | None, typer.Option(help="Honest clients of a cohort sure to add noise; all by default.")
    ] = None,
) -> "Quick":
    """CMP-Fed; sigma is the noise of each of a round's two releases."""
    from polyeps.cli.quick import quick_cmp_fed

    return quick_cmp_fed(clients=clients, cohort=cohort, rounds=rounds, sampler=sampler, survivors=survivors)


def fedsel_flags(
    select: SelectFlag,
    dimension: DimensionFlag,
    top: TopFlag,
    value: ValueFlag = "grid-pm",
    share: Annotated[float, typer.Option(help="Part of a report's ε that goes to the choice of index.")] = 0.1,
    reports: ReportsFlag = 1,
    form: FormFlag = "sound",
) -> "Quick":
    """FedSel: an index and a value per report, trusting nobody."""
    from polyeps.cli.quick import quick_fedsel

    return quick_fedsel(
        select=select, dimension=dimension, top=top, value=value, reports=reports, form=form, share=share
    )


# By name: the method, and its usual δ.
_METHODS: dict[str, tuple[Callable[..., "Quick"], float]] = {
    "dp-sgd": (dp_sgd_flags, 1e-5),
    "fedhdp": (fedhdp_flags, 1e-4),
    "cmp-fed": (cmp_fed_flags, 1e-4),
    "fedsel": (fedsel_flags, 0.0),
}


def add_methods(app: typer.Typer, act: Callable[..., None], skip: tuple[str, ...] = ()) -> None:
    """Add a command for each method: `act` takes it as its first argument, and its own flags after it."""
    _, *others = inspect.signature(act).parameters.values()
    for name, (describe, delta) in _METHODS.items():
        if name not in skip:
            app.command(name)(_joined(describe, act, [_with_default(one, delta) for one in others]))


def _with_default(flag: inspect.Parameter, delta: float) -> inspect.Parameter:
    return flag.replace(default=delta) if flag.name == "delta" else flag


def _joined(
    describe: Callable[..., "Quick"], act: Callable[..., None], others: list[inspect.Parameter]
) -> Callable[..., None]:
    """Return a function with the flags of both."""
    own = list(inspect.signature(describe).parameters.values())

    def command(**values: Any) -> None:
        act(describe(**{one.name: values.pop(one.name) for one in own}), **values)

    flags = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *others)]
    command.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in flags}
    command.__doc__ = describe.__doc__
    return command
