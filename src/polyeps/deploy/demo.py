"""A whole federation on this machine: a SuperLink, three SuperNodes and three silos, with TLS and authenticated nodes.

The patients of three hospitals are invented (`data.hospitals`); three further hospitals are the server's test records.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from polyeps.accounting.affordability import known_epsilon
from polyeps.data.hospitals import hospitals_csv
from polyeps.deploy.contract import SignedContract, read_draft, signed_path
from polyeps.deploy.contract_job import digest_of_model
from polyeps.deploy.flower_runtime import Endpoint, register_node, started_run
from polyeps.deploy.keys import public_of, read_key, read_secret
from polyeps.deploy.kits import ServerTerms, SiloTerms, server_kit, silo_kit
from polyeps.deploy.processes import (
    Processes,
    free_ports,
    polyeps_command,
    superlink_command,
    supernode_command,
    wait_for_port,
)
from polyeps.deploy.serving import Served, serve_contract
from polyeps.ledger import Ledger
from polyeps.ledger.head_file import replace_file

# Hospitals of the demonstration: the ε of each for a run, and in all its runs.
BUDGETS = {"elm": (1.0, 4.0), "fir": (2.0, 8.0), "oak": (4.0, 12.0)}


class DemoFederation:
    """The files of a federation on this machine, and the processes that make it up."""

    def __init__(
        self,
        folder: Path,
        terms: ServerTerms,
        environment: Mapping[str, str] | None = None,
        budgets: Mapping[str, tuple[float, float]] = BUDGETS,
    ) -> None:
        self.folder, self.server, self.budgets = folder.absolute(), folder.absolute() / "server", budgets
        self.processes = Processes(self.folder, environment or {})
        self.port, *ports = free_ports(1 + len(budgets))
        self.ports = dict(zip(budgets, ports, strict=True))
        self._make(terms)

    def _make(self, terms: ServerTerms) -> None:
        """Make all kits, and write every hospital's records into its own folder."""
        public = {
            name: silo_kit(self.silo(name), name, SiloTerms(in_all, in_a_run, port=self.ports[name]))
            for name, (in_a_run, in_all) in self.budgets.items()
        }
        signer = server_kit(self.server, "demo", ["127.0.0.1", "localhost"], public, terms)
        header, *rows = csv.reader(io.StringIO(hospitals_csv()))
        for name in self.budgets:
            policy = self.silo(name) / "policy.toml"
            policy.write_text(policy.read_text().replace("0" * 64, signer))
            _write_records(self.silo(name) / "records.csv", header, [row for row in rows if row[0] == name])
        _write_records(self.server / "test.csv", header, [row for row in rows if row[0] not in self.budgets])
        self.sign()

    def sign(self) -> SignedContract:
        """Sign the contract as it stands."""
        draft, key = self.server / "contract.toml", read_key(self.server / "signer.key")
        signed = SignedContract.sign(read_draft(draft, public_of(key), digest_of_model), key)
        replace_file(signed_path(draft), signed.encode())
        self.signed = signed
        return signed

    def silo(self, name: str) -> Path:
        return self.folder / name

    @property
    def endpoint(self) -> Endpoint:
        secret = read_secret(self.server / "superlink.secret")
        return Endpoint(f"127.0.0.1:{self.port}", secret, self.server / "ca.crt")

    def start_superlink(self, host: str = "127.0.0.1") -> None:
        process = self.processes.start("superlink", superlink_command(self.server, host, self.port))
        wait_for_port(self.port, process)

    def start_supernode(self, name: str) -> None:
        command = supernode_command(self.silo(name), self.server / "ca.crt", f"127.0.0.1:{self.port}", self.ports[name])
        self.processes.start(f"supernode-{name}", command)

    def start_silo(self, name: str) -> None:
        command = polyeps_command("silo", "--policy", str(self.silo(name) / "policy.toml"))
        self.processes.start(f"silo-{name}", command)

    def start(self) -> None:
        """Start everything but the server."""
        self.start_superlink()
        for name in self.budgets:
            self.start_site(name)

    def start_site(self, name: str) -> None:
        """Register the SuperNode of a silo, and start both."""
        register_node(self.endpoint, self.silo(name) / "node.pub")
        self.start_supernode(name)
        self.start_silo(name)

    def serve(self, progress: Callable[[str], None] = lambda _: None) -> Served:
        connect = partial(started_run, self.endpoint, self.folder / "run" / "flower-run")
        return serve_contract(
            self.signed, connect, self.folder / "run", test=self.server / "test.csv", progress=progress
        )

    def accounts(self) -> dict[str, dict[str, Any]]:
        """Return what the ledger of every silo says."""
        found = {}
        for name in self.budgets:
            with closing(Ledger(self.silo(name) / "ledger.db")) as ledger:
                account = ledger.account(name)
            budget, history = account.terms.budget, account.history
            known = known_epsilon(history, budget.delta, account.terms.adjacency, "pld") if history else 0.0
            found[name] = {
                "delta": budget.delta,
                "limit of a run": self.budgets[name][0],
                "this run": known,  # exactly; it is the only one
                "limit in all": budget.epsilon,
                "spent in all": account.spent(),  # by the ledger's filter, which holds for any further runs
                "charges": account.charges,
            }
        return found


def _write_records(path: Path, header: list[str], rows: list[list[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(header[1:])  # without the hospital
    writer.writerows(row[1:] for row in rows)
    replace_file(path, text.getvalue().encode())  # for its owner alone


def run_demo(folder: Path, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Bring up the federation, train, take it down; return figures."""
    began = time.monotonic()
    demo = DemoFederation(folder, ServerTerms(rounds=rounds, enrolment=120, reply=120))
    with demo.processes:
        progress("starting a SuperLink, three SuperNodes and three silos on this machine")
        demo.start()
        served = demo.serve(progress)
    figures = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(served).items()}
    return {**figures, "silos": demo.accounts(), "seconds": time.monotonic() - began}
