import math
from functools import partial

import pytest

from polyeps.accounting import Accountant
from polyeps.accounting.calibration import calibrate
from polyeps.accounting.certificate import Certificate, SampledBy
from polyeps.cli.quick import Quick, quick_cmp_fed, quick_dp_sgd, quick_fedhdp, quick_fedsel
from polyeps.core import Budget
from polyeps.errors import InputError

published_setting = partial(quick_cmp_fed, clients=6000, cohort=100, rounds=180)


def certify(method: Quick, sigma: float, delta: float, accountant: Accountant = "pld") -> Certificate:
    return method.certificate(sigma, delta, accountant)


@pytest.mark.parametrize(
    ("sampler", "accountant", "sigma"),
    [
        ("poisson", "pld", 1.5134),
        ("poisson", "rdp", 1.6760),
        ("fixed", "pld", 3.2401),
        ("fixed", "rdp", 5.0825),
    ],
)
def test_cmp_fed_scales_in_both_directions(sampler: SampledBy, accountant: Accountant, sigma: float) -> None:
    method = published_setting(sampler=sampler)
    assert certify(method, sigma, 1e-4, accountant).certified == pytest.approx(1.0, rel=5e-4)
    answer = calibrate(
        [Budget(1.0, 1e-4)],
        method.price,
        method.uses,
        adjacency=method.build(0.0).adjacency,
        accountant=accountant,
        tolerance=1e-4,
    )
    assert method.sigma(answer.noise_multiplier[0]) == pytest.approx(sigma, rel=3e-4)


@pytest.mark.parametrize(
    ("sigma", "poisson", "fixed"), [(3.6871, 0.253, 0.789), (1.1850, 1.829, 15.03), (1.3921, 1.207, 9.38)]
)
def test_cmp_fed_published_noise_at_its_true_cost(sigma: float, poisson: float, fixed: float) -> None:
    assert certify(published_setting(), sigma, 1e-4).certified == pytest.approx(poisson, rel=1e-3)
    assert certify(published_setting(sampler="fixed"), sigma, 1e-4).certified == pytest.approx(fixed, rel=1e-3)


def test_cmp_fed_theorem_1_is_reported_as_a_claim() -> None:
    assert certify(published_setting(), 3.6871, 1e-4).claimed == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("survivors", "expected"), [(95, 1.057), (90, 1.123), (80, 1.291), (70, 1.529)])
def test_dropouts_cost_what_they_cost(survivors: int, expected: float) -> None:
    method = published_setting(survivors=survivors)
    assert certify(method, 1.5134, 1e-4).certified == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("claim", "sigma", "poisson", "fixed"),
    [
        (0.1, 133.33, 0.011, 0.026),
        (1.0, 13.333, 0.143, 0.323),
        (3.0, 4.4444, 0.478, 1.254),
        (10.0, 1.3333, 2.120, 11.78),
    ],
)
def test_the_noise_of_pfas_reference_code_at_its_true_cost(
    claim: float, sigma: float, poisson: float, fixed: float
) -> None:
    one = certify(quick_dp_sgd(records=1200, batch=8, steps=8000), sigma, 1e-5)
    other = certify(quick_dp_sgd(records=1200, batch=8, steps=8000, sampler="fixed"), sigma, 1e-5)
    assert one.claimed == other.claimed == pytest.approx(claim, rel=1e-3)
    assert one.certified == pytest.approx(poisson, abs=1e-3)
    assert 0.92 * fixed < other.certified < 1.002 * fixed  # the table was made on a coarser grid
    assert (one.adjacency, other.adjacency) == ("zero-out", "replace-one")


@pytest.mark.parametrize(("clip_bit", "expected"), [(1.0, 3.649), (2.0, 3.058), (5.0, 2.900)])
def test_fedhdp_clip_bits_are_charged(clip_bit: float, expected: float) -> None:
    certificate = certify(quick_fedhdp(rate=0.05, rounds=100, clip_bit_sigma=clip_bit), 1.0, 1e-4)
    assert certificate.certified == pytest.approx(expected, abs=1e-3)
    free = certify(quick_fedhdp(rate=0.05, rounds=100), 1.0, 1e-4)
    assert free.certified == pytest.approx(2.8696, abs=1e-3)
    assert certificate.claimed == pytest.approx(free.claimed, rel=1e-12)
    assert free.claimed == pytest.approx(3.3870, abs=1e-3)


