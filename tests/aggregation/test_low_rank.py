"""Low-rank releases: against the paper's loop, PowerSGD, closed forms, and wild inputs."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference.cmp_fed import cmp_fed_round, embeddings_of, factors_of, lefts_of, power_sgd_step, tensors_of, vector_of
from torch import Tensor, nn

from polyeps.aggregation.low_rank import Compression, WarmStart, WholeTensors, low_rank
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import clip_to_norm
from polyeps.models import MODELS, Slice, binary_logistic, cnn, cross_entropy, from_module, mcmahan_cnn

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NO_CLIP = 1e30
SHAPES = st.lists(st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple), min_size=1, max_size=4)


def slices_of(shapes: list[tuple[int, ...]]) -> dict[str, Slice]:
    found, end = {}, 0
    for place, shape in enumerate(shapes):
        found[str(place)] = Slice(end, end + math.prod(shape), shape)
        end += math.prod(shape)
    return found


def draw(clients: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def first_right(compression: Compression, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return compression.start(torch.Generator().manual_seed(seed)).to(dtype)


def one_round(compression: Compression, updates: Tensor, right: Tensor, clips: tuple[float, float]) -> Any:
    """A round without noise: the step, and the mean embedding."""
    left = compression.orthonormal(clip_to_norm(compression.subspace_of(updates, right), clips[0]).mean(0))
    embedding = clip_to_norm(compression.embedding_of(updates, left), clips[1]).mean(0)
    return compression.rebuild(left, embedding), embedding


# What is sent


@pytest.mark.parametrize(
    ("rank", "without", "with_biases"),
    [(1, 5091, 5709), (2, 10_182, 10_800), (4, 20_364, 20_982), (8, 40_728, 41_346), (16, 78_324, 78_942)],
)
def test_floats_sent_are_the_papers(rank: int, without: int, with_biases: int) -> None:
    compression = low_rank(mcmahan_cnn().slices, rank, whole="biases")
    assert compression.uplink == with_biases
    assert compression.subspace_size + compression.right_size == without
    assert compression.size == 1_663_370


def test_at_rank_16_the_first_convolution_and_the_head_are_cheaper_whole() -> None:
    compression = low_rank(mcmahan_cnn().slices, 16)
    assert [(m.rows, m.columns) for m in compression.matrices] == [(64, 800), (512, 3136)]
    assert compression.subspace_size == 16 * (64 + 512)
    assert compression.embedding_size == 16 * (800 + 3136) + 32 * 25 + 10 * 512 + 618
    assert low_rank(mcmahan_cnn().slices, 16, whole="biases").ranks == (16, 16, 16, 10)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("rank", [1, 3, 50, 10_000])
def test_never_more_floats_than_parameters(name: str, rank: int) -> None:
    model = MODELS[name]()
    compression = low_rank(model.slices, rank)
    assert compression.uplink <= low_rank(model.slices, rank, whole="biases").uplink
    assert compression.uplink <= compression.size == model.size


def test_a_model_of_one_row_is_sent_whole() -> None:
    compression = low_rank(binary_logistic().slices, 1)
    assert (compression.subspace_size, compression.embedding_size) == (0, 123)
    updates = draw(3, 123)
    step, _ = one_round(compression, updates, first_right(compression), (1.0, NO_CLIP))
    torch.testing.assert_close(step, updates.mean(0))


# Directions from the model


def test_directions_from_the_model_need_no_left_factors_and_leave_unread_layers_whole() -> None:
    compression = low_rank(mcmahan_cnn().slices, 16, directions="model")
    assert [(m.rows, m.columns, m.rank) for m in compression.matrices] == [(64, 800, 16), (512, 3136, 10)]
    assert compression.uplink == compression.embedding_size == 16 * 800 + 10 * 3136 + 32 * 25 + 10 * 512 + 618
    assert low_rank(mcmahan_cnn().slices, 1, directions="model").ranks == (1, 1, 1)
    assert low_rank(mcmahan_cnn().slices, 10_000, directions="model").ranks == (10,)  # the others are cheaper whole


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_of_which_no_layer_reads_another_are_refused(name: str) -> None:
    model = MODELS[name]()
    if name in ("cifar_cnn", "cnn", "mcmahan_cnn", "mlp"):
        assert low_rank(model.slices, 1, directions="model").matrices
    else:
        with pytest.raises(InputError, match='directions = "model" needs a layer whose outputs the next one reads'):
            low_rank(model.slices, 1, directions="model")


@pytest.mark.parametrize("name", ["cnn", "mcmahan_cnn", "mlp"])
def test_directions_from_the_model_are_orthonormal_and_others_every_time(name: str) -> None:
    model = MODELS[name]()
    compression = low_rank(model.slices, 3, directions="model")
    for start in (model.start(torch.Generator().manual_seed(2)), torch.zeros(model.size)):
        left, again, other = (compression.left_of(start, torch.Generator().manual_seed(seed)) for seed in (4, 4, 5))
        assert left.shape == (compression.subspace_size,)
        assert torch.equal(left, again)
        assert torch.equal(left, other) is not bool(start.any())
        for factor in compression._lefts(left.double()):
            torch.testing.assert_close(factor.T @ factor, torch.eye(factor.shape[1]).double(), rtol=0, atol=1e-6)


def test_they_hold_all_of_a_gradient_where_nothing_bends_it() -> None:
    """Through linear layers a gradient comes back within what the next layer's weights span, places included."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 9, 3), nn.Flatten(), nn.Linear(9 * 4, 8), nn.Linear(8, 3))
    model = from_module(network, cross_entropy, torch.zeros(2, 2, 4, 4))
    vector = torch.cat([p.detach().flatten() for p in network.parameters()])
    network(draw(5, 32).float().view(5, 2, 4, 4)).square().sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
    compression = low_rank(model.slices, 3, directions="model")
    assert [(m.rows, m.rank) for m in compression.matrices] == [(9, 3), (8, 3)]
    left = compression.left_of(vector, torch.Generator().manual_seed(1))
    rebuilt = compression.rebuild(left, compression.embedding_of(gradient[None], left)[0])
    inner = compression.matrices[1]
    torch.testing.assert_close(rebuilt[inner.start :], gradient[inner.start :], rtol=1e-4, atol=1e-4)
    outer = compression.matrices[0]  # read at four places by eight: three of nine directions hold a part
    assert 0 < float(rebuilt[outer.start : outer.stop].norm()) < float(gradient[outer.start : outer.stop].norm())
    vector[3] = math.nan
    with pytest.raises(InputError, match="not finite"):
        compression.left_of(vector, torch.Generator())


