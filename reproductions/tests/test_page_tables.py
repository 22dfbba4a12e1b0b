"""The numbers on the papers' pages are those of the results."""

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from polyeps_reproductions.comparison import TIE, orderings
from polyeps_reproductions.page_tables import PAGES, TABLES, filled, lead, near, near_values, records, spread
from polyeps_reproductions.studies import Record, grouped

CLIENTS = (20, 30, 40, 50)


@pytest.fixture(scope="module")
def page() -> str:
    """PFA's page, without line breaks."""
    return " ".join(PAGES[0].read_text(encoding="utf-8").split())


def only(*figures: str, **labels: str | int) -> Record:
    found = records(*figures, **labels)
    assert len({one["mean"] for one in found}) == 1
    return found[0]


def gain(some: Iterable[Record]) -> tuple[float, float | None]:
    """PFA over public-only in all cells of some records."""
    cells = [{one["method"]: one for one in cell} for cell in grouped(some, "cell").values()]
    return lead([(cell["pfa"], cell["public-only"]) for cell in cells if {"pfa", "public-only"} <= set(cell)])


def points(higher: Record, lower: Record) -> float:
    return 100 * float(higher["mean"] - lower["mean"])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_tables_are_made_from_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert filled(text) == text, "run python -m polyeps_reproductions.page_tables"


def test_every_table_is_on_a_page() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert all(texts.count(f"<!-- table {name} -->") == 1 for name in TABLES)


def test_a_changed_number_is_found() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    value = spread(only("4", budgets="pareto", method="pfa", form="published"))
    assert value in text
    assert filled(text.replace(value, "99.9 ± 0.1")) == text


def test_how_many_values_are_reproduced(page: str) -> None:
    both = {model: [near_values("3", "10", model=model, method=name) for name in ("pfa", "pfa-plus")]
            for model in ("logistic", "cnn")}  # fmt: skip
    sums = {model: [sum(column) for column in zip(*pair, strict=True)] for model, pair in both.items()}
    (lr, lr_all), (cnn, cnn_all) = sums.values()
    assert (
        f"in {lr + cnn} of {lr_all + cnn_all} values**: {lr} of {lr_all} for LogR, {cnn} of {cnn_all} for the CNN"
        in page
    )
    every = [near_values("3", "10", model=model) for model in ("logistic", "cnn")]
    assert "it is {} of {} and {} of {}".format(*every[0], *every[1]) in page
    twice, once = near_values("3", "10", data="mnist", model="logistic"), near_values("3-softmax-once")
    assert "With softmax twice {} of {} values".format(*twice) in page
    assert "with softmax once {} of {}".format(*once) in page
    least = [
        *near_values("3", "10", data="mnist", model="logistic", method="minimum"),
        *near_values("3-softmax-once", method="minimum"),
    ]
    assert "Minimum ({} of {} values within 4 points, {} of {} before)".format(*least) in page


def test_the_papers_orders(page: str) -> None:
    def broken(form: str, *figures: str, **labels: Any) -> int:
        cells = grouped(records(*figures, form=form, **labels), "cell").values()
        sides = [{one["method"]: {"paper": None, form: one} for one in cell} for cell in cells]
        return sum(not holds[form] for cell in sides for holds in orderings(cell).values())

    assert "Every order that the paper states holds" in page
    assert broken("published", "3", "10") == 0
    assert "all of the paper's orders hold but one: WeiAvg is ahead of PFA with the CNN on Fashion-MNIST and 30" in page
    clothes = {"data": "fashion-mnist", "model": "cnn", "clients": 30}
    assert broken("sound", "3") == broken("sound", "3", **clothes) == 2  # PFA and PFA+
    assert broken("sound", "10") > 0


def test_softmax_twice(page: str) -> None:
    twice = records("3", "10", form="published", model="logistic", data="mnist")
    fedavg = [one for one in twice if (one["method"], one["budgets"]) == ("fedavg", "mixgauss3")]
    away = [100 * (one["mean"] - one["paper"]) for one in fedavg]
    assert f"stays {min(away):.1f} to {max(away):.1f} points above the paper" in page
    gains = [gain(cell)[0] for cell in grouped(twice, "cell").values()]
    assert f"−{-min(gains):.1f} to −{-max(gains):.1f} points in all eight cells" in page


def test_one_rate_for_all_gives_fedavgs_values(page: str) -> None:
    away = {one["clients"]: 100 * (one["mean"] - one["paper"]) for one in records("3-one-rate", budgets="mixgauss3")}
    assert "PFA's rate gives the paper's values to within half a point; with 50 it is above" in page
    assert all(round(abs(away[clients]), 1) <= 0.5 for clients in (20, 30, 40))
    assert away[50] > 4
    assert all(one["mean"] < 0.1 for one in records("3-one-rate", budgets="mixgauss1"))
    plain = [one["mean"] for one in records("6", form="published") if one["method"].startswith("pfa-plus")]
    steps = [one["mean"] for one in records("6-lanczos")]
    assert max(plain) - min(steps) < 0.05  # "a few points"


