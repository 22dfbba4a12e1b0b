from __future__ import annotations

import numpy as np
import pytest

from polyeps.data.synthetic import synthetic
from polyeps.errors import InputError


@pytest.mark.parametrize(("name", "records", "size"), [("syn-l", 60_000, 100), ("syn-h", 100_000, 300)])
def test_fedsels_sizes(name: str, records: int, size: int) -> None:
    made = synthetic(name, shrink=0.01, threshold=0.9, generator=np.random.default_rng(1))
    assert made.features.shape == (records, size)
    assert made.features.dtype == np.float32
    assert abs(made.labels.mean() - 0.5) < 0.02


def test_small_features_are_shrunk_and_large_ones_are_not() -> None:
    made = synthetic("syn-l", shrink=0.01, threshold=0.6, generator=np.random.default_rng(1))
    deviation = made.features.std(axis=0)
    large = deviation > 0.1
    assert 20 <= large.sum() <= 60  # 40 expected of 100
    assert deviation[large].min() > 0.58
    assert deviation[~large].max() < 0.0062


def test_labels_come_from_a_plane_that_does_not_see_the_shrinking() -> None:
    made = synthetic("syn-l", shrink=0.01, threshold=0.9, generator=np.random.default_rng(1), records=20_000)
    standardised = made.features / made.features.std(axis=0)
    plane, *_ = np.linalg.lstsq(standardised, 2.0 * made.labels - 1, rcond=None)
    assert ((standardised @ plane > 0) == made.labels).mean() > 0.95
    shrunk = made.features.std(axis=0) < 0.01
    assert np.abs(plane[shrunk]).mean() > 0.5 * np.abs(plane[~shrunk]).mean()


def test_the_generator_decides_everything() -> None:
    one, same, other = (
        synthetic("syn-l", shrink=0.1, threshold=0.6, generator=np.random.default_rng(seed), records=10)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one.features, same.features)
    assert not np.array_equal(one.features, other.features)


def test_bad_parameters_are_refused() -> None:
    generator = np.random.default_rng(1)
    with pytest.raises(InputError, match="syn-l or syn-h, not 'syn-m'"):
        synthetic("syn-m", shrink=0.1, threshold=0.6, generator=generator)
    with pytest.raises(InputError, match=r"C1 .* between 0 and 1, not 2"):
        synthetic("syn-l", shrink=2, threshold=0.6, generator=generator)
    with pytest.raises(InputError, match=r"C2 .* between 0 and 1, not nan"):
        synthetic("syn-l", shrink=0.1, threshold=float("nan"), generator=generator)
    with pytest.raises(InputError, match="at least one record, not 0"):
        synthetic("syn-l", shrink=0.1, threshold=0.6, generator=generator, records=0)
