"""Claims of Aldaghri et al., 2021 (FedHDP), and of Guo et al., IEEE CNS 2022 (CMP-Fed): whole clients are protected."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from polyeps_reproductions.headlines import TIE, Headline, Outcome, Outcomes, Results, number, outcome, signed

SPLITS = {"1": "at random", "2": "five labels each"}
ONE = "sound accounting only"
FREE = "no noise, so no form"


def _hdp(clients: str, ratio: float | str, column: str = "Acc_g") -> Callable[[Results], Outcomes]:
    """Return the measure of FedHDP's lead over DP-FedAvg in a column of its tables."""

    def measure(results: Results) -> Outcomes:
        part = "table-2" if clients == "writers" else "table-1"
        rows = {(row["method"], row["r"]): row for row in results.rows("fedhdp", part, clients=clients)}
        ours, plain = rows.get(("fedhdp", ratio)), rows.get(("dp-fedavg", ""))
        if ours is None or plain is None:
            return {}
        gap = number(ours[column]) - number(plain[column])
        text = f"{number(plain[column]):.1f} → {number(ours[column]):.1f} %, {signed(gap)} points"
        return {"sound": Outcome(int(gap > TIE), 1, text)}

    return measure


def _opting_out(results: Results) -> Outcomes:
    """Δ_l: personal models of open clients are better than private clients'."""
    rows = [*results.rows("fedhdp", "table-1"), *results.rows("fedhdp", "table-2")]
    gaps = [number(row["Δ_l"]) for row in rows if row["Δ_l"] != "–" and row["clients"] != "skewed"]
    return {"sound": outcome(gaps, lambda gap: gap > 0, digits=2)} if gaps else {}


def _best_weight(results: Results) -> Outcomes:
    """Lemma 1: the printed r* has the least simulated variance, to within two standard errors."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in results.rows("fedhdp", "figure-1"):
        curves.setdefault(row["curve"], []).append(row)
    away = [
        abs(row["simulated"] - row["closed form"]) / row["standard error"] for some in curves.values() for row in some
    ]
    if not away:
        return {}
    held = sum(one <= 4 for one in away)
    text = f"simulated and closed form differ by at most {max(away):.1f} standard errors at {len(away)} points"
    return {"sound": Outcome(held, len(away), text)}


def _cmp(results: Results) -> dict[tuple[str, str, Any], float]:
    """Return accuracies by table, method and rank."""
    rows = [(table, row) for table in SPLITS for row in results.rows("cmp-fed", f"table-{table}")]
    return {(table, row["method"], row["rank"]): number(row["accuracy %"]) for table, row in rows}


def _against(rival: str, ranks: tuple[Any, ...]) -> Callable[[Results], Outcomes]:
    """Return the measure of CMP-Fed's lead; a rival that compresses nothing has no rank."""

    def measure(results: Results) -> Outcomes:
        found = _cmp(results)
        outcomes: dict[str, Outcome] = {}
        for form, own in (("published", "CMP-Fed, published"), ("sound", "CMP-Fed")):
            gaps = [
                found[table, own, rank] - theirs
                for table in SPLITS
                for rank in ranks
                if (theirs := found.get((table, rival, rank), found.get((table, rival, "–")))) is not None
                and (table, own, rank) in found
            ]
            if gaps:
                outcomes[form] = outcome(gaps, lambda gap: gap > TIE)
        return outcomes

    return measure


def _by_rank(results: Results) -> Outcomes:
    found = _cmp(results)
    outcomes = {}
    for form, own in (("published", "CMP-Fed, published"), ("sound", "CMP-Fed")):
        for_tables = [{rank: v for (t, m, rank), v in found.items() if (t, m) == (table, own)} for table in SPLITS]
        steps = [some[b] - some[a] for some in for_tables for a, b in pairwise(sorted(some))]
        if steps:
            outcomes[form] = outcome(steps, lambda step: step > 0)
    return outcomes


def _noiseless(results: Results) -> Outcomes:
    rows = [row for table in SPLITS for row in results.rows("cmp-fed", f"table-{table}")]
    gaps = [number(row["accuracy %"]) - number(row["paper"]) for row in rows
            if row["method"] in ("FedAvg", "UV-Fed") and row["paper"] != "–"]  # fmt: skip
    return {"sound": outcome(gaps, lambda gap: abs(gap) <= 2)} if gaps else {}


def _saved(results: Results) -> Outcomes:
    rows = results.rows("cmp-fed", "figure-2", method="DP-FedAvg")
    saved = [number(row["CMP-Fed saves %"]) for row in rows if row["CMP-Fed saves %"] != "–"]
    return {"sound": outcome(saved, lambda share: share >= 80, "%", 0)} if saved else {}


