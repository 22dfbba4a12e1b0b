"""Weights of clients for every row: a class that only strict clients hold is found, and nothing where there is none."""

import numpy as np
import pytest
import torch
from torch import Tensor

from polyeps.aggregation.client_effects import ClientEffects, balancing
from polyeps.aggregation.row_effects import FIRST, RowEffects
from polyeps.aggregation.subspace import weighted_mean
from polyeps.models import Slice

ROWS, WIDTH = 6, 400
SLICES = {"weight": Slice(0, ROWS * WIDTH, (ROWS, WIDTH)), "bias": Slice(ROWS * WIDTH, ROWS * WIDTH + ROWS, (ROWS,))}
NOISE = np.array([0.001] * 3 + [0.02] * 20)
PERSISTENCE = 100.0


def updates(number: int, missing: float, rng: np.random.Generator) -> Tensor:
    """Rows of a model that learns; the first three clients lack what moves row 5."""
    rows = np.random.default_rng(7).normal(size=(ROWS, WIDTH)) / np.sqrt(WIDTH)
    pull = 0.05 * np.exp(-number / 8) * rows
    found = np.repeat(pull[None], len(NOISE), 0)
    found[3:, 5] -= missing * rows[5]
    flat = np.concatenate([found.reshape(len(NOISE), -1), np.zeros((len(NOISE), ROWS))], 1)
    return torch.from_numpy(flat + rng.normal(size=flat.shape) * NOISE[:, None]).float()


def share_of_strict(missing: float, rounds: int = 40, seed: int = 1) -> tuple[Tensor, ClientEffects, RowEffects]:
    rng, everyone = np.random.default_rng(seed), torch.arange(len(NOISE))
    kept: dict[str, Tensor] = {}
    for number in range(rounds):
        rows = updates(number, missing, rng)
        effects = ClientEffects.restored(kept, len(NOISE), rows.shape[1])
        effects.take(everyone, rows)
        known = RowEffects.restored(kept, len(NOISE), SLICES)
        known.take(everyone, rows, effects.variances)
        kept = {**effects.kept, **known.kept}
    weights = known.weights(everyone, effects.variances, 0.0, PERSISTENCE)
    assert weights.sum(1).tolist() == pytest.approx([1.0] * (ROWS + 1))
    return weights[:, 3:].sum(1), effects, known


def test_a_class_that_only_strict_clients_hold_gives_them_weight_in_its_row_alone() -> None:
    strict = share_of_strict(0.02)[0]
    assert strict[5] > 0.1
    others = strict[[0, 1, 2, 3, 4, 6]]
    assert others.tolist() == pytest.approx([float(others.min())] * 6)  # inverse variances
    assert others.max() < 0.03


def test_where_clients_agree_nothing_is_proved() -> None:
    for seed in range(8):
        strict = share_of_strict(0.0, seed=seed)[0]
        assert strict.max() < 0.03, seed


def test_before_directions_are_known_the_weights_are_those_of_all_rows() -> None:
    strict, effects, known = share_of_strict(0.02, rounds=FIRST)
    expected = balancing(torch.zeros(1, dtype=torch.float64), effects.variances)[0]
    assert strict.tolist() == pytest.approx([float(expected[3:].sum())] * (ROWS + 1))
    assert known.counts.sum() == 0


def test_directions_are_the_leading_ones_of_the_path() -> None:
    path = torch.randn(1, ROWS * WIDTH + ROWS, generator=torch.Generator().manual_seed(3))
    known = RowEffects.restored({}, 1, SLICES)
    for _ in range(FIRST):
        known.take(torch.tensor([0]), path, torch.ones(1, dtype=torch.float64))
    found = known.directions[: ROWS * WIDTH].view(ROWS, WIDTH)
    assert torch.allclose(found @ found.T, torch.eye(ROWS), atol=1e-5)
    rows = path[0, : ROWS * WIDTH].view(ROWS, WIDTH)
    assert torch.allclose(rows @ found.T @ found, rows, atol=1e-4)


def test_a_tall_tensor_keeps_ten_directions_and_a_flat_path_none() -> None:
    slices = {"weight": Slice(0, 60, (30, 2)), "other": Slice(60, 660, (30, 20))}
    known = RowEffects.restored({}, 1, slices)
    for _ in range(FIRST):
        known.take(torch.tensor([0]), torch.zeros(1, 660), torch.ones(1, dtype=torch.float64))
    assert known.directions.shape == (2 * 2 + 10 * 20,)
    assert torch.isfinite(known.directions).all()


def test_equal_weights_for_every_row_give_the_weighted_mean() -> None:
    rows = torch.randn(4, ROWS * WIDTH + ROWS)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    found = RowEffects.restored({}, 4, SLICES).mean(rows, weights.expand(ROWS + 1, -1))
    assert torch.allclose(found, weighted_mean(rows, weights), atol=1e-6)


def test_clients_that_join_later_begin_with_nothing_known_of_them() -> None:
    _, _, before = share_of_strict(0.02, rounds=8)
    joined = RowEffects.restored(before.kept, len(NOISE) + 1, SLICES)
    assert joined.counts.tolist() == [8 - FIRST] * len(NOISE) + [0]
    joined.take(torch.tensor([len(NOISE)]), torch.randn(1, ROWS * WIDTH + ROWS), torch.ones(1, dtype=torch.float64))
    assert joined.counts[-1] == 1
    assert before.counts.tolist() == [8 - FIRST] * len(NOISE)  # what was kept does not change
