"""`polyeps ledger`: show, verify and export a privacy ledger, set or change budgets."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from polyeps.cli.output import Json, print_either, print_json, print_table, progress, remark
from polyeps.errors import InputError, LedgerError

if TYPE_CHECKING:
    from polyeps.ledger import Ledger
    from polyeps.ledger.account import BudgetTerms

ledger_app = typer.Typer(help="Show, verify and export your privacy ledger; set budgets.", no_args_is_help=True)
_HEADINGS = {"epsilon": "ε", "delta": "δ"}
FileOption = Annotated[Path, typer.Option("--file", help="The ledger.")]


@ledger_app.command("show")
def show_ledger(
    file: FileOption,
    client: Annotated[str | None, typer.Option(help="Only this client.")] = None,
    as_json: Json = False,
) -> None:
    """Show every client's budget, what it spent, reserved and has left, and the runs that reserved their price."""
    from polyeps.ledger import Ledger

    ledger = Ledger(file)
    names = ledger.clients if client is None else [client]
    rows = []
    with progress("accounting") as report:
        for number, name in enumerate(names):
            rows.append(_state(ledger, name))
            report(number + 1, len(names))
    runs = [
        {"run": name, "state": "open" if run.open else "released", "clients": len(run.clients)}
        for name, run in ledger.runs.items()
        if client is None or client in run.clients
    ]
    if as_json:
        head = ledger.head
        print_json({"ledger": ledger.id, "rows": head.seq, "head": head.hash, "clients": rows, "runs": runs})
    elif rows:
        for table in filter(None, (rows, runs)):
            print_table([_HEADINGS.get(name, name) for name in table[0]], [list(row.values()) for row in table])
    else:
        remark(f"{file} holds no clients yet")


def _state(ledger: Ledger, name: str) -> dict[str, Any]:
    account = ledger.account(name)
    terms, spent, committed = account.terms, account.spent(), account.spent(account.committed)
    return {
        "client": name,
        "epsilon": terms.budget.epsilon,
        "delta": terms.budget.delta,
        "spent": spent,
        "reserved": max(0.0, committed - spent),
        "left": max(0.0, terms.budget.epsilon - committed),
        "charges": account.charges,
        "unit": terms.unit if not terms.person else f"person ({terms.person})",
        "adjacency": terms.adjacency,
        "schedule": terms.schedule,
    }


@ledger_app.command("history")
def show_history(file: FileOption, as_json: Json = False) -> None:
    """Say what happened, row by row; --json prints the rows as they are stored."""
    from polyeps.ledger import Ledger
    from polyeps.report.ledger_words import rows_in_words

    with progress("reading"):
        rows = Ledger(file).rows()
    if as_json:
        print_json([_plain(row) for row in rows])
    else:
        print_table(["row", "time (UTC)", "client", "what happened"], rows_in_words(rows))


def _plain(row: Any) -> dict[str, Any]:
    return {**row._asdict(), "body": row.content}


