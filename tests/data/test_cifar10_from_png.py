"""CIFAR-10's binary files, made from pictures of its batches."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from io import BytesIO
from pathlib import Path

import matplotlib.image
import numpy as np

from polyeps.data.public_loaders import parse_cifar

SCRIPT = Path(__file__).parents[2] / "tools" / "cifar10_from_png.py"


def test_a_picture_of_a_batch_is_read_back_as_its_images() -> None:
    spec = spec_from_file_location("cifar10_from_png", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules["cifar10_from_png"] = made
    spec.loader.exec_module(made)
    images = np.random.default_rng(1).integers(0, 256, (10_000, 3, 32, 32), np.uint8)
    labels = np.arange(10_000) % 10
    png = BytesIO()
    matplotlib.image.imsave(png, images.transpose(0, 2, 3, 1).reshape(10_000, 1024, 3), format="png")
    read, classes = parse_cifar(made.binary(png.getvalue(), labels.tolist()), "batch")
    assert np.array_equal(read, images)
    assert np.array_equal(classes, labels)
