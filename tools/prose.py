"""Check the style of pages and the words of code: `python tools/prose.py`. Exit status 1: something was found."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST = 48  # words of a sentence

# Words of our own for which the field has one that everybody knows; in pages and code.
OWN_WORDS = {
    r"paper 00\d": "the paper's authors and year",
    r"purses?": "ledger",
    r"dues": "round price",
    r"liberal": "high-ε",
    r"menu": "privacy levels",
    r"loudness": "noise level",
    r"own coin": "Poisson-sampled",
    r"in force": "effective",
    r"in small": "quick version",
}
# Words that pages can do without, or say better.
WORDS = {
    r"e\.g\.": "for example",
    r"i\.e\.": "that is",
    r"etc\.": "and so on, or the full list",
    r"in order to": "to",
    r"utili[sz]e[sd]?": "use",
    r"leverag(e|es|ed|ing)": "use",
    r"(of course|obviously|needless to say|trivially|it is easy to)": "nothing: leave it out",
    r"(seamless(ly)?|powerful|cutting[- ]edge|state[- ]of[- ]the[- ]art|blazing(ly)?)": "a figure, or nothing",
    r"(behavior|optimizers?|initiali[z]e[sd]?|normali[z]e[sd]?|organi[z]ations?|recogni[z]e[sd]?)": "British spelling",
    r"(\w{2,}) \1": "one of the two words",
}
PATTERNS = {
    re.compile(rf"(?<![\w.\"-])({words})(?![\w-])", re.IGNORECASE): better for words, better in OWN_WORDS.items()
}
PAGE_PATTERNS = {re.compile(rf"(?<![\w-]){words}(?!\w)", re.IGNORECASE): better for words, better in WORDS.items()}
SUBJECTS = re.compile(r"(?:^|[.!?:] )((?:Who|Which) [^.!?]*[.!])")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page with the line each begins on, without blocks, tables, code, links and markers."""
    blank = re.sub(
        r"^ *```.*?^ *```[^\n]*$|^<!--.*?-->$", lambda found: "\n" * found[0].count("\n"), text, flags=re.M | re.S
    )
    number = 1
    for block in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+|>|\|) ))", blank):
        plain = block.strip()
        if plain and not plain.startswith(("|", "![", "#")):
            plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|<https?:[^>]*>", r"\1", plain)
            plain = re.sub(r"`[^`]*`", "code", plain)
            beginning = number + len(block) - len(block.lstrip("\n"))
            yield beginning, re.sub(r"[*_]{1,2}|^(?:[-*>]|\d+\.) ", "", " ".join(plain.split()))
        number += block.count("\n")


def check_page(text: str, words: bool = True) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with a page, with line numbers."""
    for number, paragraph in prose(text):
        for pattern, better in (PATTERNS | PAGE_PATTERNS if words else PAGE_PATTERNS).items():
            for found in pattern.finditer(paragraph):
                yield number, f"{found[0]!r}: write {better}"
        for found in SUBJECTS.finditer(paragraph):
            yield number, f"{found[1][:40]!r}…: name the subject instead of {found[1].split()[0]!r}"
        for sentence in re.split(r"(?<=[.!?:;]) ", paragraph):
            if len(sentence.split()) > LONGEST and not sentence.startswith('"'):  # a certificate's is quoted
                yield number, f"{sentence[:40]!r}…: {len(sentence.split())} words; at most {LONGEST}"


def check_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the words of our own in a Python file."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, better in PATTERNS.items():
            for found in pattern.finditer(line):
                yield number, f"{found[0]!r}: write {better}"


def findings() -> Iterator[str]:
    """Yield a line for everything that is found in the repository."""
    for page in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]:
        for number, said in check_page(page.read_text(encoding="utf-8"), words=page.name != "CHANGELOG.md"):
            yield f"{page.relative_to(ROOT)}:{number}: {said}"
    for folder in ("src", "examples", "benchmarks", "reproductions"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for number, said in check_code(file.read_text(encoding="utf-8")):
                yield f"{file.relative_to(ROOT)}:{number}: {said}"


if __name__ == "__main__":
    lines = list(findings())
    print("\n".join(lines) if lines else "prose: nothing to say")
    sys.exit(bool(lines))
