"""Cells of PFA's and PDP-FL's figures: a setting, a method and a form as an experiment.

PFA's settings are the defaults: 100 rounds, 0.8 of the clients in each, 100 local steps, clip 1, δ = 1e-5, 1200 records
a client. Batches are of 4 in the published form, as in every script of the submitted code, and of 8, as in the text, in
the sound form. At least one high-ε client is in every round, for all methods alike; the paper's code grants that to PFA
alone.

Learning rates: one grid for all methods, compared on a sixth of the training records, never on test data. One rate
serves all numbers of clients of a row (data, model, partition, budgets), as chosen with 30 of them, separately for
every method and form, with one seed. Networks are expensive to train, so they share choices: rates are chosen on MNIST,
PFA's serve PFA+ and public-only, and those of methods that small budgets do not bind are chosen under MixGauss1 where
the large ε are the same, about 10. Non-private networks are trained under MixGauss1 only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from polyeps.accounting.certificate import Form
from polyeps.data.budgets import draw_budgets
from polyeps.errors import InputError
from polyeps.experiment.seeds import generator
from polyeps_reproductions.algorithms import algorithm
from polyeps_reproductions.comparison import FORMS
from polyeps_reproductions.reference_algorithms import LANCZOS
from polyeps_reproductions.reference_models import SOFTMAX_TWICE
from polyeps_reproductions.studies import Cell
from polyeps_reproductions.trials import choice, trial

# The paper's names, and the distributions its code really drew from: the figures follow the code.
DRAWN_FROM = {"mixgauss1": "pfa-code-mixgauss3", "mixgauss2": "pfa-code-mixgauss1", "mixgauss3": "pfa-code-mixgauss2"}
HIGH_EPSILON = {20: 2, 30: 4, 40: 4, 50: 5}  # clients with ε ≈ 10 in the paper's one draw, by the number of clients
HIGH_ABOVE = 5.0  # no part of a mixture reaches from one side of it to the other
RANGES = {"mixgauss1": (0.1, 10.0), "mixgauss3": (1.0, 10.0)}  # of the means of a mixture's parts
TENFOLD = {"mixgauss3-tenfold": "mixgauss3"}  # budgets ten times as large as those of another name
LINEAR = ("logistic", "linear_svm", SOFTMAX_TWICE)
GRID = (0.1, 0.05, 0.025, 0.01, 0.005, 0.001)
QUICK_GRID = (0.05, 0.01)
NETWORK_GRID = (0.05, 0.025, 0.01, 0.005)  # all of the grid but its ends
# Data of networks, and those on which their rates are chosen.
NETWORK_DATA = {"mnist": "mnist", "fashion-mnist": "mnist", "cifar10": "cifar10", "imdb": "imdb"}
RATE_OF = {
    "pfa-plus": "pfa",
    "public-only": "pfa",
}  # networks: methods that train at another's rate
_MIXTURES = ("mixgauss1", "mixgauss2", "mixgauss3", "mixgauss4")
# Networks: the budgets under which a method's rate is that of MixGauss1.
CHOSEN_ONCE = {
    "public-only": _MIXTURES,
    "maximum": (*_MIXTURES, "uniform", "pareto"),
    "non-private": (*_MIXTURES, "uniform", "pareto", "gauss"),
}
QUICK_WITHOUT = ("gauss", "pareto", "uniform", "mixgauss2")  # budgets much like others that stay
LAST = 10  # rounds whose mean accuracy is the final one, as in the paper; a third of a short trial's
SPARSELY = 10  # networks are evaluated every tenth round until near the end
Numbers = Mapping[tuple["Setting", str], float]  # the paper's, by setting and method


@dataclass(frozen=True)
class Setting:
    """All of a cell but its method and form."""

    data: str = "mnist"
    model: str = "logistic"
    partition: str = "iid"
    budgets: str = "mixgauss1"
    clients: int = 30
    choice_clients: int = 30  # of the setting in which the learning rates of its row are chosen
    choice_rounds: int | None = None
    epsilons: tuple[float, ...] | None = None  # instead of a draw
    redrawn: bool = False  # budgets are drawn anew for every seed, and the number of high-ε clients with them
    granted: bool = True  # every round has a high-ε client
    lanczos: bool = False  # PFA+ finds directions as the paper's code does
    equal: bool = False  # and weighs all clients alike
    sharp: bool = False  # no ε lies outside the range of the mixture's means, so Minimum has 0.1 or 1, Maximum 10
    twice: bool = False  # the published form applies softmax twice, as the paper's code does
    rates_of: str = ""  # the method at whose learning rate all are trained
    rates_on: str = ""  # the data on which it is chosen
    rate: float | None = None  # the learning rate, instead of a choice
    size: int | None = 1200  # records a client; with shards all records are dealt out
    shards_per_client: int = 10
    rounds: int = 100
    local_steps: int = 100
    batch_published: int = 4
    batch_sound: int = 8
    share: float = 0.8
    delta: float = 1e-5

    @property
    def title(self) -> str:
        budgets = self.budgets if self.epsilons is None else f"ε={self.epsilons[0]:g}"
        return f"{self.data} {self.model} {self.partition} {budgets}{' redrawn' * self.redrawn} M={self.clients}"

    def experiment(self, method: str, form: Form, learning_rate: float = 0.1) -> dict[str, Any]:
        """Return the experiment; a method may have options, as in "pfa-plus rank=5"."""
        name, *words = method.split()
        options = {key: int(value) if value.isdigit() else value for key, value in (one.split("=") for one in words)}
        linear = self.model in (*LINEAR, "mlp")
        name = LANCZOS if self.lanczos else name
        options |= {"weights": "count"} if self.equal else {}
        return {
            "name": self.title,
            "rounds": self.rounds,
            "evaluate_every": 1 if linear else SPARSELY,
            "data": {
                "name": self.data,
                "partition": self.partition,
                "clients": self.clients,
                "shards_per_client": self.shards_per_client,
                **({"size": self.size} if self.partition == "iid" else {}),
            },
            "budgets": {
                **(
                    {"distribution": DRAWN_FROM.get(self.budgets, self.budgets)}
                    if self.redrawn
                    else {"epsilons": self.epsilons or drawn_epsilons(self.budgets, self.clients, self.sharp)}
                ),
                "delta": self.delta,
                "disclosed": not name.startswith("pdp-fl"),
            },
            "model": {"name": self.model},
            "training": {
                "batch": self.batch_published if form == "published" else self.batch_sound,
                "local_steps": self.local_steps,
                "learning_rate": learning_rate,
            },
            "participation": {
                "kind": "full" if self.share == 1 else "uniform",
                "share": self.share,
                "with_public": self.granted,
            },
            "algorithm": algorithm(name, form, **options),
        }

    def cell(self, method: str, form: Form, learning_rate: float | None = None, **others: Any) -> Cell:
        """Return the cell of a method; without a learning rate, it is chosen."""
        if self.twice:
            usual_loss = replace(self, twice=False)
            if form != "published":
                return usual_loss.cell(method, form, learning_rate, **others)
            of_code = replace(usual_loss, model=SOFTMAX_TWICE)
            cell = of_code.cell(method, form, learning_rate, **others)
            return replace(cell, labels={**cell.labels, "cell": self.title, "model": self.model})
        learning_rate = learning_rate or self.rate
        shares = self.model not in LINEAR and self.data in NETWORK_DATA and self.epsilons is None and not self.redrawn
        once = shares and self.budgets in CHOSEN_ONCE.get(method, ())
        one_for_all = replace(self, budgets="mixgauss1") if once else self
        trained = one_for_all if method == "non-private" else self
        values = trained.experiment(method, form, learning_rate or 0.1)
        names = ("data", "model", "partition", "budgets", "clients")
        labels = {"cell": self.title, **{name: getattr(self, name) for name in names}, "method": method, "form": form}
        chosen = None
        if learning_rate is None:
            usual: dict[str, Any] = {
                "redrawn": False,
                "granted": True,
                "lanczos": False,
                "equal": False,
                "sharp": False,
            }
            usual["data"] = self.rates_on or self.data
            tuned = self if self.epsilons is not None else replace(self, clients=self.choice_clients, **usual)
            chosen_for = self.rates_of or method
            if shares:
                base = self if self.rates_of else one_for_all
                tuned = replace(base, clients=self.choice_clients, **usual | {"data": NETWORK_DATA[self.data]})
                chosen_for = self.rates_of or RATE_OF.get(method, method)
            grid = QUICK_GRID if self.choice_rounds else GRID if self.model in LINEAR else NETWORK_GRID
            rates = [{"training.learning_rate": rate} for rate in grid if self.model in LINEAR or rate in NETWORK_GRID]
            chosen = choice(rates, tuned.experiment(chosen_for, form), rounds=self.choice_rounds)
        last = max(1, min(LAST, self.rounds // 3))
        special = {name: others.pop(name) for name in ("paper", "value") if name in others}
        return Cell(labels, trial(values, choice=chosen, last=last, **others), **special)

    def quick(self) -> Setting:
        """Return a setting that takes seconds: 20 clients, 30 rounds of 20 steps, a short choice of rates."""
        clients = min(self.clients, 20)
        return replace(
            self,
            clients=clients,
            choice_clients=clients,
            choice_rounds=5,
            rounds=min(self.rounds, 30),
            local_steps=min(self.local_steps, 20),
        )


def compared(
    settings: Sequence[Setting],
    methods: Iterable[str],
    paper: Numbers | None = None,
    value: str = "final",
    forms: Sequence[Form] = FORMS,
) -> list[Cell]:
    """Return all settings with all methods, in both forms unless some are named."""
    numbers = paper or {}
    return [
        setting.cell(method, form, paper=numbers.get((setting, method)), value=value)
        for setting, form, method in product(settings, forms, list(methods))
    ]


def quick(settings: Iterable[Setting], paper: Numbers | None = None) -> tuple[tuple[Setting, ...], Numbers]:
    """Return quick settings on MNIST with logistic regression, and the paper's numbers where it has the same cell."""
    found: dict[Setting, None] = {}
    numbers: dict[tuple[Setting, str], float] = {}
    for setting in settings:
        if setting.data in ("mnist", "digits") and setting.budgets not in QUICK_WITHOUT:
            small = replace(setting, model="logistic").quick()
            if (
                replace(small, twice=True) in found
            ):  # the linear model's row, of which a network's would be a repetition
                continue
            found[small] = None
            if (setting.model, setting.clients) == (small.model, small.clients):
                numbers |= {(small, name): value for (of, name), value in (paper or {}).items() if of == setting}
    return tuple(found), numbers


