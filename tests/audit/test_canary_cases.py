import numpy as np
import pytest
import torch

from polyeps.audit.canary import Floats, audit, certified
from polyeps.audit.canary_cases import DELTA, cases, judge
from polyeps.engine.layout import Group, Layout
from polyeps.engine.network import clip_rows
from polyeps.engine.sums import Each

CASES = {f"{case.paper}: {case.name}": case for case in cases()}
DEAR = "cmp-fed: noise of dropouts lost"  # five seconds a seed


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", [name for name in CASES if name != DEAR])
def test_mistakes_are_refuted_and_sound_forms_never(name: str, seed: int) -> None:
    case = CASES[name]
    verdict = judge(case, np.random.default_rng(seed))
    assert verdict.refuted != case.sound
    assert not verdict.finding.refutes(verdict.certified)  # what we certify for it as it is run
    assert verdict.finding.epsilon > 0.3 * verdict.claimed  # the audit of a sound form is not toothless


def test_noise_lost_by_dropouts_takes_a_million_trials() -> None:
    verdict = judge(CASES[DEAR], np.random.default_rng(0))
    assert verdict.refuted
    assert not verdict.finding.refutes(verdict.certified)


@pytest.mark.parametrize(
    ("name", "claimed", "true"),
    [
        ("fedhdp: fixed-size cohorts charged as Poisson", 3.6, 21.6),
        ("fedhdp: clip bits not charged", 2.8696, 6.333),
        ("fedhdp: clip bits charged", 2.8696, 2.8696),
        ("cmp-fed: clipped by the spectral norm", 1.0, 50.8),
        ("cmp-fed: clipped layer by layer", 1.0, 6.86),
        ("cmp-fed: one of two releases charged", 1.0, 1.829),
        ("cmp-fed: fixed-size cohorts charged as Poisson", 1.0, 7.34),
        ("cmp-fed: noise of dropouts lost", 1.0, 1.529),
        ("cmp-fed: noise for the survivors alone", 1.0, 1.0),
        ("cmp-fed: fixed-size cohorts charged as such", 1.0, 1.0),
    ],
)
def test_figures_are_those_of_the_analysis(name: str, claimed: float, true: float) -> None:
    assert CASES[name].claimed == pytest.approx(claimed, rel=1e-3)
    assert certified(CASES[name].mechanism, DELTA) == pytest.approx(true, rel=2e-3)


@pytest.mark.parametrize("name", CASES)
def test_sound_cases_charge_what_they_run(name: str) -> None:
    case = CASES[name]
    assert (certified(case.mechanism, DELTA) <= case.claimed * (1 + 1e-4)) == case.sound


def test_the_clipping_of_the_engine_is_sound() -> None:
    ours = [case for case in cases(engine_clip) if case.sound]
    assert ours
    for case in ours:
        assert certified(case.mechanism, DELTA) <= case.claimed * (1 + 1e-4)
    assert not audit(ours[0].mechanism, DELTA, 20_000, np.random.default_rng(0)).refutes(ours[0].claimed)


def engine_clip(update: Floats) -> Floats:
    """What DP-SGD does to one record's gradient, layer after layer of it."""
    layout = Layout(1, (Group(0, 1, 1, 0),), torch.zeros(1, dtype=torch.int64))
    layers = torch.from_numpy(update.reshape(len(update), -1)).float()
    contributions = [Each(layout, layer[None]) for layer in layers]
    factors = clip_rows(list(contributions), torch.ones(1))
    clipped = torch.zeros(len(layers), 1, layers.shape[1])
    for contribution, into in zip(contributions, clipped, strict=True):
        contribution.add_to(into, factors)
    return clipped.double().numpy().reshape(update.shape)
