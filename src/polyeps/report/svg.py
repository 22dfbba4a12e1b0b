"""Turns matplotlib figures into SVG with the page's colours and font, and no outside address."""

from __future__ import annotations

import html
import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polyeps.report.tables import MethodRuns

WIDE, NARROW = 1000, 380  # pixels: a desk and a phone
# Drawn in these colours, shown in the page's: a picture then follows the reader's light or dark scheme.
INK, MUTED, GRID, ALARM = "#010203", "#010204", "#010205", "#010206"
METHODS = tuple(f"#0a0b{number:02x}" for number in range(1, 9))
_SHOWN = {INK: "ink", MUTED: "muted", GRID: "grid", ALARM: "alarm"} | {
    colour: f"method-{number}" for number, colour in enumerate(METHODS)
}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a client may be called $x$
    "path.simplify": False,  # simplified, a path of dots is one dot
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "grid.color": GRID,
    "grid.linewidth": 1,
    "font.size": 13,
}


@contextmanager
def styled() -> Iterator[None]:
    """Apply our matplotlib settings while a figure is made."""
    with mpl.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure in CSS pixels: one point of the drawing is one pixel of the page."""
    return Figure(figsize=(width / 72, height / 72), dpi=72)


def trim(name: str, most: int) -> str:
    """Return a name in at most so many letters, all of them printable."""
    printable = "".join(letter if letter.isprintable() else "�" for letter in name)
    return printable if len(printable) <= most else printable[: most - 1] + "…"


def wrapped(name: str, most: int) -> str:
    """Wrap a name in lines of at most so many letters; four lines hold the longest name an experiment may give.

    >>> wrapped("cmp-fed, every client's directions", 26).splitlines()
    ["cmp-fed, every client's", 'directions']
    """
    lines = textwrap.wrap(trim(name, 4 * most), most, max_lines=4, placeholder="…", break_on_hyphens=False)
    return "\n".join(lines)


def place_axes(figure: Figure, left: float, right: float, bottom: float, top: float) -> Axes:
    """Return axes inside margins given in pixels."""
    width, height = figure.get_size_inches() * 72
    axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height))
    axes.tick_params(length=0, pad=6, labelsize=12)
    return axes


def coloured(methods: Sequence[MethodRuns]) -> list[tuple[MethodRuns, str]]:
    """Return each method with its colour, the same in all pictures."""
    return [(method, METHODS[number % len(METHODS)]) for number, method in enumerate(methods)]


def inline(figure: Figure, name: str, title: str) -> str:
    """Return the figure as an `svg` element with identifiers of its own, and `title` as its text alternative."""
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    stream = io.StringIO()
    # Identifiers are hashed with the name: equal ones in two pictures would clip one by the other.
    with mpl.rc_context(_SETTINGS | {"svg.hashsalt": name}), warnings.catch_warnings():
        # The page's font may hold characters that the font measured with does not.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None})
    return _cleaned(stream.getvalue(), title)


def _cleaned(text: str, title: str) -> str:
    """Strip headers, addresses, document-wide styles and repeated identifiers from matplotlib's output."""
    box = re.search(r'viewBox="([^"]*)"', text)
    body = text[text.index(">", text.index("<svg")) + 1 :]
    for pattern in (r"<metadata>.*?</metadata>", r"<style[^>]*>.*?</style>", r"<!--.*?-->", r"<defs>\s*</defs>"):
        body = re.sub(pattern, "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r"\d+\.\d{3,}(?=[^<>]*>)", lambda number: f"{float(number[0]):.2f}", body)
    for drawn, shown in _SHOWN.items():
        body = body.replace(drawn, f"var(--{shown})")
    body = re.sub(r"\n\s*", "\n", body)
    said = html.escape(title)
    return f'<svg viewBox="{box[1] if box else ""}" role="img" aria-label="{said}"><title>{said}</title>{body}'
