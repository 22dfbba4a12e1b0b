"""Faults of a real federation, one after the other: what is lost, and what is paid for twice, must be nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'polyeps[flower]'")

from support.real_federation import RealFederation, wait

from polyeps.deploy.kits import ServerTerms
from polyeps.model_files import read_model_file

pytestmark = pytest.mark.processes
ROUNDS = 14
BUDGETS = {"elm": (1.0, 8.0), "fir": (2.0, 16.0), "oak": (4.0, 24.0)}


def test_a_run_with_many_faults_loses_no_round_and_pays_for_none_twice(tmp_path: Path) -> None:
    it = RealFederation(tmp_path, ServerTerms(ROUNDS, enrolment=30, reply=40), BUDGETS)
    contract = it.draft("study", ("[silos]", "least_silos = 2\n[silos]"), ("local_steps = 10", "local_steps = 60"))
    with it.running():
        it.start_superlink()
        for name in ("elm", "fir"):
            it.start_site(name)
        it.wait_ready("elm", "fir")
        it.serving(contract, "study")
        it.wait_rounds("study", 1)

        # A silo that joins late takes part from then on.
        it.start_site("oak")
        wait(lambda: "oak" in it.answers("study")[-1], "oak takes part")

        # The network of one silo is cut, and the SuperNode of another is killed: the third one goes on alone.
        it.links["fir"].whole.clear()
        it.kill("supernode-oak")
        wait(lambda: {"elm"} in it.answers("study"), "a round of elm alone")
        it.links["fir"].whole.set()

        # Meanwhile a silo hangs in the middle of a task: it misses the round.
        it.wait_task("fir")
        behind = it.rounds("study")
        it.kill("silo-fir", signal.SIGSTOP)
        it.wait_rounds("study", behind + 1)
        it.kill("silo-fir", signal.SIGCONT)

        # A silo is killed in the middle of a task, and answers the same round after it was started again.
        wait(lambda: len(it.answers("study")[-1]) == 3, "all are back")
        it.wait_task("elm")
        it.kill("silo-elm")
        wait(lambda: "a task was cut off" in it.processes.log("silo-elm"), "elm excuses itself")

        # The server is killed when all have answered, and before it has written what they said.
        wait(lambda: len(it.answers("study")[-1]) == 3, "all are back")
        wait(lambda: it.rounds("study") in it.answered("elm", "study"), "elm has answered", pause=0.01)
        late = it.rounds("study")
        it.kill("serve-study", signal.SIGSTOP)
        heard = it.rounds("study") > late  # it was quicker than this test
        wait(lambda: all(late in it.answered(name, "study") for name in BUDGETS), "all have answered")
        charged = {name: it.charges(name) for name in BUDGETS}
        it.kill("serve-study")
        it.wait_rounds("study", late + 1)
        wait(lambda: "continuing after round" in it.processes.log("serve-study"), "it continues")
        if not heard:
            assert it.answers("study")[late] == set(BUDGETS)  # their replies were kept, and counted after all
            assert all(it.charges(name) <= charged[name] + it.rounds("study") - late for name in BUDGETS)

        # The SuperLink is killed in the middle of a round.
        it.wait_task("elm")
        it.restart_superlink()

        assert it.finished("study") == 0, it.tail("serve-study")
        answers = it.answers("study")
        assert len(answers) == ROUNDS
        for name in BUDGETS:
            counted = {round for round, names in enumerate(answers) if name in names}
            answered = it.answered(name, "study")
            assert counted <= answered
            assert it.charges(name) == len(answered), name  # once for every round, whatever happened
    (model,) = (tmp_path / "study" / "models").iterdir()
    assert read_model_file(model)[0].rounds == ROUNDS
