import pytest

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
    assert f"{certificate.certified:.4g}" in certificate.sentence
    assert certificate.sentence.endswith(".")


def test_sentences_tell_the_adjacencies_and_trusts_apart() -> None:
    sentences = [certify(method, 2.0, 1e-5).sentence for method in METHODS]
    assert "adding or removing any one record" in sentences[0]
    assert "replacing any one record" in sentences[1]
    assert "trusted with un-noised updates" in sentences[2]
    assert "sees only the sums" in sentences[3]
    assert "everything this client holds" in sentences[4]
