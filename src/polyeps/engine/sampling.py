"""Poisson batches: every record of a client enters each of its batches independently, with the client's rate.

A client's S batches of N records are one sequence of S·N independent coin tosses. The gap from one success to
the next is geometric, so a client's batches cost as many draws as they hold records, not S·N.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyeps.engine.noise import Streams
from polyeps.errors import InputError


@dataclass(frozen=True)
class Batches:
    """The batches of n clients over S steps; empty batches are batches."""

    sizes: NDArray[np.int64]  # (S, n)
    records: NDArray[np.int64]  # the records in them, by step, then client, then record


def check_rates(rates: NDArray[np.float64]) -> None:
    """Refuse a rate that is no probability, or never takes anything."""
    if not np.all((rates > 0) & (rates <= 1)):
        raise InputError(f"a sampling rate must be above 0 and at most 1, not {rates.min()} to {rates.max()}")


def draws_needed(tosses: NDArray[np.int64], rates: NDArray[np.float64]) -> int:
    """How many gaps to draw so that one helping is nearly always enough for every client."""
    expected = tosses * rates
    return int(np.max(expected + 6 * np.sqrt(expected + 1), initial=0)) + 8


def poisson_batches(
    streams: Streams, offsets: NDArray[np.int64], rates: NDArray[np.float64], steps: NDArray[np.int64]
) -> Batches:
    """Draw steps[i] batches of client i's records; later batches, up to the longest client's, are empty."""
    check_rates(rates)
    counts = np.diff(offsets)
    tosses = counts * steps
    draws = draws_needed(tosses, rates)
    with np.errstate(divide="ignore"):  # rate 1: log 0 = -inf, and every gap becomes 1
        log_miss = np.log1p(-rates)[:, None]
    position = np.full((len(counts), 1), -1.0)
    pieces: list[NDArray[np.float64]] = []
    # A float64 counts tosses exactly up to 2^53.
    while np.any(position[:, -1] < tosses):
        uniforms = streams.uniforms(draws)  # (n, draws) in (0, 1]
        position = position[:, -1:] + np.cumsum(np.floor(np.log(uniforms) / log_miss) + 1, axis=1)
        pieces.append(position)
    positions = np.concatenate(pieces, axis=1) if pieces else np.empty((len(counts), 0))
    client, event = np.nonzero(positions < tosses[:, None])
    place = positions[client, event].astype(np.int64)
    step, record = np.divmod(place, np.maximum(counts, 1)[client])
    longest = int(steps.max(initial=0))
    sizes = np.bincount(step * len(counts) + client, minlength=longest * len(counts))
    sizes = sizes.reshape(longest, len(counts))
    # Found by client, then step; wanted by step, then client: each batch moves as a whole, so no sorting.
    here, there = _starts(sizes.T), _starts(sizes)
    records = np.empty(len(client), np.int64)
    records[there[step, client] + np.arange(len(client)) - here[client, step]] = record + offsets[client]
    return Batches(sizes, records)


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each batch begins when batches lie one after another, row by row."""
    flat = sizes.ravel()
    return (np.cumsum(flat) - flat).reshape(sizes.shape)