# Against plain loops


@settings(max_examples=60, deadline=None)
@given(
    shapes=SHAPES,
    rank=st.integers(1, 5),
    clients=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    whole=st.sampled_from(["when-cheaper", "biases"]),
    clips=st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)),
)
def test_two_rounds_equal_the_papers_loop(
    shapes: list[tuple[int, ...]], rank: int, clients: int, seed: int, whole: WholeTensors, clips: tuple[float, float]
) -> None:
    """With noise in the sums, without which a mean has too few directions; clips aim a little below C."""
    compression = low_rank(slices_of(shapes), rank, whole=whole, warm_start="raw")
    right = first_right(compression, seed)
    theirs = factors_of(compression, right.numpy())
    below = (clips[0] * (1 - 2**-19), clips[1] * (1 - 2**-19))
    for number in range(2):
        updates = draw(clients, compression.size, seed + number)
        subspace_noise = draw(clients, compression.subspace_size, seed + 2 + number)
        embedding_noise = draw(clients, compression.embedding_size, seed + 4 + number)
        step, theirs = cmp_fed_round(
            [tensors_of(compression, update) for update in updates.numpy()],
            theirs,
            below,
            [lefts_of(compression, row) for row in subspace_noise.numpy()],
            [embeddings_of(compression, row) for row in embedding_noise.numpy()],
        )
        sent = clip_to_norm(compression.subspace_of(updates, right), clips[0]) + subspace_noise
        left = compression.orthonormal(sent.mean(0))
        embedding = (clip_to_norm(compression.embedding_of(updates, left), clips[1]) + embedding_noise).mean(0)
        torch.testing.assert_close(
            compression.rebuild(left, embedding), torch.from_numpy(vector_of(compression, step)), rtol=1e-6, atol=1e-8
        )
        right = compression.next_right(embedding)


