"""Full disks, a clock that was set back, a silo that exists twice, and contracts that nobody may serve or agree to."""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'polyeps[flower]'")

from support.real_federation import RealFederation, fill, small_disk, wait

from polyeps.deploy.contract import SignedContract, read_draft, signed_path
from polyeps.deploy.contract_job import digest_of_model
from polyeps.deploy.keys import new_key, new_node_key, public_of
from polyeps.deploy.kits import ServerTerms
from polyeps.deploy.processes import polyeps_command, supernode_command
from polyeps.ledger import Ledger

pytestmark = pytest.mark.processes
ROUNDS = 40  # more than there is time for: the run is stopped when all faults are over
BUDGETS = {"elm": (1.0, 1.6), "fir": (2.0, 16.0)}
_CLOCKS = ("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")


def test_full_disks_a_wrong_clock_a_double_silo_and_other_contracts(tmp_path: Path) -> None:
    with contextlib.ExitStack() as disks:
        for name in ("elm", "study"):
            disks.enter_context(small_disk(tmp_path / name, "3m"))
        it = RealFederation(tmp_path, ServerTerms(ROUNDS, enrolment=60, reply=15), BUDGETS)
        with it.running():
            it.start()
            it.serving(it.draft("study", ("local_steps = 10", "local_steps = 40")), "study")
            it.wait_rounds("study", 1)
            the_silos_disk_is_full(it)
            the_servers_disk_is_full(it)
            the_clock_is_set_back(it)
            the_silo_exists_twice(it, tmp_path / "twin")
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
    assert "budget" in it.refusals("elm")[-1]
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
    for name in BUDGETS:
        assert "whom the policy does not know" in it.refusals(name)[-1]
    for folder in ("second", "altered", "third"):
        assert not (it.folder / folder / "models").exists()


def charged_for_all_answers(it: RealFederation) -> None:
    """Nothing was answered that is not in a ledger, and nothing is there twice."""
    for name in BUDGETS:
        answers = it.answers("study")
        counted = {round for round, names in enumerate(answers) if name in names}
        assert len(counted) <= it.charges(name, "study") <= len(answers) + 1
