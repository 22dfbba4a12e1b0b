"""Time the calibration of noise multipliers by polyeps, Opacus and dp-accounting, in one run.

    python benchmarks/accounting.py
    python benchmarks/accounting.py --json > benchmarks/results/accounting.json

Setting: 8 of 1200 records, 8000 steps, δ = 1e-5, budgets between 0.05 and 10. The other libraries calibrate one budget
at a time, so they are timed on a few of the same budgets and reported per budget.
"""

import argparse
import json
import logging
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polyeps.accounting import affordability, epsilon
from polyeps.accounting.calibration import calibrate, calibrate_each
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.core import Budget

RATE, STEPS, DELTA = 8 / 1200, 8000, 1e-5


def price(sigma: float) -> Poisson:
    return Poisson(RATE, Gaussian(sigma))


def timed(work: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def ours(budgets: list[Budget]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        cold, answer = timed(lambda: calibrate(budgets, price, STEPS, directory=directory))
        affordability._known.clear()
        cached, _ = timed(lambda: calibrate(budgets, price, STEPS, directory=directory))
        affordability._known.clear()
        one, _ = timed(lambda: calibrate(budgets[:1], price, STEPS, directory=directory))
    affordability._known.clear()
    sizes = np.random.default_rng(1).integers(200, 2000, 100)
    prices, _ = timed(
        lambda: calibrate_each(budgets[:100], lambda sigma, row: Poisson(8 / int(sizes[row]), Gaussian(sigma)), STEPS)
    )
    wanted = np.array([budget.epsilon for budget in budgets])
    used = answer.certified / wanted  # type: ignore[attr-defined]
    look_up, _ = timed(lambda: epsilon(price(1.2345), DELTA))
    return {
        "budgets": len(budgets),
        "cold_seconds": cold,
        "cached_seconds": cached,
        "one_cached_seconds": one,
        "hundred_prices_seconds": prices,
        "one_epsilon_seconds": look_up,
        "least_used": float(used.min()),
        "most_used": float(used.max()),
        "distinct_scales": len(set(answer.noise_multiplier.tolist())),  # type: ignore[attr-defined]
    }


def peers(epsilons: list[float]) -> dict[str, dict[str, object]]:
    import dp_accounting as dp
    from opacus.accountants.utils import get_noise_multiplier

    def library(accountant: Callable[[], object]) -> Callable[[float], float]:
        return lambda value: dp.calibrate_dp_mechanism(
            accountant, lambda sigma: dp.SelfComposedDpEvent(price(sigma), STEPS), value, DELTA, tol=1e-3
        )

    def opacus(name: str) -> Callable[[float], float]:
        return lambda value: float(
            get_noise_multiplier(
                target_epsilon=value, target_delta=DELTA, sample_rate=RATE, steps=STEPS, accountant=name
            )
        )

    contestants = {
        "opacus rdp": opacus("rdp"),
        "opacus prv": opacus("prv"),
        "dp-accounting rdp": library(dp.rdp.RdpAccountant),
        "dp-accounting pld": library(dp.pld.PLDAccountant),
    }
    results: dict[str, dict[str, object]] = {}
    for name, work in contestants.items():
        rows: dict[str, object] = {}
        for value in epsilons:
            try:
                seconds, sigma = timed(lambda work=work, value=value: work(value))  # type: ignore[misc]
                rows[str(value)] = {"seconds": seconds, "sigma": sigma}
            except Exception as refusal:  # a library that refuses a budget is a result, too
                rows[str(value)] = {"refused": str(refusal)[:80]}
        results[name] = rows
    return results


def start_up() -> float:
    command = [sys.executable, "-m", "polyeps", "--help"]
    return min(timed(lambda: subprocess.run(command, capture_output=True, check=True))[0] for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--budgets", type=int, default=10_000)
    parser.add_argument("--peer-budgets", default="0.1,1,10", help="the budgets that other libraries are timed on")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    drawn = np.exp(np.random.default_rng(0).uniform(math.log(0.05), math.log(10), options.budgets))
    asked = [float(value) for value in options.peer_budgets.split(",") if value.strip()]
    mine = ours([Budget(float(value), DELTA) for value in drawn])
    scales = calibrate(
        [Budget(value, DELTA) for value in asked], price, STEPS, tolerance=1e-3
    ).noise_multiplier.tolist()
    same = dict(zip(map(str, asked), scales, strict=True))
    theirs = peers(asked)
    help_seconds = start_up()
    if options.json:
        result = {"polyeps": mine, "polyeps_sigma": same, "peers": theirs, "help_seconds": help_seconds}
        print(json.dumps(result, indent=2))
        return
    print(
        f"polyeps: {mine['budgets']:.0f} budgets in {mine['cold_seconds']:.2f} s, {mine['cached_seconds']:.3f} s cached"
    )
    print(
        f"  {mine['distinct_scales']:.0f} scales, using {mine['least_used']:.2%} to {mine['most_used']:.2%} of a budget"
    )
    print(f"  100 budgets with a price each in {mine['hundred_prices_seconds']:.2f} s")
    one, each = 1e3 * mine["one_cached_seconds"], 1e3 * mine["one_epsilon_seconds"]
    print(f"  one budget, cached {one:.1f} ms, one ε {each:.1f} ms")
    print(f"  σ {same}; `polyeps --help` {help_seconds:.2f} s")
    for name, rows in theirs.items():
        print(f"{name}: " + "; ".join(f"ε = {value}: {row}" for value, row in rows.items()))


if __name__ == "__main__":
    main()
