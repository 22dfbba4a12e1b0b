"""Streams: standard normals and uniforms, each client's own, seeded or from the system."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from polyeps.core import Streams
from polyeps.engine import noise
from polyeps.engine.noise import SecretStreams, SeededStreams, SystemStreams
from polyeps.engine.philox import normals, philox
from polyeps.errors import InputError
from polyeps.mechanisms.random_words import words_of


def system(clients: int) -> SystemStreams:
    pytest.importorskip("cryptography")
    return SystemStreams(clients)


def drawn(streams: Streams, steps: int, d: int, rows: list[int] | None = None) -> Tensor:
    out = torch.zeros(streams.clients, steps, d)
    streams.normals(out, list(range(streams.clients)) if rows is None else rows)
    return out


def looks_standard_normal(values: Tensor) -> None:
    sample = values.flatten().double().numpy()
    assert stats.kstest(sample, "norm").pvalue > 1e-4
    # Σx² is chi-squared with as many degrees of freedom as there are draws
    assert 1e-4 < stats.chi2(len(sample)).cdf(np.sum(sample**2)) < 1 - 1e-4
    assert abs(np.mean(sample)) < 5 / np.sqrt(len(sample))
    assert abs(np.mean(sample**4) - 3) < 5 * np.sqrt(96 / len(sample))


def test_seeded_normals_are_standard_normal() -> None:
    looks_standard_normal(drawn(SeededStreams(1, range(5), 0), 4, 20_001))


@pytest.mark.parametrize("streams", [system(2), SeededStreams(1, range(2), 0, exact=True)])
def test_deployed_streams_refuse_noise_in_floating_point(streams: Streams) -> None:
    assert streams.exact
    assert streams.select([1]).exact
    with pytest.raises(InputError, match="low digits leak"):
        drawn(streams, 1, 8)
    with pytest.raises(InputError, match="low digits leak"):
        noise.normals_for(streams, torch.zeros(2, 8), "update")


def test_system_streams_never_repeat() -> None:
    one, other = system(2), system(2)
    assert not np.array_equal(one.uniforms(8), other.uniforms(8))
    assert not np.array_equal(*one.uniforms(8))
    assert not np.array_equal(one.uniforms(8), one.uniforms(8))


def test_selected_system_streams_go_on_where_they_were() -> None:
    streams = system(3)
    chosen = streams.select([2])
    assert chosen.clients == 1
    assert chosen.uniforms(3).shape == (1, 3)


@pytest.mark.parametrize("make", [lambda: SeededStreams(3, ["a"], 0), lambda: system(1)])
def test_uniforms_are_uniform_and_never_zero(make: object) -> None:
    assert callable(make)
    values = make().uniforms(50_000)
    assert values.min() > 0
    assert values.max() <= 1
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-4


def test_neighbouring_clients_seeds_rounds_and_halves_are_uncorrelated() -> None:
    streams = [SeededStreams(1, [1, 2, "1/2"], 0), SeededStreams(2, [1], 0), SeededStreams(1, [1], 1)]
    rows = torch.cat([drawn(s, 1, 40_000)[:, 0] for s in streams])
    rows = torch.cat([rows[:, :20_000], rows[:, 20_000:]])  # cosines and sines of the same words
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 5 / 20_000**0.5
    assert (torch.corrcoef(rows.square()) - torch.eye(len(rows))).abs().max() < 5 / 20_000**0.5


@pytest.mark.parametrize("d", [1, 2, 7, 64])
def test_a_stream_does_not_depend_on_company_or_on_how_many_steps_are_drawn_at_once(d: int) -> None:
    together = drawn(SeededStreams(4, [10, 11, 12], 3), 6, d)
    alone = SeededStreams(4, [11], 3)
    pieces = torch.cat([drawn(alone, 1, d), drawn(alone, 2, d), drawn(alone, 3, d)], dim=1)
    assert torch.equal(together[1], pieces[0])
    assert torch.equal(together[[2, 0]], drawn(SeededStreams(4, [10, 11, 12], 3).select([2, 0]), 6, d))


def test_long_rows_are_drawn_in_tiles_and_short_ones_together() -> None:
    d = 2 * noise.TILE + 3  # more words than a tile, and an odd number of normals
    two = drawn(SeededStreams(4, [1, 2], 0), 1, d)
    looks_standard_normal(two[:, :, -5000:])
    assert torch.equal(two[1:], drawn(SeededStreams(4, [2], 0), 1, d))


def test_only_the_rows_asked_for_are_drawn() -> None:
    out = drawn(SeededStreams(4, [1, 2, 3], 0), 2, 5, rows=[0, 2])
    assert torch.equal(out[1], torch.zeros(2, 5))
    assert torch.equal(out[[0, 2]], drawn(SeededStreams(4, [1, 3], 0), 2, 5))


def test_same_id_twice_is_refused() -> None:
    with pytest.raises(InputError, match="same id"):
        SeededStreams(1, [3, "3"], 0)


def test_philox_gives_the_published_words() -> None:
    # the known answers of Salmon et al.'s Random123 for zero and for all-ones
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    words = philox((zero, zero, zero, zero), zero)
    assert [f"{int(w):08x}" for w in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    words = philox((ones, ones, ones, ones), torch.full((1,), -1))
    assert [f"{int(w):08x}" for w in words] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_device_normals_are_standard_normal_and_differ_by_key_and_step() -> None:
    keys = torch.tensor([5, 6, 7])
    first, second = (normals(keys, torch.tensor([step]), 20_001) for step in (0, 1))
    looks_standard_normal(torch.cat([first, second]))
    rows = torch.cat([first, second])
    assert (torch.corrcoef(rows) - torch.eye(6)).abs().max() < 5 / 20_000**0.5
    assert torch.equal(first[1:2], normals(keys[1:2], torch.tensor([0]), 20_001))


# A server's secret


def test_a_secret_gives_the_same_streams_again_and_nobody_else_any_of_them() -> None:
    secret, other = bytes(range(32)), bytes(32)

    def words(of: SecretStreams, release: str = "train", row: int = 0) -> list[int]:
        out = np.empty((1, 50), np.uint64)
        words_of(of, release).fill(out, [row])
        return [int(word) for word in out[0]]

    def uniforms(key: bytes, round: int) -> list[list[float]]:
        found: list[list[float]] = SecretStreams(key, ["a", "b"], round).uniforms(50).tolist()
        return found

    assert uniforms(secret, 1) == uniforms(secret, 1)
    assert words(SecretStreams(secret, ["a"], 1)) == words(SecretStreams(secret, ["a"], 1))
    assert SecretStreams(secret, ["b"], 1).uniforms(50).tolist() == uniforms(secret, 1)[1:]
    assert words(SecretStreams(secret, ["a", "b"], 1).select([1])) == words(SecretStreams(secret, ["b"], 1))
    several = [*uniforms(secret, 1), *uniforms(secret, 2), *uniforms(other, 1)]
    assert len({tuple(row) for row in several}) == 6
    streams = SecretStreams(secret, ["a", "b"], 1)
    texts = [
        words(streams),
        words(streams, "embed"),
        words(streams, "train", 1),
        words(SecretStreams(secret, ["a"], 2)),
    ]
    assert len({tuple(row) for row in texts}) == 4
    with pytest.raises(InputError, match="has 32 bytes, not 31"):
        SecretStreams(secret[1:], ["a"], 0)


def test_secret_streams_are_no_floats_and_look_uniform() -> None:
    streams = SecretStreams(bytes(32), [str(place) for place in range(200)], 3)
    with pytest.raises(InputError, match="floating point"):
        streams.normals(torch.zeros(200, 1, 4), range(200))
    assert stats.kstest(streams.uniforms(100).ravel(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("d", [7850, 2 * noise.TILE + 2])
def test_tails_and_pairs_of_a_million_normals_are_as_they_should_be(d: int) -> None:
    values = drawn(SeededStreams(5, range(4), 2), max(1, 250_000 // d), d)
    looks_standard_normal(values)
    sample = values.flatten().abs().double().numpy()
    for bound in (1.0, 2.0, 3.0, 4.0, 4.5):
        expected = len(sample) * 2 * stats.norm.sf(bound)
        assert abs(np.sum(sample > bound) - expected) < 5 * expected**0.5
    # the two normals of a word: their squares are independent, and their direction is uniform
    half = d // 2
    one, other = values[..., :half].flatten().double().numpy(), values[..., half:].flatten().double().numpy()
    assert stats.kstest((one**2 + other**2) / 2, "expon").pvalue > 1e-4
    assert stats.kstest(np.arctan2(one, other) / (2 * np.pi) + 0.5, "uniform").pvalue > 1e-4
    # neither neighbours nor steps repeat
    rows = values.flatten(0, 1)[:, : d - 1]
    shifted = values.flatten(0, 1)[:, 1:]
    assert abs(float((rows * shifted).mean())) < 5 / rows.numel() ** 0.5
    assert len(torch.unique(values[0, 0, :1000])) > 990


def test_the_extreme_words_give_finite_normals() -> None:
    words = np.array([0, 1 << 32, 0x80000000, 0x80000000 << 32, 0xFFFFFFFFFFFFFFFF, 0x7FFFFFFF7FFFFFFF], np.uint64)
    for some in (words, words[::-1].copy()):
        cosines, sines = np.empty(6, np.float32), np.empty(6, np.float32)
        noise._box_muller(some, cosines, sines)
        both = np.hypot(cosines, sines)
        assert np.isfinite(both).all()
        assert both.max() < 6.7
        assert both.max() > 6.6  # the smallest radius word, 0, is the longest normal