def test_calibrated_noise(page: str) -> None:
    for budgets in ("mixgauss1", "mixgauss3"):
        cell = {"data": "mnist", "model": "logistic", "cell": f"mnist logistic iid {budgets} M=30", "method": "fedavg"}
        once = {**cell, "form": "published"}
        pair = [only("3-softmax-once", **once)["mean"], only("3", "10", form="sound", **cell)["mean"]]
        assert f"from {100 * pair[0]:.1f} to {100 * pair[1]:.1f} %" in page
    forms = [records("3", model="cnn", data="mnist", method="pfa", form=form) for form in ("sound", "published")]
    gained = [points(*pair) for pair in zip(*forms, strict=True)]
    assert f"PFA with the CNN gains {min(gained):.0f} to {max(gained):.0f} points under MixGauss1" in page
    pairs = zip(*(records("10", form="sound", method=name) for name in ("weiavg", "pfa")), strict=True)
    leads = [points(*pair) for pair in pairs]
    assert f"in {sum(one > 0.25 for one in leads)} of {len(leads)} cells" in page


def test_distributions(page: str) -> None:
    found = {(one["budgets"], one["method"], one["form"]): one for one in records("4")}
    names = ("uniform", "gauss", "pareto", "mixgauss1", "mixgauss2", "mixgauss3", "mixgauss4")
    ahead = {(name, form) for name, form in product(names, ("published", "sound"))
             if points(found[name, "weiavg", form], found[name, "pfa", form]) > 100 * TIE}  # fmt: skip
    assert {name for name, form in ahead if form == "published"} == {"uniform", "gauss"}
    assert all(points(found[name, "weiavg", "sound"], found[name, "pfa", "sound"]) > -100 * TIE for name in names)
    assert all(
        points(found["gauss", "fedavg", form], found["gauss", "pfa", form]) > 0 for form in ("published", "sound")
    )
    assert f"by {points(found['gauss', 'weiavg', 'published'], found['gauss', 'pfa', 'published']):.1f} points" in page
    shown = {name: gain(records("4", budgets=name, form="sound")) for name in names}
    for name, sign in (("mixgauss4", "gains"), ("uniform", "loses")):
        mean, error = shown[name]
        assert f"{sign} {abs(mean):.1f} ± {error:.1f} under" in page
    assert f"and {-shown['gauss'][0]:.1f} under Gauss (one seed)" in page
    for name in ("pareto", "mixgauss1", "mixgauss2", "mixgauss3"):
        mean, error = shown[name]
        assert error is not None
        assert abs(mean) < 2 * error


def test_redrawn_budgets(page: str) -> None:
    published, sound = (records("3-redrawn", method="pfa", form=form) for form in ("published", "sound"))
    lowest = min(published, key=lambda one: min(one["finals"].values()))
    assert f"fall to {100 * min(lowest['finals'].values()):.1f} % ({lowest['clients']} clients" in page
    spreads = [100 * one["deviation"] for one in sound]
    assert f"over draws is {min(spreads):.1f} to {max(spreads):.1f} points" in page


def test_gains(page: str) -> None:
    linear = [
        gain(some) for some in grouped(records("3", "10", model="logistic", form="sound"), "data", "budgets").values()
    ]
    assert (round(min(linear)[0], 1), round(max(linear)[0], 1)) == (0.0, 0.2)
    skewed = [
        gain(some) for some in grouped(records("11", "12", model="logistic", form="sound"), "data", "budgets").values()
    ]
    assert f"+{min(skewed)[0]:.1f} to +{max(skewed)[0]:.1f}, about one standard error" in page
    assert all(error is not None and abs(mean) < 1.5 * error for mean, error in skewed)
    mean, error = gain(records("3", data="mnist", model="cnn", form="sound"))
    assert f"The CNN gains {mean:.1f} ± {error:.1f} under MixGauss1" in page
    published = [
        gain(some) for some in grouped(records("3", "10", form="published"), "data", "model", "budgets").values()
    ]
    far = [f"{-mean:.1f} ± {error:.1f}" for mean, error in published if error is not None and abs(mean) >= 2 * error]
    assert f"LogR on MNIST loses {far[0]} under MixGauss1 and {far[1]} under MixGauss3" in page
    assert len(far) == 2
    for form in ("published", "sound"):
        mean, error = gain(records("12", model="cnn", form=form, data="mnist", clients=30))
        assert f"{mean:.1f} ± {error:.1f} ({form})" in page
        mean, error = gain(records("11", model="cnn", form=form, data="mnist", clients=30))
        assert error is not None
        assert abs(mean) < 2 * error
    forms = ("published", "sound")
    every = {
        (figure, data, form): gain(records(figure, model="cnn", form=form, data=data))[0]
        for figure, data, form in product(("11", "12"), ("mnist", "fashion-mnist"), forms)
    }
    (a, b), (c, d) = ([every["12", data, form] for form in forms] for data in ("mnist", "fashion-mnist"))
    assert f"is {a:.1f} and {b:.1f} points on MNIST (published and sound) and {c:.1f} and {d:.1f} on Fashion" in page
    fewer = [mean for key, mean in every.items() if key[0] == "11"]
    assert f"under MixGauss1 {min(fewer):.1f} to {max(fewer):.1f}" in page


