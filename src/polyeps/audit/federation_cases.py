"""Canaries in whole federated runs: the server's loop, clients that pay and clip, sums with noise, round after round.

Every canary, a client or a record of one, has a feature of its own, so that its update moves coordinates that no other
moves. A run with m canaries is then m independent trials: with all of them in one run and empty ones in another
(worst-case pair), or with each put in by a coin beside clients who train on ordinary records (one run, many canaries:
Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024; the bound is that of Steinke,
Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.algorithms import ALGORITHMS
from polyeps.algorithms._averaging import Federation
from polyeps.audit.montecarlo import Scores, bound, guesses_in_one_run, log_ratio, one_shot_estimate
from polyeps.audit.rows import Case, Effort, Shown
from polyeps.audit.trial_clients import PLENTY, charged, check_answered, deployed, seeded
from polyeps.clients import Clients
from polyeps.core import Algorithm, Budget, Records, State, SumTerms, Task, Total
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.models import Model, logistic
from polyeps.participation import Participation
from polyeps.server import Round, serve
from polyeps.training import dp_sgd, sgd
from polyeps.transport.memory import InMemory

_LARGE = 30.0  # a canary's feature: its update is beyond the clip as long as the model hardly knows it
_ORDINARY = 20  # features of clients who are no canaries, and how many of these there are
_GROUP = "all"
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Run:
    """A method, its noise, and how long it runs."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 0.5
    scale: float = 1.0
    rounds: int = 2
    share: float = 1.0  # of a round's privacy, of the release that the canaries are looked for in
    delta: float = 0.05
    deployed: bool = False  # all noise from the operating system's entropy, on the integers


@dataclass(frozen=True)
class Watched:
    """What was seen of a run: how far each canary's coordinates moved, in clips, round by round; and all sums."""

    moved: list[Scores]
    opened: list[dict[str, Tensor]]
    charged: float


@dataclass
class _Spied(InMemory):
    opened: list[dict[str, Tensor]] = field(default_factory=list)

    def total(self, task: Task, terms: SumTerms) -> Total:
        total = super().total(task, terms)
        self.opened.append(dict(total.payload))
        return total


def canary_clients(put_in: Mask, ordinary: int, seed: int) -> Records:
    """One record a client: canaries, empty where not put in, and before them clients with ordinary records."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.zeros(ordinary + len(put_in), _ORDINARY + len(put_in))
    features[:ordinary, :_ORDINARY] = torch.randn(ordinary, _ORDINARY, generator=generator)
    labels = torch.ones(len(features), dtype=torch.int64)
    labels[:ordinary] = (features[:ordinary, :_ORDINARY].sum(1) > 0).long()
    features[ordinary:, _ORDINARY:] = torch.diag(torch.from_numpy(_LARGE * put_in).float())
    return Records(features, labels, torch.arange(len(features) + 1))


def _model(canaries: int) -> Model:
    """Two classes and no bias: a canary's update is along (-1, 1) in its own feature, whatever the model."""
    from torch import nn

    module = nn.Sequential(nn.Linear(_ORDINARY + canaries, 2, bias=False, device="meta"))
    return Model(module, logistic(1, 2).loss, (_ORDINARY + canaries,), start_at_zero=True)


def _federated(run: Run, model: Model, clients: int, seed: int) -> Algorithm:
    federation = Federation(
        rate=run.rate,
        rounds=run.rounds,
        sizes={_GROUP: clients},
        noise_for=lambda _: {_GROUP: run.scale},
        clip=1.0,
        noise=(lambda _: SystemStreams(1)) if run.deployed else partial(SeededStreams, seed, [_GROUP]),
        training=sgd(model, sampler="fixed", batch=1, steps=1, learning_rate=1.0),
        learning_rate=1.0,
    )
    entry = ALGORITHMS[run.name]
    return entry.build(federation, **entry.options, **run.options)


def watch(run: Run, put_in: Mask, seed: int, *, ordinary: int = 0) -> Watched:
    """Run a federation whose clients are canaries, put in or empty, and ordinary clients."""
    model = _model(len(put_in))
    records = canary_clients(put_in, ordinary, seed)
    algorithm = _federated(run, model, records.clients, seed + 1)
    share = Participation("poisson" if run.rate < 1 else "full", run.rate)
    return _observed(run, algorithm, model, records, len(put_in), share, seed, run.rate * records.clients)


