"""Remarks on a job that its plan, the end of its run and its report share: how the data were read, and δ."""

from __future__ import annotations

from polyeps.data.partition import unit_sizes
from polyeps.experiment.job import Job

_WELL_BELOW = 0.1 * (1 + 1e-9)  # of one over the number of units


def remarks(job: Job) -> list[str]:
    """Return what a user should know about the data and budgets of a job, in sentences."""
    return [*job.population.dataset.remarks, *_loose_deltas(job)]


def _loose_deltas(job: Job) -> list[str]:
    """Return a warning where a δ is not well below one over the number of units: it allows to publish one of them."""
    population, whole = job.population, job.algorithm.unit == "client"
    if whole:
        held, unit = [len(population.ids)] * len(population.ids), "clients"
    else:
        held = unit_sizes(population.dataset, population.partition).tolist()
        unit = f"{population.dataset.person}s" if population.dataset.persons is not None else "records"
    loose = [
        (terms.budget.delta, units, client)
        for client, units in zip(population.ids, held, strict=True)
        if (terms := job.terms.get(client)) is not None and terms.budget.delta * units > _WELL_BELOW
    ]
    if not loose:
        return []
    delta, units, client = max(loose, key=lambda one: one[0] * one[1])
    others = f" and {len(loose) - 1} more" if len(loose) > 1 else ""
    well = "" if delta * units >= 1 else "well "
    chance = "" if delta * units >= 1 else f" with probability {delta * units:.2g}"
    return [
        f"client {client!r}{others}: δ = {delta:g} is not {well}below 1/{units}, one over the number of {unit}, so it "
        f"would allow publishing one of them{chance}; set budgets.delta to a tenth of that or less"
    ]
