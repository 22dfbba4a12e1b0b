"""FedHDP: figures 1 and 2 of its theory, and tables 1 and 2.

Aldaghri et al., "Federated Learning with Heterogeneous Differential Privacy", 2021, https://arxiv.org/abs/2110.15252.

Table 1 is non-IID MNIST: 2000 clients of 30 records of one digit, 25 to train on and 5 to evaluate on; 5 % opt out,
drawn among all of them or, skewed, among those that hold a 7. Table 2's digits of known writers are MNIST's: 539
writers instead of 3383. A round has about 100 of them all the same, so the share drawn is larger. Your own FEMNIST
records take part if they lie beside the other data sets, as a folder or file `femnist` that `data.file` can read.

Settings. The text has ε, δ, r, λ and the share drawn; T = 500 is inferred from them, and everything else is in an
appendix that we do not have. Learning rate and local steps are chosen on a validation split, from the same candidates
for every method and without personal models, which change nothing for the common one. All r share the choice of "auto"
but r = 1, the paper's baseline: it weighs all clients alike, as DP-FedAvg does, and shares that choice. λ of each row
is the paper's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyeps.data.public_files import places
from polyeps.data.table_readers import SUFFIXES
from polyeps_reproductions.algorithms import algorithm
from polyeps_reproductions.fedhdp_tables import (
    AUTO,
    FEMNIST,
    MNIST,
    OPEN,
    OURS,
    PAPER,
    PLAIN,
    SKEWED,
    WRITERS,
    compared,
    with_less_noise,
)
from polyeps_reproductions.fedhdp_theory import FIGURES
from polyeps_reproductions.studies import Cell, Part, Study
from polyeps_reproductions.trials import Settings, Trial, choice, trial

CLIP = 0.1  # the first clip norm of updates; it adapts within the first rounds
COHORT = 100  # clients expected in a round
RATIOS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9, 1.0)
FEW_RATIOS = (0.0, 0.01, 0.1, 1.0)
EPSILONS = {MNIST: 3.6, SKEWED: 3.6, WRITERS: 0.6, FEMNIST: 4.1}
AS_NOISY = 4.95  # ε for 539 writers that gives the noise of ε = 0.6 for the paper's 3383 clients
# λ of the paper's tables 1 and 2, for private clients and for open ones; without a ratio, of every other row.
Pull = float | dict[str, float]
PULLS: dict[tuple[str, str, float | str | None], Pull] = {
    (WRITERS, OURS, None): {"private": 0.05, "open": 0.005},
    (WRITERS, OURS, 1.0): 0.005,
    (FEMNIST, OPEN, None): 0.25,
    (FEMNIST, OURS, None): 0.25,
    (FEMNIST, OURS, 0.1): 0.05,
    (FEMNIST, OURS, 1.0): 0.05,
}
USUAL_PULLS = {MNIST: 0.005, SKEWED: 0.005, WRITERS: 0.05, FEMNIST: 0.05}


def _candidates(*rates: float) -> tuple[Settings, ...]:
    return tuple({"training.learning_rate": rate, "training.local_steps": steps} for rate in rates for steps in (1, 5))


CANDIDATES = _candidates(0.1, 0.2, 0.5, 1.0)
# Where noise is larger than the signal, methods that use all updates need small steps, and all methods may take them.
NOISY_CANDIDATES = _candidates(0.005, 0.02, 0.1, 0.5)
QUICK_CANDIDATES: tuple[Settings, ...] = ({"training.learning_rate": 0.1}, {"training.learning_rate": 0.5})


def femnist() -> Path | None:
    """Return the path of your FEMNIST records, if there are some."""
    names = ("femnist", *(f"femnist{suffix}" for suffix in SUFFIXES))
    return next((path for folder in places(None).folders for name in names if (path := folder / name).exists()), None)


def settings(clients: str, quick: bool, **chosen: Any) -> dict[str, Any]:
    """Return an experiment, whose algorithm is the chosen one."""
    opting_out = {"name": "open", "share": 0.05, **({"labels": [7]} if clients == SKEWED else {})}
    levels = [{"name": "private", "epsilon": EPSILONS[clients]}, opting_out]
    kinds: dict[str, tuple[dict[str, Any], int, float]] = {
        MNIST: ({"name": "mnist", "partition": "one-label", "clients": 2000}, 20, COHORT / 2000),
        WRITERS: ({"name": "mnist-writers", "partition": "by-writer"}, 10, COHORT / 539),
        FEMNIST: ({"file": str(femnist()), "partition": "as-in-file"}, 10, COHORT / 3400),
    }
    data, batch, share = kinds[MNIST if clients == SKEWED else clients]
    values: dict[str, Any] = {
        "name": "fedhdp",
        "rounds": 500,
        "evaluate_every": 25,
        "data": {**data, "own_test": 1 / 6},
        "budgets": {"delta": 1e-4, "levels": levels},
        "model": {"name": "mlp"},
        "training": {"batch": batch, "clip": CLIP},
        "participation": {"kind": "poisson", "share": share},
        "algorithm": algorithm(**chosen),
    }
    if quick:
        values |= {"rounds": 40, "evaluate_every": 10, "model": {"name": "logistic"}}
        values["data"] = {"name": "digits", "partition": "one-label", "clients": 200, "own_test": 1 / 6}
        values["training"] |= {"batch": 4, "local_steps": 2}
        values["participation"]["share"] = 0.2
    return values


def cells(clients: str, quick: bool) -> list[Cell]:
    """Return the methods of a part of a table."""
    ratios = RATIOS if clients in (MNIST, SKEWED) and not quick else FEW_RATIOS
    named = [(OPEN, None), (PLAIN, None), (OURS, AUTO), *((OURS, ratio) for ratio in ratios)]
    candidates = QUICK_CANDIDATES if quick else NOISY_CANDIDATES if clients == WRITERS else CANDIDATES
    found = []
    for method, ratio in named:
        options = {"method": method, **({} if ratio is None else {"ratio": ratio})}
        # Which clients opt out makes no difference to methods that treat all alike, so settings are chosen once.
        tuned = MNIST if clients == SKEWED and (method != OURS or ratio == 1.0) else clients
        if method != OURS or (ratio == 1.0 and not quick):
            alike = {"method": PLAIN if ratio == 1.0 else method, "personal": False}
        else:
            alike = {"method": method, "personal": False, "ratio": AUTO}
        chosen = choice(candidates, settings(tuned, quick, **alike))
        values = settings(clients, quick, pull=pull(clients, method, ratio), **options)
        labels = {"clients": clients, "method": method, "ratio": ratio}
        found.append(Cell(labels, trial(values, choice=chosen), None if quick else PAPER.get((clients, method, ratio))))
    return found


def less_noise(quick: bool) -> list[Cell]:
    """Return the private methods on writers with the noise of the paper's 3383 clients, at the rate of "auto"."""
    (auto,) = (one for one in cells(WRITERS, quick) if one.labels["ratio"] == AUTO)
    some = [one for one in cells(WRITERS, quick) if one.labels["method"] == PLAIN or one.labels["ratio"] == 1.0]
    return [replace(one, trial=replace(with_epsilon(one.trial), choice=auto.trial.choice)) for one in some]