def watch_records(run: Run, put_in: Mask, seed: int, *, ordinary: int = 0) -> Watched:
    """The same with one client, whose records are canaries and ordinary ones, and who trains by DP-SGD."""
    model = _model(len(put_in))
    records = canary_clients(put_in, ordinary, seed)
    records = replace(records, offsets=records.offsets[[0, -1]])
    training = dp_sgd(model, rate=run.rate, steps=1, clip=1.0, learning_rate=1e-3, batch=1)
    algorithm = ALGORITHMS[run.name].build(training)
    return _observed(run, algorithm, model, records, len(put_in), Participation(), seed, 1e3)


def _observed(
    run: Run,
    algorithm: Algorithm,
    model: Model,
    records: Records,
    canaries: int,
    participation: Participation,
    seed: int,
    divisor: float,
) -> Watched:
    ids = tuple(f"client {number}" for number in range(records.clients))
    terms = BudgetTerms(Budget(PLENTY, run.delta), algorithm.unit, algorithm.adjacency)
    moved: list[Scores] = []
    before = [torch.zeros(model.size), torch.tensor(1.0)]

    def look(round: Round, state: State) -> None:
        check_answered(round)
        change = torch.unflatten(state.model - before[0], 0, (2, -1))[:, _ORDINARY:]
        along = (change[1] - change[0]) / math.sqrt(2) * divisor / before[1]
        moved.append(along.numpy().astype(np.float32)[:canaries])
        before[:] = [state.model, state.kept.get("clip", before[1])]

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(Path(folder) / "ledger.db", dict.fromkeys(ids, terms))
        cohort = Clients(
            ids=ids,
            data=records,
            noise_multiplier=np.full(len(ids), run.scale),
            streams=deployed if run.deployed else seeded(seed + 2),
            repeatable=not run.deployed,
            ledger=ledger,
            groups=(_GROUP,) * len(ids),
        )
        transport = _Spied(cohort, algorithm, ("epsilon", "examples", "group"))
        start = State(torch.zeros(model.size))
        serve(algorithm, transport, start, rounds=run.rounds, participation=participation, seed=seed + 3, observe=look)
        paid = charged(ledger, ids[-1], run.delta)
        ledger.close()
    return Watched(moved, transport.opened, paid)


def scores_of(run: Run, moved: list[Scores]) -> Scores:
    """The log-likelihood ratio of all rounds, as it would be with exactly the noise that is paid for."""
    shift = math.sqrt(run.share) / run.scale
    total = np.zeros(len(moved[0]), np.float32)
    for seen in moved:
        total += log_ratio((shift * (seen * shift - shift / 2)).astype(np.float32), run.rate)
    return total


def _pair(run: Run, canaries: int, runs: int, what: str, effort: Effort) -> Shown:
    """Canaries in all of one world's runs, and empty ones in the other's."""
    scores: dict[bool, list[Scores]] = {True: [], False: []}
    paid = 0.0
    for number in range(effort.trials(runs)):
        for present in (True, False):
            seed = effort.seed_for(f"{what}/{number}/{present}")
            found = watch(run, np.full(canaries, present), seed)
            scores[present].append(scores_of(run, found.moved))
            paid = found.charged
    one, other = (np.concatenate(scores[present]) for present in (True, False))
    shown = bound(one, other, run.delta, effort.confidence)
    return Shown(paid, paid, shown.epsilon, run.delta, len(one))


def _one_run(run: Run, canaries: int, of_records: bool, what: str, effort: Effort) -> Shown:
    """One run, in which every canary is put in by a coin; the auditor guesses the coins it is surest of."""
    canaries = effort.trials(canaries) if of_records else canaries
    put_in = effort.generator(what).random(canaries) < 0.5
    found = (watch_records if of_records else watch)(run, put_in, effort.seed_for(what), ordinary=_ORDINARY)
    scores = scores_of(run, found.moved)
    shown = guesses_in_one_run(put_in, scores, run.delta, effort.confidence, (0.02, 0.1, 0.5, 1.0))
    along = np.sum(found.moved, axis=0)
    estimate = one_shot_estimate(along[put_in], along[~put_in], run.delta)
    return Shown(found.charged, found.charged, shown.epsilon, run.delta, canaries, estimate)


