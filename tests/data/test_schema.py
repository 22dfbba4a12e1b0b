"""Columns become numbers as declared: against a slow loop that encodes one cell at a time."""

from __future__ import annotations

import math
import tomllib
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.data.cells import as_date, as_text, is_missing
from polyeps.data.schema import Column, Schema, draft, toml_of
from polyeps.data.schema_files import schema_of
from polyeps.errors import DataError, InputError

MISSING = ["", " ", "NA", "n/a", "NaN", "null", "?", None, math.nan, np.float64("nan"), np.datetime64("NaT")]


def place(row: int) -> str:
    return f"row {row}"


@given(
    cells=st.lists(
        st.one_of(
            st.floats(allow_nan=False, allow_infinity=False, width=32),
            st.integers(-(10**6), 10**6),
            st.sampled_from(MISSING),
            st.floats(-1e3, 1e3).map(lambda value: f" {value:.3f}"),
            st.booleans(),
        ),
        max_size=20,
    ),
    low=st.floats(-100, 100),
    width=st.floats(0.1, 1000),
    filled=st.one_of(st.just("mean-of-range"), st.floats(0, 1)),
)
@settings(max_examples=150, deadline=None)
def test_numbers_are_clamped_scaled_and_filled_in(cells: list[Any], low: float, width: float, filled: Any) -> None:
    high = low + width
    rule: Any = filled if isinstance(filled, str) else min(high, low + filled * width)
    expected = []
    for cell in cells:
        gone = cell is None or (isinstance(cell, str) and cell.strip().lower() in {"", "na", "n/a", "nan", "null", "?"})
        gone = gone or (not isinstance(cell, str) and cell != cell)
        fill = (low + high) / 2 if isinstance(rule, str) else rule
        value = fill if gone else min(max(float(cell), low), high)
        expected.append([(value - low) / (high - low) * 2 - 1, float(gone)])
    column = Column("x", range=(low, high), missing=rule)
    found = column.encode(cells, place)
    assert found.dtype == np.float32
    assert np.allclose(found, np.array(expected).reshape(-1, 2), atol=1e-5)
    assert np.all(np.abs(found[:, 0]) <= 1)
    as_objects = np.empty(len(cells), dtype=object)
    as_objects[:] = cells
    assert np.array_equal(column.encode(as_objects, place), found)


@given(
    cells=st.lists(
        st.one_of(st.sampled_from(["m", "M", " f", "f", "x", "1", "1.0", "true", "TRUE", ""]), st.sampled_from(MISSING))
        | st.booleans()
        | st.integers(0, 2)
        | st.sampled_from([0.0, 1.0, 2.5]),
        max_size=20,
    )
)
@settings(max_examples=150, deadline=None)
def test_a_category_is_one_of_those_declared_or_another(cells: list[Any]) -> None:
    categories = ("m", "f", "1", "True")
    found = Column("c", categories=categories).encode(cells, place)
    for cell, row in zip(cells, found, strict=True):
        text = str(cell).strip()
        if isinstance(cell, float) and cell == int(cell or 0) if cell == cell and cell is not None else False:
            text = str(int(cell))
        text = {"1.0": "1"}.get(text, text)
        folded = [one.lower() for one in categories]
        expected = folded.index(text.lower()) if text.lower() in folded else len(categories)
        assert row.tolist() == np.eye(len(categories) + 1)[expected].tolist(), cell


def test_a_spelling_that_is_declared_comes_before_one_in_capitals() -> None:
    found = Column("c", categories=("a", "A", "none")).encode(["a", "A", "NONE", "none", None], place)
    assert found.argmax(axis=1).tolist() == [0, 1, 2, 2, 3]


