"""FedSel's outcomes: accuracy over folds along any axis, the orders that hold, and table 3's gains and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from polyeps.experiment.config import experiment
from polyeps_reproductions.algorithms import fedsel
from polyeps_reproductions.comparison import FORMS
from polyeps_reproductions.fedsel_cost import COHORTS, SELECTIONS, measure
from polyeps_reproductions.fedsel_folds import ITERATIONS, built
from polyeps_reproductions.studies import Content, Record, band_of, difference, grouped, line, panel, percent, signed

TIE = 0.005  # an order holds unless the lower method is ahead by more than half a point
SETS = {"syn-l-0.01-0.9": (100, 60_000), "syn-h-0.01-0.9": (300, 100_000), "bank": (32, 45_211)} | {
    "adult": (123, 48_842),
    "kddcup99": (114, 70_000),
}
# Table 3 of the paper: gain and loss of EXP, PE and PS in points.
PAPER = {
    ("syn-l-0.01-0.9", "logistic"): ((8.61, 0.35), (5.41, 1.19), (5.98, 0.50)),
    ("syn-l-0.01-0.9", "svm"): ((7.20, 2.16), (3.77, 0.85), (5.07, 2.08)),
    ("bank", "logistic"): ((2.42, -0.16), (3.23, 0.05), (2.55, 0.15)),
    ("bank", "svm"): ((4.38, 0.44), (3.44, 0.25), (4.02, 0.02)),
    ("kddcup99", "logistic"): ((2.05, 0.51), (2.51, 0.23), (2.02, 0.34)),
    ("kddcup99", "svm"): ((1.86, -0.16), (2.22, 0.23), (1.83, 0.45)),
    ("adult", "logistic"): ((5.57, 0.29), (5.64, 1.31), (6.05, 0.81)),
    ("adult", "svm"): ((5.54, 0.19), (5.61, 0.96), (5.14, 0.39)),
}
CHOICES = ("exp", "pe", "ps")
MAJORITY = {"syn-l-0.01-0.9": 50.0, "bank": 88.3, "kddcup99": 80.3, "adult": 76.1}  # % of the larger class
BESIDE = 0.012  # of a value along the axis, between methods at the same place: equal values stay visible
Orders = tuple[tuple[str, str], ...]
Point = tuple[float, float, float]  # x, y, deviation


def by_axis(axis: str, orders: Orders = (), curves: bool = False) -> Callable[[Sequence[Record], bool], Content]:
    """Return the function that shows the accuracy of methods along one label, or their errors over the rounds."""

    def show(records: Sequence[Record], _: bool) -> Content:
        rows: list[list[Any]] = []
        points: dict[str, dict[str, list[Point]]] = {}
        held: dict[tuple[str, str], list[bool]] = {}
        for (data, model, rate, at), cell in grouped(records, "data", "model", "rate", axis).items():
            title = f"{data}, {model}" + (", one α for all" if rate == "shared" else "")
            for one in cell:
                name = one["method"] if one["form"] == "sound" else f"{one['method']}, published"
                spent = "–" if one["spent"] is None else f"{one['spent']:.3g}"
                rows.append([title, at, name, percent(one, 1), one["count"], f"{one['learning_rate']:g}", spent])
                shown = [(at, 100 - 100 * value, 100 * error) for at, value, error in band_of(one)] if curves else []
                value = (at, 100 * one["mean"], 100 * one["deviation"])
                points.setdefault(title, {}).setdefault(name, []).extend(shown or [value])
            sound = {one["method"]: one["mean"] for one in cell if one["form"] == "sound"}
            for higher, lower in orders:
                if higher in sound and lower in sound:
                    held.setdefault((higher, lower), []).append(sound[higher] >= sound[lower] - TIE)
        said = [f"{a} over {b} holds in {sum(one)} of {len(one)} cells" for (a, b), one in held.items()]
        columns = ["data, model", axis, "method", "accuracy, %", "runs", "α", "ε spent"]
        places = {row[1] for row in rows}
        drawn = curves or (len(places) > 1 and all(isinstance(one, int | float) for one in places))
        labels = ("round", "% wrong") if curves else (axis, "test accuracy, %")
        shape = {} if curves or axis == "mu" else {"log": "x"}
        panels = (
            [panel(title, *labels, _series(lines, curves), **shape) for title, lines in points.items()] if drawn else []
        )
        return Content(columns, rows, said, panels)

    return show


def _series(lines: dict[str, list[Point]], curves: bool = False) -> list[dict[str, Any]]:
    """Return lines with their deviations, beside each other; a baseline, which has one point, is a level."""
    found = []
    for number, (name, some) in enumerate(lines.items()):
        ordered = sorted(some)
        factor = 1.0 if curves else 1 + BESIDE * (number - (len(lines) - 1) / 2)
        look = "level" if len(some) == 1 else "band" if curves else "line"
        errors = [round(error, 2) for *_, error in ordered]
        at = [(round(x * factor, 4), round(y, 2)) for x, y, _ in ordered]
        found.append(line(name, at, error=errors, look=look))
    return found


def gains(records: Sequence[Record], _: bool) -> Content:
    """Return table 3: gain = X-PM-C − PM, loss = X-PM-C − X-PM, in points, paired by fold; and the control."""
    columns = ["α", "data", "model", "selection", "paper gain / loss", "gain", "loss", "X-PM − PM", "random-PM − PM"]
    columns += ["X-PM − random-PM", "X-PM", "PM", "NP", "larger class", "runs", "ε spent, X-PM / -C"]
    rows: list[list[Any]] = []
    ahead: dict[tuple[str, str], list[bool]] = {}
    for (rate, data, model), cell in grouped(records, "rate", "data", "model").items():
        found = {(one["method"], one["form"]): one for one in cell}
        for (place, select), form in product(enumerate(CHOICES), ("sound", "published")):
            if (f"{select}-pm", form) not in found:
                continue
            whole, extra = found[f"{select}-pm", form], found[f"{select}-pm-c", form]
            flat, control = found["pm", form], found["random-pm", "sound"]
            printed = PAPER[data, model][place]
            for lower, name in ((flat, "PM"), (control, "random-PM")) if form == "sound" else ():
                points, error, _count = difference(whole, lower)
                for word, sign in (("above", 1), ("below", -1)):
                    clear = sign * points > 2 * (error or 0.0)
                    ahead.setdefault((rate, f"X-PM clearly {word} {name}"), []).append(clear)
            pairs = ((extra, flat), (extra, whole), (whole, flat), (control, found["pm", "sound"]), (whole, control))
            rows.append(
                [
                    "one for all" if rate == "shared" else "own",
                    data,
                    model,
                    select if form == "sound" else f"{select}, published",
                    f"{printed[0]:.2f} / {printed[1]:.2f}",
                    *(signed(*pair) for pair in pairs),
                    *(f"{100 * one['mean']:.1f}" for one in (whole, flat, found["np", "sound"])),
                    f"{MAJORITY[data]:.1f}",
                    whole["count"],
                    f"{whole['spent']:.4g} / {extra['spent']:.4g}",
                ]
            )
    words = {"shared": "one α for all", "own": "own α"}
    said = [f"{words[rate]}: {order} in {sum(one)} of {len(one)} rows" for (rate, order), one in ahead.items()]
    said += [
        "Clearly: by two standard errors of the folds' differences, a little too easily, since folds share records"
    ]
    return Content(columns, rows, said)


def by_rate(records: Sequence[Record], _: bool) -> Content:
    """Return table 3's gains and losses by the α that all methods share; PE as published."""
    rows: list[list[Any]] = []
    for (rate, data, model), cell in grouped(records, "rate", "data", "model").items():
        found = {(one["method"], one["form"]): one for one in cell}
        for place, select in enumerate(CHOICES):
            form = "published" if select == "pe" else "sound"
            if (f"{select}-pm", form) not in found:
                continue
            whole, extra, flat = (found[name, form] for name in (f"{select}-pm", f"{select}-pm-c", "pm"))
            printed = "{:.2f} / {:.2f}".format(*PAPER[data, model][place])
            name = select if form == "sound" else f"{select}, published"
            accuracies = (f"{100 * one['mean']:.1f}" for one in (whole, flat))
            pairs = (signed(extra, flat), signed(extra, whole))
            rows.append([rate, data, model, name, printed, *pairs, *accuracies, whole["count"]])
    columns = ["α", "data", "model", "selection", "paper gain / loss", "gain", "loss", "X-PM", "PM", "runs"]
    return Content(columns, rows)


