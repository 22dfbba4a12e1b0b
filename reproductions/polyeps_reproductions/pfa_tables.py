"""Parts of PFA's paper without training: table 1 (budgets) and, of its full version, figure 9, tables 3 to 6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from polyeps.aggregation.subspace import subspace
from polyeps.data.budgets import DISTRIBUTIONS
from polyeps.data.imdb import FIRST_WORD
from polyeps.data.public_loaders import load_dataset
from polyeps.errors import DataError
from polyeps.experiment.config import experiment
from polyeps.experiment.seeds import generator
from polyeps.models import MODELS
from polyeps_reproductions.cells import DRAWN_FROM, HIGH_ABOVE, Setting, drawn_epsilons
from polyeps_reproductions.federations import population
from polyeps_reproductions.fedsel_cost import least
from polyeps_reproductions.studies import Content, Part, Record, line, panel

BUDGETS = ("uniform", "gauss", "pareto", "mixgauss1", "mixgauss2", "mixgauss3", "mixgauss4")
ROUNDS = 95  # of the paper's runs, by its uplink
PAPER_UPLINK = {("logistic", "pfa"): 113, ("logistic", "pfa-plus"): 12, ("cnn", "pfa"): 377, ("cnn", "pfa-plus"): 40}
# Table 5: seconds of the server and of a client for subspace and projection, Lanczos with 256 steps, 5 of 50 public.
PAPER_SECONDS = {"logistic": (1.76, 0.022), "cnn": (25.5, 0.036), "cifar_cnn": (214.0, 2.6), "lstm": (71.0, 0.17)}
# Table 6: parameters, as far as text and code state them. The LSTM's are those of the paper's vocabulary.
USED = (("mnist", "logistic", 7850), ("mnist", "cnn", 26010), ("fashion-mnist", "logistic", 7850),
        ("fashion-mnist", "cnn", 26010), ("cifar10", "cifar_cnn", 2201674), ("imdb", "lstm", 160306))  # fmt: skip


def budgets(_: Sequence[Record], __: bool) -> Content:
    """Return table 1, and the one draw of 30 clients our cells use."""
    rows = []
    for name in BUDGETS:
        drawn = np.array(drawn_epsilons(name, 30))
        high = int(np.sum(drawn > HIGH_ABOVE))
        spread = (f"{value:.3g}" for value in (drawn.min(), np.median(drawn), drawn.max()))
        used = DISTRIBUTIONS[DRAWN_FROM.get(name, name)].summary
        rows.append([name, DISTRIBUTIONS[name].summary, used, *spread, high])
    return Content(["budgets", "as printed", "as drawn", "least", "median", "most", f"above {HIGH_ABOVE:g}"], rows)


def drawn(_: Sequence[Record], __: bool) -> Content:
    """Return figure 9: every client's ε in the one draw that our cells use, for 20, 30, 40 and 50 clients."""
    rows, panels = [], []
    for clients in (20, 30, 40, 50):
        series = []
        for name in BUDGETS:
            epsilons = np.sort(drawn_epsilons(name, clients))
            spread = (f"{value:.3g}" for value in (epsilons[0], np.median(epsilons), epsilons[-1]))
            rows.append([clients, name, *spread, int(np.sum(epsilons > HIGH_ABOVE))])
            series.append(line(name, list(enumerate(epsilons.tolist(), start=1))))
        panels.append(panel(f"{clients} clients", "client, by ε", "ε", series, log="y"))
    return Content(["clients", "budgets", "least", "median", "most", f"above {HIGH_ABOVE:g}"], rows, panels=panels)


def held(partition: str) -> Callable[[Sequence[Record], bool], Content]:
    """Return tables 3 and 4: how many records of each label each of 20 clients holds, with the first seed."""

    def make(_: Sequence[Record], __: bool) -> Content:
        found = population(experiment(Setting(partition=partition, clients=20).experiment("fedavg", "sound")), seed=1)
        counts = found.partition.counts(found.dataset.labels, 10).tolist()
        rows = [[client, *row, sum(row)] for client, row in zip(found.ids, counts, strict=True)]
        return Content(["client", *map(str, range(10)), "in all"], rows)

    return make


