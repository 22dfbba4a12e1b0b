"""Accounts whose unit is a person: what may be charged to them, what they say, what a word may be."""

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import refused, run, run_json

from polyeps.accounting.events import Gaussian, PureDpEvent
from polyeps.core import Algorithm, Budget, Unit, check_person
from polyeps.errors import InputError, UnknownEvent
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge

BUDGET = Budget(3.0, 1e-5)
PATIENT = BudgetTerms(BUDGET, "person", person="patient")


def ledger(path: Path, terms: BudgetTerms = PATIENT) -> Ledger:
    return Ledger.create(path / "ledger.db", {"clinic": terms})


@pytest.mark.parametrize(
    ("terms", "unit", "person", "said"),
    [
        (PATIENT, "record", "", r"a record-level event cannot .* protects a person \(patient\)"),
        (PATIENT, "client", "", r"a client-level event cannot .* protects a person \(patient\)"),
        (PATIENT, "person", "doctor", r"a person-level event \(doctor\) cannot .* protects a person \(patient\)"),
        (PATIENT, "person", "", r"a person-level event \(person\) cannot .* protects a person \(patient\)"),
        (BudgetTerms(BUDGET), "person", "patient", r"a person-level event \(patient\) cannot .* protects a record;"),
        (BudgetTerms(BUDGET, "client"), "person", "client", r"event \(client\) cannot .* protects a client;"),
    ],
)
def test_another_unit_is_refused_and_nothing_is_charged(
    tmp_path: Path, terms: BudgetTerms, unit: Unit, person: str, said: str
) -> None:
    with closing(ledger(tmp_path, terms)) as found:
        before = found.head
        with pytest.raises(UnknownEvent, match=said):
            found.charge(Gaussian(5.0), unit=unit, person=person)
        with pytest.raises(UnknownEvent, match=said):
            found.charge_all([Charge(("clinic",), Gaussian(5.0), 1, unit, "zero-out", person)])
        if unit != "client":  # a pure ε of a record says little about the whole of a person or client
            with pytest.raises(UnknownEvent, match=said):
                found.charge(PureDpEvent(0.1), unit=unit, person=person)
        assert found.head == before
        found.charge(PureDpEvent(0.1), unit="client")  # holds for any two inputs


def test_charges_of_the_unit_are_written_and_read_again(tmp_path: Path) -> None:
    with closing(ledger(tmp_path)) as found:
        found.charge(Gaussian(5.0), unit="person", person="patient")
        spent = found.spent("clinic")
    with closing(Ledger(tmp_path / "ledger.db")) as again:
        assert again.account("clinic").terms == PATIENT
        assert again.spent("clinic") == spent > 0
        budget, charge = (row.content for row in again.rows() if row.kind in ("budget", "charge"))
        assert (budget["unit"], budget["person"]) == ("person", "patient") == (charge["unit"], charge["person"])
    with closing(Ledger.create(tmp_path / "records.db", {"clinic": BudgetTerms(BUDGET)})) as single:
        assert all("person" not in row.content for row in single.rows())  # as before persons were known


def test_the_command_line_sets_and_shows_persons(tmp_path: Path) -> None:
    file = str(tmp_path / "ledger.db")
    options = ("--file", file, "--epsilon", "3", "--client", "clinic")
    refused("ledger", "set-budget", *options, "--unit", "person", "--person", "<b>", naming=("1 to 30 letters",))
    refused("ledger", "set-budget", *options, "--person", "patient", naming=("the unit is a record", "leave it out"))
    assert not Path(file).exists()
    run("ledger", "set-budget", *options, "--unit", "person", "--person", "patient")
    (row,) = run_json("ledger", "show", "--file", file)["clients"]
    assert row["unit"] == "person (patient)"
    assert "person (patient)" in run("ledger", "show", "--file", file).stdout


@pytest.mark.parametrize(
    "word",
    ["", " ", "a b", "<script>", "patient_id", "\x1b[31m", "a" * 31, "\u202epatient", "12", None, "pa\ntient"],
)
def test_words_that_are_refused(word: object) -> None:
    with pytest.raises(InputError, match="it must be 1 to 30 letters, such as patient"):
        check_person(word)


@given(st.text(max_size=40))
def test_a_word_that_passes_shows_as_it_is(word: str) -> None:
    try:
        check_person(word)
    except InputError:
        return
    assert word.isalpha()
    assert word.isprintable()
    assert len(word) <= 30
    assert not set(word) & set("<>&\"'{}")


def test_units_and_words_belong_together() -> None:
    with pytest.raises(InputError, match="the unit is 'household'; it must be one of record, person, client"):
        BudgetTerms(BUDGET, "household")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is a word for persons, but the unit is a client; leave it out"):
        Algorithm({}, lambda state, _: state, unit="client", person="patient")
    assert Algorithm({}, lambda state, _: state, unit="person").person == "person"
