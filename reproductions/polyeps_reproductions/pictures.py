"""Pictures of tables whose axis is not the round: accuracy by ε, by μ, by batch, by r; time by dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyeps_reproductions.presenting import COLOURS, PANEL, heading, save

ACROSS = 3  # panels in a row
LINEAR = ("mu", "ε spent")  # axes; others are logarithmic
LEVEL = (":", "-.", "--")  # baselines, which may lie on each other


def draw(summary: dict[str, Any], stem: Path) -> list[Path]:
    """An SVG with a panel for each data set and model; nothing where there are no points."""
    if not summary.get("points"):
        return []
    from matplotlib.figure import Figure

    panels = summary["points"]
    columns = min(ACROSS, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * height + 1), layout="constrained")
    places = figure.subplots(height, columns, squeeze=False).ravel()
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    handles: dict[str, Any] = {}
    for axes, (title, lines) in zip(places, panels.items(), strict=False):
        for name, points in lines.items():
            number = names.index(name)
            look = {"color": COLOURS[number % len(COLOURS)], "linestyle": "-" if number < len(COLOURS) else "--"}
            if len(points) == 1:  # a baseline without the axis' parameter
                look["linestyle"] = LEVEL[number % len(LEVEL)]
                handles[name] = axes.axhline(points[0][1], label=name, **look)
            else:
                (handles[name],) = axes.plot(*zip(*points, strict=True), marker=".", label=name, **look)
        if summary["figure"] == "2e":
            axes.set_yscale("log")
        axes.set_xscale("linear" if summary["axis"].startswith(LINEAR) else "log")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(summary["axis"], fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    for axes in places[::columns]:
        axes.set_ylabel("seconds" if summary["figure"] == "2e" else "test accuracy, %", fontsize=8)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.suptitle(heading(summary), fontsize=10)
    return save(figure, stem)
