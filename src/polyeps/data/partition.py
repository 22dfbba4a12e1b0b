"""Divides a data set's records among clients; each partition is reproducible from the generator it is given.

A record belongs to at most one client, and to exactly one unless a client size is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Records
from polyeps.data.dataset import Dataset, LabelArray
from polyeps.errors import InputError, suggest

Indices = NDArray[np.int64]
BY_OWNER = ("by-writer", "by-column", "as-in-file")  # the data name their clients
KINDS = ("iid", "shards", "labels", "dirichlet", "one-label", *BY_OWNER)
_DIRICHLET_DRAWS = 100  # before the partition is refused
_PADDED = 16 << 30  # bytes of persons' records, padded for a device
_NO_RECORD = -1  # the label of padding, as in `engine.units`


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of every client: client i holds rows[offsets[i]:offsets[i + 1]]."""

    ids: tuple[str, ...]
    rows: Indices  # (R,)
    offsets: Indices  # (n + 1,)

    @property
    def sizes(self) -> Indices:
        return np.diff(self.offsets)

    def counts(self, labels: LabelArray, classes: int) -> Indices:
        """Count each client's records of each label, (n, classes)."""
        clients = len(self.ids)
        client = np.repeat(np.arange(clients), self.sizes)
        flat = np.bincount(client * classes + labels[self.rows], minlength=clients * classes)
        return flat.reshape(clients, classes)


class Persons(NamedTuple):
    """The persons of every client: client i has persons offsets[i] up to offsets[i + 1].

    Person p holds rows[edges[p]:edges[p + 1]], in the order of the data.
    """

    rows: Indices  # (R,)
    edges: Indices  # (P + 1,)
    offsets: Indices  # (n + 1,)


def persons_of(dataset: Dataset, partition: Partition) -> Persons:
    """Return the persons of every client."""
    assert dataset.persons is not None
    client, person = np.repeat(np.arange(len(partition.ids)), partition.sizes), dataset.persons[partition.rows]
    order = np.lexsort((partition.rows, person, client))
    client, person = client[order], person[order]
    first = np.flatnonzero(np.append(True, (np.diff(client) != 0) | (np.diff(person) != 0))[: len(order)])
    counts = np.bincount(client[first], minlength=len(partition.ids))
    return Persons(partition.rows[order], np.append(first, len(order)), np.append(0, np.cumsum(counts)))


def unit_sizes(dataset: Dataset, partition: Partition) -> Indices:
    """Return the number of each client's persons or, where records are protected one by one, of its records."""
    return partition.sizes if dataset.persons is None else np.diff(persons_of(dataset, partition).offsets)


def single_records(dataset: Dataset, partition: Partition, device: Any = "cpu") -> Records:
    """Return the clients' records as one block of tensors, each record by itself."""
    import torch  # takes seconds to import; drawing a partition does not need it

    return Records(
        torch.from_numpy(dataset.features[partition.rows]).to(device),
        torch.from_numpy(dataset.labels[partition.rows]).to(device),
        torch.from_numpy(partition.offsets),
    )


def to_records(dataset: Dataset, partition: Partition, device: Any = "cpu") -> Records:
    """Return the clients' records as one block of tensors; where persons are the unit, by person.

    A device needs persons of one shape, so there they are padded to the one with most records.
    """
    import torch

    if dataset.persons is None:
        return single_records(dataset, partition, device)
    found = persons_of(dataset, partition)
    features, labels = torch.from_numpy(dataset.features[found.rows]), torch.from_numpy(dataset.labels[found.rows])
    offsets, edges = torch.from_numpy(found.offsets), torch.from_numpy(found.edges)
    if torch.device(device).type == "cpu":
        return Records(features, labels, offsets, edges.unfold(0, 2, 1))
    lengths = edges.diff()
    most = int(lengths.max())
    size = len(lengths) * most * features[:1].nbytes
    if size > _PADDED:
        raise InputError(
            f"{dataset.name}: {len(lengths)} {dataset.person or 'person'}s padded to {most} records, the most of one, "
            f"take {size >> 30} GiB; run it without a device, where they need no padding"
        )
    places = torch.arange(most)
    real = places < lengths[:, None]  # (P, L)
    rows = edges[:-1, None] + torch.where(real, places, 0)
    padding = ~real.reshape(*real.shape, *(1,) * (labels.ndim - 1))
    mark = float("nan") if labels.is_floating_point() else _NO_RECORD
    shown = labels[rows].masked_fill_(padding, mark)
    return Records(features[rows].to(device), shown.to(device), offsets, padded=True)


def _assembled(pieces: Sequence[Indices], remedy: str, ids: Sequence[str] = ()) -> Partition:
    names = tuple(ids) or tuple(str(i) for i in range(len(pieces)))
    sizes = [len(piece) for piece in pieces]
    if 0 in sizes:
        raise InputError(f"client {names[sizes.index(0)]} would have no records: {remedy}")
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Partition(names, np.concatenate(pieces).astype(np.int64), offsets)


