"""Writes one offline page about one or more runs from their journals."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from polyeps.errors import InputError
from polyeps.experiment.journal import Journal
from polyeps.experiment.journal_entries import said_of
from polyeps.report import formatting, sentences
from polyeps.report.client_sections import client_tables, joining_sections, matrices, reliability_picture
from polyeps.report.plots import accuracy_picture, active_picture, bytes_picture, spent_picture
from polyeps.report.svg import METHODS, NARROW, WIDE, coloured
from polyeps.report.tables import ClientSummary, MethodRuns, left_early, mean_of, read_methods, run_names, summarise

MOST_ROWS = 6000  # clients on the page, over all methods: a page must open on a phone
MOST_ALARMS = 10


def open_journals(folders: Sequence[Path], stack: ExitStack) -> list[Journal]:
    """Open the journals of run folders, each once; the stack closes them."""
    once = {folder.resolve(): folder for folder in folders}
    if not once:
        raise InputError("there is no run to report on; give the folder of a run")
    return [stack.enter_context(closing(Journal(folder / "journal.db"))) for folder in once.values()]


def write_page(folders: Sequence[Path], output: Path) -> None:
    """Write the page about run folders atomically."""
    with ExitStack() as stack:
        text = make_page(open_journals(folders, stack))
    write_whole(text, output)


def write_whole(text: str, output: Path) -> None:
    """Write a page as a whole or not at all."""
    if output.is_dir() or not output.parent.is_dir():
        problem = "is a folder" if output.is_dir() else "lies in a folder that does not exist"
        raise InputError(f"the page cannot be written: {output} {problem}; give the name of a file (report.html)")
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.new")
    try:
        with unfinished.open("x", encoding="utf-8") as file:  # a new file: follows no link
            file.write(text)
        unfinished.replace(output)
    except OSError as problem:
        unfinished.unlink(missing_ok=True)
        raise InputError(f"{output} cannot be written ({problem}); choose another place") from problem


def template(name: str) -> Template:
    """Return a template of this folder; everything put into it is escaped."""
    environment = Environment(
        loader=PackageLoader("polyeps.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"formatting": formatting}
    return environment.get_template(name)


def make_page(journals: Sequence[Journal]) -> str:
    """Return the page as HTML."""
    methods = read_methods(journals)
    runs = run_names(journals)
    shown = [_method(method, colour) for method, colour in coloured(methods)]
    departed = any(left_early(job) for method in methods for job in method.counted)
    return template("page.html.j2").render(
        title=" and ".join(runs),
        runs=[_run(journal, name, methods) for journal, name in zip(journals, runs, strict=True)],
        alarms=_alarms(methods),
        waiting=_waiting(methods),
        methods=shown,
        metrics=list(dict.fromkeys(name for entry in shown for name in entry["row"].metrics)),
        several=any(len(method.jobs) > 1 for method in methods),
        averaged=sentences.averaged_rounds(methods),
        evaluated=sentences.evaluated_rounds(methods),
        accuracy=_pair(accuracy_picture, methods),
        measure=methods[0].measure if methods else "accuracy",
        active=_pair(active_picture, methods) if departed else None,
        traffic=_pair(bytes_picture, methods),
        spent=[
            (entry, Markup(picture))
            for (method, colour), entry in zip(coloured(methods), shown, strict=True)
            if (picture := spent_picture(method, colour))
        ],
        guaranteed=_guaranteed(shown),
        tables=_tables(methods, shown),
        own=_own(methods, shown),
        guessed=next((entry["row"].majority_accuracy for entry in shown if entry["row"].majority_accuracy), None),
        undefined=sentences.undefined_metrics(methods),
        each=client_tables(methods, shown),
        joining=joining_sections(methods),
        matrices=matrices(methods, shown),
        reliability=[
            (entry, Markup(picture))
            for (method, colour), entry in zip(coloured(methods), shown, strict=True)
            if (picture := reliability_picture(method, colour))
        ],
    )


def _pair(picture: Any, methods: Sequence[MethodRuns]) -> dict[str, Markup] | None:
    """Draw a picture for a desk and one for a phone; their text is escaped where they are drawn."""
    if not methods:
        return None
    pair = {"wide": Markup(picture(methods, WIDE)), "narrow": Markup(picture(methods, NARROW))}
    return pair if pair["wide"] else None


def _method(method: MethodRuns, colour: str) -> dict[str, Any]:
    return {
        "row": summarise(method),
        "colour": f"method-{METHODS.index(colour)}",
        "control": method.control,
        "budgets": sentences.describe_budgets(method),
        # A budget smaller than a client's own is a guarantee too, and methods that protect sums give no other.
        "guarantees": sentences.guarantees(method) if method.budgets in ("own", "minimum") else [],
        "note": sentences.control_note(method) if method.control else "",
        "departures": sentences.departures(method) if method.counted else "Not begun.",
        "begun": bool(method.counted),
    }


def _guaranteed(shown: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group the methods whose guarantees read the same."""
    together: dict[Any, list[dict[str, Any]]] = {}
    for entry in shown:
        if entry["begun"]:
            together.setdefault(tuple(entry["guarantees"]) or entry["row"].label, []).append(entry)
    return list(together.values())


