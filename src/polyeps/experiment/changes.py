"""Changes to an experiment's settings, as `--set KEY=VALUE` has them; several values are a sweep.

Commas separate values, except inside brackets or quotes: `0.1,0.3` are two values, `[1,2]` is one list, `"a,b"` is one
text. A value that is not TOML is a text.
"""

from __future__ import annotations

import tomllib
from typing import Any

from polyeps.errors import InputError

_CLOSING = {"[": "]", "{": "}"}


def split_change(change: str) -> tuple[str, list[str]]:
    """Return the key of a change, and its values as they are written.

    >>> split_change("training.clip=0.5,1"), split_change('data.classes=["a","b"]')
    (('training.clip', ['0.5', '1']), ('data.classes', ['["a","b"]']))
    """
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set takes KEY=VALUE, such as training.clip=0.5, not {change!r}")
    values, start = [], 0
    while True:
        end = _end(text, start)
        values.append(text[start:end].strip())
        if end == len(text):
            break
        start = end + 1
    if len(values) > 1 and not all(values):
        raise InputError(f'--set {change}: a value between commas is empty; remove the comma, or write "" for no text')
    return key.strip(), values


def parsed(text: str) -> Any:
    """Return a value as TOML has it, or the text itself.

    >>> parsed("0.5"), parsed("true"), parsed("weiavg"), parsed('"a,b"')
    (0.5, True, 'weiavg', 'a,b')
    """
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text


def _end(text: str, start: int) -> int:
    """Return where the value that begins here ends: at the next comma that separates, or at the end of the text."""
    place = start + len(text[start:]) - len(text[start:].lstrip())
    open_brackets: list[str] = []
    first = text[place : place + 1]
    if first and first in "[{\"'":
        while place < len(text):
            letter = text[place]
            if letter in "\"'":
                place = _after_quote(text, place)
            else:
                if letter in _CLOSING:
                    open_brackets.append(_CLOSING[letter])
                elif open_brackets and letter == open_brackets[-1]:
                    open_brackets.pop()
                place += 1
            if not open_brackets:
                break
    comma = text.find(",", place)
    return len(text) if comma < 0 else comma


def _after_quote(text: str, place: int) -> int:
    """Return the place behind a quoted text; a backslash escapes a quote in double quotes, as in TOML."""
    quote = text[place]
    place += 1
    while place < len(text) and text[place] != quote:
        place += 2 if quote == '"' and text[place] == "\\" else 1
    return min(place + 1, len(text))
