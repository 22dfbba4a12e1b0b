"""Charts over clients: what each spent of its budget, what each gains by joining, and how calibrated a model is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from polyeps.report.curves import merge_equal, worst_rows
from polyeps.report.formatting import bound, percent, plural, share, short
from polyeps.report.joining import Joining, JoiningTable, Verdict
from polyeps.report.strength import MODERATE, strength
from polyeps.report.svg import NARROW, Chart, Picture, Scale, chart, trim
from polyeps.report.tables import ClientSummary, MethodRuns

MOST_BARS = 40
MOST_MARKS = 1000  # clients that are named one by one
_FINGER = 4  # pixels between spots that a pointer can tell apart
_WIDTH, _ALONE = 440, 560  # pixels: two side by side on a desk; one alone
_NAME = 18  # letters of a client's name beside its bar


def spending(methods: Sequence[MethodRuns]) -> list[tuple[list[int], Chart]]:
    """Return charts of spending against budgets, on the same axes, each with the numbers of the methods that it shows.

    Methods with equal charts share one.
    """
    rows = [worst_rows(method) for method in methods]
    scale = _limits([row for some in rows for row in some])
    together: dict[str, tuple[list[int], Chart]] = {}
    for number, some in enumerate(rows):
        if some and scale:
            made = _spent(some, scale)
            together.setdefault(made.wide, ([], made))[0].append(number)
    return list(together.values())


def spending_chart(rows: Sequence[ClientSummary]) -> Chart | None:
    """Return one chart of spending against budgets."""
    scale = _limits(rows)
    return _spent(rows, scale) if rows and scale else None


def _spent(rows: Sequence[ClientSummary], scale: Scale) -> Chart:
    merged = rows if len(rows) <= MOST_BARS else merge_equal(rows)
    picture = _bars(merged, scale) if len(merged) <= MOST_BARS else _dots(rows, scale)
    return chart(picture, None, _spending_said(rows), "xy")


def _spending_said(rows: Sequence[ClientSummary]) -> str:
    highest, over = max(row.ratio or 0.0 for row in rows), sum(row.exceeded for row in rows)
    exceeded = f"; {over} exceeded it" if over else ""
    many = "1 client" if len(rows) == 1 else f"{len(rows)} clients"
    return f"Spending of {many} against their effective budgets: the most is {share(highest)} of it{exceeded}."


def _limits(rows: Sequence[ClientSummary]) -> Scale | None:
    figures = [value for row in rows for value in (row.epsilon, row.spent, row.own_epsilon)]
    known = [value for value in figures if value is not None and 0 < value < math.inf]
    return Scale(min(known) / 1.8, max(known) * 1.3, log=True) if known else None


def _mark(picture: Picture, row: ClientSummary, x: float, y: float) -> None:
    rows = [
        ("", "spent ε", f"{bound(row.spent)} ({strength(row.spent)})"),
        ("", "of budget", f"{share(row.ratio)} of {short(row.epsilon)}"),
    ]
    if row.own_epsilon != row.epsilon:
        rows.append(("", "own budget", short(row.own_epsilon)))
    picture.mark(x, y, row.client, rows)


def _bars(rows: Sequence[ClientSummary], scale: Scale) -> Picture:
    """Draw a line per client from the left edge (a log axis has no zero) to its spending, a tick at its budget."""
    picture = _lined([row.client for row in rows], _WIDTH, 17, scale)
    _epsilon_axis(picture)
    for place, row in enumerate(rows):
        look = "alarmed" if row.exceeded else "plain"
        budget, spent = row.epsilon or 0.0, row.spent or 0.0
        if spent > 0:
            picture.line([(scale.low, place), (spent, place)], f"bar {look}")
            picture.dot(spent, place, f"spot {look}", 3.5)
        across, down = picture.across(budget), picture.down(place)
        picture.stroke((across, down - 6), (across, down + 6), "limit")
        if row.own_epsilon != budget and math.isfinite(row.own_epsilon):
            picture.dot(row.own_epsilon, place, "hollow", 3)
        _mark(picture, row, spent or budget, place)
    return picture


def _dots(rows: Sequence[ClientSummary], scale: Scale) -> Picture:
    """Draw a dot per client, budget to the right and spending upwards; on the diagonal the budget is used up."""
    picture = Picture(_WIDTH, 340, scale, scale, left=48)
    _epsilon_axis(picture, "effective budget ε, log scale")
    picture.y_axis("spent ε, log scale", scale.ticks(6))
    picture.line([(scale.low, scale.low), (scale.high, scale.high)], "diagonal")
    for look, exceeded in (("plain", False), ("alarmed", True)):
        shown = [row for row in rows if row.exceeded == exceeded and (row.spent or 0.0) > 0]
        picture.dots([(row.epsilon or 0.0, row.spent or 0.0) for row in shown], look)
    for some in _near(picture, rows):
        if len(some) == 1:
            _mark(picture, some[0], some[0].epsilon or 0.0, some[0].spent or 0.0)
        else:
            _mark_together(picture, some)
    return picture


def _near(picture: Picture, rows: Sequence[ClientSummary]) -> list[list[ClientSummary]]:
    """Group clients that a pointer cannot tell apart, if there are too many to name each of them."""
    if len(rows) <= MOST_MARKS:
        return [[row] for row in rows]
    found: dict[tuple[float, float], list[ClientSummary]] = {}
    for row in rows:
        across, down = picture.across(row.epsilon or 0.0), picture.down(row.spent or 0.0)
        found.setdefault((across // _FINGER, down // _FINGER), []).append(row)
    return list(found.values())


def _mark_together(picture: Picture, rows: Sequence[ClientSummary]) -> None:
    """Name a spot where several clients are: their number, and what they spent of which budgets."""
    spent, budgets = ([getattr(row, name) or 0.0 for row in rows] for name in ("spent", "epsilon"))
    said = [
        ("", "spent ε", f"{bound(min(spent))} to {bound(max(spent))}"),
        ("", "of budget", f"{short(min(budgets))} to {short(max(budgets))}"),
    ]
    middle = len(rows) // 2
    picture.mark(sorted(budgets)[middle], sorted(spent)[middle], plural(len(rows), "client"), said)


def _epsilon_axis(picture: Picture, title: str = "ε, log scale") -> None:
    if picture.x.high > MODERATE:
        picture.zone(max(MODERATE, picture.x.low), picture.x.high, "zone weak")
    picture.x_axis(title, picture.x.ticks(7))


def gains(table: JoiningTable) -> Chart | None:
    """Draw each client's gain over training alone, largest first: dots under its own budget, rings without noise."""
    rows = [row for row in table.rows if any(map(_told, (row.against_alone, row.against_home)))]
    if not rows:
        return None
    rows.sort(key=lambda row: -(_first(row).difference or 0.0))
    verdicts = [one for row in rows for one in (row.against_alone, row.against_home) if one and _told(one)]
    ends = [100 * ((one.difference or 0.0) + s * (one.margin or 0.0)) for one in verdicts for s in (-1, 1)]
    scale = Scale(min(0.0, *ends) - 1, max(0.0, *ends) + 1)
    wide, narrow = (_gained(rows, scale, width) for width in (_ALONE, NARROW))
    better = sum(_first(row).outcome == "gains" for row in rows)
    return chart(wide, narrow, f"Gain over training alone: {better} of {len(rows)} clients gain.", "xy")


