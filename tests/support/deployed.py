"""Deployed clients for tests: system entropy, files of their own, and a new process, as it were, for every message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from polyeps.clients import Clients, RoundMemory
from polyeps.core import Algorithm
from polyeps.engine.noise import SystemStreams
from polyeps.experiment.job import Job
from polyeps.ledger import Ledger
from polyeps.transport.client_files import Keeping
from polyeps.transport.flower_client import client_app
from support.federations import LocalGrid, ledger_of
from support.transports import alone


def on_its_own(cohort: Clients, client: str, folder: Path, run: str | None = None) -> Clients:
    """One client as it is deployed: opened anew, with nothing in memory."""
    return replace(
        alone(cohort, client),
        streams=lambda ids, _: SystemStreams(len(ids)),
        repeatable=False,
        memory={},
        passed_on=RoundMemory(),
        keeper=Keeping(folder / client),
        run=run,
    )


class DeployedGrid(LocalGrid):
    """Nodes that open their clients anew for every message, and take part in one run."""

    def __init__(self, job: Job, folder: Path, algorithm: Algorithm | None = None, run: str = "test") -> None:
        self.ledger: Ledger | None = ledger_of(job, folder / "ledger.db")
        everybody = job.clients(self.ledger)
        super().__init__(everybody, job, folder / "seats")
        self.names = {node: cohort.ids[0] for node, cohort in self.nodes.items()}
        self.folder = folder / "clients"

        def opened(context: Context) -> tuple[Clients, Algorithm, Any]:
            client = self.names[context.node_id]
            return on_its_own(everybody, client, self.folder, run), algorithm or job.algorithm, job.discloses

        self.app = client_app(opened, lambda context: self.seats[self.names[context.node_id]])

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.nodes if node not in self.failing]

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> Iterable[Message]:
        return super().send_and_receive([m for m in messages if m.metadata.dst_node_id in self.nodes])

    def restart(self, before: int, after: int) -> None:
        """Connect a node under another number, as Flower does when a SuperNode is started anew."""
        self.nodes[after], self.names[after] = self.nodes.pop(before), self.names.pop(before)
