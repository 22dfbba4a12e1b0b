"""Describes a data set and draws a partition of it, clients by labels, for the terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from polyeps.data.catalogue import CATALOGUE, Entry
from polyeps.data.datasets import Dataset
from polyeps.data.partition import Partition


def facts(entry: Entry) -> dict[str, Any]:
    """What is known of a public data set without opening it."""
    return {
        "name": entry.name,
        "title": entry.title,
        "records": entry.records,
        "test_records": entry.test_records,
        "shape": list(entry.shape),
        "classes": list(entry.classes),
        "licence": entry.licence,
        "origin": entry.origin,
        "note": entry.note,
    }


def description(dataset: Dataset, partition: Partition | None) -> dict[str, Any]:
    """What is in a data set, and how clients share it."""
    n = len(dataset.classes)
    found: dict[str, Any] = facts(CATALOGUE[dataset.name]) if dataset.name in CATALOGUE else {}
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
    """The description of a data set, one fact a line."""
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
    """Clients by labels as counts and bars, at most `rows` clients, and one line on all of them."""
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