@pytest.mark.parametrize("warm_start", ["raw", "orthonormal"])
def test_without_noise_a_run_is_power_sgd(warm_start: WarmStart) -> None:
    """UV-Fed; and orthonormal starts span the same space, so the steps are the same."""
    shapes: list[tuple[int, ...]] = [(6, 3, 2), (6,), (4, 9), (4,), (3, 3)]
    compression = low_rank(slices_of(shapes), 2, whole="biases", warm_start=warm_start)
    right = first_right(compression)
    theirs = factors_of(compression, right.numpy())
    for number in range(5):
        updates = draw(7, compression.size, number)
        step, embedding = one_round(compression, updates, right, (NO_CLIP, NO_CLIP))
        expected, theirs = power_sgd_step([tensors_of(compression, update) for update in updates.numpy()], theirs)
        torch.testing.assert_close(step, torch.from_numpy(vector_of(compression, expected)), rtol=1e-9, atol=1e-9)
        right = compression.next_right(embedding)
        if warm_start == "orthonormal":
            _, corner = np.linalg.qr(right[:12].reshape(6, 2).numpy())
            np.testing.assert_allclose(np.abs(np.diag(corner)), 1)


# What is rebuilt


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 10_000), warm_start=st.sampled_from(["raw", "orthonormal"]))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_full_rank_gives_the_mean(
    dtype: torch.dtype, shapes: list[tuple[int, ...]], seed: int, warm_start: WarmStart
) -> None:
    compression = low_rank(slices_of(shapes), 7**3, whole="biases", warm_start=warm_start)
    updates = draw(3, compression.size, seed, dtype)
    right = first_right(compression, seed + 1, dtype)
    step, _ = one_round(compression, updates, right, (NO_CLIP, NO_CLIP))
    # How well-conditioned a Gaussian start is decides how much rounding a tall matrix sees of itself.
    close = 1e-9 if dtype == torch.float64 else 3e-6 / narrowest(compression, right)
    torch.testing.assert_close(step, updates.mean(0), rtol=0, atol=close)


def narrowest(compression: Compression, right: Tensor) -> float:
    factors = [factor for factor in factors_of(compression, right.double().numpy()) if factor is not None]
    return min([1.0, *(float(np.linalg.svd(factor, compute_uv=False)[-1]) for factor in factors)])


def test_full_rank_of_the_cnn_gives_the_mean() -> None:
    compression = low_rank(cnn().slices, 512, whole="biases")
    updates = draw(4, compression.size, dtype=torch.float32)
    step, _ = one_round(compression, updates, first_right(compression, dtype=torch.float32), (NO_CLIP, NO_CLIP))
    torch.testing.assert_close(step, updates.mean(0), rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, rank=st.integers(1, 5), seed=st.integers(0, 10_000), power=st.integers(-10, 10))
def test_a_round_scales_with_the_updates(shapes: list[tuple[int, ...]], rank: int, seed: int, power: int) -> None:
    """Twice the updates, twice the step; and the bases do not change by a bit."""
    compression, scale = low_rank(slices_of(shapes), rank), 2.0**power
    updates, right = draw(3, compression.size, seed), first_right(compression)
    step, embedding = one_round(compression, updates, right, (NO_CLIP, NO_CLIP))
    scaled, scaled_embedding = one_round(compression, updates * scale, right, (NO_CLIP, NO_CLIP))
    assert torch.equal(scaled, step * scale)
    assert torch.equal(compression.next_right(scaled_embedding), compression.next_right(embedding))


def test_a_low_rank_mean_is_found_whole_and_followed() -> None:
    """The mean has rank 2: rank 2 gives it exactly, from any start; clients' own parts cancel in sums."""
    compression = low_rank(slices_of([(20, 30)]), 2)
    mean = draw(20, 2) @ draw(2, 30, 1)
    own = draw(4, 600, 2)
    updates = mean.flatten() + own - own.mean(0)
    step, _ = one_round(compression, updates, first_right(compression), (NO_CLIP, NO_CLIP))
    torch.testing.assert_close(step, mean.flatten(), rtol=0, atol=1e-9)


