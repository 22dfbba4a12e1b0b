"""Pictures over rounds: accuracy and active clients. Each is an `svg` element for the page."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, MaxNLocator

from polyeps.report.curves import Curve, accuracy_curve, active_curve
from polyeps.report.formatting import percent, short
from polyeps.report.svg import MUTED, WIDE, coloured, inline, new_figure, place_axes, styled, trim, wrapped
from polyeps.report.tables import MethodRuns, summarise

_ROW = 17  # pixels between lines of text
_LETTER = 7.4  # pixels of one, about
_LONGEST = 40  # letters of a name at the end of its line
_FEW = 10  # evaluated rounds that are marked one by one


@dataclass(frozen=True)
class _Drawn:
    """A curve to draw, with the look of its method."""

    label: str
    curve: Curve
    colour: str
    control: bool


def accuracy_picture(methods: Sequence[MethodRuns], width: int = WIDE) -> str:
    """Draw the accuracy per round, a line per method with a band of one standard deviation over seeds."""
    drawn = [
        _Drawn(method.label, accuracy_curve(method), colour, method.control) for method, colour in coloured(methods)
    ]
    drawn = [one for one in drawn if any(map(math.isfinite, one.curve.mean))]
    if not drawn:
        return ""
    said = [f"{method.label} {percent(summarise(method).final_accuracy)}" for method in methods if method.counted]
    with styled():
        figure, axes = _rounds_axes(drawn, width, 400 if width == WIDE else 300, "test accuracy")
        for one in drawn:
            rounds, mean, deviation = one.curve.rounds, one.curve.mean, one.curve.deviation
            lower = [m - d for m, d in zip(mean, deviation, strict=True)]
            upper = [m + d for m, d in zip(mean, deviation, strict=True)]
            if any(deviation):
                axes.fill_between(rounds, lower, upper, color=one.colour, alpha=0.16, linewidth=0)
            marker = "o" if len(rounds) <= _FEW else None
            axes.plot(
                rounds, mean, color=one.colour, linewidth=2, marker=marker, markersize=5, clip_on=False,
                linestyle=_stroke(one.control),
            )  # fmt: skip
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
        _name(figure, axes, drawn, width)
        return inline(figure, f"accuracy-{width}", f"Test accuracy per round. At the end: {'; '.join(said)}.")


def active_picture(methods: Sequence[MethodRuns], width: int = WIDE) -> str:
    """Draw how many clients could afford each round; methods that lost the same clients share a line."""
    together: dict[Curve, list[tuple[MethodRuns, str]]] = {}
    for method, colour in coloured(methods):
        together.setdefault(active_curve(method), []).append((method, colour))
    drawn = [
        _Drawn(
            _names([method.label for method, _ in same]), curve, same[0][1], all(method.control for method, _ in same)
        )
        for curve, same in together.items()
        if curve.rounds
    ]
    if not drawn:
        return ""
    said = [f"{one.label} from {short(one.curve.mean[0])} to {short(one.curve.mean[-1])}" for one in drawn]
    with styled():
        figure, axes = _rounds_axes(drawn, width, 280 if width == WIDE else 260, "clients left")
        for one in drawn:
            rounds, mean = one.curve.rounds, one.curve.mean
            axes.plot(
                rounds, mean, color=one.colour, linewidth=2, drawstyle="steps-mid", linestyle=_stroke(one.control)
            )
        axes.set_ylim(0, 1.08 * max(max(one.curve.mean) for one in drawn))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        _name(figure, axes, drawn, width)
        return inline(figure, f"active-{width}", f"Clients that could afford a further round: {'; '.join(said)}.")


def _names(labels: Sequence[str]) -> str:
    """Name a line that several methods share.

    >>> _names(["PFA", "PFA+"]), _names(["PFA", "PFA+", "Minimum", "Maximum"])
    ('PFA, PFA+', 'PFA and 3 more')
    """
    together = ", ".join(labels)
    return together if len(labels) == 1 or len(together) <= 20 else f"{labels[0]} and {len(labels) - 1} more"


def _stroke(control: bool) -> Literal["-"] | tuple[float, Sequence[float]]:
    return (0, (3, 1.6)) if control else "-"


def _rounds_axes(drawn: Sequence[_Drawn], width: int, height: int, title: str) -> tuple[Figure, Axes]:
    """Return axes over rounds with room for names: at the right of a wide picture, below a narrow one."""
    if width == WIDE and _fits(drawn):
        right, below = 28 + _LETTER * max(len(one.label) for one in drawn), 0.0
    else:
        names, columns, row = _legend(drawn, width)
        right, below = 12.0, row * math.ceil(len(names) / columns) + 6.0
    figure = new_figure(width, height + below)
    axes = place_axes(figure, left=46, right=right, bottom=44 + below, top=24)
    axes.set_xlabel("round", fontsize=12)
    axes.set_title(title, loc="left", fontsize=12, color=MUTED, pad=8, x=0)
    axes.xaxis.set_major_locator(_ticks({round for one in drawn for round in one.curve.rounds}, width))
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.0 if max(len(one.curve.rounds) for one in drawn) > 1 else 0.5)
    return figure, axes


def _name(figure: Figure, axes: Axes, drawn: Sequence[_Drawn], width: int) -> None:
    """Name the lines at their ends, moved apart where names would touch; without the room, in a legend below."""
    low, high = axes.get_ylim()
    ends = [(next(m for m in reversed(one.curve.mean) if math.isfinite(m)), one) for one in drawn]
    ends.sort(key=lambda end: end[0])
    if width == WIDE and _fits(drawn):
        tall = axes.get_window_extent().height
        spots = [(value - low) / (high - low) * tall for value, _ in ends]
        for spot, height, (_, one) in zip(spots, _apart(spots, tall), ends, strict=True):
            axes.annotate(
                "", (1, spot / tall), (18, height - spot), xycoords="axes fraction", textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": one.colour, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 2},
                annotation_clip=False,
            )  # fmt: skip
            axes.annotate(
                trim(one.label, _LONGEST), (1, spot / tall), (23, height - spot), xycoords="axes fraction",
                textcoords="offset points", va="center", annotation_clip=False,
            )  # fmt: skip
        return
    total = figure.get_size_inches()[1] * 72
    ordered = [one for _, one in reversed(ends)]
    names, columns, height = _legend(ordered, width)
    for number, (name, one) in enumerate(zip(names, ordered, strict=True)):
        row, column = divmod(number, columns)
        spot = (height * (math.ceil(len(ends) / columns) - row) - height / 2) / total
        left = (46 + column * (width - 46) / columns) / width
        line = Line2D([left, left + 28 / width], [spot] * 2, color=one.colour, linewidth=2)
        line.set_linestyle(_stroke(one.control))
        figure.add_artist(line)
        figure.text(left + 36 / width, spot, name, va="center", fontsize=12)


def _legend(drawn: Sequence[_Drawn], width: int) -> tuple[list[str], int, int]:
    """Return the names of a legend, the number of its columns and the height of its rows."""
    columns = 4 if width == WIDE else 1
    names = [wrapped(one.label, int(((width - 46) / columns - 50) / _LETTER)) for one in drawn]
    return names, columns, _ROW * max(name.count("\n") + 1 for name in names)


def _fits(drawn: Sequence[_Drawn]) -> bool:
    """Say whether all names fit at the ends of their lines."""
    return len(drawn) <= 10 and max(len(one.label) for one in drawn) <= _LONGEST


def _ticks(rounds: Collection[int], width: int) -> Locator:
    """Return the ticks: at the evaluated rounds if they are few and stand apart, else at round numbers."""
    most = _FEW if width == WIDE else 6
    marked = sorted(rounds)
    room = (marked[-1] - marked[0]) / (2 * most)
    if len(marked) <= most and all(after - before >= room for before, after in pairwise(marked)):
        return FixedLocator(marked)
    return MaxNLocator(8 if width == WIDE else 5, integer=True)


def _apart(spots: Sequence[float], tall: float) -> list[float]:
    """Move ascending heights apart to a line of text each, inside the picture."""
    moved: list[list[float]] = []  # blocks of names that touch: height of the lowest, how many
    for spot in spots:
        moved.append([spot, 1])
        while len(moved) > 1 and moved[-1][0] - moved[-2][0] < _ROW * moved[-2][1]:
            base, count = moved.pop()
            below, others = moved[-1]
            moved[-1] = [(below * others + (base - _ROW * others) * count) / (others + count), others + count]
    heights = [base + _ROW * place for base, count in moved for place in range(int(count))]
    for place, height in reversed(list(enumerate(heights))):
        ceiling = heights[place + 1] - _ROW if place + 1 < len(heights) else tall
        heights[place] = min(height, ceiling)
    for place, height in enumerate(heights):
        heights[place] = max(height, heights[place - 1] + _ROW if place else 0.0)
    return heights