def seconds(_: Sequence[Record], quick: bool) -> Content:
    """Return table 5: subspace and projection of one round, 5 public clients and the mean of 35 private ones."""
    rows = []
    for name, (server, client) in PAPER_SECONDS.items():
        if quick and name == "cifar_cnn":
            continue
        model = MODELS[name]()
        generator = torch.Generator().manual_seed(1)
        public, own = torch.randn(5, model.size, generator=generator), torch.randn(1, model.size, generator=generator)
        weights = torch.ones(5)

        def at_server(public=public, own=own, weights=weights, slices=model.slices):  # type: ignore[no-untyped-def]
            return subspace(public, slices, rank=1, kind="set", weights=weights).project(own)

        basis = subspace(public, model.slices, rank=1, kind="set", weights=weights)
        ours = least(at_server, 5), least(lambda basis=basis, own=own: basis.coordinates(own), 5)  # type: ignore[misc]
        rows.append([name, model.size, server, f"{ours[0]:.4f}", client, f"{ours[1]:.5f}"])
    return Content(["model", "parameters", "server, paper, s", "server, s", "client, paper, s", "client, s"], rows)


def uplinks(_: Sequence[Record], quick: bool) -> Content:
    """Return figure 7 without training: the uplink of 95 rounds of 40 of 50 clients, over many draws of cohorts."""
    draws = generator(1, "cohorts of figure 7").hypergeometric(5, 45, 40, size=(200 if quick else 10_000, ROUNDS))
    rows: list[list[Any]] = []
    for name in ("logistic", "cnn"):
        model = MODELS[name]()
        full, thin = 4 * model.size, 4 * len(model.slices)  # a number for each tensor
        # PFA+'s first round is a full one.
        later = (full * draws + thin * (40 - draws))[:, 1:].sum(axis=1)
        for method, sent in (("pfa", np.array([40 * full * ROUNDS])), ("pfa-plus", 40 * full + later)):
            mebibytes = np.quantile(sent, [0.025, 0.5, 0.975]) / 2**20
            rows.append([name, method, PAPER_UPLINK[name, method], *(f"{value:.1f}" for value in mebibytes)])
    columns = ["model", "method", "paper, MiB", "2.5 % of draws are below", "median", "2.5 % are above"]
    return Content(columns, rows)


def used(_: Sequence[Record], __: bool) -> Content:
    """Return table 6: data sets and models, sized as a run on that data trains them."""
    rows = []
    for data, name, printed in USED:
        counts, options = ["not here", "not here"], {}
        with suppress(DataError):
            loaded = load_dataset(data, download=None)
            counts = [str(len(loaded.labels)), str(len(loaded.test_labels))]
            options = {"vocabulary": FIRST_WORD + len(loaded.words)} if loaded.words else {}
        rows.append([data, *counts, name, printed, MODELS[name](**options).size])
    return Content(["data", "training records", "test records", "model", "parameters, paper", "parameters"], rows)


TABLES = (
    Part("figure", "9", "Privacy budgets of 20 to 50 clients", drawn, note="the paper shows one draw, as we do"),
    Part("table", "1", "Distributions of privacy budgets, and 30 clients drawn", budgets),
    Part("table", "3", "Records by label, IID MNIST, 20 clients", held("iid")),
    Part("table", "4", "Records by label, non-IID MNIST, 20 clients", held("shards")),
    Part(
        "table",
        "5",
        "Seconds for subspace and projection, 5 public clients",
        seconds,
        note="the paper's machine ran 256 Lanczos steps, ours an exact thin SVD on one core",
    ),
    Part("table", "6", "Data sets and models", used),
    Part(
        "figure",
        "7-draws",
        f"Uplink by chance of cohorts: {ROUNDS} rounds of 40 of 50 clients, 5 of them public",
        uplinks,
        note="the paper's runs end after about 95 rounds, and it truncates its numbers",
    ),
)
