"""Invented patients of six hospitals: the tiny table that `polyeps new` comes with."""

from __future__ import annotations

import csv
import io

import numpy as np

# Patients of each hospital. No person is behind any of them.
PATIENTS = {"elm": 200, "alder": 150, "cedar": 100, "fir": 300, "oak": 260, "birch": 120}
# How its columns become numbers, as schemas and experiments declare it.
COLUMNS = """\
age = { range = [0, 110], missing = "mean-of-range" }
bp = { range = [50, 250] }
sex = { categories = ["m", "f"] }
smoker = { categories = ["True", "False"] }
"""
_MOST_VISITS = 5
_NO_AGE = 0.04  # share of patients whose age was not written down


def hospitals_csv(seed: int = 17) -> str:
    """Return a CSV table of visits: hospital, patient, age, bp, sex, smoker, outcome; rows in random order.

    A patient has 1 to 5 visits. Old patients, smokers, and patients with a high blood pressure (bp) are more often ill:
    a logistic model of these columns is right about four visits in five.
    """
    rng = np.random.default_rng(seed)
    rows: list[list[object]] = []
    number = 0
    for hospital, patients in PATIENTS.items():
        for _ in range(patients):
            number += 1
            age, pressure = int(rng.integers(18, 91)), rng.normal(132, 16)
            sex, smoker = str(rng.choice(["m", "f"])), bool(rng.random() < 0.3)
            written = "" if rng.random() < _NO_AGE else age
            for _ in range(int(rng.integers(1, _MOST_VISITS + 1))):
                measured = round(float(np.clip(pressure + rng.normal(0, 6), 80, 220)))
                score = 0.09 * (age - 55) + 0.06 * (measured - 132) + 1.6 * (smoker - 0.3)
                ill = rng.random() < 1 / (1 + np.exp(-score))
                rows.append([hospital, f"p{number:04}", written, measured, sex, smoker, "ill" if ill else "well"])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["hospital", "patient", "age", "bp", "sex", "smoker", "outcome"])
    writer.writerows(rows[place] for place in rng.permutation(len(rows)))
    return text.getvalue()
