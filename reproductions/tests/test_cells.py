import numpy as np
import pytest
from polyeps_reproductions.cells import METHODS, Cell, Method, drawn_epsilons, experiment_of
from small_studies import CELL

from polyeps.errors import InputError


@pytest.mark.parametrize(("clients", "liberal"), [(20, 2), (30, 4), (40, 4), (50, 5), (10, 1)])
@pytest.mark.parametrize("budgets", ["mixgauss1", "mixgauss3", "mixgauss4"])
def test_as_many_clients_are_liberal_as_in_the_papers_draw(budgets: str, clients: int, liberal: int) -> None:
    drawn = np.array(drawn_epsilons(budgets, clients))
    assert len(drawn) == clients
    assert (drawn > 5).sum() == liberal
    assert drawn.min() > 0


def test_a_draw_is_the_same_every_time() -> None:
    first = drawn_epsilons("mixgauss3", 30)
    drawn_epsilons.cache_clear()
    assert drawn_epsilons("mixgauss3", 30) == first
    assert drawn_epsilons("uniform", 30) != first


def test_impossible_budgets_are_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="no budget distribution"):
        drawn_epsilons("nonsense", 30)


def test_the_forms_differ_in_batch_split_and_subspace() -> None:
    published, sound = (experiment_of(Cell(), Method("pfa"), form, 0.05) for form in ("published", "sound"))
    assert (published.training.batch, sound.training.batch) == (4, 8)
    assert published.algorithm[0].options == {"split": "top", "subspace": "centred"}
    assert sound.algorithm[0].options == {}
    assert published.budgets == sound.budgets
    assert published.participation == sound.participation
    assert sound.participation.with_public


def test_a_cell_keeps_to_what_the_paper_fixes() -> None:
    made = experiment_of(Cell(clients=50), METHODS[0], "published", 0.05)
    assert (made.rounds, made.training.local_steps, made.training.clip) == (100, 100, 1.0)
    assert (made.data.size, made.data.clients, made.budgets.delta) == (1200, 50, 1e-5)
    assert (made.participation.kind, made.participation.share) == ("uniform", 0.8)


def test_hidden_budgets_are_not_disclosed() -> None:
    assert not experiment_of(CELL, Method("pdp-fl"), "sound", 0.1).budgets.disclosed
    assert experiment_of(CELL, Method("pfa"), "sound", 0.1).budgets.disclosed


def test_a_method_is_called_by_its_options() -> None:
    assert Method("pfa-plus", (("rank", 5),)).title == "pfa-plus rank=5"
