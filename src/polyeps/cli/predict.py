"""`polyeps predict`: the classes of a table's records, by a trained model."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polyeps.cli.export import CodeFolder, MethodName, ModelPath, ModelSeed, TrustModelCode, open_model
from polyeps.cli.output import Json, check_new, print_json, print_table, progress, remark, write_new
from polyeps.errors import InputError


def predict(
    model: ModelPath,
    file: Annotated[Path, typer.Argument(help="Records to predict: a .csv, .parquet or .npz file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="CSV file to write; printed by default.")
    ] = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add the probability of every class.")] = False,
    keep: Annotated[
        list[str] | None, typer.Option(help="Column to pass through, such as an identifier; may be repeated.")
    ] = None,
    score: Annotated[
        bool, typer.Option("--score", help="Compare with the file's labels: accuracy and AUC, or errors of numbers.")
    ] = False,
    label: Annotated[str | None, typer.Option(help="Label column; by default the one of the training.")] = None,
    method: MethodName = None,
    seed: ModelSeed = None,
    trust_code: TrustModelCode = False,
    code: CodeFolder = None,
    as_json: Json = False,
) -> None:
    """Predict the class or number of every record of a table, encoded as the model's training records were."""
    from polyeps.experiment.prediction import predict_file
    from polyeps.experiment.saved_model import find_model

    if output is not None:
        if output.suffix in (".parquet", ".json", ".npz"):
            raise InputError(f"--output {output}: predictions are written as CSV; give a .csv file")
        check_new(output)
    with progress("predicting") as done:
        opened = open_model(find_model(model, method, seed), trust_code, code)
        found = predict_file(opened, file, keep or (), score, label, done)
    header, rows = found.header(probabilities), found.rows(probabilities)
    if output is not None:
        write_new(output, _csv(header, rows).encode())
        remark(f"wrote {output}: {len(rows)} predictions")
    if as_json:
        named = [dict(zip(header, map(_plain, row), strict=True)) for row in rows]
        about: dict[str, Any] = {"model": str(opened.path), "file": str(file), "records": len(rows)}
        print_json({**about, "classes": opened.classes, "scores": dict(found.scores), "predictions": named})
    elif output is None:
        sys.stdout.write(_csv(header, rows))
        if found.scores:
            remark(", ".join(f"{name} {'–' if one is None else f'{one:.4f}'}" for name, one in found.scores.items()))
    elif found.scores:
        print_table(["records", *found.scores], [[len(rows), *found.scores.values()]])


def _csv(header: list[str], rows: list[list[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"{cell:.6f}" if type(cell) is float else _plain(cell) for cell in row] for row in rows)
    return stream.getvalue()


def _plain(cell: Any) -> Any:
    """Return a cell of a table as JSON can hold it."""
    plain = cell.item() if hasattr(cell, "item") else cell
    if plain is None or plain != plain:  # NaN: a missing cell
        return None
    return plain if isinstance(plain, str | int | float | bool) else str(plain)
