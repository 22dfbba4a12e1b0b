"""Pictures as SVG elements in the page's colours: scales, axes, lines, areas and dots, and marks that answer a pointer.

Colours are classes of the page, so that a picture follows the reader's light or dark scheme without a style of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from markupsafe import Markup, escape

from polyeps.report.formatting import short

WIDE, NARROW = 940, 360  # pixels: a desk and a phone
COLOURS = 10  # classes c0, c1, ... of the page
Near = Literal["x", "xy"]  # a pointer finds the mark that is nearest in x alone, or in both
Anchor = Literal["start", "middle", "end"]
# Place in the plot, from its left top corner and in parts of its size; title; rows of colour, name and text.
Mark = tuple[float, float, str, list[tuple[str, str, str]]]


@dataclass(frozen=True)
class Scale:
    """An axis from low to high."""

    low: float
    high: float
    log: bool = False

    def part(self, value: float) -> float:
        """Return where a value lies, 0 at the low end and 1 at the high one, which are not exceeded."""
        if self.high == self.low:
            return 0.5
        if not self.log:
            found = (value - self.low) / (self.high - self.low)
        elif value <= 0:
            return 0.0
        else:
            found = math.log(value / self.low) / math.log(self.high / self.low)
        return min(max(found, 0.0), 1.0)

    def ticks(self, most: int, *, whole: bool = False) -> list[float]:
        """Return at most so many round numbers on the axis.

        >>> Scale(0, 1).ticks(5), Scale(0.2, 10, log=True).ticks(6), Scale(1, 3).ticks(9, whole=True)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.2, 0.5, 1.0, 2.0, 5.0, 10.0], [1.0, 2.0, 3.0])
        """
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1, 2, 5), (1,)):
                found = [float(f"{digit}e{power}") for power in powers for digit in digits]
                found = [tick for tick in found if self.low <= tick * (1 + 1e-9) and tick <= self.high * (1 + 1e-9)]
                if len(found) <= most:
                    return found
            return found[:: math.ceil(len(found) / most)]
        span = (self.high - self.low) or 1.0
        power = 10.0 ** math.floor(math.log10(span / most))
        power = max(power, 1.0) if whole else power
        sizes = (1, 2, 5, 10, 20) if whole else (1, 2, 2.5, 5, 10, 20)
        step = next(power * one for one in sizes if span / (power * one) <= most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


@dataclass
class Picture:
    """A drawing with two axes; places are values of the axes unless they are called pixels."""

    width: float
    height: float
    x: Scale
    y: Scale
    left: float = 46
    right: float = 12
    top: float = 24
    bottom: float = 42
    marks: list[Mark] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    def across(self, value: float) -> float:
        """Return the pixels of a value of the x axis."""
        return self.left + self.x.part(value) * (self.width - self.left - self.right)

    def down(self, value: float) -> float:
        """Return the pixels of a value of the y axis."""
        return self.top + (1 - self.y.part(value)) * (self.height - self.top - self.bottom)

    def line(self, points: Iterable[tuple[float, float]], look: str) -> None:
        """Draw a line through points; where one is not finite, it is interrupted."""
        words, pen = [], "M"
        for x, y in points:
            if math.isfinite(y):
                words.append(f"{pen}{_px(self.across(x))} {_px(self.down(y))}")
                pen = "L"
            else:
                pen = "M"
        if words:
            self._parts.append(f'<path class="line {look}" d="{"".join(words)}"/>')

    def area(self, lower: Sequence[tuple[float, float]], upper: Sequence[tuple[float, float]], look: str) -> None:
        """Fill between two lines over the same places."""
        both = [pair for pair in zip(lower, upper, strict=True) if math.isfinite(pair[0][1] + pair[1][1])]
        around = [low for low, _ in both] + [high for _, high in reversed(both)]
        if both:
            words = "L".join(f"{_px(self.across(x))} {_px(self.down(y))}" for x, y in around)
            self._parts.append(f'<path class="area {look}" d="M{words}Z"/>')

    def zone(self, first: float, last: float, look: str) -> None:
        """Fill a range of the x axis over the whole height."""
        left, right = self.across(first), self.across(last)
        tall = self.height - self.top - self.bottom
        self._parts.append(
            f'<rect class="{look}" x="{_px(left)}" y="{_px(self.top)}" width="{_px(right - left)}" '
            f'height="{_px(tall)}"/>'
        )

    def stroke(self, from_: tuple[float, float], to: tuple[float, float], look: str) -> None:
        """Draw a straight line between two places in pixels."""
        self._parts.append(f'<path class="{look}" d="M{_px(from_[0])} {_px(from_[1])}L{_px(to[0])} {_px(to[1])}"/>')

    def dot(self, x: float, y: float, look: str, radius: float = 4, shift: float = 0.0) -> None:
        """Draw a dot, some pixels to the right of its place."""
        self._parts.append(
            f'<circle class="{look}" cx="{_px(self.across(x) + shift)}" cy="{_px(self.down(y))}" r="{radius:g}"/>'
        )

    def dots(self, points: Iterable[tuple[float, float]], look: str) -> None:
        """Draw many dots as one path, those on the same half pixel once."""
        spots = {(round(2 * self.across(x)) / 2, round(2 * self.down(y)) / 2) for x, y in points}
        if spots:
            words = "".join(f"M{x:g} {y:g}h0" for x, y in sorted(spots))
            self._parts.append(f'<path class="dots {look}" d="{words}"/>')

    def text(self, x: float, y: float, said: str, look: str = "", anchor: Anchor = "start") -> None:
        """Write at a place in pixels."""
        named = f' class="{look}"' if look else ""
        end = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text{named} x="{_px(x)}" y="{_px(y)}"{end}>{escape(printable(said))}</text>')

    def x_axis(self, title: str, ticks: Iterable[float]) -> None:
        """Draw the ticks and the title below, and their lines where the axis is not that of rounds."""
        floor = self.height - self.bottom
        self.stroke((self.left, floor), (self.width - self.right, floor), "axis")
        for tick in ticks:
            place = self.across(tick)
            self.stroke((place, floor), (place, floor + 4), "axis")
            self.text(place, floor + 18, short(tick), "tick", "middle")
        self.text((self.left + self.width - self.right) / 2, floor + 36, title, "tick", "middle")

    def y_axis(
        self, title: str, ticks: Iterable[float], said: Callable[[float], str] = short, title_at: float | None = None
    ) -> None:
        """Draw horizontal lines at the ticks, and the title above."""
        for tick in ticks:
            place = self.down(tick)
            self.stroke((self.left, place), (self.width - self.right, place), "grid")
            self.text(self.left - 8, place + 4, said(tick), "tick", "end")
        self.text(0, (self.top if title_at is None else title_at) - 10, title, "tick")

    def mark(self, x: float, y: float, title: str, rows: list[tuple[str, str, str]], shift: float = 0.0) -> None:
        """Name what a pointer finds at a place, or some pixels to the right of it."""
        moved = shift / (self.width - self.left - self.right)
        self.marks.append((round(self.x.part(x) + moved, 4), round(1 - self.y.part(y), 4), printable(title), rows))

    def svg(self, title: str) -> Markup:
        """Return the element, with `title` as its text alternative."""
        plot = (self.left, self.top, self.width - self.left - self.right, self.height - self.top - self.bottom)
        frame = " ".join(f"{part:g}" for part in plot)
        said = escape(printable(title))
        return Markup(
            f'<svg viewBox="0 0 {self.width:g} {_px(self.height)}" data-frame="{frame}" role="img" tabindex="0" '
            f'aria-label="{said}">{"".join(self._parts)}</svg>'
        )


@dataclass(frozen=True)
class Chart:
    """A picture for a desk and, where that would be too wide, another one for a phone; and its marks."""

    wide: Markup
    narrow: Markup | None
    near: Near
    marks: Markup  # JSON
    legend: tuple[tuple[str, str], ...] = ()  # look and name, where names do not stand at lines
    always: bool = False  # whether the legend is needed on a desk too


def chart(wide: Picture, narrow: Picture | None, title: str, near: Near, **others: Any) -> Chart:
    """Return the chart of one or two pictures of the same things."""
    small = None if narrow is None else narrow.svg(title)
    return Chart(wide.svg(title), small, near, as_json(wide.marks), **others)


def as_json(content: Any) -> Markup:
    """Return JSON that may stand inside a script element, whatever names it holds.

    >>> print(as_json(["</script>"]))
    ["\\u003c/script\\u003e"]
    """
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def printable(name: str) -> str:
    """Return a name with a sign in the place of letters that cannot be printed."""
    return "".join(letter if letter.isprintable() or letter == "\u00a0" else "�" for letter in name)


def trim(name: str, most: int) -> str:
    """Return a name in at most so many letters, all of them printable."""
    shown = printable(name)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def apart(spots: Sequence[float], tall: float, row: float) -> list[float]:
    """Move ascending heights apart to a line of text each, inside a picture of some height."""
    moved: list[list[float]] = []  # blocks of names that touch: height of the lowest, how many
    for spot in spots:
        moved.append([spot, 1])
        while len(moved) > 1 and moved[-1][0] - moved[-2][0] < row * moved[-2][1]:
            base, count = moved.pop()
            below, others = moved[-1]
            moved[-1] = [(below * others + (base - row * others) * count) / (others + count), others + count]
    heights = [base + row * place for base, count in moved for place in range(int(count))]
    for place, height in reversed(list(enumerate(heights))):
        ceiling = heights[place + 1] - row if place + 1 < len(heights) else tall
        heights[place] = min(height, ceiling)
    for place, height in enumerate(heights):
        heights[place] = max(height, heights[place - 1] + row if place else 0.0)
    return heights


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
