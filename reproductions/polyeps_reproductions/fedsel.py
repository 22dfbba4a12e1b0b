"""FedSel: figures 2(a) to 2(i), 3(a) to 3(c) and tables 1 to 3.

Liu et al., "FedSel: Federated SGD under Local Differential Privacy with Top-k Dimension Selection", DASFAA 2020,
https://arxiv.org/abs/2003.10637. The figures' data sets and axes are our reading of the text, which prints none of
their numbers. Learning rates: the paper gives none and uses the same for all methods. So table 3 is run twice: with one
α for all, that of NP, and with each method's own from one grid; everything else has its own. Table 3-rates has one α
for all, but others than NP's. Repeated 5-fold cross-validation; quick: two folds of 20 000 records at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

from polyeps_reproductions.algorithms import fedsel as algorithm
from polyeps_reproductions.fedsel_folds import FOLDS, ITERATIONS
from polyeps_reproductions.fedsel_tables import CHOICES, PAPER, bounds, by_axis, by_rate, cost, gains, variants
from polyeps_reproductions.studies import Cell, Part, Study
from polyeps_reproductions.trials import choice, trial

QUICK_RECORDS, QUICK_FOLDS = 20_000, 2
GRID = tuple(round(10 ** (power / 2), 4) for power in range(-4, 7))  # 0.01 to 1000, the same for all methods
QUICK_GRID = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
LARGEST_RATE = 10.0
OTHER_RATES = (0.3162, 1.0, 3.1623)  # of table 3-rates
DECAY = 1e-4  # λ
MODELS = ("logistic", "svm")
LOW, HIGH = "syn-l-0.01-0.9", "syn-h-0.01-0.9"
TWO_STAGE = tuple(f"{select}-pm" for select in CHOICES)
EXTRA = tuple(f"{name}-c" for name in TWO_STAGE)
SELECTED = tuple(f"np-{select}" for select in CHOICES)
DEFAULTS: dict[str, Any] = {"epsilon": 2.0, "form": "sound", "epochs": 1, "batch": 0.01, "mu": 0.1, "rate": "own"}


def settings(labels: dict[str, Any], curve: bool = False) -> dict[str, Any]:
    """Return the experiment of some labels; its learning rate is still to be chosen."""
    chosen = algorithm(labels["method"], labels["form"], labels["mu"], labels["epsilon"])
    return {
        "name": "fedsel",
        "rounds": labels["epochs"] * ITERATIONS,
        "evaluate_every": 1 if curve else 10_000,
        "data": {"name": labels["data"]},
        "budgets": {"epsilon": labels["epsilon"], "delta": 0.0},
        "model": {"name": f"binary_{labels['model']}"},
        "training": {"batch": 1, "local_steps": 1, "learning_rate": 1.0, "decay": DECAY},
        "participation": {"kind": "epoch", "share": labels["batch"]},
        "algorithm": chosen,
    }


def cell(labels: dict[str, Any], quick: bool, curve: bool = False) -> Cell:
    """Return a cell by its labels. Its rate is given, or chosen for its sound form, or for NP, the same for all."""
    records = QUICK_RECORDS if quick else None
    if not isinstance(labels["rate"], str):
        values = settings(labels, curve)
        values["training"]["learning_rate"] = labels["rate"]
        return Cell(labels, trial(values, last=1, folds=True, records=records))
    tuned = {**labels, "form": "sound"}
    if labels["rate"] == "shared":
        tuned |= {"method": "np", "epsilon": 2.0, "mu": 0.1}
    grid, seeds = (QUICK_GRID, (1,)) if quick else (GRID, (1, 2))
    rates = choice([{"training.learning_rate": rate} for rate in grid], settings(tuned), seeds=seeds)
    return Cell(labels, trial(settings(labels, curve), choice=rates, last=1, folds=True, records=records))


def cells(
    quick: bool, data: Iterable[str], models: Iterable[str], methods: Iterable[str], curve: bool = False, **others: Any
) -> list[Cell]:
    """Return everything with everything; a tuple among the others is an axis."""
    axes = {name: value if isinstance(value, tuple) else (value,) for name, value in (DEFAULTS | others).items()}
    return [
        cell({"data": one, "model": model, "method": method, **dict(zip(axes, values, strict=True))}, quick, curve)
        for one, model, method in product(data, models, methods)
        for values in product(*axes.values())
    ]


def convergence(name: str, quick: bool) -> list[Cell]:
    return cells(quick, [name], ["logistic"], ("np", "np-k", "np-rs", *SELECTED), curve=True, epsilon=4.0)


def selection_only(name: str, quick: bool) -> list[Cell]:
    grid = (0.5, 4.0) if quick else (0.5, 1.0, 2.0, 4.0, 8.0)
    baselines = cells(quick, [name], ["logistic"], ("np", "np-k", "np-rs"), epsilon=4.0)
    return [*baselines, *cells(quick, [name], ["logistic"], SELECTED, epsilon=grid)]


def budgets(epochs: int, quick: bool) -> list[Cell]:
    if quick:
        few = ("np", "pm", "random-pm", "ps-pm", "ps-pm-c")
        return cells(True, ("bank", "adult"), ["logistic"], few, epsilon=(0.5, 2.0), epochs=epochs)
    data, methods = ("bank", "adult", "kddcup99", LOW), ("np", "pm", "random-pm", *TWO_STAGE, *EXTRA)
    return cells(False, data, ("logistic", "svm"), methods, epsilon=(0.5, 1.0, 2.0, 4.0), epochs=epochs)


def on_adult(methods: Iterable[str], quick: bool, **others: Any) -> list[Cell]:
    """Return cells of logistic regression on adult; quick, of the two-stage methods PS alone."""
    kept = [name for name in methods if not (quick and name.startswith(("exp-", "pe-")))]
    return cells(quick, ["adult"], ["logistic"], kept, **others)


def values(quick: bool) -> list[Cell]:
    kinds = product(("", "random-", "ps-"), ("pm", "hm", "duchi"))
    return on_adult((select + value for select, value in kinds), quick, epsilon=(1.0, 4.0))


def compressions(quick: bool) -> list[Cell]:
    return cells(quick, ["adult", LOW], ["logistic"], ("pm-rp", "pm", "random-pm", *TWO_STAGE), epsilon=(1.0, 4.0))


def accumulation(quick: bool) -> list[Cell]:
    pairs = product(TWO_STAGE, ("", "-o"))
    return on_adult((name + ending for name, ending in pairs), quick, epsilon=(1.0, 4.0), epochs=2)


def shares(quick: bool) -> list[Cell]:
    mus = (0.1, 0.8) if quick else (0.1, 0.2, 0.4, 0.6, 0.8)
    return [*on_adult(("pm", "random-pm"), quick), *on_adult(TWO_STAGE, quick, mu=mus)]


def batches(quick: bool) -> list[Cell]:
    sizes = (0.0025, 0.01) if quick else (0.0025, 0.005, 0.01)
    return [*on_adult(("pm", "random-pm"), quick, batch=sizes), *on_adult(TWO_STAGE, quick, batch=sizes, mu="auto")]


def table_three(quick: bool) -> list[Cell]:
    data, models, rates = list(dict.fromkeys(name for name, _ in PAPER)), MODELS, ("shared", "own")
    published = ("pm", "pe-pm", "pe-pm-c") + (() if quick else ("ps-pm", "ps-pm-c"))
    sound = cells(quick, data, models, ("np", "pm", "random-pm", *TWO_STAGE, *EXTRA), rate=rates)
    return [*sound, *cells(quick, data, models, published, rate=rates, form="published")]


def other_rates(quick: bool) -> list[Cell]:
    """Return the methods of table 3 with one α for all, which need not be the best for anything."""
    data, models = (["bank"], ["logistic"]) if quick else (list(dict.fromkeys(name for name, _ in PAPER)), MODELS)
    selections = ("ps",) if quick else ("exp", "ps")
    sound = ("pm", *(f"{select}-pm{ending}" for select in selections for ending in ("", "-c")))
    rates = OTHER_RATES[1:2] if quick else OTHER_RATES
    if quick:
        return cells(quick, data, models, sound, rate=rates)
    others = ("pm", "pe-pm", "pe-pm-c")
    found = [
        *cells(quick, data, models, sound, rate=rates),
        *cells(quick, data, models, others, rate=rates, form="published"),
    ]
    # Where the gain grows with α up to the largest of these; it does not beyond.
    largest: dict[str, Any] = {"rate": (LARGEST_RATE,)}
    found += cells(quick, [LOW], ["logistic"], sound, **largest)
    return [*found, *cells(quick, [LOW], ["logistic"], others, **largest, form="published")]


def synthetic(quick: bool) -> list[Cell]:
    """Return the generator's four settings of sparsity, each with the methods of table 3 that differ."""
    data = tuple(f"syn-l-{shrink}-{threshold}" for shrink, threshold in product((0.01, 0.1), (0.6, 0.9)))
    return cells(
        quick, data, ("logistic",) if quick else ("logistic", "svm"), ("np", "pm", "random-pm", "exp-pm", "ps-pm")
    )


