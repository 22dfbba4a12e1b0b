"""Shows a part of a study from its summary alone: a table in Markdown, JSON, and a figure as SVG."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyeps.errors import InputError
from polyeps_reproductions.studies import Panel, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# A method has the same colour in all figures.
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
STYLES = ("-", "--", ":", "-.")  # of bands, whose lines may lie on each other
SHADE = 0.18
LEVELS = (":", "-.", "--")  # baselines, which may lie on each other
PANEL = (4.6, 3.0)  # inches
LEAST_WIDTH = 6.4
ACROSS = 3  # panels in a row
DOTS = 100  # of a bitmap, per inch
GREY = "#666666"
GREEK = {"epsilon": "ε", "mu": "μ"}


def make(folder: Path) -> None:
    """Make a folder to write to, before anything is trained in vain."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder} cannot be written to ({problem.strerror}); choose another folder") from None


def write(summary: Summary, folder: Path, quick: bool = False) -> list[Path]:
    """Write JSON, Markdown and, where there is something to draw, an SVG; return the files.

    Quick results are named so, lest they pass for the study itself.
    """
    make(folder)
    path = path_of(folder, summary["study"], f"{summary['kind']}-{summary['number']}", quick)
    texts = {path: as_text(summary), path.with_suffix(".md"): markdown(summary)}
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    pictures: list[Path] = []
    with contextlib.suppress(ModuleNotFoundError):  # a machine that only lends its time may lack matplotlib
        pictures = draw(summary, path.with_suffix(".svg"))
    return [*texts, *pictures]


def path_of(folder: Path, study: str, name: str, quick: bool = False) -> Path:
    """Return the path of a part's JSON."""
    return folder / f"{study}-{name}{'-quick' if quick else ''}.json"


def read(folder: Path, study: str, name: str, quick: bool = False) -> Summary:
    """Return a part's summary from its JSON."""
    path = path_of(folder, study, name, quick)
    try:
        found: Summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"{path} is not there; leave out --show to run it, or change --output or --work") from None
    return found


def write_page(folder: Path, quick: bool = False) -> Path:
    """Write a page of all papers' claims with their verdicts, from the results in a folder, and return its path."""
    from polyeps_reproductions.headlines import Results, table
    from polyeps_reproductions.studies import STUDIES

    lines = [f"# Five papers, reproduced{' in quick' if quick else ''}", ""]
    if quick:
        lines += [
            "Small runs: few clients, rounds and seeds. They show whether the code runs, not what the papers claim.",
            "",
        ]
    for name in STUDIES:
        first, *rows = table(Results(folder, quick), (name,))
        lines += [f"## {name}", "", *markdown_table(first, rows), ""]
    path = folder / f"reproduced{'-quick' if quick else ''}.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def as_text(summary: Summary) -> str:
    """Return JSON with one row, panel or record a line."""

    def value(one: Any) -> str:
        if not (isinstance(one, list) and one):
            return json.dumps(one, ensure_ascii=False)
        return "[\n" + ",\n".join(f"  {json.dumps(part, ensure_ascii=False)}" for part in one) + "\n ]"

    return "{\n" + ",\n".join(f' "{key}": {value(one)}' for key, one in summary.items()) + "\n}\n"


def markdown(summary: Summary) -> str:
    """Return the table with its findings, and the command that made it."""
    lines = [f"# {heading(summary)}", ""]
    lines += [f"Made by `{summary['command']}` with polyeps {summary['version']}.", ""] if summary["command"] else []
    lines += markdown_table(summary["columns"], summary["table"])
    lines += ["", *sentences(summary)]
    return "\n".join(lines).rstrip() + "\n"


def sentences(summary: Summary) -> list[str]:
    """Return findings, note, and the number of trials that are missing."""
    missing = f"{summary['missing']} trials are missing; the same command runs them" if summary["missing"] else ""
    note = f"Note: {summary['note']}" if summary["note"] else ""
    return [f"{one.rstrip('.')}." for one in (*summary["findings"], note, missing) if one]


def heading(summary: Summary) -> str:
    return f"{summary['study']}, {summary['kind']} {summary['number']}: {summary['title']}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    shown = [[str(value).replace("|", "\\|") for value in row] for row in [columns, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in shown]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]


