"""A miss is explained by the results of an experiment, by chance that was measured, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from polyeps_reproductions import census, explanations
from polyeps_reproductions.explanations import Experiment, by_chance, explained, of_pfa
from polyeps_reproductions.headlines import Results
from polyeps_reproductions.reference_algorithms import lanczos
from polyeps_reproductions.reference_models import SOFTMAX_TWICE


def near(paper: float, ours: float) -> bool:
    return abs(paper - ours) <= 4


PLAIN = {(20, "fedavg"): (50.0, 60.0), (30, "fedavg"): (55.0, 56.0), (20, "weiavg"): (70.0, 71.0)}


def test_an_experiment_that_gives_the_papers_value_explains_a_miss() -> None:
    one = Experiment("a smaller rate", "figure 1", {(20, "fedavg"): 51.0, (30, "fedavg"): 54.0})
    assert (
        explained((20, "fedavg"), PLAIN, [one], near) == "a smaller rate gives 51.0 (figure 1: near in 2 of 2, not 1)"
    )


def test_an_experiment_that_spoils_other_values_of_the_method_explains_nothing() -> None:
    spoils = {(20, "fedavg"): 51.0, (30, "fedavg"): 40.0, (40, "fedavg"): 10.0}
    plain = PLAIN | {(40, "fedavg"): (20.0, 21.0)}
    assert explained((20, "fedavg"), plain, [Experiment("", "", spoils)], near) == ""
    # Other methods do not matter, nor does a value that the plain run lacks.
    few = {(20, "fedavg"): 51.0, (20, "weiavg"): 10.0, (50, "fedavg"): 10.0}
    assert explained((20, "fedavg"), plain, [Experiment("", "", few)], near)
    assert explained((20, "fedavg"), plain, [Experiment("", "", {(20, "fedavg"): 56.0})], near) == ""


def test_the_experiment_that_gives_most_values_is_named() -> None:
    few, more = {(20, "fedavg"): 51.0, (30, "fedavg"): 70.0}, {(20, "fedavg"): 53.0, (30, "fedavg"): 56.0}
    some = [Experiment("a", "figure 1", few), Experiment("b", "figure 2", more)]
    assert explained((20, "fedavg"), PLAIN, some, near).startswith("b gives 53.0")


def test_an_experiment_may_be_off_by_chance() -> None:
    one = Experiment("a larger rate", "figure 1", {(20, "fedavg"): 55.0}, {(20, "fedavg"): (5.0, 3)})
    why = explained((20, "fedavg"), PLAIN, [one], near)
    assert why == "a larger rate gives 55.0 (figure 1: near in 0 of 1, not 0; chance: 1.4 standard errors over 3 seeds)"
    assert explained((20, "fedavg"), PLAIN, [one._replace(spreads={(20, "fedavg"): (3.0, 3)})], near) == ""


@pytest.mark.parametrize(
    ("mean", "deviation", "count", "expected"),
    [
        (60.0, 5.0, 3, ""),  # 2.7 standard errors
        (57.0, 5.0, 3, "chance: 1.9 standard errors over 3 seeds"),
        (57.0, 5.0, 2, ""),  # two seeds have no spread to speak of
        (57.0, 0.0, 5, ""),
    ],
)
def test_chance_is_two_standard_errors_over_three_seeds(
    mean: float, deviation: float, count: int, expected: str
) -> None:
    assert by_chance(50.0, mean, deviation, count) == expected


def test_softmax_twice_is_compared_with_the_plain_cell() -> None:
    one = {"data": "mnist", "partition": "iid", "budgets": "mixgauss1", "clients": 20, "method": "pfa"}
    assert of_pfa({**one, "model": SOFTMAX_TWICE}) == of_pfa({**one, "model": "logistic"})


def written(folder: Path, study: str, part: str, **found: Any) -> None:
    kept = {"columns": [], "table": [], "records": [], **found}
    (folder / f"{study}-{part}.json").write_text(json.dumps(kept), encoding="utf-8")


def test_fedsels_misses_are_explained_by_another_rate_for_all(tmp_path: Path) -> None:
    columns = ["α", "data", "model", "selection", "gain", "loss"]
    plain = ["one for all", "syn-l-0.01-0.9", "logistic", "ps", "+0.50 ± 0.10", "+0.40 ± 0.10"]
    written(tmp_path, "fedsel", "table-3", columns=columns, table=[plain])
    (gain, loss) = (one for one in census.values(Results(tmp_path)) if one.study == "fedsel")
    assert (gain.near, gain.why) == (False, "unexplained")
    assert (loss.near, loss.why) == (True, "")
    other = [3.1623, "syn-l-0.01-0.9", "logistic", "ps", "+5.70 ± 0.10", "+0.40 ± 0.10"]
    written(tmp_path, "fedsel", "table-3-rates", columns=columns, table=[other])
    (gain, _) = (one for one in census.values(Results(tmp_path)) if one.study == "fedsel")
    assert gain.why == "α = 3.1623 for all methods gives 5.7 (table 3-rates: near in 2 of 2, not 1)"
    # One α serves all methods on the same data: what it spoils there counts, and other data have an α of their own.
    worse = [3.1623, "syn-l-0.01-0.9", "logistic", "exp", "-9.00 ± 0.10", "+9.40 ± 0.10"]
    plain_too = ["one for all", "syn-l-0.01-0.9", "logistic", "exp", "+8.50 ± 0.10", "+0.40 ± 0.10"]
    elsewhere = [3.1623, "bank", "logistic", "exp", "-9.00 ± 0.10", "+9.40 ± 0.10"]
    written(tmp_path, "fedsel", "table-3", columns=columns, table=[plain, plain_too])
    written(tmp_path, "fedsel", "table-3-rates", columns=columns, table=[other, elsewhere])
    assert census.values(Results(tmp_path))[0].why
    written(tmp_path, "fedsel", "table-3-rates", columns=columns, table=[other, worse])
    assert census.values(Results(tmp_path))[0].why == "unexplained"


def test_an_uplink_is_explained_by_the_papers_rounds(tmp_path: Path) -> None:
    columns = ["model", "method", "paper, MiB", "least", "median", "most"]
    written(tmp_path, "pfa", "figure-7-draws", columns=columns, table=[["cnn", "pfa-plus", 40, "39.8", "41.4", "43.0"]])
    one = {"model": "cnn", "method": "pfa-plus", "paper": 40}
    assert "39.8 to 43.0 MiB" in explanations.uplink(one, Results(tmp_path))
    assert explanations.uplink({**one, "paper": 44}, Results(tmp_path)) == ""
    assert explanations.uplink({**one, "method": "pfa"}, Results(tmp_path)) == ""


def test_lanczos_steps_beyond_the_rank_are_rounding_errors() -> None:
    """Three centred updates have two directions; the paper's code returns fifty, and not the first of the two."""
    rows = torch.randn(3, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows -= rows.mean(0)
    true = torch.linalg.svd(rows, full_matrices=False)[2][0]
    few = lanczos(rows, 1, torch.Generator().manual_seed(1), steps=4)[0]
    assert float((few @ true) ** 2 / (few @ few)) > 0.99
    many = lanczos(rows, 50, torch.Generator().manual_seed(1))
    assert many.shape == (50, 200)
    held = (many @ true) ** 2 / (many * many).sum(1)
    assert float(held[0]) < 0.5
    assert float(torch.linalg.eigvalsh(many @ many.T)[-1]) > 3  # it enlarges what it projects
