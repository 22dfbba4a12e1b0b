"""Shows the progress of a run: bars in a terminal or a notebook, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from polyeps.accounting.calibration import ProgressCallback
from polyeps.experiment.target_metrics import HEADLINES
from polyeps.server import Round

_ENCODING = "encoding records"
_LONG = 2.0  # seconds after which work is worth a line


@dataclass(frozen=True)
class Watch:
    """Callbacks that show the progress of a run; an error in one of them stops the run."""

    calibrating: ProgressCallback | None = None
    encoding: ProgressCallback | None = None  # records that an encoder has encoded
    round_done: Callable[[str, Round, int, Mapping[str, float]], None] = lambda *_: None
    job_done: Callable[[str], None] = lambda *_: None


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def seen() -> bool:
    """Whether somebody sees progress: stderr is a terminal, or this is a notebook."""
    return bool(getattr(sys.stderr, "isatty", lambda: False)()) or in_notebook()


@contextmanager
def watching(jobs: int = 1) -> Iterator[Watch]:
    """Show live bars on stderr for calibration and rounds; elsewhere than in a terminal, one line for every job done.

    Notebooks have bars where ipywidgets is installed. More than one job has a bar for all of them together.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    live = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
    job, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (job, BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
    latest: dict[str, str] = {}
    began: dict[str, float] = {}
    with Progress(*columns, console=console, transient=True, disable=not live) as bars:
        rows: dict[str, Any] = {}
        overall = bars.add_task("all jobs", total=jobs, note="") if jobs > 1 else None

        def working(task: str, done: int, total: int) -> None:
            if task not in rows:
                rows[task], began[task] = bars.add_task(task, total=total, note=""), time.monotonic()
            bars.update(rows[task], completed=done, total=total, visible=done < total)

        def encoding(done: int, total: int) -> None:
            working(_ENCODING, done, total)
            if not live and _ENCODING in began and done < total and time.monotonic() - began[_ENCODING] > _LONG:
                del began[_ENCODING]
                print(f"polyeps: encoding {total} records", file=sys.stderr)

        def round_done(job: str, round: Round, rounds: int, metrics: Mapping[str, float]) -> None:
            if job not in rows:
                rows[job] = bars.add_task(job, total=rounds, note="")
            if shown := next((name for name in HEADLINES if name in metrics), None):
                share = f"{metrics[shown]:.3f}" if shown == "r2" else f"{metrics[shown]:.1%}"
                latest[job] = f"{shown} {share}"
            note = f"{latest.get(job, '')}, {len(round.active)} active, {len(round.declined)} declined"
            note += f", {len(round.discarded)} discarded" if round.discarded else ""
            bars.update(rows[job], completed=round.number + 1, note=note)

        def job_done(job: str) -> None:
            if job in rows:
                bars.remove_task(rows.pop(job))
            if overall is not None:
                bars.advance(overall)
            if not live:
                said = f"last {latest.pop(job)}" if job in latest else "not evaluated"
                print(f"polyeps: {job} is done, {said}", file=sys.stderr)

        yield Watch(partial(working, "calibrating"), encoding, round_done, job_done)