def test_fedhdp_split_restores_the_nominal_cost() -> None:
    split = certify(quick_fedhdp(rate=0.05, rounds=100, clip_bit_sigma=5.0), 1.0, 1e-4).details[
        "sigma_to_cost_as_without_bit"
    ]
    assert split == pytest.approx(1.0050378, abs=1e-7)
    assert certify(quick_fedhdp(rate=0.05, rounds=100, clip_bit_sigma=5.0), split, 1e-4).certified == pytest.approx(
        2.8696, abs=1e-3
    )


def test_fedsel_forms() -> None:
    options = {"dimension": 10, "top": 1, "value": "pm", "share": 0.5}
    sound = certify(quick_fedsel(select="pe", **options), 0.5, 0.0)  # type: ignore[arg-type]
    published = certify(quick_fedsel(select="pe", form="published", **options), 0.5, 0.0)  # type: ignore[arg-type]
    assert sound.claimed == published.claimed == 2.0
    assert sound.certified == pytest.approx(2.0, abs=1e-9)
    assert sound.certified <= 2.0
    assert published.certified == pytest.approx(2.173043, abs=1e-6)
    assert sound.details["probability_none"] > 0
    printed = certify(quick_fedsel(select="ps", form="published", **{**options, "dimension": 100, "top": 10}), 0.5, 0.0)  # type: ignore[arg-type]
    assert printed.certified == pytest.approx(2.0, abs=1e-9)  # the paper's algorithm 4 is exact


def test_fedsel_reports_compose() -> None:
    method = quick_fedsel(select="uniform", dimension=5, top=1, value="duchi", reports=100)
    assert certify(method, 10.0, 0.0).certified == pytest.approx(10.0)
    assert certify(method, 10.0, 1e-5).certified == pytest.approx(4.3068, abs=1e-4)


def test_fedsel_without_a_value_or_with_an_exact_one() -> None:
    index_only = quick_fedsel(select="exp", dimension=10, top=1, value="none")
    assert certify(index_only, 1.0, 0.0).certified == pytest.approx(1.0)
    exact = certify(quick_fedsel(select="exp", dimension=10, top=1, value="exact"), 1.0, 0.0)
    assert exact.certified == math.inf
    assert "Nothing is guaranteed" in exact.sentence


def test_fedsel_can_be_calibrated() -> None:
    method = quick_fedsel(select="pe", dimension=123, top=12, value="grid-pm", reports=4, share=0.1)
    answer = calibrate([Budget(2.0, 0.0)], method.price, method.uses, adjacency="replace-one", tolerance=1e-6)
    details = certify(method, float(answer.noise_multiplier[0]), 0.0).details
    assert details["epsilon_select"] == pytest.approx(0.05, rel=1e-4)
    assert details["epsilon_value"] == pytest.approx(0.45, rel=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: quick_dp_sgd(records=5, batch=8, steps=1),
        lambda: quick_dp_sgd(records=5, batch=0, steps=1),
        lambda: quick_fedhdp(rate=0.0, rounds=1),
        lambda: quick_fedhdp(rate=0.1, rounds=1, clip_bit_sigma=0.0),
        lambda: quick_cmp_fed(clients=10, cohort=11, rounds=1),
        lambda: quick_cmp_fed(clients=10, cohort=5, rounds=1, survivors=6),
        lambda: quick_fedsel(select="pe", dimension=5, top=6, value="pm"),
        lambda: quick_fedsel(select="pe", dimension=5, top=1, value="pm", share=2.0),
        lambda: certify(quick_dp_sgd(records=5, batch=1, steps=1), 0.0, 1e-5),
        lambda: certify(quick_dp_sgd(records=5, batch=1, steps=1), math.nan, 1e-5),
        lambda: certify(quick_dp_sgd(records=5, batch=1, steps=1), 1.0, 1.0),
    ],
)
def test_meaningless_methods_are_refused(make: object) -> None:
    with pytest.raises(InputError):
        make()  # type: ignore[operator]
