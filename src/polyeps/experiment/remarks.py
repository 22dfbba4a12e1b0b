"""Remarks on a job that its plan, the end of its run and its report share: how the data were read, and δ."""

from __future__ import annotations

from polyeps.data.partition import unit_sizes
from polyeps.experiment.job import Job


def remarks(job: Job) -> list[str]:
    """Return what a user should know about the data and budgets of a job, in sentences."""
    return [*job.population.dataset.remarks, *_loose_deltas(job)]


def _loose_deltas(job: Job) -> list[str]:
    """Return a warning where a δ is not below one over the number of units: it then allows to publish one of them."""
    population, whole = job.population, job.algorithm.unit == "client"
    if whole:
        held, unit = [len(population.ids)] * len(population.ids), "clients"
    else:
        held = unit_sizes(population.dataset, population.partition).tolist()
        unit = f"{population.dataset.person}s" if population.dataset.persons is not None else "records"
    loose = [
        (terms.budget.delta, units, client)
        for client, units in zip(population.ids, held, strict=True)
        if (terms := job.terms.get(client)) is not None and terms.budget.delta * units >= 1
    ]
    if not loose:
        return []
    delta, units, client = max(loose)
    others = f" and {len(loose) - 1} more" if len(loose) > 1 else ""
    return [
        f"client {client!r}{others}: δ = {delta:g} is not below 1/{units}, one over the number of {unit}, so it would "
        "allow publishing one of them; set budgets.delta to a tenth of that or less"
    ]
