"""Figures and findings as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from polyeps.certificate import Certificate
from polyeps.report.tables import ClientSummary, Job, Line, summarise

IN_FORCE = {
    "own": "each client's own budget",
    "strictest": "control: the strictest budget, for everybody",
    "most-liberal": "control: the most liberal budget, for everybody",
    "exceeded": "control: more than each client's own budget",
    "none": "control: no privacy",
    "published": "as published: what its noise really costs",
}


def short(value: float | None, digits: int = 3) -> str:
    """A number in a few digits.

    >>> short(0.0912345), short(1e-5), short(None), short(26010.0, 5), short(float("inf"))
    ('0.0912', '1e-5', '–', '26010', '∞')
    """
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞"
    return re.sub(r"e([+-])0*", lambda power: "e-" if power[1] == "-" else "e", f"{value:.{digits}g}")


def aligned(value: float | None) -> str:
    """A number for a column: always three digits, so that its neighbours line up.

    >>> aligned(24.0), aligned(0.04), aligned(1200.0), aligned(1e-5), aligned(None)
    ('24.0', '0.0400', '1.2e3', '1e-5', '–')
    """
    text = short(value)
    return text if value is None or "e" in text or not math.isfinite(value) else f"{value:#.3g}".rstrip(".")


def share(ratio: float | None) -> str:
    r"""A part of a budget, rounded so that neither side of the limit can be taken for the other.

    >>> share(0.99996), share(1.00001), share(1.0), share(0.5)
    ('99.9\xa0%', '100.1\xa0%', '100.0\xa0%', '50.0\xa0%')
    """
    if ratio is None:
        return "–"
    if math.isinf(ratio):
        return "∞"
    scaled = round(ratio * 1000, 9)  # 0.29 * 1000 is a hair below 290
    return f"{(math.ceil(scaled) if ratio > 1 else math.floor(scaled)) / 10:.1f}\u00a0%"


def percent(accuracy: float | None, deviation: float | None = None) -> str:
    r"""An accuracy.

    >>> percent(0.9123, 0.0031), percent(0.9123), percent(float("nan")), percent(None)
    ('91.2 ± 0.3\xa0%', '91.2\xa0%', 'not a number', '–')
    """
    if accuracy is None:
        return "–"
    if not math.isfinite(accuracy):
        return "not a number"
    spread = "" if deviation is None else f" ± {100 * deviation:.1f}"
    return f"{100 * accuracy:.1f}{spread}\u00a0%"


def size(count: float | None) -> str:
    """Bytes.

    >>> size(532), size(1_040_000), size(76e6), size(None)
    ('532 B', '1.04 MB', '76.0 MB', '–')
    """
    if count is None:
        return "–"
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{aligned(count)} {unit}"
    return f"{aligned(count / 1000)} TB"


def whole(count: float) -> str:
    """A count, with a decimal only where an average needs one.

    >>> whole(26010), whole(2.3333), whole(24.0)
    ('26,010', '2.3', '24')
    """
    return f"{count:,.0f}" if float(count).is_integer() else f"{count:,.1f}"


def plural(count: float, noun: str) -> str:
    """A count and what is counted.

    >>> plural(1, "round"), plural(40, "round")
    ('1 round', '40 rounds')
    """
    return f"{whole(count)} {noun}" + ("" if count == 1 else "s")


def opening(lines: Sequence[Line]) -> str:
    """A run in one plain paragraph."""
    jobs = [job for line in lines for job in line.jobs if job.clients]
    if not jobs:
        return "No job of this run has begun."
    own = [client.own_epsilon for job in jobs for client in job.clients if math.isfinite(client.own_epsilon)]
    budgets = (
        f"from ε\u00a0{short(min(own))} to {short(max(own))}" if min(own) < max(own) else f"of ε\u00a0{short(own[0])}"
    )
    unpromised = sum(math.isinf(client.own_epsilon) for client in jobs[0].clients)
    if unpromised:
        budgets += f", {whole(unpromised)} of them promised nothing by their own choice,"
    facts = next((line.facts for line in lines if line.facts), {})
    many = max(len(job.clients) for job in jobs)
    model = f"a model of {plural(facts['parameters'], 'parameter')}" if "parameters" in facts else "a model"
    data = f" on {facts['data']}" if "data" in facts else ""
    seeds = max(len(line.jobs) for line in lines)
    ways = f", with {plural(len(lines), 'method')} and {plural(seeds, 'seed')}" + (" each" if len(lines) > 1 else "")
    return (
        f"{plural(many, 'client')} with {'a budget' if many == 1 else 'budgets'} {budgets} trained {model}{data} in "
        f"{plural(max(job.planned for job in jobs), 'round')}{ways}. {_kept(lines)}{_best(lines)}"
    )


def _kept(lines: Sequence[Line]) -> str:
    own = [line for line in lines if not line.control]
    rows = [row for line in own for job in line.jobs for row in job.clients if row.epsilon is not None]
    if not rows:
        return "No method in this run promised every client its own budget."
    if any(row.exceeded for row in rows):
        return f"Not every client stayed within its own budget: {sum(row.exceeded for row in rows)} did not."
    known = [row.ratio for row in rows if row.ratio is not None]
    if not known:
        return "What the clients spent is not known yet."
    if len(known) < len(rows):
        return (
            f"Where it is known, clients stayed within their own budgets, the closest at {share(max(known))} of it; "
            f"for {len(rows) - len(known)} of {len(rows)} it is not known yet."
        )
    where = " (the controls below put other budgets in force)" if len(own) < len(lines) else ""
    open_ones = any(row.epsilon is None for line in own for job in line.jobs for row in job.clients)
    every = "Every client that is promised something" if open_ones else "Every client"
    if len(rows) == 1:
        return f"The client stayed within its own budget and used {share(known[0])} of it{where}."
    return f"{every} stayed within its own budget: the closest came to {share(max(known))} of it{where}."


def _best(lines: Sequence[Line]) -> str:
    rows = [summarise(line) for line in lines if not line.control]
    finals = [(row.final_accuracy, row) for row in rows if row.final_accuracy is not None]
    finals = [(accuracy, row) for accuracy, row in finals if math.isfinite(accuracy)]
    if not finals:
        return ""
    accuracy, row = max(finals, key=lambda pair: pair[0])
    reached = percent(accuracy, row.final_accuracy_deviation)
    if len(rows) == 1:
        return f" {row.label} reached a test accuracy of {reached}."
    return f" Of the methods under own budgets, {row.label} reached the highest test accuracy, {reached}."


def departures(line: Line) -> str:
    """Who of a method's clients left, and when."""
    jobs = line.counted
    left = [row.left_after for job in jobs for row in job.clients if row.left_after and row.left_after < job.planned]
    count, idle = len(left) / len(jobs), sum(_never(job) for job in jobs) / len(jobs)
    average = f" on average over {len(jobs)} seeds" if len(jobs) > 1 else ""
    unable = f" {plural(idle, 'client')} could not afford a single round{average}." if idle else ""
    if not left:
        return f"Nobody left before the end.{unable}"
    when = f"after round {left[0]}" if len(set(left)) == 1 else f"between rounds {min(left)} and {max(left)}"
    clients = plural(max(len(job.clients) for job in jobs), "client")
    return f"{whole(count)} of {clients} left early{average}, {when}.{unable}"


