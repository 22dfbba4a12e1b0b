"""CMP-Fed's outcomes: accuracies beside the paper's, accuracy by ε and by uplink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dp_accounting as dp

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian, Poisson
from polyeps_reproductions.studies import Content, Record, band_of, curve_of, grouped, line, panel, percent, signed

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
# The paper's saving of CMP-Fed at rank 16, in per cent of the uplink needed for 74 %.
TARGET, QUICK_TARGET = 0.74, 0.5
SAVED = {
    "iid": {"DP-RandAgg": 69, "DP-FedAvg": 90, "FedAvg": 89},
    "labels": {"DP-RandAgg": 73, "DP-FedAvg": 93, "FedAvg": 89},
}
OURS = ("CMP-Fed", "CMP-Fed, directions from the model")
RIVALS = {OURS[0]: ("DP-FedAvg", "DP-RandAgg"), OURS[1]: ("DP-FedAvg, tuned", "DP-RandAgg, tuned", "CMP-Fed, tuned")}
PANELS = {"iid": "at random", "labels": "five labels each"}


def accuracies(records: Sequence[Record], _: bool) -> Content:
    """Return a row for each method and rank: ours, the paper's, the certified ε, and the settings chosen."""
    columns = ["method", "rank", "accuracy %", "paper", "seeds", "rate", "clip", "certified ε", "uplink MB a round"]
    rows: list[list[Any]] = []
    for one in records:
        private = one["spent"] is not None
        used = [f"{one['learning_rate']:g}", f"{one['clip']:g}" if private else "–"]
        spent = f"{one['spent']:.3g}" if private else "–"
        shown = [one["method"], one["rank"] or "–", percent(one), one["paper"] or "–", one["count"]]
        rows.append([*shown, *used, spent, f"{uplink(one) / 1e6:.2f}"])
    return Content(columns, rows, _ahead(records))


def by_epsilon(records: Sequence[Record], quick: bool) -> Content:
    """Return accuracy after every evaluated round by the ε spent until then: figure 1 by one run of each rank."""
    rows: list[list[Any]] = []
    panels = []
    for (partition,), some in grouped(records, "partition").items():
        series = []
        for one in some:
            release = Poisson(one["share"], Gaussian(one["noise_multipliers"][0]))
            points = []
            for number, accuracy, deviation in band_of(one):
                if number % (5 if quick else 20) == 0:
                    spent = epsilon(dp.SelfComposedDpEvent(release, number), one["delta"])
                    points.append((spent, 100 * accuracy, 100 * deviation))
                    rows.append([PANELS[partition], one["rank"], number, f"{spent:.3f}", f"{100 * accuracy:.2f}"])
            series.append(line(f"rank {one['rank']}", points))
        panels.append(panel(PANELS[partition], "ε spent", "test accuracy, %", series))
    return Content(["images", "rank", "rounds", "ε", "accuracy %"], rows, panels=panels)


def by_uplink(records: Sequence[Record], quick: bool) -> Content:
    """Return accuracy by all that clients have sent, at the largest rank; and the uplink needed to reach 74 %."""
    target = QUICK_TARGET if quick else TARGET
    rows: list[list[Any]] = []
    panels = []
    largest = max((one["rank"] for one in records), default=0)
    for (partition,), some in grouped(records, "partition").items():
        shown = {one["method"]: one for one in some if one["rank"] in (0, largest)}
        needed = {name: _needed(one, target) for name, one in shown.items()}
        for name, one in shown.items():
            theirs = needed[name]
            saved = ["–" if name in OURS[place:] else _saved(needed.get(own), theirs) for place, own in enumerate(OURS)]
            reached = "not reached" if theirs is None else f"{theirs / 1e6:.1f}"
            printed = "–" if quick else SAVED[partition].get(name, "–")
            rows.append([PANELS[partition], name, one["rank"] or "–", reached, *saved, printed])
        series = [
            line(
                name,
                [(at * uplink(one) / 1e6, 100 * mean, 100 * error) for at, mean, error in band_of(one)],
                look="band",
            )
            for name, one in shown.items()
        ]
        panels.append(panel(PANELS[partition], "MB that all clients have sent", "test accuracy, %", series, log="x"))
    saving = ["CMP-Fed saves %", "with directions from the model %", "paper %"]
    return Content(["images", "method", "rank", f"MB sent for {100 * target:.0f} %", *saving], rows, panels=panels)


def paper(partition: str, method: str, rank: int) -> str | None:
    """Return the paper's figure, where it has one."""
    printed = PAPER.get((partition, method.removesuffix(", published")))
    if printed is None or (rank and rank not in _RANKED):
        return None
    return f"{printed[_RANKED.index(rank)] if rank else printed[0]:.2f}"


def uplink(one: Record) -> float:
    """Return the bytes that all clients together send in a round."""
    return float(one["up"] / max(1, one["rounds"]))


def _needed(one: Record, target: float) -> float | None:
    """Return the bytes sent until the target is reached for the first time."""
    return next((number * uplink(one) for number, accuracy in curve_of(one) if accuracy >= target), None)


def _saved(own: float | None, theirs: float | None) -> str:
    return f"{round(100 * (1 - own / theirs))}" if own and theirs else "–"


def _ahead(records: Sequence[Record]) -> list[str]:
    """Return the distance of the sound forms from baselines tuned alike, at the largest rank there is."""
    said = []
    for own, rivals in RIVALS.items():
        mine = max((one for one in records if one["method"] == own), key=lambda one: one["rank"], default=None)
        for rival in (one for one in records if mine and one["method"] in rivals and one["rank"] in (0, mine["rank"])):
            assert mine is not None
            said.append(f"{own}, at rank {mine['rank']}, is {signed(mine, rival)} points from {rival['method']}")
    return said
