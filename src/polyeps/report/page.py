"""Writes one offline page about one or more runs from their journals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from polyeps.errors import InputError
from polyeps.experiment.journal import Journal
from polyeps.experiment.journal_entries import said_of
from polyeps.report import comparing, formatting, overview, sentences
from polyeps.report.client_plots import reliability_chart, spending
from polyeps.report.client_sections import client_tables, joining_sections, matrices
from polyeps.report.downloads import downloads
from polyeps.report.joining import best_table, joining_tables
from polyeps.report.method_tables import cost_table, method_table, pair_table
from polyeps.report.page_tables import client_table
from polyeps.report.plots import accuracy_chart, active_chart, looks, privacy_chart
from polyeps.report.tables import ClientSummary, MethodRuns, left_early, mean_of, read_methods, run_names, summarise
from polyeps.report.whole_pages import render, write_whole

MOST_ROWS = 6000  # clients on the page, over all methods: a page must open on a phone
MOST_ALARMS = 10
_JOURNALS = ("journal.db", "serving.db")  # of a simulation and of a run that is served


def journal_path(folder: Path) -> Path:
    """Return the journal of a run's folder, simulated or deployed."""
    return next((path for name in _JOURNALS if (path := folder / name).is_file()), folder / _JOURNALS[0])


def open_journals(folders: Sequence[Path], stack: ExitStack) -> list[Journal]:
    """Open the journals of run folders, each once; the stack closes them."""
    once = {folder.resolve(): folder for folder in folders}
    if not once:
        raise InputError("there is no run to report on; give the folder of a run")
    return [stack.enter_context(closing(Journal(journal_path(folder)))) for folder in once.values()]


def write_page(folders: Sequence[Path], output: Path) -> None:
    """Write the page about run folders atomically."""
    with ExitStack() as stack:
        text = make_page(open_journals(folders, stack))
    write_whole(text, output)


def make_page(journals: Sequence[Journal], *, live: str = "") -> str:
    """Return the page as HTML; with `live`, its version, as the live view serves it."""
    methods, runs = read_methods(journals), run_names(journals)
    shown = [_method(method, look) for method, look in zip(methods, looks(methods), strict=True)]
    settings = [_settings(journal, name, methods) for journal, name in zip(journals, runs, strict=True)]
    ranked = comparing.ranking(methods)
    departed = any(left_early(job) for method in methods for job in method.counted)
    values = {
        "title": " and ".join(runs) if len(runs) <= 3 else f"{len(runs)} runs",
        "runs": [
            _run(journal, name, methods, held) for journal, name, held in zip(journals, runs, settings, strict=True)
        ],
        "differing": overview.differences(dict(zip(runs, settings, strict=True))),
        "cards": overview.cards(methods, ranked, best_table(joining_tables(methods))),
        "weak": overview.weak_note(methods),
        "notes": [sentences.units(methods), sentences.anew(methods)],
        "alarms": _alarms(methods),
        "waiting": _waiting(methods),
        "methods": shown,
        "method_table": method_table(shown) if shown else None,
        "cost_table": cost_table(shown) if any(entry["row"].bytes_up for entry in shown) else None,
        "verdict": comparing.verdict(ranked),
        "pair_table": pair_table(ranked, methods[0].measure) if ranked and ranked.seeds else None,
        "several": any(len(method.jobs) > 1 for method in methods),
        "averaged": sentences.averaged_rounds(methods),
        "evaluated": sentences.evaluated_rounds(methods),
        "privacy": privacy_chart(methods),
        "accuracy": accuracy_chart(methods),
        "measure": methods[0].measure if methods else "accuracy",
        "active": active_chart(methods) if departed else None,
        "spent": [([shown[number] for number in alike], drawing) for alike, drawing in spending(methods)],
        "guaranteed": _guaranteed(shown),
        "departures": _departures(shown),
        "tables": _tables(methods, shown),
        "own": _own(methods, shown),
        "guessed": next((entry["row"].majority_accuracy for entry in shown if entry["row"].majority_accuracy), None),
        "undefined": sentences.undefined_metrics(methods),
        "each": client_tables(methods, shown),
        "joining": joining_sections(methods),
        "matrices": matrices(methods, shown),
        "reliability": [
            (entry, drawing)
            for method, entry in zip(methods, shown, strict=True)
            if (drawing := reliability_chart(method, entry["look"]))
        ],
        "many": max((len(job.clients) for method in methods for job in method.jobs), default=0) > 12,
        "deployed": any(method.deployed for method in methods),
        "ended": bool(methods) and all(job.status == "done" for method in methods for job in method.jobs),
        "files": downloads(methods),
    }
    return render("page.html.j2", live=live, kind="polyeps report", sections=_sections(values), **values)


