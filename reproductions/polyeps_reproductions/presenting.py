"""Shows a figure's outcome: a picture like the paper's, a table in the terminal and in Markdown, and JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyeps.errors import InputError
from polyeps_reproductions.cells import FORMS
from polyeps_reproductions.summaries import Summary, methods_of, sentences, table_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A method has the same colour in all pictures.
METHOD_COLOURS = {
    "pfa": "#0b6e4f",
    "pfa-plus": "#5fad56",
    "pdp-fl": "#2aa1a1",
    "weiavg": "#1f6fb2",
    "fedavg": "#e08e0b",
    "minimum": "#b3321f",
    "maximum": "#7a4fa3",
    "non-private": "#444444",
    "public-only": "#c2458f",
}
COLOURS = tuple(METHOD_COLOURS.values())
PANEL = (4.6, 3.0)  # inches
APART = 0.045  # between methods at the same number of clients, of the step to the next: equal values stay visible
DASHED = ("pfa-plus", "public-only")  # they often lie on PFA's curve


def make(folder: Path) -> None:
    """A folder to write to, before anything is trained in vain."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder} cannot be written to ({problem.strerror}); choose another folder") from None


def write(summary: Summary, folder: Path, name: str) -> list[Path]:
    """JSON, Markdown and, where there is something to draw, an SVG; the files written."""
    make(folder)
    contents = {
        f"{name}.json": json.dumps(summary, indent=1, ensure_ascii=False) + "\n",
        f"{name}.md": markdown(summary),
    }
    for file, text in contents.items():
        (folder / file).write_text(text, encoding="utf-8")
    pictures: list[Path] = []
    with contextlib.suppress(ModuleNotFoundError):  # a machine that only lends its time may lack matplotlib
        pictures = draw(summary, folder / name)
    return [folder / file for file in contents] + pictures


def is_empty(summary: Summary) -> bool:
    """Whether nothing of it is finished."""
    if "table" in summary:
        return not summary["table"]
    return not any(method[form] for cell in summary["cells"] for method in cell["methods"].values() for form in FORMS)


def markdown(summary: Summary) -> str:
    """The table with its sentences, and the command that made it."""
    columns, rows = shown(summary)
    lines = [f"# {heading(summary)}", ""]
    lines += [f"Made by `{summary['command']}` with polyeps {summary['version']}.", ""] if summary["command"] else []
    lines += _table(columns, rows)
    lines += ["", *said(summary), *([f"Note: {summary['note']}."] if summary["note"] else [])]
    return "\n".join(lines).rstrip() + "\n"


