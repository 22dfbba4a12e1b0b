"""Modules of every family through the engine, against one example at a time by plain autograd: right or refused."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_families import attention_cases, random_cases, refused_cases
from support.model_families import Case, activation_cases, linear_cases, own_cases
from support.network_families import convolution_cases, norm_cases, recurrent_cases, token_cases
from support.refusals import ABSENT, TYPES, counted, family_table
from support.stranger_families import stranger_cases
from support.target_families import TargetCase, refused_targets, right_cases
from torch import Tensor, nn

from polyeps.core import Records
from polyeps.data.named_inputs import by_name, inputs_of
from polyeps.engine.contributions import ContributionParts, PositionProducts, RowGradients
from polyeps.engine.deployed_training import RecordGradients
from polyeps.engine.fallback_layers import LoopedLayer
from polyeps.engine.layout import Layout, lay_out
from polyeps.engine.lookups import LookupGradients
from polyeps.engine.module_mode import ModuleMode
from polyeps.engine.network import add_gradients, record_gradients
from polyeps.engine.row_draws import RowDraws
from polyeps.engine.units import examples_of
from polyeps.errors import InputError
from polyeps.models import Model, cross_entropy, from_module, of_units

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
    **stranger_cases(),
    **refused_cases(),
}
TARGETS: dict[str, TargetCase] = {**right_cases(), **{f"refused {n}": c for n, c in refused_targets().items()}}
STRANGE = stranger_cases()
SIZES = np.array([3, 0, 2])  # rows of three clients
AIM = 1 - 2**-18  # the engine clips to this share of the clip
OWNER = [0, 0, 0, 2, 2]


def test_nineteen_of_twenty_are_right_wherever_a_record_has_a_gradient() -> None:
    """The tests below show of every case that it is right, or that it is refused in its sentence."""
    modules, targets = CASES.values(), TARGETS.values()
    sentences = [case.refused for case in modules] + [case.refused for case in targets]
    found = counted(sentences, [case.slow for case in modules] + [case.given.slow for case in targets])
    right = found["fast"] + found["slow"]
    assert right + found[ABSENT] + found[TYPES] >= 250
    assert right >= 0.95 * (right + found[TYPES])
    assert right >= 0.85 * len(sentences)  # misuse and mixtures have many sentences, each of which is tested
    assert found["slow"] <= 0.1 * len(sentences)


def test_the_guide_shows_these_cases() -> None:
    """To write the table anew: print(family_table(...)) here, between the two comments of the page."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "own-models.md").read_text()
    shown = page.partition("<!-- families -->\n")[2].partition("\n<!-- end -->")[0]
    modules = {name: (case.refused, case.slow) for name, case in CASES.items()}
    assert shown == family_table(modules, {name: (case.refused, case.given.slow) for name, case in TARGETS.items()})


