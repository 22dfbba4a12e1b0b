"""Encodes UCI's tables Adult, Bank and KDD Cup 99 as FedSel does; docs/reference/data-sets.md lists what we inferred.

Cut points, categories and value ranges come from the data and are treated as public, as in the paper: Liu et al.,
"FedSel: Federated SGD under Local Differential Privacy with Top-k Dimension Selection", DASFAA 2020,
https://arxiv.org/abs/2003.10637.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]
TextColumns = dict[str, NDArray[np.bytes_]]  # a table by column, its cells as in the file


class Encoded(NamedTuple):
    """Encoded records and the name of each column."""

    features: Features  # (R, d)
    columns: tuple[str, ...]


_ADULT_HEADER = """
    age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain
    capital-loss hours-per-week native-country income"""
ADULT_COLUMNS = tuple(_ADULT_HEADER.split())
# In the order of adult.names, which is also the order of LIBSVM's a9a.
_ADULT_CATEGORIES = {
    "workclass": """
        Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked""",
    "education": """
        Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters 1st-4th
        10th Doctorate 5th-6th Preschool""",
    "marital-status": """
        Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent
        Married-AF-spouse""",
    "occupation": """
        Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners
        Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv
        Armed-Forces""",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "native-country": """
        United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan
        Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland
        France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland
        Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands""",
}
_ADULT_ZERO_OR_MORE = ("capital-gain", "capital-loss")  # nine in ten are zero: no quintiles to speak of

_BANK_HEADER = """
    age job marital education default balance housing loan contact day month duration campaign pdays previous
    poutcome y"""
BANK_COLUMNS = tuple(_BANK_HEADER.split())
_BANK_NUMBERS = ("age", "balance", "day", "duration", "campaign", "pdays", "previous")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

_KDD_HEADER = """
    duration protocol_type service flag src_bytes dst_bytes land wrong_fragment urgent hot num_failed_logins
    logged_in num_compromised root_shell su_attempted num_root num_file_creations num_shells num_access_files
    num_outbound_cmds is_host_login is_guest_login count srv_count serror_rate srv_serror_rate rerror_rate
    srv_rerror_rate same_srv_rate diff_srv_rate srv_diff_host_rate dst_host_count dst_host_srv_count
    dst_host_same_srv_rate dst_host_diff_srv_rate dst_host_same_src_port_rate dst_host_srv_diff_host_rate
    dst_host_serror_rate dst_host_srv_serror_rate dst_host_rerror_rate dst_host_srv_rerror_rate attack"""
KDD_COLUMNS = tuple(_KDD_HEADER.split())
_KDD_CATEGORICAL = ("protocol_type", "service", "flag")
_KDD_PAPER_RECORDS = 70_000  # FedSel's sample of the file


def parse_table(lines: list[bytes], names: tuple[str, ...], delimiter: bytes) -> TextColumns:
    """Split equally long delimited lines into columns; quotes are not understood."""
    cells = np.array(delimiter.join(lines).split(delimiter))
    table = cells.reshape(len(lines), len(names))
    return {name: table[:, i] for i, name in enumerate(names)}


def quintile_cuts(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lower ends of bins 2 to 5; where ties make quantiles coincide, the next value that occurs."""
    seen = np.unique(values)
    cuts: list[int] = []
    for quantile in np.quantile(values, [0.2, 0.4, 0.6, 0.8], method="inverted_cdf"):
        at_least = quantile if not cuts else max(quantile, cuts[-1] + 1)
        cuts.append(int(seen[min(np.searchsorted(seen, at_least), len(seen) - 1)]))
    return np.array(cuts)


def one_hot(cells: NDArray[np.bytes_], categories: list[bytes]) -> Features:
    """Return one column per category; a cell of no listed category is all zeros."""
    matches: NDArray[np.bool_] = cells[:, None] == np.array(categories)[None, :]
    return matches.astype(np.float32)


def scaled(values: NDArray[np.float64]) -> Features:
    """Scale a column to [-1, 1]; a constant one becomes zero."""
    low, high = values.min(), values.max()
    if low == high:
        return np.zeros((len(values), 1), np.float32)
    stretched: NDArray[np.float64] = 2 * (values - low) / (high - low) - 1
    return stretched.astype(np.float32)[:, None]


def encode_adult(cells: TextColumns, training: int) -> Encoded:
    """Encode Adult as the 123 binary columns of LIBSVM's a9a; the first `training` records set the quintiles."""
    blocks, columns = [], list[str]()
    for name in ADULT_COLUMNS[:-1]:
        if name in _ADULT_CATEGORIES:
            blocks.append(_of_categories(name, cells, np.array(_ADULT_CATEGORIES[name].encode().split()), columns))
            continue
        values = cells[name].astype(np.int64)
        cuts = np.array([1]) if name in _ADULT_ZERO_OR_MORE else quintile_cuts(values[:training])
        bins = np.searchsorted(cuts, values, side="right")
        blocks.append(np.eye(len(cuts) + 1, dtype=np.float32)[bins])
        columns += [f"{name}<{cuts[0]}"] + [f"{name}>={cut}" for cut in cuts]
    return Encoded(np.hstack(blocks), tuple(columns))


def encode_bank(cells: TextColumns) -> Encoded:
    """Encode Bank as 32 columns: 7 scaled numbers, the scaled month, 8 attributes one-hot less their first value."""
    blocks, columns = [], list[str]()
    for name in BANK_COLUMNS[:-1]:
        if name in _BANK_NUMBERS:
            blocks.append(scaled(cells[name].astype(np.float64)))
            columns.append(name)
        elif name == "month":
            order = np.array(_MONTHS, dtype=np.bytes_)
            blocks.append(scaled((cells[name][:, None] == order).argmax(axis=1).astype(np.float64)))
            columns.append(name)
        else:
            blocks.append(_of_categories(name, cells, np.unique(cells[name])[1:], columns))
    return Encoded(np.hstack(blocks), tuple(columns))


def encode_kdd(cells: TextColumns, copies: NDArray[np.int64]) -> Encoded:
    """Encode KDD Cup 99 as 114 columns: 38 scaled numbers, 3 attributes one-hot; row i counts `copies[i]` times.

    A category has a column if a sample of 70 000 records, as FedSel uses, is expected to hold it at least once.
    """
    rarest = copies.sum() / _KDD_PAPER_RECORDS
    blocks, columns = [], list[str]()
    for name in KDD_COLUMNS[:-1]:
        if name not in _KDD_CATEGORICAL:
            blocks.append(scaled(cells[name].astype(np.float64)))
            columns.append(name)
            continue
        seen, which = np.unique(cells[name], return_inverse=True)
        times = np.bincount(which, weights=copies)
        blocks.append(_of_categories(name, cells, seen[times >= rarest], columns))
    return Encoded(np.hstack(blocks), tuple(columns))


def _of_categories(name: str, cells: TextColumns, found: NDArray[np.bytes_], columns: list[str]) -> Features:
    """Return an attribute one-hot, and add the names of its columns to those there are."""
    categories = [bytes(category) for category in found]
    columns += [f"{name}={category.decode()}" for category in categories]
    return one_hot(cells[name], categories)
