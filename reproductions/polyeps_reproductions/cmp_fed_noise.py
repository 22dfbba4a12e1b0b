"""The noise CMP-Fed needs for one ε by every account of it, and the certified price of that noise.

σ is the noise multiplier of each of a round's two releases. "True" is the certified ε, by privacy loss distributions,
of both releases from one cohort. Noise is enough for some kind of cohorts if with them it costs no more than ε, however
well the account that asked for it is founded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import dp_accounting as dp
from dp_accounting.dp_event import DpEvent

from polyeps.accounting import Accountant, cache, epsilon
from polyeps.accounting.afford import best_accountant
from polyeps.accounting.calibration import calibrate
from polyeps.accounting.events import FixedSize, Gaussian, Poisson, history_of
from polyeps.accounting.known_draws import epsilon_if_draws_known
from polyeps.core import Adjacency, Budget
from polyeps.errors import InputError
from polyeps.mechanisms.integer import event_of_parts, padded
from polyeps.mechanisms.lattice_noise import NoiseName
from polyeps_reproductions.studies import Content, Part, Record

DROPPED = (0.05, 0.1, 0.2, 0.3)  # shares of a cohort
STEPS = (256, 1024, 4096)  # of the integers' grid in a clip norm
_TOLERANCE = 1e-4
Price = Callable[[float], DpEvent]


@dataclass(frozen=True)
class Setting:
    """One federation and the budget that every account is asked for."""

    clients: int
    cohort: int
    rounds: int
    budget: Budget
    coordinates: int = 60_000  # of each release, for integer noise
    tables: Path | None = None  # where calibrations are kept

    def __post_init__(self) -> None:
        if self.budget.delta == 0:
            raise InputError("Gaussian noise needs a delta above 0")
        if self.coordinates < 1:
            raise InputError(f"coordinates must be at least 1, not {self.coordinates}")

    @property
    def rate(self) -> float:
        return self.cohort / self.clients

    def poisson(self, sigma: float) -> DpEvent:
        """The price of a round's two releases from one Poisson-sampled cohort."""
        return Poisson(self.rate, dp.ComposedDpEvent([Gaussian(sigma)] * 2))

    def fixed(self, sigma: float) -> DpEvent:
        """The same from a cohort of a fixed size."""
        return FixedSize(self.clients, self.cohort, dp.ComposedDpEvent([Gaussian(sigma)] * 2))

    def whole(self, price: Price, sigma: float) -> DpEvent:
        """All rounds."""
        return dp.SelfComposedDpEvent(price(sigma), self.rounds)

    def calibrated(
        self,
        price: Price,
        accountant: Accountant | None,
        adjacency: Adjacency = "zero-out",
        uses: int | None = None,
    ) -> float:
        """Return the σ that spends the budget, by an account of a round."""
        answer = calibrate(
            [self.budget], price, uses or self.rounds,
            adjacency=adjacency, accountant=accountant, tolerance=_TOLERANCE, directory=self.tables,
        )  # fmt: skip
        return float(answer.scale[0])


THEOREM, POISSON, RENYI = "theorem 1 of the paper", "Poisson cohorts", "Poisson cohorts, Rényi"


def accounts(setting: Setting) -> list[dict[str, Any]]:
    """Return a row for every account: the σ it asks for, and the price of that with either kind of cohort."""
    poisson, fixed = setting.poisson, setting.fixed

    def one_release(sigma: float) -> DpEvent:
        return Poisson(setting.rate, Gaussian(sigma))

    asked = {
        THEOREM: theorem_1(setting),
        POISSON: setting.calibrated(poisson, "pld"),
        RENYI: setting.calibrated(poisson, "rdp"),
        "Poisson cohorts, a client replaced": setting.calibrated(poisson, "pld", "replace-one"),
        "cohorts of a fixed size": setting.calibrated(fixed, "pld", "replace-one"),
        "cohorts of a fixed size, Rényi": setting.calibrated(fixed, "rdp", "replace-one"),
        "one release charged, Rényi": setting.calibrated(one_release, "rdp"),
        "two releases, each from a cohort of its own, Rényi": setting.calibrated(one_release, "rdp", uses=2 * setting.rounds),
    }
    return [_account(setting, name, sigma) for name, sigma in asked.items()]


def _account(setting: Setting, name: str, sigma: float) -> dict[str, Any]:
    delta, most = setting.budget.delta, setting.budget.epsilon * (1 + 2 * _TOLERANCE)
    drawn = setting.whole(setting.poisson, sigma)
    poisson, fixed = epsilon(drawn, delta), epsilon(setting.whole(setting.fixed, sigma), delta, adjacency="replace-one")
    enough = {"Poisson": poisson <= most, "fixed size": fixed <= most}
    return {
        "account": name,
        "sigma": sigma,
        "true_poisson": poisson,
        "true_fixed": fixed,
        "true_if_draws_are_known": epsilon_if_draws_known(history_of(drawn), delta, "zero-out"),
        "enough_for": [kind for kind, yes in enough.items() if yes],
        "conditions_hold": name != THEOREM or theorem_1_applies(setting, sigma),  # the others have none
    }


