"""Weights from noise and differences between clients: estimates against what was drawn, weights against a solver."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from polyeps.aggregation.client_effects import COORDINATES, ClientEffects, balancing


def drawn(noise: list[float], spread: float, rounds: int = 30, size: int = 4000, seed: int = 0) -> ClientEffects:
    """Rounds of updates with a common drift, an effect that stays and fresh noise."""
    rng = np.random.default_rng(seed)
    clients = len(noise)
    effects = ClientEffects.restored({}, clients, size)
    own = rng.normal(0, spread, (clients, size))
    for number in range(rounds):
        common = np.exp(-number / 10) * np.sin(np.arange(size))
        rows = common + own + rng.normal(size=(clients, size)) * np.array(noise)[:, None]
        effects.take(torch.arange(clients), torch.from_numpy(rows).float())
    return effects


def weights_of(effects: ClientEffects, persistence: float, clients: list[int] | None = None) -> torch.Tensor:
    some = slice(None) if clients is None else clients
    return balancing(torch.tensor([persistence * effects.spread], dtype=torch.float64), effects.variances[some])[0]


def test_noise_is_found_beside_a_drift_and_effects_many_times_its_size() -> None:
    noise = [0.05, 0.05, 0.2, 1.0, 5.0]
    found = drawn(noise, spread=0.5).variances
    assert found.sqrt().tolist() == pytest.approx(noise, rel=0.02)


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.5])
def test_the_spread_is_found_although_most_clients_are_noisy(spread: float) -> None:
    found = [drawn([0.05] * 5 + [3.0] * 20, spread, seed=seed).spread for seed in range(4)]
    assert np.mean(found) == pytest.approx(spread**2, rel=0.1)


def test_no_spread_is_found_where_there_is_none() -> None:
    found = [drawn([0.1] * 5 + [3.0] * 20, 0.0, seed=seed).spread for seed in range(4)]
    assert max(found) < 3e-5  # a tenth of the noise of the means over rounds


def test_limits() -> None:
    equal = weights_of(drawn([1.0] * 4, 0.3), 10.0)
    assert equal.tolist() == pytest.approx([0.25] * 4, abs=0.005)  # equal noise: the plain mean
    noise = [0.1, 0.1, 1.0, 2.0]
    alike = weights_of(drawn(noise, 0.0), 10.0)
    inverse = 1 / np.square(noise)
    assert alike.tolist() == pytest.approx((inverse / inverse.sum()).tolist(), abs=0.01)  # no effects: inverse variance
    unlike = weights_of(drawn(noise, 1.0), 1e6)
    assert unlike.tolist() == pytest.approx([0.25] * 4, abs=0.001)  # effects beyond all noise: the plain mean
    ignored = weights_of(drawn([0.1, 0.1, 0.1, 1e6], 0.1), 10.0)
    assert float(ignored[3]) < 1e-6  # infinite noise


def test_without_any_noise_the_mean_is_plain() -> None:
    effects = ClientEffects.restored({}, 3, 5)
    for _ in range(3):
        effects.take(torch.arange(3), torch.ones(3, 5))
    assert weights_of(effects, 7.0).tolist() == pytest.approx([1 / 3] * 3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6),
    st.floats(0, 1e3),
)
def test_weights_are_the_best_ones(variances: list[float], effects: float) -> None:
    n, v = len(variances), np.array(variances)
    weights = balancing(torch.tensor([effects], dtype=torch.float64), torch.tensor(v))[0].numpy()
    assert weights.sum() == pytest.approx(1)
    assert weights.min() >= 0

    def loss(w: np.ndarray) -> float:
        return float(effects * ((w - 1 / n) ** 2).sum() + (w**2 * v).sum())

    best = minimize(loss, np.full(n, 1 / n), constraints={"type": "eq", "fun": lambda w: w.sum() - 1}, method="SLSQP")
    assert loss(weights) <= best.fun * (1 + 1e-6) + 1e-12


def test_clients_that_answer_now_and_then_and_large_models() -> None:
    effects = ClientEffects.restored({}, 6, 3 * COORDINATES)
    rng = torch.Generator().manual_seed(1)
    noise = torch.tensor([0.1, 0.1, 0.1, 2.0, 2.0, 2.0])
    for number in range(40):
        some = torch.randperm(5, generator=rng)[:3]  # client 5 never answers
        rows = torch.randn(3, 3 * COORDINATES, generator=rng) * noise[some, None] + 1 / (number + 1)
        effects = ClientEffects.restored(effects.kept, 6, 3 * COORDINATES)
        effects.take(some, rows)
    assert effects.sums.shape == (6, COORDINATES)
    assert effects.variances[:5].sqrt().tolist() == pytest.approx(noise[:5].tolist(), rel=0.1)
    assert effects.variances[5].isnan()
    weights = weights_of(effects, 1.0, [0, 4])
    assert weights.sum() == pytest.approx(1)
    assert weights[0] > 0.98


def test_clients_that_join_later_begin_with_nothing_known_of_them() -> None:
    before = drawn([0.1, 1.0], 0.3, rounds=4, size=20)
    joined = ClientEffects.restored(before.kept, 3, 20)
    assert torch.equal(joined.variances[:2], before.variances)
    joined.take(torch.arange(3), torch.randn(3, 20))
    assert joined.counts.tolist() == [5, 5, 1]
    assert before.counts.tolist() == [4, 4]  # what was kept does not change
    assert torch.isfinite(weights_of(joined, 10.0)).all()
