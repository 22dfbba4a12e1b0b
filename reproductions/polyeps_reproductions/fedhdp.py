"""Paper 003 (FedHDP): figures 1 and 2 of its theory, and tables 1 and 2, as trials of experiments.

Table 1 is non-IID MNIST: 2000 clients of 30 records of one digit, 25 to train on and 5 to judge by; 5 % opt out, drawn
among all of them or, skewed, among those who hold a 7. Table 2's digits of known writers are MNIST's, by writer, who
are 539 instead of 3383: a round has about 100 of them all the same, so the share drawn is larger. Your own FEMNIST
records take part if they lie beside the other data sets, as a folder or file `femnist` that `data.file` can read.

Settings. The text has ε, δ, r, λ and the share drawn; T = 500 is inferred from them, and everything else is in an
appendix that we do not have. Learning rate and local steps are chosen on a validation split, from the same candidates
for every method and without personal models, which change nothing for the common one; all r share the choice of "auto".
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polyeps.data.public_files import places
from polyeps.data.table_readers import SUFFIXES
from polyeps_reproductions.experiments import Changes, Trial, found, run_all, trial
from polyeps_reproductions.fedhdp_tables import AUTO, FEMNIST, MNIST, OPEN, OURS, PLAIN, SKEWED, WRITERS, Row, compared
from polyeps_reproductions.fedhdp_theory import FIGURES, STUDY
from polyeps_reproductions.running import Means, Told
from polyeps_reproductions.tabulated import Tabulated, summary_of
from polyeps_reproductions.trials import Store

CLIP = 0.1  # what updates are clipped to at first; it adapts within the first rounds
COHORT = 100  # clients expected in a round
RATIOS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9, 1.0)
FEW_RATIOS = (0.0, 0.01, 0.1, 1.0)
EPSILONS = {MNIST: 3.6, SKEWED: 3.6, WRITERS: 0.6, FEMNIST: 4.1}
PULLS = {MNIST: 0.005, SKEWED: 0.005, WRITERS: 0.05, FEMNIST: 0.05}


def _candidates(*rates: float) -> tuple[Changes, ...]:
    return tuple({"training.learning_rate": rate, "training.local_steps": steps} for rate in rates for steps in (1, 5))


CANDIDATES = _candidates(0.1, 0.2, 0.5, 1.0)
# Where noise is larger than the signal, who must listen to all of it needs small steps, and everybody may take them.
LOUD_CANDIDATES = _candidates(0.005, 0.02, 0.1, 0.5)
QUICK_CANDIDATES: tuple[Changes, ...] = ({"training.learning_rate": 0.1}, {"training.learning_rate": 0.5})


def femnist() -> Path | None:
    """Your FEMNIST records, if there are some."""
    names = ("femnist", *(f"femnist{suffix}" for suffix in SUFFIXES))
    return next((path for folder in places(None).folders for name in names if (path := folder / name).exists()), None)


def _settings(clients: str, quick: bool) -> dict[str, Any]:
    """Everything but the algorithm."""
    opting_out = {"name": "open", "share": 0.05, **({"labels": [7]} if clients == SKEWED else {})}
    menu = [{"name": "private", "epsilon": EPSILONS[clients]}, opting_out]
    values: dict[str, Any] = {
        "name": STUDY,
        "rounds": 500,
        "evaluate_every": 25,
        "data": {"name": "mnist", "partition": "one-label", "clients": 2000},
        "budgets": {"delta": 1e-4, "menu": menu},
        "model": {"name": "mlp"},
        "training": {"batch": 20, "clip": CLIP},
        "participation": {"kind": "poisson", "share": COHORT / 2000},
    }
    if clients == WRITERS:
        values["data"] = {"name": "mnist-writers", "partition": "by-writer"}
        values["training"]["batch"] = 10
        values["participation"]["share"] = COHORT / 539
    if clients == FEMNIST:
        values["data"] = {"file": str(femnist()), "partition": "as-in-file"}
        values["training"]["batch"] = 10
        values["participation"]["share"] = COHORT / 3400
    if quick:
        values |= {"rounds": 40, "evaluate_every": 10, "model": {"name": "logistic"}}
        values["data"] = {"name": "digits", "partition": "one-label", "clients": 200}
        values["training"] |= {"batch": 4, "local_steps": 2}
        values["participation"]["share"] = 0.2
    values["data"]["own_test"] = 1 / 6
    return values


def _rows(clients: str, quick: bool) -> tuple[Row, ...]:
    """The methods of a part of a table."""
    full = clients in (MNIST, SKEWED) and not quick
    named = [(OPEN, None), (PLAIN, None), (OURS, AUTO), *((OURS, ratio) for ratio in (RATIOS if full else FEW_RATIOS))]
    return tuple(Row(clients, method, ratio) for method, ratio in named)


def _trial(row: Row, seed: int, quick: bool, *, judging: bool = False) -> Trial:
    algorithm: dict[str, Any] = {"name": row.method, "pull": PULLS[row.clients]}
    if row.ratio is not None:
        algorithm["ratio"] = row.ratio
    if judging:
        algorithm = {name: value for name, value in algorithm.items() if name != "pull"} | {"personal": False}
    values = {**_settings(row.clients, quick), "algorithm": [algorithm]}
    return trial(row.name, values, seed) if judging else _with_candidates(row, values, seed, quick)


def _with_candidates(row: Row, values: dict[str, Any], seed: int, quick: bool) -> Trial:
    # Who opts out makes no difference to methods that treat all clients alike, so they are judged once.
    clients = MNIST if row.clients == SKEWED and row.method != OURS else row.clients
    judged = _trial(Row(clients, row.method, None if row.ratio is None else AUTO), seed, quick, judging=True)
    return trial(row.name, values, seed, _candidates_of(row, quick), judged)


def _candidates_of(row: Row, quick: bool) -> tuple[Changes, ...]:
    return QUICK_CANDIDATES if quick else LOUD_CANDIDATES if row.clients == WRITERS else CANDIDATES


def trials(parts: Iterable[str], quick: bool, seeds: int = 1) -> tuple[Trial, ...]:
    """All trials of parts of tables, those of the first seed first."""
    chosen = tuple(parts)
    return tuple(
        _trial(row, seed, quick) for seed in range(1, seeds + 1) for clients in chosen for row in _rows(clients, quick)
    )


def _parts(number: str, quick: bool) -> tuple[str, ...]:
    if number == "1":
        return (MNIST, SKEWED)
    return (WRITERS, *([FEMNIST] if femnist() and not quick else []))


def _table(number: str, title: str, note: str) -> Tabulated:
    def wanted(quick: bool, seeds: int = 1) -> tuple[Trial, ...]:
        return trials(_parts(number, quick), quick, seeds)

    return Tabulated(STUDY, "table", number, title, compared, wanted, note)


JUDGED = (
    "Acc_g is on the test split. Accuracies of groups are means over clients, on records of their own that nobody "
    "deployed could see. ± is the deviation over seeds; in brackets is the variance across clients, times 100"
)
PARTS: tuple[Tabulated, ...] = (
    *FIGURES,
    _table("1", "2000 clients of one digit, (3.6, 10⁻⁴)-DP for the private", JUDGED),
    _table(
        "2",
        "Clients that are writers",
        f"{JUDGED}. MNIST's writers stand in for the paper's 3383: ε = 0.6 there needs more noise here, since a client "
        "is drawn in every fifth round instead of every thirtieth",
    ),
)


def all_trials(parts: Iterable[Tabulated], quick: bool, seeds: int) -> list[Trial]:
    """Trials in the order in which they are worth most: all of the first seed, then those of the others."""
    wanted = [one for part in parts for one in _of(part, quick, seeds)]
    return sorted(wanted, key=lambda one: one.seed)


def run(parts: Iterable[Tabulated], store: Store, means: Means, seeds: int, quick: bool, told: Told) -> None:
    """Run what is missing."""
    run_all(all_trials(parts, quick, seeds), store, means, told)


def outcome(part: Tabulated, store: Store, seeds: int, quick: bool, command: str) -> dict[str, Any]:
    """A figure or table from its finished trials."""
    wanted = _of(part, quick, seeds)
    results = found(wanted, store)
    return summary_of(part, results, len(wanted) - len(results), quick, command)


def _of(part: Tabulated, quick: bool, seeds: int) -> tuple[Trial, ...]:
    return trials(_parts(part.number, quick), quick, seeds) if part.kind == "table" else ()
