"""Methods compared in their published and their sound form, beside the paper's numbers: PFA's and PDP-FL's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from polyeps.accounting.certificate import Form
from polyeps_reproductions.studies import Cell, Content, Panel, Record, difference, grouped, line, panel, spread_of

FORMS: tuple[Form, ...] = ("published", "sound")
POINTS = 0.04  # accuracy this near to the paper's counts as reproduced
MEBIBYTES = 1.5  # uplink this near: the paper truncates, and its number of public clients in a round is random
TIE = 0.005  # an order holds unless the lower method is ahead by more than half a point
CONTROL = "public-only"
APART = 0.045  # between methods at the same number of clients, of the step to the next: equal values stay visible
DASHED = ("pfa-plus", CONTROL)  # they often lie on PFA's curve
# (higher, lower): the orders that the papers' texts state for all accuracy figures.
ORDERINGS = (
    ("pfa", "weiavg"),
    ("pfa-plus", "weiavg"),
    ("weiavg", "fedavg"),
    ("pfa", "fedavg"),
    ("pfa", "minimum"),
    ("maximum", "pfa"),
    ("non-private", "maximum"),
    ("pdp-fl", "fedavg"),
    ("pdp-fl", "minimum"),
    ("non-private", "pdp-fl"),
)
Axis = Literal["clients", "budgets", "method"]
NOTHING: Record = {"mean": None, "deviation": None, "count": 0, "finals": {}}
Sides = dict[str, dict[str, Any]]  # by method: the paper's number, and records by form


def comparison(
    cells: Sequence[Cell], axis: Axis = "clients", uplink: bool = False
) -> Callable[[Sequence[Record], bool], Content]:
    """Return the function that compares methods along an axis, by accuracy or by uplink in MiB.

    A method of which nothing is finished has an empty record; a cell of which nothing is finished is left out.
    """
    wanted = [{**cell.labels, "paper": cell.paper, **NOTHING} for cell in cells]

    def show(records: Sequence[Record], quick: bool) -> Content:
        done = {(one["cell"], one["method"], one["form"]): one for one in paired(records)}
        begun = {title for title, *_ in done}
        common = [done.get((o["cell"], o["method"], o["form"]), o) for o in wanted if o["cell"] in begun]
        cells = {title: _sides(some) for (title,), some in grouped(common, "cell").items()}
        columns = ["cell", "method", f"paper, {'MiB' if uplink else '%'}", "published form", "sound form"]
        columns += ["control (published · sound)", ""]
        rows = [row for title, cell in cells.items() for row in _rows(title, cell, uplink, quick)]
        findings = _sentences(cells, uplink, quick)
        total = len({one["cell"] for one in wanted})
        if len(cells) < total:
            findings.append(f"{total - len(cells)} of {total} cells have no finished trial and are left out")
        return Content(columns, rows, findings, _panels(common, axis, uplink), pairs=True)

    return show


def paired(records: Iterable[Record]) -> list[Record]:
    """Return records over the seeds that all methods of a cell and form have, if there is one."""
    kept = []
    for some in grouped(records, "cell", "form").values():
        common = set.intersection(*(set(one["finals"] or ()) for one in some))
        for one in some:
            values = {seed: value for seed, value in (one["finals"] or {}).items() if seed in common}
            kept.append({**one, **spread_of(list(values.values())), "finals": values} if values else one)
    return kept


def _sides(records: Iterable[Record]) -> Sides:
    found: Sides = {}
    for one in records:
        found.setdefault(one["method"], {"paper": one["paper"]}).update({one["form"]: one} if one["count"] else {})
    return found


def off(forms: dict[str, Any]) -> float | None:
    """Return the distance of the published form from the paper's value."""
    printed, published = forms["paper"], forms.get("published")
    return None if printed is None or published is None else round(published["mean"] - printed, 5)


def within(distance: float, uplink: bool) -> bool:
    # Readings have two digits: a difference of exactly the limit is not undone by rounding.
    return abs(distance) <= (MEBIBYTES if uplink else POINTS) + 1e-9


def _rows(title: str, cell: Sides, uplink: bool, quick: bool) -> list[list[Any]]:
    def shown(one: Record | None) -> str:
        if one is None:
            return "–"
        spread = f" ± {number(one['deviation'])}" if one["count"] > 1 else ""
        return number(one["mean"]) + spread

    def number(value: float, sign: str = "") -> str:
        return f"{value if uplink else 100 * value:{sign}.1f}"

    control = " · ".join(shown(cell[CONTROL].get(form)) for form in FORMS) if CONTROL in cell else "–"
    rows = []
    for name, forms in cell.items():
        printed, distance = forms["paper"], None if quick else off(forms)
        verdict = ""
        if distance is not None:
            away = f"off by {number(distance, '+')}{' MiB' if uplink else ''}"
            verdict = "within" if within(distance, uplink) else away
        sides = [shown(forms.get(form)) for form in FORMS]
        beside = "" if name == CONTROL else control
        rows.append([title, name, "–" if printed is None else number(printed), *sides, beside, verdict])
    return rows


