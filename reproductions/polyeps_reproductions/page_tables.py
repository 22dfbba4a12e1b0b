"""Tables on the papers' pages, made from `results/*.json`: `python -m polyeps_reproductions.page_tables` writes them.

A page marks the place of a table by `<!-- table NAME -->` and `<!-- end -->`; tests compare what stands between them
with what is made here, so that no number on a page can differ from the results.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, stdev

from polyeps_reproductions import explanations, other_tables, theory_tables
from polyeps_reproductions.census import ABSENT, Count, counted, distance, missed, values
from polyeps_reproductions.comparison import FORMS, paired, within
from polyeps_reproductions.headlines import Results, table
from polyeps_reproductions.pfa import METHODS
from polyeps_reproductions.presenting import markdown_table
from polyeps_reproductions.reference_models import SOFTMAX_TWICE
from polyeps_reproductions.studies import STUDIES, Record, grouped

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "reproductions" / "results"
PAGES = tuple(ROOT / "docs" / "papers" / f"{name}.md" for name in (*STUDIES, "fedhdp-theory", "peers", "reproduced"))
TITLES = {
    "pfa": "PFA", "pfa-plus": "PFA+", "weiavg": "WeiAvg", "fedavg": "FedAvg", "minimum": "Minimum",
    "maximum": "Maximum", "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "logistic": "LogR", "cnn": "CNN",
    "fedsel": "FedSel", "pdp-fl": "PDP-FL", "fedhdp": "FedHDP", "cmp-fed": "CMP-Fed",
    SOFTMAX_TWICE: "LogR", "iid": "IID", "shards": "non-IID", "uniform": "Uniform", "gauss": "Gauss",
    "pareto": "Pareto", **{f"mixgauss{number}": f"MixGauss{number}" for number in (1, 2, 3, 4)},
}  # fmt: skip
_MARK = re.compile(r"<!-- table ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
Rows = list[list[str]]


@lru_cache(maxsize=32)
def _read(figure: str) -> tuple[Record, ...]:
    path = RESULTS / f"pfa-figure-{figure}.json"
    return tuple(paired(json.loads(path.read_text(encoding="utf-8"))["records"])) if path.exists() else ()


def records(*figures: str, **labels: str | int) -> list[Record]:
    """Return the records of some figures that have these labels."""
    found = [one for figure in figures for one in _read(figure)]
    return [one for one in found if all(one[name] == value for name, value in labels.items())]


def near(one: Record) -> bool:
    """Return whether a value is as near to the paper's as counts as reproduced."""
    return within(round(one["mean"] - one["paper"], 5), uplink=False)


def spread(one: Record | None) -> str:
    """Return a mean, and its standard deviation if there are several seeds, in per cent."""
    if one is None:
        return "–"
    return f"{100 * one['mean']:.1f}" + (f" ± {100 * one['deviation']:.1f}" if one["count"] > 1 else "")


def beside(one: Record | None) -> str:
    """Return the paper's value and ours, bold if they are far from each other."""
    if one is None:
        return "–"
    if one["paper"] is None:
        return f"– · {100 * one['mean']:.1f}"
    text = f"{100 * one['paper']:.0f} · {100 * one['mean']:.1f}"
    return text if near(one) else f"**{text}**"


def by_method(some: Iterable[Record], names: Sequence[str], show: Callable[[Record | None], str]) -> Rows:
    """Return a row for each cell: the names of its labels, the number of seeds, and a value for each method."""
    rows = [[", ".join(names), "seeds", *(TITLES.get(name, name) for name in METHODS)]]
    for (_, *labels), cell in grouped(some, "cell", *names).items():
        values = {one["method"]: one for one in cell}
        title = ", ".join(TITLES.get(label, str(label)) for label in labels)
        rows.append([title, _range(one["count"] for one in cell), *(show(values.get(name)) for name in METHODS)])
    return rows


def gains() -> Rows:
    """Return PFA's lead over the public clients alone, by the number of clients and over all of them.

    Where single seeds were not kept, it is the difference of two means, without an error.
    """
    clients = (20, 30, 40, 50)
    rows = [["data, model, partition, budgets", "form, seeds", *map(str, clients), "all"]]
    for labels, some in grouped(records("3", "10", "11", "12"), "data", "model", "partition", "budgets").items():
        for form in FORMS:
            found = {(one["clients"], one["method"]): one for one in some if one["form"] == form}
            names = ("pfa", "public-only")
            pairs = {count: [found[count, name] for name in names if (count, name) in found] for count in clients}
            whole = {count: (pair[0], pair[1]) for count, pair in pairs.items() if len(pair) == 2}
            if whole:
                title = ", ".join(TITLES[label] for label in labels)
                seeds = _range(one["count"] for pair in whole.values() for one in pair)
                cells = [_points(*lead([whole[count]])) if count in whole else "–" for count in clients]
                rows.append([title, f"{form}, {seeds}", *cells, _points(*lead(list(whole.values())))])
    return rows


