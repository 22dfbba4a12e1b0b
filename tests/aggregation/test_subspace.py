"""Means, noise estimates, subspaces: against closed forms and numpy's singular value decomposition."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyeps.aggregation.subspace import (
    Basis,
    BasisKind,
    basis_from_tensors,
    inverse_variance_weights,
    random_basis,
    subspace,
    variances_of_norms,
    weighted_mean,
)
from polyeps.errors import InputError
from polyeps.models import Slice, cnn, logistic

KINDS = st.sampled_from(["set", "mean", "centred"])
RANKS = st.integers(1, 9) | st.just("auto")
SLICES = {"weight": Slice(0, 24, (4, 6)), "bias": Slice(24, 28, (4,)), "scale": Slice(28, 29, (1,))}
SIZE = 29


def draw(clients: int, size: int = SIZE, seed: int = 0) -> Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed))


@st.composite
def wild_rows(draw_from: st.DrawFn) -> Tensor:
    """Updates with duplicates, zeros, near copies, and scales from 1e-15 to 1e15."""
    seed, clients = draw_from(st.integers(0, 10_000)), draw_from(st.integers(1, 7))
    rows = draw(clients, seed=seed)
    for i in range(clients):
        what = draw_from(st.sampled_from(["fresh", "zero", "copy", "near", "loud", "zero part"]))
        if what == "zero":
            rows[i] = 0
        elif what == "copy":
            rows[i] = rows[0]
        elif what == "near":
            rows[i] = rows[0] + 10.0 ** -draw_from(st.integers(2, 8)) * rows[i]
        elif what == "loud":
            rows[i] *= 10.0 ** draw_from(st.integers(-9, 9))
        elif what == "zero part":
            rows[i, 24:28] = 0
    return rows * 10.0 ** draw_from(st.integers(-15, 15))


def assert_near(one: Tensor, other: Tensor, source: Tensor) -> None:
    """Equal to the rounding of what both were computed from."""
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(source.abs().max()))


@settings(deadline=None)
@given(weights=st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=12))
def test_equal_weights_give_the_same_bits_whatever_they_equal(weights: list[float]) -> None:
    rows = draw(7)
    plain = weighted_mean(rows, torch.ones(7))
    for weight in weights:
        assert torch.equal(weighted_mean(rows, torch.full((7,), weight, dtype=torch.float64)), plain)
    torch.testing.assert_close(plain, rows.mean(0))


@settings(deadline=None)
@given(weights=st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=5, max_size=5))
def test_the_mean_is_numpys(weights: list[float]) -> None:
    assume(any(weights))
    rows = draw(5)
    ours = weighted_mean(rows, torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(ours, torch.from_numpy(np.average(rows, axis=0, weights=weights)).float())


def test_a_row_without_weight_is_not_looked_at() -> None:
    rows = draw(3)
    rows[1] = math.nan
    weights = torch.tensor([1.0, 0.0, 2.0])
    torch.testing.assert_close(weighted_mean(rows, weights), (rows[0] + 2 * rows[2]) / 3)
    assert torch.equal(subspace(rows, weights=weights).centre, torch.zeros(SIZE))


def orthonormal(basis: Basis) -> bool:
    products = (part.matrix @ part.matrix.T for part in basis.parts)
    return all(torch.allclose(found, torch.eye(len(found)).to(found), rtol=0, atol=1e-4) for found in products)


@settings(max_examples=150, deadline=None)
@given(rows=wild_rows(), kind=KINDS, rank=RANKS, whole=st.booleans())
def test_a_basis_is_orthonormal_and_projects_once(
    rows: Tensor, kind: BasisKind, rank: int | Literal["auto"], whole: bool
) -> None:
    basis = subspace(rows, None if whole else SLICES, rank=rank, kind=kind)
    for part in basis.parts:
        gram = (part.matrix.double() @ part.matrix.double().T).numpy()
        np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-6)
    assert orthonormal(basis)
    others = draw(4, seed=99) * max(float(rows.abs().max()), 1e-30)
    once = basis.project(others)
    assert_near(basis.project(once), once, others)
    assert_near(basis.project(others[1]), once[1], others)
    assert basis.coordinates(others).shape == (4, sum(basis.ranks))
    back = basis_from_tensors(basis.to_tensors(), None if whole else SLICES, SIZE)
    assert torch.equal(back.project(others), once)
    assert back.ranks == basis.ranks


@settings(max_examples=100, deadline=None)
@given(rows=wild_rows(), kind=st.sampled_from(["set", "centred"]), whole=st.booleans())
def test_at_full_rank_the_public_updates_are_kept(rows: Tensor, kind: BasisKind, whole: bool) -> None:
    basis = subspace(rows, None if whole else SLICES, rank=100, kind=kind)
    assert_near(basis.project(rows), rows, rows)
    assert all(
        rank <= min(len(rows), part.stop - part.start) for rank, part in zip(basis.ranks, basis.parts, strict=True)
    )


@pytest.mark.parametrize("kind", ["set", "centred"])
@pytest.mark.parametrize("clients", [1, 2, 5, 40])
def test_the_directions_are_numpys_singular_vectors(kind: BasisKind, clients: int) -> None:
    rows = draw(clients, seed=clients) * torch.linspace(1, 3, SIZE)
    centred = kind == "centred" and clients > 1
    matrix = rows.double().numpy() - (rows.double().numpy().mean(0) if centred else 0)
    basis = subspace(rows, SLICES, rank=3, kind=kind)
    for (a, b, ours), rank in zip(basis.parts, basis.ranks, strict=True):
        theirs = np.linalg.svd(matrix[:, a:b], full_matrices=False)[2][:rank]
        assert rank == min(3, b - a, clients - centred)
        np.testing.assert_allclose(np.abs((ours.numpy() * theirs).sum(1)), 1, atol=1e-5)
    assert bool(basis.centre.any()) == centred


def test_weights_count_once_in_the_second_moment() -> None:
    rows, weights = draw(4), torch.tensor([1.0, 5.0, 0.5, 2.0])
    ours = subspace(rows, rank=2, weights=weights).parts[0].matrix
    moment = (rows.T * weights) @ rows
    vectors = np.linalg.eigh(moment.double().numpy())[1]
    np.testing.assert_allclose(np.abs(ours.numpy() @ vectors[:, ::-1][:, :2]), np.eye(2), atol=1e-4)
    plain = subspace(rows, rank=2, kind="centred")
    assert torch.equal(subspace(rows, rank=2, kind="centred", weights=weights).parts[0].matrix, plain.parts[0].matrix)


def test_the_mean_kind_only_sets_the_length_of_the_public_mean() -> None:
    rows, weights = draw(4), torch.tensor([1.0, 5.0, 0.5, 2.0])
    basis = subspace(rows, SLICES, rank=7, kind="mean", weights=weights)
    mean, other = weighted_mean(rows, weights), draw(1, seed=8)[0]
    assert basis.ranks == (1, 1, 1)
    for part in SLICES.values():
        x, y = (vector[part.start : part.stop] for vector in (mean, other))
        torch.testing.assert_close(basis.project(other)[part.start : part.stop], x * (x @ y) / (x @ x))


def test_what_a_centred_basis_cannot_see_becomes_the_public_mean() -> None:
    rows, other = draw(5), draw(3, seed=3)
    basis = subspace(rows, SLICES, kind="centred", rank=2)
    torch.testing.assert_close(basis.centre, rows.mean(0))
    torch.testing.assert_close(basis.project(rows.mean(0)), rows.mean(0))
    for a, b, matrix in basis.parts:
        torch.testing.assert_close(matrix @ (basis.project(other) - other)[:, a:b].T, torch.zeros(len(matrix), 3))
    alike = subspace(rows[:1].expand(4, -1), SLICES, kind="centred")
    assert alike.ranks == (0, 0, 0)
    torch.testing.assert_close(alike.project(other), rows[:1].expand(3, -1))


def test_updates_of_zero_span_nothing() -> None:
    basis = subspace(torch.zeros(3, SIZE), SLICES, rank=2)
    assert basis.ranks == (0, 0, 0)
    assert not basis.project(draw(2)).any()
    opposite = torch.cat([draw(1), -draw(1)])
    assert subspace(opposite, kind="mean").ranks == (0,)
    assert subspace(opposite, kind="set", rank=2).ranks == (1,)
    assert subspace(torch.zeros(3, SIZE), rank="auto").ranks == (0,)


@pytest.mark.parametrize(
    ("singular", "rank"), [((4.0, 2.0, 1.0), 1), ((4.0, 2.0, 1.0, 1.1), 2), ((1.0, 1.1, 1.2, 1.3, 1.4), 3), ((1.0,), 1)]
)
def test_auto_keeps_what_outweighs_the_rest(singular: tuple[float, ...], rank: int) -> None:
    assert subspace(torch.diag(torch.tensor(singular)), rank="auto").ranks == (rank,)


@pytest.mark.parametrize("kind", ["gaussian", "sparse"])
def test_a_random_basis_is_right_on_average_only(kind: Literal["gaussian", "sparse"]) -> None:
    generator, row = torch.Generator().manual_seed(5), draw(1)[0]
    drawn = [random_basis(SIZE, SLICES, 3, generator, kind) for _ in range(4000)]
    assert drawn[0].ranks == (3, 3, 1)
    assert not orthonormal(drawn[0])
    mean = torch.stack([basis.project(row) for basis in drawn]).mean(0)
    # deviation of one projection ≈ ‖row of the part‖/√3 per coordinate; five deviations of the mean
    torch.testing.assert_close(mean, row, rtol=0, atol=5 * float(row.norm()) / math.sqrt(3 * 4000))
    entries = torch.cat([basis.parts[0].matrix.flatten() for basis in drawn])
    assert float(entries.var()) == pytest.approx(1 / 3, rel=0.02)
    assert float((entries == 0).float().mean()) == pytest.approx(2 / 3 if kind == "sparse" else 0, abs=0.01)
    again = random_basis(SIZE, SLICES, 3, torch.Generator().manual_seed(5), kind)
    assert torch.equal(again.project(row), drawn[0].project(row))
    assert random_basis(SIZE, None, 2, generator, kind).coordinates(row).shape == (2,)


def test_a_basis_travels_as_bytes() -> None:
    basis = subspace(draw(4), SLICES, rank=2, kind="centred")
    written = {name: (tensor.numpy().tobytes(), tensor.dtype) for name, tensor in basis.to_tensors().items()}
    tensors = {name: torch.frombuffer(bytearray(data), dtype=dtype) for name, (data, dtype) in written.items()}
    back = basis_from_tensors(tensors, SLICES, SIZE)
    assert torch.equal(back.project(draw(2, seed=7)), basis.project(draw(2, seed=7)))
    plain = subspace(draw(4), SLICES).to_tensors()
    assert len(plain["centre"]) == 0  # zeros need no bytes
    assert len(plain["basis"]) == SIZE
    nothing = subspace(torch.zeros(1, SIZE), SLICES)
    assert basis_from_tensors(nothing.to_tensors(), SLICES, SIZE).ranks == (0, 0, 0)


def test_noise_is_read_off_norms() -> None:
    deviations = torch.tensor([0.1, 0.5, 2.0])
    updates = torch.cat([torch.full((3, 4000), 0.3), torch.zeros(3, 1000)], dim=1) + draw(3, 5000) * deviations[:, None]
    rough = variances_of_norms(updates.double().norm(dim=1) ** 2, 5000)
    np.testing.assert_allclose(rough[1:], deviations[1:] ** 2 - deviations[0] ** 2, rtol=0.1)
    assert 0 < float(rough[0]) < 0.01 * 0.3  # its own uncertainty, not zero
    assert variances_of_norms(torch.zeros(2), 3).tolist() == [0, 0]


def test_weights_fall_with_noise_and_ignore_what_is_broken() -> None:
    weights = inverse_variance_weights(torch.tensor([1.0, 3.0]), signal=1.0)
    torch.testing.assert_close(weights, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    assert inverse_variance_weights(torch.tensor([0.0, 2.0, 0.0])).tolist() == [0.5, 0, 0.5]
    squares = torch.cat([draw(3).norm(dim=1) ** 2, torch.tensor([math.inf, 0.0])])
    variances = variances_of_norms(squares, SIZE)
    assert variances[3] == math.inf
    assert variances[4] == variances[:3].min() > 0
    assert inverse_variance_weights(variances)[3] == 0
    assert inverse_variance_weights(torch.zeros(2)).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("model", "limit"), [(logistic(), 0.03), (cnn(), 0.15)], ids=["logistic", "cnn"])
def test_a_subspace_of_five_clients_takes_milliseconds(model: object, limit: float) -> None:
    slices, size = model.slices, model.size  # type: ignore[attr-defined]
    rows = draw(5, size)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        subspace(rows, slices, rank=2).project(rows)
        times.append(time.perf_counter() - begin)
    assert min(times) < limit


def travelling(**changed: Tensor) -> Callable[[], Basis]:
    return lambda: basis_from_tensors({**subspace(draw(2), SLICES).to_tensors(), **changed}, SLICES, SIZE)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no weight": (lambda: weighted_mean(draw(2), torch.zeros(2)), "weights are all 0"),
    "negative weight": (lambda: weighted_mean(draw(2), torch.tensor([1.0, -1.0])), "at least 0"),
    "infinite weight": (lambda: weighted_mean(draw(2), torch.tensor([1.0, math.inf])), "finite"),
    "weights": (lambda: weighted_mean(draw(2), torch.ones(3)), "one number per row"),
    "nobody": (lambda: weighted_mean(draw(0), torch.ones(0)), "weights are all 0"),
    "no public client": (lambda: subspace(draw(0)), "at least one client"),
    "rank": (lambda: subspace(draw(2), rank=0), "rank must be at least 1"),
    "kind": (lambda: subspace(draw(2), kind="best"), "no kind 'best'"),  # type: ignore[arg-type]
    "not finite": (lambda: subspace(draw(2) / 0), "not finite"),
    "slices": (lambda: subspace(draw(2, 20), SLICES), "within the 20 parameters"),
    "columns": (lambda: subspace(draw(2)).project(draw(2, 5)), "29 columns"),
    "coordinates": (lambda: subspace(draw(2)).rebuild(draw(2, 5)), "1 columns"),
    "random kind": (
        lambda: random_basis(3, None, 1, torch.Generator(), "dense"),  # type: ignore[arg-type]
        "no kind 'dense'",
    ),
    "random rank": (lambda: random_basis(3, None, 0, torch.Generator()), "rank must be"),
    "missing tensor": (lambda: basis_from_tensors({}, SLICES, SIZE), "needs the tensor 'basis'"),
    "ranks": (travelling(ranks=torch.tensor([1, 1])), "ranks must be 3 numbers"),
    "negative rank": (travelling(ranks=torch.tensor([1, 1, -1])), "ranks must be 3 numbers"),
    "basis": (travelling(basis=torch.zeros(5)), "must hold 29 numbers"),
    "centre": (travelling(centre=torch.zeros(5)), "29 numbers or none"),
    "signal": (lambda: inverse_variance_weights(torch.ones(2), math.nan), "signal must be"),
    "variances": (lambda: inverse_variance_weights(torch.tensor([math.nan])), "variances must be"),
    "all broken": (lambda: inverse_variance_weights(torch.tensor([math.inf])), "finite for no client"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused_in_a_sentence(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(InputError, match=message):
        call()