def orderings(cell: Sides) -> dict[tuple[str, str], dict[str, bool]]:
    """Return which order of two methods holds in which form, as far as both are known."""
    found: dict[tuple[str, str], dict[str, bool]] = {}
    for higher, lower in ORDERINGS:
        for form in FORMS:
            pair = [cell.get(name, {}).get(form) for name in (higher, lower)]
            if pair[0] and pair[1]:
                found.setdefault((higher, lower), {})[form] = pair[0]["mean"] >= pair[1]["mean"] - TIE
    return found


def _sentences(cells: dict[str, Sides], uplink: bool, quick: bool) -> list[str]:
    """Return how many values were reproduced, the orders that do not hold, PFA's gain and the number of seeds."""
    said = []
    distances = [away for cell in cells.values() for forms in cell.values() if (away := off(forms)) is not None]
    if distances and not quick:
        near = f"{MEBIBYTES:g} MiB" if uplink else f"{100 * POINTS:g} points"
        count = sum(within(away, uplink) for away in distances)
        said.append(f"{count} of {len(distances)} values are within {near} of the paper's")
    for form in FORMS if not uplink else ():
        broken = [
            f"{higher} over {lower} ({title})"
            for title, cell in cells.items()
            for (higher, lower), holds in orderings(cell).items()
            if holds.get(form) is False
        ]
        if broken:
            said.append(f"Orders that do not hold in the {form} form: {'; '.join(broken)}")
    gains = [gain for form in FORMS if not uplink and (gain := _gain(cells, form))]
    if gains:
        said.append(f"PFA over {CONTROL}, in points, ± the standard error over paired seeds: {', '.join(gains)}")
    counts = {form: [side[form]["count"] for cell in cells.values() for side in cell.values() if form in side]
              for form in FORMS}  # fmt: skip
    ranges = [
        f"{min(some) if min(some) == max(some) else f'{min(some)} to {max(some)}'} in the {form} form"
        for form, some in counts.items()
        if some
    ]
    if ranges:
        said.append(f"Values are means over seeds, ± their standard deviation; seeds: {', '.join(ranges)}")
    return said


def _gain(cells: dict[str, Sides], form: str) -> str:
    """Return PFA's differences from the public clients alone: the gain of projection itself."""
    means, each = [], []
    for title, cell in cells.items():
        pair = [cell.get(name, {}).get(form) for name in ("pfa", CONTROL)]
        if not (pair[0] and pair[1]):
            continue
        mean, error, count = difference(pair[0], pair[1])
        means += [mean] if count else []
        each += [] if error is None else [f"{title} {mean:+.1f} ± {error:.1f}"]
    detail = f" ({'; '.join(each)})" if each else ""
    return f"{min(means):+.1f} to {max(means):+.1f} in the {form} form{detail}" if means else ""


def _panels(records: Iterable[Record], axis: Axis, uplink: bool) -> list[Panel]:
    """Return a pair of panels, one for each form, for all cells that share an axis."""
    common = ["data", "model", "partition"] + (["budgets"] if axis == "clients" else [])
    found = []
    for labels, some in grouped(records, *common).items():
        cells = list(dict.fromkeys(one["cell"] for one in some))
        names = list(dict.fromkeys(one["method"] for one in some))
        lines = axis == "clients" and len(cells) > 1
        shape: dict[str, Any] = {} if lines else {"bars": 0.8 / (1 if axis == "method" else len(names))}
        first = {one["cell"]: one for one in some}
        shape["ticks"] = names if axis == "method" else [str(first[cell][axis]) for cell in cells]
        step = APART if lines else shape["bars"]
        for form in FORMS:
            series: list[dict[str, Any]] = []
            for number, name in enumerate(names):
                shift = (number - (len(names) - 1) / 2) * step
                mine = {
                    one["cell"]: one for one in some if (one["method"], one["form"]) == (name, form) and one["count"]
                }
                printed = {one["cell"]: one["paper"] for one in some if one["method"] == name}
                at = {cell: float(number) if axis == "method" else place + shift for place, cell in enumerate(cells)}
                shown = [cell for cell in cells if cell in mine or not lines]
                values = [mine[cell]["mean"] if cell in mine else None for cell in shown]
                errors = [mine[cell]["deviation"] if cell in mine else None for cell in shown]
                look = {"dashed": name in DASHED} if lines else {"look": "bar"}
                series.append({"name": name, "x": [at[cell] for cell in shown], "y": values, "error": errors, **look})
                known = [(at[cell], value) for cell, value in printed.items() if value is not None]
                series += [line(name, known, look="paper")] if known and form == "published" else []
            measure = "uplink, MiB" if uplink else "test accuracy"
            title = f"{' '.join(labels)}, {form} form"
            found.append(panel(title, "clients" if axis == "clients" else "", measure, series, **shape))
    return found
