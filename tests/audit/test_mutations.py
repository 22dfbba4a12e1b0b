"""Faults planted in the code that is run: a row of the quick audit, or a named check, must find each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.audited import audited
from torch import Tensor

from polyeps import training
from polyeps.accounting import affordability
from polyeps.engine import loop, network, noise, sampling
from polyeps.errors import PolyepsError
from polyeps.ledger import Ledger
from polyeps.mechanisms import integer_noise
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.participation import Participation

Patch = pytest.MonkeyPatch


def halved_in_simulation(patch: Patch, by: float = 2) -> None:
    drawn = noise.SeededStreams.normals

    def normals(self: noise.SeededStreams, out: Tensor, rows: Sequence[int]) -> None:
        drawn(self, out, rows)
        out[list(rows)] = out[list(rows)] / by

    patch.setattr(noise.SeededStreams, "normals", normals)


def left_out(patch: Patch) -> None:
    halved_in_simulation(patch, by=100)


def halved_when_deployed(patch: Patch) -> None:
    whole = GridSum.deviation.fget  # type: ignore[attr-defined]
    patch.setattr(GridSum, "deviation", property(lambda self: whole(self) / 2))


def halved_in_secure_sums(patch: Patch) -> None:
    made = integer_noise.table_for
    patch.setattr("polyeps.audit.deployment_attacks.table_for", lambda name, variance: made(name, variance / 4))


def on_a_coarser_grid(patch: Patch) -> None:
    """Gradients are rounded to whole steps, noise to every second one."""
    added = GridSum.add_noise

    def add_noise(self: GridSum, totals: Any, source: Any, rows: Sequence[int]) -> None:
        drawn = np.zeros_like(totals)
        added(self, drawn, source, rows)
        totals += drawn // 2 * 2

    patch.setattr(GridSum, "add_noise", add_noise)


def on_fourths(patch: Patch) -> None:
    """Gradients lie on a grid that is four times as fine as the noise's."""
    added = GridSum.add_noise

    def add_noise(self: GridSum, totals: Any, source: Any, rows: Sequence[int]) -> None:
        drawn = np.zeros_like(totals)
        added(self, drawn, source, rows)
        totals += drawn * 4

    patch.setattr(GridSum, "add_noise", add_noise)


def one_layer_unclipped(patch: Patch) -> None:
    """The first layer's gradient is left out of the norm."""
    clip = network.clip_rows
    patch.setattr(network, "clip_rows", lambda found, clips: clip(found[1:], clips))


def charge_left_out(patch: Patch) -> None:
    patch.setattr(Ledger, "charge_all", lambda *_, **__: None)


def one_key_for_all(patch: Patch) -> None:
    patch.setattr("polyeps.mechanisms.random_words.os.urandom", bytes)


def noise_of_the_round_before(patch: Patch) -> None:
    key = noise._key
    patch.setattr(noise, "_key", lambda seed, client, _: key(seed, client, 0))


def one_stream_for_two_clients(patch: Patch) -> None:
    key = noise._key
    patch.setattr(noise, "_key", lambda seed, _, round: key(seed, "everybody", round))


def rate_doubled(patch: Patch) -> None:
    drawn = sampling.poisson_batches
    patch.setattr(loop, "poisson_batches", lambda streams, spans, rate, steps: drawn(streams, spans, 2 * rate, steps))


def cohorts_doubled(patch: Patch) -> None:
    drawn = Participation.draw

    def draw(self: Participation, *others: Any) -> tuple[str, ...]:
        return drawn(dataclasses.replace(self, share=min(1.0, 2 * self.share)), *others)

    patch.setattr(Participation, "draw", draw)


def adjacency_forgotten(patch: Patch) -> None:
    """A fixed-size batch, in which one record takes another's place, is charged as if a record were only left out."""
    made = training.dp_sgd

    def dp_sgd(*given: Any, **named: Any) -> training.Training:
        return dataclasses.replace(made(*given, **named), adjacency="zero-out")

    patch.setattr("polyeps.audit.dp_sgd_attacks.dp_sgd", dp_sgd)


def reach_of_one_clip(patch: Patch) -> None:
    """Accountants price a replaced record as if it moved a sum by one clip."""
    patch.setattr(affordability, "_known", {})
    patch.setattr("polyeps.accounting.privacy_profiles.clip_norms_moved", lambda _: 1)


FOUND_BY: list[tuple[Any, str, float]] = [  # fault, row, and how many times the trials of the quick audit find it
    (halved_in_simulation, "fedavg: train", 0.5),
    (halved_in_simulation, "simulated DP-SGD: spread of the noise", 1),
    (left_out, "one run: DP-SGD, canary records", 1),
    (left_out, "one run: cmp-fed, canary clients", 1),
    (halved_when_deployed, "deployed DP-SGD: spread of the noise", 1),
    (halved_when_deployed, "deployed fedhdp: trusted server", 0.5),
    (halved_in_secure_sums, "deployed sums: spread of discrete Gaussians", 1),
    (on_a_coarser_grid, "deployed DP-SGD: grid of replies, logistic", 1),
    (on_fourths, "deployed DP-SGD: grid of replies, mlp", 1),
    (one_layer_unclipped, "clipping: mlp, clip 1", 0.2),
    (one_layer_unclipped, "clipping: cnn, clip 1", 0.2),
    (charge_left_out, "weiavg: train", 0.1),
    (charge_left_out, "fedsel: PS, grid-PM", 0.1),
    (charge_left_out, "dp-randagg: all coordinates", 0.5),
    (one_key_for_all, "deployed DP-SGD: no noise twice", 1),
    (noise_of_the_round_before, "simulated DP-SGD: no noise twice", 1),
    (rate_doubled, "subsampled Gaussian: DP-SGD", 0.3),
    (rate_doubled, "deployed DP-SGD: Poisson batches", 0.2),
    (reach_of_one_clip, "DP-SGD, fixed-size batches, replace-one", 0.5),
    (cohorts_doubled, "dp-fedavg: trusted server, fixed clip", 1),
]


@pytest.mark.parametrize(("fault", "name", "times"), FOUND_BY, ids=lambda one: getattr(one, "__name__", one))
def test_the_audit_finds_it(fault: Any, name: str, times: float, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    found = audited(name, times)
    assert found.form == "sound"
    assert found.verdict == "refuted"


@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        (one_stream_for_two_clients, "fedavg: train", "same id"),
        (adjacency_forgotten, "DP-SGD, fixed-size batches, replace-one", "SampledWithoutReplacement|replace-one"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_check_names_it(fault: Any, name: str, message: str, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises(PolyepsError, match=message):
        audited(name, 0.01)


@pytest.mark.parametrize(("name", "times"), sorted({(name, times) for _, name, times in FOUND_BY}))
def test_without_the_fault_it_holds(name: str, times: float) -> None:
    assert audited(name, times).verdict == "holds"
