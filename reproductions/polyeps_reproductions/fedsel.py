"""Paper 001 (FedSel): figures 2(a) to 2(i), 3(a) to 3(c) and tables 1 to 3, as trials.

The figures' data sets and axes are our reading of the text, which prints none of their numbers. Learning rates: the
paper gives none and uses the same for all methods. So table 3 is run twice: with one α for all, that of NP, and with
each method's own from one grid; everything else has its own. Repeated 5-fold cross-validation; in small, two folds of
20 000 records at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from polyeps_reproductions.fedsel_running import read, run_all, settle
from polyeps_reproductions.fedsel_tables import CHOICES, PAPER, bounds, comparison, cost, gains, variants
from polyeps_reproductions.fedsel_trials import FOLDS, Trial
from polyeps_reproductions.running import Means, Told
from polyeps_reproductions.tabulated import Tabulated, summary_of
from polyeps_reproductions.trials import Store

QUICK_RECORDS, QUICK_FOLDS = 20_000, 2
LOW, HIGH = "syn-l-0.01-0.9", "syn-h-0.01-0.9"
TWO_STAGE = tuple(f"{select}-pm" for select in CHOICES)
EXTRA = tuple(f"{name}-c" for name in TWO_STAGE)
SELECTED = tuple(f"np-{select}" for select in CHOICES)


def trials(
    quick: bool, data: Iterable[str], models: Iterable[str], methods: Iterable[str], **others: Any
) -> list[Trial]:
    """Everything with everything; a tuple among the others is an axis."""
    axes = {name: value if isinstance(value, tuple) else (value,) for name, value in others.items()}
    return [
        Trial(one, model, method, records=QUICK_RECORDS if quick else None, **dict(zip(axes, values, strict=True)))
        for one, model, method in product(data, models, methods)
        for values in product(*axes.values())
    ]


def convergence(name: str, quick: bool) -> tuple[Trial, ...]:
    methods = ("np", "np-k", "np-rs", *SELECTED)
    return tuple(trials(quick, [name], ["logistic"], methods, epsilon=4.0, curve=True))


def selection_only(name: str, quick: bool) -> tuple[Trial, ...]:
    grid = (0.5, 4.0) if quick else (0.5, 1.0, 2.0, 4.0, 8.0)
    baselines = trials(quick, [name], ["logistic"], ("np", "np-k", "np-rs"), epsilon=4.0)
    return (*baselines, *trials(quick, [name], ["logistic"], SELECTED, epsilon=grid))


def budgets(quick: bool, epochs: int) -> tuple[Trial, ...]:
    """Figures 2(f) and 2(g)."""
    data = ("bank", "adult") if quick else ("bank", "adult", "kddcup99", LOW)
    methods = ("np", "pm", "random-pm", "ps-pm", "ps-pm-c") if quick else ("np", "pm", "random-pm", *TWO_STAGE, *EXTRA)
    grid = (0.5, 2.0) if quick else (0.5, 1.0, 2.0, 4.0)
    models = ("logistic",) if quick else ("logistic", "svm")
    return tuple(trials(quick, data, models, methods, epsilon=grid, epochs=epochs))


def values(quick: bool) -> tuple[Trial, ...]:
    names = ("pm", "hm", "duchi")
    methods = [*names, *(f"{select}-{value}" for select in ("random", "ps") for value in names)]
    return tuple(trials(quick, ["adult"], ["logistic"], methods, epsilon=(1.0, 4.0)))


def compressions(quick: bool) -> tuple[Trial, ...]:
    return tuple(
        trials(quick, ["adult", LOW], ["logistic"], ("pm-rp", "pm", "random-pm", *TWO_STAGE), epsilon=(1.0, 4.0))
    )


def accumulation(quick: bool) -> tuple[Trial, ...]:
    chosen = ("ps",) if quick else CHOICES
    methods = [f"{select}-pm{ending}" for select in chosen for ending in ("", "-o")]
    return tuple(trials(quick, ["adult"], ["logistic"], methods, epsilon=(1.0, 4.0), epochs=2))


def shares(quick: bool) -> tuple[Trial, ...]:
    """Figure 3(b)."""
    chosen, mus = (("ps-pm",), (0.1, 0.8)) if quick else (TWO_STAGE, (0.1, 0.2, 0.4, 0.6, 0.8))
    flat = trials(quick, ["adult"], ["logistic"], ("pm", "random-pm"), epsilon=2.0)
    return (*flat, *trials(quick, ["adult"], ["logistic"], chosen, epsilon=2.0, mu=mus))


def batches(quick: bool) -> tuple[Trial, ...]:
    """Figure 3(c)."""
    chosen = ("ps-pm",) if quick else TWO_STAGE
    sizes = (0.0025, 0.01) if quick else (0.0025, 0.005, 0.01)
    flat = trials(quick, ["adult"], ["logistic"], ("pm", "random-pm"), batch=sizes)
    return (*flat, *trials(quick, ["adult"], ["logistic"], chosen, batch=sizes, mu="auto"))


def table_three(quick: bool) -> tuple[Trial, ...]:
    data, models = dict.fromkeys(name for name, _ in PAPER), ("logistic", "svm")
    sound = ("np", "pm", "random-pm", *TWO_STAGE, *EXTRA)
    published = ("pm", "pe-pm", "pe-pm-c") + (() if quick else ("ps-pm", "ps-pm-c"))
    found = trials(quick, data, models, sound, rate=("shared", "own"))
    return (*found, *trials(quick, data, models, published, rate=("shared", "own"), form="published"))


_OVER_FLAT = tuple((name, "pm") for name in TWO_STAGE)
_OVER_RANDOM = tuple((name, "random-pm") for name in TWO_STAGE)
_SELECT = (("np", "np-k"), ("np-k", "np-rs"), ("np-pe", "np-exp"), ("np-ps", "np-exp"))


def _figure(number: str, title: str, make: Any, wanted: Any = lambda _: (), note: str = "") -> Tabulated:
    return Tabulated("fedsel", "figure", number, title, make, wanted, note)


PARTS: tuple[Tabulated, ...] = (
    _figure(
        "2a", "Selection only, ε₁ = 4, d = 100", comparison("epsilon", _SELECT, True), lambda q: convergence(LOW, q)
    ),
    _figure(
        "2b", "Selection only, ε₁ = 4, d = 300", comparison("epsilon", _SELECT, True), lambda q: convergence(HIGH, q)
    ),
    _figure("2c", "Selection only by ε₁, d = 100", comparison("epsilon", _SELECT), lambda q: selection_only(LOW, q)),
    _figure("2d", "Selection only by ε₁, d = 300", comparison("epsilon", _SELECT), lambda q: selection_only(HIGH, q)),
    _figure("2e", "Time of one client's report", cost),
    _figure(
        "2f", "Accuracy by ε, one epoch", comparison("epsilon", _OVER_FLAT + _OVER_RANDOM), lambda q: budgets(q, 1)
    ),
    _figure(
        "2g", "Accuracy by ε, two epochs", comparison("epsilon", _OVER_FLAT + _OVER_RANDOM), lambda q: budgets(q, 2)
    ),
    _figure(
        "2h",
        "Other ways to perturb a value",
        comparison("epsilon", tuple((f"ps-{name}", name) for name in ("pm", "hm", "duchi"))),
        values,
    ),
    _figure(
        "2i",
        "The compressed solution, ratio 0.1",
        comparison("epsilon", tuple((name, "pm-rp") for name in (*TWO_STAGE, "pm"))),
        compressions,
    ),
    _figure(
        "3a",
        "Accumulating g or αg (-o), two epochs",
        comparison("epsilon", tuple((name, f"{name}-o") for name in TWO_STAGE)),
        accumulation,
    ),
    _figure("3b", "The share μ of ε for the choice, ε = 2", comparison("mu"), shares),
    _figure("3c", "μ by rule, by batch", comparison("batch", _OVER_FLAT + _OVER_RANDOM), batches),
    Tabulated("fedsel", "table", "1", "The paper's bounds in numbers", bounds),
    Tabulated("fedsel", "table", "2", "Variants, and what they cost", variants),
    Tabulated("fedsel", "table", "3", "Gains and losses in points, ε = 2", gains, table_three),
)


def all_trials(parts: Iterable[Tabulated], quick: bool, repeats: int) -> list[Trial]:
    return [trial for part in parts for trial in repeated(part.trials(quick), quick, repeats)]


def repeated(some: Iterable[Trial], quick: bool, repeats: int) -> Iterator[Trial]:
    """Every trial on every fold of every repetition."""
    for trial in some:
        for repeat, fold in product(range(1, repeats + 1), range(1, (QUICK_FOLDS if quick else FOLDS) + 1)):
            yield replace(trial, repeat=repeat, fold=fold)


def run(parts: Iterable[Tabulated], store: Store, means: Means, repeats: int, quick: bool, told: Told) -> None:
    """Run what is missing."""
    run_all(all_trials(parts, quick, repeats), store, means, quick, told)


def outcome(part: Tabulated, store: Store, repeats: int, quick: bool, command: str) -> dict[str, Any]:
    """A figure or table from its finished trials."""
    wanted = list(repeated(part.trials(quick), quick, repeats))
    found = [result for trial in settle(wanted, store, quick) if (result := read(store, trial)) is not None]
    return summary_of(part, found, len(wanted) - len(found), quick, command)