def _never(job: Job) -> int:
    """How many clients were not active when the first round began."""
    if not job.rounds:
        return 0
    return len(job.clients) - job.rounds[0][1] - sum(row.left_after == 1 for row in job.clients)


def promises(line: Line) -> list[tuple[str, str]]:
    """What was promised to the strictest, the median and the most liberal client of a method, in words."""
    job = next(iter(line.counted), None)
    if job is None or not job.clients:
        return []
    rows = job.clients
    chosen = {"strictest client": rows[0], "median client": rows[(len(rows) - 1) // 2], "most liberal client": rows[-1]}
    if len(rows) == 1:
        chosen = {"client": rows[0]}
    return [(f"The {who}, {row.client}, {_chosen(row)}", _promise(line, job, row)) for who, row in chosen.items()]


def _chosen(row: ClientSummary) -> str:
    if math.isinf(row.own_epsilon):
        return "which chose no protection"
    return f"own budget ε\u00a0{short(row.own_epsilon)}"


def _promise(line: Line, job: Job, row: ClientSummary) -> str:
    if row.epsilon is None:
        return UNPROMISED
    if row.spent is None:
        return "What it has spent is not known before the job is finished."
    facts = job.facts
    try:
        sentence = Certificate(
            method=line.method,
            form=facts.get("form", "sound"),
            claimed=row.own_epsilon,
            certified=row.spent,
            delta=row.delta or 0.0,
            adjacency=facts["adjacency"],
            unit=facts["unit"],
            sampler=facts.get("sampler", "none"),
            trust=facts["trust"],
            accountant="pld",
            details={},
            conditions=tuple(facts.get("conditions", ())),
        ).sentence
        return re.sub(
            r"(?<=\d) (?=\d)|(?<=ε) (?==)|(?<==) |(?<=in) (?=1)", "\u00a0", sentence
        )  # numbers stay on a line
    except KeyError as missing:
        return f"The journal does not say under which terms it was protected ({missing.args[0]} is missing)."


# What a client must know that chose no protection where others are protected.
UNPROMISED = (
    "Nothing is promised to this client: it chose the level without protection. What is released may show that it took "
    "part and what its records are like, and the noise that protects others does not protect it."
)


def control_promise(line: Line) -> str:
    """What a control does not promise."""
    if line.budgets == "none":
        return "A control without any privacy: nothing is promised to any client, whatever budget it set."
    if line.budgets == "published":
        return (
            "A paper's form as published: its noise and batches are not those of the budgets the clients set. "
            f"The budget in force is what they really cost.{_overspent(line)}"
        )
    if line.budgets == "exceeded":
        return f"A control that takes more than the budgets the clients set, and charges it.{_overspent(line)}"
    force = sorted({row.epsilon for job in line.jobs for row in job.clients if row.epsilon is not None})
    which = f"ε\u00a0{short(force[0])}" if len(force) == 1 else "another one"
    kind = {"strictest": "the strictest of all, ", "most-liberal": "the most liberal of all, "}.get(line.budgets, "")
    return f"A control: the budget in force is not the client's own but {kind}{which} for everybody.{_overspent(line)}"


def _overspent(line: Line) -> str:
    broken = sum(
        row.spent is not None and row.spent > row.own_epsilon for job in line.counted[:1] for row in job.clients
    )
    return f" {broken} of {len(line.counted[0].clients)} clients spent more than their own budgets." if broken else ""
