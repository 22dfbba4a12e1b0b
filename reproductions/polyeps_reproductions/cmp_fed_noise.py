"""The noise CMP-Fed needs for one ε by every account of it, and the certified price of that noise.

σ is the noise multiplier of each of a round's two releases. "True" is the certified ε, by privacy loss distributions,
of both releases from one cohort. Noise is enough for some kind of cohorts if with them it costs no more than ε, however
well the account that asked for it is founded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, get_args

import dp_accounting as dp
from dp_accounting.dp_event import DpEvent

from polyeps.accounting import Accountant, best_accountant, cache, epsilon, epsilon_if_draws_known
from polyeps.accounting.calibration import calibrate
from polyeps.accounting.events import FixedSize, Gaussian, Poisson
from polyeps.accounting.histories import history_of
from polyeps.aggregation.low_rank import low_rank
from polyeps.algorithms._releases import FINE, Release
from polyeps.algorithms._secure_sums import SecureSums
from polyeps.algorithms._sum_counts import Counts
from polyeps.core import Adjacency, Budget
from polyeps.mechanisms.integer import event_of_parts, padded
from polyeps.mechanisms.integer_noise import NoiseName
from polyeps.models import MODELS
from polyeps.secagg.masks import bytes_of
from polyeps_reproductions.studies import Content, Part, Record

CLIENTS, COHORT, ROUNDS, BUDGET = 6000, 100, 180, Budget(1.0, 1e-4)
RATE = COHORT / CLIENTS
COORDINATES = 60_000  # of each release, for integer noise
DROPPED = (0.05, 0.1, 0.2, 0.3)  # shares of a cohort
STEPS = (256, 1024, 4096)  # of the integers' grid in a clip norm
TOLERANCE = 1e-4
DROPOUTS = 0.1  # share of a cohort that a secure sum allows for
# What a client sends: options of the compression by rank, or nothing compressed.
SENT: dict[str, dict[str, Any]] = {
    **{str(rank): {"rank": rank} for rank in (1, 2, 4, 8, 16)},
    "16, the paper's count": {"rank": 16, "whole": "biases"},
    **{f"{rank}, directions from the model": {"rank": rank, "directions": "model"} for rank in (1, 4, 16)},
    "all": {},
}
THEOREM = "theorem 1 of the paper"
Price = Callable[[float], DpEvent]


def poisson(sigma: float) -> DpEvent:
    """Return the price of a round's two releases from one Poisson-sampled cohort."""
    return Poisson(RATE, dp.ComposedDpEvent([Gaussian(sigma)] * 2))


def fixed(sigma: float) -> DpEvent:
    """Return the price of a round's two releases from one cohort of a fixed size."""
    return FixedSize(CLIENTS, COHORT, dp.ComposedDpEvent([Gaussian(sigma)] * 2))


def one_release(sigma: float) -> DpEvent:
    """Return the price of one release, which some accounts take for that of a round."""
    return Poisson(RATE, Gaussian(sigma))


def true_epsilon(price: Price, sigma: float, adjacency: Adjacency = "zero-out") -> float:
    """Return the certified ε of all rounds."""
    return epsilon(dp.SelfComposedDpEvent(price(sigma), ROUNDS), BUDGET.delta, adjacency=adjacency)


def calibrated(
    price: Price, accountant: Accountant | None, adjacency: Adjacency = "zero-out", uses: int = ROUNDS
) -> float:
    """Return the σ that spends the budget, by an account of a round."""
    options: dict[str, Any] = {"adjacency": adjacency, "accountant": accountant, "tolerance": TOLERANCE}
    return float(calibrate([BUDGET], price, uses, directory=cache.default_directory(), **options).noise_multiplier[0])


def theorem_1() -> float:
    """Return the σ of σ² = 14 q² T (ε + 2 ln(1/δ))/ε²: enough, though its conditions fail in the paper's setting."""
    return RATE * math.sqrt(14 * ROUNDS * (BUDGET.epsilon + 2 * math.log(1 / BUDGET.delta))) / BUDGET.epsilon


def theorem_1_applies(sigma: float, rate: float = RATE, budget: Budget = BUDGET) -> bool:
    """Return whether σ² ≥ 0.7 and α ≤ 1 + ⅔ σ² ln(1/(qα(1 + σ²))) for the theorem's Rényi order α = 1 + 2 ln(1/δ)/ε.

    This is the generous reading: the paper multiplies by the smaller squared clip norm, which is far below 1.
    """
    order = 1 + 2 * math.log(1 / budget.delta) / budget.epsilon
    return sigma**2 >= 0.7 and order <= 1 - 2 / 3 * sigma**2 * math.log(rate * order * (1 + sigma**2))


