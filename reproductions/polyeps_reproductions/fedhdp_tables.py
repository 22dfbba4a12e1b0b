"""Paper 003's tables 1 and 2: what it printed, and the same made of our trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from polyeps_reproductions.tabulated import Content
from polyeps_reproductions.trials import Result

MNIST, SKEWED, WRITERS, FEMNIST = "one digit", "skewed", "writers", "femnist"
OPEN, PLAIN, OURS, AUTO = "fedhdp-open", "dp-fedavg", "fedhdp", "auto"
COLUMNS = [
    *("clients", "r", "method", "Acc_g", "Acc_g,p", "Acc_g,np", "Δ_g", "Acc_l,p", "Acc_l,np", "Δ_l"),
    *("α, steps", "paper: Acc_g; g,p, g,np; l,p, l,np"),
]


@dataclass(frozen=True)
class Row:
    """A method with clients of one kind."""

    clients: str
    method: str
    ratio: float | str | None  # of FedHDP

    @property
    def name(self) -> str:
        """What its trials are called."""
        return "-".join(["table", self.clients.replace(" ", "-"), self.method, *self._ratio]).rstrip("-")

    @property
    def _ratio(self) -> list[str]:
        return [] if self.ratio is None else [f"{self.ratio}"]


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


def compared(results: Sequence[Result], quick: bool) -> Content:
    """A row for each method, ours beside the paper's; accuracy by r as points."""
    together: dict[Row, list[Result]] = {}
    for result in results:
        together.setdefault(row_of(result), []).append(result)
    rows = [[*_shown(row, runs), "" if quick else _paper(row)] for row, runs in together.items()]
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row, runs in together.items():
        accuracy = (row.ratio if isinstance(row.ratio, float) else 1.0, 100 * fmean(run["final"] for run in runs))
        if accuracy[0]:  # an axis of logarithms has no zero
            name = OURS if isinstance(row.ratio, float) else " ".join([row.method, *row._ratio])
            points.setdefault(row.clients, {}).setdefault(name, []).append(accuracy)
    said = ["In small: 200 clients that share the 1797 digits of scikit-learn, 40 rounds"] if quick else []
    return Content(COLUMNS, rows, points=points, findings=[*said, *_findings(together)])


def row_of(result: Result) -> Row:
    """Which row a result belongs to, by its settings and its name."""
    method = result["settings"]["algorithm"][0]
    known = (MNIST, SKEWED, WRITERS, FEMNIST)
    (clients,) = (one for one in known if result["trial"]["name"].startswith(Row(one, method["name"], None).name))
    return Row(clients, method["name"], method.get("ratio"))


def _shown(row: Row, runs: Sequence[Result]) -> list[Any]:
    cells = {name: _accuracies(runs, kind, group) for name, (kind, group) in _CELLS.items()}
    if row.method != OURS:  # all clients are alike: of one group or of the other
        everybody = {name: _accuracies(runs, kind, "") for name, (kind, _) in _CELLS.items()}
        absent = "p" if row.method == OPEN else "np"
        cells = {name: [] if name.endswith(f",{absent}") else everybody[name] for name in cells}
    more = {
        one: [(open_ - private, 0.0) for (open_, _), (private, _) in zip(*pair, strict=True)]
        for one in ("g", "l")
        if all(pair := (cells[f"{one},np"], cells[f"{one},p"]))
    }
    training = runs[0]["settings"]["training"]
    return [
        row.clients,
        "" if row.ratio is None else row.ratio,
        row.method,
        _printed([(run["final"], None) for run in runs]),
        *(_printed(cells[f"g,{group}"]) for group in ("p", "np")),
        _printed(more.get("g", [])),
        *(_printed(cells[f"l,{group}"]) for group in ("p", "np")),
        _printed(more.get("l", [])),
        f"{training['learning_rate']:g}, {training['local_steps']}",
    ]


def _paper(row: Row) -> str:
    return PAPER.get((row.clients, row.method, row.ratio), "")


_CELLS = {
    "g,p": ("own", "private"),
    "g,np": ("own", "open"),
    "l,p": ("personal", "private"),
    "l,np": ("personal", "open"),
}


def _accuracies(runs: Sequence[Result], kind: str, group: str) -> list[tuple[float, float]]:
    """Mean over clients and variance across them, of every seed."""
    ending = f" ({group})" if group else ""
    return [(run["own"][f"{kind} accuracy{ending}"], run["own"][f"{kind} accuracy variance{ending}"]) for run in runs]


def _printed(values: Sequence[tuple[float, float | None]]) -> str:
    """Per cent with the deviation over seeds; in brackets the variance across clients, of fractions, times 100."""
    if not values:
        return "–"
    means = [100 * mean for mean, _ in values]
    spread = f" ± {stdev(means):.2f}" if len(means) > 1 else ""
    variances = [variance for _, variance in values if variance]
    return f"{fmean(means):.2f}{spread}" + (f" ({100 * fmean(variances):.2f})" if variances else "")


def _findings(together: Mapping[Row, Sequence[Result]]) -> list[str]:
    said = []
    for clients in dict.fromkeys(row.clients for row in together):
        mine = {(row.method, row.ratio): runs for row, runs in together.items() if row.clients == clients}
        finals = {key: [100 * run["final"] for run in runs] for key, runs in mine.items()}
        auto, plain = finals[OURS, AUTO], finals[PLAIN, None]
        fixed = {ratio: fmean(values) for (method, ratio), values in finals.items() if method == OURS and ratio != AUTO}
        best = max(fixed, key=lambda ratio: fixed[ratio])
        mean, error = _apart(auto, plain)
        gain = f"{mean:+.2f}" + (f" ± {error:.2f}" if error is not None else "")
        said.append(
            f"{clients}: fedhdp with r = auto has {gain} points over dp-fedavg; the best r tried, {best}, has "
            f"{fixed[best] - fmean(auto):+.2f} over auto, and r = 1 {fixed[1.0] - fmean(auto):+.2f}"
        )
        spent = {f"{run['spent']:.3f}" for runs in mine.values() for run in runs if run["spent"] is not None}
        said.append(f"{clients}: ε spent by ledgers, at most {max(spent, default='none')}")
    return said


def _apart(higher: Sequence[float], lower: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error of differences, seed by seed; one seed has no error."""
    points = [one - other for one, other in zip(higher, lower, strict=True)]
    return fmean(points), stdev(points) / math.sqrt(len(points)) if len(points) > 1 else None
