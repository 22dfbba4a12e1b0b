"""Tables of the page: columns that are the same in every row become a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyeps.report.formatting import bound, byte_size, counted, share, short, three_digits
from polyeps.report.strength import strength
from polyeps.report.tables import ClientSummary, JobSummary

_NOTHING = "–"


@dataclass(frozen=True)
class PageRow:
    """One row: its cells, and the classes by which it is coloured and found."""

    cells: tuple[str, ...]
    look: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table without the columns that say nothing."""

    columns: tuple[str, ...]
    rows: tuple[PageRow, ...]
    same: str = ""  # what all rows share, in a sentence


def condensed(columns: Sequence[str], rows: Iterable[PageRow], kept: int = 1) -> PageTable:
    """Leave out columns that are the same in every row, after the first `kept` ones, and say what they hold.

    >>> print(condensed(["client", "records", "δ"], [PageRow(("a", "5", "1e-5")), PageRow(("b", "7", "1e-5"))]).same)
    The same in every row: δ 1e-5.
    """
    rows = tuple(rows)
    cells = [{row.cells[place] for row in rows} for place in range(len(columns))]
    alike = [place for place in range(kept, len(columns)) if len(rows) > 1 and len(cells[place]) == 1]
    empty = [place for place in range(kept, len(columns)) if cells[place] <= {_NOTHING, ""}]
    said = [f"{columns[place]} {next(iter(cells[place]))}" for place in alike if place not in empty]
    left = [place for place in range(len(columns)) if place not in {*alike, *empty}]
    return PageTable(
        tuple(columns[place] for place in left),
        tuple(PageRow(tuple(row.cells[place] for place in left), row.look) for row in rows),
        f"The same in every row: {', '.join(said)}." if said else "",
    )


def client_table(rows: Sequence[ClientSummary], job: JobSummary) -> PageTable:
    """Return the clients of a job: budget, spending and what it means, noise, rounds and bytes."""
    units = f"{job.facts.get('person') or 'record'}s"
    columns = [
        "client", "effective budget ε", "own ε", "δ", "spent ε", "of budget", "guarantee", units, "noise multiplier",
        "rounds joined", "declined", "left after round", "sent", "received",
    ]  # fmt: skip
    return condensed(columns, [_client_row(row, deployed=job.deployed) for row in rows])


def _client_row(row: ClientSummary, *, deployed: bool) -> PageRow:
    known = row.spent if row.spent is not None else row.epsilon
    undisclosed = deployed and row.epsilon is None
    word = "" if undisclosed else strength(known)
    left = row.left_after is not None
    look = " ".join(part for part in (word, "left" if left else "", "exceeded" if row.exceeded else "") if part)
    return PageRow(
        (
            row.client,
            "not disclosed" if undisclosed else three_digits(row.epsilon),
            "not disclosed" if undisclosed else three_digits(row.own_epsilon),
            short(row.delta),
            bound(row.spent),
            share(row.ratio),
            word or _NOTHING,
            counted(row.records),
            three_digits(row.noise_multiplier),
            counted(row.joined),
            counted(row.declined),
            str(row.left_after) if left else _NOTHING,
            byte_size(row.sent),
            byte_size(row.received),
        ),
        look,
    )
