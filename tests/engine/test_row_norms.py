"""Squared norms of rows on a device."""

import pytest
import torch

from polyeps.engine.row_norms import squared_row_norms

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
