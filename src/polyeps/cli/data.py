"""`polyeps data`: list, check, fetch and show data sets.

numpy is imported inside the commands, so that `polyeps --help` stays quick.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyeps.cli.describe import describe
from polyeps.cli.output import Json, print_facts, print_json, print_table, quiet, remark
from polyeps.errors import DataError, InputError, suggest

if TYPE_CHECKING:
    from rich.console import Console

    from polyeps.data.dataset import Dataset
    from polyeps.data.partition import Partition
    from polyeps.data.public_catalogue import DataFile, PublicDataset

data_app = typer.Typer(help="List, check, download and describe data sets.", no_args_is_help=True)
data_app.command("describe")(describe)

DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help="Look in this folder first.")]


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, quiet=quiet())


def _published(name: str) -> PublicDataset:
    from polyeps.data.public_catalogue import PUBLIC_DATASETS

    if name not in PUBLIC_DATASETS:
        raise InputError(f"there is no data set {name!r}: {suggest(name, PUBLIC_DATASETS)}")
    return PUBLIC_DATASETS[name]


@data_app.command("list")
def list_datasets(data_dir: DataDirOption = None, as_json: Json = False) -> None:
    """List the public data sets and say which are on this machine."""
    from polyeps.data.public_catalogue import PUBLIC_DATASETS
    from polyeps.data.public_files import availability, how_to_get, places

    where = places(data_dir)
    states = {name: availability(published, where) for name, published in PUBLIC_DATASETS.items()}
    missing = {name: how_to_get(PUBLIC_DATASETS[name], where) for name in states if states[name] == "missing"}
    if as_json:
        print_json(
            [
                _catalogue_facts(published) | {"state": states[name], "how_to_get": missing.get(name)}
                for name, published in PUBLIC_DATASETS.items()
            ]
        )
        return
    rows = [
        [
            known.name,
            f"{known.records:,}",
            f"{known.test_records:,}" if known.test_records else "-",
            " x ".join(map(str, known.shape)),
            len(known.classes),
            states[known.name],
            known.title,
        ]
        for known in PUBLIC_DATASETS.values()
    ]
    print_table(["data set", "records", "test", "shape", "labels", "state", "title"], rows)
    if missing:
        remark(f"get the missing ones with `polyeps data fetch {' '.join(missing)}`")


@data_app.command("check")
def check_datasets(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; all by default.")] = None,
    data_dir: DataDirOption = None,
    as_json: Json = False,
) -> None:
    """Read the files of data sets and compare their checksums with the published ones."""
    from polyeps.data.public_catalogue import PUBLIC_DATASETS
    from polyeps.data.public_files import places

    where = places(data_dir)
    entries = [_published(name) for name in names] if names else list(PUBLIC_DATASETS.values())
    results = []
    with _stderr().status("Reading files…") as status:
        for published in entries:
            status.update(f"Reading {published.name}…")
            results.append(_checked(published, where))
    if as_json:
        print_json(results)
    else:
        print_table(["data set", "state", "where, or how to get it"], [list(result.values()) for result in results])
    damaged = [result for result in results if result["state"] == "damaged"]
    missing = [result for result in results if names and result["state"] == "missing"]
    for result in damaged + missing:
        remark(f"{result['name']}: {result['detail']}")
    if damaged or missing:
        raise typer.Exit(2)


def _checked(published: PublicDataset, where: Any) -> dict[str, str]:
    from polyeps.data.public_files import availability, how_to_get, obtain, read_files

    now = availability(published, where)
    if now == "built in":
        return {"name": published.name, "state": now, "detail": "no file needed"}
    if now == "missing":
        return {"name": published.name, "state": now, "detail": how_to_get(published, where)}
    found = obtain(published, where, None)
    try:
        read_files(found)
    except DataError as e:
        return {"name": published.name, "state": "damaged", "detail": str(e)}
    folders = sorted({str(copy.path.parent) for copy in found})
    return {"name": published.name, "state": "verified", "detail": ", ".join(folders)}


@data_app.command("fetch")
def fetch_datasets(
    names: Annotated[list[str], typer.Argument(help="Data sets to download.")],
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Download to this folder, not the cache.")] = None,
    as_json: Json = False,
) -> None:
    """Download data sets from their official addresses; files that are already here are kept."""
    from polyeps.data.public_files import Places, obtain, places, read_files

    found: dict[str, list[str]] = {}
    for published in [_published(name) for name in names]:
        where = places(data_dir)
        if data_dir is not None:
            where = Places(where.folders, data_dir)
        copies = obtain(published, where, _download_with_progress)
        read_files(copies)
        found[published.name] = [str(copy.path) for copy in copies]
    if as_json:
        print_json(found)
        return
    for name, paths in found.items():
        print(f"{name}: {', '.join(dict.fromkeys(paths)) or 'built in, nothing to fetch'}")


def _download_with_progress(file: DataFile, folder: Path) -> Path:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from polyeps.data.public_files import download

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_stderr()) as bar:
        task = bar.add_task(file.url.split("/")[-1], total=None)
        return download(file, folder, lambda done, total: bar.update(task, completed=done, total=total))


@data_app.command("show")
def show_dataset(
    name: Annotated[str, typer.Argument(help="A data set, or a file or folder of your own.")],
    partition: Annotated[
        str | None, typer.Option(help="iid, shards, labels, dirichlet, one-label, by-writer or as-in-file.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random draws.")] = None,
    size: Annotated[int | None, typer.Option(help="iid: records per client; the rest is unused.")] = None,
    shards: Annotated[int, typer.Option(help="shards: shards per client.")] = 2,
    labels: Annotated[int, typer.Option(help="labels: labels per client.")] = 2,
    alpha: Annotated[float, typer.Option(help="dirichlet: lower is more uneven.")] = 0.5,
    c1: Annotated[float, typer.Option(help="syn-l, syn-h: FedSel's C1.")] = 0.01,
    c2: Annotated[float, typer.Option(help="syn-l, syn-h: FedSel's C2.")] = 0.9,
    label_column: Annotated[str, typer.Option(help="Your own data: the label column.")] = "label",
    client_column: Annotated[str, typer.Option(help="Your own data: the client column.")] = "client",
    schema: Annotated[Path | None, typer.Option(help="Your own data: a schema file, instead of the columns.")] = None,
    rows: Annotated[int, typer.Option(help="Draw at most this many clients.")] = 40,
    data_dir: DataDirOption = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never download.")] = False,
    as_json: Json = False,
) -> None:
    """Describe a data set, or your own files, and draw its partition (clients x labels)."""
    import numpy as np

    from polyeps.data.partition import divide
    from polyeps.data.schema_files import TableDeclaration, read_schema

    if seed is not None and seed < 0:
        raise InputError(f"--seed is {seed}; it must be 0 or more")
    generator = None if seed is None else np.random.default_rng(seed)
    declared = TableDeclaration(label_column, client_column)
    if schema is not None:
        declared = replace(read_schema(schema), target="class", scale=None)
    with _stderr().status(f"Reading {name}…"):
        dataset = _dataset(name, data_dir, offline, generator, (c1, c2), declared)
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
        print_json(_description(dataset, divided))
        return
    print_facts(dict(_fact_rows(dataset)))
    if divided is not None:
        drawn, summary = _partition_rows(dataset, divided, rows)
        print_table(["client", "records", *dataset.classes], drawn, title="Bars: share of the largest cell")
        print(summary)


def _dataset(
    name: str, data_dir: Path | None, offline: bool, generator: Any, constants: tuple[float, float], declared: Any
) -> Dataset:
    from polyeps.data.own_files import load_own
    from polyeps.data.public_catalogue import PUBLIC_DATASETS
    from polyeps.data.public_loaders import load_dataset
    from polyeps.data.synthetic import synthetic

    if name not in PUBLIC_DATASETS and Path(name).exists():
        return load_own(Path(name), declared)
    _published(name)
    if not name.startswith("syn-"):
        return load_dataset(name, data_dir=data_dir, download=None if offline else _download_with_progress)
    if generator is None:
        raise InputError(f"{name} is made at random: give a --seed")
    return synthetic(name, shrink=constants[0], threshold=constants[1], generator=generator)


def _catalogue_facts(published: PublicDataset) -> dict[str, Any]:
    """Return the facts about a public data set that are known without reading it."""
    names = ("name", "title", "records", "test_records", "shape", "classes", "licence", "origin", "note")
    return {name: list(value) if isinstance(value := getattr(published, name), tuple) else value for name in names}


def _description(dataset: Dataset, partition: Partition | None) -> dict[str, Any]:
    """Describe a data set and its partition, ready for JSON."""
    import numpy as np

    from polyeps.data.public_catalogue import PUBLIC_DATASETS

    n = len(dataset.classes)
    found: dict[str, Any] = _catalogue_facts(PUBLIC_DATASETS[dataset.name]) if dataset.name in PUBLIC_DATASETS else {}
    found |= {
        "name": dataset.name,
        "records": len(dataset.labels),
        "test_records": len(dataset.test_labels),
        "shape": list(dataset.features.shape[1:]),
        "classes": list(dataset.classes),
        "label_counts": np.bincount(dataset.labels, minlength=n).tolist(),
        "test_label_counts": np.bincount(dataset.test_labels, minlength=n).tolist(),
    }
    if partition is not None:
        found["partition"] = {
            "clients": list(partition.ids),
            "sizes": partition.sizes.tolist(),
            "label_counts": partition.counts(dataset.labels, n).tolist(),
        }
    return found


def _fact_rows(dataset: Dataset) -> list[tuple[str, str]]:
    """Describe a data set, one fact per row."""
    found = _description(dataset, None)
    counts = zip(found["classes"], found["label_counts"], strict=True)
    shown = found | {
        "records": f"{found['records']:,}",
        "test_records": f"{found['test_records']:,}",
        "shape": " x ".join(str(size) for size in found["shape"]),
        "labels": ", ".join(f"{name}: {count:,}" for name, count in counts),
    }
    facts = ("name", "title", "records", "test_records", "shape", "labels", "licence", "origin", "note")
    return [(fact.replace("_", " "), shown[fact]) for fact in facts if shown.get(fact)]


def _partition_rows(dataset: Dataset, partition: Partition, most: int) -> tuple[list[list[str]], str]:
    """Return a row of label counts with bars for at most `most` clients, and one line about all clients."""
    counts = partition.counts(dataset.labels, len(dataset.classes))
    top = int(counts.max())
    rows = [
        [client, f"{size:,}", *(_bar(int(count), top) for count in row)]
        for client, size, row in zip(partition.ids[:most], partition.sizes, counts, strict=False)
    ]
    sizes, clients = partition.sizes, len(partition.ids)
    drawn = f" ({most} drawn)" if clients > most else ""
    return rows, (
        f"{clients} clients{drawn}, {sizes.sum():,} of {len(dataset.labels):,} records, {sizes.min():,} to "
        f"{sizes.max():,} each, {(counts > 0).sum(axis=1).mean():.1f} labels a client on average"
    )


def _bar(count: int, top: int) -> str:
    if count == 0:
        return "·"
    return "▁▂▃▄▅▆▇█"[min(7, 8 * count // top)] + f" {count}"
