"""Point estimation: closed forms against simulations, against the definition of a minimum, and at their edges."""

import math

import numpy as np
import pytest
import simulated_twins
from hypothesis import given, settings
from hypothesis import strategies as st
from polyeps_reproductions.theory import points, simulation
from polyeps_reproductions.theory.points import NON_PRIVATE, PRIVATE, Federation, opt_out

from polyeps.errors import InputError

FEDERATIONS = (
    opt_out(20, 15, 1.0, 0.5, 0.1),
    opt_out(10, 9, 1.0, 0.5, 0.2),
    opt_out(12, 12, 0.7, 0.3, 0.1),
    opt_out(6, 3, 1.0, 0.0, 0.02),
    Federation((2, 3, 4), (0.0, 0.1, 0.6), 0.5, 0.2),
    Federation.from_records((3, 0, 5), (0.05, 9.0, 0.3), beta2=8.0, records=4, tau2=1.0),
)
TRIALS = 40_000
PENALTIES = (0.0, 0.5, 1.5, 6.0, math.inf)

variances = st.floats(0.01, 10)


@st.composite
def federations(draw: st.DrawFn, groups: int | None = None) -> Federation:
    count = groups or draw(st.integers(1, 4))
    sizes = draw(st.tuples(*[st.integers(1, 50)] * count).filter(lambda sizes: sum(sizes) > 1))
    gamma2 = draw(st.tuples(*[st.floats(0, 5)] * count))
    return Federation(sizes, gamma2, draw(variances), draw(variances))


def groups_of(federation: Federation) -> list[int]:
    return [group for group, size in enumerate(federation.sizes) if size]


@pytest.mark.parametrize("federation", FEDERATIONS, ids=str)
def test_closed_forms_are_what_simulations_find(federation: Federation) -> None:
    generator = np.random.default_rng(7)
    even = np.full(len(federation.sizes), 1 / federation.clients)
    best = points.best_weights(federation)
    found = simulation.server_variance(federation, [even, best], TRIALS, generator)
    assert found.off([points.server_variance(federation, even), points.server_variance(federation)]).max() < 4
    for group in groups_of(federation):
        for weights in (even, best):
            errors = simulation.personal_error(federation, group, PENALTIES, TRIALS, generator, weights)
            assert errors.off(points.personal(federation, group, weights).error(PENALTIES)).max() < 4
        bayes = simulated_twins.bayes_error(federation, group, TRIALS, generator)
        assert bayes.off(points.bayes_error(federation, group)) < 4
        if federation.tau2:  # the best λ may be infinite otherwise
            penalty = simulated_twins.best_penalty(federation, group, TRIALS, generator)
            assert penalty.off(points.best_penalty(federation, group)) < 4


def test_simulations_give_reproducible_means_with_their_errors() -> None:
    federation = FEDERATIONS[0]
    weights = points.best_weights(federation)
    few, again, many = (
        simulation.server_variance(federation, [weights], trials, np.random.default_rng(1))
        for trials in (20_000, 20_000, 80_000)
    )
    assert few.value == again.value
    assert many.error[0] == pytest.approx(few.error[0] / 2, rel=0.05)
    # The square of a normal number has variance 2.
    assert many.error[0] == pytest.approx(points.server_variance(federation) * np.sqrt(2 / 80_000), rel=0.05)


@given(federations(), st.integers(0, 2**32 - 1))
def test_no_weights_are_better_than_the_best(federation: Federation, seed: int) -> None:
    sizes = np.array(federation.sizes)
    other = np.random.default_rng(seed).uniform(0, 1, len(sizes))
    best = points.server_variance(federation)
    assert best <= points.server_variance(federation, other / (sizes @ other)) * (1 + 1e-9)
    # The inverse of the sum of precisions, and group means weighted by N/(σ_c² + N·γ²).
    precisions = sizes / (federation.client_variance + sizes * np.array(federation.gamma2))
    assert best == pytest.approx(1 / precisions.sum())
    assert sizes * points.best_weights(federation) == pytest.approx(precisions / precisions.sum())


@given(federations(groups=2))
def test_general_weights_are_those_of_the_best_ratio(federation: Federation) -> None:
    ratio = points.best_ratio(federation)
    assert points.weights_of_ratio(federation, ratio) == pytest.approx(points.best_weights(federation))
    first, second = federation.message_variance
    assert ratio == pytest.approx(first / second)


