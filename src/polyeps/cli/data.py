"""The commands `polyeps data list|check|fetch|show`: figures to stdout, talk to stderr.

numpy and what needs it are imported inside the commands, so that `polyeps --help` stays quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyeps.cli.output import Json, print_json, remark
from polyeps.errors import DataError, InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from polyeps.data.catalogue import DataFile, Entry
    from polyeps.data.datasets import Dataset

app = typer.Typer(help="Data sets: what is here, how to get the rest, how clients share them.", no_args_is_help=True)

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Look in this folder first.")]


def _talk() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _print_table(table: Table) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a pipe has no width: let no cell be cut
        console.width = 200
    console.print(table)


def _entry(name: str) -> Entry:
    from polyeps.data.catalogue import CATALOGUE

    if name not in CATALOGUE:
        raise InputError(f"there is no data set {name!r}: choose one of {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


@app.command("list")
def list_(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets and say which are here."""
    from polyeps.data.catalogue import CATALOGUE
    from polyeps.data.sources import how_to_get, places, state

    where = places(data_dir)
    states = {name: state(entry, where) for name, entry in CATALOGUE.items()}
    missing = {name: how_to_get(CATALOGUE[name], where) for name in states if states[name] == "missing"}
    if as_json:
        from polyeps.cli.data_drawing import facts

        listed = [facts(entry) | {"state": states[entry.name]} for entry in CATALOGUE.values()]
        print_json([known | {"how_to_get": missing.get(known["name"])} for known in listed])
        return
    from rich.table import Table

    table = Table("data set", "records", "test", "shape", "labels", "state", "what it is")
    for entry in CATALOGUE.values():
        shape = " x ".join(str(size) for size in entry.shape)
        counts = (f"{entry.records:,}", f"{entry.test_records:,}" if entry.test_records else "-")
        table.add_row(entry.name, *counts, shape, str(len(entry.classes)), states[entry.name], entry.title)
    _print_table(table)
    if missing:
        remark(f"get the missing ones with `polyeps data fetch {' '.join(missing)}`")


@app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; all of them when none is named.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Read every file, or those of the sets named, and compare its checksum with the published one."""
    from polyeps.data.catalogue import CATALOGUE
    from polyeps.data.sources import places

    where = places(data_dir)
    entries = [_entry(name) for name in names] if names else list(CATALOGUE.values())
    results = []
    with _talk().status("Reading files…") as status:
        for entry in entries:
            status.update(f"Reading {entry.name}…")
            results.append(_checked(entry, where))
    if as_json:
        print_json(results)
    else:
        from rich.table import Table

        table = Table("data set", "state", "where, or how to get it")
        for result in results:
            table.add_row(result["name"], result["state"], result["detail"])
        _print_table(table)
    damaged = [result for result in results if result["state"] == "damaged"]
    missing = [result for result in results if names and result["state"] == "missing"]
    for result in damaged + missing:
        remark(f"{result['name']}: {result['detail']}")
    if damaged or missing:
        raise typer.Exit(2)


def _checked(entry: Entry, where: Any) -> dict[str, str]:
    from polyeps.data.sources import how_to_get, obtain, read, state

    now = state(entry, where)
    if now == "built in":
        return {"name": entry.name, "state": now, "detail": "no file needed"}
    if now == "missing":
        return {"name": entry.name, "state": now, "detail": how_to_get(entry, where)}
    found = obtain(entry, where, None)
    try:
        read(found)
    except DataError as e:
        return {"name": entry.name, "state": "damaged", "detail": str(e)}
    folders = sorted({str(copy.path.parent) for copy in found})
    return {"name": entry.name, "state": "verified", "detail": ", ".join(folders)}


@app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(help="Data sets to download.")],
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Download into this folder, not the user's cache.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download data sets from their official places; what is already here is left alone."""
    from polyeps.data.sources import Places, obtain, places, read

    found: dict[str, list[str]] = {}
    for entry in [_entry(name) for name in names]:
        where = places(data_dir)
        if data_dir is not None:
            where = Places(where.folders, data_dir)
        copies = obtain(entry, where, _download_with_progress)
        read(copies)
        found[entry.name] = [str(copy.path) for copy in copies]
    if as_json:
        print_json(found)
        return
    for name, paths in found.items():
        typer.echo(f"{name}: {', '.join(dict.fromkeys(paths)) or 'built in, nothing to fetch'}")


def _download_with_progress(file: DataFile, folder: Path) -> Path:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from polyeps.data.downloads import download

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_talk()) as bar:
        task = bar.add_task(file.url.split("/")[-1], total=None)
        return download(file, folder, lambda done, total: bar.update(task, completed=done, total=total))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A data set, or a file or folder of your own.")],
    partition: Annotated[
        str | None,
        typer.Option(help="iid, shards, labels, dirichlet, one-label, by-writer or as-in-file."),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything drawn at random.")] = None,
    size: Annotated[int | None, typer.Option(help="iid: records per client; the rest is left over.")] = None,
    shards: Annotated[int, typer.Option(help="shards: shards per client.")] = 2,
    labels: Annotated[int, typer.Option(help="labels: labels per client.")] = 2,
    alpha: Annotated[float, typer.Option(help="dirichlet: lower is more uneven.")] = 0.5,
    c1: Annotated[float, typer.Option(help="syn-l, syn-h: FedSel's C1.")] = 0.01,
    c2: Annotated[float, typer.Option(help="syn-l, syn-h: FedSel's C2.")] = 0.9,
    label_column: Annotated[str, typer.Option(help="Your own data: the label column.")] = "label",
    client_column: Annotated[str, typer.Option(help="Your own data: the client column.")] = "client",
    rows: Annotated[int, typer.Option(help="Draw at most this many clients.")] = 40,
    data_dir: DataDir = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never download.")] = False,
    as_json: Json = False,
) -> None:
    """Describe a data set, or files of your own, and draw how clients share it (clients x labels)."""
    import numpy as np

    from polyeps.cli.data_drawing import description, draw_partition, facts_table
    from polyeps.data.partition import divide

    generator = None if seed is None else np.random.default_rng(_checked_seed(seed))
    own = {"label": label_column, "client": client_column}
    with _talk().status(f"Reading {name}…"):
        dataset = _dataset(name, data_dir, offline, generator, (c1, c2), own)
    divided = None
    if partition is not None:
        divided = divide(
            dataset,
            partition,
            clients=clients,
            generator=generator,
            size=size,
            shards_per_client=shards,
            labels_per_client=labels,
            alpha=alpha,
        )
    if as_json:
        print_json(description(dataset, divided))
        return
    _print_table(facts_table(dataset))
    if divided is not None:
        table, summary = draw_partition(dataset, divided, rows)
        _print_table(table)
        typer.echo(summary)


def _checked_seed(seed: int) -> int:
    if seed < 0:
        raise InputError(f"a seed must be 0 or more, not {seed}")
    return seed


def _dataset(
    name: str, data_dir: Path | None, offline: bool, generator: Any, constants: tuple[float, float], own: Any
) -> Dataset:
    from polyeps.data.catalogue import CATALOGUE

    if name not in CATALOGUE and Path(name).exists():
        from polyeps.data.own_files import load_own

        return load_own(Path(name), **own)
    _entry(name)
    if name.startswith("syn-"):
        from polyeps.data.synthetic import synthetic

        if generator is None:
            raise InputError(f"{name} is made at random: give a --seed")
        return synthetic(name, shrink=constants[0], threshold=constants[1], generator=generator)
    from polyeps.data.datasets import load

    return load(name, data_dir=data_dir, download=None if offline else _download_with_progress)
