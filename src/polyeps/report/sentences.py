"""What was found, in sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from polyeps.accounting.certificate import Certificate
from polyeps.experiment.journal import spent_key
from polyeps.report.curves import accuracy_curve
from polyeps.report.numbers import percent, plural, share, short, whole
from polyeps.report.tables import LAST_ROUNDS, NOT_BEGUN, ClientSummary, Job, Line, final_rounds, summarise

_IN_FORCE = {
    "own": "each client's own budget",
    "minimum": "control: the strictest budget, for everybody",
    "maximum": "control: the most liberal budget, for everybody",
    "exceeded": "control: more than each client's own budget",
    "none": "control: no privacy",
    "published": "as published: what its noise really costs",
    NOT_BEGUN: "not begun yet",
}


def in_force(line: Line) -> str:
    """Whose budgets a method spends."""
    if line.budgets == "own" and line.alike:
        return "everybody's own budget, the same for all"
    return _IN_FORCE.get(line.budgets, f"control: {line.budgets}")


def judged(lines: Sequence[Line]) -> str:
    """Over which rounds a final accuracy is the mean."""
    jobs = [job for line in lines for job in line.counted if job.accuracy]
    counts = sorted({len(final_rounds(job)) for job in jobs})
    if all(len(final_rounds(job)) == min(LAST_ROUNDS, max(job.accuracy)) for job in jobs):
        return "the last round" if counts == [1] else f"the last {counts[-1] if counts else LAST_ROUNDS} rounds"
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f"the evaluated ones of the last {LAST_ROUNDS} rounds ({many} of them)"


def evaluated(lines: Sequence[Line]) -> str:
    """After which rounds models were tested: after the last one in any case."""
    tested = [(0, *accuracy_curve(line).rounds) for line in lines]
    steps = {after - before for rounds in tested for before, after in pairwise(rounds[:-1])}
    if len(steps) > 1:
        return "the rounds in which it was tested"
    step = steps.pop() if steps else 0
    also = ", and the last" if step and any(rounds[-1] % step for rounds in tested) else ""
    return {0: "the last round", 1: "each round"}.get(step, f"every {step} rounds{also}")


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
        f"{plural(max(job.planned for job in jobs), 'round')}{ways}. {_kept(lines)}{_best(lines)}{_apart(lines)}"
    )


def _apart(lines: Sequence[Line]) -> str:
    """A word of warning where promises are not about the same."""
    units = {line.facts.get("unit") for line in lines if not line.control and line.facts}
    if len(units) < 2:
        return ""
    return " Some methods protect whole clients and others single records: the same ε is a stronger promise there."


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
            "of some methods it is not known yet."
        )
    where = " (the controls below put other budgets in force, or none)" if len(own) < len(lines) else ""
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
    """What was promised to the strictest, the median and the most liberal client of a method, in words.

    Where all set the same budget, there is one promise; clients may still differ in what they spent of it.
    """
    job = next(iter(line.counted), None)
    if job is None or not job.clients:
        return []
    rows, middle = job.clients, (len(job.clients) - 1) // 2
    if not line.alike:
        chosen = {"strictest": rows[0], "median": rows[middle], "most liberal": rows[-1]}
        titles = {f"The {who} client, {row.client}": row for who, row in chosen.items()}
    elif len({(row.epsilon, row.spent) for row in rows}) > 1:
        typical = sorted(rows, key=lambda row: row.spent or 0.0)[middle]
        titles = {f"A typical client, {typical.client}": typical}
    else:
        titles = {f"The client, {rows[0].client}" if len(rows) == 1 else f"Each of {len(rows)} clients": rows[0]}
    return [(f"{title}, {_chosen(row)}", _promise(line, job, row)) for title, row in titles.items()]


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
            arithmetic=facts.get("arithmetic", "ideal"),
            certified_if_draws_known=_if_draws_known(facts, row),
        ).sentence
        return re.sub(
            r"(?<=\d) (?=\d)|(?<=ε) (?==)|(?<==) |(?<=in) (?=1)", "\u00a0", sentence
        )  # numbers stay on a line
    except KeyError as missing:
        return f"The journal does not say under which terms it was protected ({missing.args[0]} is missing)."


def _if_draws_known(facts: Mapping[str, Any], row: ClientSummary) -> float | None:
    """Return what was spent against those who know the draws: infinite where no figure is known, None without draws."""
    known = facts.get("spent_if_draws_known")
    return None if known is None else float(known.get(spent_key(row.spent or 0.0, row.delta or 0.0), math.inf))


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
    kind = {"minimum": "the strictest of all, ", "maximum": "the most liberal of all, "}.get(line.budgets, "")
    return f"A control: the budget in force is not the client's own but {kind}{which} for everybody.{_overspent(line)}"


def _overspent(line: Line) -> str:
    broken = sum(
        row.spent is not None and row.spent > row.own_epsilon for job in line.counted[:1] for row in job.clients
    )
    return f" {broken} of {len(line.counted[0].clients)} clients spent more than their own budgets." if broken else ""
