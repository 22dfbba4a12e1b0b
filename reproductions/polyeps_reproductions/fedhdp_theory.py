"""FedHDP's figures 1 and 2: the server's variance by r, and a client's error by λ, in formulas and simulated.

The paper gives neither the figures' numbers nor their settings, so the settings here are ours. The gain of
figure 2's client by opting out depends on the quantity that stays constant for the others: γ², as the paper's symbols
suggest, which lowers their noise z·S = N_p·γ and with it their privacy; or z, which their privacy fixes. Both follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps_reproductions.studies import Content, Panel, Part, Record, line, panel
from polyeps_reproductions.theory import points, simulation
from polyeps_reproductions.theory.points import NON_PRIVATE, PRIVATE
from polyeps_reproductions.theory.printed import OptOut

SEED = 3
TRIALS, QUICK_TRIALS = 200_000, 20_000
RATIOS = tuple(float(ratio) for ratio in np.geomspace(0.03, 1.5, 24))
PENALTIES = tuple(float(penalty) for penalty in np.geomspace(0.5, 50, 24))
CLIENTS, PRIVATE_CLIENTS = 100, 95  # 5 % opt out, as in the paper's experiments
GAMMAS, SPREADS = (0.02, 0.05, 0.1), (0.5, 1.5, 5.0)
ALPHA2, TAU2, GAMMA2 = 1.0, 0.5, 0.05
FEW = OptOut(clients=20, private=15, alpha2=1.0, tau2=0.1, gamma2=0.5)  # of figure 2: one client must be seen in it


@dataclass(frozen=True)
class Curve:
    """One line of a panel at the places it was computed and simulated at, the optimum among them."""

    panel: str
    name: str
    places: NDArray[np.float64]
    expected: NDArray[np.float64]
    measured: simulation.Measured
    optimum: float

    @property
    def rows(self) -> list[list[Any]]:
        values = zip(self.places, self.expected, self.measured.value, self.measured.error, strict=True)
        return [
            [self.panel, self.name, *(float(f"{one:.6g}") for one in row), "yes" if row[0] == self.optimum else ""]
            for row in values
        ]

    @property
    def least(self) -> float:
        return float(self.expected.min())


def server_curve(panel: str, name: str, setting: OptOut, trials: int, generator: np.random.Generator) -> Curve:
    """σ_s² by r."""
    federation = setting.federation
    places = np.array(sorted({*RATIOS, setting.best_ratio}))
    weights = [points.weights_of_ratio(federation, ratio) for ratio in places]
    expected = np.array([points.server_variance(federation, one) for one in weights])
    measured = simulation.server_variance(federation, weights, trials, generator)
    return Curve(panel, name, places, expected, measured, setting.best_ratio)


def client_curve(
    panel: str, name: str, setting: OptOut, group: int, ratio: float, trials: int, generator: np.random.Generator
) -> Curve:
    """A client's mean squared error by λ, when the server uses this r."""
    federation = setting.federation
    weights = points.weights_of_ratio(federation, ratio)
    moments = points.personal(federation, group, weights)
    places = np.array(sorted({*PENALTIES, moments.best_penalty}))
    measured = simulation.personal_error(federation, group, places, trials, generator, weights)
    return Curve(panel, name, places, moments.error(places), measured, moments.best_penalty)


def first(_: Sequence[Record], quick: bool) -> Content:
    """Figure 1: for three γ², and for three σ_c²."""
    trials, generator = _trials(quick), np.random.default_rng((SEED, 1))
    settings = [
        ("three values of γ²", f"γ² = {gamma2:g}", OptOut(CLIENTS, PRIVATE_CLIENTS, ALPHA2, TAU2, gamma2))
        for gamma2 in GAMMAS
    ]
    settings += [
        (
            "three values of σ_c²",
            f"σ_c² = {total:g}",
            OptOut(CLIENTS, PRIVATE_CLIENTS, total * 2 / 3, total / 3, GAMMA2),
        )
        for total in SPREADS
    ]
    curves = [server_curve(panel, name, setting, trials, generator) for panel, name, setting in settings]
    findings = [
        f"{curve.name}: r* = {curve.optimum:.4f} with {curve.least:.5f}, r = 1 (FedAvg, and DP-FedAvg) "
        f"{setting.fedavg_variance:.5f}, DP-FedAvg by the printed (14) {setting.dp_fedavg_variance_printed:.5f}"
        for curve, (_, _, setting) in zip(curves, settings, strict=True)
    ]
    return _content("r", curves, findings, trials)


