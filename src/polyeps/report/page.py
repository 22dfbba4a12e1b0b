"""One offline page about one or more runs, written from their journals."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from polyeps.errors import InputError
from polyeps.experiment.journal import Journal
from polyeps.report import numbers
from polyeps.report import sentences as words
from polyeps.report.client_plots import bytes_picture, spent_picture
from polyeps.report.plots import accuracy_picture, active_picture
from polyeps.report.svg import METHODS, NARROW, WIDE, coloured
from polyeps.report.tables import (
    ClientSummary,
    Job,
    Line,
    MethodSummary,
    left_early,
    names,
    read,
    summarise,
)

MOST_ROWS = 6000  # clients on the page, over all methods: a page must open on a phone
MOST_ALARMS = 10


def open_journals(folders: Sequence[Path], stack: ExitStack) -> list[Journal]:
    """The journals of these run folders, each once, closed with the stack."""
    once = {folder.resolve(): folder for folder in folders}
    if not once:
        raise InputError("there is no run to report on; give the folder of a run")
    return [stack.enter_context(closing(Journal(folder / "journal.db"))) for folder in once.values()]


def write_page(folders: Sequence[Path], output: Path) -> None:
    """Write the page about these run folders; it appears whole or not at all."""
    with ExitStack() as stack:
        text = make_page(open_journals(folders, stack))
    if output.is_dir() or not output.parent.is_dir():
        problem = "is a folder" if output.is_dir() else "lies in a folder that does not exist"
        raise InputError(
            f"the page cannot be written: {output} {problem}; give the name of a file, such as report.html"
        )
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=output.parent, prefix=f".{output.name}.", delete=False
        ) as file:
            try:
                file.write(text)
                file.close()
                Path(file.name).chmod(0o666 & ~_mask())
                Path(file.name).replace(output)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as problem:
        raise InputError(f"{output} cannot be written ({problem}); choose another place") from problem


def make_page(journals: Sequence[Journal]) -> str:
    """The page's text."""
    lines = read(journals)
    runs = names(journals)
    environment = Environment(
        loader=PackageLoader("polyeps.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"numbers": numbers}
    shown = [_method(line, colour) for line, colour in coloured(lines)]
    return environment.get_template("page.html.j2").render(
        title=" and ".join(runs),
        runs=[_run(journal, name, lines) for journal, name in zip(journals, runs, strict=True)],
        alarms=_alarms(lines),
        waiting=_waiting(lines),
        methods=shown,
        metrics=list(dict.fromkeys(name for method in shown for name in method["row"].metrics)),
        several=any(line.jobs and len(line.jobs) > 1 for line in lines),
        judged=words.judged(lines),
        evaluated=words.evaluated(lines),
        accuracy=_pair(accuracy_picture, lines),
        active=_pair(active_picture, lines) if any(left_early(job) for line in lines for job in line.counted) else None,
        traffic=_pair(bytes_picture, lines),
        spent=[
            (method, Markup(picture))
            for (line, colour), method in zip(coloured(lines), shown, strict=True)
            if (picture := spent_picture(line, colour))
        ],
        promised=_promised(shown),
        tables=_tables(lines, shown),
        own=_own(lines, shown),
    )


def _pair(picture: Any, lines: Sequence[Line]) -> dict[str, Markup] | None:
    """A picture for a desk and one for a phone; pictures are ours and escaped where they are made."""
    if not lines:
        return None
    pair = {"wide": Markup(picture(lines, WIDE)), "narrow": Markup(picture(lines, NARROW))}
    return pair if pair["wide"] else None


def _method(line: Line, colour: str) -> dict[str, Any]:
    row: MethodSummary = summarise(line)
    return {
        "row": row,
        "colour": f"method-{METHODS.index(colour)}",
        "control": line.control,
        "force": words.in_force(line),
        # A budget stricter than one's own is a promise too, and methods that protect sums make no other.
        "promises": words.promises(line) if line.budgets in ("own", "minimum") else [],
        "control_promise": words.control_promise(line) if line.control else "",
        "departures": words.departures(line) if line.counted else "Not begun.",
        "anyone": bool(line.counted),
    }


def _promised(shown: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Methods together whose promises read the same, so that nobody has to read them twice."""
    together: dict[Any, list[dict[str, Any]]] = {}
    for method in shown:
        if method["anyone"]:
            alike = tuple(method["promises"]) or method["row"].label
            together.setdefault(alike, []).append(method)
    return list(together.values())


def _run(journal: Journal, name: str, lines: Sequence[Line]) -> dict[str, Any]:
    about = journal.about()
    return {
        "name": name,
        "opening": words.opening([line for line in lines if line.run == name]),
        "settings": list(flatten(about.get("experiment", {})).items()),
        "command": about.get("command", ""),
        "version": about.get("version", ""),
    }


def _alarms(lines: Sequence[Line]) -> dict[str, Any]:
    """Every client that spent more than it may, and those of finished jobs of whom nobody knows."""
    over = [
        f"{row.client} spent ε {numbers.short(row.spent, 4)} of {numbers.short(_limit(line, row), 4)} "
        f"({line.label}, seed {job.seed})"
        for line in lines
        for job in line.jobs
        for row in job.clients
        if row.exceeded
    ]
    unknown = sum(
        row.spent is None
        for line in lines
        for job in line.jobs
        for row in job.clients
        if job.status == "done" and (row.epsilon is not None or not (line.control or math.isinf(row.own_epsilon)))
    )
    return {"count": len(over), "first": over[:MOST_ALARMS], "unknown": unknown}


def _limit(line: Line, row: ClientSummary) -> float | None:
    return row.epsilon if line.control or row.epsilon is None else min(row.epsilon, row.own_epsilon)


def _waiting(lines: Sequence[Line]) -> str:
    jobs = [(line, job) for line in lines for job in line.jobs]
    open_ones = [(line, job) for line, job in jobs if job.status != "done"]
    if not open_ones:
        return ""
    running = [
        f"{line.label} with seed {job.seed} has done {len(job.rounds)} of {numbers.plural(job.planned, 'round')}"
        for line, job in open_ones
        if job.status == "running"
    ]
    now = f" {'; '.join(running[:5])}." if running else ""
    return f"{len(jobs) - len(open_ones)} of {numbers.plural(len(jobs), 'job')} finished.{now}"


def _tables(lines: Sequence[Line], shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per method its clients in the seed that came closest to a budget; only the closest ones when they are many."""
    begun = [(line, method) for line, method in zip(lines, shown, strict=True) if any(job.clients for job in line.jobs)]
    found = []
    for line, method in begun:
        job = max((job for job in line.jobs if job.clients), key=_closest)
        most = MOST_ROWS // len(begun)
        nearest = sorted(job.clients, key=lambda row: -(row.ratio or 0.0))[:most]
        rows = job.clients if len(job.clients) <= most else nearest
        found.append({"method": method, "seed": job.seed, "rows": rows, "all": len(job.clients)})
    return found


def _own(lines: Sequence[Line], shown: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What models do on clients' own records, over seeds; nothing where no client held some back."""
    names = sorted({name for line in lines for job in line.counted for name in job.own})
    rows = [
        (method, [_mean_of([job.own[name] for job in line.counted if name in job.own]) for name in names])
        for line, method in zip(lines, shown, strict=True)
    ]
    return {"names": names, "rows": rows} if names else None


def _mean_of(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _closest(job: Job) -> float:
    return max((row.ratio for row in job.clients if row.ratio is not None), default=-1.0)


def flatten(settings: Any, before: str = "") -> dict[str, str]:
    """Nested settings as one level of dotted names.

    >>> flatten({"name": "a", "training": {"clip": 1.0, "sizes": [1, 2]}})
    {'name': 'a', 'training.clip': '1.0', 'training.sizes': '1, 2'}
    """
    if isinstance(settings, Mapping):
        found: dict[str, str] = {}
        for key, value in settings.items():
            found |= flatten(value, f"{before}.{key}" if before else str(key))
        return found
    if isinstance(settings, list) and any(isinstance(part, Mapping | list) for part in settings):
        return flatten({str(number): part for number, part in enumerate(settings)}, before)
    if isinstance(settings, list):
        return {before: ", ".join(map(str, settings))}
    if settings is None or isinstance(settings, bool):
        return {before: {None: "–", True: "yes", False: "no"}[settings]}
    return {before: str(settings)}


def _mask() -> int:
    """The mask of new files, which a temporary file does not follow."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
