"""Paper 004's outcomes: accuracies beside the paper's, accuracy by ε and by what clients send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

import dp_accounting as dp

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian, Poisson
from polyeps_reproductions.tabulated import Content
from polyeps_reproductions.trials import Result

# Tables I and II: percent at ranks 1, 2, 4, 8 and 16, or without compression.
_RANKED = (1, 2, 4, 8, 16)
PAPER: dict[tuple[str, str], tuple[float, ...]] = {
    ("iid", "CMP-Fed"): (68.54, 71.00, 73.64, 76.20, 78.87),
    ("iid", "DP-RandAgg"): (52.42, 59.05, 66.82, 70.93, 74.84),
    ("iid", "UV-Fed"): (77.44, 79.71, 83.10, 84.76, 86.15),
    ("iid", "DP-FedAvg"): (77.65,),
    ("iid", "FedAvg"): (86.61,),
    ("labels", "CMP-Fed"): (67.25, 70.72, 73.92, 76.24, 77.93),
    ("labels", "DP-RandAgg"): (49.67, 56.56, 65.54, 69.89, 74.12),
    ("labels", "UV-Fed"): (77.15, 80.24, 82.87, 84.68, 85.82),
    ("labels", "DP-FedAvg"): (75.75,),
    ("labels", "FedAvg"): (86.49,),
}
# What CMP-Fed at rank 16 saves of the uplink needed for 74 %, in the paper.
TARGET, QUICK_TARGET = 0.74, 0.5
SAVED = {
    "iid": {"DP-RandAgg": 69, "DP-FedAvg": 90, "FedAvg": 89},
    "labels": {"DP-RandAgg": 73, "DP-FedAvg": 93, "FedAvg": 89},
}
OURS = ("CMP-Fed", "CMP-Fed, directions from the model")
RIVALS = {OURS[0]: ("DP-FedAvg", "DP-RandAgg"), OURS[1]: ("DP-FedAvg, tuned", "DP-RandAgg, tuned", "CMP-Fed, tuned")}
Key = tuple[str, str, int]  # partition, method, rank (0: nothing is compressed)
Points = dict[str, dict[str, list[tuple[float, float]]]]


def accuracies(results: Sequence[Result], quick: bool) -> Content:
    """One row for each method and rank: ours, the paper's, what it is certified for, and with which settings."""
    columns = ["method", "rank", "accuracy %", "paper", "seeds", "rate", "clip", "certified ε", "uplink MB a round"]
    rows: list[list[Any]] = []
    found = grouped(results)
    for (partition, method, rank), runs in found.items():
        finals = [100 * run["final"] for run in runs]
        shown = f"{fmean(finals):.2f}" + (f" ± {stdev(finals):.2f}" if len(finals) > 1 else "")
        spent = "–" if runs[0]["spent"] is None else f"{runs[0]['spent']:.3g}"
        used = [f"{runs[0]['settings']['training'][name]:g}" for name in ("learning_rate", "clip")]
        used[1] = used[1] if runs[0]["spent"] is not None else "–"
        sent = f"{uplink(runs) / 1e6:.2f}"
        rows.append(
            [
                method,
                rank or "–",
                shown,
                "–" if quick else paper(partition, method, rank),
                len(runs),
                *used,
                spent,
                sent,
            ]
        )
    return Content(columns, rows, findings=_ahead(found))


def by_epsilon(results: Sequence[Result], quick: bool) -> Content:
    """Accuracy after every evaluated round by the ε spent until then: figure 1 by one run of each rank."""
    rows: list[list[Any]] = []
    points: Points = {}
    for (partition, _method, rank), runs in grouped(results).items():
        share, scale, delta = _noise(runs[0])
        line = []
        for number, accuracy in curve(runs):
            if number % (5 if quick else 20) == 0:
                spent = epsilon(dp.SelfComposedDpEvent(Poisson(share, Gaussian(scale)), number), delta)
                line.append((spent, 100 * accuracy))
                rows.append([_panel(partition), rank, number, f"{spent:.3f}", f"{100 * accuracy:.2f}"])
        points.setdefault(_panel(partition), {})[f"rank {rank}"] = line
    return Content(["images", "rank", "rounds", "ε", "accuracy %"], rows, points=points, axis="ε spent")