def lead(pairs: Sequence[tuple[Record, Record]]) -> tuple[float, float | None]:
    """Return the mean difference of pairs in points, and its standard error, that of the seeds' means."""
    common = set.intersection(*(set(one["finals"] or ()) for pair in pairs for one in pair))
    if not common:
        return 100 * fmean(a["mean"] - b["mean"] for a, b in pairs), None
    each = [100 * fmean(a["finals"][seed] - b["finals"][seed] for a, b in pairs) for seed in sorted(common)]
    return fmean(each), stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None


def _range(counts: Iterable[int]) -> str:
    some = sorted(counts)
    return str(some[0]) if some[0] == some[-1] else f"{some[0]} to {some[-1]}"


def _points(mean: float, error: float | None) -> str:
    sign = "" if abs(mean) < 0.05 else "+" if mean > 0 else "−"
    return f"{sign}{abs(mean):.1f}" + ("" if error is None else f" ± {error:.1f}")


def softmax() -> Rows:
    """Return the methods that the second softmax changes most, with one and with two, beside the paper."""
    rows = [["budgets, clients", *(f"{name}, {part}" for name in ("FedAvg", "Minimum", "WeiAvg")
                                   for part in ("paper", "once", "twice"))]]  # fmt: skip
    once = {(one["budgets"], one["clients"], one["method"]): one for one in records("3-softmax-once", data="mnist")}
    cells = grouped(records("3", "10", data="mnist", model="logistic", form="published"), "budgets", "clients")
    for (budgets, clients), cell in cells.items():
        row = [f"{TITLES[budgets]}, {clients}"]
        for name in ("fedavg", "minimum", "weiavg"):
            (twice,) = (one for one in cell if one["method"] == name)
            row += [f"{100 * twice['paper']:.0f}", spread(once[budgets, clients, name]), spread(twice)]
        rows.append(row)
    return rows


def done() -> Rows:
    """Return how many of a figure's cells are there, by form, and over how many seeds."""
    rows = [["figure", "partition, budgets", "data, model", "published: cells, seeds", "sound: cells, seeds"]]
    for figure in ("3", "10", "11", "12", "4", "6", "7", "8"):
        kinds = grouped(records(figure), "partition", "budgets", "data", "model")
        if figure in ("4", "8"):
            kinds = {(key[0], "several", *key[2:]): [] for key in kinds}
            for one in records(figure):
                kinds[one["partition"], "several", one["data"], one["model"]].append(one)
        for (partition, budgets, data, model), some in kinds.items():
            counts = [[one["count"] for one in some if one["form"] == form] for form in FORMS]
            sides = [f"{len(each)}, {_range(each)}" if each else "–" for each in counts]
            names = f"{TITLES[partition]}, {TITLES.get(budgets, budgets)}", f"{TITLES[data]}, {TITLES[model]}"
            rows.append([figure, *names, *sides])
    return rows


def directions() -> Rows:
    """Return figure 6: the directions to project on."""
    rows = [["method", "paper", "256 Lanczos steps", "equal weights too", "published form", "sound form"]]
    steps = {one["method"]: one for one in records("6-lanczos")}
    whole = {one["method"]: one for one in records("6-code", "6-random-equal")}
    for (method,), some in grouped(records("6"), "method").items():
        forms = {one["form"]: one for one in some}
        paper = "–" if some[0]["paper"] is None else f"{100 * some[0]['paper']:.0f}"
        ours = [steps.get(method), whole.get(method), *map(forms.get, FORMS)]
        rows.append([method, paper, *map(spread, ours)])
    return rows


def uplink() -> Rows:
    """Return figure 7: the updates' uplink in MiB."""
    rows = [["model", "method", "paper, MiB", "form", "seeds", "measured, MiB"]]
    for one in records("7"):
        measured = f"{one['mean']:.1f} ± {one['deviation']:.1f}"
        names = [TITLES[one["model"]], TITLES[one["method"]], f"{one['paper']:.0f}"]
        rows.append([*names, one["form"], str(one["count"]), measured])
    return rows


def server_time() -> Rows:
    """Return the seconds of one round's subspace and projection, of the paper and ours."""
    text = (ROOT / "benchmarks" / "results" / "aggregation.json").read_text(encoding="utf-8")
    rows = [["model", "parameters", "paper, s", "ours, ms"]]
    for one in json.loads(text)["models"]:
        size = f"{one['parameters']:,}".replace(",", " ")
        rows.append([one["model"], size, f"{one['paper_ms'] / 1000:g}", f"{one['ours_ms']:.3g}"])
    return rows


def near_values(*figures: str, **labels: str) -> tuple[int, int]:
    """Return how many values of the published form are near the paper's, and of how many."""
    some = [one for one in records(*figures, form="published", **labels) if one["paper"] is not None]
    return sum(map(near, some)), len(some)


