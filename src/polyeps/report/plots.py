"""Charts over rounds (accuracy, clients left) and of accuracy against privacy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from polyeps.report.curves import Curve, accuracy_curve, active_curve
from polyeps.report.formatting import SHARES, plural, reached, short
from polyeps.report.strength import MODERATE, STRONG
from polyeps.report.svg import COLOURS, NARROW, WIDE, Chart, Mark, Picture, Scale, apart, chart, trim
from polyeps.report.tables import MethodRuns, summarise

_ROW = 17  # pixels between lines of text
_LETTER = 7.2  # pixels of one, about
_LONGEST = 40  # letters of a name at the end of its line
_MANY = 10  # names that find room at the ends of their lines
_FEW = 10  # evaluated rounds that are marked one by one
_DOT = 11  # pixels between two dots
_RUG = 40  # clients whose ε are ticked one by one


@dataclass(frozen=True)
class _Drawn:
    """A curve to draw, with the look of its method."""

    label: str
    curve: Curve
    look: str
    text: Callable[[float, float], str]  # of a value and its deviation


def looks(methods: Sequence[MethodRuns]) -> list[str]:
    """Return the classes of each method, the same in all charts: a colour, and dashes for controls."""
    return [f"c{number % COLOURS}{' dashed' if one.control else ''}" for number, one in enumerate(methods)]


def accuracy_chart(methods: Sequence[MethodRuns]) -> Chart | None:
    """Draw the accuracy per round, a line per method with a band of one standard deviation over seeds."""
    measure = methods[0].measure if methods else "accuracy"
    drawn = [
        _Drawn(one.label, accuracy_curve(one), look, lambda m, d: reached(measure, m, d or None))
        for one, look in zip(methods, looks(methods), strict=True)
    ]
    drawn = [one for one in drawn if any(map(math.isfinite, one.curve.mean))]
    if not drawn:
        return None
    rows = [summarise(method) for method in methods if method.counted]
    ends = "; ".join(f"{row.label} {reached(row.measure, row.final_accuracy)}" for row in rows)
    said = _measured(measure)
    return _over_rounds(drawn, _accuracies(drawn, measure), f"test {measure}", f"At the end: {ends}.", said)


def _measured(measure: str) -> Callable[[float], str]:
    return (lambda value: f"{100 * value:.3g}\u00a0%") if measure in SHARES else short


def _accuracies(drawn: Sequence[_Drawn], measure: str) -> Scale:
    both = [
        (mean - spread, mean + spread)
        for one in drawn
        for mean, spread in zip(one.curve.mean, one.curve.deviation, strict=True)
        if math.isfinite(mean + spread)
    ] or [(mean, mean) for one in drawn for mean in one.curve.mean if math.isfinite(mean)]
    return _padded([value for pair in both for value in pair], shares=measure in SHARES)


def _padded(values: Sequence[float], *, shares: bool) -> Scale:
    low, high = min(values), max(values)
    room = max(0.06 * (high - low), 0.02) if shares else 0.06 * (high - low) or 0.02 * abs(high) or 0.02
    low, high = low - room, high + room
    return Scale(max(low, 0.0), min(high, 1.0)) if shares else Scale(low, high)


def active_chart(methods: Sequence[MethodRuns]) -> Chart | None:
    """Draw how many clients could afford each round; methods that lost the same clients share a line."""
    together: dict[Curve, list[tuple[str, str]]] = {}
    for method, look in zip(methods, looks(methods), strict=True):
        together.setdefault(active_curve(method), []).append((method.label, look))
    drawn = [
        _Drawn(_names([label for label, _ in same]), curve, same[0][1], lambda mean, _: plural(mean, "client"))
        for curve, same in together.items()
        if curve.rounds
    ]
    if not drawn:
        return None
    said = "; ".join(f"{one.label} from {short(one.curve.mean[0])} to {short(one.curve.mean[-1])}" for one in drawn)
    scale = Scale(0, 1.08 * max(max(one.curve.mean) for one in drawn))
    return _over_rounds(drawn, scale, "clients left", f"Clients that could afford a further round: {said}.", short)


def _names(labels: Sequence[str]) -> str:
    """Name a line that several methods share.

    >>> _names(["PFA", "PFA+"]), _names(["PFA", "PFA+", "Minimum", "Maximum"])
    ('PFA, PFA+', 'PFA and 3 more')
    """
    together = ", ".join(labels)
    return together if len(labels) == 1 or len(together) <= 20 else f"{labels[0]} and {len(labels) - 1} more"


def _over_rounds(drawn: Sequence[_Drawn], scale: Scale, what: str, said: str, tick: Callable[[float], str]) -> Chart:
    """Return the chart of curves over rounds."""
    rounds = sorted({round for one in drawn for round in one.curve.rounds})
    direct = len(drawn) <= _MANY and max(len(one.label) for one in drawn) <= _LONGEST
    pictures = []
    for width in (WIDE, NARROW):
        at_lines = direct and width == WIDE
        picture = Picture(
            width, 380 if width == WIDE else 290, Scale(rounds[0], rounds[-1]), scale, left=50,
            right=34 + _LETTER * max(len(one.label) for one in drawn) if at_lines else 14,
        )  # fmt: skip
        picture.y_axis(what, scale.ticks(6, whole=what == "clients left"), tick)
        picture.x_axis("round", _round_ticks(rounds, width))
        for one in drawn:
            points = list(zip(one.curve.rounds, one.curve.mean, one.curve.deviation, strict=True))
            if any(one.curve.deviation):
                picture.area([(n, m - d) for n, m, d in points], [(n, m + d) for n, m, d in points], one.look)
        for one in drawn:
            picture.line(zip(one.curve.rounds, one.curve.mean, strict=True), one.look)
            if len(one.curve.rounds) <= _FEW:
                for number, mean in zip(one.curve.rounds, one.curve.mean, strict=True):
                    if math.isfinite(mean):
                        picture.dot(number, mean, f"spot {one.look}", 3)
        if at_lines:
            ends = [(next(m for m in reversed(one.curve.mean) if math.isfinite(m)), one) for one in drawn]
            _name_ends(picture, [(value, one.label, one.look) for value, one in ends])
        pictures.append(picture)
    pictures[0].marks += _round_marks(pictures[0], drawn, rounds)
    legend = tuple((one.look, one.label) for one in drawn)
    return chart(pictures[0], pictures[1], f"{what} per round. {said}", "x", legend=legend, always=not direct)


def _round_marks(picture: Picture, drawn: Sequence[_Drawn], rounds: Sequence[int]) -> list[Mark]:
    """Return a mark for every evaluated round, the methods in the order of their lines, highest first."""
    known = [
        (one, {n: (m, d) for n, m, d in zip(one.curve.rounds, one.curve.mean, one.curve.deviation, strict=True)})
        for one in drawn
    ]
    marks: list[Mark] = []
    for number in rounds:
        found = [(values[number], one) for one, values in known if number in values]
        found.sort(key=lambda pair: -pair[0][0] if math.isfinite(pair[0][0]) else math.inf)
        rows = [(one.look, one.label, one.text(*value)) for value, one in found]
        marks.append((round(picture.x.part(number), 4), 0.0, f"round {number}", rows))
    return marks


def _round_ticks(rounds: Collection[int], width: int) -> list[float]:
    """Return the ticks: at the evaluated rounds if they are few and stand apart, else at round numbers."""
    most = _FEW if width == WIDE else 6
    marked = sorted(rounds)
    room = (marked[-1] - marked[0]) / (2 * most)
    if len(marked) <= most and all(after - before >= room for before, after in pairwise(marked)):
        return list(map(float, marked))
    return Scale(marked[0], marked[-1]).ticks(8 if width == WIDE else 5, whole=True)


def _name_ends(picture: Picture, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name lines at the right edge, moved apart where names would touch."""
    ordered = sorted(ends, key=lambda end: end[0])
    tall = picture.height - picture.top - picture.bottom
    spots = [picture.y.part(value) * tall for value, _, _ in ordered]
    edge, floor = picture.width - picture.right, picture.height - picture.bottom
    for spot, height, (_, label, look) in zip(spots, apart(spots, tall, _ROW), ordered, strict=True):
        picture.stroke((edge + 3, floor - spot), (edge + 18, floor - height), f"lead {look}")
        picture.text(edge + 23, floor - height + 4, trim(label, _LONGEST))


