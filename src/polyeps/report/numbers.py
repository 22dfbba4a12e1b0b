"""Numbers as people read them."""

from __future__ import annotations

import math
import re


def short(value: float | None, digits: int = 3) -> str:
    """A number in a few digits.

    >>> short(0.0912345), short(1e-5), short(None), short(26010.0, 5), short(float("inf"))
    ('0.0912', '1e-5', '–', '26010', '∞')
    """
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞"
    return re.sub(r"e([+-])0*", lambda power: "e-" if power[1] == "-" else "e", f"{value:.{digits}g}")


def aligned(value: float | None) -> str:
    """A number for a column: always three digits, so that its neighbours line up.

    >>> aligned(24.0), aligned(0.04), aligned(1200.0), aligned(1e-5), aligned(None)
    ('24.0', '0.0400', '1.2e3', '1e-5', '–')
    """
    text = short(value)
    return text if value is None or "e" in text or not math.isfinite(value) else f"{value:#.3g}".rstrip(".")


def share(ratio: float | None) -> str:
    r"""A part of a budget, rounded so that neither side of the limit can be taken for the other.

    >>> share(0.99996), share(1.00001), share(1.0), share(0.5)
    ('99.9\xa0%', '100.1\xa0%', '100.0\xa0%', '50.0\xa0%')
    """
    if ratio is None:
        return "–"
    if math.isinf(ratio):
        return "∞"
    scaled = round(ratio * 1000, 9)  # 0.29 * 1000 is a hair below 290
    return f"{(math.ceil(scaled) if ratio > 1 else math.floor(scaled)) / 10:.1f}\u00a0%"


def percent(accuracy: float | None, deviation: float | None = None) -> str:
    r"""An accuracy.

    >>> percent(0.9123, 0.0031), percent(0.9123), percent(float("nan")), percent(None)
    ('91.2 ± 0.3\xa0%', '91.2\xa0%', 'not a number', '–')
    """
    if accuracy is None:
        return "–"
    if not math.isfinite(accuracy):
        return "not a number"
    spread = "" if deviation is None else f" ± {100 * deviation:.1f}"
    return f"{100 * accuracy:.1f}{spread}\u00a0%"


def size(count: float | None) -> str:
    """Bytes.

    >>> size(532), size(1_040_000), size(76e6), size(None)
    ('532 B', '1.04 MB', '76.0 MB', '–')
    """
    if count is None:
        return "–"
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{aligned(count)} {unit}"
    return f"{aligned(count / 1000)} TB"


def whole(count: float) -> str:
    """A count, with a decimal only where an average needs one.

    >>> whole(26010), whole(2.3333), whole(24.0)
    ('26,010', '2.3', '24')
    """
    return f"{count:,.0f}" if float(count).is_integer() else f"{count:,.1f}"


def plural(count: float, noun: str) -> str:
    """A count and what is counted.

    >>> plural(1, "round"), plural(40, "round")
    ('1 round', '40 rounds')
    """
    return f"{whole(count)} {noun}" + ("" if count == 1 else "s")
