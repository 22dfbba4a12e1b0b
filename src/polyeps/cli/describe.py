"""`polyeps data describe`: the columns of a table of your own, and a schema drafted from it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polyeps.cli.output import Json, print_json, print_table, progress, remark
from polyeps.errors import InputError

_COMMENT = """\
Drafted by `polyeps data describe` from the records of {whose}.
Ranges, categories and classes below were read off those records: agree on them with all clients from public
knowledge (what ages are possible? which codes exist?) before anybody trains, since what is computed from private
records and shared is a release that no ledger is charged for.
Numbers are clamped to their range and scaled to -1 to 1; undeclared categories count as "other".
"""


def describe(
    file: Annotated[Path, typer.Argument(help="A table of your own: CSV, Parquet, Arrow, Feather or .npz.")],
    client: Annotated[str | None, typer.Option(help="Describe this client's rows alone.")] = None,
    label_column: Annotated[str | None, typer.Option(help="The label column; guessed by default.")] = None,
    client_column: Annotated[str | None, typer.Option(help="The client column; guessed by default.")] = None,
    unit_column: Annotated[str | None, typer.Option(help="The column of persons; guessed by default.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write a drafted schema to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Describe the columns of a table, and draft a schema for all clients to agree to."""
    from polyeps.data.schema_files import schema_text
    from polyeps.data.table_labels import labels_alike
    from polyeps.data.table_readers import read_columns
    from polyeps.data.table_summary import client_count, of_client, summarise_table

    if write is not None and write.exists():
        raise InputError(f"{write} exists already; choose another name, or remove it first")
    with progress("reading"):
        table = read_columns(file)
    roles = {"label": label_column, "client": client_column, "unit": unit_column}
    found = summarise_table(table, **roles)
    if client is not None:
        named = client_column or next((column.name for column in found.columns if column.role == "client"), "client")
        table = of_client(table, named, client)
        found = summarise_table(table, **{**roles, "client": named})
    clients = client_count(table, found)
    if as_json:
        print_json({"file": str(file), "records": found.records, "columns": [asdict(one) for one in found.columns]})
    else:
        print_table(
            ["column", "role", "kind", "missing", "different", "suggestion"],
            [[one.name, one.role, one.kind, one.missing, one.different, one.suggestion] for one in found.columns],
            title=f"{file}: {found.records:,} records",
        )
    remark("ranges and categories come from these records; agree on them from public knowledge before anybody trains")
    if found.declared is not None and (alike := labels_alike(found.declared.classes or ())):
        remark(alike)
    if clients > 1:
        remark(f"these are the records of {clients} clients; describe one client's alone with --client NAME")
    if write is None:
        return
    if found.declared is None:
        raise InputError(f"{file} has no column that a schema could declare; add columns of numbers or categories")
    whose = f"{file.name}" + (
        f", client {client}" if client else f", {clients} clients together" if clients > 1 else ""
    )
    try:
        with write.open("x", encoding="utf-8") as stream:
            stream.write(schema_text(found.declared, _COMMENT.format(whose=whose)))
    except OSError as problem:
        raise InputError(f"{write} cannot be written: {problem.strerror}; choose another file") from None
    remark(f'{write} is a draft: correct it, then name it in an experiment as data.schema = "{write.name}"')
