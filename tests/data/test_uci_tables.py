from __future__ import annotations

import numpy as np

from polyeps.data.uci_tables import (
    KDD_COLUMNS,
    TextColumns,
    encode_adult,
    encode_kdd,
    one_hot,
    parse_table,
    quintile_cuts,
    scaled,
)


def test_quintiles_without_ties() -> None:
    assert quintile_cuts(np.arange(1, 101)).tolist() == [20, 40, 60, 80]


def test_quintiles_with_ties_take_the_next_value_that_occurs() -> None:
    # As in Adult's hours per week: the second and third quantile are both 40.
    hours = np.array([20] * 15 + [35] * 10 + [40] * 40 + [43] * 10 + [48] * 25)
    assert quintile_cuts(hours).tolist() == [35, 40, 43, 48]


def test_an_unlisted_category_is_all_zeros() -> None:
    assert one_hot(np.array([b"b", b"?", b"a"]), [b"a", b"b"]).tolist() == [[0, 1], [0, 0], [1, 0]]


def test_scaling_fills_the_interval_and_leaves_a_constant_at_zero() -> None:
    assert scaled(np.array([0.0, 5.0, 10.0])).ravel().tolist() == [-1, 0, 1]
    assert scaled(np.array([3.0, 3.0])).ravel().tolist() == [0, 0]


def test_adult_record_by_hand() -> None:
    ages, weights, grades, hours = (
        range(20, 70),
        range(1000, 1050),
        [1, 5, 9, 10, 13] * 10,
        [10, 30, 35, 40, 50] * 10,
    )
    cells: TextColumns = {
        name: np.array([str(value).encode() for value in values])
        for name, values in {
            "age": ages,
            "workclass": ["Private"] * 49 + ["?"],
            "fnlwgt": weights,
            "education": ["Masters"] * 50,
            "education-num": grades,
            "marital-status": ["Divorced"] * 50,
            "occupation": ["Sales"] * 50,
            "relationship": ["Wife"] * 50,
            "race": ["Black"] * 50,
            "sex": ["Male"] * 50,
            "capital-gain": [0] * 49 + [7],
            "capital-loss": [0] * 50,
            "hours-per-week": hours,
            "native-country": ["Peru"] * 50,
        }.items()
    }
    features, columns = encode_adult(cells, 50)
    assert features.shape == (50, 123)
    assert len(set(columns)) == 123
    first = {columns[i] for i in np.flatnonzero(features[0])}
    assert {"age<29", "workclass=Private", "education=Masters", "sex=Male", "capital-gain<1"} <= first
    assert {"native-country=Peru", "capital-loss<1", "race=Black"} <= first
    assert features[0].sum() == 14
    last = {columns[i] for i in np.flatnonzero(features[49])}
    assert {"age>=59", "capital-gain>=1", "hours-per-week>=40"} <= last
    assert features[49].sum() == 13  # the missing work class has no column


def test_kdd_gives_no_column_to_a_category_too_rare_for_the_papers_sample() -> None:
    rows = [(b"tcp", b"http", b"SF"), (b"udp", b"rare", b"SF")]
    cells: TextColumns = {name: np.array([b"0", b"1"]) for name in KDD_COLUMNS}
    for i, name in enumerate(("protocol_type", "service", "flag")):
        cells[name] = np.array([row[i] for row in rows])
    common = encode_kdd(cells, np.array([69_999, 1]))  # one expected in a sample of all 70 000
    rare = encode_kdd(cells, np.array([139_999, 1]))  # half of one
    assert set(common.columns) - set(rare.columns) == {"service=rare", "protocol_type=udp"}
    assert common.features.shape == (2, 38 + 5)


def test_a_table_by_column() -> None:
    table = parse_table([b"1;a", b"2;bb"], ("number", "word"), b";")
    assert table["number"].astype(int).tolist() == [1, 2]
    assert table["word"].tolist() == [b"a", b"bb"]
