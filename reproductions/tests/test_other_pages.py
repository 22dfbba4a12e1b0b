"""Numbers in the text of the pages of FedSel, PDP-FL, FedHDP and CMP-Fed are those of the results.

Not recomputed here, because no results are kept of them: the shares of predicted classes and the 1023 pairs of PE and
PS (FedSel), numbers of proofs and of decisions' pages, and timings, which depend on the machine.
"""

from __future__ import annotations

from typing import Any

import pytest
from polyeps_reproductions.headlines import number, numbers
from polyeps_reproductions.other_tables import RESULTS
from polyeps_reproductions.page_tables import ROOT


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / "papers" / f"{name}.md").read_text(encoding="utf-8").split())


def fedsel(figure: str, method: str, at: float, data: str = "adult") -> str:
    axis = {"3b": "mu", "3c": "batch"}.get(figure, "epsilon")
    rows = RESULTS.rows("fedsel", f"figure-{figure}", method=method, **{"data, model": f"{data}, logistic", axis: at})
    return f"{number(rows[0]['accuracy, %']):.1f}"


def test_fedsels_figures() -> None:
    text = page("fedsel")
    low, high = ("syn-l-0.01-0.9", "syn-h-0.01-0.9")
    both = [[fedsel(figure, f"np{name}", 4.0, data) for name in ("", "-k", "-rs", "-ps", "-exp")]
            for figure, data in (("2a", low), ("2b", high))]  # fmt: skip
    assert f"100: {', '.join(both[0][:3])} %; d = 300: {', '.join(both[1][:3])} %)" in text
    assert f"PE, PS ({both[0][3]}, {both[1][3]}) ≥ EXP ({both[0][4]}, {both[1][4]})" in text
    shares = [fedsel("3b", "ps-pm", mu) for mu in (0.1, 0.2, 0.4, 0.6, 0.8)]
    assert f"(PS {', '.join(shares)} % for μ = 0.1" in text
    spreads = [numbers(row["accuracy, %"])[1] for row in RESULTS.rows("fedsel", "figure-3b", method="ps-pm")]
    assert f"each ± {min(spreads):.1f} to {max(spreads):.1f}" in text
    assert spreads[-1] == max(spreads)
    rp = [(fedsel("2i", "ps-pm", at, data), fedsel("2i", "pm-rp", at, data))
          for at, data in ((4.0, "adult"), (1.0, "adult"), (1.0, low))]  # fmt: skip
    assert f"(ADULT {rp[0][0]} against {rp[0][1]}, syn-L a tie)" in text
    assert f"({rp[1][0]} against {rp[1][1]}, {rp[2][0]} against {rp[2][1]})" in text
    others = [fedsel("2h", name, 4.0) for name in ("ps-hm", "hm", "ps-duchi", "duchi")]
    assert f"({others[0]} against {others[1]} % at ε = 4)" in text
    assert f"({others[2]} against {others[3]} %)" in text
    rule = [[fedsel("3c", name, batch) for batch in (0.0025, 0.005, 0.01)] for name in ("ps-pm", "pm")]
    assert "{}, {} and {} % for PS against {}, {} and {} %".format(*rule[0], *rule[1]) in text
    assert float(fedsel("3a", "exp-pm", 4.0)) == pytest.approx(80, abs=0.5)
    assert float(fedsel("3a", "exp-pm-o", 4.0)) == pytest.approx(76, abs=0.5)


def fedhdp(table: str, clients: str, method: str, ratio: Any = "") -> dict[str, Any]:
    (row,) = RESULTS.rows("fedhdp", f"table-{table}", clients=clients, method=method, r=ratio)
    return row


def test_fedhdps_text() -> None:
    text = page("fedhdp")
    plain, auto = (fedhdp("1", "one digit", name, at) for name, at in (("dp-fedavg", ""), ("fedhdp", "auto")))
    assert f"{number(auto['Acc_g']) - number(plain['Acc_g']):.1f} points" in text
    found = RESULTS.summary("fedhdp", "table-1")
    assert found is not None
    assert found["findings"][0].partition("has ")[2].partition(" points")[0] in text
    one = fedhdp("1", "one digit", "fedhdp", 1.0)
    assert f"({number(one['Acc_g']):.2f} against {number(plain['Acc_g']):.2f})" in text
    alone = fedhdp("1", "one digit", "fedhdp", 0.0)
    assert f"the 100 open clients alone reach {number(alone['Acc_g']):.2f} %" in text
    writers = [fedhdp("2", "writers", "fedhdp", at) for at in ("auto", 0.0, 0.01, 0.1, 1.0)]
    assert all(number(row["Δ_l"]) < 0 for row in writers)
    assert "is negative here in every row" in text
    gap = number(writers[0]["Acc_g"]) - number(fedhdp("2", "writers", "dp-fedavg")["Acc_g"])
    assert f"`auto` is {gap:.0f} points above DP-FedAvg" in text


def cmp_fed(table: str, method: str, rank: Any) -> float:
    (row,) = RESULTS.rows("cmp-fed", f"table-{table}", method=method, rank=rank)
    return number(row["accuracy %"])


def test_cmp_feds_text() -> None:
    text = page("cmp-fed")
    for table in ("1", "2"):
        found = RESULTS.summary("cmp-fed", f"table-{table}")
        assert found is not None
        (said,) = (one for one in found["findings"] if one.startswith("CMP-Fed, at") and one.endswith("from DP-FedAvg"))
        mean, error = numbers(said.partition("is ")[2])[:2]
        assert f"−{-mean:.1f} ± {error:.1f}" in text
    under = [number(row["paper"]) - number(row["accuracy %"]) for table in ("1", "2")
             for row in RESULTS.rows("cmp-fed", f"table-{table}", method="DP-RandAgg")]  # fmt: skip
    assert f"itself is {min(under):.1f} to {max(under):.1f} points below the paper in all ten cells" in text
    tuned = [cmp_fed(table, "DP-FedAvg, tuned", "–") for table in ("1", "2")]
    assert f"the tuned DP-FedAvg {tuned[0]:.1f} and {tuned[1]:.1f}" in text


def test_pdp_fls_text() -> None:
    text = page("pdp-fl")
    rows = RESULTS.rows("pdp-fl", "figure-3", rule="rounds so far, noise (ours)")
    assert len(rows) == 6
    assert {row["exact rounds"] for row in rows} == {"20 of 20"}
    assert "in 20 of 20 for all three, in both forms" in text
    spreads = [row["deviation"] for row in RESULTS.rows("pdp-fl", "figure-2", partition="NIID(2)")]
    assert f"it is {spreads[0]}, {spreads[1]} and {spreads[2]} at ε = 0.4, 3 and 20" in text
    found = {(one["clients"], one["method"], one["form"]): one for one in RESULTS.records("pdp-fl", "figure-4")}
    for clients in (30, 10):
        cells = []
        for method in ("pdp-fl", "pfa", "public-only", "fedavg", "minimum", "non-private"):
            published, sound = (found[clients, method, form] for form in ("published", "sound"))
            cells.append(f"{100 * published['mean']:.1f} · {100 * sound['mean']:.1f} ± {100 * sound['deviation']:.1f}")
        assert " | ".join(cells) in text
