import pytest

from polyeps.audit.value_support import leaked_share
from polyeps.mechanisms.values import ValueMechanism

PAIRS = [(0.3, 0.3000001), (0.0, 0.001), (0.1, 0.2)]


@pytest.mark.parametrize(("value", "other"), PAIRS)
@pytest.mark.parametrize("mechanism", ["pm", "hm"])
def test_floating_point_gives_values_away(mechanism: ValueMechanism, value: float, other: float) -> None:
    assert leaked_share(mechanism, 1.0, value, other) > 0.3
    assert leaked_share(mechanism, 4.0, value, other) > 0.05  # a single such answer is enough


@pytest.mark.parametrize(("value", "other"), PAIRS)
@pytest.mark.parametrize("mechanism", ["grid-pm", "duchi"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_whole_numbers_give_nothing_away(mechanism: ValueMechanism, value: float, other: float, epsilon: float) -> None:
    assert leaked_share(mechanism, epsilon, value, other) == 0


@pytest.mark.parametrize("mechanism", ["pm", "hm", "grid-pm", "duchi"])
@pytest.mark.parametrize("epsilon", [0.2, 1.0, 4.0, 12.0])
def test_a_value_can_always_give_its_own_answers(mechanism: ValueMechanism, epsilon: float) -> None:
    assert leaked_share(mechanism, epsilon, 0.3, 0.3) == 0
