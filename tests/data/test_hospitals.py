"""The invented hospitals: what the table holds, and that something can be learned from it."""

import csv
import io
from collections import Counter

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from polyeps.data.hospitals import PATIENTS, hospitals_csv


def test_the_table_is_small_messy_and_can_be_learned() -> None:
    text = hospitals_csv()
    assert text == hospitals_csv()
    assert text != hospitals_csv(18)
    assert len(text) < 150_000
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == ["hospital", "patient", "age", "bp", "sex", "smoker", "outcome"]
    owner: dict[str, set[str]] = {}
    for row in rows:
        owner.setdefault(row["patient"], set()).add(row["hospital"])
    assert all(len(hospitals) == 1 for hospitals in owner.values())
    assert Counter(next(iter(hospitals)) for hospitals in owner.values()) == PATIENTS
    assert set(Counter(row["patient"] for row in rows).values()) == {1, 2, 3, 4, 5}
    assert 0.01 < np.mean([row["age"] == "" for row in rows]) < 0.1
    assert {row["sex"] for row in rows} == {"m", "f"}
    assert {row["smoker"] for row in rows} == {"True", "False"}
    assert all(50 <= float(row["bp"]) <= 250 for row in rows)
    assert [row["hospital"] for row in rows] != sorted((row["hospital"] for row in rows), key=list(PATIENTS).index)
    features = [[float(row["age"] or 55), float(row["bp"]), row["smoker"] == "True"] for row in rows]
    scaled = (np.array(features) - [55, 132, 0.3]) / [20, 16, 0.5]
    ill = np.array([row["outcome"] == "ill" for row in rows])
    assert 0.4 < ill.mean() < 0.6
    assert 0.77 < cross_val_score(LogisticRegression(), scaled, ill).mean() < 0.84
