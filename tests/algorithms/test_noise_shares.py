"""Parts of noise add up to what is paid for, whatever the size of the cohort and whoever fails or tells."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.algorithms import releases
from polyeps.algorithms.releases import NoiseKind, Release, SecureSums
from polyeps.core import Payload, Profile, Records, State, Work
from polyeps.engine.noise import SeededStreams
from polyeps.mechanisms.integer import Grid

SIZE = 3
AGENTS = 400
SLACK = 1e-9  # of floats
drawn = st.integers(1, AGENTS)
# Of colluders up to 0.35, and of dropouts as many as a secure sum could bear beside them.
shares = st.tuples(st.floats(0, 1), st.floats(0, 0.35)).map(lambda pair: (pair[0] * (1 - pair[1]) / 2, pair[1]))
scales = st.floats(0.05, 50)
clips = st.floats(1e-3, 1e3)
parts = st.floats(0.01, 1.0)


def asked(release: Release, sums: SecureSums, cohort: int) -> Payload:
    state = State(torch.zeros(SIZE), roster=(Profile("x"),) * cohort)
    bits = release.bits(sums.scale, sums.honest_share, sums.most)
    return {**release.to_ask(state, bits), **sums.noise_of(cohort)}


def work(scale: float, payload: Payload) -> Work:
    """One client of the cohort."""
    nothing = Records(torch.zeros(0), torch.zeros(0), torch.zeros(2, dtype=torch.int64))
    return Work(np.arange(1), payload, nothing, np.full(1, scale), SeededStreams(1, ["x"], 0), {})


def setting(noise: NoiseKind, told: Any) -> tuple[Release, SecureSums]:
    (dropouts, colluders), scale, clip, share = told
    return Release("train", SIZE, clip, share, noise, AGENTS), SecureSums(
        scale, 100.0, partial(SeededStreams, 1, ["all"]), dropouts, colluders
    )


def honest_left(sums: SecureSums, cohort: int) -> int:
    """Of the fewest that open a sum, who keep their noise to themselves if as many tell it as is allowed for."""
    return sums.least(cohort) - math.floor(cohort * sums.colluders + SLACK)


@given(cohort=drawn, told=st.tuples(shares, scales, clips, parts))
@settings(max_examples=200)
def test_gaussian_parts(cohort: int, told: Any) -> None:
    release, sums = setting("gaussian", told)
    with patch.object(releases, "normals_for", lambda _, values, __: torch.ones_like(values)):
        values = torch.zeros(1, SIZE, dtype=torch.float64)
        sent = release.from_clients(work(sums.scale, asked(release, sums, cohort)), values)
        nobody = release.of_nobody(
            State(values[0]), sums.scale, sums.honest_share, SeededStreams(1, ["x"], 0), bits=None
        )
    part, priced = float(sent["train"][0, 0]), release.deviation(sums.scale)
    assert release.event(sums.scale).noise_multiplier * release.clip == priced
    assert honest_left(sums, cohort) * part**2 >= priced**2 * (1 - SLACK)
    everybodys = priced**2 / sums.honest_share  # the same for every cohort, and for an empty one
    assert math.isclose(cohort * part**2, everybodys, rel_tol=SLACK)
    assert math.isclose(float(nobody[0]) ** 2, everybodys, rel_tol=1e-6)


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
@given(cohort=drawn, told=st.tuples(shares, scales, clips, parts))
@settings(max_examples=60, deadline=None)
def test_parts_of_integers(noise: NoiseKind, cohort: int, told: Any) -> None:
    release, sums = setting(noise, told)
    grids: list[Grid] = []

    def noted(grid: Grid, values: torch.Tensor, _: Any) -> Any:
        grids.append(grid)
        return np.zeros((len(values), grid.dimension), np.int64)

    with patch.object(releases, "encode", noted):
        release.from_clients(work(sums.scale, asked(release, sums, cohort)), torch.zeros(1, SIZE))
        state = State(torch.zeros(SIZE))
        bits = release.bits(sums.scale, sums.honest_share, sums.most)
        release.of_nobody(state, sums.scale, sums.honest_share, SeededStreams(1, ["x"], 0), bits)
    own, of_nobody = grids
    event = release.event(sums.scale)
    part = Fraction(own.agent_variance)
    priced = event.variance if noise == "skellam" else AGENTS * event.deviation**2
    assert honest_left(sums, cohort) * part >= Fraction(priced) * Fraction(1 - SLACK)
    if noise == "discrete-gaussian":  # what a sum of them lacks to be one is less than is charged
        assert part >= Fraction(event.deviation) ** 2 * Fraction(1 - SLACK)
        assert cohort <= event.agents
    assert own.largest_square <= Fraction(event.l2_sensitivity) ** 2
    assert math.isclose(cohort * part, of_nobody.agent_variance, rel_tol=SLACK)
    assert own.bits == of_nobody.bits
    assert own.granularity == of_nobody.granularity
