"""The report's page, as a test reads it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from polyeps.report.page import write_page


def page(*folders: Path) -> str:
    output = folders[0].parent / "page.html"
    write_page(folders, output)
    return output.read_text(encoding="utf-8")


def words(text: str) -> str:
    """What a reader reads: no tags, no styles, plain spaces."""
    bare = re.sub(r"<(style|script|svg).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", bare.replace("&#39;", "'")).replace(" ,", ",")


class Balance(HTMLParser):
    """Notes every tag that is opened and not closed, or the other way round."""

    FREE = frozenset({"meta", "link", "br", "tr", "td", "path", "circle", "rect", "use", "i", "input", "option"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag not in self.FREE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.FREE:
            assert self.open.pop() == tag
