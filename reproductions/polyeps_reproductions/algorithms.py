"""The studies' methods as `[[algorithm]]` tables: the only place that knows the library's names."""

from __future__ import annotations

from typing import Any

from polyeps.errors import InputError

# Methods with another name in the library than in the studies.
NAMED: dict[str, dict[str, Any]] = {
    "DP-FedAvg": {"name": "dp-randagg", "rank": 0},
    "FedAvg": {"name": "dp-randagg", "rank": 0, "budgets": "none"},
    "CMP-Fed": {"name": "cmp-fed"},
    "DP-RandAgg": {"name": "dp-randagg"},
    "UV-Fed": {"name": "cmp-fed", "budgets": "none"},
    "minimum": {"name": "fedavg", "budgets": "minimum"},
    "maximum": {"name": "fedavg", "budgets": "maximum"},
    "non-private": {"name": "fedavg", "budgets": "none"},
    "dp-fedavg": {"name": "fedhdp", "budgets": "minimum"},
    "fedhdp-open": {"name": "fedhdp", "budgets": "none"},
}
# The published forms of the papers' code, where the library's defaults differ from it.
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "pfa": {"split": "top", "subspace": "centred"},
    "pfa-plus": {"split": "top", "subspace": "centred"},
    "public-only": {"split": "top"},
    # PDP-FL has no code; its groups are those of one round, and it cannot weigh by ε, which it hides.
    "pdp-fl": {"grouping": "mixture", "subspace": "centred", "weights": "count"},
}
SENT = {"np": "all", "np-rs": "random", "np-k": "largest", "np-exp": "exp", "np-pe": "pe", "np-ps": "ps"}
SELECTIONS, VALUES = ("exp", "pe", "ps", "random"), ("pm", "hm", "duchi")


def algorithm(method: str, form: str = "sound", **options: Any) -> dict[str, Any]:
    """Return a method's table, with its options."""
    published = AS_PUBLISHED.get(method, {}) if form == "published" else {}
    return {**NAMED.get(method, {"name": method}), "form": form, **published, **options}


def fedsel(method: str, form: str, share: float | str, epsilon: float) -> dict[str, Any]:
    """Return the table of a FedSel method by its paper's name: [selection-]value[-rp | -c | -o], or np-…

    `random-…`, the control that the paper lacks, selects a coordinate at random and does not enlarge it.
    """
    if method in SENT:
        return algorithm("fedsel-exact", form, send=SENT[method], epsilon_select=epsilon)
    *select, name, ending = method.split("-") if method.endswith(("-rp", "-c", "-o")) else [*method.split("-"), ""]
    if name not in VALUES or (select and select[0] not in SELECTIONS) or ending not in ("", "c", "o", "rp"):
        raise InputError(f"FedSel has no method {method!r}; choose one such as ps-pm, pe-pm-c, pm, pm-rp, np-k")
    value = "grid-pm" if name == "pm" and form == "sound" else name
    if not select:
        return algorithm("fedsel-compressed" if ending == "rp" else "fedsel-flat", form, value=value)
    chosen = "uniform" if select[0] == "random" else select[0]
    accumulate = {"accumulate": "step"} if ending == "o" else {}
    extra = "fedsel-extra" if ending == "c" else "fedsel"
    return algorithm(extra, form, select=chosen, value=value, share=share, weights="count", **accumulate)
