"""Shells complete commands and options, without loading torch."""

import os
import subprocess
import sys

import pytest
from support.commands import run

START = (
    "import sys; sys.argv = ['polyeps']\nfrom polyeps.cli import main\n"
    "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
)


@pytest.mark.parametrize(
    ("typed", "offered", "not_offered"),
    [
        ("polyeps cert", {"certify", "certificate"}, {"run"}),
        ("polyeps ledger ", {"show", "history", "verify"}, {"certify"}),
        ("polyeps run --tr", {"--track", "--trust-code"}, {"--json"}),
        ("polyeps certify dp-sgd --sampler ", {"poisson", "fixed"}, {"--sampler"}),
    ],
)
def test_bash_offers_what_fits(typed: str, offered: set[str], not_offered: set[str]) -> None:
    words = typed.split(" ")
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1), "_POLYEPS_COMPLETE": "complete_bash"}
    ran = subprocess.run([sys.executable, "-c", START], env=os.environ | asked, capture_output=True, text=True)
    found = set(ran.stdout.split())
    assert offered <= found, ran.stderr
    assert not not_offered & found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(shell: str) -> None:
    asked = os.environ | {"_POLYEPS_COMPLETE": f"source_{shell}"}
    ran = subprocess.run([sys.executable, "-c", START], env=asked, capture_output=True, text=True, check=True)
    assert "_POLYEPS_COMPLETE" in ran.stdout


def test_help_names_completion() -> None:
    assert "--install-completion" in run("--help").stdout
