"""A consortium's own table, from CSV to ledgers; and the wrong inputs that people give."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import refused, run, run_json
from support.federations import guaranteed

from polyeps.data.own_tables import from_arrays, from_frame
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment import run as runs
from polyeps.experiment.client_budgets import usual_delta
from polyeps.experiment.population import populate
from polyeps.experiment.progress import Watch
from polyeps.experiment.registry import Parts
from polyeps.ledger import Ledger

BUDGETS = {"elm": 4.0, "alder": 1.0, "cedar": 0.5, "fir": 8.0, "oak": 8.5, "birch": 2.0}
PATIENTS = {"elm": 40, "alder": 30, "cedar": 25, "fir": 90, "oak": 22, "birch": 60}
HEADER = "hospital,patient,age,bp,sex,smoker,outcome"
# The file of the first hour: issue 17 has it with five rounds and larger hospitals.
EXPERIMENT = """\
rounds = 2
algorithm = "weiavg"
[data]
file = "h.csv"
client = "hospital"
label = "outcome"
unit = "patient"
[data.columns]
age = { range = [0, 110], missing = "mean-of-range" }
bp = { range = [50, 250] }
sex = { categories = ["m", "f"] }
smoker = { categories = ["True", "False"] }
[budgets]
delta = 1e-6
epsilon = { elm = 4.0, alder = 1.0, cedar = 0.5, fir = 8.0, oak = 8.5, birch = 2.0 }
[training]
batch = 16
local_steps = 4
learning_rate = 0.3
"""


def hospital_rows() -> list[list[Any]]:
    """Two visits of every patient of six hospitals, in any order."""
    chance = np.random.default_rng(1)
    rows: list[list[Any]] = []
    for hospital, patients in PATIENTS.items():
        for patient in range(patients):
            age, smoker = int(chance.integers(20, 90)), bool(chance.integers(2))
            for _ in range(2):
                bp = int(110 + 0.4 * age + 10 * smoker + chance.normal(0, 10))
                known: Any = age if chance.random() > 0.1 else ""
                ill = "ill" if bp + chance.normal(0, 5) > 140 else "well"
                rows.append([hospital, f"p{patient}", known, bp, "mf"[patient % 2], smoker, ill])
    return [rows[place] for place in chance.permutation(len(rows))]


def written(rows: list[list[Any]], header: str = HEADER) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([header.split(","), *rows])
    return text.getvalue()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path.parent / "calibrations"))
    (tmp_path / "h.csv").write_text(written(hospital_rows()))
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    return tmp_path


def test_every_patient_keeps_to_one_side_and_every_hospital_to_its_name(here: Path) -> None:
    population = populate(config.read_experiment(here / "e.toml"), 1)
    assert population.ids == tuple(sorted(PATIENTS))
    held = dict(zip(population.ids, guaranteed(population.budgets), strict=True))
    assert {client: budget.epsilon for client, budget in held.items()} == BUDGETS
    assert {budget.delta for budget in held.values()} == {1e-6}
    data = population.dataset
    assert (data.classes, data.person) == (("ill", "well"), "patient")
    assert data.schema is not None
    assert data.columns == data.schema.outputs
    assert len(data.columns) == 2 + 1 + 3 + 3
    assert data.persons is not None
    assert data.test_groups is not None
    for number, client in enumerate(population.ids):
        held_out = round(0.2 * PATIENTS[client])
        assert population.partition.sizes[number] == 2 * (PATIENTS[client] - held_out)
        assert (data.test_groups == number).sum() == 2 * held_out


def test_the_ledger_of_every_hospital_holds_its_own_budget(here: Path) -> None:
    (here / "e.toml").write_text(EXPERIMENT.replace('unit = "patient"\n', "").replace("delta = 1e-6\n", ""))
    said = run_json("run", "e.toml", "-o", "out")
    ledger = Ledger(here / "out" / "ledgers" / "weiavg-1.db")
    for client, epsilon in BUDGETS.items():
        assert ledger.account(client).terms.budget.epsilon == epsilon
        assert ledger.account(client).terms.budget.delta == 1e-5
        assert 0.9 * epsilon < ledger.spent(client) <= epsilon
    ledger.close()
    records = {row["client"]: row["records"] for row in said["clients"]["weiavg-1"]}
    assert records == {client: 2 * patients - round(0.4 * patients) for client, patients in PATIENTS.items()}
    assert said["remarks"] == [
        "the labels of h.csv (ill, well) were read off the records; declare them as data.classes"
    ]


def test_columns_shuffled_extra_rows_permuted_and_semicolons_change_nothing(here: Path) -> None:
    one = populate(config.read_experiment(here / "e.toml"), 1)
    rows = [[*row[::-1], "free text; really"] for row in hospital_rows()]
    text = io.StringIO()
    csv.writer(text, delimiter=";").writerows([[*HEADER.split(",")[::-1], "note"], *rows])
    (here / "h.csv").write_text("\ufeff" + text.getvalue())
    other = populate(config.read_experiment(here / "e.toml"), 1)
    assert np.array_equal(one.dataset.features, other.dataset.features)
    assert np.array_equal(one.dataset.labels, other.dataset.labels)
    assert one.partition.ids == other.partition.ids
    assert np.array_equal(one.dataset.persons, other.dataset.persons)  # type: ignore[arg-type]


def test_a_schema_file_is_part_of_the_settings(here: Path) -> None:
    run("data", "describe", "h.csv", "--client", "elm", "--write", "schema.toml")
    text = (here / "schema.toml").read_text()
    assert text.startswith("# Drafted by `polyeps data describe` from the records of h.csv, client elm.")
    assert "agree on them with all clients from public" in text
    start, end = EXPERIMENT.index("client = "), EXPERIMENT.index("[budgets]")
    (here / "e.toml").write_text(EXPERIMENT[:start] + 'schema = "schema.toml"\n' + EXPERIMENT[end:])
    wanted = config.read_experiment(here / "e.toml")
    assert (wanted.data.client, wanted.data.label, wanted.data.unit) == ("hospital", "outcome", "patient")
    assert wanted.data.classes == ("ill", "well")
    assert config.experiment(wanted.as_dict()) == wanted
    population = populate(wanted, 1)
    (here / "schema.toml").unlink()
    assert np.array_equal(
        populate(config.experiment(wanted.as_dict()), 1).dataset.features, population.dataset.features
    )
    refused("data", "describe", "h.csv", "--write", "h.csv", naming=("h.csv exists already; choose another name",))
    said = run_json("data", "describe", "h.csv")
    assert {column["name"]: column["role"] for column in said["columns"]} == {
        **dict.fromkeys(("age", "bp", "sex", "smoker"), "feature"),
        "hospital": "client",
        "patient": "unit",
        "outcome": "label",
    }
    assert next(column for column in said["columns"] if column["name"] == "age")["missing"] > 0


def test_budgets_by_name_from_a_file_with_deltas_of_their_own(here: Path) -> None:
    lines = [f"{client},{epsilon},{'1e-7' if client == 'oak' else ''}" for client, epsilon in BUDGETS.items()]
    (here / "b.csv").write_text("\n".join(["client,epsilon,delta", *lines]))
    (here / "e.toml").write_text(
        EXPERIMENT[: EXPERIMENT.index("delta = ")] + 'file = "b.csv"\n[budgets.delta]\nelm = 1e-6\n'
    )
    population = populate(config.read_experiment(here / "e.toml"), 1)
    held = dict(zip(population.ids, guaranteed(population.budgets), strict=True))
    assert {client: budget.epsilon for client, budget in held.items()} == BUDGETS
    deltas = {client: budget.delta for client, budget in held.items()}
    assert deltas == {**dict.fromkeys(BUDGETS, 1e-5), "elm": 1e-6, "oak": 1e-7}


@pytest.mark.parametrize("units", [1, 2, 10, 999, 10_000, 10_001, 100_000, 123_456, 10**9])
def test_the_usual_delta_is_a_power_of_ten_below_a_tenth_of_one_over_the_units(units: int) -> None:
    delta = usual_delta(units)
    assert delta <= 1e-5
    assert delta * units * 10 <= 1 + 1e-9
    assert delta == 1e-5 or delta * units * 100 > 1 - 1e-9  # the largest that is
    assert np.log10(delta) == pytest.approx(round(np.log10(delta)))


def test_deltas_count_persons_where_persons_are_protected() -> None:
    rows = 30_000
    settings: dict[str, Any] = {"algorithm": "weiavg", "budgets": {"epsilon": 1.0}}
    features, labels, clients = np.zeros((rows, 1)), np.arange(rows) % 2, np.where(np.arange(rows) < 100, "a", "b")
    for persons, expected in ((None, [1e-5, 1e-6]), (np.arange(rows) // 10, [1e-5, 1e-5])):
        data = from_arrays(features, labels, clients, persons)
        found = populate(config.experiment(settings), 1, parts=Parts(data=data))
        assert [budget.delta for budget in guaranteed(found.budgets)] == expected
    assert {
        budget.delta
        for budget in guaranteed(populate(config.experiment({**settings, "data": {"clients": 3}}), 1).budgets)
    } == {1e-5}
    # With a rate the number of records is hidden: no δ may tell 10 001 from 10 000.
    hiding = config.experiment({**settings, "training": {"rate": 0.01}})
    found = populate(hiding, 1, parts=Parts(data=from_arrays(features, labels, clients)))
    assert [budget.delta for budget in guaranteed(found.budgets)] == [1e-5, 1e-5]


def test_a_delta_that_is_too_large_is_warned_of_in_plan_run_and_report(here: Path) -> None:
    (here / "e.toml").write_text(EXPERIMENT.replace('unit = "patient"\n', ""))
    warning = "δ = 0.1 is not below 1/"
    assert warning in run("plan", "e.toml", "--set", "budgets.delta=0.1").stderr
    assert warning in run_json("plan", "e.toml", "--set", "budgets.delta=0.1")["methods"][0]["remarks"][1]
    assert "is not below" not in run("plan", "e.toml").stderr
    shown = run("plan", "e.toml", "--set", "budgets.delta={elm=0.005}").stderr
    assert "client 'elm': δ = 0.005 is not well below 1/64" in shown
    assert "publishing one of them with probability 0.32" in shown
    spoken = run("run", "e.toml", "--set", "budgets.delta={elm=0.1}", "-o", "out")
    assert "client 'elm': δ = 0.1 is not below 1/64, one over the number of records" in spoken.stderr
    run("report", "out", "-o", "page.html")
    assert "δ = 0.1 is not below 1/64" in (here / "page.html").read_text()


def table() -> dict[str, Any]:
    return dict(zip(HEADER.split(","), map(list, zip(*hospital_rows(), strict=True)), strict=True))


def without_file() -> config.Experiment:
    found = {"client": "hospital", "label": "outcome", "columns": {"bp": {"range": [50, 250]}}}
    budgets = {"epsilon": BUDGETS}
    return config.experiment(
        {"rounds": 2, "algorithm": "fedavg", "data": found, "budgets": budgets, "training": {"local_steps": 2}}
    )


def test_a_frame_given_in_python_is_read_as_the_settings_say(here: Path) -> None:
    pandas = pytest.importorskip("pandas")
    one = runs.run(without_file(), here / "one", data=table())
    two = runs.run(without_file(), here / "two", data=pandas.DataFrame(table()))
    (key,) = one.spent
    assert set(one.spent[key]) == set(BUDGETS)
    assert one.models[key].equal(two.models[key])
    wanted = without_file().model_copy(update={"data": config.DataSettings(file=Path("h.csv"))})
    with pytest.raises(InputError, match=r"data.file = h.csv and data= are both given"):
        runs.run(wanted, here / "three", data=table())
    with pytest.raises(InputError, match="data is a int; give a Dataset, a frame or a dictionary"):
        runs.run(without_file(), here / "three", data=3)
    assert not (here / "three").exists()


def test_a_run_is_resumed_with_the_same_data(here: Path) -> None:
    class Enough(Exception):  # noqa: N818
        pass

    def stop(*_: Any) -> None:
        raise Enough

    whole = runs.run(without_file(), here / "whole", data=table())
    with pytest.raises(Enough):
        runs.run(without_file(), here / "out", data=table(), watch=Watch(round_done=stop))
    with pytest.raises(InputError, match="started with data=; resume it with the same"):
        runs.resume(here / "out")
    other = table()
    other["bp"][0] += 1
    with pytest.raises(InputError, match="started with other data; give the same"):
        runs.resume(here / "out", data=other)
    resumed = runs.resume(here / "out", data=table())
    (key,) = whole.models
    assert resumed.models[key].equal(whole.models[key])


def test_a_file_that_changed_is_noticed_when_a_run_is_resumed(here: Path) -> None:
    class Enough(Exception):  # noqa: N818
        pass

    def stop(*_: Any) -> None:
        raise Enough

    wanted = config.read_experiment(here / "e.toml")
    with pytest.raises(Enough):
        runs.run(wanted, here / "out", watch=Watch(round_done=stop))
    first = (here / "h.csv").read_text()
    cell(5, "bp", "131.5")(here)  # as many records and persons, and the same price
    assert len((here / "h.csv").read_text().splitlines()) == len(first.splitlines())
    with pytest.raises(InputError, match="has other budgets, records or noise since the run began; restore its files"):
        runs.resume(here / "out")
    (here / "h.csv").write_text(first)
    assert runs.resume(here / "out").spent


def test_scikit_learn_transformers_that_learn_nothing_or_from_public_data() -> None:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, PolynomialFeatures, StandardScaler

    data = from_frame(table(), label="outcome", client="hospital", schema={"bp": {"range": [50, 250]}})
    settings: dict[str, Any] = {"algorithm": "fedavg", "budgets": {"epsilon": 1.0}, "model": {"encoder": "own"}}

    def encoded(make: Callable[[], Any]) -> Any:
        return populate(config.experiment(settings), 1, parts=Parts(encoders={"own": make}, data=data)).dataset

    plain = populate(config.experiment({**settings, "model": {}}), 1, parts=Parts(data=data)).dataset.features
    squares = encoded(lambda: PolynomialFeatures(2)).features
    assert np.allclose(squares, np.concatenate([plain**0, plain, plain**2], axis=1), atol=1e-5)
    assert np.allclose(encoded(lambda: FunctionTransformer(np.exp)).features, np.exp(plain), atol=1e-5)
    public = np.array([[-1.0], [3.0]])
    fitted = encoded(lambda: make_pipeline(StandardScaler()).fit(public)).features
    assert np.allclose(fitted, (plain - 1) / 2, atol=1e-5)
    with pytest.raises(InputError, match="returns a StandardScaler that learns from records; fit it to public data"):
        encoded(StandardScaler)


def line(old: str, new: str) -> Callable[[Path], None]:
    """Change a line of the experiment."""

    def change(folder: Path) -> None:
        assert EXPERIMENT.count(old) == 1
        (folder / "e.toml").write_text(EXPERIMENT.replace(old, new))

    return change


def cell(row: int, column: str, value: Any) -> Callable[[Path], None]:
    """Change a cell of the table; row 2 of the file is the first record."""

    def change(folder: Path) -> None:
        rows = hospital_rows()
        rows[row - 2][HEADER.split(",").index(column)] = value
        (folder / "h.csv").write_text(written(rows))

    return change


def text(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Change the text of the table."""

    def changed(folder: Path) -> None:
        (folder / "h.csv").write_text(change((folder / "h.csv").read_text()))

    return changed


