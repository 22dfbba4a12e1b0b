"""Names become objects: effective budgets, calibrated noise, options checked, cohort sizes."""

import inspect
import math
import re
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from support.federations import EPSILONS, METHODS, experiment, guaranteed, job_of

from polyeps.accounting import epsilon
from polyeps.algorithms import ALGORITHMS
from polyeps.cli.quick import quick_dp_sgd
from polyeps.core import Budget
from polyeps.errors import InputError
from polyeps.experiment import job as build
from polyeps.experiment import noise_calibration
from polyeps.experiment.population import populate
from polyeps.experiment.registry import checked_options
from polyeps.experiment.run import run
from polyeps.participation import Participation


@pytest.mark.parametrize(
    ("name", "in_force"),
    [
        ("fedavg", EPSILONS),
        ("fedavg (minimum)", (0.5,) * 6),
        ("fedavg (maximum)", (9.0,) * 6),
        ("public-only", EPSILONS),
    ],
)
def test_budgets_in_force(name: str, in_force: tuple[float, ...]) -> None:
    job = job_of(experiment(name))
    assert job.budgets == tuple(Budget(value, 1e-3) for value in in_force)
    assert {client: terms.budget.epsilon for client, terms in job.terms.items()} == {
        str(place): value for place, value in enumerate(in_force)
    }
    order = np.argsort(in_force)
    assert np.all(np.diff(job.noise_multiplier[order]) <= 0)  # the stricter, the noisier


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"fedavg (minimum)", "fedavg (maximum)"}))
def test_only_two_controls_put_another_budget_in_force(name: str) -> None:
    wanted = experiment({"name": name, "epsilon": 0.1}, participation={"kind": "poisson", "share": 0.5})
    with pytest.raises(
        InputError, match=rf"epsilon = 0.1 changes nothing about {re.escape(name)}: .*minimum.*maximum.*leave it out"
    ):
        job_of(wanted)


def test_what_those_controls_may_put_in_force() -> None:
    for name, value in (
        ("fedavg (minimum)", 0.5),
        ("fedavg (minimum)", 0.2),
        ("fedavg (maximum)", 100.0),
        ("fedavg (maximum)", 0.2),
    ):
        assert job_of(experiment({"name": name, "epsilon": value})).budgets == (Budget(value, 1e-3),) * 6
    with pytest.raises(InputError, match=r"algorithm.epsilon = 0.51 is more than the smallest budget 0.5.*lower it"):
        job_of(experiment({"name": "fedavg (minimum)", "epsilon": 0.51}))