def _sections(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the sections that the page has, for its navigation."""
    begun = bool(values["methods"])
    known = {
        ("overview", "Overview"): True,
        ("methods", "Methods"): begun,
        ("accuracy", "Accuracy over rounds"): values["accuracy"],
        ("joining", "Is joining worth it?"): values["joining"],
        ("guarantees", "Guarantees"): begun,
        ("tools", "Clients"): values["tables"],
        ("held", "On clients' own records"): values["own"],
        ("each", "Own test records"): values["each"],
        ("confusion", "Confusion"): values["matrices"],
        ("calibration", "Calibration"): values["reliability"],
        ("left", "Left early"): begun,
        ("cost", "Traffic and time"): values["cost_table"],
        ("settings-1", "Settings"): values["runs"],
        ("data", "Data"): values["files"],
    }
    return [section for section, there in known.items() if there]


def _method(method: MethodRuns, look: str) -> dict[str, Any]:
    return {
        "row": summarise(method),
        "look": look,
        "control": method.control,
        "budgets": sentences.describe_budgets(method),
        # A budget smaller than a client's own is a guarantee too, and methods that protect sums give no other.
        "guarantees": sentences.guarantees(method) if method.budgets in ("own", "minimum") else [],
        "note": sentences.control_note(method) if method.control else "",
        "departures": sentences.departures(method) if method.counted else "Not begun.",
        "begun": bool(method.counted),
    }


def _guaranteed(shown: Sequence[dict[str, Any]]) -> list[tuple[list[dict[str, Any]], str]]:
    """Group the methods whose guarantees read the same, each with the first method whose terms it shares."""
    together: dict[Any, list[dict[str, Any]]] = {}
    for entry in shown:
        if entry["begun"]:
            together.setdefault(tuple(entry["guarantees"]) or entry["row"].label, []).append(entry)
    first: dict[tuple[str, ...], str] = {}
    found = []
    for alike in together.values():
        label, terms = alike[0]["row"].label, tuple(one.terms for one in alike[0]["guarantees"])
        like = first.setdefault(terms, label) if terms else label
        found.append((alike, "" if like == label else like))
    return found


def _departures(shown: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Group the methods that lost as many clients at the same time."""
    together: dict[str, list[dict[str, Any]]] = {}
    for entry in shown:
        together.setdefault(entry["departures"], []).append(entry)
    return list(together.items())


def _settings(journal: Journal, name: str, methods: Sequence[MethodRuns]) -> dict[str, str]:
    settings = flatten(journal.about().get("experiment", {}))
    if any(str(method.facts.get("data")).startswith("own:") for method in methods if method.run == name):
        settings.pop("data.name", None)  # of public data sets; the table has taken its place
    return settings


def _run(journal: Journal, name: str, methods: Sequence[MethodRuns], settings: Mapping[str, str]) -> dict[str, Any]:
    about = journal.about()
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
    rows = [(method, job, row) for method in methods for job in method.jobs for row in job.clients]
    over = [
        f"{row.client} spent ε {formatting.short(row.spent, 4)} of {formatting.short(_limit(method, row), 4)} "
        f"({method.label}, seed {job.seed})"
        for method, job, row in rows
        if row.exceeded
    ]
    unknown = sum(
        row.spent is None
        for method, job, row in rows
        if job.status == "done"
        and not job.deployed  # a silo's own ledger knows
        and (row.epsilon is not None or not (method.control or math.isinf(row.own_epsilon)))
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
        table = client_table(rows, job)
        found.append({"method": entry, "seed": job.seed, "table": table, "shown": len(rows), "all": len(job.clients)})
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
        return {before: ", ".join(map(str, settings)) or "–"}
    if settings is None or isinstance(settings, bool):
        return {before: {None: "–", True: "yes", False: "no"}[settings]}
    return {before: str(settings)}
