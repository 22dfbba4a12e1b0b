import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian
from polyeps.audit.accounting_attacks import joint_clip, large_canary, layer_clip, spectral_clip
from polyeps.audit.canary import NoisySum, SumMechanism, audit_mechanism, canary_scores, certified_epsilon
from polyeps.audit.lower_bounds import bound_from_guesses, bound_from_scores, one_run_bound
from polyeps.errors import InputError

DELTA = 1e-4


def gaussian(sigma: float, *, rounds: int = 1) -> SumMechanism:
    """Everybody takes part in every round."""
    return SumMechanism("poisson", 10, 10, rounds, (NoisySum(sigma, joint_clip, large_canary()),))


def sampled(**changes: object) -> SumMechanism:
    settings: dict[str, object] = {"sampler": "poisson", "population": 10, "cohort": 2, "rounds": 1}
    return SumMechanism(**(settings | {"releases": (NoisySum(1.0, joint_clip, large_canary()),)} | changes))  # type: ignore[arg-type]


def one_run(
    mechanism: SumMechanism, canaries: int, guesses: int, delta: float, generator: np.random.Generator
) -> float:
    """Audit a single run: orthogonal canaries do not disturb each other, so each is a trial of its own."""
    included = generator.random(canaries) < 0.5
    seen = np.where(included, *canary_scores(mechanism, canaries, generator))
    return bound_from_guesses(included, seen, delta, 0.99, (guesses / canaries,))


def test_clipping_is_run_and_not_believed() -> None:
    for clip, reach in ((joint_clip, 1.0), (layer_clip, 2.0), (spectral_clip, 4.0)):
        release = NoisySum(1.0, clip, large_canary())
        assert release.displacement(replaced=False) == pytest.approx(reach, rel=4e-6)  # room for rounding
        assert release.displacement(replaced=True) == pytest.approx(2 * reach, rel=4e-6)
        small = NoisySum(1.0, clip, large_canary(size=1e-3))
        assert small.displacement(replaced=False) == pytest.approx(8e-3)  # what is small enough is left alone


def test_what_is_certified_is_what_is_run() -> None:
    assert certified_epsilon(gaussian(2.0), 1e-5) == pytest.approx(1.993091, abs=1e-3)
    two = sampled(releases=(NoisySum(math.sqrt(2), joint_clip, large_canary()),) * 2)
    assert certified_epsilon(two, DELTA) == pytest.approx(certified_epsilon(sampled(), DELTA))
    assert certified_epsilon(sampled(noise_lost=0.3), DELTA) > certified_epsilon(sampled(), DELTA)
    assert certified_epsilon(sampled(count_revealed=True), DELTA) == math.inf
    assert certified_epsilon(sampled(sampler="fixed", count_revealed=True), DELTA) < math.inf  # that count is no secret


@pytest.mark.parametrize("changes", [{}, {"sampler": "fixed"}, {"count_revealed": True}, {"noise_lost": 0.3}])
def test_scores_are_log_likelihood_ratios(changes: dict[str, object]) -> None:
    present, absent = canary_scores(sampled(rounds=3, **changes), 400_000, np.random.default_rng(3))
    for threshold in (-0.3, 0.0, 0.5, 1.0):
        # P(A) = E[ratio; A] without the canary, whatever the event A.
        weighted = np.where(absent > threshold, np.exp(absent.astype(float)), 0.0)
        error = weighted.std() / len(absent) ** 0.5 + 0.5 / len(present) ** 0.5
        assert (present > threshold).mean() == pytest.approx(weighted.mean(), abs=4 * error)


def test_a_count_that_is_seen_is_weighed_exactly() -> None:
    generator = np.random.default_rng(5)
    _, absent = canary_scores(sampled(count_revealed=True), 1000, generator)
    again = np.random.default_rng(5)
    again.random(1000, np.float32)
    seen, count = again.standard_normal(1000, np.float32), again.binomial(9, 0.2, 1000)
    outside = 0.8 * binom.pmf(count, 9, 0.2) * norm.pdf(seen)
    inside = 0.2 * binom.pmf(count - 1, 9, 0.2) * norm.pdf(seen - 1)
    expected = np.log((outside + inside) / (binom.pmf(count, 9, 0.2) * norm.pdf(seen)))
    assert absent == pytest.approx(expected, abs=1e-5)


def test_the_scale_of_the_noise_tells_the_count() -> None:
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 9, 200)
    noise = generator.standard_normal((200, 10_000)) / counts[:, None]
    assert np.array_equal(np.round(1 / noise.std(1)), counts)


