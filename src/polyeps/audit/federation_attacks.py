"""Attacks on whole federated runs: the server's rounds, with canary clients or records that pay and clip.

Every canary, a client or a record of one, has a feature of its own, so that its update moves coordinates that no other
moves. A run with m canaries is then m independent trials: with all of them in one run and empty ones in another
(worst-case pair), or with each included by a coin, beside clients with ordinary records (one run, many canaries:
Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024; the bound is that of Steinke,
Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.algorithms import ALGORITHMS
from polyeps.algorithms._averaging import Federation
from polyeps.audit.lower_bounds import (
    Scores,
    bound_from_guesses,
    bound_from_scores,
    one_shot_estimate,
    sampled_log_ratio,
)
from polyeps.audit.results import Attack, Effort, Evidence
from polyeps.audit.trial_clients import charged, check_answered, deployed, seeded, trial_clients, trial_ledger
from polyeps.core import Algorithm, Records, State, SumTerms, Task, Total
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.models import Model, logistic
from polyeps.participation import Participation
from polyeps.server import Round, serve
from polyeps.training import dp_sgd, sgd
from polyeps.transport.memory import InMemory

_LARGE = 30.0  # a canary's feature: its update is beyond the clip until the model has learnt it
_ORDINARY = 20  # features of ordinary clients, and the number of these clients
_GROUP = "all"
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class AuditedRun:
    """A method, its noise and its rounds."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 0.5
    noise_multiplier: float = 1.0
    rounds: int = 2
    share: float = 1.0  # of a round's price, of the release that is searched for canaries
    delta: float = 0.05
    deployed: bool = False  # all noise from the operating system's entropy, on the integers


@dataclass(frozen=True)
class ObservedRun:
    """Each canary's displacement round by round, in clips, all opened sums, and the ε a client was charged."""

    moved: list[Scores]
    opened: list[dict[str, Tensor]]
    charged: float


@dataclass
class _SpyTransport(InMemory):
    opened: list[dict[str, Tensor]] = field(default_factory=list)

    def total(self, task: Task, terms: SumTerms) -> Total:
        total = super().total(task, terms)
        self.opened.append(dict(total.payload))
        return total


def _canary_records(included: Mask, ordinary: int, seed: int) -> Records:
    """Return one record a client: first ordinary clients, then canaries, empty unless included."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.zeros(ordinary + len(included), _ORDINARY + len(included))
    features[:ordinary, :_ORDINARY] = torch.randn(ordinary, _ORDINARY, generator=generator)
    labels = torch.ones(len(features), dtype=torch.int64)
    labels[:ordinary] = (features[:ordinary, :_ORDINARY].sum(1) > 0).long()
    features[ordinary:, _ORDINARY:] = torch.diag(torch.from_numpy(_LARGE * included).float())
    return Records(features, labels, torch.arange(len(features) + 1))


def _model(canaries: int) -> Model:
    """Return a model of two classes without bias: a canary's update is along (-1, 1) in its own feature."""
    from torch import nn

    module = nn.Sequential(nn.Linear(_ORDINARY + canaries, 2, bias=False, device="meta"))
    return Model(module, logistic(1, 2).loss, (_ORDINARY + canaries,), start_at_zero=True)


def _federated(run: AuditedRun, model: Model, clients: int, seed: int) -> Algorithm:
    federation = Federation(
        rate=run.rate,
        rounds=run.rounds,
        sizes={_GROUP: clients},
        noise_for=lambda _: {_GROUP: run.noise_multiplier},
        clip=1.0,
        learning_rate=1.0,
        noise=(lambda _: SystemStreams(1)) if run.deployed else partial(SeededStreams, seed, [_GROUP]),
        training=sgd(model, sampler="fixed", batch=1, steps=1, learning_rate=1.0),
    )
    entry = ALGORITHMS[run.name]
    return entry.build(federation, **entry.options, **run.options)


def _observe_clients(run: AuditedRun, included: Mask, seed: int, *, ordinary: int = 0) -> ObservedRun:
    """Run a federation of canary clients, included or empty, and ordinary clients."""
    model = _model(len(included))
    records = _canary_records(included, ordinary, seed)
    algorithm = _federated(run, model, records.clients, seed + 1)
    share = Participation("poisson" if run.rate < 1 else "full", run.rate)
    return _observe(run, algorithm, model, records, len(included), share, seed, run.rate * records.clients)


