"""FedSel: reports, residuals, epochs and prices; what holds for every algorithm is in tests/contract."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.federations import experiment, finish, job_of, promised
from support.grid_piecewise import GridPiecewise
from torch import Tensor

from polyeps.algorithms._averaging import Course
from polyeps.algorithms.fedsel import fedsel, known_variance, splitting
from polyeps.algorithms.fedsel_baselines import compressed, exact, flat
from polyeps.audit.lower_bounds import bound_from_counts
from polyeps.cli.quick import quick_fedsel
from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import Algorithm, Budget, Records, State, Task
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError, TaskRefused
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.mechanisms import selection, values
from polyeps.models import binary_logistic
from polyeps.participation import Participation
from polyeps.server import serve
from polyeps.training import Training, sgd
from polyeps.transport.memory import InMemory

FEDSEL = sys.modules["polyeps.algorithms.fedsel"]  # the package has a function of that name
SIZE = 6
COURSE = Course(learning_rate=0.5, clip=1.0, cohort=40, batches=1, epochs=1)


def gradients(decay: float = 0.0) -> Training:
    return sgd(binary_logistic(SIZE), rate=1.0, steps=1, learning_rate=1.0, decay=decay)


def records(clients: int, each: int = 1) -> Records:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(clients * each, SIZE, generator=generator)
    labels = (features.sum(1) > 0).long()
    return Records(features, labels, torch.arange(clients + 1) * each)


def cohort(algorithm: Algorithm, path: Path, *, clients: int = 40, epsilon: float = 2.0, epochs: int = 1) -> Clients:
    """Clients with one record and a budget each; without a price there is no ledger."""
    ids = tuple(map(str, range(clients)))
    private = algorithm.actions["report"].price is not None
    terms = {client: BudgetTerms(Budget(epsilon, 0.0), "client", "replace-one") for client in ids}
    return Clients(
        ids,
        records(clients),
        np.full(clients, epochs / epsilon * (1 + 2.0**-48)),
        lambda ids, round: SeededStreams(3, ids, round),
        True,
        Ledger.create(path, terms) if private else None,
        memory={name: torch.zeros(clients, *shape) for name, shape in algorithm.memory.items()},
    )


def task(algorithm: Algorithm, who: Clients, epoch: int, model: Tensor | None = None) -> Task:
    assert "report" in algorithm.actions
    payload = {"model": torch.zeros(SIZE) if model is None else model, "epoch": torch.tensor(epoch)}
    return Task("report", who.ids, payload, run="test", round=epoch)


def true_gradients(data: Records, model: Tensor) -> Tensor:
    """Written out: the logistic loss of each client's one record."""
    chance = 1 / (1 + torch.exp(-(data.features @ model)))
    return (chance - data.labels)[:, None] * data.features


def sent_as_it_is(seen: list[Any]) -> Callable[..., Any]:
    """Instead of a value mechanism: no noise, and what it was asked."""

    def perturb(_: str, given: Any, *__: Any) -> Any:
        seen.append(given)
        return given

    return perturb


def one_epoch(algorithm: Algorithm, who: Clients, epochs: int = 1) -> Tensor:
    model = torch.zeros(SIZE)
    return serve(
        algorithm,
        InMemory(who, algorithm),
        State(model),
        rounds=epochs,
        participation=Participation("epoch"),
        seed=1,
    ).model


# one report per epoch


def test_a_second_report_in_an_epoch_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    algorithm = fedsel(gradients(), replace(COURSE, epochs=4))
    who = cohort(algorithm, tmp_path / "a.db", epochs=4)
    assert who.ledger is not None
    assert len(answer(who, algorithm, task(algorithm, who, 1)).ids) == 40
    spent, rows = who.ledger.spent("0"), len(who.ledger.rows())
    assert answer(who, algorithm, replace(task(algorithm, who, 1), round=77)).ids == ()
    for epoch in (0, -5, 10**9):
        with pytest.raises(TaskRefused, match="'epoch' must lie between"):
            answer(who, algorithm, replace(task(algorithm, who, epoch), round=77))
    assert (who.ledger.spent("0"), len(who.ledger.rows())) == (spent, rows)
    some = replace(task(algorithm, who, 2), to=("3", "5"))
    assert answer(who, algorithm, some).ids == ("3", "5")
    assert answer(who, algorithm, replace(task(algorithm, who, 2), to=("4", "5"))).ids == ("4",)