_OVER = tuple((name, lower) for lower in ("pm", "random-pm") for name in TWO_STAGE)
_SELECT = (("np", "np-k"), ("np-k", "np-rs"), ("np-pe", "np-exp"), ("np-ps", "np-exp"))
_VALUES = tuple((f"ps-{name}", name) for name in ("pm", "hm", "duchi"))
_COMPRESSED = tuple((name, "pm-rp") for name in (*TWO_STAGE, "pm"))
_ACCUMULATED = tuple((name, f"{name}-o") for name in TWO_STAGE)
_FIGURES: tuple[tuple[str, str, Any, Callable[[bool], list[Cell]]], ...] = (
    ("2a", "Selection only, ε₁ = 4, d = 100", by_axis("epsilon", _SELECT, True), partial(convergence, LOW)),
    ("2b", "Selection only, ε₁ = 4, d = 300", by_axis("epsilon", _SELECT, True), partial(convergence, HIGH)),
    ("2c", "Selection only by ε₁, d = 100", by_axis("epsilon", _SELECT), partial(selection_only, LOW)),
    ("2d", "Selection only by ε₁, d = 300", by_axis("epsilon", _SELECT), partial(selection_only, HIGH)),
    ("2e", "Time of one client's report", cost, lambda _: []),
    ("2f", "Accuracy by ε, one epoch", by_axis("epsilon", _OVER), partial(budgets, 1)),
    ("2g", "Accuracy by ε, two epochs", by_axis("epsilon", _OVER), partial(budgets, 2)),
    ("2h", "Other ways to perturb a value", by_axis("epsilon", _VALUES), values),
    ("2i", "The compressed solution, ratio 0.1", by_axis("epsilon", _COMPRESSED), compressions),
    ("3a", "Accumulating g or αg (-o), two epochs", by_axis("epsilon", _ACCUMULATED), accumulation),
    ("3b", "The share μ of ε for the selection, ε = 2", by_axis("mu"), shares),
    ("3c", "μ by rule, by batch", by_axis("batch", _OVER), batches),
)
PARTS: tuple[Part, ...] = (
    *(Part("figure", *one) for one in _FIGURES),
    Part("table", "1", "The paper's bounds in numbers", bounds),
    Part("table", "2", "Prices of the variants", variants),
    Part("table", "synthetic", "Four synthetic data sets, ε = 2", by_axis("epsilon", _OVER), synthetic),
    Part("table", "3", "Gains and losses in points, ε = 2", gains, table_three),
    Part("table", "3-rates", "Gains and losses in points, ε = 2, by the one α of all methods", by_rate, other_rates),
)


def folds(repeats: int, quick: bool) -> list[int]:
    """Return the seeds that stand for all folds of all repetitions."""
    return [
        FOLDS * repeat + fold for repeat in range(repeats) for fold in range(1, (QUICK_FOLDS if quick else FOLDS) + 1)
    ]


STUDY = Study("fedsel", lambda _: PARTS, seeds=10, trial_seeds=folds)