def _without_noise(run: Run, what: str, effort: Effort) -> Shown:
    """Look for numbers that are opened without noise: the same in all runs of a world, and another in the other."""
    worlds = []
    paid = 0.0
    for present in (True, False):
        seen = []
        for number in range(4):
            found = watch(run, np.full(8, present), effort.seed_for(f"{what}/{number}"))
            seen.append(torch.cat([one.double().flatten() for total in found.opened for one in total.values()]))
            paid = found.charged
        worlds.append(torch.stack(seen) if len({len(one) for one in seen}) == 1 else None)
    one, other = worlds
    if one is None or other is None or one.shape != other.shape:
        return Shown(paid, paid, math.inf, run.delta)
    constant = (one == one[0]).all(0) & (other == other[0]).all(0)
    return Shown(paid, paid, math.inf if bool((constant & (one[0] != other[0])).any()) else 0.0, run.delta)


_FIXED_CLIP: Mapping[str, Any] = {"adaptive": False, "personal": False}
_SECURE: Mapping[str, Any] = {"personal": False, "trust": "secure-sum"}
_WHOLE: Mapping[str, Any] = {"rank": 2, "whole": "biases"}  # of two classes: factors that leave nothing out


def cases() -> list[Case]:
    """All rows about federated runs: name, method with its options, and how the canaries are put in."""
    pairs = {
        "fedhdp: trusted server, fixed clip": Run("fedhdp", _FIXED_CLIP),
        "fedhdp: trusted server, adaptive clip": Run("fedhdp", {"personal": False}, share=0.75),
        "fedhdp: personal models": Run("fedhdp", {"adaptive": False}),
        "fedhdp: secure sum": Run("fedhdp", _SECURE, share=0.75),
        "dp-fedavg: trusted server, fixed clip": Run("fedhdp", _FIXED_CLIP),
        "cmp-fed: two releases": Run("cmp-fed", {**_WHOLE, "split": 0.2}, share=0.8),
        "dp-randagg: all coordinates": Run("dp-randagg", {"rank": 0}),
        "dp-randagg: discrete Gaussian": Run("dp-randagg", {"rank": 0, "noise": "discrete-gaussian"}),
        "deployed fedhdp: trusted server": Run("fedhdp", _FIXED_CLIP, deployed=True),
        "deployed dp-randagg: discrete Gaussian": Run(
            "dp-randagg", {"rank": 0, "noise": "discrete-gaussian"}, deployed=True
        ),
        "dp-randagg: Skellam": Run("dp-randagg", {"rank": 0, "noise": "skellam"}),
    }
    often: dict[str, Any] = {"rate": 0.5, "scale": 3.0, "rounds": 4, "delta": 1e-9}
    factored = Run("cmp-fed", {**_WHOLE, "split": 0.2}, share=0.8, **often)
    opened = {
        "cmp-fed": Run("cmp-fed", _WHOLE, rate=1.0),
        "dp-randagg": Run("dp-randagg", {"rank": 0}, rate=1.0),
        "fedhdp, adaptive clip": Run("fedhdp", _SECURE, rate=1.0),
        "fedhdp, fixed clip": Run("fedhdp", {**_SECURE, "adaptive": False}, rate=1.0),
    }
    return [
        *(Case(what, "sound", "worst-case pair", partial(_pair, run, 2000, 2, what)) for what, run in pairs.items()),
        *(
            Case(what, "sound", "one run", partial(_one_run, run, canaries, of_records, what))
            for what, run, canaries, of_records in (
                ("one run: DP-SGD, canary records", Run("fedavg", **often), 4000, True),
                ("one run: fedhdp, canary clients", Run("fedhdp", _FIXED_CLIP, **often), 2000, False),
                ("one run: cmp-fed, canary clients", factored, 2000, False),
                ("one run: dp-randagg, canary clients", Run("dp-randagg", {"rank": 0}, **often), 2000, False),
            )
        ),
        *(
            Case(what, "sound", "support", partial(_without_noise, run, what))
            for name, run in opened.items()
            for what in (f"nothing opened without noise: {name}",)
        ),
    ]