def accounts(_: Sequence[Record], __: bool) -> Content:
    """Return a row for every account: the σ it asks for, and the price of that with either kind of cohort."""
    asked = {
        THEOREM: theorem_1(),
        "Poisson cohorts": calibrated(poisson, "pld"),
        "Poisson cohorts, Rényi": calibrated(poisson, "rdp"),
        "Poisson cohorts, a client replaced": calibrated(poisson, "pld", "replace-one"),
        "cohorts of a fixed size": calibrated(fixed, "pld", "replace-one"),
        "cohorts of a fixed size, Rényi": calibrated(fixed, "rdp", "replace-one"),
        "one release charged, Rényi": calibrated(one_release, "rdp"),
        "two releases, each from a cohort of its own, Rényi": calibrated(one_release, "rdp", uses=2 * ROUNDS),
    }
    rows = []
    for name, sigma in asked.items():
        true = {"Poisson": true_epsilon(poisson, sigma), "fixed size": true_epsilon(fixed, sigma, "replace-one")}
        whole = history_of(dp.SelfComposedDpEvent(poisson(sigma), ROUNDS))
        known = epsilon_if_draws_known(whole, BUDGET.delta, "zero-out")
        enough = [kind for kind, found in true.items() if found <= BUDGET.epsilon * (1 + 2 * TOLERANCE)]
        fails = ", but its conditions fail" if name == THEOREM and not theorem_1_applies(sigma) else ""
        numbers = (f"{value:.4f}" for value in (sigma, *true.values(), known))
        rows.append([name, *numbers, (" and ".join(enough) or "neither") + fails])
    columns = ["account", "σ", "true ε, Poisson", "true ε, fixed size", "true ε, draws known", "enough for"]
    return Content(columns, rows)


def dropouts(_: Sequence[Record], __: bool) -> Content:
    """Return the price of clients that drop out, or disclose their noise, after a Poisson cohort divided σ."""
    sigma, rows = calibrated(poisson, "pld"), []
    for share in DROPPED:
        kept = math.sqrt(1 - share)
        rows.append([f"{100 * share:g} %", f"{true_epsilon(poisson, sigma * kept):.4f}", f"{sigma / kept:.4f}"])
    return Content(["dropped", "true ε", "σ that allows for them"], rows)


def on_integers(noise: NoiseName, steps: int, at: float) -> DpEvent:
    """Return the price of a round's two releases with noise on integers, from one Poisson-sampled cohort."""
    release = event_of_parts(noise, 1.0, 1 / steps, padded(COORDINATES), at, COHORT)
    return Poisson(RATE, dp.ComposedDpEvent([release] * 2))


def integers(_: Sequence[Record], __: bool) -> Content:
    """Return the price of noise on integers, by the grid's steps in a clip norm, and the σ that spends ε.

    Skellam noise by Rényi's bounds, as there are no others; discrete Gaussians as exactly as Gaussians, if they can be.
    """
    sigma, rows = calibrated(poisson, "rdp"), []
    for noise, steps in product(get_args(NoiseName), STEPS):
        spent = dp.SelfComposedDpEvent(on_integers(noise, steps, sigma), ROUNDS)
        true = epsilon(spent, BUDGET.delta, accountant=best_accountant(history_of(spent)))
        needed = calibrated(partial(on_integers, noise, steps), None)
        rows.append([noise, steps, f"{true:.4f}", f"{needed:.4f}"])
    return Content(["noise", "steps in a clip norm", "true ε at the σ of Rényi", "σ that spends ε"], rows)


def bits(_: Sequence[Record], __: bool) -> Content:
    """Return what a client of the paper's network sends in a round: numbers, as integers of a secure sum, and bytes."""
    kind: NoiseName = "discrete-gaussian"
    sigma = calibrated(partial(on_integers, kind, FINE), None)
    counts = Counts.settled(CLIENTS, RATE, DROPOUTS, delta=BUDGET.delta, rounds=ROUNDS)
    sums = SecureSums(sigma / math.sqrt(2), counts, lambda _: None)  # type: ignore[arg-type, return-value]
    model, rows = MODELS["mcmahan_cnn"](), []
    for title, options in SENT.items():
        factors = low_rank(model.slices, **options) if options else None
        sizes = [factors.subspace_size, factors.embedding_size] if factors else [model.size]
        sizes = sizes[1:] if options.get("directions") == "model" else sizes  # left factors are not sent
        some = [Release("", size, 1.0, 1 / len(sizes), kind, CLIENTS) for size in sizes]
        needed = [sums.bits(one) or 0 for one in some]
        wire = sum(padded(size) * bytes_of(each) for size, each in zip(sizes, needed, strict=True))
        shown = [" + ".join(map(_spaced, values)) for values in (sizes, map(padded, sizes))]
        rows.append([title, *shown, ", ".join(map(str, needed)), _spaced(wire), _spaced(4 * sum(sizes))])
    columns = ["rank", "numbers (U + V)", "padded", "bits of U, V", "bytes a client sends", "as float32"]
    return Content(columns, rows)


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


_FOR = "6000 clients, cohorts of 100, 180 rounds, ε = 1, δ = 10⁻⁴"
_RELEASES = f"{_FOR}, 60 000 coordinates a release; Skellam by Rényi, discrete Gaussians exactly"
PARTS = (
    Part("table", "accounts", "Noise multiplier of each release, and its true price", accounts, note=_FOR),
    Part("table", "dropouts", "Poisson cohorts of which some drop out or disclose noise", dropouts, note=_FOR),
    Part("table", "bits", "What a client sends as integers", bits, note=f"{_FOR}, 10 % dropouts, McMahan's CNN"),
    Part("table", "integers", "Noise on integers, Poisson cohorts", integers, note=_RELEASES),
)
