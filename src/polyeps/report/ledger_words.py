"""What the rows of a ledger say, in words: for `polyeps ledger history` and the ledger's page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from polyeps.report.formatting import short

if TYPE_CHECKING:
    from polyeps.ledger.hash_chain import LedgerRow

_FEW = 3  # clients that are named
_DIGEST = re.compile(r"/[0-9a-f]{32}$")  # of the task, at the end of a purpose


def _figure(value: float) -> str:
    return short(value, 5)


def rows_in_words(rows: Iterable[LedgerRow]) -> list[list[str]]:
    """Return for each row its number, its time, whom it concerns and what happened."""
    groups: dict[int, list[str]] = {}
    told = []
    for row in rows:
        content = row.content
        if row.kind == "cohort":
            groups[row.seq] = content["clients"]
        concerned = content.get("clients", content.get("client", ""))
        clients = groups.get(concerned, []) if isinstance(concerned, int) else concerned
        told.append([str(row.seq), row.time[:19].replace("T", " "), _names(clients), _happened(row.kind, content)])
    return told


def _names(clients: str | list[str]) -> str:
    if isinstance(clients, str):
        return clients
    return ", ".join(clients) if len(clients) <= _FEW else f"{len(clients)} clients"


def _happened(kind: str, content: Mapping[str, Any]) -> str:
    match kind:
        case "opened":
            return f"ledger {content['ledger'][:8]}… opened"
        case "budget":
            protects = content.get("person") or content["unit"]
            return f"budget ε = {_figure(content['epsilon'])}, δ = {_figure(content['delta'])} per {protects}"
        case "budgets":
            protects = content.get("person") or content["unit"]
            least, most = (_figure(one(content["epsilons"])) for one in (min, max))
            return f"budgets ε = {least} to {most}, δ = {_figure(content['delta'])} per {protects}"
        case "budget-changed":
            why = f": {content['reason']}" if content.get("reason") else ""
            return f"budget changed to ε = {_figure(content['epsilon'])}, δ = {_figure(content['delta'])}{why}"
        case "cohort":
            return "named together in later rows"
        case "charge" | "reserve":
            verb = "charged" if kind == "charge" else "reserved"
            about = [_DIGEST.sub("", content[key]) for key in ("run", "purpose") if content.get(key)]
            uses = f"{content['uses']} × " if content["uses"] != 1 else ""
            return f"{verb} {uses}{describe_event(content['event'])}" + (f" ({', '.join(about)})" if about else "")
        case "again":
            why = f" ({_DIGEST.sub('', content['purpose'])})" if content.get("purpose") else ""
            return f"charged again as in the rows {content['first']} to {content['last']}{why}"
        case "release":
            return f"run {content['run']} ended; what it did not use is free again"
    return kind


def describe_event(event: Mapping[str, Any]) -> str:
    """Return an event in a few words.

    >>> step = {"kind": "poisson", "sampling_probability": 0.1, "event": {"kind": "gaussian", "noise_multiplier": 2.0}}
    >>> describe_event(step)
    'Gaussian noise 2 on a sample of 10 %'
    """
    kind = event["kind"]
    if kind == "gaussian":
        return f"Gaussian noise {_figure(event['noise_multiplier'])}"
    if kind == "poisson":
        return f"{describe_event(event['event'])} on a sample of {100 * event['sampling_probability']:.3g} %"
    if kind == "self-composed":
        return f"{event['count']} × {describe_event(event['event'])}"
    if kind == "composed":
        return " and ".join(describe_event(one) for one in event["events"])
    numbers = [f"{name} {_figure(value)}" for name, value in event.items() if isinstance(value, int | float)]
    inner = [describe_event(value) for value in event.values() if isinstance(value, Mapping)]
    return f"{kind} ({', '.join([*numbers, *inner])})" if numbers or inner else str(kind)