# Orthonormal bases


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    kinds=st.lists(
        st.sampled_from(["fresh", "zero", "copy", "near", "loud", "quiet", "denormal"]), min_size=1, max_size=9
    ),
)
@example(rows=3, seed=0, kinds=["zero", "zero", "zero"])
def test_bases_are_orthonormal_whatever_the_columns(rows: int, seed: int, kinds: list[str]) -> None:
    kinds = kinds[:rows]
    columns = draw(len(kinds), rows, seed, torch.float32)
    change = {"zero": 0.0, "loud": 1e30, "quiet": 1e-30, "denormal": 1e-42}
    for place, kind in enumerate(kinds):
        if kind == "copy":
            columns[place] = columns[0]
        elif kind == "near":
            columns[place] = columns[0] * 3 + 1e-7 * columns[place]
        columns[place] *= change.get(kind, 1.0)
    compression = low_rank(slices_of([(rows, 50)]), len(kinds), whole="biases")
    basis = compression.orthonormal(columns.T.flatten()).reshape(rows, len(kinds)).double()
    np.testing.assert_allclose((basis.T @ basis).numpy(), np.eye(len(kinds)), atol=1e-6)
    if set(kinds) <= {"fresh", "loud", "quiet"}:  # every earlier column lies in the span of the first basis vectors
        for place, column in enumerate(columns.double()):
            inside = basis[:, : place + 1] @ (basis[:, : place + 1].T @ column)
            torch.testing.assert_close(inside, column, rtol=0, atol=1e-5 * float(column.abs().max()))


def test_a_column_of_zeros_comes_back_to_life() -> None:
    """Left at zero it would be zero in the next start, and a rank lost for good."""
    compression = low_rank(slices_of([(8, 9)]), 3)
    updates, right = draw(2, 72), first_right(compression).reshape(9, 3)
    right[:, 1] = 0
    left = compression.orthonormal(compression.subspace_of(updates, right.flatten()).mean(0))
    embedding = compression.embedding_of(updates, left).mean(0)
    assert torch.linalg.matrix_rank(embedding.reshape(9, 3)) == 3


def test_nothing_at_all_gives_the_first_unit_vectors() -> None:
    """Data-free, so that a round in which nobody moved still has a step: zero."""
    compression = low_rank(slices_of([(8, 9)]), 3)
    left = compression.orthonormal(torch.zeros(24))
    assert torch.equal(left.reshape(8, 3), torch.eye(8, 3))
    assert not compression.rebuild(left, compression.embedding_of(torch.zeros(1, 72), left)[0]).any()


def test_a_direction_made_of_rounding_is_not_taken_up() -> None:
    compression = low_rank(slices_of([(8, 50)]), 2)
    column = draw(1, 8, dtype=torch.float32)[0]
    noisy = torch.stack([column, column * (1 + 1e-7 * draw(1, 8, 5, torch.float32)[0])], 1)
    plain = torch.stack([column, column * 0], 1)
    assert torch.equal(compression.orthonormal(noisy.flatten()), compression.orthonormal(plain.flatten()))


# Clipping

WILD = st.sampled_from([0.0, 1.0, -1.0, 3e38, -3e38, 1e-45, 1e-38, 1e-20, 1e20, math.inf, -math.inf, math.nan, 1 / 3])


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(st.lists(WILD | st.floats(width=32), min_size=6, max_size=6), min_size=1, max_size=4),
    clip=st.floats(1e-30, 1e30),
)
def test_no_release_passes_its_clip(values: list[list[float]], clip: float) -> None:
    rows = torch.tensor(values, dtype=torch.float32)
    before = rows.clone()
    released = clip_to_norm(rows, clip)
    assert torch.equal(rows.nan_to_num(), before.nan_to_num())
    for row, result in zip(before.tolist(), released.tolist(), strict=True):
        if not all(math.isfinite(value) for value in row):
            assert result == [0.0] * 6
            continue
        square = sum(Fraction(value) ** 2 for value in result)
        assert square <= (Fraction(clip) * (1 - Fraction(1, 2**20))) ** 2
        original = sum(Fraction(value) ** 2 for value in row)
        if original <= (Fraction(clip) * (1 - Fraction(1, 2**18))) ** 2:
            assert result == row
        elif clip > 1e-25:
            assert square >= (Fraction(clip) * (1 - Fraction(1, 2**18))) ** 2


