"""One client's certificate after a run, on a page for a data-protection officer: the guarantee, and what backs it.

The figures are those of the ledger, which is verified and accounted again; a journal that says otherwise is refused.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyeps import __version__
from polyeps.accounting.certificate import SECRET_COHORT, one_in, rounded_up
from polyeps.errors import InputError, LedgerTampered, suggest
from polyeps.experiment.journal import Journal
from polyeps.ledger import Ledger
from polyeps.report.formatting import plural, short
from polyeps.report.sentences import guarantee
from polyeps.report.strength import CERTAIN, strength, sure
from polyeps.report.tables import ClientSummary, JobSummary, MethodRuns, read_methods
from polyeps.report.whole_pages import render, write_whole

_SOMEBODY = {
    "nobody": "Somebody",
    "secure-sum": "Somebody who sees only the sums,",
    "server": "Somebody other than the server",
}
_STANDING = (
    "This was a simulation: all records were on one machine, and the noise was drawn from a seed, so that whoever "
    "knows or guesses the seed can remove it. The guarantee below is the one that a deployed client with the same "
    "settings would have."
)


@dataclass(frozen=True)
class ClientPage:
    """What a certificate says, ready for a page or JSON."""

    client: str
    run: str
    method: str
    standing: str  # whose guarantee it is: that of a deployed client, not of a simulation
    sentence: str
    strength: str
    guess: str
    facts: dict[str, str]
    ledger: dict[str, str]
    limits: tuple[str, ...]
    checks: tuple[str, ...]  # commands
    epsilon: float
    delta: float
    spent: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def certificate_of(folder: Path, client: str, method: str | None = None, seed: int | None = None) -> ClientPage:
    """Return the certificate of one client of a finished job."""
    with closing(Journal(folder / "journal.db")) as journal:
        about = journal.about()
        methods = read_methods([journal])
        found, job = _job(methods, method, seed)
    row = next((row for row in job.clients if row.client == client), None)
    if row is None:
        listed = ", ".join(row.client for row in job.clients[:8]) + (", …" if len(job.clients) > 8 else "")
        near = suggest(client, [row.client for row in job.clients], f"it has {listed}")
        raise InputError(f"{folder} has no client {client!r}; {near}")
    if row.epsilon is None or row.spent is None:
        raise InputError(f"client {client!r} has no guarantee under {found.label}, so there is nothing to certify")
    path = folder / "ledgers" / f"{job.name}.db"
    facts, settings = job.facts, about.get("experiment", {})
    person = str(facts.get("person") or "")
    unit = f"all records of one {person}" if facts["unit"] == "person" else f"one {facts['unit']}"
    hidden = facts["adjacency"] == "add-remove"  # the number is then no less protected than the records
    held = "" if hidden else plural(row.records, person or "record")
    data = settings.get("data", {})
    # Whether test records belong to the clients: held out of a table of one's own, or by data.own_test.
    own_tests = bool(data.get("own_test")) or str(facts.get("data", "")).startswith("own:")
    size = f"{facts.get('parameters', 0):,} parameters".replace(",", " ")
    return ClientPage(
        client=client,
        run=str(about.get("name", folder.name)),
        method=found.label,
        standing=_STANDING,
        sentence=guarantee(found, job, row),
        strength=f"A {strength(row.spent)} guarantee.",
        guess=_guess(row, facts),
        facts={
            "Client": client,
            "What is protected": unit,
            "What the client trained on": held,
            "Data": Path(data["file"]).name if data.get("file") else str(facts.get("data", "")),
            "What the model predicts": str(data.get("label", "label")) if data.get("file") else "",
            "Model": f"{settings.get('model', {}).get('name', 'own')}, {size}",
            "Method": f"{found.label}, seed {job.seed}: {facts.get('summary', '')}",
            "Rounds answered": f"{row.joined} of {job.planned}",
            "Budget": f"ε = {row.own_epsilon:g}, δ = {short(row.delta)}",
            "Spent": f"ε = {rounded_up(row.spent)}",
        },
        ledger=_checked(path, row, facts),
        limits=_limits(person, facts, _others(methods, job), own_tests=own_tests),
        checks=(
            shlex.join(["polyeps", "ledger", "verify", "--file", str(path)]),
            shlex.join(["polyeps", "ledger", "show", "--file", str(path), "--client", client]),
        ),
        epsilon=row.own_epsilon,
        delta=row.delta or 0.0,
        spent=row.spent,
    )


def write_certificate(page: ClientPage, output: Path) -> None:
    """Write a certificate as one HTML file."""
    sections = [("overview", "Guarantee"), ("done", "What was done"), ("backed", "What backs it"), ("limits", "Limits")]
    text = render(
        "certificate.html.j2", kind="polyeps certificate", sections=sections, page=page, version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        look="wait" if strength(page.spent) == "weak" else "calm",
    )  # fmt: skip
    write_whole(text, output)


def _job(methods: tuple[MethodRuns, ...], label: str | None, seed: int | None) -> tuple[MethodRuns, JobSummary]:
    """Return the job that is asked for; with one method or one seed, it need not be named."""
    private = [method for method in methods if method.budgets in ("own", "minimum")]  # others exceed clients' budgets
    named = [method for method in private if label in (None, method.label)]
    if label is not None and private and not named:
        labels = [one.label for one in private]
        near = suggest(label, labels, f"choose one with --method: {', '.join(labels)}")
        raise InputError(f"no method {label!r} of this run keeps to the clients' budgets; {near}")
    if len(named) != 1:
        known = ", ".join(method.label for method in private) or "there is none"
        raise InputError(f"name one method that keeps to the clients' budgets with --method: {known}")
    jobs = [job for job in named[0].jobs if seed in (None, job.seed) and job.status == "done"]
    if len(jobs) != 1:
        known = ", ".join(str(job.seed) for job in named[0].jobs if job.status == "done") or "none yet"
        raise InputError(f"name one finished seed of {named[0].label} with --seed: {known}")
    return named[0], jobs[0]


def _checked(path: Path, row: ClientSummary, facts: Mapping[str, Any]) -> dict[str, str]:
    """Verify the ledger and account for the client again; return what identifies what was checked."""
    if not path.exists():
        raise InputError(f"{path} is missing, and without the ledger nothing backs a certificate; put it back")
    with closing(Ledger(path)) as ledger:
        head = ledger.verify()
        account = ledger.account(row.client)
        spent = account.spent()
        if row.spent is None or not math.isclose(spent, row.spent, rel_tol=1e-9, abs_tol=1e-12):
            raise LedgerTampered(
                f"the ledger says that {row.client} spent ε = {spent:g}, and the journal says {row.spent}; "
                "one of them was changed"
            )
        terms, budget = account.terms, account.terms.budget
        said = (row.epsilon, row.delta, facts["unit"], facts["adjacency"], _word(facts))
        if said != (budget.epsilon, budget.delta, terms.unit, terms.adjacency, terms.person):
            raise LedgerTampered(
                f"the ledger of {row.client} has other terms (ε = {budget.epsilon:g}, δ = {budget.delta:g}, "
                f"{terms.person or terms.unit}, {terms.adjacency}) than the journal; one of them was changed"
            )
        times = [_moment(entry.time) for entry in ledger.rows()]
        return {
            "Ledger": ledger.id,
            "Its rows, all verified": str(head.seq),
            "Charges to this client": str(account.charges),
            "First and last row": f"{times[0]} and {times[-1]}",
            "Limit that it enforces": f"ε = {budget.epsilon:g}, δ = {short(budget.delta)}",
            "Hash of the last row": head.hash,
        }


def _moment(time: str) -> str:
    """Return the time of a ledger's row, to the second."""
    return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _word(facts: Mapping[str, Any]) -> str:
    """Return what a person is called, where the unit is one."""
    return str(facts.get("person") or "") if facts["unit"] == "person" else ""


