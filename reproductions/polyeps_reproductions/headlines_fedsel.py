"""Claims of Liu et al., DASFAA 2020 (FedSel).

Its comparison has one learning rate for all methods, of which the paper says no more. So "published" stands here for
one rate for all, NP's, and "sound" for each method's own; parts that have one protocol are in the second column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyeps_reproductions.fedsel_tables import PAPER
from polyeps_reproductions.headlines import (
    TIE,
    Headline,
    Outcome,
    Outcomes,
    Results,
    extremes,
    number,
    numbers,
    outcome,
    signed,
)
from polyeps_reproductions.studies import difference, grouped

ALPHAS = {"published": "one for all", "sound": "own"}
PAPERS_LOSS = 2.2  # points: the largest of table 3
ONE = "one protocol"
CELL = ("data", "model", "epsilon", "epochs", "rate", "form")  # labels that the methods of a comparison share


def _gains(column: str, holds: Callable[[float, float], bool]) -> Callable[[Results], Outcomes]:
    """Return the measure of a column of table 3, whose cells are a mean and its standard error."""

    def measure(results: Results) -> Outcomes:
        found: dict[str, Outcome] = {}
        for form, alpha in ALPHAS.items():
            rows = [row for row in results.rows("fedsel", "table-3", α=alpha) if "published" not in row["selection"]]
            pairs = [(values[0], (values[1:] or [0.0])[0]) for values in (numbers(row[column]) for row in rows)]
            if pairs:
                held = sum(holds(*pair) for pair in pairs)
                shown = outcome([mean for mean, _ in pairs], lambda _: True).text.partition(";")[0]
                alpha_of = "one α for all" if form == "published" else "own α"
                found[form] = Outcome(held, len(pairs), f"{alpha_of}: {shown}; {held} of {len(pairs)} rows")
        return found

    return measure


def _orders(part: str, *orders: tuple[str, str]) -> Callable[[Results], Outcomes]:
    """Return the measure of orders of methods in a figure; a tie does not break one."""

    def measure(results: Results) -> Outcomes:
        cells: dict[tuple[Any, ...], dict[str, float]] = {}
        for name in part.split():
            for row in results.rows("fedsel", name):
                _, *place = list(row.values())[:2]
                cells.setdefault((name, row["data, model"], *place), {})[row["method"]] = number(row["accuracy, %"])
        gaps = [cell[a] - cell[b] for cell in cells.values() for a, b in orders if a in cell and b in cell]
        return {"sound": outcome(gaps, lambda gap: gap >= -TIE)} if gaps else {}

    return measure


def _above(parts: str, *pairs: tuple[str, str]) -> Callable[[Results], Outcomes]:
    """Return the measure that a method leads another, from the records of some figures, over the folds both have."""

    def measure(results: Results) -> Outcomes:
        gaps = []
        for name in parts.split():
            records = (results.summary("fedsel", name) or {}).get("records") or ()
            for cell in grouped(records, *CELL).values():
                found = {one["method"]: one for one in cell}
                gaps += [difference(found[a], found[b])[0] for a, b in pairs if a in found and b in found]
        return {"sound": outcome(gaps, lambda gap: gap > TIE)} if gaps else {}

    return measure


def _share(results: Results) -> Outcomes:
    """The smallest share of ε for the selection is best: no other is above it by more than a tie."""
    best: dict[str, dict[float, float]] = {}
    for row in results.rows("fedsel", "figure-3b"):
        if row["method"] in ("exp-pm", "pe-pm", "ps-pm"):
            best.setdefault(row["method"], {})[row["mu"]] = number(row["accuracy, %"])
    gaps = [one[0.1] - value for one in best.values() for mu, value in one.items() if mu != 0.1]
    return {"sound": outcome(gaps, lambda gap: gap >= -TIE)} if gaps else {}


def _time(results: Results) -> Outcomes:
    rows = results.rows("fedsel", "figure-2e")
    held = sum(number(row["ps"]) <= 1.1 * number(row["pe"]) <= 1.21 * number(row["exp"]) for row in rows)
    return {"sound": Outcome(held, len(rows), f"to within a tenth in {held} of {len(rows)} rows")} if rows else {}


def _private(results: Results) -> Outcomes:
    """PE costs the ε that it states."""
    rows = [row for row in results.rows("fedsel", "table-2") if row["method"] == "pe-pm"]
    costs = {row["form"]: float(list(row.values())[-1]) for row in rows}
    return {form: Outcome(int(cost <= 2), 1, f"ε = {cost:.4f} for 2") for form, cost in costs.items()}


def _printed(whole: bool) -> str:
    """Return the range of table 3's leads of X-PM over PM, which are gain less loss, or of its losses alone."""
    pairs = [pair for row in PAPER.values() for pair in row]
    low, high = extremes(gain - loss if whole else loss for gain, loss in pairs)
    return f"{signed(low)} to {signed(high)}"