def test_non_iid(page: str) -> None:
    def ahead(figure: str, form: str, name: str, model: str = "logistic") -> dict[int, set[bool]]:
        found = {(one["data"], one["clients"], one["method"]): one for one in records(figure, form=form, model=model)}
        cells = {(data, clients) for data, clients, _ in found}
        return {count: {points(found[data, clients, name], found[data, clients, "pfa"]) > 0
                        for data, clients in cells if clients == count} for count in CLIENTS}  # fmt: skip

    assert "in every cell of the sound form but one, where FedAvg is level (CNN, MNIST, 40 clients)" in page
    networks = {(one["data"], one["clients"], one["method"]): one for one in records("12", form="sound", model="cnn")}
    behind = {(data, count, name): points(networks[data, count, name], networks[data, count, "pfa"])
              for (data, count, _), name in product(networks, ("weiavg", "fedavg"))}  # fmt: skip
    assert [key for key, lead in behind.items() if lead <= 0] == [("mnist", 40, "fedavg")]
    assert abs(behind["mnist", 40, "fedavg"]) < 0.5
    for name in ("weiavg", "fedavg"):
        assert ahead("12", "sound", name) == {count: {True} for count in CLIENTS}
        assert ahead("12", "sound", name, "cnn")[30] == {True}
    assert ahead("12", "published", "weiavg") == {20: {True}, 30: {True}, 40: {False}, 50: {False}}
    assert ahead("11", "sound", "fedavg") == {20: {True}, 30: {False}, 40: {False}, 50: {False}}
    assert ahead("11", "published", "fedavg") == {count: {False} for count in CLIENTS}
    assert ahead("11", "sound", "fedavg", "cnn")[30] == ahead("11", "published", "fedavg", "cnn")[30] == {False}


def test_values_far_from_the_papers(page: str) -> None:
    def away(method: str, figure: str = "3", **labels: str | int) -> list[float]:
        some = records(figure, form="published", method=method, **labels)
        return [100 * (one["mean"] - one["paper"]) for one in some if one["paper"] is not None]

    far = [one for name in ("pfa", "pfa-plus") for one in records("3", "10", form="published", method=name)
           if one["paper"] is not None and not near(one)]  # fmt: skip
    assert {one["cell"] for one in far} == {"mnist cnn iid mixgauss3 M=20", "fashion-mnist logistic iid mixgauss1 M=20"}
    pair = [away(name, "10", model="cnn", clients=20)[0] for name in ("pfa", "pfa-plus")]
    assert f"PFA −{-pair[0]:.1f}, PFA+ −{-pair[1]:.1f} (three seeds)" in page
    alone = only("10", form="published", method="public-only", data="mnist", model="cnn", clients=20)
    assert f"alone they reach {100 * alone['mean']:.1f} %" in page
    highest = [*away("maximum", model="cnn"), *away("maximum", "10", model="cnn")]
    assert f"in all {len(highest)} cells, by more than 4 points in {sum(one > 4 for one in highest)}" in page
    assert min(highest) > 0
    assert f"Minimum by up to {-min(away('minimum', '10', model='cnn')):.1f} points" in page
    few, *more = away("weiavg", model="cnn", data="mnist")
    assert f"{-max(more):.1f} to {-min(more):.1f} below with 30 to 50 clients" in page
    clothes = away("weiavg", model="cnn", data="fashion-mnist", clients=20)[0]
    less = -away("weiavg", "10", model="cnn", clients=20)[0]
    assert f"20 clients {few:.1f} and {clothes:.1f} above under MixGauss1 and {less:.1f} below under MixGauss3" in page


def test_traffic(page: str) -> None:
    found = {(one["model"], one["method"], one["form"]): one for one in records("7")}
    saved, more, down = [], [], []
    for model in ("logistic", "cnn"):
        pfa, plus = (found[model, name, "sound"] for name in ("pfa", "pfa-plus"))
        saved.append(100 - 100 * plus["up_private"] / pfa["up_private"])
        both = [one["up_private"] + one["down_private"] for one in (plus, pfa)]
        more.append(100 * both[0] / both[1] - 100)
        published = [found[model, name, "published"]["down_private"] for name in ("pfa-plus", "pfa")]
        down.append(published[0] / published[1])
    assert f"We measured {saved[0]:.1f} % (LogR) and {saved[1]:.1f} % (CNN)" in page
    assert f"PFA+ moves {more[0]:.1f} % more than PFA (LogR, sound form) and {more[1]:.1f} % more (CNN)" in page
    assert {f"{one:.1f}" for one in down} == {"3.0"}
    assert "received 3.0 times as much" in page
    assert all(95 <= one["rounds"] <= 96 for one in found.values())