@lru_cache(maxsize=64)
def drawn_epsilons(budgets: str, clients: int, sharp: bool = False) -> tuple[float, ...]:
    """Return one draw of budgets for all seeds, forms and methods, as the paper's repeats share one.

    A mixture is drawn again until as many clients have a high ε as in the paper's own draw (2, 4, 4 and 5 of 20, 30,
    40 and 50; a tenth otherwise): with 2 instead of 5 results differ by points, and could not be compared.
    """
    if sharp:
        return tuple(float(value) for value in np.clip(drawn_epsilons(budgets, clients), *RANGES[budgets]))
    if budgets in TENFOLD:
        return tuple(round(10 * value, 6) for value in drawn_epsilons(TENFOLD[budgets], clients))
    rng = generator(clients, f"budgets of the study: {budgets}")
    wanted = HIGH_EPSILON.get(clients, max(1, clients // 10))
    for _ in range(100_000):
        drawn = draw_budgets(DRAWN_FROM.get(budgets, budgets), clients, rng).epsilons
        if "mixgauss" not in budgets or int(np.sum(drawn > HIGH_ABOVE)) == wanted:
            return tuple(float(value) for value in drawn.round(6))
    raise InputError(f"{budgets} hardly ever gives {wanted} high-ε clients of {clients}; choose other budgets")