_TWO = ("exp-pm", "pe-pm", "ps-pm")
HEADLINES = (
    Headline(
        "fedsel",
        "FedSel (X-PM) is above PM, clearly (two standard errors)",
        f"{_printed(whole=True)} points",
        "table 3",
        _gains("X-PM − PM", lambda mean, error: mean > 2 * error and mean > 0),
        "PM scales its report up by d, so one α means steps d times as large; with α of its own PM does as well",
    ),
    Headline(
        "fedsel",
        "Selection is what helps: X-PM is clearly above a random coordinate",
        "not compared",
        "our control",
        _gains("X-PM − random-PM", lambda mean, error: mean > 2 * error and mean > 0),
        "At ε₁ = 0.2 the choice is hardly better than chance",
    ),
    Headline(
        "fedsel",
        f"Selection costs the value little (at most {PAPERS_LOSS:g} points)",
        f"{_printed(whole=False)} points",
        "table 3",
        _gains("loss", lambda mean, _: mean <= PAPERS_LOSS),
        "A tenth of ε is taken from the value",
    ),
    Headline(
        "fedsel",
        "Without noise on values: NP ≥ NP-K ≥ NP-RS, and PE, PS ≥ EXP",
        "curves",
        "figures 2(a) to 2(d)",
        _orders(
            "figure-2a figure-2b figure-2c figure-2d",
            ("np", "np-k"),
            ("np-k", "np-rs"),
            ("np-pe", "np-exp"),
            ("np-ps", "np-exp"),
        ),
        "At ε₁ = 4 the choice follows the gradient",
        ONE,
    ),
    Headline(
        "fedsel",
        "X-PM is above PM at every ε, one epoch and two",
        "curves",
        "figures 2(f), 2(g)",
        _above("figure-2f figure-2g", *((name, "pm") for name in _TWO)),
        "As table 3",
        ONE,
    ),
    Headline(
        "fedsel",
        "X-PM is above the compressed solution PM-RP",
        "curves",
        "figure 2(i)",
        _above("figure-2i", *((name, "pm-rp") for name in _TWO)),
        "At ε = 1 averaging a tenth of the coordinates gains more than projecting loses",
        ONE,
    ),
    Headline(
        "fedsel",
        "Accumulating g is no worse than αg",
        "curves",
        "figure 3(a)",
        _orders("figure-3a", *((name, f"{name}-o") for name in _TWO)),
        "With αg the server's step is 1 for every α, so its noise cannot be reduced",
        ONE,
    ),
    Headline(
        "fedsel",
        "μ = 0.1 is best",
        "curves",
        "figure 3(b)",
        _share,
        "We see no order; every μ has its own α here",
        ONE,
    ),
    Headline(
        "fedsel",
        "Time: PS ≤ PE ≤ EXP",
        "curves",
        "figure 2(e)",
        _time,
        "PE is as fast as PS here, since its distribution is sampled directly",
        ONE,
    ),
    Headline(
        "fedsel",
        "PE is ε-private",
        "lemma 2",
        "table 2",
        _private,
        "The proof takes the number of marked coordinates for a constant; ours is calibrated by the exact law",
    ),
)
