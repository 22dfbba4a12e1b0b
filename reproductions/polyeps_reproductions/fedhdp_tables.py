"""FedHDP's tables 1 and 2: the paper's numbers, and the same made of our records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from polyeps_reproductions.studies import Content, Record, grouped, line, panel, percent, signed, spread_of

MNIST, SKEWED, WRITERS, FEMNIST = "one digit", "skewed", "writers", "femnist"
OPEN, PLAIN, OURS, AUTO = "fedhdp-open", "dp-fedavg", "fedhdp", "auto"
COLUMNS = [
    *("clients", "r", "method", "Acc_g", "Acc_g,p", "Acc_g,np", "Δ_g", "Acc_l,p", "Acc_l,np", "Δ_l"),
    *("α, steps", "paper: Acc_g; g,p, g,np; l,p, l,np (writers: FMNIST)"),
]
# Accuracies of the common model; of it for private and non-private clients; of personal models for both.
PAPER: Mapping[tuple[str, str, float | str | None], str] = {
    (MNIST, OPEN, None): "93.8; –, 93.75; –, 99.98",
    (MNIST, PLAIN, None): "88.75; 88.64, –; 99.97, –",
    (MNIST, OURS, 0.01): "92.48; 92.43, 93.30; 99.94, 99.94",
    (MNIST, OURS, 1.0): "87.71; 87.55, 88.35; 99.97, 99.93",
    (SKEWED, OPEN, None): "93.67; –, 93.62; –, 99.98",
    (SKEWED, PLAIN, None): "88.93; 88.87, –; 99.98, –",
    (SKEWED, OURS, 0.1): "90.36; 89.96, 97.45; 99.97, 99.76",
    (SKEWED, OURS, 0.9): "87.96; 87.69, 92.97; 99.98, 99.96",
    (SKEWED, OURS, 1.0): "88.25; 88.05, 89.98; 99.97, 99.85",
    (WRITERS, OPEN, None): "89.65; –, 89.35; –, 94.53",
    (WRITERS, PLAIN, None): "77.61; 77.62, –; 90.04, –",
    (WRITERS, OURS, 0.01): "86.88; 85.36, 90.02; 93.76, 95.94",
    (WRITERS, OURS, 1.0): "75.87; 75.77, 74.41; 90.45, 92.32",
    (FEMNIST, OPEN, None): "81.66; –, 81.79; –, 84.46",
    (FEMNIST, PLAIN, None): "75.42; 75.86, –; 74.69, –",
    (FEMNIST, OURS, 0.1): "76.52; 77.91, 83.9; 77.9, 79.15",
    (FEMNIST, OURS, 0.01): "74.86; 77.31, 86.73; 81.19, 84.68",
    (FEMNIST, OURS, 1.0): "75.12; 75.87, 78.59; 74.67, 75.95",
}


def compared(records: Sequence[Record], quick: bool) -> Content:
    """Return a row for each method, ours beside the paper's; accuracy by r as points."""
    said = ["Quick: 200 clients that share the 1797 digits of scikit-learn, 40 rounds"] if quick else []
    panels = []
    for (clients,), some in grouped(records, "clients").items():
        points: dict[str, list[tuple[float, float, float]]] = {}
        for one in some:
            at = one["ratio"] if isinstance(one["ratio"], float) else 1.0
            name = f"{one['method']} auto" if one["ratio"] == AUTO else one["method"]
            if at:  # a logarithmic axis has no zero
                points.setdefault(name, []).append((at, 100 * one["mean"], 100 * one["deviation"]))
        series = [line(name, at, **({"look": "level"} if len(at) == 1 else {})) for name, at in points.items()]
        panels.append(panel(clients, "r", "test accuracy, %", series, log="x"))
        said += _findings(clients, some)
    return Content(COLUMNS, [_row(one) for one in records], said, panels)


def with_less_noise(records: Sequence[Record], _: bool) -> Content:
    """Return rows as `compared` does, without its findings on methods that are not here."""
    return Content(COLUMNS, [_row(one) for one in records])


def _row(one: Record) -> list[Any]:
    groups = {"p": " (private)", "np": " (open)"}
    if one["method"] != OURS:  # all clients are alike: of one group or of the other
        groups = {"np": ""} if one["method"] == OPEN else {"p": ""}
    shown = []
    for kind in ("own", "personal"):  # the common model's accuracy on clients' own records, and their own models'
        each = {
            name: ([run[f"{kind} accuracy{of}"] for run in one["own"].values()],
                   [run[f"{kind} accuracy variance{of}"] for run in one["own"].values()])
            for name, of in groups.items()
        }  # fmt: skip
        gap = [b - a for a, b in zip(each["p"][0], each["np"][0], strict=True)] if len(each) == 2 else None
        shown += [_printed(*each[name]) if name in each else "–" for name in ("p", "np")]
        shown.append("–" if gap is None else _printed(gap))
    ratio = "" if one["ratio"] is None else one["ratio"]
    training = f"{one['learning_rate']:g}, {one['local_steps']}"
    return [one["clients"], ratio, one["method"], percent(one), *shown, training, one["paper"] or ""]


def _printed(values: Sequence[float], variances: Sequence[float] = ()) -> str:
    """Return per cent with the deviation over seeds; in brackets the variance across clients, times 100."""
    within = f" ({100 * fmean(variances):.2f})" if any(variances) else ""
    return percent(spread_of(values)) + within


def _findings(clients: str, records: Sequence[Record]) -> list[str]:
    mine = {(one["method"], one["ratio"]): one for one in records}
    auto, plain = mine[OURS, AUTO], mine[PLAIN, None]
    above = {ratio: 100 * (one["mean"] - auto["mean"]) for (method, ratio), one in mine.items()
             if method == OURS and ratio != AUTO}  # fmt: skip
    best = max(above, key=lambda ratio: above[ratio])
    spent = max((one["spent"] for one in records if one["spent"] is not None), default=0.0)
    lower = [
        str(ratio)
        for (method, ratio), one in mine.items()
        if method == OURS
        and fmean(run["personal accuracy (open)"] - run["personal accuracy (private)"] for run in one["own"].values())
        < 0
    ]
    signs = f"{clients}: Δ_l is negative, so open clients' own models are worse than private clients', at r = "
    return [
        *([signs + ", ".join(lower)] if lower else []),
        f"{clients}: fedhdp with r = auto has {signed(auto, plain)} points over dp-fedavg; the best r tried, {best}, "
        f"has {above[best]:+.2f} over auto, and r = 1 {above[1.0]:+.2f}",
        f"{clients}: ε spent by ledgers, at most {spent:.3f}",
    ]
