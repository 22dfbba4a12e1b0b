"""Paper 001's outcomes: accuracy over folds along any axis, which orders hold, and table 3's gains and losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch

from polyeps.algorithms._averaging import Course
from polyeps_reproductions.cells import FORMS
from polyeps_reproductions.fedsel_cost import COHORTS, SELECTIONS, measure
from polyeps_reproductions.fedsel_trials import MODELS, Trial, algorithm_of, gradients
from polyeps_reproductions.tabulated import Content
from polyeps_reproductions.trials import Result

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
Orders = tuple[tuple[str, str], ...]
Group = dict[str, list[Result]]


def by(results: Iterable[Result], *names: str) -> dict[tuple[Any, ...], list[Result]]:
    """Results that agree in these fields of their trials."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result["trial"][name] for name in names), []).append(result)
    return groups


def mean(results: Sequence[Result]) -> float:
    return statistics.fmean(result["final"] for result in results)


def spread(results: Sequence[Result]) -> float:
    return statistics.stdev(result["final"] for result in results) if len(results) > 1 else 0.0


def comparison(axis: str, orders: Orders = (), curves: bool = False) -> Callable[[Sequence[Result], bool], Content]:
    """Accuracy of methods along one field of the trials."""

    def make(results: Sequence[Result], _: bool) -> Content:
        rows: list[list[Any]] = []
        points: dict[str, dict[str, list[tuple[float, float]]]] = {}
        lines: dict[str, dict[str, list[float]]] = {}
        held: dict[tuple[str, str], list[bool]] = {}
        for (data, model, rate, at), cell in by(results, "data", "model", "rate", axis).items():
            found = by(cell, "method", "form")
            panel = f"{data}, {model}" + (", one α for all" if rate == "shared" else "")
            for (method, form), runs in found.items():
                name = method if form == "sound" else f"{method}, published"
                shown = f"{100 * mean(runs):.1f} ± {100 * spread(runs):.1f}"
                spent = "–" if runs[0]["spent"] is None else f"{runs[0]['spent']:.3g}"
                used = f"{runs[0]['trial']['learning_rate']:g}"
                rows.append([panel, at, name, shown, len(runs), used, spent])
                points.setdefault(panel, {}).setdefault(name, []).append((at, 100 * mean(runs)))
                if curves:
                    lines.setdefault(f"% wrong, {panel}", {})[name] = wrong(runs)
            for higher, lower in orders:
                pair = [found.get((name, "sound")) for name in (higher, lower)]
                if pair[0] and pair[1]:
                    held.setdefault((higher, lower), []).append(mean(pair[0]) >= mean(pair[1]) - TIE)
        said = [f"{a} over {b} holds in {sum(one)} of {len(one)} cells" for (a, b), one in held.items()]
        columns = ["data, model", axis, "method", "accuracy, %", "runs", "α", "ε paid"]
        numeric = not curves and all(isinstance(row[1], int | float) for row in rows)
        return Content(columns, rows, lines, points if numeric and len({row[1] for row in rows}) > 1 else {}, said)

    return make


def wrong(runs: Sequence[Result]) -> list[float]:
    """Percent of the test records judged wrongly after each round, mean over runs."""
    rounds = sorted(runs[0]["accuracy"], key=int)
    return [round(100 - 100 * statistics.fmean(run["accuracy"][number] for run in runs), 2) for number in rounds]