def test_the_bound_has_its_confidence_and_is_not_toothless() -> None:
    generator = np.random.default_rng(1)
    true = epsilon(Gaussian(1.0), 1e-2)
    found = []
    for _ in range(300):
        present, absent = generator.standard_normal((2, 4000)).astype(np.float32) + np.array([[0.5], [-0.5]], "f4")
        found.append(bound_from_scores(present, absent, 1e-2, confidence=0.9))
    assert np.mean(np.array(found) > true) <= 0.1
    assert np.median(found) > 0.6 * true


def test_both_directions_are_tried() -> None:
    present, absent = canary_scores(sampled(rounds=20), 20_000, np.random.default_rng(2))
    there, back = bound_from_scores(present, absent, DELTA), bound_from_scores(-absent, -present, DELTA)
    assert there == pytest.approx(back)
    assert there > 0.5


def test_nothing_is_shown_by_equal_data_sets() -> None:
    same = np.random.default_rng(0).standard_normal((2, 10_000)).astype(np.float32)
    assert bound_from_scores(same[0], same[1], DELTA) < 0.2
    assert bound_from_scores(np.zeros(10, np.float32), np.zeros(10, np.float32), DELTA) == 0


def test_noise_so_small_that_all_is_seen() -> None:
    found = audit_mechanism(gaussian(0.01), DELTA, 20_000, np.random.default_rng(0))
    assert found > 7.0


def test_impossible_mechanisms_are_refused() -> None:
    for wrong in (
        {"cohort": 11},
        {"cohort": 0},
        {"rounds": 0},
        {"releases": ()},
        {"noise_lost": 1.0},
        {"cohort": 10, "count_revealed": True},
    ):
        with pytest.raises(InputError):
            sampled(**wrong)
    with pytest.raises(InputError):
        audit_mechanism(gaussian(1.0), DELTA, 1, np.random.default_rng(0))
    with pytest.raises(InputError):
        audit_mechanism(gaussian(1.0), 1.0, 10, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "expected"),
    [
        (1000, 100, 90, 0.0, 1.6308),
        (1000, 100, 90, 1e-5, 1.6261),
        (1000, 100, 100, 1e-5, 3.4654),
        (1000, 1000, 600, 1e-5, 0.2972),
        (1000, 100, 50, 1e-5, 0.0),
        (1000, 100, 0, 1e-5, 0.0),
    ],
)
def test_the_bound_of_one_run(canaries: int, guesses: int, right: int, delta: float, expected: float) -> None:
    assert one_run_bound(canaries, guesses, right, delta) == pytest.approx(expected, abs=5e-5)
    assert one_run_bound(canaries, guesses, right, delta, confidence=0.99) <= expected + 5e-5


def test_impossible_guesses_are_refused() -> None:
    for canaries, guesses, right in ((10, 11, 5), (10, 5, 6), (10, 5, -1), (10, 0, 0)):
        with pytest.raises(InputError):
            one_run_bound(canaries, guesses, right, 1e-5)


def test_one_run_never_passes_what_is_certified_epsilon() -> None:
    for mechanism in (gaussian(1.0), gaussian(4.0, rounds=16), sampled(population=4, rounds=20)):
        true = certified_epsilon(mechanism, 1e-5)
        found = [one_run(mechanism, 2000, 200, 1e-5, np.random.default_rng(seed)) for seed in range(20)]
        assert not any(finding > true for finding in found)
        assert np.median(found) > 0.1 * true


def test_one_run_refutes_noise_that_was_halved() -> None:
    claimed = certified_epsilon(gaussian(2.0), 1e-5)
    for seed in range(5):
        assert one_run(gaussian(0.5), 2000, 200, 1e-5, np.random.default_rng(seed)) > claimed


def test_orthogonal_canaries_in_one_noisy_sum() -> None:
    """The same audit with vectors: canaries that are really summed, noise in every coordinate, dot products."""
    canaries, guesses, sigma = 400, 100, 1.0
    true = epsilon(Gaussian(sigma), 1e-5)
    shown = []
    for seed in range(10):
        generator = np.random.default_rng(seed)
        directions = np.linalg.qr(generator.standard_normal((canaries, canaries)))[0]
        put_in = generator.random(canaries) < 0.5
        released = put_in @ directions + sigma * generator.standard_normal(canaries)
        order = np.argsort(directions @ released)
        right = (~put_in[order[: guesses // 2]]).sum() + put_in[order[-guesses // 2 :]].sum()
        shown.append(one_run_bound(canaries, guesses, int(right), 1e-5, confidence=0.99))
    assert max(shown) <= true
    assert np.median(shown) > 0.1 * true
