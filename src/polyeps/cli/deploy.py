"""`polyeps silo`, `polyeps serve` and `polyeps deploy`: a federation of silos on Flower."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from polyeps.cli.output import Json, print_either, print_json, print_table, quiet, remark
from polyeps.errors import InputError, escaped

deploy_app = typer.Typer(help="Set up a federation of silos on Flower, try it, check it.", no_args_is_help=True)
SuperLink = Annotated[str, typer.Option(help="The SuperLink, as HOST:PORT.")]
Folder = Annotated[Path, typer.Argument(help="The folder to make.")]


def _need_flower() -> None:
    """Refuse to go on without Flower, and keep it from contacting anybody but the federation."""
    from polyeps.deploy.processes import OFFLINE

    os.environ.update(OFFLINE)  # before it is imported
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("deployment needs Flower; pip install 'polyeps[flower]'") from None


_LONGEST = 10_000  # letters of one entry of a log: a server decides what is quoted


class _Lines(logging.Formatter):
    """Log lines whose text a server cannot make look like other lines, or like commands to a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n  ".join(map(escaped, super().format(record)[:_LONGEST].split("\n")))


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        facts = {"time": self.formatTime(record), "level": record.levelname, "message": record.getMessage()[:_LONGEST]}
        if record.exc_info:
            facts["error"] = self.formatException(record.exc_info)[:_LONGEST]
        return json.dumps(facts)