def second(_: Sequence[Record], quick: bool) -> Content:
    """Figure 2: a client that stays private, or opts out; Ditto with plain averaging, and FedHDP."""
    trials, generator = _trials(quick), np.random.default_rng((SEED, 2))
    private = FEW.private - 1
    scenarios = (
        ("stays private", FEW, PRIVATE),
        ("opts out, γ² stays", replace(FEW, private=private), NON_PRIVATE),
        (
            "opts out, z stays",
            replace(FEW, private=private, gamma2=FEW.gamma2 * (FEW.private / private) ** 2),
            NON_PRIVATE,
        ),
    )
    curves, findings = [], []
    for title, plain in (("Ditto with FedAvg", True), ("FedHDP", False)):
        for name, setting, group in scenarios:
            ratio = 1.0 if plain else setting.best_ratio
            curve = client_curve(title, name, setting, group, ratio, trials, generator)
            findings.append(f"{title}, {name}: λ* = {curve.optimum:.4f} with error {curve.least:.5f}")
            curves.append(curve)
    moments, best = points.personal(FEW.federation, PRIVATE), points.bayes_error(FEW.federation, PRIVATE)
    more = moments.error(FEW.private_penalty_printed) - moments.error(FEW.private_penalty)
    findings.append(
        f"the printed (16) is {FEW.private_penalty_printed:.4f}, not {FEW.private_penalty:.4f}; its error is "
        f"{float(more):.1e} larger, and (8) has {best:.5f}"
    )
    return _content("λ", curves, findings, trials)


def _trials(quick: bool) -> int:
    return QUICK_TRIALS if quick else TRIALS


def _content(axis: str, curves: Sequence[Curve], findings: list[str], trials: int) -> Content:
    distances = np.concatenate([curve.measured.off(curve.expected) for curve in curves])
    agreement = (
        f"{len(distances)} simulated values ({trials} federations a curve) are {distances.max():.1f} standard errors"
    )
    rows = [row for curve in curves for row in curve.rows]
    columns = ["panel", "curve", axis, "closed form", "simulated", "standard error", "optimum"]
    said = [*findings, f"{agreement} from the formulas at most"]
    return Content(columns, rows, said, panels_of(axis, rows), pairs=True)


def panels_of(axis: str, rows: Sequence[Sequence[Any]]) -> list[Panel]:
    """Return formulas as lines, simulations as circles on them, optima as stars."""
    curves: dict[str, dict[str, list[Sequence[Any]]]] = {}
    for title, name, *values in rows:
        curves.setdefault(title, {}).setdefault(name, []).append(values)
    measure, log = ("variance", "xy") if axis == "r" else ("mean squared error", "x")
    found = []
    for title, lines in curves.items():
        series = []
        for name, some in lines.items():
            series.append(line(name, some, dashed=name == list(lines)[-1]))  # curves may lie on each other
            simulated = [(row[0], row[2]) for row in some[::2]]
            series.append(line(name, simulated, error=[row[3] for row in some[::2]], look="circles"))
            series.append(line(name, [row for row in some if row[-1]], look="star"))
        found.append(panel(title, axis, measure, series, log=log))
    return found


_NOTE = "In the figure, lines are formulas, circles simulations, stars the optima"
FIGURES = (
    Part("figure", "1", "Variance of the server's estimate by the ratio r", first, note=_NOTE),
    Part("figure", "2", "Error of a client's own estimate by λ", second, note=_NOTE),
)