def shares() -> Rows:
    """Return, for each paper, how many of its cells were run and how many of its values are near ours."""
    rows = [
        ["paper", "cells", "run", "values compared, published form", "near", "sound form only", "near", "explained"]
    ]
    each = {TITLES[name]: one for name, one in counts().items()}
    whole = Count(*(sum(column) for column in zip(*each.values(), strict=True)))
    for name, one in [*each.items(), ("**all**", whole)]:
        missed = one.values - one.near + one.sound_values - one.sound_near
        ran = f"{one.run} ({100 * one.run / one.cells:.0f} %)"
        sides = [(one.near, one.values), (one.sound_near, one.sound_values)]
        near_of = [f"{near} ({100 * near / total:.0f} %)" if total else "–" for near, total in sides]
        explained = f"{one.explained} of {missed} misses" if missed else "–"
        rows.append(
            [name, str(one.cells), ran, str(one.values), near_of[0], str(one.sound_values), near_of[1], explained]
        )
    return rows


def absent() -> Rows:
    """Return the cells that the studies lack."""
    some = [(TITLES[name], *one) for name, cells in ABSENT.items() for one in cells.items()]
    return [["paper", "what", "cells"], *([name, what, str(count)] for name, what, count in some)]


def misses() -> Rows:
    """Return every value that is far from the paper's."""
    rows = [["paper", "value", "paper's", "ours", "off by", "why"]]
    for one in missed(values(Results(RESULTS))):
        form = "" if one.published else " (sound)"
        shown = [f"{value:.1f}{' MiB' * (one.unit == 'MiB')}" for value in (one.paper, one.ours)]
        rows.append([TITLES[one.study], one.place + form, *shown, distance(one), one.why])
    return rows


def experiments() -> Rows:
    """Return what every experiment of PFA's study does to the values of a method, beside the plain run."""
    plain = {explanations.of_pfa(one): one for one in records("3", "10", "6", form="published") if one["paper"]}
    rows = [["figure", "what it changes", "method", "cells", "seeds", "near before", "near then"]]
    for part, says in explanations.PFA.items():
        if not (RESULTS / f"pfa-{part}.json").exists():
            continue
        number = part.removeprefix("figure-")
        some = [one for one in records(number) if one["paper"] and explanations.of_pfa(one) in plain]
        for (method,), mine in grouped(some, "method").items():
            before = sum(near(plain[explanations.of_pfa(one)]) for one in mine)
            counted_of = [str(len(mine)), _range(one["count"] for one in mine), str(before), str(sum(map(near, mine)))]
            rows.append([number, says.rstrip(","), TITLES.get(method, method), *counted_of])
    return rows


@lru_cache(maxsize=1)
def counts() -> dict[str, Count]:
    """Return the counts of every paper."""
    return counted(Results(RESULTS))


TABLES: dict[str, Callable[[], Rows]] = {
    "done": done,
    "published-logistic": lambda: by_method(
        records("3", "10", form="published", model="logistic"), ("data", "budgets", "clients"), beside
    ),
    "published-cnn": lambda: by_method(
        records("3", "10", form="published", model="cnn"), ("data", "budgets", "clients"), beside
    ),
    "softmax": softmax,
    "sound-iid": lambda: by_method(
        records("3", "10", form="sound"), ("data", "model", "budgets", "clients"), spread
    ),
    "distributions-published": lambda: by_method(records("4", form="published"), ("budgets",), spread),
    "distributions-sound": lambda: by_method(records("4", form="sound"), ("budgets",), spread),
    "gains": gains,
    "directions": directions,
    "experiments": experiments,
    "server-time": server_time,
    "uplink": uplink,
    "shards-published": lambda: by_method(
        records("11", "12", form="published"), ("data", "model", "budgets", "clients"), spread
    ),
    "shards-sound": lambda: by_method(
        records("11", "12", form="sound"), ("data", "model", "budgets", "clients"), spread
    ),
    **{f"headlines-{name}": partial(table, Results(RESULTS), (name,)) for name in STUDIES},
    **other_tables.TABLES,
    **theory_tables.TABLES,
    "shares": shares,
    "absent": absent,
    "misses": misses,
    "redrawn-published": lambda: by_method(records("3-redrawn", form="published"), ("clients",), spread),
    "redrawn-sound": lambda: by_method(records("3-redrawn", form="sound"), ("clients",), spread),
}  # fmt: skip


def filled(page: str) -> str:
    """Return a page with all of its marked tables made anew."""

    def made(found: re.Match[str]) -> str:
        first, *rows = TABLES[found[1]]()
        return f"<!-- table {found[1]} -->\n" + "\n".join(markdown_table(first, rows)) + "\n<!-- end -->"

    return _MARK.sub(made, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