def theorem_1(setting: Setting) -> float:
    """Return σ of σ² = 14 q² T (ε + 2 ln(1/δ))/ε². Its conditions fail in the paper's own setting; its σ is enough."""
    wanted = setting.budget.epsilon + 2 * math.log(1 / setting.budget.delta)
    return setting.rate * math.sqrt(14 * setting.rounds * wanted) / setting.budget.epsilon


def theorem_1_applies(setting: Setting, sigma: float) -> bool:
    """Return whether σ² ≥ 0.7 and α ≤ 1 + ⅔ σ² ln(1/(qα(1 + σ²))) for the Rényi order α = 1 + 2 ln(1/δ)/ε that it takes.

    This is the generous reading: the paper multiplies by the smaller squared clip norm, which is far below 1.
    """
    order = 1 + 2 * math.log(1 / setting.budget.delta) / setting.budget.epsilon
    allowed = 1 - 2 / 3 * sigma**2 * math.log(setting.rate * order * (1 + sigma**2))
    return sigma**2 >= 0.7 and order <= allowed


def dropouts(setting: Setting, sigma: float) -> list[dict[str, Any]]:
    """Return the price of clients that drop out, or disclose their noise, after a Poisson cohort divided σ."""
    rows = []
    for share in DROPPED:
        kept = math.sqrt(1 - share)
        true = epsilon(setting.whole(setting.poisson, sigma * kept), setting.budget.delta)
        rows.append({"dropped": share, "true": true, "sigma_to_allow_for_them": sigma / kept})
    return rows


def integers(setting: Setting, sigma: float) -> list[dict[str, Any]]:
    """Return the price of σ for noise on integers, by the grid's steps in a clip norm, and the σ that spends ε.

    Skellam noise by Rényi's bounds, as there are no others; discrete Gaussians as exactly as Gaussians, if they can be.
    """

    def price(noise: NoiseName, steps: int, at: float) -> DpEvent:
        release = event_of_parts(noise, 1.0, 1 / steps, padded(setting.coordinates), at, setting.cohort)
        return Poisson(setting.rate, dp.ComposedDpEvent([release] * 2))

    rows = []
    for noise in get_args(NoiseName):
        for steps in STEPS:
            spent = setting.whole(partial(price, noise, steps), sigma)
            rows.append(
                {
                    "noise": noise,
                    "steps": steps,
                    "true": epsilon(spent, setting.budget.delta, accountant=best_accountant(history_of(spent))),
                    "sigma": setting.calibrated(partial(price, noise, steps), None),
                }
            )
    return rows


def papers() -> Setting:
    """Return the paper's setting."""
    return Setting(6000, 100, 180, Budget(1.0, 1e-4), tables=cache.default_directory())


def _show_accounts(_: Sequence[Record], __: bool) -> Content:
    columns = ["account", "σ", "true ε, Poisson", "true ε, fixed size", "true ε, draws known", "enough for"]
    rows = []
    for row in accounts(papers()):
        enough = " and ".join(row["enough_for"]) or "neither"
        named = ("sigma", "true_poisson", "true_fixed", "true_if_draws_are_known")
        fails = "" if row["conditions_hold"] else ", but its conditions fail"
        rows.append([row["account"], *(f"{row[name]:.4f}" for name in named), enough + fails])
    return Content(columns, rows)


def _show_dropouts(_: Sequence[Record], __: bool) -> Content:
    setting = papers()
    sigma = setting.calibrated(setting.poisson, "pld")
    rows = [[f"{100 * row['dropped']:g} %", f"{row['true']:.4f}", f"{row['sigma_to_allow_for_them']:.4f}"]
            for row in dropouts(setting, sigma)]  # fmt: skip
    return Content(["dropped", "true ε", "σ that allows for them"], rows)


def _show_integers(_: Sequence[Record], __: bool) -> Content:
    setting = papers()
    found = integers(setting, setting.calibrated(setting.poisson, "rdp"))
    rows = [[row["noise"], row["steps"], f"{row['true']:.4f}", f"{row['sigma']:.4f}"] for row in found]
    return Content(["noise", "steps in a clip norm", "true ε at the σ of Rényi", "σ that spends ε"], rows)


_FOR = "6000 clients, cohorts of 100, 180 rounds, ε = 1, δ = 10⁻⁴"
PARTS = (
    Part("table", "accounts", "Noise multiplier of each release, and its true price, by account", _show_accounts, note=_FOR),
    Part("table", "dropouts", "Poisson cohorts of which some drop out or disclose their noise", _show_dropouts, note=_FOR),
    Part(
        "table",
        "integers",
        "Noise on integers, Poisson cohorts",
        _show_integers,
        note=f"{_FOR}, 60 000 coordinates a release; Skellam by Rényi, discrete Gaussians exactly",
    ),
)
