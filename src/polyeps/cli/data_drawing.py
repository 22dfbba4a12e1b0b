"""Describes a data set and draws a partition of it, clients by labels, for the terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from polyeps.data.dataset import Dataset
from polyeps.data.partition import Partition
from polyeps.data.public_catalogue import PUBLIC_DATASETS, PublicDataset


def catalogue_facts(published: PublicDataset) -> dict[str, Any]:
    """Return the facts about a public data set that are known without reading it."""
    names = ("name", "title", "records", "test_records", "shape", "classes", "licence", "origin", "note")
    return {name: list(value) if isinstance(value := getattr(published, name), tuple) else value for name in names}


def description(dataset: Dataset, partition: Partition | None) -> dict[str, Any]:
    """Describe a data set and its partition, ready for JSON."""
    n = len(dataset.classes)
    found: dict[str, Any] = catalogue_facts(PUBLIC_DATASETS[dataset.name]) if dataset.name in PUBLIC_DATASETS else {}
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


def facts_table(dataset: Dataset) -> Table:
    """Return the description of a data set as a table, one fact per line."""
    found = description(dataset, None)
    table = Table(show_header=False)
    shown = found | {
        "records": f"{found['records']:,}",
        "test_records": f"{found['test_records']:,}",
        "shape": " x ".join(str(size) for size in found["shape"]),
        "labels": ", ".join(
            f"{name}: {count:,}" for name, count in zip(found["classes"], found["label_counts"], strict=True)
        ),
    }
    for key in ("name", "title", "records", "test_records", "shape", "labels", "licence", "origin", "note"):
        if shown.get(key):
            table.add_row(key.replace("_", " "), escape(shown[key]))
    return table


def draw_partition(dataset: Dataset, partition: Partition, rows: int) -> tuple[Table, str]:
    """Return a table of label counts for at most `rows` clients, and one line about all clients."""
    counts = partition.counts(dataset.labels, len(dataset.classes))
    top = int(counts.max())
    table = Table(
        "client",
        "records",
        *(escape(name) for name in dataset.classes),
        caption="bars: share of the largest cell",
    )
    for client, size, row in zip(partition.ids[:rows], partition.sizes, counts, strict=False):
        table.add_row(escape(client), f"{size:,}", *(_bar(int(count), top) for count in row))
    sizes, clients = partition.sizes, len(partition.ids)
    drawn = f" ({rows} drawn)" if clients > rows else ""
    return table, (
        f"{clients} clients{drawn}, {sizes.sum():,} of {len(dataset.labels):,} records, {sizes.min():,} to "
        f"{sizes.max():,} each, {(counts > 0).sum(axis=1).mean():.1f} labels a client on average"
    )


def _bar(count: int, top: int) -> str:
    if count == 0:
        return "·"
    return "▁▂▃▄▅▆▇█"[min(7, 8 * count // top)] + f" {count}"
