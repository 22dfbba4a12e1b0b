from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polyeps.data.catalogue import CATALOGUE, Entry
from polyeps.data.partition import KINDS


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=CATALOGUE)
def test_every_entry_can_be_obtained_or_is_made_here(entry: Entry) -> None:
    assert entry.title
    assert entry.licence
    for file in entry.files + entry.other_files:
        assert len(file.sha256) == 64
        assert set(file.sha256) <= set("0123456789abcdef")
    wanted = entry.other_files or entry.files
    assert all(file.url.startswith("http") for file in wanted)
    assert bool(wanted) == (entry.download_mb > 0)


def test_an_archive_is_kept_beside_the_files_it_holds() -> None:
    assert {file.download for file in CATALOGUE["cifar10"].files} == {"cifar10/cifar-10-binary.tar.gz"}
    assert CATALOGUE["bank"].files[0].download == "bank/bank.zip"
    assert CATALOGUE["mnist"].files[0].download == "mnist/train-images-idx3-ubyte.gz"


def test_reading_the_catalogue_waits_for_no_heavy_library() -> None:
    script = (
        "import sys, polyeps.data.catalogue, polyeps.data.sources, polyeps.cli.data;"
        "print(sorted({'numpy', 'torch', 'sklearn', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_documentation_agrees_with_the_catalogue() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "data-sets.md").read_text()
    for entry in CATALOGUE.values():
        test = f"{entry.test_records:,}" if entry.test_records else "–"
        shape = " × ".join(str(size) for size in entry.shape)
        row = (
            f"`{entry.name}`",
            entry.title,
            f"{entry.records:,}",
            test,
            shape,
            str(len(entry.classes)),
            entry.licence,
        )
        assert f"| {' | '.join(row)} |" in page
    for kind in KINDS:
        assert f"`{kind}`" in page
