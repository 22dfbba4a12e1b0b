"""A silo's own page: what its ledger spent, on what, by whom, when, what is left, and what was refused.

The ledger is verified against its hash chain first; of one that was changed, nothing is drawn.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyeps.report.client_plots import spending_chart
from polyeps.report.downloads import as_csv
from polyeps.report.formatting import bound, counted, plural, share, short
from polyeps.report.ledger_history import SIGNER, Account, LedgerHistory, RunCharges, read_history
from polyeps.report.overview import Card
from polyeps.report.page_tables import PageRow, PageTable, condensed
from polyeps.report.strength import raised, strength
from polyeps.report.svg import NARROW, WIDE, Chart, Picture, Scale, chart
from polyeps.report.tables import ClientSummary
from polyeps.report.whole_pages import render, write_whole

_MOST_LINES, _MOST_REFUSALS, _MOST_ACCOUNTS = 400, 100, 2000
_REFUSED = ("refused", "declined")  # events of a silo's log


@dataclass(frozen=True)
class SiloRecords:
    """What a silo keeps beside its ledger; nothing of it is protected by the hash chain."""

    name: str
    contracts: Mapping[str, Mapping[str, str]]  # by run: contract, signer, algorithm, rounds, ends
    log: Path | None  # events.jsonl


def write_ledger_page(path: Path, output: Path, silo: SiloRecords | None = None) -> dict[str, Any]:
    """Verify a ledger and write its page; return its figures."""
    history = read_history(path)
    refused, unread = refusals(silo.log) if silo and silo.log else ([], 0)
    write_whole(ledger_page(history, path, silo, refused, unread), output, 0o600)  # reasons may quote records
    return {
        "ledger": history.id,
        "rows": history.rows,
        "head": history.head,
        "accounts": [_plain(one) for one in (*history.accounts, *history.signers)],
        "runs": [_plain_run(run) for run in history.runs],
        "refused": [dict(zip(("last", "times", "reason"), one, strict=True)) for one in refused],
    }


def _plain(one: Account) -> dict[str, Any]:
    figures = {"epsilon": one.epsilon, "delta": one.delta, "spent": one.spent, "reserved": one.reserved}
    return {"account": one.name, **figures, "left": one.left, "charges": one.charges}


def _plain_run(run: RunCharges) -> dict[str, Any]:
    alone = None if math.isnan(run.alone) else run.alone
    signers = list(run.signers)
    return {"run": run.run, "signers": signers, "charges": run.charges, "open": run.open, "epsilon": alone}


def ledger_page(
    history: LedgerHistory,
    path: Path,
    silo: SiloRecords | None = None,
    refused: Sequence[tuple[str, int, str]] = (),
    unread: int = 0,
) -> str:
    """Return the page as HTML."""
    title = silo.name if silo else history.main.name if history.main else path.name
    runs = _runs(history, silo)
    files = [as_csv("rows.csv", ["row", "time", "kind", "whose", "what"], history.lines)]
    sections = [("overview", "Overview")]
    sections += [("accounts", "Accounts")] if len(history.accounts) > 1 or history.signers else []
    sections += [("runs", "Runs")] if runs else []
    sections += [("refused", "Refused")] if silo and silo.log else []
    sections += [("rows", "Every row"), ("check", "How to check it"), ("data", "Data")]
    return render(
        "ledger.html.j2",
        kind="polyeps ledger",
        sections=sections,
        title=title,
        history=history,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cards=_cards(history, refused, logged=bool(silo and silo.log)),
        meaning=_meaning(history),
        exceeded=[one.name for one in (*history.accounts, *history.signers) if one.exceeded],
        curve=_curve(history),
        spread=None if history.main else spending_chart([_summary(one) for one in history.accounts]),
        accounts=_accounts(history),
        many=len(history.accounts) > 12,
        runs=runs,
        refused=_refused(refused),
        unread=unread,
        logged=bool(silo and silo.log),
        lines=PageTable(
            ("row", "time", "kind", "whose", "what"),
            tuple(PageRow(line) for line in reversed(history.lines[-_MOST_LINES:])),
        ),
        commands=[
            shlex.join(["polyeps", "ledger", "verify", "--file", str(path)]),
            shlex.join(["polyeps", "ledger", "verify", "--file", str(path), "--head", "KEPT"]),
        ],
        files=files,
    )


def _cards(history: LedgerHistory, refused: Sequence[tuple[str, int, str]], *, logged: bool) -> list[Card]:
    main = history.main
    cards = []
    if main:
        look = "alarm" if main.exceeded else "good"
        used, word = share(main.used), strength(main.spent)
        held = f"beside ε {bound(main.reserved)} that open runs have reserved"
        held = held if main.reserved else "nothing is reserved by open runs"
        cards = [
            Card("Spent", f"ε {bound(main.spent)}", f"{used} of ε {short(main.epsilon)}, δ {short(main.delta)}", look),
            Card("Left", f"ε {_down(main.left)}", held),
            Card("Guarantee so far", word, raised(main.spent), "wait" if word == "weak" else ""),
        ]
    elif history.accounts:
        most = max((one.used for one in history.accounts), default=0.0)
        weak = sum(strength(one.spent) == "weak" for one in history.accounts)
        over = sum(one.exceeded for one in history.accounts)
        tone = "alarm" if over else ""
        cards = [
            Card("Accounts", counted(len(history.accounts)), f"{plural(over, 'account')} over budget", tone),
            Card("Most spent", share(most), "of its budget, by any account", tone or "good"),
            Card("Weak guarantees", counted(weak), "accounts that spent more than ε = 5", "wait" if weak else ""),
        ]
    cards.append(Card("Ledger", "verified", f"{plural(history.rows, 'row')}, each as it was written", "good"))
    if logged:
        times = sum(count for _, count, _ in refused)
        cards.append(Card("Refused", plural(times, "request"), "without any charge", ""))
    return cards


def _down(value: float) -> str:
    """Format what is left, never above its value.

    >>> _down(0.49819), _down(2.0), _down(0.0), _down(1.99999)
    ('0.4981', '2', '0', '1.999')
    """
    if not value:
        return "0"
    power = 10.0 ** (3 - math.floor(math.log10(value)))
    return f"{math.floor(value * power) / power:.4g}"


def _meaning(history: LedgerHistory) -> str:
    """Say what the main account's spending means, and what all of its budget would."""
    main = history.main
    if main is None:
        return ""
    so_far = (
        f"All that this ledger's runs have released so far {raised(main.spent)} about {main.unit}"
        if main.spent
        else f"Nothing was charged yet, so nothing about {main.unit} was released"
    )
    exception = f", except with probability {short(main.delta)}" if main.delta and main.spent else ""
    return f"{so_far}{exception}. If the whole budget is spent, this becomes: {raised(main.epsilon)}."