@pytest.mark.parametrize("epochs", [1, 2, 3, 7])
def test_epochs_compose_to_the_budget_and_no_further(epochs: int, tmp_path: Path) -> None:
    for select in ("exp", "pe", "ps", "uniform"):
        algorithm = fedsel(gradients(), replace(COURSE, epochs=epochs), select=select)
        who = cohort(algorithm, tmp_path / f"{select}.db", clients=3, epsilon=1.3, epochs=epochs)
        assert who.ledger is not None
        for epoch in range(1, epochs + 1):
            assert len(answer(who, algorithm, task(algorithm, who, epoch)).ids) == 3
        assert 1.3 * (1 - 1e-9) <= who.ledger.spent("1") <= 1.3
        assert answer(who, algorithm, task(algorithm, who, epochs + 1)).ids == ()


# residual and momentum


def test_with_one_epoch_accumulation_and_momentum_do_nothing(tmp_path: Path) -> None:
    plain = fedsel(gradients(), COURSE, discount=0.0)
    assert set(plain.memory) == set()
    model = one_epoch(plain, cohort(plain, tmp_path / "a.db"))
    for number, (course, discount) in enumerate([(COURSE, 0.9), (replace(COURSE, epochs=2), 0.9)]):
        other = fedsel(gradients(), course, discount=discount)
        assert torch.equal(one_epoch(other, cohort(other, tmp_path / f"{number}.db")), model)
    assert model.abs().sum() > 0


def test_what_is_not_sent_is_kept_and_counts_next_time(tmp_path: Path) -> None:
    course = replace(COURSE, epochs=2, clip=100.0)
    algorithm = fedsel(gradients(), course, select="ps", value="duchi", discount=0.25)
    who = cohort(algorithm, tmp_path / "a.db", epsilon=60.0, epochs=2)  # almost no noise on either
    start, later = torch.zeros(SIZE), torch.full((SIZE,), 0.3)
    first = true_gradients(who.data, start)
    replies = answer(who, algorithm, task(algorithm, who, 1, start))
    index = replies.payload["index"]
    left = first.clone().scatter_(1, index, 0.0)
    torch.testing.assert_close(who.memory["residual"], left)
    held = left + true_gradients(who.data, later)
    second = answer(who, algorithm, task(algorithm, who, 2, later)).payload["index"]
    torch.testing.assert_close(who.memory["residual"], held.scatter_(1, second, 0.0))
    assert (index != second).any()


def test_the_value_sent_carries_momentum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(FEDSEL, "perturb", sent_as_it_is(asked))
    algorithm = fedsel(gradients(), replace(COURSE, epochs=2, clip=2.0), discount=0.25)
    who = cohort(algorithm, tmp_path / "a.db", epochs=2)
    who.memory["residual"] += torch.arange(SIZE) * 0.01
    replies = answer(who, algorithm, task(algorithm, who, 1))
    index, gradient = replies.payload["index"], true_gradients(who.data, torch.zeros(SIZE))
    before = (torch.arange(SIZE) * 0.01).expand(40, -1)
    expected = (gradient + 1.25 * before).gather(1, index)[:, 0]
    torch.testing.assert_close(torch.from_numpy(asked[0]).float(), expected / 2)
    torch.testing.assert_close(replies.payload["value"][:, 0], expected)