def examples(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    if case.tokens:
        return torch.randint(0, case.tokens, (5, *case.shape), generator=generator)
    return torch.randn(5, *case.shape, generator=generator)


def one_example(model: Model, vector: Tensor, row: Tensor, label: Tensor, draws: RowDraws) -> Tensor:
    """The gradient of one example, by plain `backward` through the module itself and torch's own kernels.

    Only if the module draws from torch's generator, it runs again with the engine's random numbers.
    """
    named = {name: part for name, part in model.module.named_parameters() if part.requires_grad}
    before = {name: part.data for name, part in named.items()}
    for name, values in model.unflatten(vector).items():
        named[name].data, named[name].grad = values.clone(), None
    try:
        state = torch.random.get_rng_state()
        outputs = model.module(row[None].clone())
        if not torch.equal(torch.random.get_rng_state(), state):
            torch.random.set_rng_state(state)
            with ModuleMode(draws):
                outputs = model.module(row[None].clone())
            assert torch.equal(torch.random.get_rng_state(), state)
        torch.nn.functional.cross_entropy(outputs.float(), label[None], reduction="sum").backward()  # type: ignore[no-untyped-call]
        found = [torch.zeros_like(part) if part.grad is None else part.grad.to_dense() for part in named.values()]
        return torch.cat([part.reshape(-1) for part in found]).clone()
    finally:
        for name, part in named.items():
            part.data, part.grad = before[name], None


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
    assert model.floats_per_row > 0  # reckoned on one record of one client
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
    if case.slow or name in STRANGE:
        _deployed_and_unchanged(model, models, rows, expected, labels)


def _deployed_and_unchanged(model: Model, models: Tensor, rows: Tensor, expected: Tensor, labels: Tensor) -> None:
    """One record at a time, as deployed; nothing writes into the records or the weights."""
    models_before, rows_before = models.clone(), rows.clone()
    model.outputs(models[0], rows)
    alone = RecordGradients(model, models[0])
    data = Records(rows[:3], labels[:3], torch.tensor([0, 3]))
    alone.check(data)
    found = torch.stack([alone._of(data, k) for k in range(3)])
    if not model.network.random:
        close(found, expected[:3])
    assert torch.equal(models, models_before)
    assert torch.equal(rows, rows_before)
    assert torch.equal(alone.weights, models[0])


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
    assert found.shape == expected.shape
    length = expected.norm(dim=1, keepdim=True)
    assert (found - expected).abs().le(1e-5 * length + 1e-7).all(), float(((found - expected).abs() / length).max())


# --- inputs, outputs, targets and losses ----------------------------------------------------------------------------


def called(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def at(inputs: Any, place: int) -> Any:
    if isinstance(inputs, dict):
        return {name: values[place : place + 1] for name, values in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(values[place : place + 1] for values in inputs)
    return inputs[place : place + 1]


def by_hand(case: TargetCase, module: nn.Module, model: Model, vector: Tensor, inputs: Any, target: Tensor) -> Tensor:
    """One record's gradient, by plain autograd through the module as its user calls it and a loss of plain torch."""
    given = copy.deepcopy(module)
    for (name, parameter), part in zip(given.named_parameters(), model.slices.values(), strict=True):
        assert next(key for key, one in model.slices.items() if one is part).removeprefix("module.") == name
        parameter.data = vector[part.start : part.stop].view(part.shape).clone()
    loss = case.task.plain(case.given.pick(called(given, inputs)), target)
    found = torch.autograd.grad(loss, list(given.parameters()), allow_unused=True)
    zeros = [torch.zeros_like(parameter) for parameter in given.parameters()]
    return torch.cat([(zero if by is None else by).reshape(-1) for zero, by in zip(zeros, found, strict=True)])


def block(inputs: Any) -> Tensor:
    return inputs if isinstance(inputs, Tensor) else torch.from_numpy(inputs_of(inputs).pack(by_name(inputs)))


@pytest.mark.parametrize("name", TARGETS)
def test_every_kind_of_inputs_outputs_and_targets_is_right_or_refused(name: str) -> None:
    case = TARGETS[name]
    torch.manual_seed(0)
    module, generator = case.given.build(), torch.Generator().manual_seed(5)
    inputs = case.given.inputs(generator)

    def built() -> tuple[Model, Tensor]:
        stated = None
        with torch.no_grad():
            outputs = torch.zeros(5, 1) if case.refused else case.given.pick(called(module.eval(), inputs))
            if name.startswith("refused") and case.task.stated:
                outputs = called(module, inputs)
            targets = case.task.targets(outputs, generator)
        module.train()
        stated = targets if case.task.stated else None
        made = from_module(module, case.task.loss, inputs, targets=stated, output=case.given.output)
        return made, targets

    if case.refused:
        with pytest.raises(InputError, match=case.refused):
            built()
        return
    model, targets = built()
    assert any(isinstance(layer, LoopedLayer) for layer in model.network.layers) == case.given.slow
    rows = block(inputs)
    models = model.start(generator) + 0.1 * torch.randn(3, model.size, generator=generator)
    expected = torch.stack(
        [by_hand(case, module, model, models[i], at(inputs, k), targets[k : k + 1]) for k, i in enumerate(OWNER)]
    )
    assert float(expected[0].norm()) > 0
    close(record_gradients(model.network, model.loss, models[0], rows[:3], targets[:3]), expected[:3])
    norms = expected.norm(dim=1)
    clip = float(norms[norms > 0].median()) * 0.9
    layout = lay_out(3, [0, 1, 2, 3], SIZES, torch.device("cpu"))
    draws = RowDraws.fixed(5, torch.device("cpu"))
    for limit in (None, clip):
        factors = torch.ones(5) if limit is None else (limit * AIM / norms.clamp(min=1e-30)).clamp(max=1)
        each = expected * factors[:, None]
        found = sums(model, models, rows, targets, layout, draws, limit)
        close(found, torch.stack([each[:3].sum(0), torch.zeros(model.size), each[3:].sum(0)]))
    # Without one record, its own client's sum moves by no more than the clip, and no other client's at all.
    fewer = sums(
        model,
        models,
        rows[1:],
        targets[1:],
        lay_out(3, [0, 1, 2, 3], np.array([2, 0, 2]), layout.owner.device),
        draws.of_rows([1, 2, 3, 4]),
        clip,
    )
    assert float((found - fewer)[0].norm()) <= clip
    assert float((found - fewer)[1:].abs().max()) <= 1e-6 * clip
    # Deployed, one record at a time.
    data = Records(rows[:3], targets[:3], torch.tensor([0, 3]))
    alone = RecordGradients(model, models[0])
    alone.check(data)
    close(torch.stack([alone._of(data, k) for k in range(3)]), expected[:3])
    # Persons: the mean over the records of each, of unequal numbers, in one batch and deployed.
    units = torch.tensor([[0, 2], [2, 2], [2, 3]])
    persons, whole = of_units(model, "patient"), Records(rows[:3], targets[:3], torch.tensor([0, 3]), units)
    means = torch.stack([expected[:2].mean(0), torch.zeros(model.size), expected[2]])
    together, labels = examples_of(whole, torch.arange(3), None)
    close(record_gradients(persons.network, persons.loss, models[0], together, labels), means)
    single = RecordGradients(persons, models[0])
    single.check(whole)
    close(torch.stack([single._of(whole, k) for k in range(3)]), means)


def test_rules_reach_inside_a_module_of_named_inputs() -> None:
    """Nobody forms a gradient of the size of the vocabulary."""
    case = TARGETS["attention with padding, cross-entropy of positions"]
    generator = torch.Generator().manual_seed(5)
    inputs = case.given.inputs(generator)
    model = from_module(case.given.build(), "cross-entropy", inputs)
    (layer,) = model.network.layers
    layout = lay_out(1, [0, 1], np.array([5]), torch.device("cpu"))
    outputs, saved = layer.forward(model.start(generator)[None], block(inputs), layout)
    _, found = layer.backward(model.start(generator)[None], saved, torch.ones_like(outputs), layout, False)
    assert isinstance(found, ContributionParts)
    large = [type(part) for size, part in found.parts if size >= 32]
    assert {LookupGradients, PositionProducts} <= set(large)
    assert RowGradients not in large


@pytest.mark.parametrize("name", list(right_cases())[::9])
def test_under_hostile_weights_a_record_moves_its_own_client_by_a_clip_at_most_and_nobody_else(name: str) -> None:
    case = TARGETS[name]
    torch.manual_seed(0)
    module, generator = case.given.build(), torch.Generator().manual_seed(9)
    inputs = case.given.inputs(generator)
    with torch.no_grad():
        targets = case.task.targets(case.given.pick(called(module, inputs)), generator)
    stated = targets if case.task.stated else None
    model = from_module(module, case.task.loss, inputs, targets=stated, output=case.given.output)
    rows, draws = block(inputs), RowDraws.fixed(5, torch.device("cpu"))
    for spread in (1e-6, 1e3, 1e8, 1e18, 1e30):
        models = spread * torch.randn(3, model.size, generator=generator)
        for clip in (1e-3, 1.0):
            layouts = [lay_out(3, [0, 1, 2, 3], np.array(sizes), rows.device) for sizes in ([3, 0, 2], [2, 0, 2])]
            whole = sums(model, models, rows, targets, layouts[0], draws, clip)
            fewer = sums(model, models, rows[1:], targets[1:], layouts[1], draws.of_rows([1, 2, 3, 4]), clip)
            moved = (whole - fewer).double().norm(dim=1)
            assert float(moved[0]) <= clip
            assert float(moved[1:].max()) <= 1e-5 * clip