@ledger_app.command("verify")
def verify_ledger(
    file: FileOption,
    kept: Annotated[
        Path | None,
        typer.Option("--head", help="A copy of the ledger's .head file, or output of verify --json, kept elsewhere."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every row and the head; exit with 1 and name the first row that was changed."""
    from polyeps.ledger import Ledger

    with progress("verifying"):
        head = Ledger.verify_file(file, kept)
    figures = {"verified": True, "rows": head.seq, "head": head.hash}
    print_either(as_json, figures, f"{head.seq} rows, all as written; head {head.hash}")


@ledger_app.command("set-budget")
def set_budget(
    file: FileOption,
    epsilon: Annotated[float, typer.Option(help="The most privacy this client is willing to lose, in all runs.")],
    delta: Annotated[
        float | None,
        typer.Option(help="The probability with which the guarantee may fail; 1e-5, or unchanged with --raise."),
    ] = None,
    client: Annotated[str, typer.Option(help="The client.")] = "client",
    unit: Annotated[Literal["record", "person", "client"], typer.Option(help="The unit that is protected.")] = "record",
    person: Annotated[str, typer.Option(help="What a person is called, as data.unit has it: patient.")] = "",
    adjacency: Annotated[
        Literal["zero-out", "add-remove", "replace-one"],
        typer.Option(
            help="Neighbours: a record emptied (their number is public), absent (their number is hidden), or replaced."
        ),
    ] = "zero-out",
    schedule: Annotated[
        Literal["adaptive", "fixed"],
        typer.Option(
            help="adaptive: requests may depend on earlier answers. fixed: one run, reserved whole, at exact prices."
        ),
    ] = "adaptive",
    raise_: Annotated[bool, typer.Option("--raise", help="Change a budget that is set already.")] = False,
    reason: Annotated[str, typer.Option(help="The reason for the change, which is recorded.")] = "",
    as_json: Json = False,
) -> None:
    """Set a client's budget, once; with --raise and a reason, change it."""
    from polyeps.core import Budget
    from polyeps.ledger import Ledger
    from polyeps.ledger.account import BudgetTerms

    if raise_:
        ledger = Ledger(file)
        kept = ledger.account(client).terms.budget.delta
        ledger.change_budget(client, Budget(epsilon, kept if delta is None else delta), reason)
    else:
        budget = Budget(epsilon, 1e-5 if delta is None else delta)
        ledger = _enrol(file, {client: BudgetTerms(budget, unit, adjacency, schedule, person=person)})
    state = _state(ledger, client)
    if as_json:
        print_json(state)
    else:
        print_table([_HEADINGS.get(name, name) for name in state], [list(state.values())])


def _enrol(file: Path, terms: dict[str, BudgetTerms]) -> Ledger:
    """Add clients to a ledger, which is created if there is none."""
    from polyeps.ledger import Ledger

    try:
        return Ledger.create(file, terms)
    except LedgerError:
        if not file.exists():
            raise
    ledger = Ledger(file)
    try:
        ledger.enroll(terms)
    except LedgerError as problem:
        raise InputError(f"{problem}: use --raise and --reason") from None
    return ledger


@ledger_app.command("page")
def page_of_ledger(
    file: Annotated[Path | None, typer.Option("--file", help="The ledger; not needed with --policy.")] = None,
    policy: Annotated[Path | None, typer.Option(help="A silo's policy: finds its ledger, contracts and log.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("ledger.html"),
    as_json: Json = False,
) -> None:
    """Verify a ledger and write its page: what was spent, on what, by whom, what is left, what was refused and why."""
    from polyeps.report.ledger_page import write_ledger_page

    silo = None
    if policy is not None:
        from polyeps.report.silo_records import silo_records

        path, silo = silo_records(policy)
        if file is not None and file.resolve() != path.resolve():
            raise InputError(f"{file} is not the ledger of {policy}, which is {path}; give one of the two")
        file = path
    if file is None:
        raise InputError("give a ledger with --file, or a silo's policy with --policy")
    figures = write_ledger_page(file, output, silo)
    remark(f"verified {file} and wrote {output}")
    if as_json:
        print_json(figures)


@ledger_app.command("export")
def export_ledger(
    file: FileOption,
    form: Annotated[Literal["json", "csv"], typer.Option("--format", help="JSON lines or CSV.")] = "json",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    as_json: Json = False,
) -> None:
    """Write all rows, verified, for another program."""
    from polyeps.ledger import Ledger

    with progress("verifying"):
        rows = Ledger(file).rows()
    text = io.StringIO()
    if form == "csv" and not as_json:
        writer = csv.writer(text)
        writer.writerow(rows[0]._fields)
        writer.writerows(rows)
    else:
        text.writelines(json.dumps(_plain(row)) + "\n" for row in rows)
    if output is None:
        print(text.getvalue(), end="")
        return
    unfinished = output.with_name(f"{output.name}.{os.getpid()}.new")
    try:
        unfinished.write_text(text.getvalue())
        unfinished.replace(output)
    except OSError as problem:
        raise InputError(f"{output} cannot be written: {problem}") from None
