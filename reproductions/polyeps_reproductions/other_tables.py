"""Tables on the pages of FedSel, PDP-FL, FedHDP and CMP-Fed, made from their results' tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyeps_reproductions.comparison import FORMS
from polyeps_reproductions.headlines import Results, number, numbers, signed

RESULTS = Results(Path(__file__).parents[1] / "results")
Rows = list[list[str]]
_DATA = {"syn-l-0.01-0.9": "syn-L-.01-.9", "bank": "BANK", "kddcup99": "KDD99", "adult": "ADULT"}
_RULES = ("one round, as published", "three rounds, robust", "three rounds, noise")
_SHOWN = {  # rows of FedHDP's tables that its page shows: (clients, method, r)
    "1": [("one digit", "fedhdp-open", ""), ("one digit", "dp-fedavg", ""), ("one digit", "fedhdp", "auto")]
    + [("one digit", "fedhdp", ratio) for ratio in (0.03, 0.01, 1.0, 0.0)]
    + [("skewed", "dp-fedavg", ""), ("skewed", "fedhdp", "auto")]
    + [("skewed", "fedhdp", ratio) for ratio in (0.1, 1.0, 0.01)],
    "2": [("writers", "fedhdp-open", ""), ("writers", "dp-fedavg", ""), ("writers", "fedhdp", "auto")]
    + [("writers", "fedhdp", ratio) for ratio in (0.0, 0.01, 0.1, 1.0)],
}
_CMP = ("FedAvg", "UV-Fed", "DP-FedAvg", "DP-RandAgg", "CMP-Fed, published", "CMP-Fed", "CMP-Fed, tuned",
        "DP-RandAgg, tuned", "DP-FedAvg, tuned", "CMP-Fed, directions from the model")  # fmt: skip


def rounded(cell: Any) -> str:
    """Return a mean and its error with one digit, and the sign of the mean."""
    mean, *error = numbers(cell)
    return signed(mean) + (f" ± {error[0]:.1f}" if error else "")


def fedsel_gains() -> Rows:
    """Return table 3 by data, model and choice, with one α for all and with each method's own."""
    rows = [["data", "model", "choice", "paper: gain / loss", "one α: gain / loss", "one α: random-PM − PM"]]
    rows[0] += ["own α: gain / loss", "own α: X-PM − PM", "own α: X-PM − random-PM"]
    own = {(row["data"], row["model"], row["selection"]): row for row in RESULTS.rows("fedsel", "table-3", α="own")}
    for row in RESULTS.rows("fedsel", "table-3", α="one for all"):
        if row["selection"] in ("exp", "ps"):
            mine = own[row["data"], row["model"], row["selection"]]
            both = [f"{rounded(one['gain'])} / {rounded(one['loss'])}" for one in (row, mine)]
            names = [_DATA[row["data"]], row["model"], row["selection"].upper(), row["paper gain / loss"]]
            leads = [rounded(mine[name]) for name in ("X-PM − PM", "X-PM − random-PM")]
            rows.append([*names, both[0], rounded(row["random-PM − PM"]), both[1], *leads])
    return rows


def groups_found() -> Rows:
    """Return PDP-FL's table 1: draws in which all groups are found, by 10, 20 and 50 clients."""
    rows = [["mixture", "form", "mixture of norms, one round", "`robust`, three rounds", "`noise`, three rounds"]]
    for form in FORMS:
        for place in ("1", "2", "3"):
            some = RESULTS.rows("pdp-fl", "table-1", budgets=f"pdp-fl-mixgauss{place}", form=form)
            cells = []
            for rule in _RULES:
                shares = {row["clients"]: number(row["all groups exact"]) for row in some if row["rule"] == rule}
                cells.append(" · ".join(f"{shares[clients]:.1f}" for clients in (10, 20, 50)) + " %")
            rows.append([f"MixGauss{place}", form, *cells])
    return rows


def observer() -> Rows:
    """Return what an observer of updates tells about ε."""
    first = ["partition", "silent coordinates", "rounds seen", "R² of log ε", "median relative error"]
    return [first, *([str(row[name]) for name in first] for row in RESULTS.rows("pdp-fl", "table-observer"))]


def levels(table: str) -> Callable[[], Rows]:
    """Return the maker of the rows of FedHDP's table 1 or 2 that its page shows."""

    def make() -> Rows:
        rows = [["clients", "method", "Acc_g, paper", "Acc_g", "private", "open"]]
        rows[0] += ["personal, private", "personal, open", "Δ_l"]
        found = {(row["clients"], row["method"], row["r"]): row for row in RESULTS.rows("fedhdp", f"table-{table}")}
        for clients, method, ratio in _SHOWN[table]:
            row = found[clients, method, ratio]
            printed = numbers(list(row.values())[-1].partition(";")[0])
            name = {"fedhdp-open": "nobody protected", "dp-fedavg": "DP-FedAvg"}.get(method, f"FedHDP, r = {ratio}")
            groups = [row[key].partition(" ")[0] for key in ("Acc_g,p", "Acc_g,np", "Acc_l,p", "Acc_l,np")]
            paper = f"{printed[0]:g}" if printed else ""
            rows.append([clients, name, paper, row["Acc_g"], *groups, row["Δ_l"].replace("-", "−")])
        return rows

    return make


def by_rank(table: str) -> Callable[[], Rows]:
    """Return the maker of CMP-Fed's table I or II: methods by rank, the paper's value in brackets."""

    def make() -> Rows:
        found = {(row["method"], row["rank"]): row for row in RESULTS.rows("cmp-fed", f"table-{table}")}
        rows = [["method", *map(str, (1, 2, 4, 8, 16)), "none"]]
        for method in _CMP:
            cells = []
            for rank in (1, 2, 4, 8, 16, "–"):
                row = found.get((method, rank))
                paper = "" if row is None or row["paper"] == "–" else f" ({row['paper']})"
                cells.append("" if row is None else f"{number(row['accuracy %']):.1f}{paper}")
            rows.append([method, *cells])
        return rows

    return make


def accounts() -> Rows:
    """Return the noise that each account of CMP-Fed asks for, and what it really gives."""
    first = ["account", "σ", "true ε, Poisson", "true ε, fixed size", "enough for"]
    return [first, *([str(row[name]) for name in first] for row in RESULTS.rows("cmp-fed", "table-accounts"))]


TABLES: dict[str, Callable[[], Rows]] = {
    "fedsel-gains": fedsel_gains,
    "groups-found": groups_found,
    "observer": observer,
    "fedhdp-one-digit": levels("1"),
    "fedhdp-writers": levels("2"),
    "cmp-fed-random": by_rank("1"),
    "cmp-fed-labels": by_rank("2"),
    "cmp-fed-accounts": accounts,
}
