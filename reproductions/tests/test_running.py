import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from polyeps_reproductions import pfa, running, trials
from polyeps_reproductions.comparison import FORMS
from polyeps_reproductions.running import Machines, bundle, of_shard, run_all, settle
from polyeps_reproductions.trials import Result, Store, Trial
from small_studies import METHODS, STUDY, figure, result, trial

from polyeps.errors import InputError

CHOICES = len(METHODS) * len(FORMS) * 2  # two rates in a quick setting


def all_trials(seeds: int = 2, number: str | None = None) -> list[Trial]:
    """Those of the small study, or of a figure of PFA."""
    if number is None:
        return [one for cell in figure().cells(True) for one in STUDY.trials(figure(), cell, seeds, True)]
    (part,) = pfa.STUDY.choose([number])
    return [one for cell in part.cells(False) for one in pfa.STUDY.trials(part, cell, seeds, False)]


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Trials that were run, without training anything; the smaller rate is the better one."""
    done: list[Trial] = []

    def perform(wanted: Trial, _: str) -> Result:
        done.append(wanted)
        return result(wanted, 0.9 - json.loads(wanted.settings)["training"]["learning_rate"])

    monkeypatch.setattr(running, "perform", perform)
    return done


def test_rates_are_chosen_and_everything_is_run_once(tmp_path: Path, performed: list[Trial]) -> None:
    wanted, store = all_trials(), Store(tmp_path)
    run_all(wanted, store, Machines())
    assert len(performed) == len(set(performed)) == CHOICES + len(METHODS) * len(FORMS) * 2
    settled = settle(wanted, store)
    assert {json.loads(one.settings)["training"]["learning_rate"] for one in settled} == {0.01}
    assert [one.seed for one in settled] == [one.seed for one in wanted]


def test_the_best_candidate_is_chosen_once_all_are_tried_and_ties_go_to_the_first(tmp_path: Path) -> None:
    store, wanted = Store(tmp_path), trial(learning_rate=None)
    for one in wanted.choices():
        assert wanted.settled(store) is None
        store.write(one, result(one, 0.6))
    settled = wanted.settled(store)
    assert settled is not None
    assert json.loads(settled.settings)["training"]["learning_rate"] == 0.05
    last = wanted.choices()[-1]
    store.write(last, result(last, 0.7))
    settled = wanted.settled(store)
    assert settled is not None
    assert json.loads(settled.settings)["training"]["learning_rate"] == 0.01


def test_a_recorded_choice_is_not_made_again(
    tmp_path: Path, performed: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = Store(tmp_path), trial(learning_rate=None)
    assert wanted.choice is not None
    recorded = {wanted.choice_name: wanted.choice.candidates[0]}
    monkeypatch.setattr(trials, "chosen_earlier", lambda: recorded)
    run_all([wanted], store, Machines())
    assert [json.loads(one.settings)["training"]["learning_rate"] for one in performed] == [0.05]  # not 0.01, the best
    other = replace(wanted, choice=replace(wanted.choice, seeds=(1, 2)))
    assert other.recorded is None  # another choice has another name
    assert other.settled(store) is None


def test_several_seeds_choose_by_their_mean(tmp_path: Path) -> None:
    store, wanted = Store(tmp_path), trial(learning_rate=None)
    assert wanted.choice is not None
    wanted = replace(wanted, choice=replace(wanted.choice, seeds=(1, 2)))
    for one, final in zip(wanted.choices(), (0.9, 0.1, 0.5, 0.6), strict=True):
        store.write(one, result(one, final))
    settled = wanted.settled(store)
    assert settled is not None
    assert json.loads(settled.settings)["training"]["learning_rate"] == 0.01


def test_a_stopped_study_goes_on(tmp_path: Path, performed: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, store = all_trials(), Store(tmp_path)
    counted = vars(running)["perform"]

    def stopping(one: Trial, device: str) -> Result:
        if len(performed) == 15:
            raise KeyboardInterrupt
        found: Result = counted(one, device)
        return found

    monkeypatch.setattr(running, "perform", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_all(wanted, store, Machines())
    assert len(list(tmp_path.iterdir())) == 15
    monkeypatch.setattr(running, "perform", counted)
    run_all(wanted, store, Machines())
    assert Counter(performed).most_common(1)[0][1] == 1
    assert len(list(tmp_path.iterdir())) == len(performed) == 24
    run_all(wanted, store, Machines())
    assert len(performed) == 24


def test_nothing_is_begun_after_the_time_is_up(tmp_path: Path, performed: list[Trial]) -> None:
    run_all(all_trials(), Store(tmp_path), Machines(until=time.time() - 1))
    assert performed == []
    run_all(all_trials(), Store(tmp_path), Machines(until=time.time() + 60))
    assert len(performed) == 24


def test_shards_cover_everything_exactly_once() -> None:
    wanted = [*all_trials(2, "3"), *all_trials(2, "10")]
    parts = [of_shard(wanted, (number, 7)) for number in range(1, 8)]
    assert Counter(one for part in parts for one in part) == Counter(set(wanted))
    assert min(map(len, parts)) > 0
    with pytest.raises(InputError, match="such as 3/8"):
        of_shard(wanted, (8, 7))


def test_shards_on_their_own_make_the_whole(tmp_path: Path, performed: list[Trial]) -> None:
    wanted = all_trials()
    for number in (1, 2, 3):
        run_all(wanted, Store(tmp_path), Machines(shard=(number, 3)))
    assert len(settle(wanted, Store(tmp_path))) == len(wanted)
    assert all(Store(tmp_path).has(one) for one in settle(wanted, Store(tmp_path)))
    assert len(performed) == len(set(performed))


def test_an_incomplete_choice_is_left_out(tmp_path: Path) -> None:
    assert settle([trial(learning_rate=None), trial()], Store(tmp_path)) == [trial()]


def test_bundles_hold_trials_of_the_same_clients() -> None:
    wanted = all_trials(3, "3")
    parts = bundle(wanted, 12)
    assert sorted(one.key for part in parts for one in part) == sorted(one.key for one in wanted)
    assert all(len({one.clients for one in part}) == 1 for part in parts)


def test_progress_is_reported(tmp_path: Path, performed: list[Trial]) -> None:
    said: list[tuple[str, int, int]] = []
    wanted = [trial(), replace(trial(), seed=2)]
    run_all(wanted, Store(tmp_path), Machines(), lambda *one: said.append(one))
    assert said[-3:] == [("running", 0, 2), ("running", 1, 2), ("running", 2, 2)]
    assert len(performed) == 2


def test_processes_do_the_same_work(tmp_path: Path) -> None:
    wanted = [trial(), trial("pfa")]
    run_all(wanted, Store(tmp_path / "two"), Machines(processes=2))
    run_all(wanted, Store(tmp_path / "one"), Machines())
    for one in wanted:
        apart, alone = (Store(tmp_path / name).read(one) for name in ("two", "one"))
        assert apart is not None
        assert alone is not None
        assert apart["accuracy"] == alone["accuracy"]
