import numpy as np
import pytest
import torch
from support.audited import audited

from polyeps.audit.accounting_attacks import ACCOUNTING_DELTA, accounts
from polyeps.audit.canary import audit_mechanism, certified_epsilon
from polyeps.audit.lower_bounds import Samples
from polyeps.audit.results import AuditResult
from polyeps.engine.contributions import RowGradients
from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.network import clip_rows

ACCOUNTS = {account.title.replace(" account", ""): account for account in accounts()}
DEAR = ("cmp-fed: C5 noise of dropouts lost", "cmp-fed: C3 one of two releases charged")  # five seconds and more


def judged(name: str, seed: int = 0) -> AuditResult:
    return audited(ACCOUNTS[name].title, seed=seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [name for name in ACCOUNTS if name not in DEAR])
def test_mistakes_are_refuted_and_sound_forms_never(name: str, seed: int) -> None:
    row = judged(name, seed)
    assert row.refuted != ACCOUNTS[name].sound
    assert row.evidence.audited <= row.evidence.certified  # what we certify for it as it is run
    assert row.evidence.audited > 0.25 * row.evidence.claimed  # the audit of a sound form is not toothless


@pytest.mark.parametrize("name", DEAR)
def test_small_differences_take_up_to_a_million_trials(name: str) -> None:
    row = judged(name)
    assert row.refuted
    assert row.evidence.audited <= row.evidence.certified


@pytest.mark.parametrize(
    ("name", "claimed", "true"),
    [
        ("fedhdp: C2 fixed-size cohorts charged as Poisson", 3.6, 21.6),
        ("fedhdp: H2 clip bits not charged", 2.8696, 6.333),
        ("fedhdp: clip bits charged", 2.8696, 2.8696),
        ("cmp-fed: C4 clipped by the spectral norm", 1.0, 50.8),
        ("cmp-fed: C4 clipped layer by layer", 1.0, 6.86),
        ("cmp-fed: C3 one of two releases charged", 1.0, 1.829),
        ("cmp-fed: C2 fixed-size cohorts charged as Poisson", 1.0, 7.34),
        ("cmp-fed: C5 noise of dropouts lost", 1.0, 1.529),
        ("cmp-fed: noise for the survivors alone", 1.0, 1.0),
        ("cmp-fed: fixed-size cohorts charged as such", 1.0, 1.0),
    ],
)
def test_figures_are_those_of_the_analysis(name: str, claimed: float, true: float) -> None:
    assert ACCOUNTS[name].claimed == pytest.approx(claimed, rel=1e-3)
    assert certified_epsilon(ACCOUNTS[name].mechanism, ACCOUNTING_DELTA) == pytest.approx(true, rel=2e-3)


@pytest.mark.parametrize("name", ACCOUNTS)
def test_sound_cases_charge_what_they_run(name: str) -> None:
    case = ACCOUNTS[name]
    assert (certified_epsilon(case.mechanism, ACCOUNTING_DELTA) <= case.claimed * (1 + 1e-4)) == case.sound


def test_the_clipping_of_the_engine_is_sound() -> None:
    ours = [case for case in accounts(engine_clip) if case.sound]
    assert ours
    for case in ours:
        assert certified_epsilon(case.mechanism, ACCOUNTING_DELTA) <= case.claimed * (1 + 1e-4)
    found = audit_mechanism(ours[0].mechanism, ACCOUNTING_DELTA, 20_000, np.random.default_rng(0))
    assert found <= ours[0].claimed


def engine_clip(update: Samples) -> Samples:
    """What DP-SGD does to one record's gradient, layer after layer of it."""
    layout = Layout(1, (RowGroup(0, 1, 1, 0),), torch.zeros(1, dtype=torch.int64))
    layers = torch.from_numpy(update.reshape(len(update), -1)).float()
    contributions = [RowGradients(layout, layer[None]) for layer in layers]
    factors = clip_rows(list(contributions), torch.ones(1))
    clipped = torch.zeros(len(layers), 1, layers.shape[1])
    for contribution, into in zip(contributions, clipped, strict=True):
        contribution.add_to(into, factors)
    return clipped.double().numpy().reshape(update.shape)