@dataclass(frozen=True)
class _Standing:
    """A method in the picture of accuracy against privacy."""

    label: str
    look: str
    accuracy: float
    deviation: float
    epsilons: tuple[float, ...]  # of the clients that have a guarantee, ascending
    idle: int  # clients that spent nothing
    bare: int  # clients without a guarantee
    text: str


def privacy_chart(methods: Sequence[MethodRuns]) -> Chart | None:
    """Draw each method's final accuracy against the ε its clients spend: a line over all, a dot at the median."""
    found = [one for method, look in zip(methods, looks(methods), strict=True) if (one := _standing(method, look))]
    known = [epsilon for one in found for epsilon in one.epsilons]
    if not known:
        return None
    measure = methods[0].measure
    scale = _padded([one.accuracy + s * one.deviation for one in found for s in (-1, 1)], shares=measure in SHARES)
    low, high = min(min(known) / 1.5, STRONG / 1.5), max(max(known) * 1.5, MODERATE * 1.5)
    open_ = any(not one.epsilons for one in found)
    direct = len(found) <= _MANY and max(len(one.label) for one in found) <= _LONGEST
    pictures = []
    for width in (WIDE, NARROW):
        wide = width == WIDE
        beyond = high * (high / low) ** (0.13 if wide else 0.22) if open_ else high
        picture = Picture(
            width, 360 if wide else 330, Scale(low, beyond, log=True), scale, left=50, top=44,
            right=34 + _LETTER * max(len(one.label) for one in found) if wide and direct else 10,
        )  # fmt: skip
        _zones(picture, low, high, beyond)
        picture.y_axis(f"test {measure}", scale.ticks(6), _measured(measure), title_at=24)
        ticks = Scale(low, high, log=True).ticks(9 if wide else 5)
        picture.x_axis("ε of the clients, log scale", ticks)
        for one, shift in zip(found, _side_by_side(picture, found, math.sqrt(high * beyond)), strict=True):
            _stand(picture, one, math.sqrt(high * beyond), shift)
        if wide and direct:
            _name_ends(picture, [(one.accuracy, one.label, one.look) for one in found])
        pictures.append(picture)
    said = "; ".join(f"{one.label}: {one.text}" for one in found)
    legend = tuple((one.look, one.label) for one in found)
    title = f"Test {measure} against the clients' ε. {said}."
    return chart(pictures[0], pictures[1], title, "xy", legend=legend, always=not direct)