@pytest.mark.parametrize("device", DEVICES)
def test_long_releases_keep_the_bound_and_their_direction(device: str) -> None:
    rows = draw(5, 1_663_370, dtype=torch.float32).to(device) * torch.tensor([1e-9, 1, 1e9, 1e30, 1])[:, None].to(
        device
    )
    rows[4, 77] = math.nan
    released = clip_to_norm(rows, 0.01).cpu().double()
    norms = torch.linalg.vector_norm(released, dim=1)
    assert bool((norms <= 0.01 * (1 - 2**-20)).all())
    assert bool((norms[1:4] >= 0.01 * (1 - 2**-18)).all())
    assert torch.equal(released[0], rows[0].cpu().double())
    assert not released[4].any()
    directions = torch.nn.functional.cosine_similarity(released[:4], rows[:4].cpu().double())
    torch.testing.assert_close(directions, torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_client_that_overflows_sends_zeros_and_spoils_nobody() -> None:
    compression = low_rank(slices_of([(8, 9), (8,)]), 2)
    updates = draw(3, 80, dtype=torch.float32)
    updates[1] = 3e38
    updates[2, 5] = math.nan
    right = first_right(compression, dtype=torch.float32)
    first = clip_to_norm(compression.subspace_of(updates, right), 1.0)
    assert first[0].any()
    assert not first[1:].any()
    second = clip_to_norm(compression.embedding_of(updates, compression.orthonormal(first.mean(0))), 1.0)
    assert bool(torch.isfinite(second).all())
    assert not second[2].any()


# One client or many, one device or another


@pytest.mark.parametrize("device", DEVICES)
def test_a_client_alone_sends_what_it_sends_in_a_cohort(device: str) -> None:
    compression = low_rank(cnn().slices, 4)
    updates = draw(5, compression.size, dtype=torch.float32).to(device)
    right = first_right(compression, dtype=torch.float32).to(device)
    first = compression.subspace_of(updates, right)
    left = compression.orthonormal(first.mean(0))
    second = compression.embedding_of(updates, left)
    assert (first.shape, second.shape) == ((5, compression.subspace_size), (5, compression.embedding_size))
    assert {first.device, second.device, compression.rebuild(left, second[0]).device} == {updates.device}
    torch.testing.assert_close(compression.subspace_of(updates[3:4], right)[0], first[3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compression.embedding_of(updates[3:4], left)[0], second[3], rtol=1e-4, atol=1e-4)
    there = compression.orthonormal(first.mean(0).cpu())
    torch.testing.assert_close(left.cpu(), there, rtol=0, atol=1e-5)
    dead = (first.mean(0) * 0).to(device)
    assert torch.equal(compression.orthonormal(dead).cpu(), compression.orthonormal(dead.cpu()))


# Refusals


def test_what_does_not_fit_is_refused() -> None:
    slices = slices_of([(8, 9), (8,)])
    compression = low_rank(slices, 2)
    updates, right = draw(3, 80), first_right(compression)
    with pytest.raises(InputError, match="rank must be at least 1"):
        low_rank(slices, 0)
    with pytest.raises(InputError, match="whole must be one of when-cheaper, biases"):
        low_rank(slices, 1, whole="never")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="warm_start must be one of orthonormal, raw"):
        low_rank(slices, 1, warm_start="cold")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="without gaps, but '1' starts at 73"):
        low_rank({**slices, "1": Slice(73, 81, (8,))}, 1)
    with pytest.raises(InputError, match=r"updates must be one row per client with 80 numbers, not shape \(3, 79\)"):
        compression.subspace_of(updates[:, 1:], right)
    with pytest.raises(InputError, match=r"right factors must be a vector of 18 numbers, not shape \(17,\)"):
        compression.subspace_of(updates, right[1:])
    with pytest.raises(InputError, match="left factors must be a vector of 16 numbers"):
        compression.embedding_of(updates, right)
    with pytest.raises(InputError, match="an embedding must be a vector of 26 numbers"):
        compression.rebuild(right[:16], right)
    with pytest.raises(InputError, match="not finite"):
        compression.orthonormal(torch.full((16,), math.inf))
    for clip in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="clip must be between"):
            clip_to_norm(updates, clip)
    with pytest.raises(InputError, match="float32 or float64"):
        clip_to_norm(updates.half(), 1.0)
