"""Tables of FedHDP's theory page, computed from the closed forms; tests compare these with simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from polyeps_reproductions.fedhdp_theory import ALPHA2, CLIENTS, FEW, GAMMAS, PRIVATE_CLIENTS, TAU2
from polyeps_reproductions.theory import points, regression
from polyeps_reproductions.theory.points import NON_PRIVATE, PRIVATE
from polyeps_reproductions.theory.printed import OptOut
from polyeps_reproductions.theory.regression import Regression

Rows = list[list[str]]
_SETTING = "N, N_p, α², τ², γ²"
GAPS = (OptOut(20, 15, 1, 0.5, 0.1), OptOut(100, 95, 1, 0.5, 0.02), OptOut(10, 5, 1, 0.5, 0.2))
PENALTIES = (
    OptOut(10, 9, 1, 0.5, 0.2),
    OptOut(20, 20, 0.7, 0.3, 0.1),
    OptOut(50, 40, 1, 0, 0.02),
    OptOut(100, 95, 1, 0.5, 0.05),
    OptOut(3, 3, 1, 0.1, 1),
)
_DESIGNS = ((3, 30), (3, 6), (10, 12))  # (unknowns, records)


def _named(one: OptOut) -> str:
    return ", ".join(f"{value:g}" for value in (one.clients, one.private, one.alpha2, one.tau2, one.gamma2))


def gaps() -> Rows:
    """Return the variance of DP-FedAvg by equation (14), and as it is."""
    rows = [[_SETTING, "variance of DP-FedAvg by (14)", "as it is, that of FedAvg"]]
    return rows + [
        [_named(one), f"{one.dp_fedavg_variance_printed:.5f}", f"{one.dp_fedavg_variance:.5f}"] for one in GAPS
    ]


def penalties() -> Rows:
    """Return λ of private clients by equation (16) and as it is, and what the difference costs."""
    rows = [[_SETTING, "λ by (16)", "best λ", "error at the best λ", "more at (16)'s", "error of (8)"]]
    for one in PENALTIES:
        worse, best = one.private_penalty_printed, one.private_penalty
        errors = points.personal(one.federation, PRIVATE).error([worse, best])
        bayes = points.bayes_error(one.federation, PRIVATE)
        shown = [f"{worse:.4f}", f"{best:.4f}", f"{errors[1]:.5f}", f"{errors[0] - errors[1]:.1e}", f"{bayes:.5f}"]
        rows.append([_named(one), *shown])
    return rows


def limits() -> Rows:
    """Return the gap (13) by the number of clients, 95 % of them private, with γ² fixed or with z."""
    counts = (100, 1000, 10_000)
    rows = [["(13) for N =", *map(str, counts)]]
    private = [count * PRIVATE_CLIENTS // CLIENTS for count in counts]
    same = [OptOut(*pair, ALPHA2, TAU2, GAMMAS[0]) for pair in zip(counts, private, strict=True)]
    noise = private[0] * GAMMAS[0] ** 0.5
    scaled = [OptOut.at_noise(*pair, ALPHA2, TAU2, noise) for pair in zip(counts, private, strict=True)]
    for name, some in ((f"γ² = {GAMMAS[0]:g} always", same), ("z as for N = 100", scaled)):
        rows.append([name, *(f"{one.fedavg_gap:.2e}" for one in some)])
    return rows


def opting_out() -> Rows:
    """Return a client's error with its best λ, if it stays private and if it opts out: figure 2."""
    fewer = FEW.private - 1
    cases = {
        "stays private": (FEW, PRIVATE),
        "opts out, γ² stays": (replace(FEW, private=fewer), NON_PRIVATE),
        "opts out, z stays": (replace(FEW, private=fewer, gamma2=FEW.gamma2 * (FEW.private / fewer) ** 2), NON_PRIVATE),
    }
    rows = [["error (λ)", *cases]]
    for name, plain in (("Ditto with FedAvg", True), ("FedHDP", False)):
        row = [name]
        for setting, group in cases.values():
            ratio = 1.0 if plain else setting.best_ratio
            moments = points.personal(setting.federation, group, points.weights_of_ratio(setting.federation, ratio))
            best = moments.best_penalty
            row.append(f"{float(moments.error(best)):.5f} ({best:.2f})")
        rows.append(row)
    return rows


def regressions() -> Rows:
    """Return errors of linear regression with weights that are matrices, and with numbers, for one draw of designs."""
    rows = [["unknowns, records", "server, matrix", "server, numbers", "client by (8)", "λ on matrix", "λ on numbers"]]
    for unknowns, records in _DESIGNS:
        designs = np.random.default_rng((unknowns, records)).standard_normal((FEW.clients, records, unknowns))
        groups = (NON_PRIVATE,) * (FEW.clients - FEW.private) + (PRIVATE,) * FEW.private
        setting = Regression(designs, groups, (0.0, 0.1), beta2=1.0, tau2=0.1)
        found = regression.losses(setting, FEW.clients - 1)
        names = ("server, matrix", "server, scalar", "client, Bayes", "client, matrix", "client, scalar")
        rows.append([f"{unknowns}, {records}", *(f"{found[name]:.3f}" for name in names)])
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "theory-gaps": gaps,
    "theory-penalties": penalties,
    "theory-limits": limits,
    "theory-opting-out": opting_out,
    "theory-regressions": regressions,
}
