"""The sentences of the report."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from polyeps.accounting.certificate import Certificate
from polyeps.experiment.journal import spent_key
from polyeps.report.comparing import ranking, verdict
from polyeps.report.curves import accuracy_curve
from polyeps.report.formatting import counted, percent, plural, reached, share, short
from polyeps.report.joining import ALONE, TOLD_APART_AT, JoiningTable
from polyeps.report.strength import raised, strength
from polyeps.report.tables import LAST_ROUNDS, NOT_BEGUN, ClientSummary, JobSummary, MethodRuns, final_rounds, summarise

_BUDGETS = {
    "own": "each client's own budget",
    "minimum": "control: the smallest budget, for all clients",
    "maximum": "control: the largest budget, for all clients",
    "exceeded": "control: more than each client's own budget",
    "none": "control: no privacy",
    "published": "as published: the price of its noise",
    NOT_BEGUN: "not begun yet",
}
NO_GUARANTEE = (
    "This client has no guarantee: it chose the level without protection. The releases may show that it took part and "
    "what its records are like; the noise that protects other clients does not protect it."
)


def describe_budgets(method: MethodRuns) -> str:
    """Say whose budgets a method spends."""
    if method.deployed:
        return "each silo's own budget, in its own ledger"
    if method.budgets == "own" and method.alike:
        return "each client's own budget, the same for all"
    return _BUDGETS.get(method.budgets, f"control: {method.budgets}")


def averaged_rounds(methods: Sequence[MethodRuns]) -> str:
    """Say over which rounds a final accuracy is the mean."""
    jobs = [job for method in methods for job in method.counted if job.accuracy]
    counts = sorted({len(final_rounds(job)) for job in jobs})
    if all(len(final_rounds(job)) == min(LAST_ROUNDS, max(job.accuracy)) for job in jobs):
        return "the last round" if counts == [1] else f"the last {counts[-1] if counts else LAST_ROUNDS} rounds"
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f"the evaluated ones of the last {LAST_ROUNDS} rounds ({many} of them)"


def evaluated_rounds(methods: Sequence[MethodRuns]) -> str:
    """Say after which rounds models were tested; after the last one in any case."""
    tested = [(0, *accuracy_curve(method).rounds) for method in methods]
    steps = {after - before for rounds in tested for before, after in pairwise(rounds[:-1])}
    if len(steps) > 1:
        return "the rounds in which it was tested"
    step = steps.pop() if steps else 0
    also = ", and the last" if step and any(rounds[-1] % step for rounds in tested) else ""
    return {0: "the last round", 1: "each round"}.get(step, f"every {step} rounds{also}")


def opening(methods: Sequence[MethodRuns]) -> str:
    """Describe a run in one paragraph."""
    jobs = [job for method in methods for job in method.jobs if job.clients]
    if not jobs:
        return "No job of this run has begun."
    own = [client.own_epsilon for job in jobs for client in job.clients if math.isfinite(client.own_epsilon)]
    if not own:
        budgets = "that they do not disclose" if jobs[0].deployed else "without a limit"
    elif min(own) < max(own):
        budgets = f"from ε\u00a0{short(min(own))} to {short(max(own))}"
    else:
        budgets = f"of ε\u00a0{short(min(own))}"
    without = 0 if jobs[0].deployed or not own else sum(math.isinf(client.own_epsilon) for client in jobs[0].clients)
    if without:
        budgets += f", {counted(without)} of them without a guarantee by their own choice,"
    facts = next((method.facts for method in methods if method.facts), {})
    many = max(len(job.clients) for job in jobs)
    model = f"a model of {plural(facts['parameters'], 'parameter')}" if "parameters" in facts else "a model"
    data = f" on {facts['data']}".replace(" on own:", " on the table ") if "data" in facts else ""
    data += f", encoded by {facts['encoder']}," if facts.get("encoder") else ""
    seeds = max(len(method.jobs) for method in methods)
    each = " each" if len(methods) > 1 else ""
    compared = f", with {plural(len(methods), 'method')} and {plural(seeds, 'seed')}{each}"
    return (
        f"{plural(many, 'client')} with {'a budget' if many == 1 else 'budgets'} {budgets} trained {model}{data} in "
        f"{plural(max(job.planned for job in jobs), 'round')}{compared}. "
        f"{_kept(methods)}{_reached(methods)}"
    )


def anew(methods: Sequence[MethodRuns]) -> str:
    """Say that several trainings spend budgets several times."""
    jobs = sum(any(row.epsilon is not None for row in job.clients) for method in methods for job in method.jobs)
    if jobs < 2:
        return ""
    return (
        f"Budgets are those of one training: each of these {jobs} spends them anew, which a simulation may do and "
        "clients with private records may not."
    )


def units(methods: Sequence[MethodRuns]) -> str:
    """Warn where the guarantees of methods differ in their unit."""
    units = {method.facts.get("unit") for method in methods if not method.control and method.facts}
    if len(units) < 2:
        return ""
    word = next((method.facts["person"] for method in methods if method.facts.get("person")), "")
    others = f"all records of one {word}" if word else "single records"
    return f"Some methods protect whole clients, where the same ε is a stronger guarantee, and others {others}."


def _kept(methods: Sequence[MethodRuns]) -> str:
    if any(method.deployed for method in methods):
        return "Each silo's own ledger refuses what exceeds its budget; the server does not see what was spent."
    own = [method for method in methods if not method.control]
    rows = [row for method in own for job in method.jobs for row in job.clients if row.epsilon is not None]
    if not rows:
        return "No method of this run guarantees every client its own budget."
    if any(row.exceeded for row in rows):
        return f"Not every client stayed within its own budget: {sum(row.exceeded for row in rows)} did not."
    known = [row.ratio for row in rows if row.ratio is not None]
    if not known:
        return "The clients' spending is not known yet."
    if len(known) < len(rows):
        return (
            f"Where spending is known, clients stayed within their own budgets, the closest at {share(max(known))}; "
            "for some methods it is not known yet."
        )
    where = " (the controls below replace or ignore clients' own budgets)" if len(own) < len(methods) else ""
    without = any(row.epsilon is None for method in own for job in method.jobs for row in job.clients)
    every = "Every client with a guarantee" if without else "Every client"
    if len(rows) == 1:
        return f"The client stayed within its own budget and used {share(known[0])} of it{where}."
    return f"{every} stayed within its own budget: the closest came to {share(max(known))} of it{where}."


def _reached(methods: Sequence[MethodRuns]) -> str:
    """Say what the only method reached, or how several compare."""
    found = ranking(methods)
    if found is not None:
        return f" {verdict(found)}"
    rows = [summarise(method) for method in methods if not method.control]
    (row,) = rows if len(rows) == 1 else (None,)
    if row is None or row.final_accuracy is None or not math.isfinite(row.final_accuracy):
        return ""
    value = reached(row.measure, row.final_accuracy, row.final_accuracy_deviation)
    return f" {row.label} reached a test {row.measure} of {value}."


def departures(method: MethodRuns) -> str:
    """Say how many of a method's clients left early, and when."""
    jobs = method.counted
    left = [row.left_after for job in jobs for row in job.clients if row.left_after and row.left_after < job.planned]
    count, idle = len(left) / len(jobs), sum(_never(job) for job in jobs) / len(jobs)
    average = f" on average over {len(jobs)} seeds" if len(jobs) > 1 else ""
    unable = f" {plural(idle, 'client')} could not afford a single round{average}." if idle else ""
    if not left:
        return f"No client left before the end.{unable}"
    when = f"after round {left[0]}" if len(set(left)) == 1 else f"between rounds {min(left)} and {max(left)}"
    clients = plural(max(len(job.clients) for job in jobs), "client")
    return f"{counted(count)} of {clients} left early{average}, {when}.{unable}"