def test_accumulating_the_step_instead_of_the_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With values sent as they are, αg at the client is g and α at the server."""
    monkeypatch.setattr(FEDSEL, "perturb", sent_as_it_is([]))
    models = []
    for accumulate in ("gradient", "step"):
        algorithm = fedsel(gradients(), replace(COURSE, epochs=2), accumulate=accumulate)
        models.append(one_epoch(algorithm, cohort(algorithm, tmp_path / f"{accumulate}.db", epochs=2), epochs=2))
    torch.testing.assert_close(models[0], models[1])


def test_nothing_chosen_keeps_everything(tmp_path: Path) -> None:
    course = replace(COURSE, epochs=2)
    algorithm = fedsel(gradients(), course, select="pe", top=1, share=0.01)
    who = cohort(algorithm, tmp_path / "a.db", clients=300, epochs=2)
    replies = answer(who, algorithm, task(algorithm, who, 1))
    none = replies.payload["index"][:, 0] < 0
    assert 0 < none.sum() < 40  # chance of about 2⁻⁶
    assert (replies.payload["value"][none] == 0).all()
    expected = true_gradients(who.data, torch.zeros(SIZE))[none]
    torch.testing.assert_close(who.memory["residual"][none], expected)


# prices


@pytest.mark.parametrize("select", ["exp", "pe", "ps", "uniform"])
@pytest.mark.parametrize("form", ["sound", "published"])
def test_a_report_costs_what_the_method_is_certified_at(select: Any, form: Any) -> None:
    algorithm = fedsel(gradients(), replace(COURSE, form=form), select=select, share=0.4, top=2)
    price = algorithm.actions["report"].price
    assert price is not None
    share = 0.0 if select == "uniform" else 0.4
    method = quick_fedsel(select=select, dimension=SIZE, top=2, value="grid-pm", share=share, form=form)
    assert price(0.5, {}).epsilon == pytest.approx(method.certificate(0.5, 0.0).certified, rel=1e-12)
    if form == "sound":
        assert price(0.5, {}).epsilon <= 2 * (1 + 1e-12)
    elif select == "pe":
        assert price(0.5, {}).epsilon > 2


def test_the_control_on_top_is_charged_on_top(tmp_path: Path) -> None:
    job = job_of(experiment({"name": "fedsel-extra", "share": 0.25}))
    assert job.budgets is not None
    for own, force in zip(promised(job.population.budgets), promised(job.budgets), strict=True):
        assert force.epsilon == pytest.approx(1.25 * own.epsilon, rel=1e-9)
    done = finish(job, tmp_path / "a.db")
    assert done.spent()["0"] == pytest.approx(promised(job.budgets)[0].epsilon)


def test_the_published_form_runs_at_its_true_price(tmp_path: Path) -> None:
    job = job_of(experiment({"name": "fedsel", "select": "pe", "share": 0.9, "top": 1, "form": "published"}))
    assert job.budgets is not None
    assert all(
        f.epsilon > own.epsilon for f, own in zip(promised(job.budgets), promised(job.population.budgets), strict=True)
    )
    done = finish(job, tmp_path / "a.db")
    assert done.spent()["2"] == pytest.approx(promised(job.budgets)[2].epsilon)


def test_a_budget_with_delta_is_searched_and_spent(tmp_path: Path) -> None:
    job = job_of(experiment("fedsel", budgets={"delta": 1e-3}))
    done = finish(job, tmp_path / "a.db")
    assert job.budgets is not None
    for client, budget in zip(job.population.ids, promised(job.budgets), strict=True):
        assert 0.95 * budget.epsilon <= done.spent()[client] <= budget.epsilon


def test_the_rule_without_hyper_parameters() -> None:
    """The ε2 it needs, from SOUNDNESS 2.7; more than ε′ leaves nothing for the choice."""
    for size, clients, needed in ((100, 600, 0.876), (300, 1000, 1.308), (32, 452, 0.495), (123, 488, 1.101)):
        split = splitting(size, clients, "auto", 0.2, False)
        first, second = split(np.array([1.0, 2.0, 20.0]))
        assert second[0] == pytest.approx(min(1.0, max(0.8, needed)), abs=1e-3)
        assert second[2] == pytest.approx(16.0)
        assert first + second == pytest.approx([1.0, 2.0, 20.0])
    for wrong in ({"share": 1.0}, {"share": -0.1}, {"theta": 1.0}, {"top": 7}, {"top": 0}):
        with pytest.raises(Exception, match="must"):
            fedsel(gradients(), COURSE, **wrong)


# the server


def test_reports_under_larger_budgets_count_more_unless_budgets_are_hidden(tmp_path: Path) -> None:
    epsilons = tuple([0.5] * 10 + [6.0] * 10)
    changes: dict[str, Any] = {"budgets": {"epsilons": epsilons}, "data": {"clients": 20, "size": 20}}
    models = {}
    for name, algorithm, disclosed in (
        ("known", "fedsel", True),
        ("hidden", "fedsel", False),
        ("count", {"name": "fedsel", "weights": "count"}, True),
    ):
        wanted = experiment(algorithm, **{**changes, "budgets": {**changes["budgets"], "disclosed": disclosed}})
        models[name] = finish(job_of(wanted), tmp_path / f"{name}.db", rounds=1).state.model
    torch.testing.assert_close(models["hidden"], models["count"])
    assert not torch.allclose(models["known"], models["count"])
    # the loud reports are turned down
    assert models["known"].norm() < models["count"].norm()


def test_known_variances() -> None:
    epsilon = np.array([2.0, 0.5, 2.0])
    for mechanism in ("duchi", "pm", "hm"):
        expected = [values.variance(mechanism, e, 0.0) for e in epsilon]
        assert known_variance(mechanism, epsilon) == pytest.approx(expected)
    grid = [GridPiecewise(e).variance(0.0) for e in epsilon]
    assert known_variance("grid-pm", epsilon) == pytest.approx(grid, rel=2e-3)


# baselines


@pytest.mark.parametrize(
    ("build", "options", "tolerance"),
    [
        (flat, {}, 0.04),
        (flat, {"coordinates": 3, "value": "hm"}, 0.04),
        (compressed, {"ratio": 1.0}, 0.1),
        (exact, {"send": "random"}, 0.04),
        (exact, {}, 1e-5),
    ],
)
def test_enlarged_reports_are_unbiased(
    build: Callable[..., Algorithm], options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    algorithm = build(gradients(), replace(COURSE, learning_rate=1.0, clip=4.0), **options)
    who = cohort(algorithm, tmp_path / "a.db", clients=20_000, epsilon=20.0)
    expected = -true_gradients(who.data, torch.zeros(SIZE)).mean(0)
    assert (one_epoch(algorithm, who) - expected).abs().max() < tolerance


def test_the_largest_coordinates_as_in_a_plain_loop(tmp_path: Path) -> None:
    algorithm = exact(gradients(), replace(COURSE, epochs=3), send="largest")
    who = cohort(algorithm, tmp_path / "a.db", clients=7)
    found = one_epoch(algorithm, who, epochs=3)
    model, residual = torch.zeros(SIZE), torch.zeros(7, SIZE)
    for _ in range(3):
        total = torch.zeros(SIZE)
        for client in range(7):
            residual[client] += true_gradients(who.data, model)[client]
            largest = int(residual[client].abs().argmax())
            total[largest] += residual[client, largest]
            residual[client, largest] = 0.0
        model = model - 0.5 * total / 7
    torch.testing.assert_close(found, model)


def test_projected_values_are_clipped_after_projecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("polyeps.algorithms.fedsel_baselines.perturb", sent_as_it_is(sent))
    algorithm = compressed(gradients(), COURSE, ratio=0.5)
    who = cohort(algorithm, tmp_path / "a.db", clients=500)
    answer(who, algorithm, task(algorithm, who, 1))
    assert np.abs(sent[0]).max() > 1  # clipping before would not have bounded it


def test_flat_coordinates_are_different_and_evenly_drawn(tmp_path: Path) -> None:
    algorithm = flat(gradients(), COURSE, coordinates=4)
    who = cohort(algorithm, tmp_path / "a.db", clients=3000)
    index = answer(who, algorithm, task(algorithm, who, 1)).payload["index"]
    assert all(len(set(row)) == 4 for row in index.tolist())
    tallies = torch.bincount(index.flatten(), minlength=SIZE)
    assert (tallies - 2000).abs().max() < 6 * math.sqrt(2000 / 3)


def test_selection_law_decides_what_is_reported(tmp_path: Path) -> None:
    algorithm = fedsel(gradients(), COURSE, select="ps", share=0.5, top=2)
    who = cohort(algorithm, tmp_path / "a.db", clients=20_000, epsilon=2.0)
    index = answer(who, algorithm, task(algorithm, who, 1)).payload["index"]
    ranks = true_gradients(who.data, torch.zeros(SIZE)).abs().argsort(1).argsort(1).gather(1, index)
    law = selection.selection_law("ps", SIZE, 2, 1.0)
    hits = float((ranks >= SIZE - 2).float().mean())
    assert abs(hits - 2 * law.top) < 5 * math.sqrt(hits * (1 - hits) / 20_000)


@pytest.mark.parametrize(("build", "value"), [(fedsel, "grid-pm"), (fedsel, "duchi"), (flat, "hm"), (compressed, "pm")])
def test_noise_is_as_large_as_the_price_says(build: Callable[..., Algorithm], value: Any, tmp_path: Path) -> None:
    """Records of zero leave nothing to send but noise."""
    algorithm = build(gradients(), replace(COURSE, clip=3.0), value=value)
    who = cohort(algorithm, tmp_path / "a.db", clients=20_000, epsilon=2.0)
    who.data = replace(who.data, features=torch.zeros_like(who.data.features))
    sent = answer(who, algorithm, task(algorithm, who, 1)).payload["value"]
    epsilon = 1.8 if build is fedsel else 2.0
    assert float(sent.var()) == pytest.approx(9 * values.variance(value, epsilon, 0.0), rel=0.05)


@pytest.mark.parametrize("select", ["exp", "pe", "ps"])
def test_whole_reports_of_clients_are_not_refuted(select: Any, tmp_path: Path) -> None:
    """Two clients' whole data against each other: the largest coordinate of one is the smallest of the other."""
    algorithm = fedsel(gradients(), replace(COURSE, clip=0.1), select=select, share=0.5, top=1)
    tallies = []
    for number, record in enumerate((torch.linspace(2.0, 1.0, SIZE), -torch.linspace(1.0, 2.0, SIZE))):
        who = cohort(algorithm, tmp_path / f"{number}.db", clients=30_000, epsilon=2.0)
        who.streams = lambda ids, round, seed=number: SeededStreams(seed, ids, round)  # type: ignore[misc]
        who.data = replace(who.data, features=record.expand(30_000, -1), labels=torch.zeros(30_000))
        sent = answer(who, algorithm, task(algorithm, who, 1)).payload
        event = 2 * (sent["index"] + 1) + (sent["value"] > 0)
        tallies.append(torch.bincount(event[:, 0], minlength=2 * SIZE + 2).numpy())
    found = bound_from_counts(tallies[0], tallies[1], (30_000, 30_000))
    assert 1.5 < found <= 2.0