@given(federations(), st.floats(0, 50))
def test_no_penalty_is_better_than_the_best(federation: Federation, penalty: float) -> None:
    for group in groups_of(federation):
        moments = points.personal(federation, group)
        best = points.best_penalty(federation, group)
        assert best == pytest.approx(moments.best_penalty)
        assert moments.error(best) <= moments.error(penalty) + 1e-12
        # (8) sees more than θ̂ and the own records.
        assert points.bayes_error(federation, group) <= float(moments.error(best)) + 1e-12


@given(federations(), st.floats(0, 1.0))
def test_best_penalty_under_any_weights(federation: Federation, lean: float) -> None:
    even = np.full(len(federation.sizes), 1 / federation.clients)
    weights = lean * even + (1 - lean) * points.best_weights(federation)
    for group in groups_of(federation):
        moments = points.personal(federation, group, weights)
        for nearby in (0.95, 1.05):
            assert moments.error(moments.best_penalty) <= moments.error(nearby * moments.best_penalty) + 1e-12


@given(federations(groups=2))
def test_without_own_noise_the_rule_is_bayes_optimal(federation: Federation) -> None:
    quiet = Federation(federation.sizes, (0.0, federation.gamma2[1]), federation.alpha2, federation.tau2)
    penalty = points.best_penalty(quiet, NON_PRIVATE)
    assert penalty == pytest.approx(federation.alpha2 / federation.tau2)
    assert penalty >= points.best_penalty(quiet, PRIVATE) * (1 - 1e-12)
    assert points.personal(quiet, NON_PRIVATE).error(penalty) == pytest.approx(points.bayes_error(quiet, NON_PRIVATE))


@settings(max_examples=50)
@given(federations(groups=2))
def test_own_privacy_does_not_enter_the_bayes_error(federation: Federation) -> None:
    """(8) sees the own records and the others' messages: with those as they are, opting out changes nothing."""
    noise = federation.message_noise[1]
    sizes = federation.sizes
    alone = Federation((1, *sizes), (noise, *federation.gamma2), federation.alpha2, federation.tau2)
    out = Federation((1, *sizes), (0.0, *federation.gamma2), federation.alpha2, federation.tau2)
    assert points.bayes_error(alone, 0) == pytest.approx(points.bayes_error(out, 0))
    assert points.personal(out, 0).error(points.best_penalty(out, 0)) == pytest.approx(points.bayes_error(out, 0))


def test_homogeneous_data_need_no_personal_estimate_without_noise() -> None:
    federation = opt_out(10, 5, 1.0, 0.0, 0.1)
    assert points.best_penalty(federation, NON_PRIVATE) == math.inf
    moments = points.personal(federation, NON_PRIVATE)
    assert moments.best_penalty == math.inf
    assert moments.error(math.inf) == pytest.approx(points.server_variance(federation))
    assert points.best_penalty(federation, PRIVATE) < math.inf


def test_without_noise_everybody_counts_the_same() -> None:
    federation = opt_out(10, 5, 1.0, 0.5, 0.0)
    assert points.best_ratio(federation) == 1
    assert points.server_variance(federation) == pytest.approx(0.15)
    assert points.best_penalty(federation, PRIVATE) == pytest.approx(points.best_penalty(federation, NON_PRIVATE))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Federation((1, 2), (0.1,), 1, 1), "one for each"),
        (lambda: Federation((0, 0), (0.1, 0.1), 1, 1), "no federation"),
        (lambda: Federation((2,), (-0.1,), 1, 1), "negative"),
        (lambda: Federation((2,), (0.1,), 0, 1), "alpha2"),
        (lambda: Federation((2,), (math.inf,), 1, 1), "finite"),
        (lambda: opt_out(3, 4, 1, 1, 1), "cannot be private"),
        (lambda: points.best_ratio(Federation((2,), (0.1,), 1, 1)), "two groups"),
        (lambda: points.weights_of_ratio(opt_out(3, 3, 1, 1, 1), 0.0), "no client"),
        (lambda: points.personal(opt_out(3, 3, 1, 1, 1), NON_PRIVATE), "no clients"),
        (lambda: points.server_variance(opt_out(3, 2, 1, 1, 1), [1, 1]), "sum to one"),
        (lambda: points.best_penalty(Federation((1,), (0.1,), 1, 1), 0), "single client"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: object, said: str) -> None:
    assert callable(wrong)
    with pytest.raises(InputError, match=said):
        wrong()
