import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from polyeps_reproductions.trials import Store, perform
from small_studies import SETTING, result, trial

from polyeps.accounting.certificate import Form
from polyeps.errors import InputError
from polyeps.experiment import job as build
from polyeps.server import serve


@pytest.mark.parametrize("form", ["published", "sound"])
def test_a_trial_returns_its_measurements(form: Form) -> None:
    found = perform(trial("pfa-plus", form))
    assert 0 <= found["final"] <= 1
    assert set(found["accuracy"]) <= {1, 2, 3}
    assert len(found["accuracy"]) == found["rounds"] >= 2
    assert 0 < found["spent_share"] <= 1 + 1e-9
    assert 0 < found["uplink"] * 2**20 < found["up"]
    assert 0 < found["up_private"] < found["up"]
    assert found["settings"]["algorithm"][0]["form"] == form
    json.dumps(found)


def test_the_same_trial_gives_the_same_result() -> None:
    first, second = perform(trial()), perform(trial())
    assert first["accuracy"] == second["accuracy"]
    assert perform(replace(trial(), seed=2))["accuracy"] != first["accuracy"]


def test_without_noise_nothing_is_spent() -> None:
    assert perform(trial("non-private"))["spent_share"] is None


def test_choosing_stops_early_under_the_noise_of_all_rounds() -> None:
    short = trial(learning_rate=None).choices()[0]
    assert (short.rounds, short.validation) == (2, True)
    assert perform(replace(short, rounds=1))["rounds"] == 1
    assert perform(replace(short, rounds=None))["rounds"] >= 2


def test_norms_are_kept_when_asked_for() -> None:
    found = perform(trial(norms=True))
    assert all(length > 0 for lengths in found["norms"].values() for length in lengths)
    assert len(found["epsilons"]) == 6
    assert "norms" not in perform(trial())


def test_different_trials_have_different_names() -> None:
    one = trial()
    others = [replace(one, seed=2), trial(learning_rate=0.1), trial("pfa"), trial(form="published")]
    others += [replace(one, validation=True), replace(SETTING, rounds=4).cell("fedavg", "sound", 0.2).trial]
    assert len({one.key, *(other.key for other in others)}) == len(others) + 1


def test_a_result_is_kept_whole(tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "work"), trial()
    assert store.read(wanted) is None
    store.write(wanted, result(wanted, 0.5))
    assert store.has(wanted)
    again = store.read(wanted)
    assert again is not None
    assert again["final"] == 0.5
    assert [path.name for path in store.folder.iterdir()] == [f"{wanted.key}.json"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store, wanted = Store(tmp_path), trial()
    store.path(wanted).write_text("{")
    with pytest.raises(InputError, match="damaged; remove it"):
        store.read(wanted)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another --work"):
        Store(tmp_path / "file" / "work")


@pytest.mark.parametrize("form", ["published", "sound"])
def test_the_server_weighs_by_the_budgets_clients_declare(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    disclosed: list[float | None] = []

    def spying(algorithm: Any, transport: Any, *rest: Any, **named: Any) -> Any:
        disclosed.extend(profile.epsilon for profile in transport.profiles())
        return serve(algorithm, transport, *rest, **named)

    monkeypatch.setattr(build, "serve", spying)
    perform(trial("weiavg", form))
    assert disclosed == list(SETTING.epsilons or ())
