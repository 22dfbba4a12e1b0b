"""Squared norms of rows, whatever the other rows hold."""

import numpy as np
import pytest
import torch
from torch import nn

from polyeps.engine.layout import lay_out
from polyeps.engine.network import add_gradients, lower
from polyeps.engine.row_norms import squared_row_norms
from polyeps.models import cross_entropy

ON_A_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@ON_A_DEVICE
@pytest.mark.parametrize("size", [1, 10, 64, 785, 1024, 5001])
def test_a_device_adds_squares_as_float64_does(size: int) -> None:
    rows = torch.randn(37, size + 3, generator=torch.Generator().manual_seed(size)).cuda()[:, :size]
    for scale in (1.0, 1e-30, 1e30):
        expected = (rows * scale).double().square().sum(1)
        torch.testing.assert_close(squared_row_norms(rows * scale), expected, rtol=1e-12, atol=0)
    broken = rows.clone()
    broken[3, 0], broken[5, 0] = torch.nan, torch.inf
    assert squared_row_norms(broken)[3].isnan()
    assert squared_row_norms(broken)[5].isinf()
    assert squared_row_norms(broken)[:3].isfinite().all()
    assert squared_row_norms(rows.T.contiguous().T).allclose(squared_row_norms(rows), rtol=1e-12)


@pytest.mark.parametrize("size", [1, 10, 785, 5001])
def test_rows_on_the_cpu_have_the_squares_that_float64_gives(size: int) -> None:
    rows = torch.randn(37, size, generator=torch.Generator().manual_seed(size))
    for scale in (1.0, 1e-15, 1e15):
        torch.testing.assert_close(
            squared_row_norms(rows * scale), (rows * scale).double().square().sum(1), rtol=2e-6, atol=0
        )


@pytest.mark.parametrize("size", [65, 785, 5001])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_no_number_leaves_the_norms_of_others(size: int, bad: float) -> None:
    scales = torch.tensor([[1e25], [1.0], [1e-25]] * 3)
    rows = scales * torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    expected = squared_row_norms(rows)
    rows[4, 0] = bad
    found = squared_row_norms(rows)
    kept = [row for row in range(9) if row != 4]
    assert torch.equal(found[kept], expected[kept])
    assert not found[4].isfinite()


def test_a_record_that_is_no_number_does_not_drop_records_with_large_gradients() -> None:
    """Under weights that a server may choose: one record's NaN once took all others out of the sum, of any client."""
    network = lower(nn.Linear(100, 3))
    generator = torch.Generator().manual_seed(0)
    rows, labels = 1e25 * torch.randn(8, 100, generator=generator), torch.arange(8) % 3
    layout = lay_out(2, [0, 2], np.array([4]), torch.device("cpu"))
    sums = []
    for value in (0.0, torch.nan):
        rows[0] = value
        into, counted = torch.zeros(2, network.size), torch.tensor([float(value != 0), *[1.0] * 7])
        with torch.no_grad():
            add_gradients(
                network, cross_entropy, torch.zeros(2, network.size), rows, labels, layout, counted, torch.ones(2), into
            )
        sums.append(into)
    assert sums[0].norm(dim=1).min() > 0.5
    assert torch.equal(sums[0], sums[1])
