"""Numbers in the text of the pages of FedSel, PDP-FL, FedHDP and CMP-Fed are those of the results.

Not recomputed here, because no results are kept of them: the shares of predicted classes and the 1023 pairs of PE and
PS (FedSel), numbers of proofs and of decisions' pages, and timings, which depend on the machine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from polyeps_reproductions import cmp_fed_noise, theory_tables
from polyeps_reproductions.headlines import Results, number, numbers
from polyeps_reproductions.other_tables import RESULTS, fedsel_budgets
from polyeps_reproductions.page_tables import ROOT
from polyeps_reproductions.theory import points


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


def test_leads_at_every_budget_are_shown_once_they_are_there(tmp_path: Path) -> None:
    labels = {"data": "bank", "model": "svm", "epsilon": 0.5}
    made = {"pm": 0.70, "exp-pm": 0.72, "ps-pm": 0.69}
    records = [{**labels, "method": name, "finals": {"1": mean, "2": mean}} for name, mean in made.items()]
    (tmp_path / "fedsel-figure-2f.json").write_text(json.dumps({"records": records}), encoding="utf-8")
    assert fedsel_budgets(Results(tmp_path))[1:3] == [
        ["figure 2f", "BANK", "svm", "+2.0 / – / −1.0", "–", "–", "–"],
        ["figure 2g", "not run", "", "", "", "", ""],
    ]


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
    skewed = {at: fedhdp("1", "skewed", "fedhdp", at) for at in (0.0, 0.1, "auto", 1.0)}
    beaten = number(fedhdp("1", "skewed", "dp-fedavg")["Acc_g"])
    assert f"we have −{beaten - number(skewed[0.1]['Acc_g']):.1f} there" in text
    assert f"which costs {beaten - number(skewed['auto']['Acc_g']):.2f} points" in text
    assert skewed[0.0]["Acc_g,np"].startswith("100.00")
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
    few = [
        number(row["paper"]) - number(row["accuracy %"]) for row in rows_of("DP-RandAgg") if row["rank"] in (1, 2, 4)
    ]
    assert f"DP-RandAgg at ranks 1 to 4, {min(few):.0f} to {max(few):.0f} points below the paper" in text
    tuned = [cmp_fed(table, "DP-FedAvg, tuned", "–") for table in ("1", "2")]
    assert f"the tuned DP-FedAvg {tuned[0]:.1f} and {tuned[1]:.1f}" in text


def rows_of(method: str) -> list[dict[str, Any]]:
    return [row for table in ("1", "2") for row in RESULTS.rows("cmp-fed", f"table-{table}", method=method)]


def test_cmp_feds_accounts_in_the_text() -> None:
    text = page("cmp-fed")
    accounts = {row["account"]: row for row in RESULTS.rows("cmp-fed", "table-accounts")}
    poisson = accounts["Poisson cohorts"]
    assert f"ε = 1 with Poisson sampling gives ε = {number(poisson['true ε, fixed size']):.1f} there" in text
    assert f"for ε = 1: **{number(poisson['true ε, draws known']):.1f}** against a server" in text
    assert f"its true ε is {number(accounts['Poisson cohorts, Rényi']['true ε, Poisson']):.2f}" in text
    loose = number(accounts["Poisson cohorts, Rényi"]["σ"]) / number(poisson["σ"]) - 1
    assert f"({100 * loose / (1 + loose):.0f} % less noise than with Opacus' accountant)" in text
    assert "more than twice what is needed" in text
    assert number(accounts["theorem 1 of the paper"]["σ"]) > 2 * number(poisson["σ"])
    dropped = [number(row["true ε"]) for row in RESULTS.rows("cmp-fed", "table-dropouts")]
    shown = [f"{one:.2f}" for one in dropped]
    assert f"dropouts of 5, 10, 20 and 30 % give {', '.join(shown[:3])} and {shown[3]}" in text
    sigmas = {kind: [number(row["σ that spends ε"]) for row in RESULTS.rows("cmp-fed", "table-integers", noise=kind)]
              for kind in ("discrete-gaussian", "skellam")}  # fmt: skip
    assert "σ = {:.3f}, {:.3f} and {:.3f}; an ideal Gaussian needs".format(*sigmas["discrete-gaussian"]) in text
    assert "σ = {:.3f}, {:.3f} and {:.3f}, at best".format(*sigmas["skellam"]) in text


def test_what_cmp_feds_clients_send_in_the_text() -> None:
    text = page("cmp-fed")
    sent = {row["rank"]: sum(int(one.replace(" ", "")) for one in row["numbers (U + V)"].split("+"))
            for row in RESULTS.rows("cmp-fed", "table-bits")}  # fmt: skip
    shown = {name: f"{count:,}".replace(",", " ") for name, count in sent.items()}
    model = [shown[f"{rank}, directions from the model"] for rank in (1, 4, 16)]
    assert f"{model[0]} numbers instead of {shown['1']} at rank 1, and {model[1]} instead of {shown['4']} at" in text
    assert f"At rank 16 it is less, {model[2]} instead of {shown['16']}" in text
    assert math.erfc(4 / math.sqrt(2)) == pytest.approx(6.3e-5, rel=0.01)  # four deviations of a normal sum
    assert "at most 6·10⁻⁵ of the coordinates wrap" in text
    assert 1 + 2 * math.log(1 / cmp_fed_noise.BUDGET.delta) == pytest.approx(19.4, abs=0.05)
    assert "It needs a Rényi order of 19.4" in text


def test_fedhdps_theory_in_the_text() -> None:
    text = page("fedhdp-theory")
    most = []
    for figure in ("1", "2"):
        found = RESULTS.summary("fedhdp", f"figure-{figure}")
        assert found is not None
        count, trials, errors = numbers(found["findings"][-1])[:3]
        assert (count, trials) == (150, 200_000)
        most.append(f"{errors:.1f}")
    assert f"Of 150 values each, formulas and simulations differ by at most {most[0]} and {most[1]}" in text
    few = theory_tables.PENALTIES[-1]
    costs = points.personal(few.federation, points.PRIVATE).error([few.private_penalty_printed, few.private_penalty])
    assert f"with three it costs {100 * (costs[0] / costs[1] - 1):.0f} %" in text


def test_robust_hdp_is_level_with_weiavg_with_two_exceptions() -> None:
    behind: dict[str, float] = {}
    for name in ("accuracy", "accuracy_other_cells"):
        found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        gaps = {cell: 100 * (one["weiavg"]["mean"] - one["robust-hdp"]["mean"]) for cell, one in found.items()}
        behind |= {cell: gap for cell, gap in gaps.items() if gap > 0.5}
    assert set(behind) == {"mnist-two-labels-mixgauss1", "fashion-shards-mixgauss1"}
    assert behind["fashion-shards-mixgauss1"] == pytest.approx(1, abs=0.1)
    assert "with two exceptions" in page("peers")


def test_cmp_feds_comparisons_in_the_text() -> None:
    text = page("cmp-fed")
    spreads: dict[str, list[float]] = {}
    for method in ("CMP-Fed", "DP-RandAgg", "DP-FedAvg", "FedAvg", "CMP-Fed, published"):
        spreads[method] = [numbers(row["accuracy %"])[1] for row in rows_of(method)]
    assert f"(up to {max(spreads['CMP-Fed'] + spreads['CMP-Fed, published']):.1f} for CMP-Fed" in text
    assert f"{max(spreads['DP-RandAgg']):.1f} for DP-RandAgg)" in text
    (one,) = RESULTS.rows("cmp-fed", "table-2", method="UV-Fed", rank=1)
    mean, error = numbers(one["accuracy %"])
    assert f"(−{number(one['paper']) - mean:.1f} ± {error / 5**0.5:.1f} over five seeds)" in text
    away = {
        method: [number(row["accuracy %"]) - number(row["paper"]) for row in rows_of(method)]
        for method in ("CMP-Fed", "CMP-Fed, published", "DP-FedAvg")
    }
    sound, published = away["CMP-Fed"], away["CMP-Fed, published"]
    assert f"between {-min(sound):.1f} below and {max(sound):.1f} above the paper" in text
    assert f"(as published {-min(published):.1f} below and {max(published):.1f} above)" in text
    assert "DP-FedAvg is {:.1f} and {:.1f} above it".format(*sorted(away["DP-FedAvg"])) in text
    understated = [number(row["accuracy %"]) for row in rows_of("CMP-Fed, one release charged")]
    assert "({:.1f} and {:.1f} at rank 16)".format(*understated) in text
    leads = {method: [cmp_fed(table, method, rank) - cmp_fed(table, "DP-RandAgg", rank)
                      for table in ("1", "2") for rank in (1, 2, 4, 8, 16)]
             for method in ("CMP-Fed", "CMP-Fed, published")}  # fmt: skip
    shown = [f"{min(some):.0f} to {max(some):.0f}" for some in leads.values()]
    assert f"the sound form by {shown[0]}, the published one by {shown[1]}" in text
    model = "CMP-Fed, directions from the model"
    assert cmp_fed("1", model, 16) == pytest.approx(cmp_fed("2", model, 16), abs=0.05)
    assert f"At rank 16 they reach {cmp_fed('1', model, 16):.1f} twice" in text
    tuned = [cmp_fed(table, "CMP-Fed, tuned", 16) for table in ("1", "2")]
    assert "tuned too, reaches {:.1f} and {:.1f}".format(*tuned) in text
    four = [cmp_fed(table, model, 4) for table in ("1", "2")]
    assert "they reach {:.1f} and {:.1f}".format(*four) in text
    plain = [cmp_fed(table, "DP-FedAvg", "–") for table in ("1", "2")]
    assert "({:.1f} and {:.1f} here".format(*plain) in text


def test_pdp_fls_text() -> None:
    text = page("pdp-fl")
    rows = RESULTS.rows("pdp-fl", "figure-3", rule="rounds so far, noise (ours)")
    assert len(rows) == 6
    assert {row["exact rounds"] for row in rows} == {"20 of 20"}
    assert "in 20 of 20 for all three, in both forms" in text
    spreads = [row["deviation"] for row in RESULTS.rows("pdp-fl", "figure-2", partition="NIID(2)")]
    assert f"it is {spreads[0]}, {spreads[1]} and {spreads[2]} at ε = 0.4, 3 and 20" in text
    found = {(one["clients"], one["method"], one["form"]): one for one in RESULTS.records("pdp-fl", "figure-4")}
    behind = {one["method"]: one for (clients, _, form), one in found.items() if (clients, form) == (10, "sound")}
    alone, all_of_them = behind["pfa"]["mean"], behind["fedavg"]["mean"]
    assert f"FedAvg, at {100 * all_of_them:.1f} %, is {100 * (all_of_them - alone):.0f} points ahead" in text
    assert f"does not help either ({100 * found[10, 'fedavg', 'published']['mean']:.1f} %)" in text
    norms = {(row["partition"], row["budget"]): number(row["mean"]) for row in RESULTS.rows("pdp-fl", "figure-2")}
    alike = [norms["NIID(2)", f"ε = {epsilon}"] for epsilon in (3, 20)]
    assert "look alike: {:.2f} and {:.2f} with two labels per client".format(*alike) in text
    least = [norms[kind, "ε = 0.4"] for kind in ("NIID-Dir(0.5)", "NIID(2)")]
    assert "({:.3f} against {:.3f})".format(*least) in text