def bounds(_: Sequence[Record], __: bool) -> Content:
    """Return table 1: the formulas in numbers for ε = 2, E = 1, m = N/100; they bound different quantities."""
    rows = []
    for name, (size, clients) in SETS.items():
        batch, kept = clients / 100, 0.1 * size
        forms = {
            "flat": (math.sqrt(size * math.log(size) / batch) / 2, size * math.log(size) / 4),
            "compressed": (math.sqrt(kept * math.log(kept) / batch) / 2, kept * math.log(kept) / 4),
            "two-stage": (math.sqrt(math.log(size) / (batch * size)) / 2, math.log(size) / (4 * size)),
        }
        rows += [[name, size, int(batch), way, f"{n:.4f}", f"{m:.3g}"] for way, (n, m) in forms.items()]
    said = [
        "Constants are taken as 1",
        "The third bound is of the noise around the mean of sparse reports, not around the mean gradient, which those "
        "reports miss by a factor of about d: divided alike, flat and two-stage noise are the same",
    ]
    return Content(["data", "d", "m", "solution", "noise", "least batch"], rows, said)


def variants(_: Sequence[Record], __: bool) -> Content:
    """Return table 2: the price of a report of every variant, for a budget of ε = 2."""
    methods = ["np", "np-rs", "np-k", "pm", "hm", "duchi", "pm-rp"]
    methods += ["-".join(parts) for parts in product(("exp", "pe", "ps", "random"), ("pm", "pm-c"))]
    rows: list[list[Any]] = []
    for method, form in product(methods, FORMS):
        values = {
            "rounds": ITERATIONS,
            "model": {"name": "binary_logistic"},
            "algorithm": fedsel(method, form, 0.1, 2.0),
        }
        (action,) = built(experiment(values), size=123, asked=488, batches=100).actions.values()
        rows.append([method, form, "∞" if action.price is None else f"{action.price(0.5, {}).epsilon:.6g}"])
    return Content(["method", "form", "ε of one report, d = 123, k = 12, ε′ = 2"], rows)


def cost(_: Sequence[Record], quick: bool) -> Content:
    """Return figure 2(e): microseconds of one client, in cohorts."""
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    points: dict[str, dict[str, list[Point]]] = {}
    for kind, table in measure(3 if quick else 7).items():
        for (size, clients), row in zip(COHORTS.items(), table.values(), strict=True):
            each = {name: 1e6 * row[name] / clients for name in SELECTIONS}
            rows.append([kind, size, clients, *(f"{value:.2f}" for value in each.values())])
            for name, value in each.items():
                points.setdefault(f"one client, {kind}", {}).setdefault(name, []).append((size, value, 0.0))
    ordered = [float(row[4]) <= 1.1 * float(row[5]) <= 1.21 * float(row[6]) for row in rows]
    said = [f"PS ≤ PE ≤ EXP, up to a tenth, in {sum(ordered)} of {len(ordered)} rows"]
    panels = [panel(title, "d", "microseconds", _series(lines), log="xy") for title, lines in points.items()]
    return Content(["part", "d", "clients", *SELECTIONS], rows, said, panels)
