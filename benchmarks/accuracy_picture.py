"""Write the picture and the tables of measured accuracy, after `benchmarks/results/accuracy*.json` has changed.

    python benchmarks/accuracy_picture.py            # rewrites docs/pictures/accuracy.svg and the tables of PAGES
    python benchmarks/accuracy_picture.py --check    # changes nothing; status 1 if a file is out of date

A page marks a place by `<!-- accuracy NAME -->` and `<!-- end -->`; what stands between them is made here from the JSON
of `benchmarks/accuracy.py`, sentences with numbers in them too. A method that was not run in a cell is shown as a dash.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from polyeps_reproductions.presenting import GREY, METHOD_COLOURS, markdown_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"
OTHER_CELLS, ABLATION = (RESULTS.with_name(f"accuracy_{name}.json") for name in ("other_cells", "ablation"))
PICTURE = ROOT / "docs" / "pictures" / "accuracy.svg"
PAGES = (ROOT / "README.md", ROOT / "docs" / "guides" / "better-recipe.md")

OWN = {  # rules under clients' own budgets
    "fedavg": "FedAvg",
    "weiavg": "WeiAvg",
    "public-only": "public-only",
    "pfa": "PFA",
    "robust-hdp": "Robust-HDP",
    "ours": "balanced",
}
CONTROLS = {"maximum": "maximum", "non-private": "non-private"}  # FedAvg with other budgets than the clients' own
TITLES = OWN | CONTROLS
COLOURS = METHOD_COLOURS | {"robust-hdp": "#8a6d3b", "ours": "#c0161d"}
PIXELS = "/pixels"
DATA = {"mnist": "MNIST", "fashion": "Fashion-MNIST", "adult": "Adult"}
PARTITIONS = {"iid": "IID", "shards": "shards", "two-labels": "two labels", "dirichlet": "Dirichlet"}
PARTS_OF_RECIPE = {
    "today": "as the papers train",
    "+weights": "with weights by `balanced`",
    "+features": "with features",
    "+full-batch": "with one gradient a round",
    "+optimiser": "with the server's optimiser",
    "+work-plan": "with batch and steps planned by budget",
    "-features": "recipe without features",
    "-full-batch": "recipe with 100 steps on batches of 8",
    "-optimiser": "recipe without the server's optimiser",
    "-weights": "recipe with weights by ε",
    "all": "the whole recipe",
}
MISSING = "–"
ACROSS = 4  # panels in a row of the picture
BESIDE = {"": -0.18, PIXELS: 0.18}  # a method's two points have heights of their own, so that none hides another

Result = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Result]]  # by cell, by method
_MARK = re.compile(r"<!-- accuracy ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def read(path: Path = RESULTS) -> dict[str, dict[str, Result]]:
    """Return the measured accuracy by cell and method."""
    found: dict[str, dict[str, Result]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def title(cell: str) -> str:
    """Return a cell's name for readers.

    >>> title("mnist-two-labels-mixgauss1"), title("adult-mixgauss1")
    ('MNIST, two labels, MixGauss1', 'Adult, IID, MixGauss1')
    """
    data, _, rest = cell.partition("-")
    partition, _, budgets = rest.rpartition("-")
    shown = budgets.replace("mixgauss", "MixGauss")
    return f"{DATA.get(data, data)}, {PARTITIONS.get(partition or 'iid', partition)}, {shown}"


def percent(result: Result | None) -> str:
    """Return a mean with its standard deviation over seeds, in per cent.

    >>> percent({"mean": 0.9718, "sd": 0.0016}), percent({"mean": 0.5, "sd": None}), percent(None)
    ('97.2 ± 0.2', '50.0', '–')
    """
    if result is None:
        return MISSING
    return _rounded(result) + ("" if result["sd"] is None else f" ± {100 * result['sd']:.1f}")


def _rounded(result: Result) -> str:
    return f"{100 * result['mean']:.1f}"


def best(cell: Mapping[str, Result], suffix: str = "", without: tuple[str, ...] = ()) -> str | None:
    """Return the method with the highest mean among the rules under own budgets, or None where none was run."""
    there = [name for name in OWN if name + suffix in cell and name not in without]
    return max(there, key=lambda name: float(cell[name + suffix]["mean"]), default=None)


def all_methods(results: Results, suffix: str) -> str:
    """Return a table of cells × methods; the highest means under own budgets are bold, as shown.

    Methods that no cell has are left out.
    """
    names = [name for name in TITLES if any(name + suffix in cell for cell in results.values())]
    rows = []
    for key, cell in results.items():
        first = best(cell, suffix)
        highest = _rounded(cell[first + suffix]) if first else None
        row = [title(key)]
        for name in names:
            result = cell.get(name + suffix)
            bold = result is not None and name in OWN and _rounded(result) == highest
            row.append(f"**{percent(result)}**" if bold else percent(result))
        rows.append(row)
    return "\n".join(markdown_table(["data, partition, budgets", *(TITLES[name] for name in names)], rows))


def summary(results: Results) -> str:
    """Return a table of cells: the best rule as the papers train, `balanced` and the best other with the recipe."""
    rows = []
    for key, cell in results.items():
        today, other = best(cell, PIXELS), best(cell, without=("ours",))
        rows.append(
            [
                title(key),
                f"{percent(cell[today + PIXELS])} ({OWN[today]})" if today else MISSING,
                percent(cell.get("ours")),
                f"{percent(cell[other])} ({OWN[other]})" if other else MISSING,
                percent(cell.get("maximum")),
            ]
        )
    columns = ["data, partition, budgets", "papers' training, best rule", "recipe, `balanced`"]
    return "\n".join(markdown_table([*columns, "recipe, best other rule", "recipe, `maximum`"], rows))


def ablation(results: Results) -> str:
    """Return a table for every cell: parts of the recipe, each alone and all but one."""
    rows = []
    for key, cell in results.items():
        for name, result in cell.items():
            rule, _, part = name.partition("/")
            whole = "weiavg/today" if part.startswith("+") else "ours/all"
            change = 100 * (result["mean"] - cell[whole]["mean"])
            shown = "" if name == whole or part == "today" else f"{change:+.1f}".replace("-", "−")
            rows.append([title(key), PARTS_OF_RECIPE[part], OWN[rule], percent(result), shown])
    return "\n".join(markdown_table(["data, partition, budgets", "training", "rule", "test %", "change"], rows))


def distances(results: Results) -> dict[str, float]:
    """Return by how many points `balanced` with the recipe exceeds the best other rule, by cell."""
    found = {}
    for key, cell in results.items():
        other = best(cell, without=("ours",))
        if other is not None and "ours" in cell:
            found[key] = 100 * (cell["ours"]["mean"] - cell[other]["mean"])
    return found


def gains(results: Results) -> dict[str, float]:
    """Return by how many points the best rule with the recipe exceeds the best as the papers train, by cell."""
    found = {}
    for key, cell in results.items():
        now, today = best(cell), best(cell, PIXELS)
        if now is not None and today is not None:
            found[key] = 100 * (cell[now]["mean"] - cell[today + PIXELS]["mean"])
    return found


def finding(results: Results) -> str:
    """Return in sentences what the recipe brings, and how `balanced` compares with the other rules."""
    by_data: dict[str, list[float]] = {}
    for key, gain in gains(results).items():
        by_data.setdefault(DATA.get(key.partition("-")[0], key), []).append(gain)
    brought = [f"{_span(some)} on {data}" for data, some in by_data.items()]
    lines = [f"With the recipe, the best rule under own budgets is better by these points: {'; '.join(brought)}."]
    if apart := distances(results):
        ahead = sum(one > 0 for one in apart.values())
        worst = min(apart, key=lambda key: apart[key])
        below = "less than 0.1 points" if apart[worst] > -0.05 else f"{-apart[worst]:.1f} points"
        shown = f"at worst {below} below it ({title(worst)})" if apart[worst] < 0 else "never below it"
        lines.append(f"`balanced` is above the best other rule in {ahead} of {len(apart)} cells, and {shown}.")
    return "\n".join(_wrapped(" ".join(lines)))


def _span(some: list[float]) -> str:
    """Return one number of points, or the range of several.

    >>> _span([-0.04]), _span([6.6, 9.1]), _span([-0.3])
    ('0.0', '6.6 to 9.1', '−0.3')
    """
    ends = [f"{value:.1f}".replace("-0.0", "0.0").replace("-", "−") for value in (min(some), max(some))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _wrapped(text: str, width: int = 120) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


PARTS: dict[str, Callable[[Results], str]] = {
    "summary": summary,
    "recipe": lambda results: all_methods(results, ""),
    "today": lambda results: all_methods(results, PIXELS),
    "finding": finding,
    "other-cells": lambda _: all_methods(read(OTHER_CELLS), ""),
    "ablation": lambda _: ablation(read(ABLATION)),
}


def filled(page: str, results: Results) -> str:
    """Return a page with all of its marked parts made anew."""
    return _MARK.sub(lambda found: f"<!-- accuracy {found[1]} -->\n{PARTS[found[1]](results)}\n<!-- end -->", page)


def described(results: Results) -> str:
    """Return the numbers of the picture in words, for readers who cannot see it and for the test."""
    parts = []
    for key, cell in results.items():
        values = [f"{TITLES[name]} {percent(cell.get(name))} ({percent(cell.get(name + PIXELS))})" for name in TITLES]
        parts.append(f"{title(key)}: {', '.join(values)}")
    return "Test accuracy in % with the recipe (as the papers train). " + ". ".join(parts) + "."


def draw(results: Results) -> Figure:
    """Return a panel for each cell: a row for each method, with the recipe above and as the papers train below."""
    down = -(-(len(results) + 1) // ACROSS)  # the legend has a place of its own
    figure = Figure(figsize=(3.3 * ACROSS, 3.3 * down), layout="constrained")
    known = {name for cell in results.values() for name in cell}
    grid = figure.subplots(down, ACROSS, squeeze=False, sharey=True).ravel()
    for place, (axes, (key, cell)) in enumerate(zip(grid, results.items(), strict=False)):
        _draw_cell(axes, cell, known)
        axes.set_title(title(key), fontsize=9)
        if place + ACROSS >= len(results):
            axes.set_xlabel("test accuracy, %", fontsize=8)
    for axes in grid[len(results) :]:
        axes.set_axis_off()
    marks = [
        Line2D([], [], color=GREY, marker="o", linestyle="none", label="with the recipe"),
        Line2D([], [], color=GREY, marker="o", linestyle="none", markerfacecolor="white", label="as the papers train"),
        Line2D([], [], color=GREY, marker="|", markersize=7, label="± one standard deviation over seeds"),
    ]
    grid[len(results)].legend(handles=marks, loc="center", fontsize=8, frameon=False)
    return figure


def _draw_cell(axes: Axes, cell: Mapping[str, Result], known: set[str]) -> None:
    """Draw a cell; a method that only other cells have is named as not run."""
    for row, name in enumerate(TITLES):
        for suffix, beside in BESIDE.items():
            result = cell.get(name + suffix)
            if result is None:
                continue
            spread = None if result["sd"] is None else 100 * result["sd"]
            face = "white" if suffix else COLOURS[name]
            axes.errorbar(
                100 * result["mean"], row + beside, xerr=spread, fmt="o", markersize=5, capsize=2.5, linewidth=1.2,
                color=COLOURS[name], markerfacecolor=face,
            )  # fmt: skip
    low, high = axes.get_xlim()
    axes.set_xlim(low, high)
    for row, name in enumerate(TITLES):
        lacking = [suffix for suffix in ("", PIXELS) if name + suffix not in cell and name + suffix in known]
        words = {"": "recipe: not run", PIXELS: "papers' training: not run"}
        for suffix in lacking:
            look: dict[str, Any] = {"fontsize": 6.5, "color": GREY, "va": "center"}
            axes.text(low + 0.02 * (high - low), row + BESIDE[suffix], words[suffix], **look)
    for line in range(1, len(TITLES)):
        axes.axhline(line - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
    axes.axhline(len(OWN) - 0.5, color=GREY, linewidth=0.8, zorder=0)  # controls below
    axes.set_yticks(range(len(TITLES)), list(TITLES.values()), fontsize=8)
    axes.set_ylim(len(TITLES) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def save(results: Results, path: Path) -> None:
    """Write the picture: the same bytes for the same results."""
    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        draw(results).savefig(path, metadata={"Date": None, "Title": "Accuracy", "Description": described(results)})
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def outdated(results: Results) -> Iterator[Path]:
    """Yield the files that do not show these results."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if filled(text, results) != text:
            yield page
    if not PICTURE.exists() or described(results) not in PICTURE.read_text(encoding="utf-8"):
        yield PICTURE


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if a file is out of date")
    results = read()
    if parser.parse_args().check:
        late = [str(path.relative_to(ROOT)) for path in outdated(results)]
        sys.exit(f"out of date: {', '.join(late)}; run {Path(__file__).name}" if late else 0)
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    save(results, PICTURE)


if __name__ == "__main__":
    main()