def own_rate(quick: bool) -> list[Cell]:
    """Return r = 1 on writers, whose row in table 2 was trained at the rate of "auto" before version 0.3."""
    return [one for one in cells(WRITERS, quick) if one.labels["ratio"] == 1.0]


def with_epsilon(one: Trial) -> Trial:
    values = json.loads(one.settings)
    values["budgets"]["levels"][0]["epsilon"] = AS_NOISY
    return trial(values)


def pull(clients: str, method: str, ratio: float | str | None) -> Pull:
    """Return the paper's λ of a row, or of the method's other rows."""
    return PULLS.get((clients, method, ratio), PULLS.get((clients, method, None), USUAL_PULLS[clients]))


def table_one(quick: bool) -> list[Cell]:
    return [*cells(MNIST, quick), *cells(SKEWED, quick)]


def table_two(quick: bool) -> list[Cell]:
    return [*cells(WRITERS, quick), *(cells(FEMNIST, quick) if femnist() and not quick else [])]


NOTE = (
    "Acc_g is on the test split. Accuracies of groups are means over clients, on records of their own that no "
    "deployed server could see. ± is the deviation over seeds; in brackets is the variance across clients, times 100"
)
PARTS: tuple[Part, ...] = (
    *FIGURES,
    Part("table", "1", "2000 clients of one digit, (3.6, 10⁻⁴)-DP for the private", compared, table_one, NOTE),
    Part(
        "table",
        "2",
        "Clients that are writers",
        compared,
        table_two,
        f"{NOTE}. Rows of writers stand beside the paper's FMNIST, rows of femnist beside its FEMNIST. MNIST's 539 "
        "writers take the place of FMNIST's 3383: ε = 0.6 there needs more noise here, since a client is drawn in "
        "every fifth round instead of every thirtieth",
    ),
    Part(
        "table",
        "2-noise",
        f"Writers with the noise of the paper's 3383 clients (ε = {AS_NOISY:g}, not 0.6)",
        with_less_noise,
        less_noise,
        partial=True,
    ),
    Part("table", "2-rate", "Writers, r = 1 at DP-FedAvg's learning rate", with_less_noise, own_rate, partial=True),
)
STUDY = Study("fedhdp", lambda _: PARTS, seeds=3)
