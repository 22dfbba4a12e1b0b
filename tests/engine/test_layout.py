"""Layouts: every record in its owner's rows, and little padding."""

from __future__ import annotations

import numpy as np
import pytest

from polyeps.engine.layout import Plan, plan_exact, plan_padded, plan_sorted, steps_of
from polyeps.engine.sampling import Batches

STEPS, CLIENTS = 30, 40


def drawn() -> Batches:
    sizes = np.random.default_rng(3).poisson(8, (STEPS, CLIENTS))
    sizes[4] = 0  # a step in which nobody has a record
    return Batches(sizes, np.arange(sizes.sum()))


def padding(plan: Plan, batches: Batches) -> float:
    """Rows laid out per record."""
    return float((plan.widths @ np.diff(plan.cuts)).sum() / batches.sizes.sum())


@pytest.mark.parametrize(
    "plan",
    [
        plan_exact(drawn()),
        plan_padded(drawn()),
        plan_sorted(drawn(), 1),
        plan_sorted(drawn(), 4),
    ],
)
def test_every_record_lies_in_a_row_of_its_owner(plan: Plan) -> None:
    sizes = drawn().sizes
    seen = 0
    spare = 10**6 + np.arange(CLIENTS)
    for number, step in enumerate(steps_of(plan, spare)):
        owner = step.layout.owner.numpy()
        client = owner if step.order is None else step.order.numpy()[owner]
        valid = np.ones(len(owner), bool) if step.valid is None else step.valid.numpy() > 0
        owners = np.repeat(np.arange(CLIENTS), sizes[number])  # of the records of this step, in their order
        records = step.records.numpy()[valid]
        assert sorted(records) == list(range(seen, seen + sizes[number].sum()))
        assert np.array_equal(owners[records - seen], client[valid])
        assert np.array_equal(step.records.numpy()[~valid], spare[client[~valid]])
        seen += sizes[number].sum()
        assert sum(g.clients * g.width for g in step.layout.groups) == step.layout.rows
        for group in step.layout.groups:
            owned = owner[group.start : group.stop].reshape(group.clients, group.width)
            assert np.array_equal(owned[:, 0], np.arange(group.first, group.last))
            assert (owned == owned[:, :1]).all()
    assert seen == sizes.sum()


def test_exact_pads_nothing_and_four_sorted_groups_little() -> None:
    batches = drawn()
    assert padding(plan_exact(batches), batches) == 1
    assert padding(plan_sorted(batches, 4), batches) < 1.25
    assert padding(plan_sorted(batches, 8), batches) < 1.15
