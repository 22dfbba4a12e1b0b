"""Claims of Liu et al., VLDB 2022 (PFA, PFA+ and WeiAvg), and of Liu et al., CIKM 2023 (PDP-FL)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from polyeps_reproductions.headlines import (
    TIE,
    Headline,
    Outcome,
    Outcomes,
    Results,
    by_form,
    extremes,
    leads,
    number,
    outcome,
)
from polyeps_reproductions.pfa import READ

FAR = 20.0  # points that "far above" takes
SAME = 1.0  # points within which two methods are "as good"
IID, SHARDS = ("figure-3", "figure-10"), ("figure-11", "figure-12")


def _ahead(higher: str, lower: str, *parts: str, by: float = TIE, study: str = "pfa", **labels: Any) -> Any:
    """Return the measure that a method leads another by more than so many points."""
    return lambda results: by_form(
        lambda form: outcome(
            leads(results.records(study, *parts, form=form, **labels), higher, lower), lambda gap: gap > by
        )
    )


def _alike(one: str, other: str, *parts: str, study: str = "pfa") -> Any:
    return lambda results: by_form(
        lambda form: outcome(leads(results.records(study, *parts, form=form), one, other), lambda gap: abs(gap) <= SAME)
    )


def _narrows(results: Results) -> Outcomes:
    """FedAvg's distance to PFA is smaller under MixGauss3 than under MixGauss1, for the same data, model, clients."""

    def measure(form: str) -> Outcome:
        gaps: dict[tuple[Any, ...], dict[str, float]] = {}
        for one in results.records("pfa", *IID, form=form):
            if one["method"] in ("pfa", "fedavg"):
                sign = 100 if one["method"] == "pfa" else -100
                cell = gaps.setdefault((one["data"], one["model"], one["clients"]), {})
                cell[one["budgets"]] = cell.get(one["budgets"], 0.0) + sign * one["mean"]
        shrunk = [cell["mixgauss1"] - cell["mixgauss3"] for cell in gaps.values() if len(cell) == 2]
        return outcome(shrunk, lambda less: less > TIE)

    return by_form(measure)


def _fewer_directions(results: Results) -> Outcomes:
    def measure(form: str) -> Outcome:
        means = {one["method"]: 100 * one["mean"] for one in results.records("pfa", "figure-6", form=form)}
        others = [name for name in means if name.startswith("pfa-plus") and name != "pfa-plus rank=1"]
        return outcome([means["pfa-plus rank=1"] - means[name] for name in others], lambda gap: gap > TIE)

    return by_form(measure)


def _random_directions(results: Results) -> Outcomes:
    def measure(form: str) -> Outcome:
        some = results.records("pfa", "figure-6", form=form)
        return outcome([100 * one["mean"] for one in some if "gaussian" in one["method"]], lambda of: of < 50, "%")

    return by_form(measure)


def _uplink(results: Results) -> Outcomes:
    def measure(form: str) -> Outcome:
        sent: dict[str, dict[str, float]] = {}
        for one in results.records("pfa", "figure-7", form=form):
            sent.setdefault(one["cell"], {})[one["method"]] = one["up_private"]
        saved = [100 - 100 * cell["pfa-plus"] / cell["pfa"] for cell in sent.values() if len(cell) == 2]
        return outcome(saved, lambda share: share >= 98.5, "% less")

    return by_form(measure)


def _groups(results: Results) -> Outcomes:
    rows = results.rows("pdp-fl", "table-1", rule="one round, as published")
    return by_form(
        lambda form: outcome(
            [number(row["all groups exact"]) for row in rows if row["form"] == form],
            lambda share: share >= 95,
            "% of draws",
        )
    )


def _norms(results: Results) -> Outcomes:
    """Norms are shorter for IID data, and longer for smaller ε."""
    found = {(row["partition"], row["budget"]): number(row["mean"]) for row in results.rows("pdp-fl", "figure-2")}
    kinds = {kind for kind, _ in found}
    budgets = [name for name in ("ε = 0.4", "ε = 3", "ε = 20") if ("IID", name) in found]
    shorter = [found[kind, name] - found["IID", name] for kind in kinds - {"IID"} for name in budgets]
    longer = [found[kind, a] - found[kind, b] for kind in kinds for a, b in pairwise(budgets)]
    gaps = [*shorter, *longer]
    return {"sound": outcome(gaps, lambda gap: gap > 0, "longer", 2)} if gaps else {}


def _hidden(results: Results) -> Outcomes:
    """An observer of the updates cannot tell ε: its estimates explain less than half of the variance of log ε."""
    shown = [number(row["R² of log ε"]) for row in results.rows("pdp-fl", "table-observer")]
    return {"sound": outcome(shown, lambda squared: squared < 0.5, "R²", 3)} if shown else {}


