from collections import Counter
from pathlib import Path

import pytest
from polyeps_reproductions import running
from polyeps_reproductions.cells import FORMS
from polyeps_reproductions.figures import trials_of
from polyeps_reproductions.pfa import FIGURES
from polyeps_reproductions.running import Means, bundle, of_shard, run_all, settle
from polyeps_reproductions.trials import Result, Store, Trial
from small_studies import METHODS, figure, result, trial

from polyeps.errors import InputError

GRID = (0.2, 0.05)


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Trials that were run, without training anything; the smaller rate is the better one."""
    done: list[Trial] = []

    def perform(wanted: Trial, _: str) -> Result:
        done.append(wanted)
        return result(wanted, 0.9 - wanted.learning_rate)

    monkeypatch.setattr(running, "perform", perform)
    return done


def test_rates_are_chosen_and_everything_is_run_once(tmp_path: Path, performed: list[Trial]) -> None:
    wanted = list(trials_of(figure(), seeds=2))
    settled = run_all(wanted, Store(tmp_path), Means(grid=GRID))
    assert len(performed) == len(set(performed)) == len(METHODS) * len(FORMS) * (len(GRID) + 2)
    assert {one.learning_rate for one in settled} == {0.05}
    assert len(settled) == len(wanted)


def test_a_stopped_study_goes_on(tmp_path: Path, performed: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, store = list(trials_of(figure(), seeds=2)), Store(tmp_path)
    counted = vars(running)["perform"]

    def stopping(one: Trial, device: str) -> Result:
        if len(performed) == 15:
            raise KeyboardInterrupt
        found: Result = counted(one, device)
        return found

    monkeypatch.setattr(running, "perform", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_all(wanted, store, Means(grid=GRID))
    assert len(list(tmp_path.iterdir())) == 15
    monkeypatch.setattr(running, "perform", counted)
    run_all(wanted, store, Means(grid=GRID))
    assert Counter(performed).most_common(1)[0][1] == 1
    assert len(list(tmp_path.iterdir())) == len(performed) == 24
    run_all(wanted, store, Means(grid=GRID))
    assert len(performed) == 24


def test_shards_cover_everything_exactly_once() -> None:
    wanted = [*trials_of(FIGURES["3"], 2), *trials_of(FIGURES["10"], 2)]
    parts = [of_shard(wanted, (number, 7)) for number in range(1, 8)]
    assert Counter(one for part in parts for one in part) == Counter(set(wanted))
    assert min(map(len, parts)) > 0
    with pytest.raises(InputError, match="such as 3/8"):
        of_shard(wanted, (8, 7))


def test_shards_on_their_own_make_the_whole(tmp_path: Path, performed: list[Trial]) -> None:
    wanted = list(trials_of(figure(), seeds=2))
    for number in (1, 2, 3):
        run_all(wanted, Store(tmp_path), Means(grid=GRID, shard=(number, 3)))
    assert len(settle(wanted, Store(tmp_path), GRID)) == len(wanted)
    assert all(Store(tmp_path).has(one) for one in settle(wanted, Store(tmp_path), GRID))
    assert len(performed) == len(set(performed))


def test_what_is_not_chosen_is_left_out(tmp_path: Path) -> None:
    assert settle([trial(learning_rate=0.0), trial()], Store(tmp_path), GRID) == [trial()]


def test_bundles_hold_trials_of_the_same_clients() -> None:
    wanted = list(trials_of(FIGURES["3"], 3))
    parts = bundle(wanted, 12)
    assert sorted(one.key for part in parts for one in part) == sorted(one.key for one in wanted)
    assert all(len({one.people for one in part}) == 1 for part in parts)


def test_progress_is_told(tmp_path: Path, performed: list[Trial]) -> None:
    said: list[tuple[str, int, int]] = []
    run_all([trial(), trial(seed=2)], Store(tmp_path), Means(), lambda *one: said.append(one))
    assert said[-3:] == [("running", 0, 2), ("running", 1, 2), ("running", 2, 2)]
    assert len(performed) == 2


def test_processes_do_the_same_work(tmp_path: Path) -> None:
    wanted = [trial(), trial("pfa")]
    run_all(wanted, Store(tmp_path / "two"), Means(processes=2))
    run_all(wanted, Store(tmp_path / "one"), Means())
    for one in wanted:
        apart, alone = (Store(tmp_path / name).read(one) for name in ("two", "one"))
        assert apart is not None
        assert alone is not None
        assert apart["accuracy"] == alone["accuracy"]
