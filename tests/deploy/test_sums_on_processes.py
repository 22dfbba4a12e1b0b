"""Secure sums on real processes: a silo is killed in the middle of a sum, and nobody on the wire sees a part of one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'polyeps[flower]'")

from support.capture import Capture, can_capture, capturing
from support.real_federation import RealFederation, wait

from polyeps.deploy.kits import ServerTerms
from polyeps.model_files import read_model_file

pytestmark = pytest.mark.processes
ROUNDS = 2
THREE = {"elm": (1.0, 8.0), "fir": (1.0, 8.0), "oak": (1.0, 8.0)}
TERMS = {
    "fedhdp": 'name = "fedhdp"\ntrust = "secure-sum"\nnoise = "discrete-gaussian"',
    "cmp-fed": 'name = "cmp-fed"\nrank = 1\nnoise = "discrete-gaussian"',
}


@pytest.fixture
def it(tmp_path: Path) -> Iterator[RealFederation]:
    found = RealFederation(tmp_path, ServerTerms(ROUNDS, enrolment=90, reply=90), THREE)
    found.hasty = True
    keys = found.signed.contract.silos
    for name in THREE:
        path = found.silo(name) / "policy.toml"
        text = path.read_text().replace('algorithms = ["fedavg"]', 'algorithms = ["fedhdp", "cmp-fed"]')
        text = text.replace('models = ["logistic"]', 'models = ["mlp"]').replace(
            "discloses = []", 'discloses = ["epsilon", "group"]'
        )
        text = text.replace('schedule = "adaptive"', 'schedule = "adaptive"\nprotects = "silo"')
        others = "".join(f'{one} = "{key}"\n' for one, key in keys.items() if one != name)
        path.write_text(f"{text}\n[sums]\nleast_silos = 3\ncolluders = 0\n[sums.silos]\n{others}")
    with found.running():
        yield found


def test_a_silo_that_is_killed_in_a_sum_is_counted_once(it: RealFederation) -> None:
    changes = [
        ('name = "fedavg"', TERMS["cmp-fed"]),
        ('name = "logistic"', 'name = "mlp"\nhidden = [4]'),
        ("[data]", "".join(["[epsilon]\n", *(f"{name} = 1.0\n" for name in THREE), "\n[data]"])),
    ]
    with capturing() if can_capture() else contextlib.nullcontext(Capture()) as capture:
        it.start()
        it.wait_ready(*THREE)
        for method in TERMS:
            contract = it.draft(method, (changes[0][0], TERMS[method]), *changes[1:])
            it.serving(contract, method)
            it.wait_rounds(method, 1)
            it.wait_task("elm")
            it.kill("silo-elm", signal.SIGKILL)
            assert it.finished(method) == 0, it.tail(f"serve-{method}")
            answers = it.answers(method)
            assert len(answers) == ROUNDS
            assert answers[0] == set(THREE)
            for name in THREE:
                assert it.charges(name, method) <= ROUNDS
                assert sum(name in names for names in answers) <= it.charges(name, method)
            (model,) = (it.folder / method / "models").iterdir()
            assert read_model_file(model)[0].rounds == ROUNDS
        wait(lambda: it.says("silo-elm", "is ready"), "elm is back")
    if can_capture():
        outside = capture.crossed(it.port)
        assert len(outside) > 10_000
        for word in (b"polyeps", b"config_records", b"ConfigRecord", b"update", b"message"):
            assert word not in outside, word
