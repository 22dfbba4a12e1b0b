"""Tables on the pages of FedSel, PDP-FL, FedHDP and CMP-Fed, made from their results' tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from polyeps_reproductions.census import NEAR, values
from polyeps_reproductions.comparison import FORMS
from polyeps_reproductions.fedsel_tables import CHOICES
from polyeps_reproductions.headlines import Results, number, numbers, signed
from polyeps_reproductions.studies import difference, find, grouped

RESULTS = Results(Path(__file__).parents[1] / "results")
Rows = list[list[str]]
_DATA = {"syn-l-0.01-0.9": "syn-L-.01-.9", "bank": "BANK", "kddcup99": "KDD99", "adult": "ADULT"}
_EPSILONS = (0.5, 1.0, 2.0, 4.0)
_RULES = ("one round, as published", "three rounds, robust", "three rounds, noise")
_SHOWN = {  # rows of FedHDP's tables that its page shows: (clients, method, r)
    "1": [("one digit", "fedhdp-open", ""), ("one digit", "dp-fedavg", ""), ("one digit", "fedhdp", "auto")]
    + [("one digit", "fedhdp", ratio) for ratio in (0.03, 0.01, 1.0, 0.0)]
    + [("skewed", "dp-fedavg", ""), ("skewed", "fedhdp", "auto")]
    + [("skewed", "fedhdp", ratio) for ratio in (0.1, 1.0, 0.01)],
    "2": [("writers", "fedhdp-open", ""), ("writers", "dp-fedavg", ""), ("writers", "fedhdp", "auto")]
    + [("writers", "fedhdp", ratio) for ratio in (0.0, 0.01, 0.1, 1.0)],
}
_DIRECTIONS = {
    "paid": "paid for (the paper's)",
    "random": "drawn at random, not paid for",
    "strongest": "the model's strongest, not paid for",
    "model": "**the model's, mixed anew every round**",
    "own": "the mean update's own, which must stay secret",
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


def fedsel_runs() -> Rows:
    """Return how many runs each part of FedSel's study has; a run is a fold."""
    rows = [["part", "what", "methods and settings", "runs of each"]]
    for part in find("fedsel").choose():
        found = RESULTS.summary("fedsel", part.name)
        runs = sorted({one["count"] for one in (found or {}).get("records") or ()})
        runs = runs or sorted({row["runs"] for row in RESULTS.rows("fedsel", part.name) if "runs" in row})
        if not part.cells(False):
            continue
        size = len((found or {}).get("records") or (found or {}).get("table") or ())
        shown = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}" if runs else "not run"
        rows.append([f"{part.kind} {part.number}", part.title, str(size) if size else "–", shown])
    return rows


def fedsel_clear() -> Rows:
    """Return in which rows of table 3 one method is clearly ahead of another: by two standard errors."""
    rows = [["learning rate", "compared", "rows", "clearly ahead", "clearly behind"]]
    for alpha, name in (("one for all", "one α for all"), ("own", "own α")):
        some = [row for row in RESULTS.rows("fedsel", "table-3", α=alpha) if "published" not in row["selection"]]
        for column in ("X-PM − PM", "X-PM − random-PM"):
            cells = []
            for sign in (1, -1):
                places: Counter[str] = Counter()
                for row in some:
                    mean, *error = numbers(row[column])
                    if sign * mean > 2 * (error or [0.0])[0] and mean != 0:
                        places[f"{_DATA[row['data']]} {row['model']}"] += 1
                where = ", ".join(f"{place} {count}" for place, count in places.items())
                cells.append(f"{places.total()}" + f" ({where})" * bool(where))
            rows.append([name, column.replace(" − ", " over "), str(len(some)), *cells])
    return rows