def _never(job: JobSummary) -> int:
    """Count the clients that were not active when the first round began."""
    if not job.rounds:
        return 0
    return len(job.clients) - job.rounds[0][1] - sum(row.left_after == 1 for row in job.clients)


class Guarantee(NamedTuple):
    """What one client of a method is guaranteed."""

    client: str
    words: str
    spent: float | None
    strength: str  # "" where nothing was released
    allows: str

    @property
    def terms(self) -> str:
        """Return the words without the figures."""
        return re.sub(r"factor of at most [^(]*\([^)]*\)", "", self.words)


def guarantees(method: MethodRuns) -> list[Guarantee]:
    """Return the guarantees of the clients with the smallest, the median and the largest budget.

    Where all clients set the same budget, there is one guarantee; clients may still differ in their spending.
    """
    job = next(iter(method.counted), None)
    if job is None or not job.clients or job.deployed:
        return []
    rows, middle = job.clients, (len(job.clients) - 1) // 2
    titles: dict[str, ClientSummary] = {}
    if not method.alike:
        chosen = {"smallest": rows[0], "median": rows[middle], "largest": rows[-1]}
        for size, row in chosen.items():
            first = "A client" if math.isinf(row.own_epsilon) else f"The client with the {size} budget"
            titles[f"{first}, {row.client}"] = row
    elif len({(row.epsilon, row.spent) for row in rows}) > 1:
        typical = sorted(rows, key=lambda row: row.spent or 0.0)[middle]
        titles = {f"A typical client, {typical.client}": typical}
    else:
        titles = {f"The client, {rows[0].client}" if len(rows) == 1 else f"Each of {len(rows)} clients": rows[0]}
    return [
        Guarantee(f"{title}, {_chosen(row)}", guarantee(method, job, row), row.spent, *_strength(row))
        for title, row in titles.items()
    ]