def test_the_strictest_budget_is_within_everybodys(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("client,epsilon,delta\n0,1,1e-3\n1,2,1e-6\n")
    budgets = {"epsilons": None, "file": tmp_path / "b.csv"}
    for algorithm in ("fedavg (minimum)", {"name": "fedavg (minimum)", "epsilon": 1.0}):
        assert job_of(experiment(algorithm, data={"clients": 2}, budgets=budgets)).budgets == (Budget(1.0, 1e-6),) * 2


def test_no_budget_is_no_noise_and_no_ledger() -> None:
    job = job_of(experiment("fedavg (none)"))
    assert job.budgets is None
    assert job.terms == {}
    assert not job.noise_multiplier.any()
    assert all(action.price is None for action in job.algorithm.actions.values())


def test_noise_is_calibrated_for_the_rounds_a_client_can_expect() -> None:
    wanted = experiment(rounds=10, participation={"kind": "uniform", "share": 0.5})
    assert noise_calibration.expected_rounds(wanted, Participation("uniform", 0.5), 6) == 5
    assert noise_calibration.expected_rounds(experiment(rounds=100), Participation("poisson", 0.29), 6) == 29
    assert (
        noise_calibration.expected_rounds(experiment(rounds=5), Participation("epoch", 0.5), 6) == 3
    )  # two rounds are an epoch
    job = job_of(wanted)
    cost = noise_calibration.cost_of(job.algorithm, job.population.ids, job.settings)
    for row, budget in enumerate(EPSILONS):
        event = dp_accounting.SelfComposedDpEvent(cost.event(job.noise_multiplier[row], row), 5)
        assert 0.99 * budget <= epsilon(event, 1e-3) <= budget


def test_one_scale_for_all_when_it_is_given() -> None:
    assert job_of(experiment(budgets={"noise_multiplier": 3.0})).noise_multiplier.tolist() == [3.0] * 6


@pytest.mark.parametrize(
    ("participation", "scale", "quorum"),
    [
        ({"kind": "full"}, None, 6),
        ({"kind": "uniform", "share": 0.5}, None, 3),
        ({"kind": "uniform", "share": 0.5}, 3.0, 1),
        ({"kind": "uniform", "share": 0.5, "quorum": 2}, None, 2),
        ({"kind": "uniform", "share": 0.5, "quorum": 6}, None, 6),  # the run ends with the first who leaves
    ],
)
def test_the_quorum_is_a_full_cohort_unless_leaving_early_is_the_rule(
    participation: dict[str, Any], scale: float | None, quorum: int
) -> None:
    job = job_of(experiment(participation=participation, budgets={"noise_multiplier": scale}))
    assert job.participation.quorum == quorum


def test_a_share_of_everybody_is_refused() -> None:
    with pytest.raises(InputError, match=r"participation.share = 0.5 changes nothing"):
        job_of(experiment(participation={"share": 0.5}))


def test_a_quorum_nobody_could_meet_is_refused() -> None:
    with pytest.raises(InputError, match="quorum is 7, more than the 6 clients"):
        job_of(experiment(participation={"quorum": 7}))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"name": "cmp-fed (none)", "noise": "skellam"}, r"algorithm.noise changes nothing about cmp-fed \(none\)"),
        (
            {"name": "dp-randagg (none)", "mask_first": False},
            r"algorithm.mask_first changes nothing about dp-randagg \(none\)",
        ),
        ({"name": "cmp-fed", "label": "thin", "rank": 0}, r"algorithm \(thin\): rank must be at least 1"),
    ],
)
def test_of_several_methods_the_wrong_one_is_named(algorithm: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        job_of(experiment(algorithm=algorithm, participation={"kind": "poisson", "share": 0.5}))


def test_liberal_clients_are_wanted_in_every_round_only_when_asked_for() -> None:
    assert job_of(experiment()).participation.including == frozenset()
    assert job_of(experiment(participation={"with_public": True})).participation.including == {"2", "4"}


def test_hidden_budgets_are_not_told() -> None:
    assert job_of(experiment()).discloses == ("epsilon", "examples")
    assert job_of(experiment(budgets={"disclosed": False})).discloses == ()


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("fedavgg", ("there is no algorithm 'fedavgg'", "did you mean 'fedavg'?")),
        ({"name": "pfa", "rnak": 2}, ("algorithm.rnak (of pfa)", "did you mean 'rank'?")),
        (
            {"name": "fedavg", "rank": 2},
            ("algorithm.rank (of fedavg)", "known are budgets, epsilon, form, label, name, server, training"),
        ),
        ({"name": "pfa", "per_tensor": "perhaps"}, ("algorithm (pfa).per_tensor", "boolean", "not 'perhaps'")),
        ({"name": "pfa", "weights": "age"}, ("algorithm (pfa).weights", "'epsilon' or 'count'")),
        ({"name": "pfa", "split": "halves"}, ("algorithm (pfa).split", "'mixture', 'k-means', 'top' or 'threshold'")),
        ({"name": "pfa", "rank": 0}, ("algorithm (pfa).rank: input", "greater than or equal to 1")),
        ({"name": "pdp-fl", "rank": "all"}, ("algorithm (pdp-fl).rank",)),
        ({"name": "pdp-fl", "warm_up": 0}, ("algorithm (pdp-fl).warm_up", "greater than or equal to 1")),
        ({"name": "pdp-fl-plus", "delayed": False}, ("algorithm.delayed (of pdp-fl-plus)",)),  # settled by the name
        ({"name": "pfa", "rank": True}, ("algorithm (pfa).rank: must be a number, not True",)),
        ({"name": "cmp-fed", "rank": True}, ("algorithm (cmp-fed).rank: must be a number, not True",)),
        ({"name": "fedhdp", "pull": True}, ("algorithm (fedhdp).pull: must be a number, not True",)),
        ({"name": "cmp-fed", "clip_embedding": math.inf}, ("algorithm (cmp-fed).clip_embedding", "finite number")),
        ({"name": "cmp-fed", "clip_subspace": math.nan}, ("algorithm (cmp-fed).clip_subspace", "finite number")),
        ({"name": "fedavg", "training": {"batch": 100}}, ("client '0' has 60 records", "training.batch = 100")),
    ],
)
def test_wrong_algorithms_and_options_are_named(algorithm: Any, said: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as refusal:
        job_of(experiment(algorithm))
    for part in said:
        assert part in str(refusal.value)


def test_options_reach_the_builder() -> None:
    options = checked_options(experiment({"name": "pfa", "rank": 3}).algorithm[0], ALGORITHMS["pfa"])
    assert (options["rank"], options["weights"]) == (3, "epsilon")
    plus = checked_options(experiment("pdp-fl-plus").algorithm[0], ALGORITHMS["pdp-fl-plus"])
    assert plus["delayed"] is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {"batch": 61}}, ("client '0' has 60 records", "make the batch 60 or less")),
        ({"budgets": {"noise_multiplier": 0.4}}, ("client '0' cannot afford a single round", "raise it")),
        ({"budgets": {"delta": 0}}, ("client '0' cannot afford the plan", "δ = 0", "delta above 0")),
    ],
)
def test_a_plan_that_cannot_work_leaves_nothing_behind(
    changes: dict[str, Any], said: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refusal:
        run(experiment(**changes), tmp_path / "run")
    for part in said:
        assert part in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cmp-fed", "dp-randagg", "fedhdp (minimum)"])
@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"clip_embedding": 0}, {}, "clip_embedding must be between"),
        ({"clip_embedding": -1}, {}, "clip_embedding must be between"),
        ({"clip_subspace": 1e300}, {}, "clip_subspace must be between"),
        ({}, {"training": {"clip": 1e300}}, "training.clip must be between"),
        ({"training": {"clip": 1e-40}}, {}, "training.clip must be between"),
        ({"noise": "skellam"}, {"budgets": {"epsilons": (1e-4,) * 6}}, "would need"),
        ({"noise": "discrete-gaussian"}, {"budgets": {"epsilons": (1e-4,) * 6}}, "would need"),
        ({"dropouts": 0.6}, {}, "dropouts must be at most"),
    ],
)
def test_noisy_sums_that_cannot_be_made_leave_nothing_behind(
    name: str, options: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    if options.keys() - inspect.signature(ALGORITHMS[METHODS[name]["name"]].build).parameters.keys() - {"training"}:
        pytest.skip("has no such option")
    if name == "fedhdp (minimum)" and "noise" in options:
        options = {**options, "trust": "secure-sum"}
    drawn = {"kind": "poisson", "share": 0.5}
    with pytest.raises(InputError, match=said):
        run(experiment({"name": name, **options}, participation=drawn, **changes), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("budget", [1e7, 1e12])
def test_a_missing_delta_is_named_only_where_it_is_missing(budget: float) -> None:
    with pytest.raises(InputError, match=r"more than this price can cost; lower the budget$"):
        job_of(
            experiment("cmp-fed", budgets={"epsilons": (budget,) * 6}, participation={"kind": "poisson", "share": 0.5})
        )


def test_an_algorithm_that_needs_hidden_budgets_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"client '0' does not disclose its epsilon.*pdp-fl"):
        run(experiment(["fedavg", "weiavg"], budgets={"disclosed": False}), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_published_form_is_run_at_what_it_really_costs() -> None:
    # Paper 000's setting, ε = 10, where the closed form claims less than it costs.
    clients, size, batch, rounds, steps = 1, 1200, 8, 80, 100
    wanted = experiment(
        {"name": "fedavg", "form": "published"},
        rounds=rounds,
        data={"clients": clients, "size": size},
        budgets={"epsilons": (10.0,), "delta": 1e-5},
        training={"batch": batch, "local_steps": steps},
    )
    job = build.prepare(wanted, wanted.algorithm[0], populate(wanted, 1))
    sigma = 10 * batch / size * math.sqrt(rounds * steps * math.log10(1e5)) / 10
    assert job.noise_multiplier.tolist() == pytest.approx([sigma])
    told = quick_dp_sgd(records=size, batch=batch, steps=rounds * steps, sampler="fixed").certificate(sigma, 1e-5)
    assert job.budgets is not None
    assert guaranteed(job.budgets)[0].epsilon == pytest.approx(told.certified, rel=1e-9)
    assert guaranteed(job.budgets)[0].epsilon == pytest.approx(11.78, abs=0.005)  # as tests/cli/test_quick.py has it
    assert job.algorithm.adjacency == "replace-one"


def test_published_noise_that_certifies_nothing_is_refused() -> None:
    hopeless = experiment(
        {"name": "fedavg", "form": "published"}, rounds=1, budgets={"epsilons": (0.5,) * 5 + (1e200,)}
    )
    with pytest.raises(InputError, match=r"client '5': the published noise for ε = 1e\+200 .* the sound form"):
        job_of(hopeless)