def _summary(one: Account) -> ClientSummary:
    """Return an account as the charts take clients."""
    return ClientSummary(
        client=one.name, epsilon=one.epsilon, own_epsilon=one.epsilon, delta=one.delta, records=0,
        noise_multiplier=None, spent=one.spent, ratio=one.used, exceeded=one.exceeded, joined=one.charges, declined=0,
        left_after=None, sent=0, received=0,
    )  # fmt: skip


def _accounts(history: LedgerHistory) -> PageTable | None:
    """Return all accounts, those of signers last; None where there is only one."""
    ordered = (*history.accounts[:_MOST_ACCOUNTS], *history.signers)
    if len(ordered) < 2:
        return None
    columns = [
        "account", "budget ε", "δ", "spent ε", "of budget", "reserved ε", "left ε", "guarantee", "charges", "protects",
    ]  # fmt: skip
    rows = [
        PageRow(
            (
                one.name, short(one.epsilon, 5), short(one.delta), bound(one.spent), share(one.used),
                bound(one.reserved), _down(one.left), _word(one), counted(one.charges), one.unit,
            ),
            " ".join(filter(None, (strength(one.spent), "exceeded" if one.exceeded else ""))),
        )
        for one in ordered
    ]  # fmt: skip
    return condensed(columns, rows)


