"""Linear regression: closed forms against regressions solved on drawn records, and against point estimation."""

from dataclasses import replace

import numpy as np
import pytest
import simulated_twins
from polyeps_reproductions.theory import points, regression
from polyeps_reproductions.theory.regression import Regression, orthogonal

from polyeps.errors import InputError

TRIALS = 40_000
ALIKE = orthogonal((2, 6), (0.01, 0.1), records=6, dimension=3, beta2=2.0, tau2=0.5)
DESIGNS = np.random.default_rng(5).standard_normal((8, 6, 3))
UNLIKE = Regression(DESIGNS, (0, 0, 1, 1, 1, 1, 1, 1), (0.0, 0.1), beta2=1.0, tau2=0.5)
WEIGHTS = {"matrix": regression.matrix_weights, "scalar": regression.scalar_weights}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("client", [0, 7])
@pytest.mark.parametrize("setting", [ALIKE, UNLIKE, replace(UNLIKE, tau2=0.0, gamma2=(0.2, 0.6))], ids=["a", "u", "0"])
def test_closed_forms_are_what_simulations_find(setting: Regression, client: int, weights: str) -> None:
    chosen = WEIGHTS[weights](setting)
    moments = regression.personal(setting, client, chosen)
    best = moments.best_penalty
    penalty = best if np.isfinite(best) else 5.0
    found = simulated_twins.regression_errors(setting, client, chosen, penalty, TRIALS, np.random.default_rng(client))
    server = np.trace(regression.server_covariance(setting, chosen))
    bayes = np.trace(regression.bayes_covariance(setting, client))
    assert found.off([server, float(moments.error(penalty)), bayes]).max() < 4


def test_orthogonal_designs_are_point_estimations_in_every_coordinate() -> None:
    federation = ALIKE.points
    assert federation.sizes == (2, 6)
    assert federation.alpha2 == pytest.approx(2.0 / 6)
    matrix, scalar = regression.matrix_weights(ALIKE), regression.scalar_weights(ALIKE)
    assert matrix == pytest.approx(scalar)
    assert matrix[:, 0, 0] == pytest.approx(points.best_weights(federation)[list(ALIKE.groups)])
    server = regression.server_covariance(ALIKE, matrix)
    assert server == pytest.approx(points.server_variance(federation) * np.eye(3))
    for client in (0, 7):
        group = ALIKE.groups[client]
        moments = regression.personal(ALIKE, client, matrix)
        assert moments.best_penalty == pytest.approx(points.best_penalty(federation, group))
        losses = regression.losses(ALIKE, client)
        assert losses["client, Bayes"] == pytest.approx(3 * points.bayes_error(federation, group))
        best = points.personal(federation, group).error(points.best_penalty(federation, group))
        for name in ("scalar", "matrix"):
            assert losses[f"client, {name}"] == pytest.approx(3 * float(best))


def test_one_dimension_of_ones_is_the_point_estimation() -> None:
    setting = orthogonal((5, 15), (0.0, 0.1), records=4, dimension=1, beta2=4.0, tau2=0.5)
    assert setting.points == points.opt_out(20, 15, 1.0, 0.5, 0.1)
    assert (setting.designs == 1).all()


@pytest.mark.parametrize("client", [0, 7])
def test_numbers_lose_to_matrices_and_both_to_bayes(client: int) -> None:
    losses = regression.losses(UNLIKE, client)
    assert losses["server, matrix"] < losses["server, scalar"]
    assert losses["client, Bayes"] < losses["client, matrix"] < losses["client, scalar"]


def test_no_numbers_are_better_than_the_best() -> None:
    generator = np.random.default_rng(3)
    least = np.trace(regression.server_covariance(UNLIKE, regression.scalar_weights(UNLIKE)))
    for _ in range(100):
        other = generator.uniform(0, 1, 8)
        weights = (other / other.sum())[:, None, None] * np.eye(3)
        assert least <= np.trace(regression.server_covariance(UNLIKE, weights))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Regression(DESIGNS[0], (0,), (0.1,), 1, 1), "clients × records"),
        (lambda: Regression(DESIGNS[:2], (0, 1), (0.1,), 1, 1), "numbered"),
        (lambda: Regression(DESIGNS[:2], (0, 0), (0.1,), 0, 1), "beta2"),
        (lambda: Regression(DESIGNS[:2, :2], (0, 0), (0.1,), 1, 1), "determine"),
        (lambda: orthogonal((2,), (0.1,), 2, 3, 1, 1), "determine"),
        (lambda: UNLIKE.points, "not orthogonal"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: object, said: str) -> None:
    assert callable(wrong)
    with pytest.raises(InputError, match=said):
        wrong()
