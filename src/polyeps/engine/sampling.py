"""Sampling of batches: each client's records, drawn from its own stream.

Poisson: every record enters each batch independently, with the client's rate. A client's S batches of N records are one
sequence of S·N independent coin tosses. The gap from one success to the next is geometric, so a client's batches cost
as many draws as they hold records, not S·N.

Fixed size: every batch is a uniformly random set of exactly B records, independent of the other batches; used only by
`published` forms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Streams
from polyeps.errors import InputError


@dataclass(frozen=True)
class Batches:
    """The batches of n clients over S steps; a batch may be empty."""

    sizes: NDArray[np.int64]  # (S, n)
    records: NDArray[np.int64]  # the records in them, by step, then client, then record


def split_batches(batches: Batches, most: int) -> list[Batches]:
    """Return batches of at most `most` records each, whose sums in all are those of the batches.

    Every step computes the first part of each client's batch, then the second, and so on.
    """
    largest = int(batches.sizes.max(initial=0))
    if largest <= most:
        return [batches]
    sizes = batches.sizes.ravel()
    within = np.arange(len(batches.records)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return [
        Batches(np.clip(batches.sizes - first, 0, most), batches.records[(within >= first) & (within < first + most)])
        for first in range(0, largest, most)
    ]


def check_sampling_rates(rates: NDArray[np.float64]) -> None:
    """Refuse a sampling rate that is not a probability above 0."""
    if not np.all((rates > 0) & (rates <= 1)):
        raise InputError(f"a sampling rate must be above 0 and at most 1, not {rates.min()} to {rates.max()}")


def draws_needed(tosses: NDArray[np.int64], rates: NDArray[np.float64]) -> int:
    """Return the number of gaps to draw so that one draw is nearly always enough for every client."""
    expected = tosses * rates
    return int(np.max(expected + 6 * np.sqrt(expected + 1), initial=0)) + 8


def poisson_batches(
    streams: Streams, spans: NDArray[np.int64], rates: NDArray[np.float64], steps: NDArray[np.int64]
) -> Batches:
    """Draw steps[i] batches of client i's records; later batches, up to the longest client's, are empty."""
    check_sampling_rates(rates)
    counts = np.diff(spans)[:, 0]
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
    # From client, then step, to step, then client: each batch moves as a whole, without sorting.
    here, there = _starts(sizes.T), _starts(sizes)
    records = np.empty(len(client), np.int64)
    records[there[step, client] + np.arange(len(client)) - here[client, step]] = record + spans[client, 0]
    return Batches(sizes, records)


def fixed_batches(
    streams: Streams, spans: NDArray[np.int64], sizes: NDArray[np.int64], steps: NDArray[np.int64]
) -> Batches:
    """Draw steps[i] batches of sizes[i] of client i's records; later batches, up to the longest client's, are empty.

    By Floyd's algorithm, which takes one uniform per record: position k of B picks one of the first N - B + k + 1
    records, and takes the last of them if the pick is in the batch already.
    """
    counts = np.diff(spans)[:, 0]
    if not np.all((sizes >= 1) & (sizes <= counts)):
        raise InputError("a batch of fixed size must hold at least 1 and at most all of the client's records")
    active = np.arange(steps.max(initial=0))[:, None] < steps  # (S, n)
    step, client = np.nonzero(active)
    # Largest batches first: batches that still lack a record are then a slice, which numpy does not copy.
    falling = np.argsort(-sizes[client], kind="stable")
    step, client = step[falling], client[falling]
    size, count = sizes[client], counts[client]
    # Client i's batch in step s uses the uniforms from s · B_i on, independent of the other clients.
    uniforms = streams.uniforms(int(np.max(sizes * steps, initial=0)))  # (n, draws) in (0, 1]
    # An unused place sorts behind the records.
    chosen = np.repeat(count[None], size.max(initial=0), axis=0)  # (B, batches)
    for place in range(len(chosen)):
        lack = slice(np.count_nonzero(size > place))
        last = count[lack] - size[lack] + place
        chance = uniforms[client[lack], step[lack] * size[lack] + place]
        pick = np.ceil(chance * (last + 1)).astype(np.int64) - 1
        taken = (chosen[:place, lack] == pick).any(0)
        chosen[place, lack] = np.where(taken, last, pick)
    records = np.empty_like(chosen.T)
    records[falling] = chosen.T + spans[client, :1]
    records.sort(axis=1)
    realised = np.where(active, sizes, 0)
    return Batches(realised, records[np.arange(len(chosen)) < realised[active][:, None]])


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each batch begins when batches are concatenated row by row."""
    flat = sizes.ravel()
    return (np.cumsum(flat) - flat).reshape(sizes.shape)