def draw(summary: Summary, path: Path) -> list[Path]:
    """Draw the panels, the same bytes whenever they are the same; nothing where there are none."""
    if not summary["panels"]:
        return []
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = summary["panels"]
    across = 2 if summary["pairs"] or len(panels) == 4 else min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    names = list(dict.fromkeys(series["name"] for one in panels for series in one["series"]))
    width = max(PANEL[0] * across, LEAST_WIDTH)
    # As many names in a row of the legend as fit beside each other.
    columns = max(1, min(5, int(width / (0.6 + 0.075 * max(map(len, names))))))
    high = PANEL[1] * down + 0.6 + 0.2 * -(-len(names) // columns)
    figure = Figure(figsize=(width, high), layout="constrained")
    shared: Any = "all" if summary.get("alike") else "row" if summary["pairs"] else False
    grid = figure.subplots(down, across, squeeze=False, sharey=shared).ravel()
    handles: dict[str, Any] = {}
    for place, (axes, one) in enumerate(zip(grid, panels, strict=False)):
        handles |= draw_panel(axes, one, names)
        if not (summary["pairs"] and place % 2):
            axes.set_ylabel(one["y"], fontsize=8)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if handles:
        look: dict[str, Any] = {"loc": "outside lower center", "fontsize": 8, "frameon": False}
        figure.legend(list(handles.values()), list(handles), ncols=min(columns, len(handles)), **look)
    figure.suptitle(heading(summary), fontsize=10)
    bitmap = path.with_suffix(".png")
    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
        figure.savefig(bitmap, dpi=DOTS, metadata={"Software": None})
    return [path, bitmap]


def draw_panel(axes: Axes, panel: Panel, names: Sequence[str]) -> dict[str, Any]:
    """Draw the series of a panel; return the handles of its legend."""
    from matplotlib.ticker import MaxNLocator

    handles: dict[str, Any] = {}
    for series in panel["series"]:
        colour = METHOD_COLOURS.get(series["name"], COLOURS[names.index(series["name"]) % len(COLOURS)])
        handles |= _draw_series(axes, series, colour, names.index(series["name"]), panel)
    if all(value is None for series in panel["series"] for value in series["y"]):
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)
    if ticks := panel.get("ticks"):
        long = max(map(len, ticks)) > 12
        axes.set_xticks(range(len(ticks)), ticks, rotation=30 if long else 0, ha="right" if long else "center")
        axes.set_xlim(-0.5, len(ticks) - 0.5)
    elif panel["x"] == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for letter, scale in (("x", axes.set_xscale), ("y", axes.set_yscale)):
        if letter in panel.get("log", ""):
            scale("log")
            _plain_ticks(axes.xaxis if letter == "x" else axes.yaxis)
    axes.set_title(panel["title"], fontsize=9)
    axes.set_xlabel(GREEK.get(panel["x"]) or panel["x"], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, which="both")
    return handles


def _plain_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, between powers of ten too where there are few of these."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    digits = (1, 2, 3, 4, 6, 8) if high < 6 * low else (1, 2, 5) if high < 100 * low else (1,)
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _draw_series(
    axes: Axes, series: Mapping[str, Any], colour: str, number: int, panel: Mapping[str, Any]
) -> dict[str, Any]:
    """Draw one series by its look; looks that accompany a line, such as the paper's values, share its colour."""
    name, x, y = series["name"], series["x"], series["y"]
    errors: Any = series.get("error")
    style = "--" if series.get("dashed", number >= len(COLOURS)) else "-"
    match series.get("look", "line"):
        case "bar":
            done = [(at, value, error) for at, value, error in zip(x, y, errors, strict=True) if value is not None]
            for at in (at for at, value in zip(x, y, strict=True) if value is None and any(_values(panel))):
                where = axes.get_xaxis_transform()
                axes.text(at, 0.25, "not run", transform=where, ha="center", rotation=90, color=GREY, fontsize=8)
            across, heights, spreads = zip(*done, strict=True) if done else ((), (), ())
            drawn = axes.bar(across, heights, panel["bars"], yerr=spreads if any(spreads) else None, color=colour)
            return {} if name in panel["ticks"] else {name: drawn}
        case "level":
            for around in errors or ():  # the deviation of a baseline
                axes.axhspan(y[0] - around, y[0] + around, color=colour, alpha=SHADE / 2, linewidth=0)
            return {name: axes.axhline(y[0], color=colour, linestyle=LEVELS[number % len(LEVELS)])}
        case "band":
            low, high = ([value + sign * error for value, error in zip(y, errors, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=colour, alpha=SHADE, linewidth=0)
            style = STYLES[number % len(STYLES)]
            return {name: axes.plot(x, y, color=colour, linestyle=style, linewidth=1.4)[0]}
        case "circles":
            axes.errorbar(x, y, errors, color=colour, fmt="o", markersize=4, markerfacecolor="none")
        case "star":
            axes.plot(x, y, marker="*", markersize=11, color=colour)
        case "paper":
            edge = "black" if "bars" in panel else colour
            axes.scatter(x, y, s=34, zorder=5, facecolors="none", edgecolors=edge)
            return {"the paper's value": axes.scatter([], [], s=34, facecolors="none", edgecolors="black")}
        case _:
            width = series.get("width", 1.4)
            look: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": width, "marker": "."}
            return {name: axes.errorbar(x, y, errors, capsize=2, **look)}
    return {}


def _values(panel: Mapping[str, Any]) -> list[bool]:
    return [value is not None for series in panel["series"] for value in series["y"]]