def by_uplink(results: Sequence[Result], quick: bool) -> Content:
    """Accuracy by all that clients have sent, at the largest rank; and what it takes to reach 74 %."""
    target = QUICK_TARGET if quick else TARGET
    rows: list[list[Any]] = []
    points: Points = {}
    found = grouped(results)
    largest = max((rank for _, _, rank in found), default=0)
    shown = {key: runs for key, runs in found.items() if key[2] in (0, largest)}
    needed = {key[:2]: _needed(runs, target) for key, runs in shown.items()}
    for (partition, method, rank), runs in shown.items():
        line = [(number * uplink(runs) / 1e6, 100 * accuracy) for number, accuracy in curve(runs)]
        points.setdefault(_panel(partition), {})[method] = line
        theirs = needed[partition, method]
        saved = [
            "–" if method in OURS[place:] else _saved(needed.get((partition, own)), theirs)
            for place, own in enumerate(OURS)
        ]
        reached = "not reached" if theirs is None else f"{theirs / 1e6:.1f}"
        printed = "–" if quick else SAVED[partition].get(method, "–")
        rows.append([_panel(partition), method, rank or "–", reached, *saved, printed])
    saving = ["CMP-Fed saves %", "with directions from the model %", "paper %"]
    columns = ["images", "method", "rank", f"MB sent for {100 * target:.0f} %", *saving]
    return Content(columns, rows, points=points, axis="MB that all clients have sent")


def grouped(results: Iterable[Result]) -> dict[Key, list[Result]]:
    """Runs that differ by their seeds alone."""
    groups: dict[Key, list[Result]] = {}
    for result in results:
        method = result["settings"]["algorithm"][0]
        key = (result["settings"]["data"]["partition"], str(method["label"]), int(method["rank"]))
        groups.setdefault(key, []).append(result)
    return groups


def paper(partition: str, method: str, rank: int) -> str:
    """The paper's figure, where it has one."""
    printed = PAPER.get((partition, method.removesuffix(", published")))
    if printed is None or (rank and rank not in _RANKED):
        return "–"
    return f"{printed[_RANKED.index(rank)] if rank else printed[0]:.2f}"


def curve(runs: Sequence[Result]) -> list[tuple[int, float]]:
    """Mean accuracy after every round that all runs were judged at."""
    common = set.intersection(*(set(map(int, run["accuracy"])) for run in runs))
    held = [{int(number): value for number, value in run["accuracy"].items()} for run in runs]
    return [(number, fmean(one[number] for one in held)) for number in sorted(common)]


def uplink(runs: Sequence[Result]) -> float:
    """Bytes all clients together send in a round."""
    return fmean(run["up"] / max(1, run["rounds"]) for run in runs)


def _needed(runs: Sequence[Result], target: float) -> float | None:
    """Bytes sent until the target is reached for the first time."""
    return next((number * uplink(runs) for number, accuracy in curve(runs) if accuracy >= target), None)


def _saved(own: float | None, theirs: float | None) -> str:
    return f"{round(100 * (1 - own / theirs))}" if own and theirs else "–"


def _noise(result: Result) -> tuple[float, float, float]:
    settings = result["settings"]
    return settings["participation"]["share"], result["scales"][0], settings["budgets"]["delta"]


def _panel(partition: str) -> str:
    return "at random" if partition == "iid" else "five labels each"


def _ahead(found: dict[Key, list[Result]]) -> list[str]:
    """How far the sound forms are from baselines with the same care, at the largest rank there is."""
    said = []
    for own, rivals in RIVALS.items():
        mine = max((key for key in found if key[1] == own), key=lambda key: key[2], default=None)
        for rival in (key for key in found if mine and key[1] in rivals and key[2] in (0, mine[2])):
            assert mine is not None
            said.append(f"{own}, at rank {mine[2]}, is {_distance(found[mine], found[rival])} points from {rival[1]}")
    return said


def _distance(ours: Sequence[Result], theirs: Sequence[Result]) -> str:
    """The mean difference of runs with the same seed, and its standard error."""
    by_seed = {run["trial"]["seed"]: run["final"] for run in theirs}
    apart = [100 * (run["final"] - by_seed[run["trial"]["seed"]]) for run in ours if run["trial"]["seed"] in by_seed]
    if len(apart) < 2:
        return f"{fmean(apart):+.2f}" if apart else "an unknown number of"
    return f"{fmean(apart):+.2f} ± {stdev(apart) / len(apart) ** 0.5:.2f}"
