import dp_accounting as dp
import pytest

from polyeps.accounting import epsilon
from polyeps.accounting.events import (
    DiscreteGaussianSumDpEvent,
    FixedSize,
    Gaussian,
    Poisson,
    PureDpEvent,
    SkellamDpEvent,
    canonical_json,
    event_from_dict,
    event_to_dict,
)
from polyeps.accounting.histories import fold_gaussians, history_of, split_clip_bit
from polyeps.errors import InputError, UnknownEvent


def test_history_flattens_nested_compositions() -> None:
    step = Poisson(0.01, Gaussian(1.0))
    tree = dp.SelfComposedDpEvent(dp.ComposedDpEvent([step, dp.SelfComposedDpEvent(step, 3), dp.NoOpDpEvent()]), 5)
    assert history_of(tree, uses=2) == {step: 40}


def test_gaussians_on_one_sample_are_folded_before_amplification() -> None:
    both = Poisson(0.1, dp.ComposedDpEvent([Gaussian(3.0), dp.SelfComposedDpEvent(Gaussian(4.0), 2)]))
    ((step, uses),) = history_of(both).items()
    assert uses == 1
    assert step.event.noise_multiplier == pytest.approx((3.0**-2 + 2 * 4.0**-2) ** -0.5)
    # the two releases, sampled apart, would look cheaper than they are
    apart = dp.ComposedDpEvent([Poisson(0.1, Gaussian(3.0)), dp.SelfComposedDpEvent(Poisson(0.1, Gaussian(4.0)), 2)])
    assert epsilon(both, 1e-5) > epsilon(apart, 1e-5)


def test_trivial_samples_are_simplified() -> None:
    assert history_of(Poisson(1.0, Gaussian(2.0))) == {Gaussian(2.0): 1}
    assert history_of(Poisson(0.0, Gaussian(2.0))) == {}
    assert history_of(dp.SelfComposedDpEvent(Gaussian(2.0), 0)) == {}


def test_no_noise_is_no_privacy() -> None:
    for event in (Gaussian(0.0), Poisson(0.1, Gaussian(0.0)), FixedSize(10, 2, Gaussian(0.0))):
        adjacency = "replace-one" if isinstance(event, FixedSize) else "add-remove"
        assert epsilon(event, 1e-5, adjacency=adjacency) == float("inf")  # type: ignore[arg-type]
        assert epsilon(event, 1e-5, adjacency=adjacency, accountant="rdp") == float("inf")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "event",
    [
        dp.UnsupportedDpEvent(),
        dp.ZCDpEvent(0.1),
        dp.LaplaceDpEvent(1.0),
        Poisson(0.1, dp.ComposedDpEvent([Gaussian(1.0), PureDpEvent(1.0)])),
        dp.ComposedDpEvent([Gaussian(1.0), dp.UnsupportedDpEvent()]),
    ],
)
def test_what_is_not_known_is_refused(event: dp.DpEvent) -> None:
    for accountant in ("pld", "rdp"):
        with pytest.raises(UnknownEvent):
            epsilon(event, 1e-5, accountant=accountant)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_impossible_parameters_are_refused(bad: float) -> None:
    for event in (Gaussian(bad), PureDpEvent(bad), Poisson(0.1, Gaussian(bad)), Poisson(bad, Gaussian(1.0))):
        with pytest.raises(InputError):
            epsilon(event, 1e-5)


def test_fractional_repetition_is_refused() -> None:
    with pytest.raises(InputError, match="whole number"):
        history_of(dp.SelfComposedDpEvent(Gaussian(1.0), 1.5))


def test_randomized_response_becomes_a_pure_step_with_its_count() -> None:
    event = dp.SelfComposedDpEvent(dp.RandomizedResponseDpEvent(0.5378828427399902, 2), 10)  # 2/(1+e)
    ((step, uses),) = history_of(event).items()
    assert uses == 10
    assert step.epsilon == pytest.approx(1.0)


def test_fold_and_split_are_inverse() -> None:
    assert split_clip_bit(1.0, 5.0) == pytest.approx(1.0050378, abs=1e-7)
    assert split_clip_bit(1.0, 1.0) == pytest.approx(1.154701, abs=1e-6)
    assert fold_gaussians(split_clip_bit(1.7, 3.0), 6.0) == pytest.approx(1.7)
    with pytest.raises(InputError, match=r"larger than 0\.5"):
        split_clip_bit(1.0, 0.5)


@pytest.mark.parametrize(
    "event",
    [
        Gaussian(1.5),
        Poisson(0.25, Gaussian(1.5)),
        FixedSize(100, 7, Gaussian(2.0)),
        PureDpEvent(0.3),
        SkellamDpEvent(4.0, 2.0, 16.0),
        dp.ComposedDpEvent([Gaussian(1.0), dp.SelfComposedDpEvent(PureDpEvent(0.1), 3)]),
    ],
)
def test_descriptions_can_be_understood(event: dp.DpEvent) -> None:
    assert history_of(event_from_dict(event_to_dict(event))) == history_of(event)
    assert canonical_json(event_from_dict(event_to_dict(event))) == canonical_json(event)


def test_unknown_descriptions_are_refused() -> None:
    with pytest.raises(UnknownEvent):
        event_from_dict({"kind": "magic"})
    with pytest.raises(InputError):
        event_from_dict({"kind": "gaussian", "sigma": 1.0})
    with pytest.raises(UnknownEvent):
        event_to_dict(dp.ZCDpEvent(0.1))


def test_sums_as_version_0_1_wrote_them_are_read() -> None:
    written = {"kind": "discrete-gaussian-sum", "l2_sensitivity": 1.0, "deviation": 4.0, "agents": 7, "dimension": 3}
    assert event_from_dict(written) == DiscreteGaussianSumDpEvent(1.0, 4.0, 7, 3)
    with pytest.raises(InputError, match="malformed"):
        event_from_dict(written | {"clients": 1})
