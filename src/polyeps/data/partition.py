"""Ways to divide a data set's records among clients; each is reproducible from the generator it is given.

A row is dealt to at most one client, and to exactly one unless a client size is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Records
from polyeps.data.datasets import Dataset
from polyeps.errors import InputError

Rows = NDArray[np.int64]
KINDS = ("iid", "shards", "labels", "dirichlet", "one-label", "by-writer", "as-in-file")
DIRICHLET_DRAWS = 100  # before we say that some client will stay empty


@dataclass(frozen=True, eq=False)
class Partition:
    """Which rows each client holds: client i has rows[offsets[i]:offsets[i + 1]]."""

    ids: tuple[str, ...]
    rows: Rows  # (R,)
    offsets: Rows  # (n + 1,)

    @property
    def sizes(self) -> Rows:
        return np.diff(self.offsets)

    def counts(self, labels: Rows, classes: int) -> Rows:
        """How many records of each label each client holds."""  # (n, classes)
        clients = len(self.ids)
        client = np.repeat(np.arange(clients), self.sizes)
        flat = np.bincount(client * classes + labels[self.rows], minlength=clients * classes)
        return flat.reshape(clients, classes)


def to_records(dataset: Dataset, partition: Partition) -> Records:
    """The clients' records as one block of tensors."""
    import torch  # takes seconds to import; drawing a partition does without

    return Records(
        torch.from_numpy(dataset.features[partition.rows]),
        torch.from_numpy(dataset.labels[partition.rows]),
        torch.from_numpy(partition.offsets),
    )


def _assembled(pieces: Sequence[Rows], remedy: str, ids: Sequence[str] = ()) -> Partition:
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
            f"client {records} would have no records, as {records} cannot go round {clients} clients: "
            f"ask for at most {records} clients"
        )


def _rows_by_label(labels: Rows, generator: np.random.Generator) -> list[Rows]:
    """The rows of each label that occurs, each in random order."""
    order = generator.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    ends = np.flatnonzero(np.diff(labels[order])) + 1
    return np.split(order, ends)


def iid(labels: Rows, *, clients: int, generator: np.random.Generator, size: int | None = None) -> Partition:
    """One random permutation cut into equal parts, or into clients of `size` records and a rest."""
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
    if size is None:
        return _assembled(np.array_split(order, clients), "ask for fewer clients")
    return _assembled(np.split(order[: clients * size], clients), "ask for fewer clients")


def label_shards(labels: Rows, *, clients: int, shards_per_client: int, generator: np.random.Generator) -> Partition:
    """Rows sorted by label and cut into equal shards; every client is dealt the same number of them."""
    if shards_per_client < 1:
        raise InputError(f"a client needs at least one shard, not {shards_per_client}")
    _check_clients(clients * shards_per_client, len(labels))
    ordered = np.concatenate(_rows_by_label(labels, generator))
    shards = np.array_split(ordered, clients * shards_per_client)
    dealt = generator.permutation(len(shards)).reshape(clients, shards_per_client)
    return _assembled([np.concatenate([shards[i] for i in hand]) for hand in dealt], "ask for fewer clients")


def few_labels(labels: Rows, *, clients: int, count: int, generator: np.random.Generator) -> Partition:
    """`count` labels for every client, each label shared by as equal a number of clients as can be."""
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
    hands: list[list[Rows]] = [[] for _ in range(clients)]
    for rows, sharers in zip(by_label, holders, strict=True):
        if len(rows) < len(sharers):
            raise InputError(
                f"client {sharers[len(rows)]} would miss one of its {count} labels, which has {len(rows)} "
                f"records for {len(sharers)} clients: ask for fewer clients or labels per client"
            )
        for client, piece in zip(sharers, np.array_split(rows, len(sharers)), strict=True):
            hands[client].append(piece)
    return _assembled([np.concatenate(hand) for hand in hands], "ask for fewer clients")


def dirichlet(
    labels: Rows, *, clients: int, alpha: float, generator: np.random.Generator, smallest: int = 1
) -> Partition:
    """Each label's rows divided by shares drawn from Dir(alpha), drawn again while a client is too small."""
    _check_clients(clients, len(labels))
    if not 0 < alpha < np.inf:
        raise InputError(f"alpha must be a finite number above 0, not {alpha}")
    if not 1 <= smallest <= len(labels) // clients:
        raise InputError(
            f"every client can have at least 1 to {len(labels) // clients} records, not {smallest}: "
            "ask for fewer clients or a lower minimum"
        )
    by_label = _rows_by_label(labels, generator)
    sizes = np.array([len(rows) for rows in by_label])
    for _ in range(DIRICHLET_DRAWS):
        shares = generator.dirichlet(np.full(clients, alpha), len(by_label))  # (labels, n)
        ends = np.rint(np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
        dealt = np.diff(ends, axis=1, prepend=0, append=sizes[:, None]).sum(axis=0)
        if dealt.min() >= smallest:
            parts = [np.split(rows, cuts) for rows, cuts in zip(by_label, ends, strict=True)]
            return _assembled([np.concatenate(hand) for hand in zip(*parts, strict=True)], "raise alpha")
    raise InputError(
        f"client {int(dealt.argmin())} still had {int(dealt.min())} records, fewer than {smallest}, after "
        f"{DIRICHLET_DRAWS} draws: raise alpha above {alpha}, or ask for fewer clients than {clients}"
    )


def one_label(labels: Rows, *, clients: int, generator: np.random.Generator) -> Partition:
    """One label for every client, with client sizes as equal as whole records allow."""
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


def by_group(dataset: Dataset) -> Partition:
    """The clients the data came with: the writers of mnist-writers, the clients of your own files."""
    if dataset.groups is None:
        raise InputError(
            f"{dataset.name} does not say whose each record is: use mnist-writers, your own files, or another partition"
        )
    order = np.argsort(dataset.groups, kind="stable")
    sizes = np.bincount(dataset.groups, minlength=len(dataset.group_names))
    pieces = np.split(order, np.cumsum(sizes)[:-1])
    return _assembled(pieces, "remove the client or give it records", dataset.group_names)


def apart(partition: Partition, share: float, generator: np.random.Generator) -> tuple[Partition, Partition]:
    """Every client's records in two: those it keeps, and a random share of them, one at least, that it sets apart."""
    counts = np.maximum(1, np.rint(share * partition.sizes)).astype(np.int64)
    if short := np.flatnonzero(counts >= partition.sizes).tolist():
        client, size = partition.ids[short[0]], partition.sizes[short[0]]
        raise InputError(
            f"client {client!r} has {size} records, which a share of {share:g} set apart uses up: "
            "make the share smaller or the clients fewer"
        )
    owner = np.repeat(np.arange(len(partition.ids)), partition.sizes)
    order = np.lexsort((generator.random(len(owner)), owner))  # each client's records in random order
    set_apart = np.arange(len(owner)) - partition.offsets[owner] < counts[owner]
    kept, taken = order[~set_apart], order[set_apart]
    edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return (
        Partition(partition.ids, partition.rows[kept], partition.offsets - edges),
        Partition(partition.ids, partition.rows[taken], edges),
    )


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
    """The partition of a name, as configuration files and the command line say it."""
    if kind not in KINDS:
        raise InputError(f"there is no partition {kind!r}: choose one of {', '.join(KINDS)}")
    if kind in ("by-writer", "as-in-file"):
        return by_group(dataset)
    if clients is None or generator is None:
        raise InputError(f"the partition {kind} is drawn at random: say how many clients, and give a seed")
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