@given(days=st.lists(st.integers(-2000, 2000), min_size=1, max_size=10), times=st.booleans())
@settings(max_examples=60, deadline=None)
def test_dates_and_times_in_any_form_are_the_same(days: list[int], times: bool) -> None:
    first, last = date(2020, 1, 1), date(2022, 1, 1)
    column = Column("d", dates=(first, last))
    expected = [[2 * min(max(day / (last - first).days, 0), 1) - 1] for day in days]
    some = [first + timedelta(day) for day in days]
    moments = [datetime(day.year, day.month, day.day, 13, 30) if times else day for day in some]
    for cells in (moments, [moment.isoformat() for moment in moments], np.array(moments, dtype="datetime64[s]")):
        assert np.allclose(column.encode(cells, place), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("column", "cells", "message"),
    [
        (Column("a", range=(0, 1)), ["1", "", "0"], r"row 1: a is missing; declare data.columns.a.missing"),
        (Column("a", range=(0, 1)), ["1", "0", "x"], r"row 2: a is 'x', not a number; correct it, or declare"),
        (Column("a", range=(0, 1)), ["1", "0,5"], r"row 1: a is '0,5', not a number; write decimals with a point, 0.5"),
        (Column("a", range=(0, 1)), ["1_0"], r"row 0: a is '1_0', not a number"),
        (Column("a", range=(0, 1)), ["1", "inf"], r"row 1: a is inf, no finite number"),
        (Column("a", range=(0, 1)), ["9" * 500], r"row 0: a is 9{59}…, no finite number"),
        (Column("a", range=(0, 1)), [[1], [2]], r"row 0: a is \[1\], not a number"),
        (Column("a", range=(0, 1)), np.array([1, -np.inf]), r"row 1: a is -inf, no finite number"),
        (Column("a b", range=(0, 1)), [None], r'declare data.columns."a b".missing = "mean-of-range"'),
        (
            Column("d", dates=(date(2020, 1, 1), date(2021, 1, 1))),
            ["2020-01-01", "31.12.2020"],
            r"row 1: d is '31.12.2020', not a date like 2024-05-31",
        ),
        (Column("d", dates=(date(2020, 1, 1), date(2021, 1, 1))), ["2020-13-01"], "not a date"),
        (Column("d", dates=(date(2020, 1, 1), date(2021, 1, 1))), [20200101], "not a date"),
    ],
)
def test_a_cell_that_does_not_fit_is_named(column: Column, cells: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        column.encode(cells, place)


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@given(
    columns=st.dictionaries(
        names,
        st.one_of(
            st.tuples(st.floats(-1e6, 1e6), st.floats(0.001, 1e6)).map(lambda ends: {"range": [ends[0], sum(ends)]}),
            st.lists(names.filter(str.strip), min_size=1, max_size=4, unique_by=lambda text: as_text(text)).map(
                lambda listed: {"categories": listed}
            ),
            st.just({"dates": [date(2020, 1, 1), date(2021, 1, 1)], "missing": "mean-of-range"}),
            st.just({"range": [0, 5], "missing": 2}),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=100, deadline=None)
def test_a_schema_is_written_as_it_is_read(columns: dict[str, Any]) -> None:
    schema = schema_of(columns)
    read = tomllib.loads(toml_of(schema.columns))["data"]["columns"]
    assert schema_of(read) == schema


def test_a_draft_fits_the_table_it_is_drafted_from() -> None:
    table: dict[str, Any] = {
        "age": ["23", "", "87"],
        "flag": np.array([True, False, True]),
        "bit": [0, 1, 1],
        "day": ["2021-03-04", "2022-01-02", None],
        "sex": ["m", "f", "m"],
        "one": [5, 5, 5],
        "bad": [1.0, math.inf, 2.0],
        "gone": ["", None, "NA"],
    }
    columns, skipped = draft(table, leave_out=["one"])
    assert skipped == ["bad", "gone"]
    found = {column.name: column for column in columns}
    assert [found[name].range for name in ("age", "bit")] == [(20, 90), (0, 1)]
    assert found["flag"].categories == ("False", "True")
    assert found["day"].dates == (date(2021, 1, 1), date(2022, 12, 31))
    encoded = Schema(tuple(columns)).encode(table, place, "t")
    assert encoded.shape == (3, 2 + 3 + 1 + 2 + 3)
    assert encoded[:, -1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"age": {}}, "data.columns.age says nothing about its values; give it exactly one of range, dates and cat"),
        ({"age": {"range": [0, 1], "categories": ["a"]}}, "data.columns.age has range and categories; give it exactly"),
        ({"age": {"range": [1, 0]}}, "data.columns.age.range goes from 1 to 0; give two values, the smaller one first"),
        ({"age": {"range": [0, math.inf]}}, "data.columns.age.range goes from 0 to inf"),
        ({"age": {"range": [0]}}, r"data.columns.age.range is \[0\]; it must be two numbers, like \[0, 100\]"),
        ({"age": {"range": ["0", "9"]}}, "must be two numbers"),
        ({"age": {"range": [False, True]}}, "must be two numbers"),
        ({"age": {"dates": ["2020-01-01", "soon"]}}, "data.columns.age.dates is .*; it must be two dates"),
        ({"age": {"categories": "mf"}}, "data.columns.age.categories is 'mf'; it must be a list of texts"),
        ({"age": {"categories": ["m", "m "]}}, "data.columns.age.categories must be different texts"),
        ({"age": {"categories": ["m"], "missing": 0}}, "a missing category counts as another one"),
        ({"age": {"range": [0, 1], "missing": "mean"}}, "data.columns.age.missing is 'mean'; it must be"),
        ({"age": {"range": [0, 1], "missing": 3}}, "data.columns.age.missing is 3, outside of 0 to 1; choose one"),
        ({"age": {"rnage": [0, 1]}}, "there is no setting 'data.columns.age.rnage'; did you mean 'range'?"),
        ({"a": {"b": {"range": [0, 1]}}}, r'no setting .data.columns.a.b.; put a name with dots in quotes, "a.b"'),
        ({"blood p": [0, 1]}, r'data.columns."blood p" is \[0, 1\]; declare it as \{ range'),
        ({}, "data.columns declares no column"),
    ],
)
def test_a_column_that_is_declared_wrongly_is_named(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        schema_of(declared)


def test_categories_may_be_numbers_and_booleans() -> None:
    assert schema_of({"a": {"categories": [1, 2.0, True]}}).columns[0].categories == ("1", "2", "True")


def test_missing_and_dates_of_cells() -> None:
    assert all(is_missing(cell) for cell in MISSING)
    assert not any(is_missing(cell) for cell in (0, False, "0", "no", -1.5))
    assert as_date(np.datetime64("2020-02-29T23:00")) == date(2020, 2, 29)
    with pytest.raises(ValueError, match="not a date"):
        as_date("20200229")
