"""A name that is nearly right is answered with the right one: commands, options, values, settings, clients."""

from pathlib import Path

import pytest
from support.commands import refused, run

from polyeps.errors import suggest

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "examples" / "digits.toml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / "run"
    run("run", DIGITS, "--set", "rounds=1", "--set", "algorithm=weiavg", "--output", str(made))
    return made


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ledger verfy --file x", "verify"),
        ("deploy demoo", "demo"),
        ("ledger show --fil x", "--file"),
        ("run {digits} --out x", "--output"),
        ("certify dp-sgd --sampler poison --records 9 --batch 2 --steps 3 --sigma 1", "poisson"),
        ("export {run} --format onx", "onnx"),
        ("run {digits} --set algorithm=weiagv", "weiavg"),
        ("run {digits} --set algorithm.form=publishd", "published"),
        ("run {digits} --set data.name=diigts", "digits"),
        ("run {digits} --set data.partition=shard", "shards"),
        ("run {digits} --set model.name=logistik", "logistic"),
        ("run {digits} --set model.encoder=scatering", "scattering"),
        ("run {digits} --set training.kind=gradiant", "gradient"),
        ("run {digits} --set training.clipp=1", "clip"),
        ("run {digits} --track tensorbord", "tensorboard"),
        ("plan --distribution unifrom --clients 2 --records 9 --batch 2 --local-steps 1 --rounds 1", "uniform"),
        ("data show mnits", "mnist"),
        ("data show digits --partition dirichlett --clients 3", "dirichlet"),
        ("certificate {run} 0 --method weiavgg", "weiavg"),
        ("predict {run} {digits} --method weiavgg", "weiavg"),
        ("ledger show --file {run}/ledgers/weiavg-1.db --client 00", "0"),
        ("audit --only fedhpd", "fedhdp"),
    ],
)
def test_what_may_be_meant_is_said(typed: str, meant: str, folder: Path) -> None:
    words = typed.format(run=folder, digits=DIGITS).split()
    spoken = run(*words, status=2)
    assert f"id you mean {meant!r}?" in spoken.stderr
    assert spoken.stdout == ""


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        ("run x.toml --file x", "No such option '--file'"),
        ("ledger show", "Missing option '--file'"),
        ("ledger page x.db", "Got unexpected extra argument (x.db)"),
        ("watch x --port 80x", "Invalid value for '--port'"),
    ],
)
def test_where_nothing_is_near_the_help_is_named(typed: str, wrong: str) -> None:
    spoken = run(*typed.split(), status=2).stderr
    assert spoken.startswith(f"polyeps: {wrong}")
    command = typed.split()[: 2 if typed.startswith("ledger") else 1]
    assert spoken.endswith(f"; see polyeps {' '.join(command)} -h\n")


def test_a_client_that_is_nearly_one(tmp_path: Path) -> None:
    ledger = str(tmp_path / "six.db")
    for name in ("cedar", "elm"):
        run("ledger", "set-budget", "--file", ledger, "--client", name, "--epsilon", "1")
    refused("ledger", "show", "--file", ledger, "--client", "ceder", naming=("did you mean 'cedar'?",))
    refused("ledger", "show", "--file", ledger, "--client", "pine", naming=("set one first",))


def test_names_that_are_far_away_are_listed() -> None:
    assert suggest("xyz", ["fedavg", "pfa"]) == "choose one of fedavg, pfa"
    assert suggest("xyz", [], "set one first") == "set one first"
    assert suggest("DP_SGD", ["dp-sgd"]) == "did you mean 'dp-sgd'?"
    assert suggest("xyz", []) == "there is none"