def shown(summary: Summary) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of whatever it is."""
    return (summary["columns"], summary["table"]) if "table" in summary else table_rows(summary)


def said(summary: Summary) -> list[str]:
    """What there is to say about it."""
    return [] if "table" in summary else sentences(summary)


def heading(summary: Summary) -> str:
    return f"{summary['study']}, {summary.get('kind', 'figure')} {summary['figure']}: {summary['title']}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    shown = [[str(value).replace("|", "\\|") for value in row] for row in [columns, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in shown]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]


def draw(summary: Summary, stem: Path) -> list[Path]:
    """The picture: a row of panels per data, model and budgets, the published form beside the sound one."""
    if "table" in summary:
        return _draw_lines(summary, stem) if summary["lines"] else []
    if is_empty(summary):
        return []
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = _panels(summary)
    figure = Figure(figsize=(2 * PANEL[0], PANEL[1] * len(panels) + 1), layout="constrained")
    grid = figure.subplots(len(panels), 2, sharey="row", squeeze=False)
    for axes_of_row, (title, cells) in zip(grid, panels.items(), strict=True):
        for axes, form in zip(axes_of_row, FORMS, strict=True):
            _draw_panel(axes, summary, cells, form)
            axes.set_title(f"{title}, {form} form", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
        axes_of_row[0].set_ylabel("uplink, MiB" if summary["shows"] == "traffic" else "test accuracy", fontsize=9)
    handles, labels = grid[0][0].get_legend_handles_labels()
    if summary["axis"] == "method":  # they are named below the bars
        handles, labels = [], []
    if any(method["paper"] is not None for cell in summary["cells"] for method in cell["methods"].values()):
        ring = Line2D([], [], marker="o", markerfacecolor="none", markeredgecolor="black", linestyle="none")
        handles, labels = [*handles, ring], [*labels, "the paper's value"]
    columns = len(labels) if len(labels) <= 6 else 5
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    figure.suptitle(heading(summary), fontsize=10)
    return save(figure, stem)


def _draw_lines(summary: Summary, stem: Path) -> list[Path]:
    """Values per round, a panel for each part of the figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = summary["lines"]
    figure = Figure(figsize=(PANEL[0] * len(panels), PANEL[1] + 1), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        for number, (name, values) in enumerate(lines.items()):
            # Lines may lie on each other: every other one lets the one below be seen, and that one is broader.
            above = sum(other == values for other in list(lines.values())[number + 1 :])
            look = {"color": COLOURS[number % len(COLOURS)], "linestyle": "--" if number % 2 else "-", "label": name}
            axes.plot(range(1, len(values) + 1), values, marker=".", linewidth=1.5 + 2 * above, **look)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("round", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(panels), fontsize=8, frameon=False)
    figure.suptitle(heading(summary), fontsize=10)
    return save(figure, stem)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a picture as SVG, the same bytes whenever it is the same picture."""
    import matplotlib as mpl

    path = stem.with_name(f"{stem.name}.svg")
    with mpl.rc_context({"svg.hashsalt": stem.name, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    return [path]


def _panels(summary: Summary) -> dict[str, list[Summary]]:
    """Cells that share an axis, by what they have in common."""
    panels: dict[str, list[Summary]] = {}
    for cell in summary["cells"]:
        settings = cell["cell"]
        common = ["data", "model", "partition"] + (["budgets"] if summary["axis"] == "clients" else [])
        panels.setdefault(" ".join(settings[name] for name in common), []).append(cell)
    return panels


def _draw_panel(axes: Axes, summary: Summary, cells: Sequence[Summary], form: str) -> None:
    names = methods_of(summary)
    along_methods = summary["axis"] == "method"
    lines = summary["axis"] == "clients" and len(cells) > 1
    width = 0.8 / (1 if along_methods else len(names))
    for number, name in enumerate(names):
        colour = METHOD_COLOURS.get(name, COLOURS[number % len(COLOURS)])
        known = [(place, cell["methods"][name]) for place, cell in enumerate(cells)]
        if along_methods:
            places = [float(number)] * len(known)
        elif lines:
            places = [place + (number - (len(names) - 1) / 2) * APART for place, _ in known]
        else:
            places = [place + (number - (len(names) - 1) / 2) * width for place, _ in known]
        _draw_method(axes, places, [method for _, method in known], form, name, colour, None if lines else width)
    ticks = names if along_methods else [_tick(summary, cell) for cell in cells]
    axes.set_xticks(
        range(len(ticks)), ticks, rotation=30 if along_methods else 0, ha="right" if along_methods else "center"
    )
    if summary["axis"] == "clients":
        axes.set_xlabel("clients", fontsize=8)
    axes.set_xlim(-0.5, len(ticks) - 0.5)
    run = [any(cell["methods"][name][form] for cell in cells) for name in names]
    if not any(run):
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color="#666666", fontsize=9)
    elif along_methods:
        for number in (number for number, done in enumerate(run) if not done):
            where = axes.get_xaxis_transform()
            axes.text(number, 0.25, "not run", transform=where, ha="center", rotation=90, color="#666666", fontsize=8)


def _draw_method(
    axes: Axes,
    places: Sequence[float],
    methods: Sequence[Mapping[str, Any]],
    form: str,
    name: str,
    colour: str,
    width: float | None,
) -> None:
    """One method's values with their spread over seeds; the paper's as hollow markers, where the form is its own."""
    done = [(x, method[form]) for x, method in zip(places, methods, strict=True) if method[form]]
    across = [x for x, _ in done]
    means, spreads = [one["mean"] for _, one in done], [one["deviation"] for _, one in done]
    if width is None:
        style = "--" if name in DASHED else "-"
        axes.errorbar(across, means, spreads, color=colour, linestyle=style, marker=".", linewidth=1.4, capsize=2,
                      label=name)  # fmt: skip
    else:
        axes.bar(across, means, width, yerr=spreads if any(spreads) else None, color=colour, label=name)
    printed = [(x, method["paper"]) for x, method in zip(places, methods, strict=True) if method["paper"] is not None]
    if form == "published" and printed:
        edge = colour if width is None else "black"
        axes.scatter(
            [x for x, _ in printed], [y for _, y in printed], s=34, zorder=5, facecolors="none", edgecolors=edge
        )


def _tick(summary: Summary, cell: Summary) -> str:
    axis = "clients" if summary["axis"] == "clients" else "budgets"
    return str(cell["cell"][axis])
