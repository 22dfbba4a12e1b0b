"""The paper's equations: those that hold, and that those which do not are refuted, exactly and by simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import simulated_twins
from hypothesis import given
from hypothesis import strategies as st
from polyeps_reproductions.theory import points
from polyeps_reproductions.theory.points import NON_PRIVATE, PRIVATE
from polyeps_reproductions.theory.printed import OptOut

from polyeps.errors import InputError

# N, N_p, α², τ², γ²; λ_p* as printed and as it is
PENALTIES = [
    (OptOut(10, 9, 1, 0.5, 0.2), 1.513514, 1.478261),
    (OptOut(20, 20, 0.7, 0.3, 0.1), 1.750, 1.727273),
    (OptOut(50, 40, 1, 0, 0.02), 72.5, 71.25),
    (OptOut(100, 95, 1, 0.5, 0.05), 1.848404, 1.847185),
]
SMALL = OptOut(20, 15, 1, 0.5, 0.1)
LARGE = OptOut(100, 95, 1, 0.5, 0.02)


def homogeneous_data(setting: OptOut, exact: bool = True) -> float:
    """λ_p* as τ² → 0: (N' + Γ²(N − N_p))/Γ², with N' = N − 1; the paper prints N' = N."""
    gamma = setting.privacy
    return (_counted(setting, exact) + gamma * (setting.clients - setting.private)) / gamma


def homogeneous_privacy(setting: OptOut, exact: bool = True) -> float:
    """λ_p* as N_p → N: N'/(Υ²N' + Γ²)."""
    counted = _counted(setting, exact)
    return counted / (setting.heterogeneity * counted + setting.privacy)


def homogeneous(setting: OptOut, exact: bool = True) -> float:
    """λ_p* as τ² → 0 and N_p → N: N'/Γ²."""
    return _counted(setting, exact) / setting.privacy


def gap_limits(setting: OptOut) -> tuple[float, float]:
    """The stated limits of (13) and (14) with N: (1 − ρ)²γ² and (1 − ρ)γ².

    True while γ² stays as it is. But γ² = (z·S/N_p)², so at one privacy it falls with N, and both gaps go to 0.
    """
    share = 1 - setting.opted_out
    return share**2 * setting.gamma2, share * setting.gamma2


def _counted(setting: OptOut, exact: bool) -> int:
    return setting.clients - 1 if exact else setting.clients


@st.composite
def settings_of_the_paper(draw: st.DrawFn) -> OptOut:
    clients = draw(st.integers(2, 200))
    variance = st.floats(0.01, 10)
    return OptOut(clients, draw(st.integers(1, clients)), draw(variance), draw(variance), draw(variance))


def test_values_by_hand() -> None:
    assert SMALL.best_variance == pytest.approx(0.12)
    assert SMALL.fedavg_variance == pytest.approx(0.13125)
    assert SMALL.fedavg_gap == pytest.approx(0.01125)
    assert LARGE.best_ratio == pytest.approx(0.4412, abs=5e-5)
    assert LARGE.best_variance == pytest.approx(0.031975, abs=5e-7)
    assert LARGE.fedavg_variance == pytest.approx(0.03305)
    assert LARGE.dp_fedavg_variance_printed == pytest.approx(0.0340)
    assert LARGE.non_private_penalty == pytest.approx(2.0)
    assert LARGE.private_penalty_printed == pytest.approx(1.9310, abs=5e-5)


@pytest.mark.parametrize(("setting", "paper", "exact"), PENALTIES)
def test_penalties_by_hand(setting: OptOut, paper: float, exact: float) -> None:
    assert setting.private_penalty_printed == pytest.approx(paper, abs=5e-7)
    assert setting.private_penalty == pytest.approx(exact, abs=5e-7)


@given(settings_of_the_paper())
def test_what_holds_is_what_the_general_forms_say(setting: OptOut) -> None:
    federation = setting.federation
    even = points.weights_of_ratio(federation, 1.0)
    assert setting.best_ratio == pytest.approx(points.best_ratio(federation))
    assert setting.best_variance == pytest.approx(points.server_variance(federation))
    assert setting.fedavg_variance == pytest.approx(points.server_variance(federation, even))
    assert setting.fedavg_gap == pytest.approx(setting.fedavg_variance - setting.best_variance, abs=1e-9)
    assert setting.private_penalty == pytest.approx(points.best_penalty(federation, PRIVATE))
    if setting.private < setting.clients:
        assert setting.non_private_penalty == pytest.approx(points.best_penalty(federation, NON_PRIVATE))
        assert setting.non_private_penalty >= setting.private_penalty


@given(settings_of_the_paper())
def test_the_corrected_gap_is_that_of_plain_averaging(setting: OptOut) -> None:
    assert setting.dp_fedavg_variance == pytest.approx(setting.fedavg_variance)
    assert setting.dp_fedavg_gap == pytest.approx(setting.fedavg_gap, abs=1e-9)
    noise = [
        variance - setting.client_variance / setting.clients
        for variance in (setting.dp_fedavg_variance_printed, setting.dp_fedavg_variance)
    ]
    assert noise[0] == pytest.approx(noise[1] * setting.clients / setting.private)


@pytest.mark.parametrize("setting", [SMALL, LARGE, OptOut(10, 5, 1, 0.5, 0.2)], ids=str)
def test_the_gap_to_plain_averaging_is_what_simulations_find(setting: OptOut) -> None:
    federation = setting.federation
    even, best = points.weights_of_ratio(federation, 1.0), points.best_weights(federation)
    found = simulated_twins.server_gap(federation, even, best, 60_000, np.random.default_rng(13))
    assert found.off(setting.fedavg_gap) < 4
    assert found.value > 5 * found.error


@pytest.mark.parametrize("setting", [SMALL, LARGE, OptOut(10, 5, 1, 0.5, 0.2)], ids=str)
def test_simulation_refutes_the_printed_gap_and_not_the_corrected_one(setting: OptOut) -> None:
    found = simulated_twins.dp_fedavg_variance(setting, 100_000, np.random.default_rng(14))
    assert found.off(setting.dp_fedavg_variance) < 4
    assert found.off(setting.dp_fedavg_variance_printed) > 5


@given(settings_of_the_paper())
def test_the_printed_penalty_gives_the_others_their_bayes_coefficient(setting: OptOut) -> None:
    """That is where (16) comes from: right for others, but the own noise comes along."""
    federation = setting.federation
    own = points.best_weights(federation)[PRIVATE]
    penalty, bayes = setting.private_penalty_printed, points.bayes_penalty(federation, PRIVATE)
    assert penalty * (1 - own) / (1 + penalty) == pytest.approx(bayes / (1 + bayes))
    noise = (penalty * own / (1 + penalty)) ** 2 * setting.message_noise
    error = points.personal(federation, PRIVATE).error(penalty)
    assert error == pytest.approx(points.bayes_error(federation, PRIVATE) + noise)


@given(settings_of_the_paper())
def test_the_printed_penalty_is_too_large(setting: OptOut) -> None:
    moments = points.personal(setting.federation, PRIVATE)
    assert setting.private_penalty_printed > setting.private_penalty
    assert moments.error(setting.private_penalty_printed) >= moments.error(setting.private_penalty) - 1e-12
    # Both err more than (8) does; no λ reaches it.
    assert moments.error(setting.private_penalty) > points.bayes_error(setting.federation, PRIVATE)


def test_errors_by_hand() -> None:
    setting = PENALTIES[0][0]
    moments = points.personal(setting.federation, PRIVATE)
    assert moments.error(setting.private_penalty) == pytest.approx(0.45677, abs=5e-6)
    assert points.bayes_error(setting.federation, PRIVATE) == pytest.approx(0.45161, abs=5e-6)
    assert moments.error(setting.private_penalty_printed) == pytest.approx(0.45682, abs=5e-6)


@pytest.mark.parametrize("setting", [PENALTIES[0][0], PENALTIES[1][0], OptOut(3, 3, 1, 0.1, 1)], ids=str)
def test_simulation_refutes_the_printed_penalty_and_not_the_exact_one(setting: OptOut) -> None:
    federation, generator = setting.federation, np.random.default_rng(16)
    worse, better = setting.private_penalty_printed, setting.private_penalty
    excess = simulated_twins.excess_error(federation, PRIVATE, worse, better, 400_000, generator)
    exact = points.personal(federation, PRIVATE).error([worse, better])
    assert excess.value > 5 * excess.error
    assert excess.off(exact[0] - exact[1]) < 4
    fitted = simulated_twins.best_penalty(federation, PRIVATE, 400_000, generator)
    assert fitted.off(better) < 4
    assert fitted.off(worse) > 5


def test_corner_cases_printed_and_exact() -> None:
    setting = OptOut(30, 20, 0.8, 0.4, 0.1)
    alike = replace(setting, tau2=0.0)
    assert alike.non_private_penalty == math.inf
    assert homogeneous_data(setting) == pytest.approx(alike.private_penalty)
    assert homogeneous_data(setting, exact=False) == pytest.approx(alike.private_penalty_printed)
    private = replace(setting, private=30)
    assert homogeneous_privacy(private) == pytest.approx(private.private_penalty)
    assert homogeneous_privacy(private, exact=False) == pytest.approx(private.private_penalty_printed)
    both = replace(private, tau2=0.0)
    assert homogeneous(both) == pytest.approx(both.private_penalty)
    assert homogeneous(both, exact=False) == pytest.approx(both.private_penalty_printed)
    quiet = replace(both, gamma2=0.0)
    assert quiet.private_penalty == quiet.private_penalty_printed == math.inf


def test_gaps_approach_the_stated_limits_only_if_privacy_is_given_up() -> None:
    few, many = (OptOut(clients, clients * 9 // 10, 1, 0.5, 0.02) for clients in (10_000, 1_000_000))
    limits = gap_limits(many)
    assert limits == pytest.approx((0.9**2 * 0.02, 0.9 * 0.02))
    assert (many.fedavg_gap, many.dp_fedavg_gap_printed) == pytest.approx(limits, rel=1e-2)
    assert abs(many.fedavg_gap - limits[0]) < abs(few.fedavg_gap - limits[0])
    # The same z: 100 times as many clients, and the gap is a millionth, the whole variance a hundredth.
    few, many = (OptOut.at_noise(clients, clients * 9 // 10, 1, 0.5, 1e2) for clients in (1_000_000, 100_000_000))
    assert many.fedavg_gap == pytest.approx(few.fedavg_gap / 1e6, rel=0.01)
    assert many.best_variance == pytest.approx(few.best_variance / 1e2, rel=0.01)


def test_at_one_privacy_the_gap_does_not_vanish_as_all_opt_out() -> None:
    """The fewer are private, the noisier their mean: the gap grows until no client is."""
    gaps = [OptOut.at_noise(100, private, 1, 0.5, 3.0).fedavg_gap for private in (100, 50, 10, 1)]
    assert gaps == sorted(gaps)
    assert gaps[0] == 0
    assert gaps[-1] > 5 * gaps[1]
    with pytest.raises(InputError, match="private is 0"):
        OptOut.at_noise(100, 0, 1, 0.5, 3.0)
    fixed = [OptOut(100, private, 1, 0.5, 0.02).fedavg_gap for private in (90, 10, 1, 0)]
    assert fixed == sorted(fixed, reverse=True)
    assert fixed[-1] == 0


@given(settings_of_the_paper().filter(lambda setting: setting.private > 1))
def test_at_one_privacy_opting_out_gains_next_to_nothing(setting: OptOut) -> None:
    """Under plain averaging exactly nothing: the server's noise is z·S/N, whoever is private. FedHDP: 3 % at most."""
    leaves = replace(
        setting, private=setting.private - 1, gamma2=setting.gamma2 * (setting.private / (setting.private - 1)) ** 2
    )
    before, after = (
        points.personal(one.federation, group, points.weights_of_ratio(one.federation, 1.0))
        for one, group in ((setting, PRIVATE), (leaves, NON_PRIVATE))
    )
    assert after.error(after.best_penalty) == pytest.approx(before.error(before.best_penalty))
    before, after = (
        points.personal(one.federation, group) for one, group in ((setting, PRIVATE), (leaves, NON_PRIVATE))
    )
    gain = 1 - after.error(after.best_penalty) / before.error(before.best_penalty)
    assert -1e-9 < gain < 0.03


@given(settings_of_the_paper().filter(lambda setting: setting.private < setting.clients))
def test_in_one_federation_who_opted_out_errs_more(setting: OptOut) -> None:
    """The best messages are their own, so others tell them less."""
    out, private = (points.personal(setting.federation, group) for group in (NON_PRIVATE, PRIVATE))
    assert out.error(out.best_penalty) > private.error(private.best_penalty) - 1e-12
