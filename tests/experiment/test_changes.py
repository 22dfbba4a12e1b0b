"""Changes by --set: which commas separate values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyeps.errors import InputError
from polyeps.experiment.changes import parsed, split_change

PLAIN = st.text(
    st.characters(codec="ascii", exclude_characters="\\\"'[]{},\x7f", exclude_categories=["Cc"]), min_size=1
)


def written(value: object) -> str:
    """A value as TOML has it, written here once more."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return "[" + ", ".join(written(one) for one in value) + "]"
    return repr(value)


SCALARS = (
    st.booleans()
    | st.integers(-1000, 1000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_categories=["Cc"]))
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.lists(st.lists(SCALARS, max_size=2), max_size=2)


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_values_of_toml_come_back_one_by_one(values: list[object]) -> None:
    key, texts = split_change("a.b=" + ",".join(written(value) for value in values))
    assert key == "a.b"
    assert [parsed(text) for text in texts] == values


@given(st.lists(PLAIN.filter(str.strip), min_size=1, max_size=4))
def test_bare_words_are_separated_by_every_comma(words: list[str]) -> None:
    assert split_change("key=" + ",".join(words))[1] == [word.strip() for word in words]


@given(st.text(st.sampled_from("ab ,\"'[]{}\\=\n")))
def test_nothing_breaks_it(text: str) -> None:
    try:
        _, texts = split_change(f"key={text}")
    except InputError as problem:
        assert "empty" in str(problem)  # noqa: PT017
    else:
        assert texts == [one.strip() for one in texts]
        assert split_change("key=" + ",".join(texts))[1] == texts


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ("data.labels=[1,2]", [[1, 2]]),
        ("data.labels=[1,2],[3]", [[1, 2], [3]]),
        ('name="a,b"', ["a,b"]),
        ("name='a,b',c", ["a,b", "c"]),
        ("name=it's", ["it's"]),
        ("name=it's,b", ["it's", "b"]),
        ("name=f(x[1],y", ["f(x[1]", "y"]),
        ('budgets.levels=[{ name = "a,]", epsilon = 1 }],[]', [[{"name": "a,]", "epsilon": 1}], []]),
        ("name=", [""]),
        ('name="","a"', ["", "a"]),
        ("a=1\nb=2", ["1\nb=2"]),  # a second line is no second setting
    ],
)
def test_examples(change: str, values: list[object]) -> None:
    assert [parsed(text) for text in split_change(change)[1]] == values


@pytest.mark.parametrize("change", ["clip=1,", "clip=,1", "clip=1,,2"])
def test_an_empty_value_is_refused(change: str) -> None:
    with pytest.raises(InputError, match="between commas is empty"):
        split_change(change)


@pytest.mark.parametrize("change", ["clip", "=1", " =1", ""])
def test_a_change_has_a_key_and_a_value(change: str) -> None:
    with pytest.raises(InputError, match="takes KEY=VALUE"):
        split_change(change)
