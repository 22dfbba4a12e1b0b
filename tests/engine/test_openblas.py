"""Products by OpenBLAS: right, the same for a record in any company, and given up where the library is missing."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from polyeps.engine import openblas
from polyeps.engine.attention import attention, suits_products
from polyeps.engine.openblas import multiply_records, suits_openblas

HERE = pytest.mark.skipif(not suits_openblas(64, 64, 64), reason="products by OpenBLAS need an AMD CPU with AVX-512")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(openblas, "_PART", 1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@HERE
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape", [(5, 7, 3), (196, 64, 16), (25, 256, 32), (2, 700, 9), (64, 128, 200)])
def test_products_are_those_of_torch_however_matrices_lie(shape: tuple[int, int, int], add: bool) -> None:
    rows, inner, columns = shape
    owner = torch.tensor([0, 0, 2, 1, 2, 2, 0])
    wide = drawn(7, rows, inner + 3)
    lefts = [wide[:, :, :inner], drawn(7, inner, rows).transpose(1, 2), drawn(inner, 7, rows).permute(1, 2, 0)]
    rights = [
        drawn(3, inner, columns),
        drawn(3, columns, inner).transpose(1, 2),
        drawn(3, inner, 2 * columns)[:, :, ::2],
    ]
    for left in [*lefts, drawn(7, 1, inner).expand(7, rows, inner)]:
        for right in rights:
            into = drawn(7, rows, columns + 5)[:, :, :columns]
            wanted = torch.bmm(left, right[owner]) + (into if add else 0)
            multiply_records(left, right, into, owner, add=add)
            torch.testing.assert_close(into, wanted, rtol=1e-4, atol=1e-4)


@HERE
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "shape", [(9, 10, 50), (196, 64, 16), (25, 256, 32), (64, 128, 512), (130, 400, 33), (2, 999, 3)]
)
def test_a_record_has_the_same_digits_in_any_company_and_at_any_address(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    left, right = drawn(1, rows, inner), drawn(1, inner, columns, seed=1)
    found = set()
    for count in (1, 2, 3, 7, 20):
        for place in {0, count // 2, count - 1}:
            offset = (5 * count + 3 * place) % 16
            lefts, rights = drawn(count, rows, inner, seed=2), drawn(count, inner, columns, seed=3)
            lefts = torch.cat([torch.zeros(offset), lefts.flatten()])[offset:].view_as(lefts)
            lefts[place], rights[place] = left[0], right[0]
            into = torch.empty(count, rows, columns)
            multiply_records(lefts, rights, into, add=False)
            found.add(into[place].numpy().tobytes())
    assert len(found) == 1


@HERE
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(64, 128, 512), (33, 700, 45), (130, 400, 33), (5, 512, 401), (2, 1153, 449)])
def test_a_client_s_records_are_multiplied_at_once_with_the_digits_of_each_alone(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, inner, columns = shape
    owner = torch.tensor([0] * 7 + [1] * 2 + [3] + [2] * 12)
    left, right = drawn(len(owner), rows, inner), drawn(4, columns, inner, seed=1).transpose(1, 2)
    together = torch.empty(len(owner), rows, columns)
    calls: list[int] = []
    divide = openblas._divide

    def counted(call: Callable[..., None], count: int, each: int) -> None:
        calls.append(count)
        divide(call, count, each)

    monkeypatch.setattr(openblas, "_divide", counted)
    multiply_records(left, right, together, owner, add=False)
    assert calls[0] < 10  # not one for each of the 22 records
    for record, client in enumerate(owner.tolist()):
        alone = torch.empty(1, rows, columns)
        multiply_records(left[record : record + 1].clone(), right[client : client + 1], alone, add=False)
        assert torch.equal(alone[0], together[record])


@HERE
@pytest.mark.usefixtures("threads")
def test_matrices_of_several_dimensions_in_either_precision_are_scaled() -> None:
    for kind, close in ((torch.float32, 1e-4), (torch.float64, 1e-12)):
        left = drawn(3, 19, 4, 24).to(kind).transpose(1, 2)
        right = drawn(3, 4, 30, 24, seed=1).to(kind).transpose(2, 3)
        into = torch.empty(3, 19, 4, 30, dtype=kind).transpose(1, 2)
        multiply_records(left, right, into, add=False, scale=0.3)
        torch.testing.assert_close(into, 0.3 * left @ right, rtol=close, atol=close)


@HERE
def test_results_where_openblas_cannot_write_are_refused_and_no_records_are_no_error() -> None:
    left, right = drawn(2, 9, 30), drawn(2, 30, 20)
    with pytest.raises(ValueError, match="20 columns"):
        multiply_records(left, right, torch.empty(2, 20, 9).transpose(1, 2), add=False)
    multiply_records(left[:0], right[:0], torch.empty(0, 9, 20), add=False)


@HERE
@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradients_are_those_of_torch(causal: bool) -> None:
    query, key, value = (drawn(3, 19, 2, 24, seed=seed).transpose(1, 2).requires_grad_() for seed in range(3))
    assert suits_products(query, key, value)
    by_outputs = drawn(3, 2, 19, 24, seed=4)
    ours = attention(query, key, value, 0.3, causal)
    wanted = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.3)
    torch.testing.assert_close(ours, wanted)
    assert ours.transpose(1, 2).is_contiguous()  # heads are joined without a copy
    inputs = (query, key, value)
    for mine, its in zip(*(torch.autograd.grad(each, inputs, by_outputs) for each in (ours, wanted)), strict=True):
        torch.testing.assert_close(mine, its)


def test_long_sequences_and_other_types_are_left_to_torch() -> None:
    assert not suits_products(*[drawn(1, 2, 257, 32)] * 3)
    assert not suits_products(*[drawn(1, 2, 64, 32).double()] * 3)


def test_without_the_library_products_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "_loaded", lambda: None)
    assert not suits_openblas(64, 64, 64)


def test_loading_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    openblas._loaded.__wrapped__()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "3"
    assert "OPENBLAS_CORETYPE" not in os.environ
