"""Algorithms that say they need no budgets weigh clients by their released updates alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.prescribed import MODEL, Prescribed, drawn

from polyeps.algorithms.balanced import balanced
from polyeps.algorithms.fedavg import fedavg
from polyeps.algorithms.pdp_fl import pdp_fl
from polyeps.algorithms.robust_hdp import robust_hdp
from polyeps.core import Algorithm
from polyeps.training import Training, dp_sgd

PRIVATE = dp_sgd(MODEL, rate=0.5, steps=1, clip=1.0, learning_rate=0.1)


@pytest.mark.parametrize("build", [balanced, robust_hdp, pdp_fl, fedavg])
def test_budgets_that_a_server_happens_to_know_change_nothing(build: Callable[[Training], Algorithm]) -> None:
    algorithm = build(PRIVATE)
    assert algorithm.needs == ()
    updates = drawn(spread=2.0)
    budgets = ([None] * 6, [0.1, 0.1, 1.0, 5.0, 90.0, 900.0], np.geomspace(1000, 0.01, 6).tolist())
    models = [Prescribed(known, updates).run(algorithm, 8).model for known in budgets]
    assert models[0].norm() > 0
    assert all(torch.equal(each, models[0]) for each in models)
