import numpy as np
import pytest
from scipy.stats import binomtest
from support.selections import audit_report, audit_selection

from polyeps.audit.fedsel_attacks import audit_values
from polyeps.audit.lower_bounds import bound_from_counts
from polyeps.mechanisms import selection
from polyeps.mechanisms.selection import SelectName
from polyeps.mechanisms.values import ValueMechanism

SEEDS = range(10)
TRIALS = 30_000


@pytest.mark.parametrize("seed", SEEDS)
def test_published_encoding_is_refuted(seed: int) -> None:
    found = audit_selection("pe", 10, 1, 2.0, form="published", trials=TRIALS, seed=seed)
    assert found > 2.0
    assert found <= selection.selection_law("pe", 10, 1, 2.0, "published").epsilon  # what we certify it at


def test_published_encoding_is_refuted_at_one() -> None:
    assert audit_selection("pe", 10, 1, 1.0, form="published", trials=100_000) > 1.05


def test_published_sampling_is_not_refuted() -> None:
    """The paper's algorithm 4 is sound; e^(ε·k), as one sentence of its text has it, would cost 7.7 here."""
    assert 0.8 < audit_selection("ps", 100, 10, 1.0, form="published", trials=100_000) <= 1.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("select", ["exp", "pe", "ps", "uniform"])
def test_sound_selections_are_never_refuted(select: SelectName, seed: int) -> None:
    for dimension, top, epsilon in ((10, 1, 1.0), (10, 3, 2.0)):
        found = audit_selection(select, dimension, top, epsilon, trials=TRIALS, seed=seed)
        certified = selection.selection_law(select, dimension, top, epsilon).epsilon
        assert found <= certified
        assert found >= 0.85 * certified or select == "exp"  # and the audit is not toothless


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mechanism", ["duchi", "pm", "hm", "grid-pm"])
def test_value_mechanisms_are_never_refuted(mechanism: ValueMechanism, seed: int) -> None:
    found = audit_values(mechanism, 2.0, trials=TRIALS, seed=seed)
    assert 1.5 < found <= 2.0


@pytest.mark.parametrize("seed", SEEDS)
def test_whole_reports_cost_the_sum_of_their_steps(seed: int) -> None:
    found = audit_report("ps", "grid-pm", 5, 1, (1.0, 1.0), trials=TRIALS, seed=seed)
    assert 1.5 < found <= 2.0


def test_the_bound_is_clopper_and_pearsons() -> None:
    found = bound_from_counts(np.array([90]), np.array([30]), (100, 100), confidence=0.9)
    low = binomtest(90, 100).proportion_ci(1 - 2 * 0.025).low
    high = binomtest(30, 100).proportion_ci(1 - 2 * 0.025).high
    assert found == pytest.approx(np.log(low / high))
    assert bound_from_counts(np.array([0, 100]), np.array([0, 100]), (100, 100)) == 0
