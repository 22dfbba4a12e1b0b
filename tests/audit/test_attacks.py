"""What the quick audit must show: bounds near the certificates, published forms refuted, attacks with teeth."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.audited import audited

from polyeps.audit.attacks import all_attacks
from polyeps.audit.clipping_attacks import contributions, search
from polyeps.audit.deployment_attacks import grid_of
from polyeps.audit.lower_bounds import one_shot_estimate
from polyeps.core import Records
from polyeps.models import MODELS, lstm


@pytest.mark.parametrize(
    "name",
    [
        "Gaussian: one full-batch step of DP-SGD",
        "subsampled Gaussian: DP-SGD",
        "one gradient a round, 6 rounds",
        "PS: law of the choice",
        "Duchi: law of the value",
        "grid-PM: law of the value",
        "report: PS, then grid-PM",
        "duchi: values as drawn",
        "grid-pm: values as drawn",
        "fedsel: PS, grid-PM",
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_bounds_reach_four_fifths_of_what_is_certified(name: str, seed: int) -> None:
    found = audited(name, seed=seed)
    assert found.verdict == "holds"
    assert 0.8 * found.evidence.certified <= found.evidence.audited <= found.evidence.certified * (1 + 1e-9)


@pytest.mark.parametrize(
    "name", ["DP-SGD by person: patients of 40 records", "DP-SGD by person, deployed: patients of 40 records"]
)
def test_canary_patients_stay_below_their_certificate_and_near_it(name: str) -> None:
    # Deployed noise has no seed, and its trials are few: the bound varies from run to run.
    effort, share = (1.0, 0.25) if "deployed" in name else (0.5, 0.5)
    found = audited(name, effort)
    assert found.verdict == "holds"
    assert share * found.evidence.certified <= found.evidence.audited


def test_patients_who_are_clipped_record_by_record_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that clips a patient's records one by one, and adds them up, is refuted."""
    from polyeps.audit import dp_sgd_attacks

    monkeypatch.setattr(dp_sgd_attacks, "of_units", lambda model, _: model)
    single = dp_sgd_attacks._canaries

    def apart(present: bool, setting: dp_sgd_attacks.Setting) -> Records:
        return single(present, replace(setting, by_person=False))

    monkeypatch.setattr(dp_sgd_attacks, "_canaries", apart)
    found = audited("DP-SGD by person: patients of 40 records", 0.1)
    assert found.verdict == "refuted"


CHEAP = [attack.name for attack in all_attacks() if attack.form == "published" and "account" not in attack.name]


@pytest.mark.parametrize("name", CHEAP)
def test_published_forms_are_refuted(name: str) -> None:
    found = audited(name, 0.5)
    assert found.verdict == "refuted"
    assert found.evidence.audited <= found.evidence.certified * (1 + 1e-9)


def test_every_unsound_form_of_the_papers_has_a_row() -> None:
    names = [attack.name for attack in all_attacks() if attack.form == "published"]
    for label in ("S1", "S2", "S3", "S5", "S6", "P2", "P4", "H1", "H2", "C2", "C3", "C4", "C5"):
        assert any(name.startswith(f"{label} ") or f": {label} " in name for name in names), label


def test_every_built_in_model_is_searched() -> None:
    names = [attack.name for attack in all_attacks() if attack.kind == "hostile weights"]
    assert all(any(f"clipping: {model}," in name for name in names) for model in MODELS)


def test_contributions_are_measured_in_clips() -> None:
    model = MODELS["binary_logistic"](features=2)
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 0.0]])
    found = contributions(model, torch.zeros(3, 2), rows, torch.ones(3), 1.0)
    assert found.tolist() == pytest.approx([1.0, 0.25, 0.0], abs=1e-4)


def test_the_search_finds_norms_by_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings whose norm is taken from float32 inner products of positions, as in version 0.1."""
    from polyeps.engine.lookups import LookupGradients

    monkeypatch.setattr(LookupGradients, "squared_norms", _by_inner_products(LookupGradients.squared_norms))
    small = lstm(vocabulary=20, embedding=4, hidden=4, length=3)
    assert search(small, 1.0, 3, torch.Generator().manual_seed(0)) > 1.01


def _by_inner_products(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The right squares, with the error that adding up inner products in float32 makes."""

    def squared_norms(self: object) -> torch.Tensor:
        gradients = self.gradients.flatten(1, -2).float()  # type: ignore[attr-defined]
        whole: torch.Tensor = gradients.square().sum((1, 2))
        exact: torch.Tensor = right(self)
        return (exact.float() + whole) - whole

    return squared_norms


@pytest.mark.parametrize(
    ("values", "bits"), [([1.0, -3.0], 0), ([0.5, 4.0], 1), ([4.0, 8.0], -2), ([1 / 3], None), ([2.0**-20], 20)]
)
def test_the_grid_of_replies(values: list[float], bits: int | None) -> None:
    assert grid_of(torch.tensor(values, dtype=torch.float64)) == bits


def test_the_one_shot_estimate_is_that_of_two_gaussians() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = ((torch.randn(200_000, generator=generator) + shift).numpy() for shift in (1.0, 0.0))
    assert one_shot_estimate(one, other, 1e-5) == pytest.approx(4.377, abs=0.1)