def _observe_records(run: AuditedRun, included: Mask, seed: int, *, ordinary: int = 0) -> ObservedRun:
    """Run one client that trains by DP-SGD on canary records, included or empty, and ordinary records."""
    model = _model(len(included))
    records = _canary_records(included, ordinary, seed)
    records = replace(records, offsets=records.offsets[[0, -1]])
    training = dp_sgd(model, rate=run.rate, steps=1, clip=1.0, learning_rate=1e-3, batch=1)
    algorithm = ALGORITHMS[run.name].build(training)
    return _observe(run, algorithm, model, records, len(included), Participation(), seed, 1e3)


def _observe(
    run: AuditedRun,
    algorithm: Algorithm,
    model: Model,
    records: Records,
    canaries: int,
    participation: Participation,
    seed: int,
    divisor: float,
) -> ObservedRun:
    ids = tuple(f"client {number}" for number in range(records.clients))
    moved: list[Scores] = []
    before = [torch.zeros(model.size), torch.tensor(1.0)]

    def look(round: Round, state: State) -> None:
        check_answered(round)
        change = torch.unflatten(state.model - before[0], 0, (2, -1))[:, _ORDINARY:]
        along = (change[1] - change[0]) / math.sqrt(2) * divisor / before[1]
        moved.append(along.numpy().astype(np.float32)[:canaries])
        before[:] = [state.model, state.kept.get("clip", before[1])]

    with trial_ledger(algorithm, ids, run.delta) as ledger:
        streams = deployed if run.deployed else seeded(seed + 2)
        groups = dict.fromkeys(ids, _GROUP)
        clients = trial_clients(ids, records, run.noise_multiplier, streams, ledger, groups)
        transport = _SpyTransport(clients, algorithm, ("epsilon", "examples", "group"))
        start = State(torch.zeros(model.size))
        serve(algorithm, transport, start, rounds=run.rounds, participation=participation, seed=seed + 3, observe=look)
        paid = charged(ledger, ids[-1], run.delta)
    return ObservedRun(moved, transport.opened, paid)


def _scores(run: AuditedRun, moved: list[Scores]) -> Scores:
    """Return the log-likelihood ratio of all rounds under exactly the noise that is paid for."""
    shift = math.sqrt(run.share) / run.noise_multiplier
    total = np.zeros(len(moved[0]), np.float32)
    for seen in moved:
        total += sampled_log_ratio((shift * (seen * shift - shift / 2)).astype(np.float32), run.rate)
    return total


def _pair(run: AuditedRun, canaries: int, runs: int, effort: Effort) -> Evidence:
    """Compare runs with canaries and runs with empty canaries."""
    scores: dict[bool, list[Scores]] = {True: [], False: []}
    paid = 0.0
    for number in range(effort.trials(runs)):
        for present in (True, False):
            seed = effort.seed_for(f"{number}/{present}")
            found = _observe_clients(run, np.full(canaries, present), seed)
            scores[present].append(_scores(run, found.moved))
            paid = found.charged
    one, other = (np.concatenate(scores[present]) for present in (True, False))
    shown = bound_from_scores(one, other, run.delta, effort.confidence)
    return Evidence(paid, paid, shown, run.delta, len(one))


def _one_run(run: AuditedRun, canaries: int, of_records: bool, effort: Effort) -> Evidence:
    """Include every canary of one run by a coin; the auditor guesses the coins it is surest of."""
    canaries = effort.trials(canaries) if of_records else canaries
    included = np.random.default_rng(effort.seed_for()).random(canaries) < 0.5
    found = (_observe_records if of_records else _observe_clients)(run, included, effort.seed_for(), ordinary=_ORDINARY)
    scores = _scores(run, found.moved)
    shown = bound_from_guesses(included, scores, run.delta, effort.confidence, (0.02, 0.1, 0.5, 1.0))
    along = np.sum(found.moved, axis=0)
    estimate = one_shot_estimate(along[included], along[~included], run.delta)
    return Evidence(found.charged, found.charged, shown, run.delta, canaries, estimate)


