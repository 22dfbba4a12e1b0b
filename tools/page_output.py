"""Write the output of commands into pages: `python tools/page_output.py` after it has changed; a test compares them.

A block of a page that follows the line `<!-- output of: COMMAND -->` holds what the command prints, in lines of at most
120 characters.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- output of: (polyeps [^\n]*) -->\n```text\n)(.*?)(```)", re.DOTALL)
BEFORE = {"ward.ledger": "polyeps ledger set-budget --file ward.ledger --client ward --epsilon 2 --delta 1e-6"}


def printed(command: str) -> str:
    """Return what a command prints, in a folder with the examples and the files that its page has made before."""
    from polyeps.cli import execute

    text = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("examples").symlink_to(ROOT / "examples")
        os.environ.setdefault("POLYEPS_CACHE", str(Path(folder, "cache")))
        for file, making in BEFORE.items():
            if file in command:
                with redirect_stdout(io.StringIO()):
                    execute(shlex.split(making)[1:])
        with redirect_stdout(text):
            assert execute(shlex.split(command)[1:]) == 0, command
    lines: list[str] = []
    for line in text.getvalue().rstrip().splitlines():
        lines += textwrap.wrap(line, 118) if len(line.rstrip()) > 118 else [line.rstrip()]
    return "\n".join(lines).strip("\n") + "\n"


def pages() -> list[Path]:
    """Return the pages that show output."""
    return [page for page in sorted(ROOT.glob("docs/**/*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


def outdated(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the commands of a page whose output is another one: command, block, output."""
    for _, command, block, _ in BLOCK.findall(page.read_text(encoding="utf-8")):
        if (now := printed(command)) != block:
            yield command, block, now


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    for page in pages():
        written = BLOCK.sub(lambda found: found[1] + printed(found[2]) + found[4], page.read_text(encoding="utf-8"))
        page.write_text(written, encoding="utf-8")