def _gained(rows: Sequence[Joining], scale: Scale, width: int) -> Picture:
    upright = len(rows) > MOST_BARS
    if upright:
        picture = Picture(width, 320, Scale(-1, len(rows)), scale)
        picture.y_axis("points gained by joining", scale.ticks(6))
        picture.x_axis("clients, largest gain first", [])
    else:
        picture = _lined([row.client for row in rows], width, 22, scale)
        picture.x_axis("points gained by joining", scale.ticks(6))

    def at(place: float, gain: float) -> tuple[float, float]:
        return (place, gain) if upright else (gain, place)

    def stroke(ends: Sequence[tuple[float, float]], look: str) -> None:
        (a, b), (c, d) = ends
        picture.stroke((picture.across(a), picture.down(b)), (picture.across(c), picture.down(d)), look)

    across = picture.x if upright else picture.y
    stroke([at(across.low, 0), at(across.high, 0)], "limit")
    for place, row in enumerate(rows):
        for verdict, look, shift in ((row.against_home, "hollow", 0.14), (row.against_alone, "spot plain", -0.14)):
            if verdict and _told(verdict):
                beside = place + (0.0 if upright else shift)
                middle, margin = 100 * (verdict.difference or 0.0), 100 * (verdict.margin or 0.0)
                ends = [at(beside, middle - margin), at(beside, middle + margin)]
                stroke(ends, f"spread {'quiet' if look == 'hollow' else 'plain'}")
                picture.dot(*at(beside, middle), look, 3)
        said = [("", "with its budget", row.against_alone), ("", "at home, no noise", row.against_home)]
        lines = [(look, name, verdict.text) for look, name, verdict in said if verdict]
        picture.mark(*at(place, 100 * (_first(row).difference or 0.0)), row.client, lines)
    return picture


def _lined(clients: Sequence[str], width: int, tall: int, scale: Scale) -> Picture:
    """Return a picture with a line for each client, and their names to the left."""
    names = [trim(client, _NAME) for client in clients]
    left, lines = 18 + 6.6 * max(map(len, names)), Scale(len(names) - 0.4, -0.6)
    picture = Picture(width, tall * len(names) + 56, scale, lines, left=left, top=8)
    for place, name in enumerate(names):
        picture.text(picture.left - 8, picture.down(place) + 4, name, "name", "end")
    return picture


def _told(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.difference is not None and math.isfinite(verdict.difference)


def _first(row: Joining) -> Verdict:
    chosen = row.against_alone if _told(row.against_alone) else row.against_home
    assert chosen is not None
    return chosen


def reliability_chart(method: MethodRuns, look: str) -> Chart | None:
    """Draw how often predictions are right against the probability that a model gives them; over seeds."""
    jobs = [job.facts["reliability"] for job in method.counted if "reliability" in job.facts]
    if not jobs:
        return None
    bins = np.array(jobs)  # (seeds, bins, 3): records, mean probability, share that is right
    records = bins[:, :, 0].sum(0)
    used = records > 0
    sure, right = ((bins[:, :, 0] * bins[:, :, part]).sum(0)[used] / records[used] for part in (1, 2))
    shares = records[used] / records.sum()
    picture = Picture(_WIDTH, 300, Scale(0, 1), Scale(0, 1))
    picture.y_axis("share that is right", [0, 0.25, 0.5, 0.75, 1])
    picture.x_axis("probability of the predicted class", [0, 0.25, 0.5, 0.75, 1])
    picture.line([(0, 0), (1, 1)], "diagonal")
    picture.line(zip(sure.tolist(), right.tolist(), strict=True), look)
    for p, r, part in zip(sure.tolist(), right.tolist(), shares.tolist(), strict=True):
        picture.dot(p, r, f"spot {look}", math.sqrt(6 + 95 * part))
        picture.mark(
            p, r, f"sure to {percent(p)}", [(look, "right", percent(r)), ("", "of test records", percent(part))]
        )
    said = "; ".join(f"{percent(r)} at {percent(p)}" for p, r in zip(sure.tolist(), right.tolist(), strict=True))
    return chart(picture, None, f"Share of right predictions by probability: {said}.", "xy")
