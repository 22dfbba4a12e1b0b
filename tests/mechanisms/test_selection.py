import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles

from polyeps.errors import InputError
from polyeps.mechanisms import selection

EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0)
TRUE_EPSILON = {
    (2, 1): (0.133309, 0.663643, 1.310550, 2.519079, 4.666287),
    (5, 1): (0.121584, 0.618202, 1.249781, 2.474553, 4.657654),
    (10, 1): (0.111584, 0.570668, 1.173043, 2.407000, 4.643440),
    (32, 3): (0.103374, 0.520199, 1.050214, 2.137307, 4.259038),
    (100, 10): (0.101053, 0.506196, 1.015024, 2.040144, 4.082686),
    (123, 12): (0.100854, 0.505029, 1.012204, 2.032794, 4.068908),
    (300, 30): (0.100348, 0.502042, 1.004927, 2.013123, 4.027928),
}
SOUND_KEEP = {
    (2, 1): (0.51874317, 0.59290140, 0.68085120, 0.82608966, 0.96633151),
    (10, 1): (0.52240195, 0.60816889, 0.70237469, 0.84120514, 0.96754095),
    (32, 3): (0.52416640, 0.61792409, 0.72173199, 0.86697718, 0.97699086),
    (100, 10): (0.52471953, 0.62102351, 0.72815400, 0.87663560, 0.98051192),
    (123, 12): (0.52476805, 0.62129088, 0.72869182, 0.87739052, 0.98076850),
    (300, 30): (0.52489266, 0.62198166, 0.73009523, 0.87942511, 0.98151597),
}


@pytest.mark.parametrize(("shape", "expected"), TRUE_EPSILON.items())
def test_published_encoding_costs_more_than_it_claims(shape: tuple[int, int], expected: tuple[float, ...]) -> None:
    for epsilon, true in zip(EPSILONS, expected, strict=True):
        law = selection.perturbed_encoding(*shape, selection.published_keep(epsilon))
        assert law.epsilon == pytest.approx(true, abs=1e-6)
        assert (
            epsilon < law.epsilon <= epsilon + math.log((1 + 2 * math.exp(epsilon)) / (2 + math.exp(epsilon))) + 1e-12
        )


@pytest.mark.parametrize(("shape", "expected"), SOUND_KEEP.items())
def test_sound_encoding_keeps_its_guarantee(shape: tuple[int, int], expected: tuple[float, ...]) -> None:
    for epsilon, keep in zip(EPSILONS, expected, strict=True):
        found = selection.sound_keep(*shape, epsilon)
        assert found == pytest.approx(keep, abs=1e-8)
        assert epsilon * (1 - 1e-9) <= selection.perturbed_encoding(*shape, found).epsilon <= epsilon


@pytest.mark.parametrize(
    ("dimension", "top", "keep", "expected"),
    [
        (4, 2, 1 / (1 + math.exp(-1)), (0.3710081842, 0.1096636897, 0.0386562523)),
        (7, 1, 0.7, (0.3058819, 0.1098039, 0.0352947)),
        (12, 4, 0.7, (0.1397286256, 0.0550773186, 0.0004669489)),
    ],
)
def test_encoding_oracles(dimension: int, top: int, keep: float, expected: tuple[float, float, float]) -> None:
    law = selection.perturbed_encoding(dimension, top, keep)
    assert (law.top, law.rest, law.none) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), dimension=st.integers(1, 7), keep=st.fractions(Fraction(1, 2), Fraction(99, 100)))
def test_encoding_agrees_with_all_perturbed_vectors(data: st.DataObject, dimension: int, keep: Fraction) -> None:
    top = data.draw(st.integers(1, dimension))
    keep = keep.limit_denominator(1000)
    law = selection.perturbed_encoding(dimension, top, float(keep))
    status = oracles.statuses(dimension, top)[0]
    exact = oracles.encoding_law(status, keep)
    for place, marked in enumerate(status):
        assert float(exact[place]) == pytest.approx(law.top if marked else law.rest, rel=1e-9)
    assert float(exact[None]) == pytest.approx(law.none, rel=1e-9)
    assert top * law.top + (dimension - top) * law.rest * (top < dimension) + law.none == pytest.approx(1)


@pytest.mark.parametrize(("dimension", "top"), [(2, 1), (4, 2), (5, 1), (6, 3)])
def test_true_epsilon_is_the_largest_ratio_over_all_inputs(dimension: int, top: int) -> None:
    keep = Fraction(selection.sound_keep(dimension, top, 1.0)).limit_denominator(10**6)
    laws = [
        {output: float(chance) for output, chance in oracles.encoding_law(status, keep).items()}
        for status in oracles.statuses(dimension, top)
    ]
    law = selection.perturbed_encoding(dimension, top, float(keep))
    assert law.epsilon == pytest.approx(oracles.largest_log_ratio(laws), rel=1e-9)


