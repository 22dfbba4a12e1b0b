"""Output of commands: JSON or tables on stdout, progress and remarks on stderr."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click
import typer

from polyeps.errors import InputError

if TYPE_CHECKING:  # commands import heavy modules only when they run, so that --help is quick
    from polyeps.accounting.calibration import ProgressCallback
    from polyeps.experiment.progress import Watch

Row = TypeVar("Row")
_QUIET = "polyeps.quiet"
_WIDEST = 2000  # columns of a table
_FIGURE = re.compile(r"|none|no guarantee|–|∞|[−+-]?[\d.,]+(e-?\d+)?([ x]?[%a-zA-Z]*)?( [–±] [\d.,]+( ?%)?)?")
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
Delta = Annotated[float, typer.Option(help="The probability with which the guarantee may fail.")]


def print_json(content: Any) -> None:
    """Print figures as JSON; an infinite ε is written Infinity, as Python reads and writes it."""
    print(json.dumps(content, indent=2, ensure_ascii=False))


def print_either(as_json: bool, figures: Any, said: str) -> None:
    """Print figures as JSON, or what they say."""
    if as_json:
        print_json(figures)
    else:
        print(said)


def quiet() -> bool:
    """Whether the command runs with --quiet: no progress and no remarks."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def be_quiet(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Remember --quiet for the command that runs."""
    if wanted:
        context.meta[_QUIET] = True


def remark(text: str) -> None:
    """Print a remark on stderr, apart from the figures; none with --quiet."""
    if quiet():
        return
    print(f"polyeps: {text}", file=sys.stderr)


def check_new(path: Path, option: str = "--output") -> None:
    """Refuse to write where something is already, or where nothing can be written."""
    if path.exists() or path.is_symlink():
        raise InputError(f"{option} {path} exists already; remove it, or choose another file")
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: the folder {path.parent} does not exist; make it, or choose another")


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet; if that fails, nothing is left behind."""
    check_new(path)
    try:
        with path.open("xb") as stream:
            try:
                stream.write(content)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        check_new(path)
        raise
    except OSError as problem:
        raise InputError(f"{path} cannot be written: {problem.strerror}; choose another file") from None


def figure(value: Any) -> str:
    """Format a number for a table.

    >>> figure(0.99993807), figure(float("inf")), figure(1200), figure(1e-6)
    ('0.99994', '∞', '1200', '1e-6')
    """
    if isinstance(value, float):
        return "∞" if math.isinf(value) else re.sub(r"e([+-])0+", r"e\1", f"{value:.5g}")
    return "–" if value is None else str(value)


def _is_figure(cell: Any) -> bool:
    """Return whether a cell is a number, perhaps with a unit, or says that there is none."""
    return isinstance(cell, int | float | None) or bool(_FIGURE.fullmatch(str(cell)))


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print what is known of one thing, a fact a line; empty ones are left out."""
    print_table(["", ""], [[name.replace("_", " "), figure(value)] for name, value in facts.items() if value != ""])


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """Print a table; columns of figures are right-aligned, names of columns may be missing."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns))
    cells = [list(row) for row in rows]
    for place, name in enumerate(columns):
        numeric = any(columns) and all(_is_figure(row[place]) for row in cells)
        numeric = numeric and (place > 0 or all(isinstance(row[place], int | float) for row in cells))  # or a name
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(figure(value) for value in row))
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    # Lines may wrap in a narrow terminal; a figure must never be cut.
    needed = console.measure(table, options=console.options.update_width(_WIDEST)).maximum
    console.width = max(console.width, needed)
    if title:
        console.print(title, soft_wrap=True)
    console.print(table)


@contextmanager
def progress(task: str) -> Iterator[ProgressCallback]:
    """Show a progress bar on stderr if it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=quiet() or not console.is_terminal) as bar:
        row = bar.add_task(task, total=None)
        yield lambda done, total: bar.update(row, completed=done, total=total)


def showing(jobs: int = 1) -> AbstractContextManager[Watch]:
    """Show the progress of a run's jobs; none with --quiet."""
    from polyeps.experiment.progress import Watch, watching

    return nullcontext(Watch()) if quiet() else watching(jobs)


def parse_epsilons(text: str) -> list[float]:
    """Parse numbers separated by commas, such as "1,0.1,10".

    >>> parse_epsilons("1,0.1")
    [1.0, 0.1]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--epsilon is {text!r}; it must be a number, or numbers separated by commas") from None


def grouped(rows: Sequence[Row], by: Callable[[Row], float], lines: int = 30) -> list[list[Row]]:
    """Return rows in the order of a number, one by one or, where they are many, with similar ones together."""
    ordered = sorted(rows, key=by)
    if len(ordered) <= lines:
        return [[row] for row in ordered]
    finite = [by(row) for row in ordered if math.isfinite(by(row))] or [1.0]
    width = math.log(finite[-1] / finite[0]) / lines or 1.0
    groups: list[list[Row]] = []
    for row in ordered:
        first = by(groups[-1][0]) if groups else 0.0
        if not groups or (by(row) != first and not math.log(by(row) / first) <= width):
            groups.append([])
        groups[-1].append(row)
    return groups


def span(values: Sequence[float]) -> str:
    """Return the smallest and the largest of some figures; nothing where there are none.

    >>> span([1, 3, 2]), span([2, 2])
    ('1 – 3', '2')
    """
    if not values:
        return ""
    low, high = figure(min(values)), figure(max(values))
    return low if low == high else f"{low} – {high}"
