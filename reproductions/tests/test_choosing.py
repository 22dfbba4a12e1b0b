from dataclasses import replace
from pathlib import Path

from polyeps_reproductions.cells import Cell, Method
from polyeps_reproductions.choosing import VALIDATION, choice_of, chosen, tuned
from polyeps_reproductions.trials import Store, Trial
from small_studies import result, trial

GRID = (0.1, 0.05, 0.01)


def test_one_grid_is_tried_on_training_records_alone() -> None:
    tried = choice_of(trial(seed=3), GRID)
    assert [one.learning_rate for one in tried] == list(GRID)
    assert {(one.validation, one.seed) for one in tried} == {(VALIDATION, 1)}
    assert all(one.experiment().data.validation == VALIDATION for one in tried)


def test_a_row_of_numbers_of_clients_shares_its_choice() -> None:
    row = [Trial(Cell(clients=clients), Method("pfa"), "sound", seed, 0.0) for clients in (20, 50) for seed in (1, 2)]
    assert len({choice_of(one, GRID) for one in row}) == 1
    assert tuned(row[0].cell).clients == 30
    other = replace(row[0], cell=replace(row[0].cell, budgets="mixgauss3"))
    assert choice_of(other, GRID) != choice_of(row[0], GRID)


def test_the_best_rate_is_chosen_once_all_are_tried(tmp_path: Path) -> None:
    store, wanted = Store(tmp_path), trial(seed=2, learning_rate=0.0)
    for one, final in zip(choice_of(wanted, GRID), (0.3, 0.6, 0.6), strict=True):
        assert chosen(store, wanted, GRID) is None
        store.write(store.path(one).name, result(one, final))
    assert chosen(store, wanted, GRID) == trial(seed=2, learning_rate=0.05)