def fedsel_budgets(results: Results = RESULTS) -> Rows:
    """Return the leads of EXP-, PE- and PS-PM over PM in points, with own α, by ε: figures 2(f), 2(g) and synthetic."""
    rows = [["figure", "data", "model", *(f"ε = {epsilon:g}" for epsilon in _EPSILONS)]]
    for part in ("figure-2f", "figure-2g", "table-synthetic"):
        records = (results.summary("fedsel", part) or {}).get("records") or ()
        for (data, model), some in grouped(records, "data", "model").items():
            found = {(one["method"], one["epsilon"]): one for one in some}
            cells = []
            for epsilon in _EPSILONS:
                flat = found.get(("pm", epsilon))
                two_stage = [found.get((f"{name}-pm", epsilon)) for name in CHOICES]
                leads = [signed(difference(one, flat)[0]) if one and flat else "–" for one in two_stage]
                cells.append(" / ".join(leads) if any(lead != "–" for lead in leads) else "–")
            rows.append([part.replace("-", " "), _DATA.get(data, data), model, *cells])
        if not records:
            rows.append([part.replace("-", " "), "not run", *[""] * (len(rows[0]) - 2)])
    return rows


def fedsel_rates() -> Rows:
    """Return how many of table 3's gains and losses are near the paper's, by the one α of all methods."""
    some = RESULTS.rows("fedsel", "table-3-rates")
    rates = list(dict.fromkeys(row["α"] for row in some))
    near: dict[tuple[str, str], dict[Any, list[bool]]] = {}
    for one in (one for one in values(RESULTS) if one.study == "fedsel"):
        data, model, *_ = one.place.removeprefix("table 3: ").split(", ")
        near.setdefault((data, model), {}).setdefault("NP", []).append(one.near)
    for row in some:
        pairs = zip((number(row["gain"]), number(row["loss"])), numbers(row["paper gain / loss"]), strict=True)
        each = [abs(ours - paper) <= NEAR for ours, paper in pairs]
        near[row["data"], row["model"]].setdefault(row["α"], []).extend(each)
    rows = [["data", "model", "values", "near at NP's best α", *(f"at α = {rate:g}" for rate in rates)]]
    for (data, model), found in near.items():
        shown = [str(sum(found[rate])) if rate in found else "–" for rate in ("NP", *rates)]
        rows.append([_DATA[data], model, str(len(found["NP"])), *shown])
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


def less_noise() -> Rows:
    """Return FedHDP's private methods on writers with the noise of the paper's clients, beside the paper's values."""
    columns = ("Acc_g", "Acc_g,p", "Acc_g,np", "Acc_l,p", "Acc_l,np")
    rows = [["method", "", "common model", "private", "open", "personal, private", "personal, open"]]
    noisy = {(row["method"], row["r"]): row for row in RESULTS.rows("fedhdp", "table-2", clients="writers")}
    for row in RESULTS.rows("fedhdp", "table-2-noise"):
        name = "DP-FedAvg" if row["method"] == "dp-fedavg" else f"FedHDP, r = {row['r']}"
        first, *pairs = list(row.values())[-1].split(";")
        printed = [first, *(value for pair in pairs for value in pair.split(","))]
        rows.append([name, "paper", *(text.strip() for text in printed)])
        shown = {"noise of 3383 clients": row, "noise of 539 clients": noisy[row["method"], row["r"]]}
        for one in RESULTS.rows("fedhdp", "table-2-rate", method=row["method"], r=row["r"]):
            shown["noise of 539 clients, DP-FedAvg's rate"] = one
        for form, one in shown.items():
            cells = (f"{number(one[column]):.1f}" if numbers(one[column]) else "–" for column in columns)
            rows.append(["", form, *cells])
    return rows


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


def bits() -> Rows:
    """Return what a client of CMP-Fed sends as integers, by rank."""
    found = RESULTS.summary("cmp-fed", "table-bits") or {"columns": [], "table": []}
    return [found["columns"], *found["table"]]


