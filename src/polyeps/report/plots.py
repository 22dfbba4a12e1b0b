"""Pictures over rounds (accuracy, active clients) and over clients (spending, traffic): `svg` elements for the page."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from polyeps.report.curves import Curve, accuracy_curve, active_curve, merge_equal, traffic, worst_rows
from polyeps.report.formatting import SHARES, byte_size, plural, reached, share, short
from polyeps.report.svg import ALARM, INK, MUTED, WIDE, coloured, inline, new_figure, place_axes, styled, trim, wrapped
from polyeps.report.tables import ClientSummary, MethodRuns, summarise

_ROW = 17  # pixels between lines of text
_LETTER = 7.4  # pixels of one, about
_LONGEST = 40  # letters of a name at the end of its line
_FEW = 10  # evaluated rounds that are marked one by one
MOST_BARS = 60
_WIDTH = 420  # pixels: two side by side on a desk, one on a phone


@dataclass(frozen=True)
class _Drawn:
    """A curve to draw, with the look of its method."""

    label: str
    curve: Curve
    colour: str
    control: bool


def accuracy_picture(methods: Sequence[MethodRuns], width: int = WIDE) -> str:
    """Draw the accuracy per round, a line per method with a band of one standard deviation over seeds."""
    drawn = [_Drawn(one.label, accuracy_curve(one), colour, one.control) for one, colour in coloured(methods)]
    drawn = [one for one in drawn if any(map(math.isfinite, one.curve.mean))]
    if not drawn:
        return ""
    measure = methods[0].measure
    rows = [summarise(method) for method in methods if method.counted]
    said = [f"{row.label} {reached(row.measure, row.final_accuracy)}" for row in rows]
    with styled():
        figure, axes = _rounds_axes(drawn, width, 400 if width == WIDE else 300, f"test {measure}")
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
        if measure in SHARES:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
        _name(figure, axes, drawn, width)
        return inline(figure, f"accuracy-{width}", f"Test {measure} per round. At the end: {'; '.join(said)}.")


def active_picture(methods: Sequence[MethodRuns], width: int = WIDE) -> str:
    """Draw how many clients could afford each round; methods that lost the same clients share a line."""
    together: dict[Curve, list[tuple[MethodRuns, str]]] = {}
    for method, colour in coloured(methods):
        together.setdefault(active_curve(method), []).append((method, colour))
    drawn = [
        _Drawn(_names([one.label for one, _ in same]), curve, same[0][1], all(one.control for one, _ in same))
        for curve, same in together.items()
        if curve.rounds
    ]
    if not drawn:
        return ""
    said = [f"{one.label} from {short(one.curve.mean[0])} to {short(one.curve.mean[-1])}" for one in drawn]
    with styled():
        figure, axes = _rounds_axes(drawn, width, 280 if width == WIDE else 260, "clients left")
        for one in drawn:
            (line,) = axes.plot(one.curve.rounds, one.curve.mean, color=one.colour, linewidth=2, drawstyle="steps-mid")
            line.set_linestyle(_stroke(one.control))
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


def spent_picture(method: MethodRuns, colour: str) -> str:
    """Draw spending against budgets: a bar per client or group of equal clients, or a dot for each of many."""
    rows = worst_rows(method)
    if not rows:
        return ""
    highest = max(row.ratio or 0.0 for row in rows)
    over = sum(row.exceeded for row in rows)
    said = (
        f"{method.label}: spending of {plural(len(rows), 'client')} against the effective budgets; the most is "
        f"{share(highest)} of it{f'; {over} exceeded it' if over else ''}."
    )
    with styled():
        bars = rows if len(rows) <= MOST_BARS else merge_equal(rows)
        figure = _bars(bars, colour) if len(bars) <= MOST_BARS else _dots(rows, colour)
        return inline(figure, f"spent-{method.label}-{method.run}", said)


def bytes_picture(methods: Sequence[MethodRuns], width: int = WIDE) -> str:
    """Draw the bytes a client sends and receives over a whole run, a pair of bars per method."""
    found = [(method, colour, traffic(method)) for method, colour in coloured(methods)]
    shown = [(method, colour, one) for method, colour, one in found if one is not None]
    if not shown:
        return ""
    said = [
        f"{method.label} sends {byte_size(one.sent[0])}, receives {byte_size(one.received[0])}"
        for method, _, one in shown
    ]
    wide = width == WIDE
    most = max(max(one.sent[2], one.received[2]) for _, _, one in shown)
    names = [wrapped(method.label, 26 if wide else 48) for method, *_ in shown]
    tall = 16 * max(name.count("\n") + 1 for name in names)
    step = max(46, tall) if wide else (tall + 10) / 0.36  # a phone has the name above the bars, which take the rest
    with styled():
        label = 8 + 7.2 * max(len(part) for name in names for part in name.split("\n")) if wide else 2
        figure = new_figure(width, step * len(shown) + 34)
        axes = place_axes(figure, left=label, right=108, bottom=30, top=4)
        for row, (name, (_, colour, one)) in enumerate(zip(names, shown, strict=True)):
            middle = row if wide else row + 0.12
            for beside, (mean, least, largest), alpha in ((-0.17, one.sent, 1.0), (0.17, one.received, 0.45)):
                axes.barh(middle + beside, mean, height=0.3, color=colour, alpha=alpha)
                if largest > least:
                    axes.plot([least, largest], [middle + beside] * 2, color=INK, linewidth=1, marker="|", alpha=0.6)
                word = "sent" if beside < 0 else "received"
                axes.annotate(
                    f"{byte_size(mean)} {word}", (largest, middle + beside), (6, 0), textcoords="offset points",
                    va="center", fontsize=11.5, color=INK if beside < 0 else MUTED, annotation_clip=False,
                )  # fmt: skip
            spot = (-10, 0) if wide else (0, 3)
            axes.annotate(
                name, (0, row if wide else row - 0.2), spot, textcoords="offset points",
                ha="right" if wide else "left", va="center" if wide else "bottom", annotation_clip=False,
            )  # fmt: skip
        axes.set_xlim(0, most or 1)
        axes.set_ylim(len(shown) - 0.45, -0.55)
        axes.yaxis.set_major_locator(NullLocator())
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5 if wide else 3))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: byte_size(value)))
        axes.grid(axis="x")
        return inline(figure, f"bytes-{width}", f"Bytes per client and run: {'; '.join(said)}.")


def _bars(rows: Sequence[ClientSummary], colour: str) -> Figure:
    """Draw a bar per client from the left edge (a log axis has no zero) to its spending, a tick at its budget."""
    low, high = _limits(rows)
    figure = new_figure(_WIDTH, 16 * len(rows) + 52)
    names = [trim(row.client, 16) for row in rows]
    axes = place_axes(figure, left=16 + 6.6 * max(map(len, names)), right=14, bottom=46, top=6)
    for y, row in enumerate(rows):
        budget, spent = row.epsilon or 0.0, row.spent or 0.0
        shown = ALARM if row.exceeded else colour
        if spent > 0:
            end = min(spent, high)
            axes.plot([low, end], [y, y], color=shown, linewidth=2.5, alpha=0.55, solid_capstyle="butt")
            axes.plot([end], [y], "o" if spent <= high else ">", color=shown, markersize=5.5)
        axes.plot([budget], [y], "|", color=INK, markersize=12, markeredgewidth=1.8)
        if row.own_epsilon != budget and math.isfinite(row.own_epsilon):
            axes.plot([row.own_epsilon], [y], "D", color=MUTED, markersize=4, fillstyle="none")
    axes.set_xscale("log")
    _log(axes.xaxis, low, high)
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), names, fontsize=11)
    axes.set_xlabel("ε, log scale", fontsize=12)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return figure


def _dots(rows: Sequence[ClientSummary], colour: str) -> Figure:
    """Draw a dot per client, budget to the right and spending upwards; on the diagonal the budget is used up."""
    low, high = _limits(rows)
    figure = new_figure(_WIDTH, 360)
    axes = place_axes(figure, left=48, right=14, bottom=46, top=28)
    axes.plot([low, high], [low, high], color=MUTED, linewidth=1, dashes=(4, 3))
    for shown, exceeded, wide in ((colour, False, 5), (ALARM, True, 9)):
        # One path of round dots: a mark of its own for each of thousands of clients would make the page heavy.
        spots = sorted({_spot(row, low, high) for row in rows if row.exceeded == exceeded and (row.spent or 0) > 0})
        if spots:
            corners = [corner for spot in spots for corner in (spot, spot)]
            path = Path(corners, [Path.MOVETO, Path.LINETO] * len(spots))
            alpha = 1.0 if exceeded else 0.7
            axes.add_patch(PathPatch(path, edgecolor=shown, linewidth=wide, capstyle="round", fill=False, alpha=alpha))
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        _log(axis, low, high)
        axis.grid(True)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("effective budget ε, log scale", fontsize=12)
    axes.set_title("spent ε, log scale", loc="left", fontsize=12, color=MUTED, pad=8, x=0)
    return figure


def _spot(row: ClientSummary, low: float, high: float) -> tuple[float, float]:
    """Return the place of a client's dot to half a pixel, so that equal dots are drawn once."""
    step = math.log(high / low) / (2 * _WIDTH)

    def near(value: float) -> float:
        return math.exp(round(math.log(min(max(value, low), high)) / step) * step)

    return near(row.epsilon or low), near(row.spent or low)


def _limits(rows: Sequence[ClientSummary]) -> tuple[float, float]:
    figures = [value for row in rows for value in (row.epsilon, row.spent, row.own_epsilon)]
    known = [value for value in figures if value is not None and 0 < value < math.inf]
    return min(known) / 1.8, max(known) * 1.3


def _log(axis: Axis, low: float, high: float) -> None:
    """Label a log scale with plain numbers, more of them where the axis covers little."""
    subs = (1.0,) if high / low > 200 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