def _run(journal: Journal, name: str, methods: Sequence[MethodRuns]) -> dict[str, Any]:
    about = journal.about()
    settings = flatten(about.get("experiment", {}))
    if any(str(method.facts.get("data")).startswith("own:") for method in methods if method.run == name):
        settings.pop("data.name", None)  # of public data sets; the table has taken its place
    return {
        "name": name,
        "opening": sentences.opening([method for method in methods if method.run == name]),
        "settings": list(settings.items()),
        "remarks": said_of(journal),
        "command": about.get("command", ""),
        "version": about.get("version", ""),
    }


def _alarms(methods: Sequence[MethodRuns]) -> dict[str, Any]:
    """Return the clients that exceeded their budgets, and how many of finished jobs lack a figure."""
    over = [
        f"{row.client} spent ε {formatting.short(row.spent, 4)} of {formatting.short(_limit(method, row), 4)} "
        f"({method.label}, seed {job.seed})"
        for method in methods
        for job in method.jobs
        for row in job.clients
        if row.exceeded
    ]
    unknown = sum(
        row.spent is None
        for method in methods
        for job in method.jobs
        for row in job.clients
        if job.status == "done" and (row.epsilon is not None or not (method.control or math.isinf(row.own_epsilon)))
    )
    return {"count": len(over), "first": over[:MOST_ALARMS], "unknown": unknown}


def _limit(method: MethodRuns, row: ClientSummary) -> float | None:
    return row.epsilon if method.control or row.epsilon is None else min(row.epsilon, row.own_epsilon)


def _waiting(methods: Sequence[MethodRuns]) -> str:
    jobs = [(method, job) for method in methods for job in method.jobs]
    unfinished = [(method, job) for method, job in jobs if job.status != "done"]
    if not unfinished:
        return ""
    running = [
        f"{method.label} with seed {job.seed} has done {len(job.rounds)} of {formatting.plural(job.planned, 'round')}"
        for method, job in unfinished
        if job.status == "running"
    ]
    now = f" {'; '.join(running[:5])}." if running else ""
    return f"{len(jobs) - len(unfinished)} of {formatting.plural(len(jobs), 'job')} finished.{now}"


def _tables(methods: Sequence[MethodRuns], shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each method's clients under the seed that came closest to a budget; of many, only the closest clients."""
    begun = [pair for pair in zip(methods, shown, strict=True) if any(job.clients for job in pair[0].jobs)]
    found = []
    for method, entry in begun:
        jobs = [job for job in method.jobs if job.clients]
        job = max(jobs, key=lambda job: max(-1.0 if row.ratio is None else row.ratio for row in job.clients))
        most = MOST_ROWS // len(begun)
        nearest = sorted(job.clients, key=lambda row: -(row.ratio or 0.0))[:most]
        rows = job.clients if len(job.clients) <= most else nearest
        units = f"{job.facts.get('person') or 'record'}s"
        found.append({"method": entry, "seed": job.seed, "rows": rows, "all": len(job.clients), "units": units})
    return found


def _own(methods: Sequence[MethodRuns], shown: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the accuracy on clients' own records, over seeds; None where no client held some back."""
    names = sorted({name for method in methods for job in method.counted for name in job.own})
    rows = [
        (entry, [mean_of([job.own[name] for job in method.counted if name in job.own]) for name in names])
        for method, entry in zip(methods, shown, strict=True)
    ]
    return {"names": names, "rows": rows} if names else None


def flatten(settings: Any, before: str = "") -> dict[str, str]:
    """Flatten nested settings to dotted names.

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