def not_text(folder: Path) -> None:
    (folder / "h.csv").write_bytes(b"\xff\xfe\x00")


EPSILON = "epsilon = { elm = 4.0, alder = 1.0, cedar = 0.5, fir = 8.0, oak = 8.5, birch = 2.0 }"
WRONG: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "file missing": (line('"h.csv"', '"hh.csv"'), ("hh.csv does not exist", "check its path")),
    "client misspelt": (line('"hospital"', '"hopsital"'), ("'hopsital', which data.client names", "mean 'hospital'?")),
    "label misspelt": (
        line('"outcome"', '"Outcome"'),
        ("'Outcome', which data.label names", "did you mean 'outcome'?"),
    ),
    "unit missing": (line('"patient"', '"patient_id"'), ("'patient_id', which data.unit names", "mean 'patient'?")),
    "column misspelt": (
        line("bp = {", "blood_pressure = {"),
        ("'blood_pressure', which data.columns declares", "it has"),
    ),
    "label as feature": (line("bp = {", "outcome = {"), ("data.columns declares 'outcome'", "data.label", "remove it")),
    "client as feature": (line("bp = {", "hospital = {"), ("data.columns declares 'hospital'", "data.client")),
    "range reversed": (
        line("[50, 250]", "[250, 50]"),
        ("data.columns.bp.range goes from 250 to 50", "smaller one first"),
    ),
    "range of texts": (line("[50, 250]", '["50", "250"]'), ("data.columns.bp.range is ['50', '250']", "two numbers")),
    "unknown key": (line("bp = { range", "bp = { rang"), ("'data.columns.bp.rang'", "did you mean 'range'?")),
    "two kinds": (line('["m", "f"] }', '["m"], range = [0, 1] }'), ("data.columns.sex has range and categories",)),
    "categories for a number": (line("bp = { range = [50, 250] }", 'bp = { categories = "50" }'), ("a list of texts",)),
    "number declared for text": (
        line('sex = { categories = ["m", "f"] }', "sex = { range = [0, 1] }"),
        ("sex is '", "categories"),
    ),
    "text in a number": (cell(5, "bp", "high"), ("h.csv, row 5 (client", "bp is 'high', not a number")),
    "decimal comma": (cell(5, "bp", "120,5"), ("h.csv, row 5", "write decimals with a point, 120.5")),
    "missing number": (
        cell(7, "bp", ""),
        ("h.csv, row 7", "bp is missing", 'data.columns.bp.missing = "mean-of-range"'),
    ),
    "infinite number": (cell(7, "bp", "inf"), ("h.csv, row 7", "bp is inf, no finite number")),
    "no label": (cell(9, "outcome", ""), ("h.csv, row 9", "column 'outcome'", "the label is empty", "fill it in")),
    "NaN label": (cell(9, "outcome", "NaN"), ("h.csv, row 9", "column 'outcome'", "fill it in")),
    "no client": (cell(9, "hospital", ""), ("h.csv, row 9", "column 'hospital'", "the cell is empty")),
    "client that cannot be shown": (
        cell(9, "hospital", "elm\x1b[2J"),
        ("h.csv: the name of a client must be printable text", "choose another name"),
    ),
    "client with a long name": (cell(9, "hospital", "elm" * 100), ("at most 255 are allowed", "shorten it")),
    "no person": (cell(9, "patient", ""), ("h.csv, row 9", "column 'patient'", "the cell is empty")),
    "one label": (text(lambda now: now.replace("ill", "well")), ("one label only, 'well'", "name another column")),
    "label not declared": (
        line('unit = "patient"', 'unit = "patient"\nclasses = ["ill", "fine"]'),
        ("'well' is none of", "row"),
    ),
    "one class": (line('unit = "patient"', 'unit = "patient"\nclasses = ["ill"]'), ("data.classes", "at least two")),
    "ragged row": (
        text(lambda now: now + "elm,p1,3\n"),
        ("h.csv, row 536: 3 cells where the header names 7", "correct"),
    ),
    "empty file": (text(lambda _: "\n"), ("h.csv is empty", "its first row must name the columns")),
    "no records": (text(lambda now: now.splitlines()[0]), ("h.csv has no rows", "add records")),
    "other delimiter": (
        text(lambda now: now.replace(",", "|")),
        ("h.csv has no column 'outcome'", "semicolons or tabs"),
    ),
    "twice a column": (text(lambda now: now.replace("age", "bp", 1)), ("h.csv has 2 columns named 'bp'", "rename")),
    "a column without a name": (
        text(lambda now: now.replace("age", "", 1)),
        ("h.csv has no column 'age'", "data.columns declares"),
    ),
    "not UTF-8": (not_text, ("not UTF-8", "save it as")),
    "budget for nobody": (line("oak = 8.5", "oaks = 8.5"), ("budgets.epsilon names 'oaks'", "did you mean 'oak'?")),
    "client without budget": (line("oak = 8.5, ", ""), ("client 'oak' has no budget in budgets.epsilon", "add one")),
    "budgets in a list": (
        line(EPSILON, "epsilons = [1, 2, 4, 0.5, 8, 8]"),
        ("budgets.epsilons is a list", "alder = ..."),
    ),
    "epsilon negative": (line("oak = 8.5", "oak = -8.5"), ("budgets.epsilon.oak is -8.5", "must be a number above 0")),
    "epsilon zero": (line(EPSILON, "epsilon = 0"), ("budgets.epsilon is 0", "must be a number above 0")),
    "epsilon a text": (line("oak = 8.5", 'oak = "8.5"'), ("budgets.epsilon.oak is '8.5'", "must be a number")),
    "epsilon true": (line("oak = 8.5", "oak = true"), ("budgets.epsilon.oak is True", "must be a number")),
    "epsilon infinite": (line("oak = 8.5", "oak = inf"), ("budgets.epsilon.oak is inf", "must be a number")),
    "epsilon dotted": (line("oak = 8.5", "st.oak = 8.5"), ("budgets.epsilon.st is a table", "in quotes")),
    "no budgets": (line(EPSILON, ""), ("budgets: give exactly one of", "epsilon")),
    "delta 1": (line("delta = 1e-6", "delta = 1"), ("budgets.delta is 1", "below 1")),
    "delta for nobody": (
        line("delta = 1e-6", "delta = { elms = 1e-6 }"),
        ("budgets.delta names 'elms'", "mean 'elm'?"),
    ),
    "schema missing": (
        line('unit = "patient"', 'schema = "s.toml"'),
        ("s.toml cannot be read", "polyeps data describe"),
    ),
    "budgets file missing": (line(EPSILON, 'file = "b.csv"'), ("b.csv cannot be read",)),
    "persons dealt out": (
        line('unit = "patient"', 'unit = "patient"\npartition = "iid"\nclients = 3'),
        ("would divide the records of a patient",),
    ),
    "another number of clients": (
        line('unit = "patient"', 'unit = "patient"\nclients = 3'),
        ("data.clients = 3 has no effect", "names its 6 clients", "leave it out"),
    ),
    "a size of clients": (line('unit = "patient"', 'unit = "patient"\nsize = 9'), ("data.size = 9 has no effect",)),
    "unit without a table": (
        line('file = "h.csv"', 'name = "digits"'),
        ("data.unit is for your own table", "data.file"),
    ),
    "unknown setting": (line('unit = "patient"', 'units = "patient"'), ("'data.units'", "did you mean 'unit'?")),
    "bounds by other names": (
        line("bp = { range = [50, 250] }", "bp = { min = 50, max = 250 }"),
        ("there is no setting 'data.columns.bp.min'", "known are range"),
    ),
    "a number with commas": (
        cell(7, "bp", "1,200"),
        ("h.csv, row 7", "write decimals with a point, 1.200, or, if the comma separates thousands, 1200"),
    ),
    "two sources": (
        line('file = "h.csv"', 'file = "h.csv"\nname = "adult"'),
        ("data.name = adult", "data.file", "leave out one"),
    ),
    "no client column": (
        line('client = "hospital"\n', ""),
        ("h.csv has no column 'client'", 'write data.client = "COLUMN"'),
    ),
    "delta of zero": (line("delta = 1e-6", "delta = 0"), ("client 'cedar'", "needs a budgets.delta above 0")),
    "larger batch": (
        line("batch = 16", "batch = 1600"),
        ("client 'oak' has 18 patients", "fewer than training.batch = 1600", "make the batch 18 or less"),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_input_is_one_sentence_with_the_remedy_and_leaves_nothing(wrong: str, here: Path) -> None:
    change, naming = WRONG[wrong]
    change(here)
    before = sorted(path.name for path in here.iterdir())
    refused("run", "e.toml", naming=naming)
    assert sorted(path.name for path in here.iterdir()) == before


def test_names_with_blanks_dots_and_other_alphabets(here: Path) -> None:
    renamed = {"elm": "St. Élm", "oak": "дуб"}
    rows = [[renamed.get(row[0], row[0]), *row[1:]] for row in hospital_rows()]
    (here / "h.csv").write_text(written(rows, HEADER.replace("bp", "blood.pressure (mmHg)")))
    (here / "e.toml").write_text(
        EXPERIMENT.replace("bp = {", '"blood.pressure (mmHg)" = {')
        .replace("elm =", '"St. Élm" =')
        .replace("oak =", '"дуб" =')
    )
    population = populate(config.read_experiment(here / "e.toml"), 1)
    held = dict(zip(population.ids, guaranteed(population.budgets), strict=True))
    assert (held["St. Élm"].epsilon, held["дуб"].epsilon) == (4.0, 8.5)
    assert "blood.pressure (mmHg)" in population.dataset.columns


def test_the_guide_shows_settings_that_run(here: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "own-data.md").read_text()
    shown = guide.split("```toml\n")[1].split("```")[0]
    (here / "h.csv").write_text(written([row for row in hospital_rows() if row[0] in ("elm", "cedar")]))
    (here / "e.toml").write_text(shown)
    population = populate(config.read_experiment(here / "e.toml"), 1)
    assert population.ids == ("cedar", "elm")
    assert population.dataset.remarks == ()