@pytest.mark.parametrize(
    ("dimension", "epsilon", "top", "bottom"),
    [
        (10, 1.0, 0.1567674179, 0.0576715101),
        (100, 1.0, 0.0158066762, 0.0058149512),
        (5, 2.0, 0.4286555288, 0.0580122174),
    ],
)
def test_exponential_oracles(dimension: int, epsilon: float, top: float, bottom: float) -> None:
    law = selection.exponential(dimension, epsilon)
    assert (law.top, law.rest) == pytest.approx((top, bottom), abs=1e-10)


@pytest.mark.parametrize("dimension", [1, 2, 3, 4])
def test_exponential_is_exact_over_all_permutations(dimension: int) -> None:
    laws = []
    for ranks in itertools.permutations(range(dimension)):
        weights = np.exp(1.3 * np.array(ranks) / max(1, dimension - 1))
        laws.append(dict(enumerate(weights / weights.sum())))
    law = selection.exponential(dimension, 1.3)
    assert law.epsilon == pytest.approx(oracles.largest_log_ratio(laws))  # type: ignore[arg-type]
    assert law.top == pytest.approx(max(laws[0].values()))


@pytest.mark.parametrize(
    ("dimension", "top", "epsilon", "hit", "miss"),
    [
        (10, 1, 1.0, 0.2319693167, 0.0853367426),
        (100, 10, 4.0, 0.0858486450, 0.0015723728),
        (123, 12, 2.0, 0.0370065869, 0.0050082969),
    ],
)
def test_sampling_oracles(dimension: int, top: int, epsilon: float, hit: float, miss: float) -> None:
    law = selection.perturbed_sampling(dimension, top, epsilon)
    assert (law.top, law.rest) == pytest.approx((hit, miss), abs=1e-10)
    assert math.log(law.top / law.rest) == pytest.approx(epsilon)


@given(data=st.data(), dimension=st.integers(1, 200), epsilon=st.floats(0, 20))
def test_laws_are_laws_and_ratios_are_what_is_charged(data: st.DataObject, dimension: int, epsilon: float) -> None:
    top = data.draw(st.integers(1, dimension))
    keep = selection.sound_keep(dimension, top, epsilon)
    for law in (
        selection.perturbed_sampling(dimension, top, epsilon),
        selection.perturbed_encoding(dimension, top, keep),
        selection.uniform(dimension),
    ):
        assert top * law.top + (dimension - top) * law.rest + law.none == pytest.approx(1)
        if 0 < top < dimension and law.rest > 0:
            assert abs(math.log(law.top / law.rest)) <= law.epsilon + 1e-9
    assert selection.perturbed_encoding(dimension, top, keep).epsilon <= epsilon + 1e-12


@pytest.mark.parametrize(("dimension", "top", "epsilon"), [(100, 10, 1.0), (123, 12, 0.2), (7, 3, 4.0), (5, 5, 1.0)])
def test_published_sampling_is_algorithm_4(dimension: int, top: int, epsilon: float) -> None:
    """Its line 4: x < e^ε·k / (d − k + e^ε·k), then a uniform index of the top k, else of the others."""
    hit = math.exp(epsilon) * top / (dimension - top + math.exp(epsilon) * top)
    law = selection.selection_law("ps", dimension, top, epsilon, "published")
    assert top * law.top == pytest.approx(hit)
    assert (dimension - top) * law.rest == pytest.approx(1 - hit)
    assert law.epsilon == pytest.approx(epsilon if top < dimension else 0)
    assert law == selection.selection_law("ps", dimension, top, epsilon, "sound")


def test_calibrated_encoding_is_sampling_that_sometimes_abstains() -> None:
    encoding = selection.perturbed_encoding(32, 3, selection.sound_keep(32, 3, 1.0))
    sampling = selection.perturbed_sampling(32, 3, 1.0)
    assert encoding.top == pytest.approx((1 - encoding.none) * sampling.top, rel=1e-9)


@pytest.mark.parametrize(
    ("dimension", "top", "epsilon"), [(0, 1, 1.0), (5, 0, 1.0), (5, 6, 1.0), (5, 1, -1.0), (5, 1, math.nan)]
)
def test_meaningless_selections_are_refused(dimension: int, top: int, epsilon: float) -> None:
    with pytest.raises(InputError):
        selection.check_selection(dimension, top, epsilon)