def _word(one: Account) -> str:
    """Return how strong what an account guarantees is; a signer's account is a limit, and guarantees nothing."""
    return "–" if one.name.startswith(SIGNER) else strength(one.spent)


def _runs(history: LedgerHistory, silo: SiloRecords | None) -> PageTable | None:
    if not history.runs:
        return None
    columns = [
        "run or contract", "signed by", "algorithm", "rounds", "ends", "clients", "state", "charges", "ε by itself",
        "first", "last",
    ]  # fmt: skip
    return condensed(columns, [_run(run, silo, history.main) for run in history.runs])


def _run(run: RunCharges, silo: SiloRecords | None, main: Account | None) -> PageRow:
    note = silo.contracts.get(run.run, {}) if silo else {}
    named = f"{note['contract']} ({run.run.rpartition('/')[2][:8]})" if note else ""
    jobs = {purpose.partition("/")[0] for purpose in run.purposes}  # a simulation's purpose is job/round/kind
    name = named or run.run or (jobs.pop() if len(jobs) == 1 else "charges without a contract")
    state = "–" if not run.reserved else "open" if run.open else "ended"
    return PageRow(
        (
            name,
            ", ".join(run.signers) or note.get("signer", "–"),
            note.get("algorithm", "–"),
            note.get("rounds", "–"),
            note.get("ends", "–"),
            counted(len(run.clients)),
            state,
            counted(run.charges),
            bound(run.alone) if main else "–",
            run.first,
            run.last,
        )
    )


def _refused(found: Sequence[tuple[str, int, str]]) -> PageTable:
    rows = tuple(PageRow((reason, counted(times), last)) for last, times, reason in found[:_MOST_REFUSALS])
    return PageTable(("reason", "times", "last"), rows)


def refusals(log: Path) -> tuple[list[tuple[str, int, str]], int]:
    """Return what a silo refused, the last first: last time, how often, why; and the lines that cannot be read."""
    together: dict[str, tuple[str, int]] = {}
    unread = 0
    for path in (log.with_suffix(".jsonl.1"), log):
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
                time, kind = str(event["time"]), event["event"]
            except (ValueError, TypeError, KeyError):
                unread += 1
                continue
            if kind in _REFUSED:
                why = str(event.get("reason") or f"declined {event.get('action')} of {event.get('run')}")
                together[why] = (time[:19].replace("T", " "), together.pop(why, ("", 0))[1] + 1)
    return [(time, times, why) for why, (time, times) in reversed(together.items())], unread


def _curve(history: LedgerHistory) -> Chart | None:
    """Draw how spending grew from charge to charge, below the budget."""
    if history.main is None or len(history.curve) < 2:
        return None
    most = max(max(budget, spent) for _, _, spent, budget in history.curve)
    last = len(history.curve) - 1
    pictures = []
    for width in (WIDE, NARROW):
        picture = Picture(width, 260, Scale(0, last), Scale(0, 1.08 * most), right=14)
        picture.y_axis("ε", picture.y.ticks(5))
        picture.x_axis("charges and budgets, first to last", [])
        steps = [(place, entry) for place, entry in enumerate(history.curve)]
        picture.line(_steps([(place, budget) for place, (_, _, _, budget) in steps]), "diagonal")
        picture.line(_steps([(place, spent) for place, (_, _, spent, _) in steps]), "plain")
        for place, (row, time, spent, budget) in steps:
            rows = [("plain", "spent ε", bound(spent)), ("", "budget ε", short(budget)), ("", "time", time)]
            picture.mark(place, spent, f"row {row}", rows)
        pictures.append(picture)
    said = f"Spending from ε {bound(history.curve[0][2])} to {bound(history.curve[-1][2])}, budget {short(most)}."
    return chart(pictures[0], pictures[1], said, "x", legend=(("plain", "spent"), ("c6 dashed", "budget")), always=True)


def _steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a line that stays level until the next point."""
    found: list[tuple[float, float]] = []
    for x, y in points:
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    return found
