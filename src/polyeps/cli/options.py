"""The options that `certify` and `calibrate` share."""

from typing import Annotated, Literal

import typer

Records = Annotated[int, typer.Option(help="Records the client holds.")]
Batch = Annotated[int, typer.Option(help="Expected (poisson) or exact (fixed) batch size.")]
Steps = Annotated[int, typer.Option(help="Local steps in all rounds together.")]
Sigma = Annotated[float, typer.Option(help="Noise standard deviation divided by the clip norm.")]
Sampler = Annotated[Literal["poisson", "fixed"], typer.Option(help="How batches or cohorts are drawn.")]
Accountant = Annotated[
    Literal["pld", "rdp"], typer.Option(help="Accountant: privacy loss distributions (pld) or Rényi (rdp).")
]
Rate = Annotated[float, typer.Option(help="Probability that a client is in a round's cohort.")]
ClipBitSigma = Annotated[float | None, typer.Option(help="Noise of the clip bit; leave out with a fixed clip norm.")]
Rounds = Annotated[int, typer.Option(help="Rounds of the run.")]
Clients = Annotated[int, typer.Option(help="Clients enrolled.")]
Cohort = Annotated[int, typer.Option(help="Expected (poisson) or exact (fixed) cohort size.")]
Survivors = Annotated[
    int | None, typer.Option(help="Honest clients of a cohort that surely add their noise; all by default.")
]
Select = Annotated[Literal["exp", "pe", "ps", "uniform"], typer.Option(help="How the index is chosen.")]
Dimension = Annotated[int, typer.Option(help="Coordinates to choose from.")]
Top = Annotated[int, typer.Option(help="How many coordinates count as largest.")]
Value = Annotated[
    Literal["pm", "hm", "duchi", "grid-pm", "none", "exact"],
    typer.Option(help="How the value is perturbed; none sends the index alone, exact the value without noise."),
]
Reports = Annotated[int, typer.Option(help="Reports one client sends.")]
Form = Annotated[Literal["sound", "published"], typer.Option(help="Our sound form, or the paper's as printed.")]
