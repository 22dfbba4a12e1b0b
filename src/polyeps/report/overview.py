"""The first screen: the accuracy that matters, whether budgets were kept, and what differs between runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyeps.report.comparing import Ranking
from polyeps.report.formatting import plural, reached, share, short
from polyeps.report.joining import JoiningTable
from polyeps.report.page_tables import PageRow, PageTable
from polyeps.report.strength import MODERATE, raised, strength
from polyeps.report.tables import MethodRuns, summarise

_NOT_COMPARED = ("name",)  # settings that only name a run
_SIDE_BY_SIDE = 4  # runs, beyond which each has a row of its own
_LONGEST = 120  # letters of a setting


@dataclass(frozen=True)
class Card:
    """One fact of the first screen."""

    title: str
    value: str
    note: str
    look: str = ""  # good, alarm, wait


def cards(methods: Sequence[MethodRuns], found: Ranking | None, joining: JoiningTable | None) -> list[Card]:
    """Return the facts of the first screen; nothing before a job has begun."""
    if not any(job.clients for method in methods for job in method.jobs):
        return []
    made = [_accuracy(methods, found), _budgets(methods), _guarantees(methods), _joining(joining)]
    return [card for card in made if card]


def _accuracy(methods: Sequence[MethodRuns], found: Ranking | None) -> Card | None:
    own = [method for method in methods if not method.control] or list(methods)
    rows = {row.label: row for row in map(summarise, own)}
    known = {label: row for label, row in rows.items() if row.final_accuracy is not None}
    if not known:
        return None
    measure = next(iter(known.values())).measure
    leading = [known[label] for label in found.leading if label in known] if found else list(known.values())
    figures = [row.final_accuracy for row in leading if row.final_accuracy is not None]
    low, high = reached(measure, min(figures)), reached(measure, max(figures))
    kind = "" if own[0].control is False else ", a control"
    if len(leading) == 1:
        return Card(
            f"Test {measure}",
            reached(measure, figures[0], leading[0].final_accuracy_deviation),
            leading[0].label + kind,
        )
    bare = low.removesuffix("\u00a0%")
    value = low if low == high else f"{bare} to {high}"
    names = ", ".join(row.label for row in leading[:3]) + (f" and {len(leading) - 3} more" if len(leading) > 3 else "")
    return Card(f"Test {measure}", value, f"{names}, not told apart")


def _budgets(methods: Sequence[MethodRuns]) -> Card:
    if any(method.deployed for method in methods):
        return Card("Budgets", "with the silos", "each silo's own ledger refuses what exceeds its budget")
    jobs = [job for method in methods if not method.control for job in method.jobs]
    rows = [row for job in jobs for row in job.clients if row.epsilon is not None]
    known = [row.ratio for row in rows if row.ratio is not None]
    if not rows:
        return Card("Budgets", "none", "no method keeps to clients' own budgets", "wait")
    if over := sum(row.exceeded for row in rows):
        return Card("Budgets", "exceeded", f"{plural(over, 'time')}; see above", "alarm")
    if len(known) < len(rows):
        return Card("Budgets", "not known yet", "spending is read when a job is done", "wait")
    return Card("Budgets", "kept by all", f"the closest client used {share(max(known))}", "good")


def _strengths(methods: Sequence[MethodRuns]) -> dict[str, tuple[str, float | None]]:
    """Return the weakest guarantee of each client under methods that keep to its budget: its word and its ε."""
    worst: dict[str, float] = {}
    for row in (row for one in methods if not one.control for job in one.counted for row in job.clients):
        epsilon = row.epsilon if row.spent is None else row.spent
        worst[row.client] = max(worst.get(row.client, 0.0), math.inf if epsilon is None else epsilon)
    return {client: (strength(None if math.isinf(epsilon) else epsilon), epsilon) for client, epsilon in worst.items()}


def _guarantees(methods: Sequence[MethodRuns]) -> Card | None:
    if any(method.deployed for method in methods):
        return None
    times = Counter(word for word, _ in _strengths(methods).values())
    if not times:
        return None
    words = {"strong": "strong", "moderate": "moderate", "weak": "weak", "none": "without"}
    parts = [f"{times[word]} {said}" for word, said in words.items() if times[word]]
    return Card(
        "Clients by guarantee", ", ".join(parts), "strong: ε up to 1; weak: above 5", "wait" if times["weak"] else ""
    )


def _joining(table: JoiningTable | None) -> Card | None:
    if table is None:
        return None
    verdicts = [one for row in table.rows if (one := row.against_alone or row.against_home)]
    gain = sum(one.outcome == "gains" for one in verdicts)
    alone = "training alone with its budget" if any(row.against_alone for row in table.rows) else "a model at home"
    return Card("Joining is worth it", f"for {gain} of {len(verdicts)}", f"clients, against {alone} ({table.label})")


def weak_note(methods: Sequence[MethodRuns]) -> str:
    """Say which guarantees are weak and what that means; "" where none is."""
    if any(method.deployed for method in methods):
        return ""
    found = {client: epsilon for client, (word, epsilon) in _strengths(methods).items() if word == "weak" and epsilon}
    if not found:
        return ""
    worst = max(found, key=lambda client: found[client] or 0.0)
    epsilon = found[worst] or 0.0
    units = {method.facts.get("unit") for method in methods if not method.control}
    person = next((method.facts["person"] for method in methods if method.facts.get("person")), "person")
    what = {"client": "about all its data", "person": f"about the records of one {person}"}
    about = what.get(str(units.pop()), "about one record") if len(units) == 1 else "about what it protects"
    who = f"Client {worst} has" if len(found) == 1 else f"{plural(len(found), 'client')} have"
    weakest = "" if len(found) == 1 else f" The weakest is client {worst}."
    return (
        f"{who} a weak guarantee (ε above {MODERATE:g}).{weakest} At ε\u00a0=\u00a0{short(epsilon)}, what is released "
        f"{raised(epsilon)} {about}."
    )


def differences(runs: Mapping[str, Mapping[str, str]]) -> PageTable | None:
    """Return what differs between the settings of compared runs; None for one run."""
    if len(runs) < 2:
        return None
    runs = {run: _algorithms_in_a_row(settings, runs.values()) for run, settings in runs.items()}
    keys = [key for key in dict.fromkeys(k for settings in runs.values() for k in settings) if key not in _NOT_COMPARED]
    other = [key for key in keys if len({settings.get(key) for settings in runs.values()}) > 1]
    same = len(keys) - len(other)
    said = f"{plural(same, 'other setting')} {'is' if same == 1 else 'are'} the same." if same else ""
    said = said if other else "All settings are the same."
    cells = {(key, run): _cell(settings.get(key)) for key in other for run, settings in runs.items()}
    if len(runs) <= _SIDE_BY_SIDE:
        rows = tuple(PageRow((key, *(cells[key, run] for run in runs))) for key in other)
        return PageTable(("setting", *runs), rows, said)
    return PageTable(("run", *other), tuple(PageRow((run, *(cells[key, run] for key in other))) for run in runs), said)


def _algorithms_in_a_row(settings: Mapping[str, str], all_runs: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join the settings of each algorithm that some run lacks: they differ as a whole."""
    everywhere = [{_algorithm(key) for key in one} for one in all_runs]
    found: dict[str, str] = {}
    for key, value in settings.items():
        whole = _algorithm(key)
        if not whole or all(whole in keys for keys in everywhere):
            found[key] = value
        elif key.endswith(".name"):
            found[whole] = value + found.get(whole, "")
        elif not key.endswith(".form") or value != "sound":
            found[whole] = f"{found.get(whole, '')}, {key.removeprefix(whole + '.')} {value}"
    return found


def _algorithm(key: str) -> str:
    """Return the algorithm that a setting is about, such as algorithm.1; "" of other settings."""
    words = key.split(".")
    return ".".join(words[:2]) if words[0] == "algorithm" and len(words) > 2 else ""


def _cell(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
