"""Describes a data set and its partition, clients by labels, for JSON and for tables."""

from __future__ import annotations

from typing import Any

import numpy as np

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


def fact_rows(dataset: Dataset) -> list[tuple[str, str]]:
    """Describe a data set, one fact per row."""
    found = description(dataset, None)
    counts = zip(found["classes"], found["label_counts"], strict=True)
    shown = found | {
        "records": f"{found['records']:,}",
        "test_records": f"{found['test_records']:,}",
        "shape": " x ".join(str(size) for size in found["shape"]),
        "labels": ", ".join(f"{name}: {count:,}" for name, count in counts),
    }
    facts = ("name", "title", "records", "test_records", "shape", "labels", "licence", "origin", "note")
    return [(fact.replace("_", " "), shown[fact]) for fact in facts if shown.get(fact)]


def partition_rows(dataset: Dataset, partition: Partition, most: int) -> tuple[list[list[str]], str]:
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