def _standing(method: MethodRuns, look: str) -> _Standing | None:
    row = summarise(method)
    if row.final_accuracy is None or not math.isfinite(row.final_accuracy):
        return None
    clients = method.counted[0].clients
    epsilons = [row.epsilon if row.spent is None else row.spent for row in clients]
    known = tuple(sorted(e for e in epsilons if e is not None and 0 < e < math.inf))
    if not known and method.budgets != "none":
        return None
    reach = f"ε {short(known[0])} to {short(known[-1])}" if known else "no guarantee"
    spread = row.final_accuracy_deviation or 0.0
    text = f"{reached(row.measure, row.final_accuracy, row.final_accuracy_deviation)}, {reach}"
    bare = sum(e is None or math.isinf(e) for e in epsilons)
    idle = len(epsilons) - len(known) - bare
    return _Standing(
        method.label, look, row.final_accuracy, spread if math.isfinite(spread) else 0.0, known, idle, bare, text
    )


def _counts(one: _Standing) -> str:
    """Count the clients that spend, that spent nothing, and that have no guarantee."""
    parts = {"spend": len(one.epsilons), "spent nothing": one.idle, "without guarantee": one.bare}
    return ", ".join(f"{count} {said}" for said, count in parts.items() if count)


def _zones(picture: Picture, low: float, high: float, beyond: float) -> None:
    """Shade what is moderate, weak and without guarantee, in words above."""
    bounds = [(low, STRONG, "strong"), (STRONG, MODERATE, "moderate"), (MODERATE, high, "weak")]
    if beyond > high:
        bounds.append((high, beyond, "none"))
    for first, last, word in bounds:
        if word != "strong":
            picture.zone(first, last, f"zone {word}")
        middle = (picture.across(first) + picture.across(last)) / 2
        none = "no guarantee" if picture.width == WIDE else "–"
        picture.text(middle, picture.top - 8, none if word == "none" else word, "tick", "middle")


def _side_by_side(picture: Picture, found: Sequence[_Standing], open_at: float) -> list[float]:
    """Return how far each dot is moved along its line, in pixels, so that none hides another one."""
    taken: list[tuple[float, float]] = []
    shifts: list[float] = []
    for one in found:
        place, height = picture.across(_median(one, open_at)), picture.down(one.accuracy)
        shift = next(
            shift
            for shift in (sign * step * _DOT for step in range(len(found) + 1) for sign in (1, -1))
            if all(math.hypot(place + shift - x, height - y) >= _DOT - 0.5 for x, y in taken)
        )
        taken.append((place + shift, height))
        shifts.append(shift)
    return shifts


def _median(one: _Standing, open_at: float) -> float:
    return statistics.median_low(one.epsilons) if one.epsilons else open_at


def _stand(picture: Picture, one: _Standing, open_at: float, shift: float) -> None:
    """Draw one method: its range of ε, a tick for each client while they are few, its spread over seeds."""
    middle = _median(one, open_at)
    height = picture.down(one.accuracy)
    if one.epsilons:
        picture.line([(one.epsilons[0], one.accuracy), (one.epsilons[-1], one.accuracy)], f"thin {one.look}")
        for epsilon in sorted(set(one.epsilons)) if len(set(one.epsilons)) <= _RUG else ():
            place = picture.across(epsilon)
            picture.stroke((place, height - 3), (place, height + 3), f"rug {one.look}")
    if one.deviation:
        place = picture.across(middle) + shift
        low, high = (picture.down(one.accuracy + sign * one.deviation) for sign in (-1, 1))
        picture.stroke((place, low), (place, high), f"spread {one.look}")
    picture.dot(middle, one.accuracy, f"spot {one.look}", 5, shift)
    rows = [
        (one.look, "accuracy, ε", one.text),
        ("", "median ε", short(middle) if one.epsilons else "–"),
        ("", "clients", _counts(one)),
    ]
    for epsilon in {one.epsilons[0], middle, one.epsilons[-1]} if one.epsilons else {middle}:
        picture.mark(epsilon, one.accuracy, one.label, rows, shift if epsilon == middle else 0.0)
