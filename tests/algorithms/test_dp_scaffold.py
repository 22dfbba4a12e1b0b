"""DP-SCAFFOLD: against the paper's equations, step by step; what clients keep; drift on every path of the engine."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.local_training import clipped_sum
from support.federations import Recorder, experiment, finish, job_of, ledger_of
from support.prescribed import MODEL, TRAINING, Prescribed, drawn
from torch import Tensor

from polyeps.algorithms.dp_scaffold import dp_scaffold
from polyeps.algorithms.fedavg import fedavg
from polyeps.clients import Clients
from polyeps.core import Records, State
from polyeps.engine.cuda_graphs import train_on_device
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.errors import InputError
from polyeps.models import logistic
from polyeps.participation import Participation
from polyeps.server import serve
from polyeps.training import Training, dp_sgd, sgd
from polyeps.transport.memory import InMemory

STEPS, RATE, CLIP, NOISE = 3, 0.4, 0.5, 0.3
SMALL = logistic(features=4, classes=3)


def some_records(clients: int = 3, each: int = 5, seed: int = 0) -> Records:
    drawn_from = np.random.default_rng(seed)
    count = clients * each
    features = torch.from_numpy(drawn_from.normal(size=(count, 4))).float()
    labels = torch.arange(count) // each % 3  # a client holds one label
    return Records(features, labels, torch.arange(0, count + 1, each))


def training(**changes: Any) -> Training:
    return dp_sgd(SMALL, **{"rate": 1.0, "steps": STEPS, "clip": CLIP, "learning_rate": RATE, **changes})


def paper(records: Records, streams: Any, rounds: int, joined: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 1 in the paper's units, one client and one step at a time; controls c_i and c are gradients."""
    clients = records.clients
    x, c = torch.zeros(SMALL.size, dtype=torch.float64), torch.zeros(SMALL.size, dtype=torch.float64)
    own = torch.zeros(clients, SMALL.size, dtype=torch.float64)
    for number in range(rounds):
        moved, changed = torch.zeros_like(x), torch.zeros_like(c)
        cohort = joined(number)
        for client in cohort:
            a, b = records.spans[client].tolist()
            noise = torch.zeros(1, STEPS, SMALL.size)
            streams([str(client)], number).normals(noise, [0])
            y = x.clone()
            for step in range(STEPS):
                total = clipped_sum(SMALL, y.float(), records.features[a:b], records.labels[a:b], CLIP).double()
                gradient = (total + NOISE * CLIP * noise[0, step].double()) / (b - a)
                y = y - RATE * (gradient - own[client] + c)
            new = own[client] - c + (x - y) / (STEPS * RATE)
            moved += (y - x) / len(cohort)
            changed += (new - own[client]) / clients
            own[client] = new
        x, c = x + moved, c + changed
    return x, c, own


@pytest.mark.parametrize("share", [1.0, 0.67])
def test_rounds_are_the_papers(share: float) -> None:
    records = some_records()
    streams = partial(SeededStreams, 7)
    algorithm = dp_scaffold(training())
    free = replace(algorithm, actions={"train": replace(algorithm.actions["train"], price=None)})  # needs no ledger
    ids = tuple(str(client) for client in range(records.clients))
    cohort = Clients(
        ids, records, np.full(3, NOISE), streams, repeatable=True, ledger=None, guaranteed=np.full(3, False)
    )
    cohorts: list[list[int]] = []
    state = serve(
        free,
        InMemory(cohort, free, ()),
        State(torch.zeros(SMALL.size)),
        rounds=4,
        participation=Participation() if share == 1 else Participation("uniform", share),
        seed=2,
        observe=lambda round, _: cohorts.append([int(client) for client in round.traffic]),
    )
    model, control, own = paper(records, streams, 4, lambda number: cohorts[number])
    scale = -STEPS * RATE
    torch.testing.assert_close(state.model.double(), model, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.kept["control"].double() / scale, control, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cohort.memory["control"].double() / scale, own, rtol=1e-4, atol=1e-5)
    assert own.abs().sum() > 0


def test_what_clients_keep_is_known_to_the_server(tmp_path: Path) -> None:
    """Every control follows from what was sent and received, to the bit: nothing else gets into memory."""
    job = job_of(experiment("dp-scaffold"))
    cohort = job.clients(ledger_of(job, tmp_path / "a.db"))
    replies: list[Any] = []

    class Heard(Recorder):
        def __call__(self, task: Any) -> Any:
            replies.append(super().__call__(task))
            return replies[-1]

    heard = Heard(cohort, job.algorithm, job.discloses)
    serve(job.algorithm, heard, job.state, rounds=3, participation=Participation(), seed=5, run="test")
    known = torch.zeros_like(cohort.memory["control"])
    for task, reply in zip(heard.tasks, replies, strict=True):
        known = reply.payload["update"] - (task.payload["control"] - known)
    assert torch.equal(known, cohort.memory["control"])
    assert set(cohort.memory) == {"control"}
    assert set(replies[0].payload) == {"update"}


