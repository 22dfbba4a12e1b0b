"""Modules of every family through the engine, against one example at a time by plain autograd: right or refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from support.attention_families import attention_cases, random_cases, refused_cases
from support.model_families import Case, activation_cases, linear_cases, own_cases
from support.network_families import convolution_cases, norm_cases, recurrent_cases, token_cases
from torch import Tensor
from torch.func import functional_call

from polyeps.engine.fallback_layers import LoopedLayer
from polyeps.engine.layout import Layout, lay_out
from polyeps.engine.module_mode import ModuleMode
from polyeps.engine.network import add_gradients, record_gradients
from polyeps.engine.row_draws import RowDraws
from polyeps.errors import InputError
from polyeps.models import Model, cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore")

CASES: dict[str, Case] = {
    **linear_cases(),
    **own_cases(),
    **activation_cases(),
    **norm_cases(),
    **convolution_cases(),
    **token_cases(),
    **recurrent_cases(),
    **attention_cases(),
    **random_cases(),
    **refused_cases(),
}
SIZES = np.array([3, 0, 2])  # rows of three clients
AIM = 1 - 2**-16  # the engine clips to this share of the clip
OWNER = [0, 0, 0, 2, 2]


def test_there_are_enough_cases() -> None:
    refused = sum(bool(case.refused) for case in CASES.values())
    slow = sum(case.slow for case in CASES.values())
    assert len(CASES) - refused >= 250
    assert refused >= 25
    assert slow <= 0.05 * len(CASES)


def examples(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    if case.tokens:
        return torch.randint(0, case.tokens, (5, *case.shape), generator=generator)
    return torch.randn(5, *case.shape, generator=generator)


def one_example(model: Model, vector: Tensor, row: Tensor, label: Tensor, draws: RowDraws) -> Tensor:
    """The gradient of one example, by plain autograd through the module itself and torch's own kernels.

    Only if the module draws from torch's generator, it runs again with the engine's random numbers.
    """
    leaf = vector.clone().requires_grad_()
    before = torch.random.get_rng_state()
    outputs = functional_call(model.module, model.unflatten(leaf), (row[None].clone(),))
    if not torch.equal(torch.random.get_rng_state(), before):
        with ModuleMode(draws):
            outputs = functional_call(model.module, model.unflatten(leaf), (row[None].clone(),))
    loss = torch.nn.functional.cross_entropy(outputs, label[None], reduction="sum")
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


@pytest.mark.parametrize("name", CASES)
def test_every_family_is_right_or_refused(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.build()
    kind = torch.int64 if case.tokens else torch.float32
    rows = examples(case)
    if case.refused:
        with pytest.raises(InputError, match=case.refused):
            Model(module, cross_entropy, case.shape, kind, example=rows)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Model(module, cross_entropy, case.shape, kind, example=rows)
    looped = any(isinstance(layer, LoopedLayer) for layer in model.network.layers)
    assert looped == case.slow
    assert looped == any("one row after the other" in str(each.message) for each in caught)
    generator = torch.Generator().manual_seed(12)
    models = model.start(generator) + 0.1 * torch.randn(3, model.size, generator=generator)
    labels = torch.randint(0, 3, (5,), generator=generator)
    draws = RowDraws(torch.tensor(OWNER) + 5, torch.arange(5), torch.tensor([3]))
    expected = torch.stack(
        [one_example(model, models[i], rows[k], labels[k], draws.of_row(k)) for k, i in enumerate(OWNER)]
    )
    single = record_gradients(model.network, model.loss, models[0], rows[:2], labels[:2], draws.of_rows([0, 1]))
    close(single, expected[:2])
    norms = expected.norm(dim=1)
    clip = float(norms.median()) * 0.9
    for limit in (None, clip):
        factors = torch.ones(5) if limit is None else (limit * AIM / norms.clamp(min=1e-30)).clamp(max=1)
        each = expected * factors[:, None]
        found = sums(model, models, rows, labels, lay_out(3, [0, 1, 2, 3], SIZES, torch.device("cpu")), draws, limit)
        close(found, torch.stack([each[:3].sum(0), torch.zeros(model.size), each[3:].sum(0)]))


def sums(
    model: Model, models: Tensor, rows: Tensor, labels: Tensor, layout: Layout, draws: RowDraws, clip: float | None
) -> Tensor:
    into = torch.zeros_like(models)
    limit = None if clip is None else torch.full((3,), clip)
    layout = Layout(layout.clients, layout.groups, layout.owner, draws)
    with torch.no_grad():
        add_gradients(model.network, model.loss, models, rows, labels, layout, None, limit, into)
    return into


def close(found: Tensor, expected: Tensor) -> None:
    """Within 10⁻⁵ of each gradient's norm."""
    length = expected.norm(dim=1, keepdim=True)
    assert (found - expected).abs().le(1e-5 * length + 1e-7).all(), float(((found - expected).abs() / length).max())