def _check_clients(clients: int, records: int) -> None:
    if clients < 1:
        raise InputError(f"a partition needs at least one client, not {clients}")
    if clients > records:
        raise InputError(
            f"client {records} would have no records, as {records} records do not suffice for {clients} clients: "
            f"ask for at most {records} clients"
        )


def _rows_by_label(labels: LabelArray, generator: np.random.Generator) -> list[Indices]:
    """Return the rows of each label that occurs, each in random order."""
    order = generator.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    ends = np.flatnonzero(np.diff(labels[order])) + 1
    return np.split(order, ends)


def iid(labels: LabelArray, *, clients: int, generator: np.random.Generator, size: int | None = None) -> Partition:
    """Cut a random permutation into equal parts, or into clients of `size` records and a rest."""
    if size is not None and size < 1:
        raise InputError(f"a client size must be at least 1, not {size}")
    if size is not None and clients * size > len(labels):
        short = len(labels) // size
        raise InputError(
            f"client {short} would have fewer than {size} records, as there are {len(labels)}: "
            f"ask for at most {short} clients"
            + (f" or a size of at most {len(labels) // clients}" if clients <= len(labels) else "")
        )
    _check_clients(clients, len(labels))
    order = generator.permutation(len(labels))
    dealt = order if size is None else order[: clients * size]
    return _assembled(np.array_split(dealt, clients), "ask for fewer clients")


def label_shards(
    labels: LabelArray, *, clients: int, shards_per_client: int, generator: np.random.Generator
) -> Partition:
    """Sort rows by label, cut them into equal shards and deal every client the same number of shards."""
    if shards_per_client < 1:
        raise InputError(f"a client needs at least one shard, not {shards_per_client}")
    _check_clients(clients * shards_per_client, len(labels))
    ordered = np.concatenate(_rows_by_label(labels, generator))
    shards = np.array_split(ordered, clients * shards_per_client)
    dealt = generator.permutation(len(shards)).reshape(clients, shards_per_client)
    return _assembled([np.concatenate([shards[i] for i in hand]) for hand in dealt], "ask for fewer clients")


def few_labels(labels: LabelArray, *, clients: int, count: int, generator: np.random.Generator) -> Partition:
    """Give every client `count` labels; clients share each label as equally as possible."""
    _check_clients(clients, len(labels))
    by_label = _rows_by_label(labels, generator)
    if not 1 <= count <= len(by_label):
        raise InputError(f"a client can hold 1 to {len(by_label)} labels, the number there are, not {count}")
    if clients * count < len(by_label):
        raise InputError(
            f"{clients} clients of {count} labels cannot hold all {len(by_label)} labels: ask for at least "
            f"{-(-len(by_label) // count)} clients"
        )
    holders: list[list[int]] = [[] for _ in by_label]
    times = np.zeros(len(by_label))
    for client in range(clients):
        # The labels held least so far, ties at random, so that no label is left out.
        chosen = np.argsort(times + generator.random(len(times)))[:count]
        times[chosen] += 1
        for label in chosen:
            holders[label].append(client)
    hands: list[list[Indices]] = [[] for _ in range(clients)]
    for rows, sharers in zip(by_label, holders, strict=True):
        if len(rows) < len(sharers):
            raise InputError(
                f"client {sharers[len(rows)]} would miss one of its {count} labels, which has {len(rows)} "
                f"records for {len(sharers)} clients: ask for fewer clients or labels per client"
            )
        for client, piece in zip(sharers, np.array_split(rows, len(sharers)), strict=True):
            hands[client].append(piece)
    return _assembled([np.concatenate(hand) for hand in hands], "ask for fewer clients")