def test_the_first_round_is_fedavgs(tmp_path: Path) -> None:
    """There is no control yet."""
    first = finish(job_of(experiment("dp-scaffold")), tmp_path / "a.db", rounds=1)
    plain = finish(job_of(experiment("fedavg")), tmp_path / "b.db", rounds=1)
    assert torch.equal(first.state.model, plain.state.model)
    assert first.spent() == plain.spent()


def test_many_local_steps_end_where_all_data_would() -> None:
    """Without noise: FedAvg stays away from the common optimum where labels differ, SCAFFOLD does not."""
    records = some_records(each=8)
    local = sgd(SMALL, rate=1.0, steps=20, learning_rate=0.3, decay=0.05)
    ids = tuple(str(client) for client in range(records.clients))
    norms = []
    for corrected in (True, False):
        cohort = Clients(ids, records, np.zeros(3), partial(SeededStreams, 7), True, None, guaranteed=np.full(3, False))
        algorithm, start = dp_scaffold(local) if corrected else fedavg(local), State(torch.zeros(SMALL.size))
        transport = InMemory(cohort, algorithm, ())
        state = serve(algorithm, transport, start, rounds=30, participation=Participation(), seed=2)
        rows = sgd(SMALL, rate=1.0, steps=1, learning_rate=1.0, decay=0.05).run(
            state.model, records, SeededStreams(0, list(ids), 0)
        )
        norms.append(float(rows.mean(0).norm()))
    assert norms[0] < 0.02 * norms[1]


def test_weights_by_budget() -> None:
    epsilons = (1.0, 2.0, 5.0)
    updates = drawn()
    clients = Prescribed(epsilons, updates)
    state = clients.run(dp_scaffold(TRAINING, weights="epsilon"), 1)
    rows = [updates(str(client), 0, np.zeros(MODEL.size)) for client in range(3)]
    expected = sum(epsilon * row for epsilon, row in zip(epsilons, rows, strict=True)) / 8
    np.testing.assert_allclose(state.model, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.kept["control"], expected, rtol=1e-4, atol=1e-5)
    some = Prescribed(epsilons, updates, silent=lambda client, _: client == "2")
    state = some.run(dp_scaffold(TRAINING, weights="epsilon"), 1)
    np.testing.assert_allclose(state.kept["control"], 3 / 8 * state.model, rtol=1e-4, atol=1e-5)


# Drift in the engine


def moved_by(drift: Tensor, *, noise: Any = NOISE, streams: Any = None, **changes: Any) -> Tensor:
    records = some_records()
    drawn_from = streams or SeededStreams(3, ["0", "1", "2"], 0)
    return training(**changes).run(
        torch.zeros(SMALL.size), records, drawn_from, noise, settings={"steps": np.array([1, 2, 5])}, drift=drift
    )


DRIFT = torch.linspace(-1, 1, 3 * SMALL.size).reshape(3, SMALL.size)


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.5}, {"decay": 0.1}, {"rate": 0.4}])
def test_devices_drift_as_the_cpu_does(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = moved_by(DRIFT, noise=0.0, **changes)
    monkeypatch.setattr("polyeps.training.train_on_cpu", partial(train_on_device, graphs={}))
    torch.testing.assert_close(moved_by(DRIFT, noise=0.0, **changes), on_cpu, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(on_cpu, moved_by(0 * DRIFT, noise=0.0, **changes), atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_drift_as_the_cpu_does() -> None:
    held, device = some_records(), torch.device("cuda")
    placed = replace(held, features=held.features.to(device), labels=held.labels.to(device))
    on_cpu, on_device = training(), training()
    for drift in (DRIFT, 0 * DRIFT, -2 * DRIFT):  # one graph, with other values
        found, expected = (
            one.run(torch.zeros(SMALL.size), records, SeededStreams(3, ["0", "1", "2"], 0), 0.0, drift=drift)
            for one, records in ((on_device, placed), (on_cpu, held))
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("streams", [None, SystemStreams(3)], ids=["simulated", "deployed"])
def test_all_of_a_drift_is_added_whatever_the_number_of_steps(streams: Any) -> None:
    found = moved_by(DRIFT, streams=streams, learning_rate=1e-7)
    torch.testing.assert_close(found, DRIFT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", [False, True])
def test_a_drift_without_noise_or_clip(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that plain training would defer are moved too."""
    if device:
        monkeypatch.setattr("polyeps.training.train_on_cpu", partial(train_on_device, graphs={}))
    local = sgd(SMALL, rate=1.0, steps=4, learning_rate=1e-7)
    found = local.run(torch.zeros(SMALL.size), some_records(), SeededStreams(3, ["0", "1", "2"], 0), drift=DRIFT)
    torch.testing.assert_close(found, DRIFT, rtol=1e-5, atol=1e-5)


def test_a_drift_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(InputError, match="drift must be"):
        moved_by(DRIFT[:2])
