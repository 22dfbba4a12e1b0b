"""`training.kind = "gradient"`: what clients send and pay, which settings it refuses; deployed, and for persons."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clinics import at_clinics, clinical
from support.deployed import DeployedGrid
from support.federations import EPSILONS, experiment, finish, job_of
from support.oracles import gaussian_delta
from torch import Tensor
from torch.nn.functional import cross_entropy

from polyeps.client import answer
from polyeps.core import Task
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.job import Job
from polyeps.experiment.plan import certificates
from polyeps.experiment.run import run
from polyeps.participation import Participation
from polyeps.server import serve
from polyeps.training import whole_gradient
from polyeps.transport.flower import OnFlower

CLIP = 0.7
RECIPE: dict[str, Any] = {"training": {"kind": "gradient", "clip": CLIP}}
AVERAGING = ["fedavg", "weiavg", "public-only", "pfa", "pfa-plus", "pdp-fl", "pdp-fl-plus", "alone", "fedavg (none)"]


def clipped_sum(model: Tensor, examples: list[tuple[Tensor, Tensor]], clip: float) -> Tensor:
    """The sum of the clipped gradients of examples, each with all its records, by autograd, one after the other."""
    total = torch.zeros_like(model)
    for features, labels in examples:
        weights = model.clone().requires_grad_()
        layer = weights[: features.shape[1] * labels_of(model, features)].view(-1, features.shape[1])
        cross_entropy(features @ layer.T + weights[layer.numel() :], labels).backward()  # type: ignore[no-untyped-call]
        assert weights.grad is not None
        total += weights.grad * min(1.0, clip / float(weights.grad.norm()))
    return total


def labels_of(model: Tensor, features: Tensor) -> int:
    return len(model) // (features.shape[1] + 1)


def asked(job: Job, path: Path, model: Tensor, *, noise: bool) -> Tensor:
    """The updates of all clients, with the noise of round 0 taken off them if it is not wanted."""
    ledger = finish(job, path, rounds=0).ledger
    cohort = job.clients(ledger)
    updates = answer(cohort, job.algorithm, Task("train", cohort.ids, {"model": model}, "test")).payload["update"]
    if noise or ledger is None:
        return updates
    normals = torch.zeros(len(cohort.ids), 1, len(model))
    streams = cohort.streams(cohort.ids, 0)
    assert isinstance(streams, SeededStreams)
    streams.normals(normals, range(len(cohort.ids)))
    scale = torch.from_numpy(job.noise_multiplier * CLIP / job.population.sizes).float()
    return updates + normals[:, 0] * scale[:, None]


@pytest.mark.parametrize("clip", [CLIP, None])
def test_a_client_sends_minus_its_mean_clipped_gradient_and_its_own_noise(clip: float | None, tmp_path: Path) -> None:
    job = job_of(experiment({"name": "fedavg", **RECIPE, **({} if clip else {"budgets": "none"})}))
    records = job.population.records
    model = torch.randn(job.population.model.size, generator=torch.Generator().manual_seed(3)) / 3
    updates = asked(job, tmp_path / "a.db", model, noise=False)
    for place, (first, end) in enumerate(records.spans.tolist()):
        rows = records.features[first:end].flatten(1)
        examples = [(row[None], label[None]) for row, label in zip(rows, records.labels[first:end], strict=True)]
        expected = -clipped_sum(model, examples, clip or math.inf) / (end - first)
        torch.testing.assert_close(updates[place], expected, rtol=1e-4, atol=2e-5)


def test_patients_are_clipped_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_clinics(monkeypatch)
    job = job_of(clinical({"name": "fedavg", **RECIPE}))
    assert job.algorithm.person == "patient"
    records = job.population.records
    model = torch.randn(job.population.model.size, generator=torch.Generator().manual_seed(3))
    updates = asked(job, tmp_path / "a.db", model, noise=False)
    assert records.units is not None
    for place, (first, end) in enumerate(records.spans.tolist()):
        held = [slice(*pair) for pair in records.units[first:end].tolist()]
        expected = -clipped_sum(model, [(records.features[one], records.labels[one]) for one in held], CLIP)
        torch.testing.assert_close(updates[place], expected / (end - first), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", AVERAGING)
def test_every_averaging_algorithm_pays_for_one_gaussian_a_round(name: str, tmp_path: Path) -> None:
    """The oracle: T Gaussian releases are one with noise σ/√T, whose δ has a closed form."""
    job = job_of(experiment({"name": name, **RECIPE}, server={"learning_rate": 0.5, "momentum": 0.5}))
    done = finish(job, tmp_path / "a.db")
    assert bool(torch.isfinite(done.learned).all())
    assert float(done.learned.abs().max()) > 0
    for client, spent in done.spent().items():
        place = int(client)
        if spent:
            assert 0.99 * EPSILONS[place] <= spent <= EPSILONS[place]
            assert gaussian_delta(math.sqrt(3) / job.noise_multiplier[place], spent) == pytest.approx(1e-3, rel=0.02)
            assert certificates(job)[client].certified == pytest.approx(spent, rel=1e-9)
    assert bool(done.spent()) == (name != "fedavg (none)")


def test_a_deployed_federation(tmp_path: Path) -> None:
    server = {"learning_rate": 0.5, "momentum": 0.5, "averaging": 0.5}
    job = job_of(experiment({"name": "weiavg", **RECIPE}, server=server))
    grid = DeployedGrid(job, tmp_path)
    full = Participation()
    deployed = serve(job.algorithm, OnFlower(grid), job.state, rounds=3, participation=full, run="test", seed=1)
    assert float(deployed.model.abs().max()) > 0
    assert set(deployed.kept) == {"server_iterate", "server_velocity", "server_steps"}
    assert grid.ledger is not None
    spent = {client: grid.ledger.spent(client) for client in grid.ledger.clients}
    assert spent == finish(job, tmp_path / "a.db").spent()


def test_a_deployed_client_sends_what_a_simulated_one_does_but_for_the_noise() -> None:
    job = job_of(experiment({"name": "fedavg", **RECIPE}))
    training = whole_gradient(job.population.trained, clip=CLIP)
    records, model = job.population.records.select([2]), torch.randn(650) / 3
    simulated = training.run(model, records, SeededStreams(1, ["2"], 0), 0.0)
    deployed = training.run(model, records, SeededStreams(1, ["2"], 0, exact=True), 1e-4)
    torch.testing.assert_close(deployed, simulated, rtol=1e-3, atol=2e-3 * float(simulated.abs().max()))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"batch": 8}, r"batch has no effect with kind = \"gradient\".*leave it out"),
        ({"local_steps": 20}, "local_steps has no effect"),
        ({"learning_rate": 0.1}, r"learning_rate has no effect.*set server.learning_rate; leave it out"),
        ({"momentum": 0.0}, r"momentum has no effect.*set server.momentum"),
        ({"rate": 0.5}, r"rate hides how many records a client has.*leave out one"),
    ],
)
def test_settings_without_an_effect_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        config.experiment({"training": {"kind": "gradient", **settings}})
    inherited = config.experiment({"training": settings, "algorithm": {"name": "fedavg", **RECIPE}})
    if "rate" in settings:  # it would be hidden no more
        with pytest.raises(InputError, match=sentence):
            inherited.training_of(inherited.algorithm[0])
    else:
        assert inherited.training_of(inherited.algorithm[0]).kind == "gradient"
    own = config.experiment({"algorithm": {"name": "fedavg", "training": {"kind": "gradient", **settings}}})
    with pytest.raises(InputError, match="algorithm.training: " + sentence):
        own.training_of(own.algorithm[0])


def test_a_method_may_have_another_kind_than_the_others() -> None:
    wanted = config.experiment(
        {
            "training": {"kind": "gradient", "clip": 0.5},
            "algorithm": [{"name": "fedavg"}, {"name": "weiavg", "training": {"kind": "sgd", "batch": 16}}],
        }
    )
    assert [wanted.training_of(method).kind for method in wanted.algorithm] == ["gradient", "sgd"]
    assert wanted.training_of(wanted.algorithm[1]).batch == 16
    assert config.experiment(wanted.as_dict()) == wanted
    assert wanted.as_dict()["training"] == {"kind": "gradient", "clip": 0.5, "decay": 0.0}


@pytest.mark.parametrize("name", ["fedsel", "fedsel-exact", "fedhdp", "cmp-fed", "dp-randagg"])
def test_algorithms_with_releases_of_their_own_refuse_it(name: str) -> None:
    with pytest.raises(InputError, match=rf'"gradient" does not apply to {name}.*training = {{ kind = "sgd" }}'):
        job_of(experiment({"name": name, **RECIPE}))
    with pytest.raises(InputError, match="no published form"):
        job_of(experiment({"name": "fedavg", "form": "published", **RECIPE}))


def test_a_run_of_both_kinds_says_what_it_did(tmp_path: Path) -> None:
    methods = [{"name": "fedavg"}, {"name": "fedavg", "label": "whole", **RECIPE, "server": {"learning_rate": 2.0}}]
    outcome = run(experiment(methods, rounds=2), tmp_path / "run")
    assert set(outcome.spent) == {("fedavg", 1), ("whole", 1)}
    assert not torch.equal(outcome.models["fedavg", 1], outcome.models["whole", 1])