def _strength(row: ClientSummary) -> tuple[str, str]:
    """Return the word for a client's guarantee, and what it allows; "" where nothing was released."""
    epsilon = row.epsilon if row.spent is None else row.spent
    return (strength(epsilon), raised(epsilon)) if epsilon else ("", "")


def _chosen(row: ClientSummary) -> str:
    if math.isinf(row.own_epsilon):
        return "which chose no protection"
    return f"own budget ε\u00a0{short(row.own_epsilon)}"


def guarantee(method: MethodRuns, job: JobSummary, row: ClientSummary) -> str:
    """Return what a client is guaranteed, in words."""
    if row.epsilon is None:
        return NO_GUARANTEE
    if row.spent is None:
        return "Its spending is not known before the job is finished."
    if not row.spent and not row.joined:
        return "It answered in no round, and nothing was charged to its ledger: none of its records were used."
    facts = job.facts
    try:
        sentence = Certificate(
            method=method.method,
            form=facts.get("form", "sound"),
            claimed=row.own_epsilon,
            certified=row.spent,
            delta=row.delta or 0.0,
            adjacency=facts["adjacency"],
            unit=facts["unit"],
            person=facts.get("person", "") if facts["unit"] == "person" else "",
            sampler=facts.get("sampler", "none"),
            trust=facts["trust"],
            accountant="pld",
            details={},
            conditions=tuple(facts.get("conditions", ())),
            arithmetic=facts.get("arithmetic", "ideal"),
            certified_if_draws_known=_if_draws_known(facts, row),
        ).sentence
        # Numbers stay on one line.
        return re.sub(r"(?<=\d) (?=\d)|(?<=ε) (?==)|(?<==) |(?<=in) (?=1)", "\u00a0", sentence)
    except KeyError as missing:
        return f"The journal lacks the terms of its protection ({missing.args[0]} is missing)."


def _if_draws_known(facts: Mapping[str, Any], row: ClientSummary) -> float | None:
    """Return the ε spent against observers who know the draws; infinite if unknown, None without draws."""
    known = facts.get("spent_if_draws_known")
    return None if known is None else float(known.get(spent_key(row.spent or 0.0, row.delta or 0.0), math.inf))


def control_note(method: MethodRuns) -> str:
    """Say what a control does with clients' budgets."""
    if method.budgets == "none" and method.method == ALONE:
        return "Every client trains by itself, without noise: its model must stay at home, since nothing protects it."
    if method.budgets == "none":
        return "A control without privacy: no client has a guarantee, whatever budget it set."
    if method.budgets == "published":
        return (
            "A paper's form as published: its noise and batches are not calibrated to the budgets the clients set. "
            f"The effective budget is their price.{_overspent(method)}"
        )
    if method.budgets == "exceeded":
        return f"A control that spends, and charges, more than the budgets the clients set.{_overspent(method)}"
    effective = sorted({row.epsilon for job in method.jobs for row in job.clients if row.epsilon is not None})
    which = f"ε\u00a0{short(effective[0])}" if len(effective) == 1 else "another one"
    kind = {"minimum": "the smallest of all, ", "maximum": "the largest of all, "}.get(method.budgets, "")
    return f"A control: the effective budget of all clients is not their own but {kind}{which}.{_overspent(method)}"


def _overspent(method: MethodRuns) -> str:
    rows = method.counted[0].clients if method.counted else ()
    broken = sum(row.spent is not None and row.spent > row.own_epsilon for row in rows)
    return f" {broken} of {len(rows)} clients spent more than their own budgets." if broken else ""


def joining_caption(table: JoiningTable) -> str:
    """Say how joint models and models of single clients were compared."""
    where = "its own test records" if table.own_records else "all test records, since none belong to a client"
    chance = "chance in test records and training" if table.seeds > 1 else "chance in test records"
    note = "" if table.seeds > 1 else " One seed says nothing about chance in training; take several."
    return (
        f"Final models, each client compared on {where}. A difference is named where it exceeds what {chance} can "
        f"explain, client by client at {percent(TOLD_APART_AT, digits=0)}.{note} Simulation only: no ledger was "
        "charged for these figures."
    )


def undefined_metrics(methods: Sequence[MethodRuns]) -> list[str]:
    """Say which metrics of all test records are undefined, and why."""
    whys = [
        (name, why, method.label)
        for method in methods
        for job in method.counted
        for name, why in job.facts.get("undefined", {}).items()
    ]
    return [f"{name} of {label} is undefined: {why}." for name, why, label in dict.fromkeys(whys)]