def gains(results: Sequence[Result], _: bool) -> Content:
    """Table 3: gain = X-PM-C − PM, loss = X-PM-C − X-PM, in points, paired by fold; beside them the control."""
    columns = ["α", "data", "model", "selection", "paper gain / loss", "gain", "loss", "X-PM − PM", "random-PM − PM"]
    columns += ["X-PM − random-PM", "X-PM", "PM", "NP", "larger class", "runs", "ε paid, X-PM / -C"]
    rows: list[list[Any]] = []
    ahead: dict[tuple[str, str], list[bool]] = {}
    for (rate, data, model), cell in by(results, "rate", "data", "model").items():
        found = by(cell, "method", "form")
        for place, (select, form) in [(CHOICES.index(s), (s, f)) for s in CHOICES for f in ("sound", "published")]:
            if (f"{select}-pm", form) not in found:
                continue
            whole, extra = found[f"{select}-pm", form], found[f"{select}-pm-c", form]
            flat, control = found["pm", form], found["random-pm", "sound"]
            paper = PAPER[data, model][place]
            if form == "sound":
                for lower, name in ((flat, "PM"), (control, "random-PM")):
                    by_points, error = apart(whole, lower)
                    for word, clear in (
                        ("clearly above", by_points > 2 * error),
                        ("clearly below", by_points < -2 * error),
                    ):
                        ahead.setdefault((rate, f"X-PM {word} {name}"), []).append(clear)
            rows.append(
                [
                    "one for all" if rate == "shared" else "own",
                    data,
                    model,
                    select if form == "sound" else f"{select}, published",
                    f"{paper[0]:.2f} / {paper[1]:.2f}",
                    *(difference(*two) for two in ((extra, flat), (extra, whole), (whole, flat))),
                    difference(control, found["pm", "sound"]),
                    difference(whole, control),
                    *(f"{100 * mean(one):.1f}" for one in (whole, flat, found["np", "sound"])),
                    f"{MAJORITY[data]:.1f}",
                    len(whole),
                    f"{whole[0]['spent']:.4g} / {extra[0]['spent']:.4g}",
                ]
            )
    words = {"shared": "one α for all", "own": "own α"}
    said = [f"{words[rate]}: {order} in {sum(one)} of {len(one)} rows" for (rate, order), one in ahead.items()]
    said += [
        "Clearly is by two standard errors of the folds' differences, which is a little too easy: folds share records"
    ]
    return Content(columns, rows, findings=said)


def apart(higher: Sequence[Result], lower: Sequence[Result]) -> tuple[float, float]:
    """Mean and standard error of the difference, in points, fold by fold."""
    folds = [{(run["trial"]["repeat"], run["trial"]["fold"]): run["final"] for run in runs} for runs in (higher, lower)]
    points = [100 * (folds[0][fold] - folds[1][fold]) for fold in folds[0]]
    error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else 0.0
    return statistics.fmean(points), error


def difference(higher: Sequence[Result], lower: Sequence[Result]) -> str:
    return "{:+.2f} ± {:.2f}".format(*apart(higher, lower))


def bounds(_: Sequence[Result], __: bool) -> Content:
    """Table 1: the formulas in numbers for ε = 2, E = 1, m = N/100; they bound different things."""
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
    return Content(["data", "d", "m", "solution", "noise", "least batch"], rows, findings=said)


def variants(_: Sequence[Result], __: bool) -> Content:
    """Table 2: what every variant costs a client who agreed to ε = 2, by the price its ledger is charged."""
    rows: list[list[Any]] = []
    methods = ["np", "np-rs", "np-k", "pm", "hm", "duchi", "pm-rp"]
    methods += ["-".join(parts) for parts in product(("exp", "pe", "ps", "random"), ("pm", "pm-c"))]
    for method, form in product(methods, FORMS):
        trial = Trial("adult", "logistic", method, form=form)
        training = gradients(MODELS["logistic"](123))
        action = algorithm_of(trial, training, Course(1.0, 1.0, 488, 100, 1, form)).actions["report"]
        cost = "∞" if action.price is None else f"{action.price(0.5, {}).epsilon:.6g}"
        rows.append([method, form, cost])
    return Content(["method", "form", "ε of one report, d = 123, k = 12, ε′ = 2"], rows)


def cost(_: Sequence[Result], quick: bool) -> Content:
    """Figure 2(e): microseconds of one client, in cohorts."""
    torch.set_num_threads(1)
    found = measure(3 if quick else 7)
    rows: list[list[Any]] = []
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for kind, table in found.items():
        for (size, clients), row in zip(COHORTS.items(), table.values(), strict=True):
            each = {name: 1e6 * row[name] / clients for name in SELECTIONS}
            rows.append([kind, size, clients, *(f"{value:.2f}" for value in each.values())])
            for name, value in each.items():
                points.setdefault(f"microseconds of a client, {kind}", {}).setdefault(name, []).append((size, value))
    ordered = [float(row[4]) <= 1.1 * float(row[5]) <= 1.21 * float(row[6]) for row in rows]
    said = [f"PS ≤ PE ≤ EXP, up to a tenth, in {sum(ordered)} of {len(ordered)} rows"]
    return Content(["what", "d", "clients", *SELECTIONS], rows, points=points, findings=said)