def _without_noise(run: AuditedRun, effort: Effort) -> Evidence:
    """Look for numbers opened without noise: constant over the runs of a world, and different between worlds."""
    worlds = []
    paid = 0.0
    for present in (True, False):
        seen = []
        for number in range(4):
            found = _observe_clients(run, np.full(8, present), effort.seed_for(str(number)))
            seen.append(torch.cat([one.double().flatten() for total in found.opened for one in total.values()]))
            paid = found.charged
        worlds.append(torch.stack(seen) if len({len(one) for one in seen}) == 1 else None)
    one, other = worlds
    if one is None or other is None or one.shape != other.shape:
        return Evidence(paid, paid, math.inf, run.delta)
    constant = (one == one[0]).all(0) & (other == other[0]).all(0)
    return Evidence(paid, paid, math.inf if bool((constant & (one[0] != other[0])).any()) else 0.0, run.delta)


_FIXED_CLIP: Mapping[str, Any] = {"adaptive": False, "personal": False}
_SECURE: Mapping[str, Any] = {"personal": False, "trust": "secure-sum"}
_WHOLE: Mapping[str, Any] = {"rank": 2, "whole": "biases"}  # of two classes: factors that leave nothing out


def federation_attacks() -> list[Attack]:
    """Return all attacks on federated runs."""
    pairs = {
        "fedhdp: trusted server, fixed clip": AuditedRun("fedhdp", _FIXED_CLIP),
        "fedhdp: trusted server, adaptive clip": AuditedRun("fedhdp", {"personal": False}, share=0.75),
        "fedhdp: personal models": AuditedRun("fedhdp", {"adaptive": False}),
        "fedhdp: secure sum": AuditedRun("fedhdp", _SECURE, share=0.75),
        "dp-fedavg: trusted server, fixed clip": AuditedRun("fedhdp", _FIXED_CLIP),
        "cmp-fed: two releases": AuditedRun("cmp-fed", {**_WHOLE, "split": 0.2}, share=0.8),
        "dp-randagg: all coordinates": AuditedRun("dp-randagg", {"rank": 0}),
        "dp-randagg: discrete Gaussian": AuditedRun("dp-randagg", {"rank": 0, "noise": "discrete-gaussian"}),
        "deployed fedhdp: trusted server": AuditedRun("fedhdp", _FIXED_CLIP, deployed=True),
        "deployed dp-randagg: discrete Gaussian": AuditedRun(
            "dp-randagg", {"rank": 0, "noise": "discrete-gaussian"}, deployed=True
        ),
        "dp-randagg: Skellam": AuditedRun("dp-randagg", {"rank": 0, "noise": "skellam"}),
    }
    often: dict[str, Any] = {"rate": 0.5, "noise_multiplier": 3.0, "rounds": 4, "delta": 1e-9}
    factored = AuditedRun("cmp-fed", {**_WHOLE, "split": 0.2}, share=0.8, **often)
    opened = {
        "cmp-fed": AuditedRun("cmp-fed", _WHOLE, rate=1.0),
        "dp-randagg": AuditedRun("dp-randagg", {"rank": 0}, rate=1.0),
        "fedhdp, adaptive clip": AuditedRun("fedhdp", _SECURE, rate=1.0),
        "fedhdp, fixed clip": AuditedRun("fedhdp", {**_SECURE, "adaptive": False}, rate=1.0),
    }
    single = {
        "one run: DP-SGD, canary records": partial(_one_run, AuditedRun("fedavg", **often), 4000, True),
        "one run: fedhdp, canary clients": partial(_one_run, AuditedRun("fedhdp", _FIXED_CLIP, **often), 2000, False),
        "one run: cmp-fed, canary clients": partial(_one_run, factored, 2000, False),
        "one run: dp-randagg, canary clients": partial(
            _one_run, AuditedRun("dp-randagg", {"rank": 0}, **often), 2000, False
        ),
    }
    return [
        *(Attack(name, "sound", "worst-case pair", partial(_pair, run, 2000, 2)) for name, run in pairs.items()),
        *(Attack(name, "sound", "one run", attack) for name, attack in single.items()),
        *(
            Attack(f"nothing opened without noise: {name}", "sound", "support", partial(_without_noise, run))
            for name, run in opened.items()
        ),
    ]
