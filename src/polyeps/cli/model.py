"""`polyeps model check`: the verdict on a module of the user's own, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from polyeps.cli.output import Json, print_facts, print_json, print_table, progress
from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps.experiment.model_check import ModelCheck

model_app = typer.Typer(help="Check a model of your own.", no_args_is_help=True)


@model_app.callback()
def _group() -> None:
    """Check a model of your own."""


@model_app.command("check")
def check(
    factory: Annotated[str, typer.Argument(help='Your function, as "module:name".', metavar="MODULE:NAME")],
    classes: Annotated[int, typer.Option(help="Number of classes, labels or numbers to predict.", min=1)],
    shape: Annotated[str | None, typer.Option(help="Shape of a record: 64, or 3,32,32.")] = None,
    kind: Annotated[
        Literal["float32", "int64"], typer.Option("--type", help="What a record consists of: int64 for tokens.")
    ] = "float32",
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help='One of several inputs, "NAME=SHAPE" or "NAME=SHAPE:int64"; may be repeated.'),
    ] = None,
    target: Annotated[
        Literal["class", "number", "labels", "soft", "sequence"], typer.Option(help="What is predicted.")
    ] = "class",
    positions: Annotated[str | None, typer.Option(help="Positions of a sequence's targets.")] = None,
    loss: Annotated[str | None, typer.Option(help='Loss, by name or as "module:name".')] = None,
    output: Annotated[str | None, typer.Option(help="One of several outputs, by key or place.")] = None,
    trust_code: Annotated[bool, typer.Option("--trust-code", help="Run the module's code.")] = False,
    code: Annotated[
        Path | None, typer.Option("--code", help="Folder of that code; the current one by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a module with autograd, one example at a time, and say what is slow, random, large or refused."""
    from polyeps.experiment.model_check import check_own_model
    from polyeps.experiment.model_check_options import given_by, parse_shape
    from polyeps.experiment.registry import Code, Parts

    if (shape is None) == (not inputs):
        raise InputError("a module has one input, of a --shape, or several, each given by --input; give one of the two")
    if classes < 2 and target != "number":
        raise InputError(f"--classes is {classes}; it must be at least 2, but for --target number")
    wanted = None if shape is None else parse_shape(shape)
    if code is not None and not trust_code:
        raise InputError(f"--code {code} names a folder of code; read it, then add --trust-code to run it")
    if code is not None and not code.is_dir():
        raise InputError(f"--code {code} is no folder; name the one that holds the module")
    import torch

    parts = Parts(code=Code((code or Path.cwd()).absolute()) if trust_code else None)
    about: dict[str, Any] = {"model": factory, "classes": classes}
    about |= {"input_shape": wanted} if wanted else {"inputs": inputs}
    try:
        make = parts.find("model.name", factory, {}, "models")
        if not callable(make):
            raise InputError(f"{factory} is of type {type(make).__name__}; name a function of (shape, classes)")
        own_loss = parts.find("model.loss", loss, {}, "models") if loss is not None and ":" in loss else loss
        given = given_by(inputs or [], target, positions, classes, own_loss, output)
        numbers: str = kind
        if given.inputs is not None:
            wanted, numbers = (sum(given.inputs.sizes),), given.inputs.kind
        assert wanted is not None
        with progress("checking") as done:
            found = check_own_model(factory, make, wanted, classes, getattr(torch, numbers), done, given)
    except (InputError, SystemExit) as problem:
        reason = str(problem) if isinstance(problem, InputError) else "its code ends the program; remove that"
        if not as_json:
            raise InputError(f"{factory} is refused: {reason}") from None
        print_json({**about, "verdict": "refused", "reason": reason})
        raise typer.Exit(2) from None
    if as_json:
        print_json({**about, **found.as_dict()})
    else:
        _print(factory, found)


def _print(name: str, found: ModelCheck) -> None:
    from polyeps.experiment.model_check import CLIENTS, RECORDS

    print(f"{name} ({found.kind}): {found.verdict}\n")
    drawing = f"{', '.join(found.random)}: drawn for each record from its client's stream" if found.random else "none"
    rows: list[list[Any]] = [
        [
            "compared with autograd",
            f"{found.rows} records, one at a time: largest deviation {found.deviation:.1e}, clipped sums "
            f"{found.sum_deviation:.1e}{', as rounding allows' if found.deviation > 1e-3 else ''}",
        ],
        ["parameters", f"{found.trained:,} trained, {found.frozen:,} frozen".replace(",", " ").replace("  ", ", ")],
        ["random layers", drawing],
        ["memory", f"{_bytes(found.bytes_per_record)} a record of a batch, {_bytes(found.bytes_per_client)} a client"],
        [f"a step of {CLIENTS} clients × {RECORDS}", f"{1000 * found.seconds['polyeps']:.3g} ms"],
    ]
    ours, others = found.seconds["polyeps"], {"plain autograd, no clipping": "autograd"}
    for what, key in (others | {"autograd, one example at a time": "one_by_one"}).items():
        theirs = found.seconds[key]
        rows.append([what, f"{1000 * theirs:.3g} ms: {theirs / ours:.2g} times ours"])
    print_facts(dict(rows))
    shown = [[part.path or "(all)", part.kind, part.parameters, part.way] for part in found.parts]
    print_table(["part", "class", "parameters", "runs by"], shown)
    for part in found.parts:
        if part.slow:
            print(f"Slow: {part.because}.")


def _bytes(count: int) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> _bytes(900), _bytes(5 * 2**20)
    ('900 B', '5 MiB')
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"
