"""Faults of real federations, automated: what is lost, and what is paid for twice, must be nothing.

Two federations run side by side, since they mostly wait; docs/reference/faults.md is the table of what is tried here.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'polyeps[flower]'")

from support.namespaces import can_separate
from support.real_federation import RealFederation, can_mount, fill, small_disk, wait

from polyeps.deploy.contract import SignedContract, read_draft, signed_path
from polyeps.deploy.contract_job import digest_of_model
from polyeps.deploy.keys import new_key, new_node_key, public_of
from polyeps.deploy.kits import ServerTerms
from polyeps.deploy.processes import polyeps_command, supernode_command
from polyeps.ledger import Ledger
from polyeps.model_files import read_model_file

pytestmark = pytest.mark.processes
ROUNDS = 14
THREE = {"elm": (1.0, 8.0), "fir": (2.0, 16.0), "oak": (4.0, 24.0)}
TWO = {"elm": (1.0, 1.2), "fir": (2.0, 16.0)}
_CLOCKS = ("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")


def test_faults_lose_no_round_no_money_and_no_model(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        both = []
        for scenario in (processes_and_lines, machines_and_contracts):
            (tmp_path / scenario.__name__).mkdir()
            both.append(threads.submit(scenario, tmp_path / scenario.__name__))
    if problems := [problem for one in both if isinstance(problem := one.exception(), Exception)]:
        raise ExceptionGroup("faults", problems)


def test_disks_can_be_filled_and_clocks_set() -> None:
    """Where this is skipped, so were these faults."""
    if not can_mount():
        pytest.skip("full disks: needs the right to mount a small one")
    if not can_separate():
        pytest.skip("a network of its own for a silo: needs the right to make one; its line was cut in a relay")
    if not any(Path(one).exists() for one in _CLOCKS):
        pytest.skip("a clock that is set back: needs libfaketime (Debian: faketime)")


def processes_and_lines(folder: Path) -> None:
    """Processes that are killed or hang, a line that is cut, a silo that comes late: every round is run."""
    it = RealFederation(folder, ServerTerms(ROUNDS, enrolment=30, reply=40), THREE, lines=["fir"])
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
        it.links["fir"].cut()
        it.kill("supernode-oak")
        wait(lambda: {"elm"} in it.answers("study"), "a round of elm alone")
        it.links["fir"].mend()

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
        wait(lambda: all(late in it.answered(name, "study") for name in THREE), "all have answered")
        charged = {name: it.charges(name) for name in THREE}
        it.kill("serve-study")
        it.wait_rounds("study", late + 1)
        wait(lambda: "continuing after round" in it.processes.log("serve-study"), "it continues")
        if not heard:
            assert it.answers("study")[late] == set(THREE)  # their replies were kept, and counted after all
            assert all(it.charges(name) <= charged[name] + it.rounds("study") - late for name in THREE)

        # The SuperLink is killed in the middle of a round.
        it.wait_task("elm")
        it.restart_superlink()

        assert it.finished("study") == 0, it.tail("serve-study")
        answers = it.answers("study")
        assert len(answers) == ROUNDS
        for name in THREE:
            counted = {round for round, names in enumerate(answers) if name in names}
            answered = it.answered(name, "study")
            assert counted <= answered
            assert it.charges(name) == len(answered), name  # once for every round, whatever happened
    (model,) = (folder / "study" / "models").iterdir()
    assert read_model_file(model)[0].rounds == ROUNDS


def machines_and_contracts(folder: Path) -> None:
    """Full disks, a clock that was set back, a silo that exists twice, contracts that nobody may serve or agree to."""
    mounted = can_mount()
    with contextlib.ExitStack() as disks:
        for name in ("elm", "study") if mounted else ():
            disks.enter_context(small_disk(folder / name, "3m"))
        terms = ServerTerms(40, enrolment=60, reply=15)  # more rounds than there is time for: it is stopped
        it = RealFederation(folder, terms, TWO)
        with it.running():
            it.start()
            it.serving(it.draft("study", ("local_steps = 10", "local_steps = 40")), "study")
            it.wait_rounds("study", 1)
            if mounted:
                the_silos_disk_is_full(it)
                the_servers_disk_is_full(it)
            the_clock_is_set_back(it)
            the_silo_exists_twice(it, folder / "twin")
            it.release("serve-study")
            it.processes.stop("serve-study", signal.SIGTERM)
            other_contracts(it)


def the_silos_disk_is_full(it: RealFederation) -> None:
    """It declines, the others go on, and with room on the disk it takes part again; no release went unrecorded."""
    filling = fill(it.silo("elm"))
    wait(lambda: {"fir"} in it.answers("study"), "a round of fir alone")
    wait(lambda: "No space left" in it.tail("silo-elm") or "disk is full" in it.tail("silo-elm"), it.tail("silo-elm"))
    filling.unlink()
    back = it.rounds("study")
    wait(lambda: any("elm" in names for names in it.answers("study")[back:]), "elm is back")
    charged_for_all_answers(it)


def the_servers_disk_is_full(it: RealFederation) -> None:
    """It ends with a sentence, and goes on where it was when there is room; no silo pays for the round again."""
    filling = fill(it.folder / "study")
    wait(lambda: "make room on the disk" in it.tail("serve-study"), it.tail("serve-study"))
    done = it.rounds("study")
    filling.unlink()
    it.wait_rounds("study", done + 1)
    assert "Traceback" not in it.processes.log("serve-study")
    charged_for_all_answers(it)


def the_clock_is_set_back(it: RealFederation) -> None:
    """A silo whose clock is two days back is turned away by its own SuperNode, and comes back with the right time."""
    library = next((one for one in _CLOCKS if Path(one).exists()), None)
    if library is None:
        return
    it.release("silo-elm")
    assert it.processes.stop("silo-elm") == 0
    command = polyeps_command("silo", "--policy", str(it.silo("elm") / "policy.toml"))
    it.processes.start("silo-elm", ["env", f"LD_PRELOAD={library}", "FAKETIME=-2d", *command])
    wait(lambda: "this machine's clock" in it.tail("silo-elm"), it.tail("silo-elm"))
    it.processes.stop("silo-elm")
    it.start_silo("elm")
    back = it.rounds("study")
    wait(lambda: any("elm" in names for names in it.answers("study")[back:]), "elm is back")
    charged_for_all_answers(it)


def the_silo_exists_twice(it: RealFederation, twin: Path) -> None:
    """A copy of a silo, with its key, its records and its ledger, is left out while the first is there."""
    shutil.copytree(it.silo("elm"), twin)
    for name in ("node.key", "node.pub"):
        (twin / name).unlink()
    new_node_key(twin / "node.key")
    policy, port = twin / "policy.toml", it.another_port()
    policy.write_text(policy.read_text().replace(str(it.ports["elm"]), str(port)))
    it.register(twin)
    it.keep("supernode-twin", supernode_command(twin, it.server / "ca.crt", f"127.0.0.1:{it.port}", port))
    it.keep("silo-twin", polyeps_command("silo", "--policy", str(policy)))
    wait(lambda: "claim the name of client 'elm'" in it.processes.log("serve-study"), "the twin is noticed")
    done = it.rounds("study")
    it.wait_rounds("study", done + 2)
    with contextlib.closing(Ledger(twin / "ledger.db")) as ledger:
        copied = ledger.account("elm").charges
    assert copied <= it.charges("elm") - 1  # it was asked for nothing
    for name in ("silo-twin", "supernode-twin"):
        it.release(name)
        it.processes.stop(name)
    charged_for_all_answers(it)


def other_contracts(it: RealFederation) -> None:
    """Nobody ready, or all declining: the server stops with the reason, and there is no model."""
    soon = ("enrolment = 60", "enrolment = 15")
    second = it.draft("second", soon)
    it.serving(second, "study", again=False)
    assert it.finished("study") == 2
    assert "holds the run of another contract" in it.tail("serve-study")

    # elm has promised most of its budget to the first contract.
    charged = it.charges("elm")
    it.serving(second, "second", again=False)
    assert it.finished("second") == 2
    assert "1 of 2 silos enrolled within 15 s, without elm; 1 connected nodes declined" in it.tail("serve-second")
    assert "so nothing was reserved" in it.refusals("elm")[-1]
    assert it.charges("elm") == charged

    stranger = new_key(it.folder / "stranger.key")
    path = it.draft("third", soon)
    draft = read_draft(path, public_of(stranger), digest_of_model)
    signed = SignedContract.sign(draft, stranger).encode()
    signed_path(path).write_bytes(signed.replace(b'"rounds":40', b'"rounds":41'))
    it.serving(path, "altered", again=False)
    assert it.finished("altered") == 2
    assert "the signature of the contract does not hold" in it.tail("serve-altered")
    signed_path(path).write_bytes(signed)
    it.serving(path, "third", again=False)
    assert it.finished("third") == 2
    assert "0 of 2 silos enrolled within 15 s, without elm, fir; 2 connected nodes" in it.tail("serve-third")
    for name in TWO:
        assert "whom the policy does not know" in it.refusals(name)[-1]
    for folder in ("second", "altered", "third"):
        assert not (it.folder / folder / "models").exists()


def charged_for_all_answers(it: RealFederation) -> None:
    """Nothing was answered that is not in a ledger, and nothing is there twice."""
    for name in TWO:
        answers = it.answers("study")
        counted = {round for round, names in enumerate(answers) if name in names}
        assert len(counted) <= it.charges(name, "study") <= len(answers) + 1