def peers() -> Rows:
    """Return Robust-HDP beside other rules, in all cells in which the recipe's benchmark has it."""
    names = ("fedavg", "weiavg", "public-only", "robust-hdp")
    rows = [["data, partition, budgets", "seeds", *(f"`{name}`" for name in names)]]
    for file in ("accuracy", "accuracy_other_cells"):
        path = Path(__file__).parents[2] / "benchmarks" / "results" / f"{file}.json"
        for cell, found in json.loads(path.read_text(encoding="utf-8")).items():
            shown = [
                f"{100 * one['mean']:.1f} ± {100 * one['sd']:.1f}" if one else "–" for one in map(found.get, names)
            ]
            rows.append([cell, str(len(found["robust-hdp"]["seeds"])), *shown])
    return rows


def uplinks() -> Rows:
    """Return CMP-Fed's figure 2: MB that all clients send until 74 %, and what CMP-Fed saves, here and in the paper."""
    found = {(row["images"], row["method"]): row for row in RESULTS.rows("cmp-fed", "figure-2")}
    rows = [["", "at random", "five labels each"]]
    for method in dict.fromkeys(method for _, method in found):
        cells = []
        for images in rows[0][1:]:
            _, _, _, needed, saved, _, paper = found[images, method].values()
            sent = f"{number(needed):,.0f}".replace(",", " ") if numbers(needed) else needed
            parts = [f"{saved} %"] * (saved != "–" and paper != "–") + [f"paper {paper} %"] * (paper != "–")
            cells.append(sent + f" ({'; '.join(parts)})" * bool(parts))
        rows.append([method, *cells])
    return rows


def directions() -> Rows:
    """Return what left factors of several sources reach, and the share of the mean update that they hold at first."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "directions.json"
    outcomes = json.loads(path.read_text(encoding="utf-8"))["outcomes"]
    rows = [["left factors", "rank 1", "rank 4", "rank 16"]]
    for kind, name in _DIRECTIONS.items():
        cells = []
        for rank in (1, 4, 16):
            some = [one for one in outcomes if (one["kind"], one["rank"]) == (kind, rank)]
            held = fmean(fmean(map(fmean, one["kept"][1:])) for one in some)
            cells.append(f"{fmean(one['accuracy'] for one in some):.1f} ({held:.2f})")
        rows.append([name, *cells])
    return rows


def hidden_budgets() -> Rows:
    """Return PDP-FL's figure 4: published and sound form."""
    rows = [["clients", "PDP-FL", "PFA", "public-only", "FedAvg", "Minimum", "non-private"]]
    found = {(one["clients"], one["method"], one["form"]): one for one in RESULTS.records("pdp-fl", "figure-4")}
    for clients, name in ((30, "30, ten shards each"), (10, "10, two labels each")):
        cells = []
        for method in ("pdp-fl", "pfa", "public-only", "fedavg", "minimum", "non-private"):
            published, sound = (found[clients, method, form] for form in FORMS)
            cells.append(f"{100 * published['mean']:.1f} · {100 * sound['mean']:.1f} ± {100 * sound['deviation']:.1f}")
        rows.append([name, *cells])
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "fedsel-runs": fedsel_runs,
    "fedsel-clear": fedsel_clear,
    "fedsel-rates": fedsel_rates,
    "fedsel-budgets": fedsel_budgets,
    "cmp-fed-uplink": uplinks,
    "cmp-fed-directions": directions,
    "pdp-fl-accuracy": hidden_budgets,
    "fedsel-gains": fedsel_gains,
    "groups-found": groups_found,
    "observer": observer,
    "fedhdp-one-digit": levels("1"),
    "fedhdp-writers": levels("2"),
    "fedhdp-noise": less_noise,
    "cmp-fed-random": by_rank("1"),
    "cmp-fed-labels": by_rank("2"),
    "cmp-fed-accounts": accounts,
    "cmp-fed-bits": bits,
    "peers": peers,
}