def _by_epsilon(results: Results) -> Outcomes:
    curves: dict[tuple[Any, ...], list[float]] = {}
    for row in results.rows("cmp-fed", "figure-1"):
        curves.setdefault((row["images"], row["rank"]), []).append(number(row["accuracy %"]))
    falls = [some[-1] - max(some) for some in curves.values()]
    return {"sound": outcome(falls, lambda fall: fall >= -TIE)} if falls else {}


def _theorem(results: Results) -> Outcomes:
    rows = {row["account"]: number(row["σ"]) for row in results.rows("cmp-fed", "table-accounts")}
    if not rows:
        return {}
    printed, needed = rows["theorem 1 of the paper"], rows["Poisson cohorts"]
    held = int(printed <= 1.1 * needed)
    return {
        "published": Outcome(held, 1, f"σ = {printed:.2f}"),
        "sound": Outcome(held, 1, f"σ = {needed:.2f} is enough"),
    }


HEADLINES = (
    Headline(
        "fedhdp",
        "With 5 % of the clients opted out, FedHDP (r = 0.01) is above DP-FedAvg, one digit a client",
        "88.75 → 92.48 %, +3.73 points",
        "table 1",
        _hdp("one digit", 0.01),
        "The open clients' mean has no noise; they alone (r = 0) explain part of it",
        ONE,
    ),
    Headline(
        "fedhdp",
        "The same where all that opt out hold a 7 (r = 0.1)",
        "88.93 → 90.36 %, +1.43 points",
        "table 1",
        _hdp("skewed", 0.1),
        "Clients of one digit pull the model towards it; the best r here is 1",
        ONE,
    ),
    Headline(
        "fedhdp",
        "The same for clients that are writers (r = 0.01)",
        "77.61 → 86.88 %, +9.27 points",
        "table 2, FMNIST",
        _hdp("writers", 0.01),
        "539 writers instead of 3383 need five times the noise for ε = 0.6, which hurts DP-FedAvg more",
        ONE,
    ),
    Headline(
        "fedhdp",
        "Personal models of private clients gain over DP-FedAvg's (writers, r = 0.01)",
        "90.04 → 93.76 %",
        "table 2, FMNIST",
        _hdp("writers", 0.01, "Acc_l,p"),
        "They are pulled towards a better common model",
        ONE,
    ),
    Headline(
        "fedhdp",
        "Opting out improves one's own personal model (Δ_l > 0)",
        "0.00 and −0.04 (one digit), +1.87 to +3.49 (writers)",
        "tables 1, 2",
        _opting_out,
        "Open writers' own models are worse than private ones' here (Δ_l is negative). With one digit a client "
        "nothing is left to gain",
        ONE,
    ),
    Headline(
        "fedhdp",
        "Lemma 1: r* and its variance",
        "closed form",
        "figure 1",
        _best_weight,
        "Derived again and simulated; equation (14) and theorem 3 are wrong as printed ([theory](fedhdp-theory.md))",
        "theory",
    ),
    Headline(
        "cmp-fed",
        "CMP-Fed at rank 16 is above DP-FedAvg",
        "+1.22 and +2.18 points",
        "tables I, II",
        _against("DP-FedAvg", (16,)),
        "Paid factors start from the last round's noise and hold a third of the update; directions from the "
        "public model close the gap",
    ),
    Headline(
        "cmp-fed",
        "CMP-Fed is above DP-RandAgg at every rank",
        "+3.8 to +17.6 points",
        "tables I, II",
        _against("DP-RandAgg", (1, 2, 4, 8, 16)),
        "Random coordinates drop most of the update",
    ),
    Headline(
        "cmp-fed",
        "Accuracy rises with the rank",
        "68.5 to 78.9 %",
        "tables I, II",
        _by_rank,
        "More directions hold more of the update",
    ),
    Headline(
        "cmp-fed",
        "FedAvg and UV-Fed, without noise (within two points)",
        "77.2 to 86.6 %",
        "tables I, II",
        _noiseless,
        "Model, data and optimiser are the paper's",
        FREE,
    ),
    Headline(
        "cmp-fed",
        "CMP-Fed saves 90 and 93 % of DP-FedAvg's uplink until 74 % (80 % or more)",
        "90 and 93 %",
        "figure 2",
        _saved,
        "It needs fewer bytes, though it ends lower",
        ONE,
    ),
    Headline(
        "cmp-fed",
        "Accuracy rises with ε",
        "curves",
        "figure 1",
        _by_epsilon,
        "At larger ranks it is best before the last rounds, where noise outweighs what is left to learn",
        ONE,
    ),
    Headline(
        "cmp-fed",
        "Theorem 1 gives the noise for (1, 10⁻⁴)",
        "closed form",
        "theorem 1",
        _theorem,
        "Its condition fails in the paper's own setting, and its noise is more than twice what is needed",
    ),
)
