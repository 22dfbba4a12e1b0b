"""Time FedSel's reports: `python benchmarks/fedsel.py [--json] [--clients 1000000]`.

Liu et al., "FedSel: Federated SGD under Local Differential Privacy with Top-k Dimension Selection", DASFAA 2020,
https://arxiv.org/abs/2003.10637

First the selection of a coordinate for a whole cohort (figure 2(e): time of one client, d = 10 to 10 000), then whole
reports (select, perturb); the least of several repetitions counts, because the machine may be shared. Then an epoch of
a federation with one record per client at d = 123: ledger, gradients, reports and charges.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from polyeps_reproductions.fedsel_cost import SELECTIONS, measure

from polyeps.algorithms._averaging import Course
from polyeps.algorithms.fedsel import fedsel
from polyeps.clients import Clients
from polyeps.core import Budget, Records, State
from polyeps.engine.noise import SeededStreams
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.models import binary_logistic
from polyeps.participation import Participation
from polyeps.server import serve
from polyeps.training import sgd
from polyeps.transport.memory import InMemory


def epoch(clients: int, dimension: int = 123) -> dict[str, float]:
    """Let every client report once, in a hundred rounds, each report charged to its ledger first."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(clients, dimension, generator=generator).clamp_(-1, 1)
    labels = (features @ torch.randn(dimension, generator=generator) > 0).long()
    ids = tuple(map(str, range(clients)))
    participation = Participation("epoch", 0.01)
    batches = participation.batches(clients)
    local = sgd(binary_logistic(dimension), rate=1.0, steps=1, learning_rate=1.0, decay=1e-4)
    algorithm = fedsel(local, Course(2.0, 1.0, clients // batches, batches, 1))
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        terms = BudgetTerms(Budget(2.0, 0.0), "client", "replace-one")
        ledger = Ledger.create(Path(folder) / "ledger.db", dict.fromkeys(ids, terms))
        opened = time.perf_counter()
        cohort = Clients(
            ids,
            Records(features, labels, torch.arange(clients + 1)),
            np.full(clients, 0.5 * (1 + 2.0**-48)),
            lambda ids, round: SeededStreams(7, ids, round),
            True,
            ledger,
        )
        state = State(torch.zeros(dimension))
        state = serve(
            algorithm, InMemory(cohort, algorithm), state, rounds=batches, participation=participation, seed=1
        )
        ended = time.perf_counter()
        assert ledger.spent(ids[-1]) > 1.99
        ledger.close()
    return {
        "clients": clients,
        "ledger": opened - began,
        "rounds": ended - opened,
        "accuracy": float(((features @ state.model > 0).long() == labels).float().mean()),
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--clients", type=int, default=10_000, help="clients in the epoch at d = 123")
    wanted = parser.parse_args()
    found = measure(wanted.repetitions)
    simulated = epoch(wanted.clients)
    if wanted.json:
        print(json.dumps({"seconds": found, "epoch": simulated, "threads": torch.get_num_threads()}, indent=2))
        return
    for kind, rows in found.items():
        print(f"{kind:<30}" + "".join(f"{select:>10}" for select in SELECTIONS) + "   milliseconds a cohort")
        for name, row in rows.items():
            print(f"{name:<30}" + "".join(f"{1e3 * row[select]:>10.1f}" for select in SELECTIONS))
    print("epoch at d = 123: " + ", ".join(f"{name} {value:.4g}" for name, value in simulated.items()))


if __name__ == "__main__":
    main()
