"""Formats numbers for tables and pages."""

from __future__ import annotations

import math
import re

from polyeps.accounting.certificate import rounded_up

SHARES = ("accuracy", "balanced_accuracy", "token accuracy", "exact match")  # metrics that are shown in per cent


def short(value: float | None, digits: int = 3) -> str:
    """Format a number in a few digits.

    >>> short(0.0912345), short(1e-5), short(None), short(26010.0, 5), short(float("inf"))
    ('0.0912', '1e-5', '–', '26010', '∞')
    """
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞"
    return re.sub(r"e([+-])0*", lambda power: "e-" if power[1] == "-" else "e", f"{value:.{digits}g}")


def bound(value: float | None) -> str:
    """Format a bound such as a spent ε as certificates do, never below its value.

    >>> bound(0.49811), bound(8.0), bound(None)
    ('0.4982', '8', '–')
    """
    return short(value) if value is None or math.isinf(value) else rounded_up(value)


def three_digits(value: float | None) -> str:
    """Format a number in three digits, so that a column lines up.

    >>> three_digits(24.0), three_digits(0.04), three_digits(1200.0), three_digits(1e-5), three_digits(None)
    ('24.0', '0.0400', '1.2e3', '1e-5', '–')
    """
    text = short(value)
    return text if value is None or "e" in text or not math.isfinite(value) else f"{value:#.3g}".rstrip(".")


def share(ratio: float | None) -> str:
    r"""Format a part of a budget, rounded away from 100 % so that an excess is never hidden or made up.

    >>> share(0.99996), share(1.00001), share(1.0), share(0.5)
    ('99.9\xa0%', '100.1\xa0%', '100.0\xa0%', '50.0\xa0%')
    """
    if ratio is None:
        return "–"
    if math.isinf(ratio):
        return "∞"
    scaled = round(ratio * 1000, 9)  # 0.29 * 1000 is a hair below 290
    return f"{(math.ceil(scaled) if ratio > 1 else math.floor(scaled)) / 10:.1f}\u00a0%"


def percent(accuracy: float | None, deviation: float | None = None, digits: int = 1) -> str:
    r"""Format an accuracy.

    >>> percent(0.9123, 0.0031), percent(0.9123), percent(float("nan")), percent(None)
    ('91.2 ± 0.3\xa0%', '91.2\xa0%', 'not a number', '–')
    """
    if accuracy is None:
        return "–"
    if not math.isfinite(accuracy):
        return "not a number"
    spread = "" if deviation is None else f" ± {100 * deviation:.1f}"
    return f"{100 * accuracy:.{digits}f}{spread}\u00a0%"


def reached(measure: str, value: float | None, deviation: float | None = None) -> str:
    r"""Format what a model reached: a share in per cent, other figures as they are.

    >>> reached("token accuracy", 0.5), reached("r2", 0.8231, 0.01), reached("r2", None)
    ('50.0\xa0%', '0.823 ± 0.010', '–')
    """
    if measure in SHARES or value is None or not math.isfinite(value):
        return percent(value, deviation)
    return f"{value:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")


def byte_size(count: float | None) -> str:
    """Format a number of bytes.

    >>> byte_size(532), byte_size(1_040_000), byte_size(76e6), byte_size(None)
    ('532 B', '1.04 MB', '76.0 MB', '–')
    """
    if count is None:
        return "–"
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{three_digits(count)} {unit}"
    return f"{three_digits(count / 1000)} TB"


def counted(count: float) -> str:
    """Format a count, with a decimal only where an average needs one.

    >>> counted(26010), counted(2.3333), counted(24.0)
    ('26,010', '2.3', '24')
    """
    return f"{count:,.0f}" if float(count).is_integer() else f"{count:,.1f}"


def plural(count: float, noun: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "round"), plural(40, "round")
    ('1 round', '40 rounds')
    """
    return f"{counted(count)} {noun}" + ("" if count == 1 else "s")