def _printed(higher: str, lower: str, *budgets: str) -> str:
    """Return the range of a lead in the values read off the paper's plots."""
    gaps = [
        100 * (value - READ[setting, lower])
        for (setting, method), value in READ.items()
        if method == higher and (not budgets or setting.budgets in budgets)
    ]
    return "{:.0f} to {:.0f}".format(*extremes(gaps))


HEADLINES = (
    Headline(
        "pfa",
        "PFA is far above FedAvg (20 points or more) under MixGauss1, IID",
        f"+{_printed('pfa', 'fedavg', 'mixgauss1')} points",
        "figure 3",
        _ahead("pfa", "fedavg", "figure-3", by=FAR),
        "The published noise is several times what the small budgets need; calibrated noise lifts FedAvg with logistic "
        "regression and narrows the gap",
    ),
    Headline(
        "pfa",
        "PFA is above WeiAvg, IID",
        f"+{_printed('pfa', 'weiavg')} points",
        "figures 3, 10",
        _ahead("pfa", "weiavg", *IID),
        "With calibrated noise ε-weights suppress noisy updates by themselves; under MixGauss3 WeiAvg also learns from "
        "them",
    ),
    Headline(
        "pfa",
        "PFA+ is as good as PFA (within a point), IID",
        "within 2 points",
        "figures 3, 10",
        _alike("pfa-plus", "pfa", *IID),
        "Last round's directions do as well as this round's",
    ),
    Headline(
        "pfa",
        "The gap to FedAvg is smaller under MixGauss3 than under MixGauss1",
        f"{_printed('pfa', 'fedavg', 'mixgauss1')} points, then {_printed('pfa', 'fedavg', 'mixgauss3')}",
        "figures 3, 10",
        _narrows,
        "A larger ε needs less noise",
    ),
    Headline(
        "pfa",
        "PFA outperforms WeiAvg on non-IID data in most cases",
        "no readings",
        "figures 8, 11, 12",
        _ahead("pfa", "weiavg", *SHARDS),
        "A private update that is projected onto directions of public clients cannot teach what those have not seen",
    ),
    Headline(
        "pfa",
        "Projected private updates add to what public clients know",
        "not compared",
        "our control",
        _ahead("pfa", "public-only", *IID, *SHARDS),
        "The gain is that of listening to the high-ε clients; projection adds points in a few settings only",
    ),
    Headline(
        "pfa",
        "One direction is best, and more lose accuracy",
        "78, 73, 70, 42, 15 % for k = 1, 2, 5, 10, 50",
        "figure 6(a)",
        _fewer_directions,
        "A few public updates span a few directions; a k beyond them changes nothing. The 256 Lanczos steps of the "
        "paper's code return rounding errors there; with equal weights, which the code has too, accuracy falls with k",
    ),
    Headline(
        "pfa",
        "Random directions fail",
        "11 % for k = 1, 14 % for k = 7000",
        "figure 6(b)",
        _random_directions,
        "One random direction loses everything; 7000 of 7840 keep nearly everything. The paper's 14 % is unexplained",
    ),
    Headline(
        "pfa",
        "PFA+ saves 99 % of the private clients' uplink",
        "nearly 99 %",
        "figure 7",
        _uplink,
        "Yes, but for the warm-up round; the downlink, which the paper does not count, carries the directions",
    ),
    Headline(
        "pdp-fl",
        "Norms of updates give the groups of all three mixtures",
        "equal to the truth",
        "figure 3, table 1",
        _groups,
        "With calibrated noise the groups at ε = 1 and 10 have nearly the same norm; our estimate of the noise itself "
        "tells them apart in most draws",
    ),
    Headline(
        "pdp-fl",
        "PFA with estimated groups is as good as with known ones (within a point)",
        "no numbers",
        "figure 4",
        _alike("pdp-fl", "pfa", "figure-4", study="pdp-fl"),
        "Yes with estimated noise and weights by it; the published form weights all clients alike",
    ),
    Headline(
        "pdp-fl",
        "PFA with estimated groups is far above FedAvg (20 points or more)",
        "no numbers",
        "figure 4",
        _ahead("pdp-fl", "fedavg", "figure-4", by=FAR, study="pdp-fl"),
        "Ten clients of two labels: the one high-ε client teaches two labels. Calibrated noise makes FedAvg usable",
    ),
    Headline(
        "pdp-fl",
        "Norms grow as ε falls, and are shortest for IID data",
        "curves",
        "figure 2",
        _norms,
        "Noise adds to the norm, and the updates of clients with few labels differ",
        "one form run",
    ),
    Headline(
        "pdp-fl",
        "Privacy budgets are not exposed",
        "the title",
        "title",
        _hidden,
        "An update shows its noise, and the noise shows ε",
        "one form run",
    ),
)
