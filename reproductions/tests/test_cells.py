import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from polyeps_reproductions.algorithms import fedsel
from polyeps_reproductions.cells import GRID, Setting, drawn_epsilons
from polyeps_reproductions.federations import population
from polyeps_reproductions.reference_models import SoftmaxTwice, softmax_twice
from polyeps_reproductions.trials import VALIDATION
from small_studies import SETTING, cell

from polyeps.accounting.certificate import Form
from polyeps.errors import InputError
from polyeps.experiment.config import Experiment, experiment
from polyeps.models import cross_entropy


def made(method: str, form: Form, setting: Setting | None = None) -> Experiment:
    return experiment((setting or Setting()).experiment(method, form, 0.05))


@pytest.mark.parametrize(("clients", "high"), [(20, 2), (30, 4), (40, 4), (50, 5), (10, 1)])
@pytest.mark.parametrize("budgets", ["mixgauss1", "mixgauss3", "mixgauss4"])
def test_as_many_clients_have_a_high_epsilon_as_in_the_papers_draw(budgets: str, clients: int, high: int) -> None:
    drawn = np.array(drawn_epsilons(budgets, clients))
    assert len(drawn) == clients
    assert (drawn > 5).sum() == high
    assert drawn.min() > 0


def test_a_draw_is_the_same_every_time() -> None:
    first = drawn_epsilons("mixgauss3", 30)
    drawn_epsilons.cache_clear()
    assert drawn_epsilons("mixgauss3", 30) == first
    assert drawn_epsilons("uniform", 30) != first


def test_budgets_may_be_ten_times_others_or_cut_at_the_means_of_their_mixture() -> None:
    assert drawn_epsilons("mixgauss3-tenfold", 50) == pytest.approx(10 * np.array(drawn_epsilons("mixgauss3", 50)))
    usual, sharp = (np.array(drawn_epsilons("mixgauss3", 30, cut)) for cut in (False, True))
    assert (usual.min() < 1, usual.max() > 10, sharp.min(), sharp.max()) == (True, True, 1, 10)
    between = (usual > 1) & (usual < 10)
    assert (usual[between] == sharp[between]).all()


@pytest.mark.skipif(not os.environ.get("POLYEPS_DATA"), reason="needs IMDb; set POLYEPS_DATA")
def test_imdb_has_the_words_with_which_the_lstm_has_the_papers_parameters() -> None:
    setting = Setting("imdb", "lstm", clients=4, epsilons=(1.0,) * 4, size=5)
    found = population(experiment(setting.experiment("fedavg", "sound")), seed=1)
    assert found.model.size == 160_306
    assert found.dataset.features.shape[1:] == (50,)


def test_impossible_budgets_are_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="no budget distribution"):
        drawn_epsilons("nonsense", 30)


def test_the_forms_differ_in_batch_split_and_subspace() -> None:
    published, sound = made("pfa", "published"), made("pfa", "sound")
    assert (published.training.batch, sound.training.batch) == (4, 8)
    assert published.algorithm[0].options == {"split": "top", "subspace": "centred"}
    assert sound.algorithm[0].options == {}
    assert published.budgets == sound.budgets
    assert published.participation == sound.participation
    assert sound.participation.with_public


def test_a_cell_keeps_to_what_the_paper_fixes() -> None:
    found = made("pfa", "published", Setting(clients=50))
    assert (found.rounds, found.training.local_steps, found.training.clip) == (100, 100, 1.0)
    assert (found.data.size, found.data.clients, found.budgets.delta) == (1200, 50, 1e-5)
    assert (found.participation.kind, found.participation.share) == ("uniform", 0.8)


def test_hidden_budgets_are_not_disclosed() -> None:
    assert not made("pdp-fl", "sound", SETTING).budgets.disclosed
    assert made("pfa", "sound", SETTING).budgets.disclosed


def test_a_method_may_have_options() -> None:
    assert made("pfa-plus rank=5", "sound").algorithm[0].options == {"rank": 5}
    assert made("pfa projection=gaussian rank=1", "sound").algorithm[0].options == {"projection": "gaussian", "rank": 1}


def test_one_grid_is_tried_on_training_records_alone() -> None:
    tried = Setting().cell("pfa", "sound").trial.choices()
    assert [json.loads(one.settings)["training"]["learning_rate"] for one in tried] == list(GRID)
    assert {(one.validation, one.seed) for one in tried} == {(True, 1)}
    assert all(one.experiment().data.validation == VALIDATION for one in tried)


def test_a_row_of_numbers_of_clients_shares_its_choice() -> None:
    row = [Setting(clients=clients).cell("pfa", "sound").trial for clients in (20, 50)]
    assert len({one.choices() for one in row}) == len({one.row for one in row}) == 1
    assert row[0].choices()[0].experiment().data.clients == 30
    assert Setting(budgets="mixgauss3").cell("pfa", "sound").trial.choices() != row[0].choices()
    assert cell(learning_rate=None).trial.choices()[0].experiment().data.clients == 6  # whose ε are listed


def test_networks_share_choices() -> None:
    def choices(method: str, budgets: str = "mixgauss3", data: str = "mnist") -> object:
        return Setting(data, "cnn", "iid", budgets).cell(method, "sound").trial.choices()

    assert choices("pfa") == choices("pfa-plus") == choices("pfa", data="fashion-mnist") != choices("weiavg")
    assert choices("maximum") == choices("maximum", "mixgauss1") != choices("maximum", "gauss")  # its largest ε is 5
    assert choices("public-only") == choices("pfa", "mixgauss1") != choices("pfa")
    assert choices("public-only", "gauss") == choices("pfa", "gauss")
    free = [Setting("mnist", "cnn", "iid", budgets).cell("non-private", "sound") for budgets in ("gauss", "mixgauss1")]
    assert free[0].trial == free[1].trial
    assert free[0].labels["budgets"] == "gauss"


def test_budgets_can_be_drawn_anew_for_every_seed() -> None:
    setting = Setting(data="digits", size=20, redrawn=True)
    first, second = (population(made("pfa", "sound", setting), seed).budgets for seed in (1, 2))
    assert [one.epsilon for one in first if one] != [one.epsilon for one in second if one]
    once = replace(setting, redrawn=False)
    assert setting.title != once.title
    assert setting.cell("pfa", "sound").trial.choices() == once.cell("pfa", "sound").trial.choices()


def test_softmax_twice_is_what_autograd_finds() -> None:
    outputs = torch.randn(7, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    labels = torch.arange(7)
    loss = SoftmaxTwice()
    chances = torch.softmax(torch.softmax(outputs, 1), 1)
    torch.testing.assert_close(loss(outputs, labels), -chances.log()[labels, labels])
    (expected,) = torch.autograd.grad(-chances.log()[labels, labels].sum(), outputs)
    torch.testing.assert_close(loss.gradients(outputs.detach(), labels), expected)


def test_softmax_twice_starts_at_zero_with_gradients_ten_times_smaller() -> None:
    model = softmax_twice((8, 8), 10)
    outputs, labels = torch.zeros(1, 10), torch.tensor([3])
    assert model.start_at_zero
    small, plain = model.loss.gradients(outputs, labels), cross_entropy.gradients(outputs, labels)  # type: ignore[attr-defined]
    torch.testing.assert_close(10 * small, plain)


def test_an_unknown_method_of_fedsel_is_refused() -> None:
    for name in ("best-pm", "ps-best", "ps-pm-x"):
        with pytest.raises(InputError, match=f"no method '{name}'"):
            fedsel(name, "sound", 0.1, 2.0)