def _logging(as_json: bool) -> None:
    """Log to stderr with times: a silo runs for days, and under a service manager."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else _Lines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING if quiet() else logging.INFO)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def silo_command(
    policy: Annotated[Path, typer.Option(help="The silo's policy, a TOML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Log one JSON object a line.")] = False,
) -> None:
    """Take part in runs as this silo, until it is stopped: beside a SuperNode started with --isolation process."""
    _need_flower()
    from polyeps.deploy.executor import run_silo, stopping
    from polyeps.deploy.policy import read_policy

    _logging(as_json)
    _few_threads()
    with stopping() as stop:
        run_silo(read_policy(policy), stop)


def superlink(
    folder: Annotated[Path, typer.Option("--kit", help="Folder with the server's keys, certificates and secret.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8000,
) -> None:
    """Run Flower's SuperLink with TLS, authenticated SuperNodes and an operator who knows the kit's secret."""
    _need_flower()
    from polyeps.deploy.flower_runtime import check_flower
    from polyeps.deploy.guarded_superlink import run_superlink

    check_flower()
    run_superlink(folder, host, port)


def serve_command(
    contract: Annotated[Path, typer.Argument(help="The contract, signed with `polyeps deploy sign`.")],
    superlink: SuperLink = "127.0.0.1:8000",
    folder: Annotated[
        Path | None, typer.Option("--kit", help="Folder with ca.crt and superlink.secret; that of the contract.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run; runs/NAME by default.")
    ] = None,
    test: Annotated[Path | None, typer.Option(help="Test records of the server's own, by the same schema.")] = None,
    as_json: Json = False,
) -> None:
    """Serve a contract: wait for its silos, run its rounds. Repeat the command to continue after a stop."""
    _need_flower()
    from polyeps.deploy.contract import read_signed
    from polyeps.deploy.flower_runtime import Endpoint, started_run
    from polyeps.deploy.keys import read_secret
    from polyeps.deploy.serving import serve_contract

    _few_threads()
    signed = read_signed(contract)
    kit = folder or contract.parent
    endpoint = Endpoint(superlink, read_secret(kit / "superlink.secret"), kit / "ca.crt")
    place = output or Path("runs") / signed.contract.name
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        connect = partial(started_run, endpoint, place / "flower-run")
        served = serve_contract(signed, connect, place, test=test, progress=remark)
    except KeyboardInterrupt:
        remark("stopped; repeat the command to continue")
        raise typer.Exit(130) from None
    figures = asdict(served)
    if as_json:
        print_json({key: str(value) if isinstance(value, Path) else value for key, value in figures.items()})
        return
    print(f"{served.rounds} rounds: {served.reason}")
    if served.metrics:
        print(", ".join(f"{name} {value:.4g}" for name, value in served.metrics.items()))
    if served.model is not None:
        print(f"the model is {served.model}")


def _few_threads() -> None:
    import torch

    torch.set_num_threads(1)  # models this small gain nothing from more, and threads wait for busy neighbours


@deploy_app.command("init")
def init_kit(
    folder: Folder,
    silo: Annotated[
        str | None, typer.Option(help="Make the kit of a silo of this name, instead of a server's.")
    ] = None,
    name: Annotated[str, typer.Option(help="The name of the run, for a server.")] = "federation",
    host: Annotated[list[str] | None, typer.Option(help="A name or address of the server; may be repeated.")] = None,
    signer: Annotated[str, typer.Option(help="The public key of the contracts' signer, for a silo.")] = "0" * 64,
    as_json: Json = False,
) -> None:
    """Make keys, certificates, secrets and templates: for a server, or for a silo."""
    from polyeps.deploy.kits import SiloTerms, server_kit, silo_kit

    if silo is None:
        key = server_kit(folder, name, host or ["127.0.0.1", "localhost"], {})
        said = "contracts are signed by"
    else:
        key = silo_kit(folder, silo, SiloTerms(signer=signer))
        said = f"the key of silo {silo!r} is"
    files = sorted(path.name for path in folder.iterdir())
    figures = {"folder": str(folder), "key": key, "files": files}
    print_either(as_json, figures, f"{folder} holds {', '.join(files)}.\n{said} {key}")


@deploy_app.command("sign")
def sign_contract(
    contract: Annotated[Path, typer.Argument(help="The draft of a contract, a TOML file.")],
    key: Annotated[Path, typer.Option(help="The signer's private key.")],
    as_json: Json = False,
) -> None:
    """Check and sign a contract; the signed form is written beside it, with the ending .signed."""
    from polyeps.deploy.contract import SignedContract, read_draft, signed_path
    from polyeps.deploy.contract_job import check_deployable, digest_of_model
    from polyeps.deploy.keys import public_of, read_key
    from polyeps.ledger.head_file import replace_file

    own = read_key(key)
    draft = read_draft(contract, public_of(own), digest_of_model)
    check_deployable(draft)
    signed = SignedContract.sign(draft, own)
    replace_file(signed_path(contract), signed.encode())
    facts = {"file": str(signed_path(contract)), "digest": draft.digest, "signer": draft.signer, "run": draft.run}
    print_either(as_json, facts, f"{facts['file']}: contract {draft.digest[:16]}…, signed by {draft.signer}")


@deploy_app.command("register")
def register(
    node: Annotated[Path, typer.Argument(help="The public key of a silo's SuperNode, node.pub.")],
    kit: Annotated[Path, typer.Option(help="The server's folder, with ca.crt and superlink.secret.")],
    superlink: SuperLink = "127.0.0.1:8000",
    as_json: Json = False,
) -> None:
    """Let a silo's SuperNode connect to the SuperLink; run this on the server's machine."""
    _need_flower()
    from polyeps.deploy.flower_runtime import Endpoint, register_node
    from polyeps.deploy.keys import read_secret

    number = register_node(Endpoint(superlink, read_secret(kit / "superlink.secret"), kit / "ca.crt"), node)
    print_either(as_json, {"node": str(number), "key": str(node)}, f"{node.name} is registered, as node {number}")


@deploy_app.command("demo")
def deploy_demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make.")] = Path("deploy-demo"),
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds to train.")] = 5,
    as_json: Json = False,
) -> None:
    """Bring up a SuperLink and three silos on this machine, train a model, show the ledgers, take everything down."""
    _need_flower()
    from polyeps.deploy.demo import run_demo

    _few_threads()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # so that nothing is left running
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    figures = run_demo(output, rounds, remark)
    if as_json:
        print_json(figures)
        return
    columns = ["silo", *next(iter(figures["silos"].values()))]
    print_table(columns, [[name, *account.values()] for name, account in figures["silos"].items()])
    measured = ", ".join(f"{name} {value:.4g}" for name, value in figures["metrics"].items())
    print(f"{figures['rounds']} rounds: {figures['reason']}; {measured}; {figures['seconds']:.0f} s in all")
    print(f"the model is {figures['model']}; every silo's folder with its ledger is in {output}")


@deploy_app.command("doctor")
def doctor(
    policy: Annotated[Path | None, typer.Option(help="Check the set-up of the silo with this policy.")] = None,
    kit: Annotated[Path | None, typer.Option(help="Check the set-up of the server with this kit.")] = None,
    superlink: Annotated[
        str | None, typer.Option(help="The SuperLink, as HOST:PORT; for a silo, to check the way to it as well.")
    ] = None,
    certificates: Annotated[
        Path | None, typer.Option(help="The server's ca.crt, for a silo; beside the policy by default.")
    ] = None,
    contract: Annotated[Path | None, typer.Option(help="A signed contract to check as well.")] = None,
    test: Annotated[Path | None, typer.Option(help="The server's test records, to check with the contract.")] = None,
    as_json: Json = False,
) -> None:
    """Check the set-up of a silo or of a server; say what is wrong in one sentence each, and exit with 1."""
    _need_flower()
    from polyeps.deploy.doctor import check_server, check_silo

    if policy is not None and kit is None:
        findings = list(check_silo(policy, contract, superlink, certificates))
    elif kit is not None and policy is None:
        findings = list(check_server(kit, superlink or "127.0.0.1:8000", contract, test))
    else:
        raise InputError("give --policy to check a silo, or --kit to check a server")
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.right else 'WRONG'} {finding.check}: {finding.said}")
    if not all(finding.right for finding in findings):
        raise typer.Exit(1)


@deploy_app.command("status")
def status(
    folder: Annotated[Path | None, typer.Argument(help="The folder of a run that is served.")] = None,
    policy: Annotated[Path | None, typer.Option(help="The policy of a silo, to see its accounts.")] = None,
    as_json: Json = False,
) -> None:
    """Show the rounds of a run that is served, or the contracts, accounts and last events of a silo."""
    from polyeps.deploy.policy import read_policy
    from polyeps.deploy.status import server_status, silo_status

    if (folder is None) == (policy is None):
        raise InputError("give the folder of a run, or --policy of a silo")
    if policy is not None:
        found = silo_status(read_policy(policy))
        tables = {"accounts": found["accounts"], "contracts": found["contracts"], "last events": found["events"]}
        tables["figures on its own test records, never sent"] = found["figures"]
    else:
        assert folder is not None
        found = server_status(folder)
        tables = {"silos": found["silos"], "rounds": found["history"]}
    if as_json:
        print_json(found)
        return
    if folder is not None:
        print(f"{found['name']}: {found['status']}, {found['rounds']} rounds: {found['reason']}".removesuffix(": "))
    for title, rows in tables.items():
        if rows:
            columns = list(dict.fromkeys(key for row in rows for key in row))
            print_table(columns, [[row.get(key) for key in columns] for row in rows], title)


@deploy_app.command("withdraw")
def withdraw_silo(
    contract: Annotated[str, typer.Argument(help="The contract's name, or the first digits of its digest.")],
    policy: Annotated[Path, typer.Option(help="The silo's policy.")],
    as_json: Json = False,
) -> None:
    """End a silo's part in a contract for good: no further task is answered, and what was not used is free again."""
    from polyeps.deploy.policy import read_policy
    from polyeps.deploy.status import withdraw

    found = withdraw(read_policy(policy), contract)
    said = f"withdrawn from {found['contract']!r}; spent {found['spent']:.4g}, left {found['left']:.4g}"
    print_either(as_json, found, said)
