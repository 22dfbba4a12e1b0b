import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyeps.accounting.certificate import Certificate, one_in, rounded_up
from polyeps.cli.quick import Quick, quick_cmp_fed, quick_dp_sgd, quick_fedhdp, quick_fedsel

METHODS = [
    quick_dp_sgd(records=1200, batch=8, steps=100),
    quick_dp_sgd(records=1200, batch=8, steps=100, sampler="fixed"),
    quick_fedhdp(rate=0.05, rounds=10),
    quick_cmp_fed(clients=600, cohort=10, rounds=18),
    quick_fedsel(select="ps", dimension=10, top=2, value="duchi", share=0.5),
]


def certify(method: Quick, sigma: float, delta: float) -> Certificate:
    return method.certificate(sigma, delta)


@pytest.mark.parametrize("method", METHODS)
def test_certificates_name_everything_that_matters(method: Quick) -> None:
    certificate = certify(method, 2.0, 1e-5)
    shown = certificate.as_dict()
    keys = "method form claimed certified delta adjacency unit sampler trust accountant details sentence"
    for key in keys.split():
        assert shown[key] not in (None, "")
    assert f"(ε = {rounded_up(certificate.certified)})" in certificate.sentence
    assert certificate.sentence.endswith(".")


def test_sentences_tell_the_adjacencies_and_trusts_apart() -> None:
    sentences = [certify(method, 2.0, 1e-5).sentence for method in METHODS]
    assert "replacing any one record of this client by an empty one" in sentences[0]
    assert "replacing any one record" in sentences[1]
    assert "trusted with updates without noise" in sentences[2]
    assert "sees only the sums" in sentences[3]
    assert "everything this client holds" in sentences[4]


def test_sentences_speak_in_plain_numbers_and_never_understate() -> None:
    some = certify(METHODS[0], 2.0, 1e-5)
    assert "at most 1 in 100 000." in some.sentence
    assert "a factor of at most 22 030 (ε = 10)" in replace(some, certified=10.0).sentence
    assert "a factor of at most e^20.01 (ε = 20.01)" in replace(some, certified=20.0001).sentence
    assert "without exception" in replace(some, delta=0.0).sentence
    assert "Nothing is guaranteed" in replace(some, certified=math.inf).sentence


@given(st.floats(1e-12, 1e12))
def test_a_bound_is_rounded_up_by_less_than_a_thousandth(value: float) -> None:
    shown = float(rounded_up(value).replace(" ", ""))
    assert value <= shown <= value * 1.001001
    assert "e" not in rounded_up(value).lower()


@given(st.floats(1e-15, 0.999))
def test_a_probability_is_never_told_too_small(delta: float) -> None:
    times, of = one_in(delta).replace("10^", "1e").split(" in ")
    shown = int(times) / float(of.replace(" ", ""))
    assert delta * (1 - 1e-12) <= shown <= 1.1001 * delta


@pytest.mark.parametrize(
    ("method", "sigma", "delta", "hidden", "known"),
    [
        (quick_cmp_fed(clients=6000, cohort=100, rounds=180), 1.5134, 1e-4, 1.0, 10.02),
        (quick_fedhdp(rate=0.05, rounds=100), 1.0, 1e-4, 2.87, None),
    ],
)
def test_what_holds_against_those_who_know_the_draws_stands_in_the_sentence(
    method: Quick, sigma: float, delta: float, hidden: float, known: float | None
) -> None:
    shown = certify(method, sigma, delta)
    assert shown.certified == pytest.approx(hidden, rel=1e-3)
    assert shown.certified_if_draws_known is not None
    assert shown.certified_if_draws_known > 3 * shown.certified
    if known is not None:
        assert shown.certified_if_draws_known == pytest.approx(known, abs=0.01)
    assert f"ε = {rounded_up(shown.certified_if_draws_known)}." in shown.sentence
    assert ("the server that draws among them" in shown.sentence) == (method.name != "fedhdp")
    assert shown.as_dict()["certified_if_draws_known"] == shown.certified_if_draws_known


def test_sentences_say_for_which_arithmetic_they_hold() -> None:
    local, fixed, by_server, summed, duchi = (certify(method, 2.0, 1e-5) for method in METHODS)
    floats = certify(quick_fedsel(select="ps", dimension=10, top=2, value="pm", share=0.5), 2.0, 0)
    assert [one.arithmetic for one in (local, fixed, by_server, summed, duchi, floats)] == [
        "exact-when-deployed",
        "ideal",
        "exact",
        "ideal",
        "exact",
        "ideal",
    ]
    assert "ideal arithmetic" in floats.sentence
    assert "without exception" in floats.sentence
    assert "very numbers that are released" in duchi.sentence
    assert "that a deployed client releases" in local.sentence
