"""Pictures over clients: each client's spending and its traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from polyeps.report.curves import merge_equal, traffic, worst_rows
from polyeps.report.formatting import byte_size, plural, share, short
from polyeps.report.svg import ALARM, INK, MUTED, WIDE, coloured, inline, new_figure, place_axes, styled, trim, wrapped
from polyeps.report.tables import ClientSummary, MethodRuns

MOST_BARS = 60
_WIDTH = 420  # pixels: two side by side on a desk, one on a phone


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
            axes.add_patch(
                PathPatch(
                    path, edgecolor=shown, linewidth=wide, capstyle="round", fill=False, alpha=1.0 if exceeded else 0.7
                )
            )
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
