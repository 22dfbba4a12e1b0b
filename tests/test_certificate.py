import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyeps.certificate import one_in, rounded_up
from polyeps.methods import certify, cmp_fed, dp_sgd, fedhdp, fedsel

METHODS = [
    dp_sgd(records=1200, batch=8, steps=100),
    dp_sgd(records=1200, batch=8, steps=100, sampler="fixed"),
    fedhdp(rate=0.05, rounds=10),
    cmp_fed(clients=600, cohort=10, rounds=18),
    fedsel(select="ps", dimension=10, top=2, value="duchi", epsilon_select=0.5, epsilon_value=0.5),
]


@pytest.mark.parametrize("method", METHODS)
def test_certificates_name_everything_that_matters(method: object) -> None:
    certificate = certify(method, 2.0, 1e-5)  # type: ignore[arg-type]
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
    assert "trusted with un-noised updates" in sentences[2]
    assert "sees only the sums" in sentences[3]
    assert "everything this client holds" in sentences[4]


def test_sentences_speak_in_plain_numbers_and_never_understate() -> None:
    some = certify(METHODS[0], 2.0, 1e-5)
    assert "at most 1 in 100 000." in some.sentence
    assert "a factor of at most 22 030 (ε = 10)" in replace(some, certified=10.0).sentence
    assert "a factor of at most e^20.01 (ε = 20.01)" in replace(some, certified=20.0001).sentence
    assert "without exception" in replace(some, delta=0.0).sentence
    assert "Nothing is promised" in replace(some, certified=math.inf).sentence


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
