"""Tables of the methods: what they reached and spent, how they compare in pairs, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from polyeps.report.comparing import LEAST_SEEDS, MethodPair, Ranking, points
from polyeps.report.formatting import byte_size, counted, reached, share, short
from polyeps.report.page_tables import PageRow, PageTable, condensed
from polyeps.report.tables import MethodSummary

_NAME = Markup('<i class="chip {}"></i>{}<small>{}</small>')


def method_table(shown: Sequence[Mapping[str, Any]]) -> PageTable:
    """Return what each method reached and spent."""
    measure = shown[0]["row"].measure
    metrics = list(dict.fromkeys(name for entry in shown for name in entry["row"].metrics))
    columns = [
        "method", f"final {measure}", "last round", *metrics, "most spent of a budget", "left early", "clients",
        "rounds", "seeds",
    ]  # fmt: skip
    return condensed(columns, [_method_row(entry, metrics) for entry in shown], kept=2)


def _named(entry: Mapping[str, Any]) -> str:
    return _NAME.format(entry["look"], entry["row"].label, entry["budgets"])


def _method_row(entry: Mapping[str, Any], metrics: Sequence[str]) -> PageRow:
    row: MethodSummary = entry["row"]
    return PageRow(
        (
            _named(entry),
            reached(row.measure, row.final_accuracy, row.final_accuracy_deviation),
            reached(row.measure, row.last_accuracy),
            *(short(row.metrics.get(name)) for name in metrics),
            "no guarantee" if row.budgets == "none" else share(row.largest_ratio),
            counted(row.left_early),
            counted(row.clients),
            counted(row.rounds_run) + ("" if row.rounds_run == row.rounds else f" of {row.rounds}"),
            str(row.seeds) if row.finished == row.seeds else f"{row.finished} of {row.seeds}",
        ),
        "exceeded" if row.exceeded else "",
    )


def cost_table(shown: Sequence[Mapping[str, Any]]) -> PageTable:
    """Return bytes and seconds of each method."""
    columns = ["method", "up per client and round", "all clients up", "all clients down", "seconds a round"]
    rows = [
        PageRow(
            (
                _NAME.format(entry["look"], entry["row"].label, ""),
                byte_size(entry["row"].bytes_up_per_client_round),
                byte_size(entry["row"].bytes_up),
                byte_size(entry["row"].bytes_down),
                short(entry["row"].seconds_per_round, 2),
            )
        )
        for entry in shown
    ]
    table = condensed(columns, rows)
    said = table.same.replace("in every row", "for all methods")
    return table if len(table.columns) > 1 else PageTable((), (), said)  # names alone say nothing


def pair_table(found: Ranking, measure: str) -> PageTable:
    """Return all pairs of methods under own budgets, the surest difference first."""
    columns = ["pair", "difference", "deviation over seeds", "chance", "verdict", "seeds"]
    ordered = sorted(found.pairs, key=lambda pair: (pair.chance, -pair.difference))
    return condensed(columns, [_pair_row(pair, measure) for pair in ordered], kept=5)


def _pair_row(pair: MethodPair, measure: str) -> PageRow:
    few = pair.seeds < LEAST_SEEDS
    said = "too few seeds" if few else f"{pair.other} is ruled out" if pair.told else "cannot be told apart"
    return PageRow(
        (
            f"{pair.better} over {pair.other}",
            f"{points(measure, pair.difference)} points",
            "–" if math.isnan(pair.deviation) else points(measure, pair.deviation),
            "–" if few else short(pair.chance, 2),
            said,
            str(pair.seeds),
        )
    )
