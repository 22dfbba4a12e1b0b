"""Methods described by flags: each is written once, and is a command of `certify` and one of `calibrate`."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

SamplerFlag = Annotated[Literal["poisson", "fixed"], typer.Option(help="How batches or cohorts are drawn.")]
AccountantFlag = Annotated[Literal["pld", "rdp"], typer.Option(help="Privacy loss distributions (exact), or Rényi.")]
RoundsFlag = Annotated[int, typer.Option(help="Rounds of the run.")]
SelectFlag = Annotated[Literal["exp", "pe", "ps", "uniform"], typer.Option(help="How the index is chosen.")]
DimensionFlag = Annotated[int, typer.Option(help="Coordinates to choose from.")]
TopFlag = Annotated[int, typer.Option(help="Number of coordinates that count as largest.")]
ValueFlag = Annotated[
    Literal["pm", "hm", "duchi", "grid-pm", "none", "exact"],
    typer.Option(help="How the value is perturbed; none sends the index alone, exact adds no noise."),
]
ReportsFlag = Annotated[int, typer.Option(help="Reports one client sends.")]
FormFlag = Annotated[Literal["sound", "published"], typer.Option(help="Ours, or the paper's as printed.")]


# Signatures and help texts alone: `quick` has a function for each, which takes the same arguments.
def _dp_sgd(
    records: Annotated[int, typer.Option(help="Records the client holds.")],
    batch: Annotated[int, typer.Option(help="Expected (poisson) or exact (fixed) batch size.")],
    steps: Annotated[int, typer.Option(help="Local steps in all rounds together.")],
    sampler: SamplerFlag = "poisson",
) -> None:
    """Local DP-SGD of one client (WeiAvg, PFA, PFA+, PDP-FL)."""


def _fedhdp(
    rate: Annotated[float, typer.Option(help="Probability that a client is in a round's cohort.")],
    rounds: RoundsFlag,
    clip_bit_sigma: Annotated[float | None, typer.Option(help="Noise of the clip bit, if clips are adaptive.")] = None,
) -> None:
    """One privacy group of FedHDP; sigma is the noise added to the updates."""


def _cmp_fed(
    clients: Annotated[int, typer.Option(help="Clients enrolled.")],
    cohort: Annotated[int, typer.Option(help="Expected (poisson) or exact (fixed) cohort size.")],
    rounds: RoundsFlag,
    sampler: SamplerFlag = "poisson",
    survivors: Annotated[int | None, typer.Option(help="Honest clients sure to add noise; all by default.")] = None,
) -> None:
    """CMP-Fed; sigma is the noise of each of a round's two releases."""


def _fedsel(
    select: SelectFlag,
    dimension: DimensionFlag,
    top: TopFlag,
    value: ValueFlag = "grid-pm",
    share: Annotated[float, typer.Option(help="Share of a report's ε for choosing the index.")] = 0.1,
    reports: ReportsFlag = 1,
    form: FormFlag = "sound",
) -> None:
    """FedSel: an index and a value per report, trusting nobody."""


# By name: the method's flags, and its usual δ.
_METHODS: dict[str, tuple[Callable[..., None], float]] = {
    "dp-sgd": (_dp_sgd, 1e-5),
    "fedhdp": (_fedhdp, 1e-4),
    "cmp-fed": (_cmp_fed, 1e-4),
    "fedsel": (_fedsel, 0.0),
}


def add_methods(app: typer.Typer, act: Callable[..., None], skip: tuple[str, ...] = ()) -> None:
    """Add a command for each method: `act` takes it as its first argument, and its own flags after it."""
    for name in _METHODS:
        if name not in skip:
            app.command(name)(_command(name, act))


def _command(name: str, act: Callable[..., None]) -> Callable[..., None]:
    """Return a function with the flags of a method and those of `act`."""
    describe, delta = _METHODS[name]
    own, (_, *others) = inspect.signature(describe).parameters, inspect.signature(act).parameters.values()
    flags = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own.values(), *others)]
    flags = [one.replace(default=delta) if one.name == "delta" else one for one in flags]

    def command(**values: Any) -> None:
        from polyeps.cli import quick

        build = getattr(quick, f"quick_{name.replace('-', '_')}")
        act(build(**{flag: values.pop(flag) for flag in own}), **values)

    command.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in flags}
    command.__doc__ = describe.__doc__
    return command