@pytest.mark.parametrize("build", [fedsel, flat, compressed])
def test_a_budget_too_large_for_its_mechanism_is_refused_before_it_is_charged(
    build: Callable[..., Algorithm], tmp_path: Path
) -> None:
    algorithm = build(gradients(), COURSE)
    who = cohort(algorithm, tmp_path / "a.db", epsilon=50.0)
    with pytest.raises(InputError, match="at most 36"):
        answer(who, algorithm, task(algorithm, who, 1))
    assert who.ledger is not None
    assert who.ledger.spent("0") == 0


def test_a_model_under_which_records_overflow_spoils_nothing(tmp_path: Path) -> None:
    algorithm = fedsel(gradients(), replace(COURSE, epochs=2))
    who = cohort(algorithm, tmp_path / "a.db", epochs=2)
    for broken in (math.nan, math.inf, 1e38):
        with pytest.raises(TaskRefused, match="'model' must lie between"):
            answer(who, algorithm, task(algorithm, who, 1, torch.full((SIZE,), broken)))
    who.data.features.fill_(1e35)
    for broken in (1e9, -1e9):
        replies = answer(who, algorithm, replace(task(algorithm, who, 1, torch.full((SIZE,), broken)), to=("1", "2")))
        assert torch.isfinite(replies.payload["value"]).all()
        who.memory["progress"].zero_()
    assert torch.isfinite(who.memory["residual"]).all()