def _guess(row: ClientSummary, facts: Mapping[str, Any]) -> str:
    """Say what an even guess can become."""
    assert row.spent is not None
    whose = {"person": f"the records of a certain {_word(facts)} were", "client": "this client's data were"}
    used = whose.get(facts["unit"], "a certain record was")
    drawn = " and does not know in which rounds this client was drawn"
    secret = drawn if SECRET_COHORT in facts.get("conditions", ()) else ""
    most = "practically certain" if sure(row.spent) == CERTAIN else f"at most {sure(row.spent)} sure"
    exception = f", except with probability {one_in(row.delta)}" if row.delta else ""
    return (
        f"{_SOMEBODY[facts['trust']]} who thinks it as likely as not that {used} used, and who knows everything else"
        f"{secret}, can become {most} of it by all that this client's answers lead to{exception}."
    )


def _others(methods: Sequence[MethodRuns], job: JobSummary) -> str:
    """Say how often the run trained on the same records besides, with other methods and seeds."""
    others = [(method, one) for method in methods for one in method.jobs if one.clients and one is not job]
    if not others:
        return ""
    bare = sum(method.budgets == "none" for method, _ in others)
    times = "one more time" if len(others) == 1 else f"{len(others)} more times"
    without = f", {bare} of them without a guarantee" if bare else ""
    return (
        f"The same run trained {times} on these records, with other methods or seeds{without}: each spent a "
        "budget anew, and whoever sees their models or figures as well learns more. "
    )


def _limits(person: str, facts: Mapping[str, Any], others: str, *, own_tests: bool) -> tuple[str, ...]:
    one = "client" if facts["unit"] == "client" else person or "record"
    found = [
        f"The guarantee covers this one training. {others}Other runs on the same records spend more; a client that "
        "keeps one ledger for all of them sees the sum.",
        f"It limits what anyone learns about any one {one}. It does not keep secret what is true of many, such as that "
        "smokers fall ill more often.",
    ]
    if own_tests:
        found.append(
            "It does not cover the records that were held out for tests. Accuracy and other figures were computed from "
            "them without noise, and no ledger was charged for that."
        )
    if facts["adjacency"] != "add-remove" and facts["unit"] != "client":
        found.append(f"How many {person or 'record'}s the client has is public, and not protected.")
    return tuple(found)