def dirichlet(labels: LabelArray, *, clients: int, alpha: float, generator: np.random.Generator) -> Partition:
    """Divide each label's rows by shares drawn from Dir(alpha); draw again while a client has no records."""
    _check_clients(clients, len(labels))
    if not 0 < alpha < np.inf:
        raise InputError(f"alpha must be a finite number above 0, not {alpha}")
    by_label = _rows_by_label(labels, generator)
    sizes = np.array([len(rows) for rows in by_label])
    for _ in range(_DIRICHLET_DRAWS):
        shares = generator.dirichlet(np.full(clients, alpha), len(by_label))  # (labels, n)
        ends = np.rint(np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
        dealt = np.diff(ends, axis=1, prepend=0, append=sizes[:, None]).sum(axis=0)
        if dealt.min() > 0:
            parts = [np.split(rows, cuts) for rows, cuts in zip(by_label, ends, strict=True)]
            return _assembled([np.concatenate(hand) for hand in zip(*parts, strict=True)], "raise alpha")
    raise InputError(
        f"client {int(dealt.argmin())} still had 0 records after {_DIRICHLET_DRAWS} draws: "
        f"raise alpha above {alpha}, or ask for fewer clients than {clients}"
    )


def one_label(labels: LabelArray, *, clients: int, generator: np.random.Generator) -> Partition:
    """Give every client one label, with client sizes as equal as possible."""
    _check_clients(clients, len(labels))
    by_label = _rows_by_label(labels, generator)
    if clients < len(by_label):
        raise InputError(f"{clients} clients of one label cannot hold all {len(by_label)} labels: ask for more clients")
    sharers = np.ones(len(by_label), dtype=np.int64)
    sizes = np.array([len(rows) for rows in by_label])
    for _ in range(clients - len(by_label)):
        sharers[np.argmax(sizes / sharers)] += 1  # the label whose clients hold most takes the next client
    pieces = [piece for rows, n in zip(by_label, sharers, strict=True) for piece in np.array_split(rows, n)]
    shuffled = [pieces[i] for i in generator.permutation(clients)]
    return _assembled(shuffled, "ask for fewer clients")


def by_owner(dataset: Dataset) -> Partition:
    """Return the clients that the data name: the writers of mnist-writers, the clients of your own files."""
    if dataset.groups is None:
        raise InputError(
            f"{dataset.name} does not name the owners of its records: use mnist-writers, your own files, "
            "or another partition"
        )
    order = np.argsort(dataset.groups, kind="stable")
    sizes = np.bincount(dataset.groups, minlength=len(dataset.group_names))
    pieces = np.split(order, np.cumsum(sizes)[:-1])
    return _assembled(pieces, "remove the client or give it records", dataset.group_names)


def set_apart(
    partition: Partition,
    share: float,
    generator: np.random.Generator,
    dataset: Dataset | None = None,
    *,
    unit: str = "record",
) -> tuple[Partition, Partition]:
    """Split every client's records in two: those it trains on, and a random share, at least one, set apart.

    Where the data set names persons, all records of a person are on the same side.
    """
    if dataset is not None and dataset.persons is not None:
        found = persons_of(dataset, partition)
        persons = Partition(partition.ids, np.arange(len(found.edges) - 1), found.offsets)
        kept, apart = set_apart(persons, share, generator, unit=dataset.person or "person")
        return _rows_of(found, kept), _rows_of(found, apart)
    counts = np.maximum(1, np.rint(share * partition.sizes)).astype(np.int64)
    if short := np.flatnonzero(counts >= partition.sizes).tolist():
        client, size = partition.ids[short[0]], partition.sizes[short[0]]
        raise InputError(
            f"client {client!r} has {size} {unit}s, which a share of {share:g} set apart uses up: "
            "make the share smaller or the clients fewer"
        )
    owner = np.repeat(np.arange(len(partition.ids)), partition.sizes)
    order = np.lexsort((generator.random(len(owner)), owner))  # each client's records in random order
    first = np.arange(len(owner)) - partition.offsets[owner] < counts[owner]
    kept, taken = order[~first], order[first]
    edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return (
        Partition(partition.ids, partition.rows[kept], partition.offsets - edges),
        Partition(partition.ids, partition.rows[taken], edges),
    )


def _rows_of(found: Persons, chosen: Partition) -> Partition:
    """Return the partition of the records of some persons, which are the rows of `chosen`."""
    firsts, lengths = found.edges[chosen.rows], np.diff(found.edges)[chosen.rows]
    ends = np.append(0, np.cumsum(lengths))
    places = np.arange(ends[-1]) + np.repeat(firsts - ends[:-1], lengths)
    return Partition(chosen.ids, found.rows[places], ends[chosen.offsets])


def divide(
    dataset: Dataset,
    kind: str,
    *,
    clients: int | None,
    generator: np.random.Generator | None,
    size: int | None = None,
    shards_per_client: int = 2,
    labels_per_client: int = 2,
    alpha: float = 0.5,
) -> Partition:
    """Return the partition of a kind that configuration files and the command line name."""
    if kind not in KINDS:
        raise InputError(f"there is no partition {kind!r}: {suggest(kind, KINDS)}")
    if kind in BY_OWNER:
        return by_owner(dataset)
    if dataset.persons is not None:
        raise InputError(
            f"the partition {kind} would divide the records of a {dataset.person or 'person'} among clients: use "
            "as-in-file, or leave out data.unit"
        )
    if clients is None or generator is None:
        raise InputError(f"the partition {kind} is drawn at random: say how many clients, and give a seed")
    if kind != "iid" and dataset.target != "class":
        raise InputError(f"the partition {kind} divides records by class, but {dataset.name} has none: use iid")
    labels = dataset.labels
    match kind:
        case "iid":
            return iid(labels, clients=clients, generator=generator, size=size)
        case "shards":
            return label_shards(labels, clients=clients, shards_per_client=shards_per_client, generator=generator)
        case "labels":
            return few_labels(labels, clients=clients, count=labels_per_client, generator=generator)
        case "dirichlet":
            return dirichlet(labels, clients=clients, alpha=alpha, generator=generator)
        case _:
            return one_label(labels, clients=clients, generator=generator)
