import base64
import hashlib
import json
import math
import re
import time
from html import unescape
from pathlib import Path

import pytest
from support.journals import ABOUT, CLIENTS, add_job, new_journal, write_job
from support.pages import Balance, page, words

from polyeps.errors import InputError
from polyeps.experiment.journal import ClientRow
from polyeps.report.page import write_page

CONTROL = [ClientRow("ward-a", 2.0, 1e-5, 0.5, 100, 1.0), ClientRow("ward-b", 2.0, 1e-5, 2.0, 200, 1.0)]
OPEN = [ClientRow("ward-a", None, None, 0.5, 100, None)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two methods under own budgets and three controls, two seeds each."""
    folder = tmp_path / "run"
    journal = new_journal(folder)
    for seed in (0, 1):
        write_job(journal, "fedavg", seed, accuracies=[0.5 + seed / 10, 0.6, 0.7])
        write_job(journal, "weiavg", seed, spent={"ward-a": 0.4955, "ward-b": 1.5}, left={"ward-a": 1})
        write_job(journal, "minimum", seed, facts={"budgets": "minimum"})
        write_job(journal, "maximum", seed, clients=CONTROL, facts={"budgets": "maximum"})
        write_job(journal, "open", seed, clients=OPEN, facts={"budgets": "none"})
    journal.close()
    return folder


def test_a_smaller_budget_is_a_guarantee_with_its_conditions(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    hangs_on = {"trust": "secure-sum", "unit": "client", "conditions": ["It hangs on a thread."]}
    write_job(journal, "cmp-fed", facts={"budgets": "minimum", **hangs_on})
    write_job(journal, "open", clients=OPEN, facts={"budgets": "none", **hangs_on})
    journal.close()
    said = words(page(tmp_path / "run"))
    assert said.count("It hangs on a thread.") == 3  # smallest, median and largest budget
    assert "not their own but" in said


def test_the_page_says_what_happened(run: Path) -> None:
    said = words(page(run))
    assert "2 clients with budgets from ε 0.5 to 2 trained a model of 26,010 parameters on mnist in 3 rounds" in said
    assert "Every client stayed within its own budget: the closest came to 99.1 % of it" in said
    assert "61.7 ± 2.4 %" in said  # fedavg: 0.6 and 0.6333, by hand
    assert "The client with the smallest budget, ward-a, own budget ε 0.5" in said
    assert "by a factor of at most 1.642 (ε = 0.4955), except with probability at most 1 in 100 000" in said
    assert "the effective budget of all clients is not their own but the largest of all, ε 2" in said
    assert "1 of 2 clients spent more than their own budgets" in said
    assert "no client has a guarantee" in said
    assert "1 of 2 clients left early on average over 2 seeds, after round 2." in said
    assert "training.clip 1.0" in said
    assert "polyeps run small.toml" in said
    assert "computed in simulation" in said
    assert "Budget exceeded" not in said
    assert "Not finished" not in said


def test_sections_come_in_order(run: Path) -> None:
    text = page(run)
    assert re.findall(r"<h2>(.*?)</h2>", text) == [
        "Methods",
        "Accuracy over rounds",
        "Guarantees",
        "Clients",
        "Clients that left early",
        "Traffic and time",
        "Settings",
        "Data",
    ]
    links = re.findall(r'<a [^>]*href="#([^"]*)"', text)
    assert len(links) > 8
    assert set(links) <= set(re.findall(r'\bid="([^"]*)"', text))  # the navigation leads somewhere


def test_the_page_needs_nothing_else(run: Path) -> None:
    text = page(run)
    assert not re.search(r"https?:", text.replace("http://www.w3.org/2000/svg", ""))  # a name, not an address
    assert not re.search(r"\b(src|href)=\"(?!#|data:)", text)
    assert "url(" not in text
    assert " style=" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    Balance().feed(re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL))


def test_the_policy_names_the_one_script_and_the_one_style(run: Path) -> None:
    text = page(run)
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])  # type: ignore[index]
    for name, rule in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not {"unsafe", "http", "*"} & set(re.findall(r"unsafe|http|\*", policy))


def test_identifiers_are_unique_and_pictures_have_words(run: Path) -> None:
    text = page(run)
    identifiers = re.findall(r'\bid="([^"]*)"', text)
    assert len(identifiers) == len(set(identifiers))
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 3 * 2 + 3  # three for desk and phone; fedavg and minimum spent alike
    for picture in pictures:
        assert re.search(r'role="img" tabindex="0" aria-label="[^"]{20,}"', picture)
        assert not re.search(r"#[0-9a-f]{6}\b", picture), "a colour that does not follow the reader's scheme"


def test_the_page_is_reproducible(run: Path) -> None:
    assert page(run) == page(run)


def test_spending_more_than_the_budget_is_said_loudly(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, spent={"ward-a": 0.5001, "ward-b": 1.0})
    journal.close()
    text = page(tmp_path / "run")
    said = words(text)
    assert "Budget exceeded. One client spent more than its budget." in said
    assert "ward-a spent ε 0.5001 of 0.5 (fedavg, seed 0)" in said
    assert text.index("Budget exceeded") < text.index("2 clients with budgets")
    assert "Not every client stayed within its own budget: 1 did not." in said
    assert "Every client stayed" not in said
    assert "100.1 %" in said


def test_a_finished_job_that_does_not_say_what_was_spent(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, spent={"ward-b": 1.0})
    journal.close()
    said = words(page(tmp_path / "run"))
    assert "Spending is not known. Finished jobs lack the spending of 1 client" in said
    assert "Every client stayed" not in said


def test_names_cannot_write_into_the_page(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    about = {**ABOUT, "name": evil, "command": evil, "experiment": {evil: evil}, "version": evil}
    journal = new_journal(tmp_path / "run", about)
    names = [evil, "$x_1^{", "--><b>", '" onload="x', "line\nbreak\x07", "病院"]
    clients = [ClientRow(name, 1.0, 1e-5, 1.0, 10, 1.0) for name in names]
    write_job(journal, evil, clients=clients, facts={"summary": evil, "data": evil})
    journal.close()
    text = page(tmp_path / "run")
    assert re.findall(r"<script[^>]*>", text).count("<script>") == 1  # our own; others hold data
    assert "alert(1)</script>" not in text
    assert "--><b>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "$x_1^{" in text
    for marks in re.findall(r'class="marks">(.*?)</script>', text, re.DOTALL):
        json.loads(marks)
        assert not {"<", ">", "&"} & set(marks)
    Balance().feed(re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL))


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, seed=0, planned=9, finished=False)
    add_job(journal, "fedavg-1", "fedavg", "fedavg", 1, 9)
    journal.close()
    said = words(page(tmp_path / "run"))
    assert "Not finished. 0 of 2 jobs finished. fedavg with seed 0 has done 3 of 9 rounds." in said
    assert "The clients' spending is not known yet." in said
    assert "Its spending is not known before the job is finished." in said


def test_a_run_in_which_nothing_has_begun(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    assert "No job of this run has begun." in words(page(tmp_path / "run"))
    add_job(journal, "fedavg-1", "fedavg", "fedavg", 1, 9)
    assert "No job of this run has begun." in words(page(tmp_path / "run"))


def test_one_client_one_round(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, accuracies=[0.5], clients=CLIENTS[:1])
    journal.close()
    said = words(page(tmp_path / "run"))
    assert "1 client with a budget of ε 0.5 trained" in said
    assert "in 1 round, with 1 method and 1 seed." in said
    assert "The client stayed within its own budget and used 50.0 % of it." in said


def test_what_is_not_a_number(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, accuracies=[0.5, math.nan, math.nan], spent={"ward-a": math.inf, "ward-b": 0.0})
    write_job(journal, "never", accuracies=[math.nan] * 3)
    write_job(journal, "unseen", accuracies=[None] * 3)
    journal.close()
    said = words(page(tmp_path / "run"))
    assert "not a number" in said
    assert "Nothing is guaranteed: the outcome may reveal" in said
    assert "ward-a spent ε ∞ of 0.5" in said


def test_missing_terms_are_named(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    job = write_job(journal)
    with journal._writing() as db:
        db.execute("UPDATE jobs SET facts = ? WHERE job = ?", (json.dumps({"budgets": "own"}), job))
    said = words(page(tmp_path / "run"))
    assert "lacks the terms of its protection (adjacency is missing)" in said


def test_two_runs_on_one_page(tmp_path: Path) -> None:
    for name in ("first", "second"):
        journal = new_journal(tmp_path / name, {**ABOUT, "name": name})
        write_job(journal)
        journal.close()
    said = words(page(tmp_path / "first", tmp_path / "second", tmp_path / "first"))
    assert "fedavg (first)" in said
    assert "Settings of second" in said
    assert said.count("Settings of first") == 1


def test_many_methods_get_a_legend(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    for number in range(14):
        write_job(journal, f"method-{number}")
    journal.close()
    assert page(tmp_path / "run").count("method-13") > 4


def test_a_table_of_names_alone_is_not_drawn(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    for label in ("fedavg", "weiavg"):
        write_job(journal, label)
    journal.close()
    text = page(tmp_path / "run")
    assert "The same for all methods: up per client and round 100 B" in text
    assert 'id="cost-table"' not in text
    assert 'id="methods-table"' in text


def test_two_thousand_clients_stay_light(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    clients = [
        ClientRow(f"hospital-{number}", epsilon, 1e-5, epsilon, 1200, 1.0)
        for number in range(2000)
        for epsilon in [0.05 + number / 200]
    ]
    for label in ("fedavg", "weiavg", "pfa", "pfa-plus"):
        write_job(journal, label, clients=clients, accuracies=[0.5] * 10)
    journal.close()
    began = time.perf_counter()
    text = page(tmp_path / "run")
    assert time.perf_counter() - began < 15  # about 3 s where nothing else runs
    assert len(text.encode()) < 3_000_000
    assert "polyeps report --json prints all" in text
    # A dot for every place that can be told apart: budgets are evenly spread, so hundreds of them; alike, so one chart.
    (dots,) = re.findall(r'<path class="dots plain" d="([^"]*)"', text)
    assert dots.count("M") > 400


def test_places_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder; give the name of a file"):
        write_page([run], tmp_path)
    with pytest.raises(InputError, match="lies in a folder that does not exist"):
        write_page([run], tmp_path / "absent" / "page.html")
    with pytest.raises(InputError, match="no run to report on"):
        write_page([], tmp_path / "page.html")
    assert [file.name for file in tmp_path.iterdir()] == ["run"]
