from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polyeps.data.partition import KINDS
from polyeps.data.public_catalogue import PUBLIC_DATASETS, PublicDataset


@pytest.mark.parametrize("published", PUBLIC_DATASETS.values(), ids=PUBLIC_DATASETS)
def test_every_entry_can_be_obtained_or_is_made_here(published: PublicDataset) -> None:
    assert published.title
    assert published.licence
    for file in published.files + published.other_files:
        assert len(file.sha256) == 64
        assert set(file.sha256) <= set("0123456789abcdef")
    wanted = published.other_files or published.files
    assert all(file.url.startswith("http") for file in wanted)
    assert bool(wanted) == (published.download_mb > 0)


def test_an_archive_is_kept_beside_the_files_it_holds() -> None:
    assert {file.download for file in PUBLIC_DATASETS["cifar10"].files} == {"cifar10/cifar-10-binary.tar.gz"}
    assert PUBLIC_DATASETS["bank"].files[0].download == "bank/bank.zip"
    assert PUBLIC_DATASETS["mnist"].files[0].download == "mnist/train-images-idx3-ubyte.gz"


def test_reading_the_catalogue_waits_for_no_heavy_library() -> None:
    script = (
        "import sys, polyeps.data.public_catalogue, polyeps.data.public_files, polyeps.cli.data;"
        "print(sorted({'numpy', 'torch', 'sklearn', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_documentation_agrees_with_the_catalogue() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "data-sets.md").read_text()
    for published in PUBLIC_DATASETS.values():
        test = f"{published.test_records:,}" if published.test_records else "–"
        shape = " × ".join(str(size) for size in published.shape)
        row = (
            f"`{published.name}`",
            published.title,
            f"{published.records:,}",
            test,
            shape,
            str(len(published.classes)),
            published.licence,
        )
        assert f"| {' | '.join(row)} |" in page
    for kind in KINDS:
        assert f"`{kind}`" in page
