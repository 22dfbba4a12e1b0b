"""Models as vectors: sizes, named slices, starts, losses, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyeps.core import Records
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.models import MODELS, Model, cross_entropy, from_module, hinge, linear_svm, logistic, mlp
from polyeps.training import sgd

SIZES = {
    "binary_logistic": 123,
    "binary_svm": 123,
    "cifar_cnn": 2_201_674,
    "cnn": 26_010,
    "linear_svm": 7_850,
    "logistic": 7_850,
    "lstm": 160_306,
    "mcmahan_cnn": 1_663_370,
    "mlp": 39_760,
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_the_papers(name: str) -> None:
    model = MODELS[name]()
    assert model.size == SIZES[name] == model.network.size


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_slices(name: str) -> None:
    model = MODELS[name]()
    vector = model.start(torch.Generator().manual_seed(1))
    outputs = model.outputs(vector, torch.ones(3, *model.input_shape, dtype=model.input_type))
    assert outputs.shape == (3, {"lstm": 2, "binary_logistic": 1, "binary_svm": 1}.get(name, 10))
    assert torch.equal(model.flatten(model.unflatten(vector)), vector)
    stops = [part.stop for part in model.slices.values()]
    assert [part.start for part in model.slices.values()] == [0, *stops[:-1]]


def test_a_cohort_of_models_unflattens_by_row() -> None:
    model = mlp(4, (3,), 2)
    models = torch.arange(2.0 * model.size).view(2, -1)
    named = model.unflatten(models)
    assert named["2.weight"].shape == (2, 2, 3)
    assert torch.equal(model.flatten(named), models)
    assert torch.equal(named["0.bias"][1], model.unflatten(models[1])["0.bias"])


def test_starts_are_torchs_own_law_and_need_no_global_generator() -> None:
    before = torch.random.get_rng_state()
    model = MODELS["mcmahan_cnn"]()
    vector = model.start(torch.Generator().manual_seed(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(vector, model.start(torch.Generator().manual_seed(2)))
    assert not torch.equal(vector, model.start(torch.Generator().manual_seed(3)))
    dense = model.unflatten(vector)["7.weight"]
    bound = 3136**-0.5
    assert 0.99 * bound < dense.abs().max() <= bound
    assert abs(float(dense.std()) - bound / 3**0.5) < 1e-4
    assert not logistic().start(torch.Generator().manual_seed(2)).any()


def test_a_users_module_starts_with_its_own_values() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model = from_module(module, cross_entropy, torch.randn(2, 3, generator=torch.Generator().manual_seed(0)))
    vector = model.start(torch.Generator().manual_seed(1))
    assert torch.equal(vector, torch.cat([p.detach().flatten() for p in module.parameters()]))


def test_hinge_is_crammer_and_singers() -> None:
    outputs = torch.tensor([[3.0, 1.5, 0.0], [0.0, 2.0, 1.5], [0.0, 0.0, 5.0]])
    assert hinge(outputs, torch.tensor([0, 2, 2])).tolist() == [0.0, 1.5, 0.0]
    assert linear_svm(5, 3).size == 18


def test_cross_entropy_is_torchs() -> None:
    outputs, labels = (
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 2, 0]),
    )
    assert torch.equal(cross_entropy(outputs, labels), functional.cross_entropy(outputs, labels, reduction="none"))
    outputs.requires_grad_()
    (gradients,) = torch.autograd.grad(cross_entropy(outputs, labels).sum(), outputs)
    torch.testing.assert_close(cross_entropy.gradients(outputs.detach(), labels), gradients)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm, nn.LazyBatchNorm1d])
def test_batch_normalisation_is_refused_with_the_remedy(kind: type[nn.Module]) -> None:
    layer = kind() if kind is nn.LazyBatchNorm1d else kind(4)
    with pytest.raises(InputError, match=r"'1'.*GroupNorm or LayerNorm"):
        Model(nn.Sequential(nn.Linear(3, 4), layer), cross_entropy, (3,))


def test_dropout_makes_a_model_random_only_where_it_drops() -> None:
    assert Model(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), cross_entropy, (3,)).network.random
    assert not Model(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0)), cross_entropy, (3,)).network.random
    assert not Model(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)).eval(), cross_entropy, (3,)).network.random


def test_instance_norm_with_running_statistics_is_refused() -> None:
    with pytest.raises(InputError, match="track_running_stats=False"):
        Model(
            nn.Sequential(nn.Conv2d(1, 2, 1), nn.InstanceNorm2d(2, track_running_stats=True)),
            hinge,
            (1, 2, 2),
        )


class Centred(nn.Module):
    """Batch normalisation by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.dense(rows)
        return outputs - outputs.mean(0)


class Counting(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += len(rows)
        outputs: Tensor = self.dense(rows)
        return outputs


def test_mixing_rows_by_another_name_is_found_out() -> None:
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="depends on the other examples"):
        from_module(Centred(), cross_entropy, rows)
    with pytest.raises(InputError, match="buffer 'seen'"):
        from_module(Counting(), cross_entropy, rows)
    with pytest.raises(InputError, match="two rows"):
        from_module(nn.Linear(3, 2), cross_entropy, rows[:1])


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="no trainable parameters"):
        Model(nn.ReLU(), cross_entropy, (3,))


@pytest.mark.parametrize("same", ["module", "parameter"])
def test_what_occurs_twice_learns_once_and_is_left_as_it_was(same: str) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    if same == "module":
        second = first
    else:
        second.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(4, 3))
    model = Model(module, cross_entropy, (4,))
    features, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    before = [(id(p), p.detach().clone()) for p in module.parameters()]
    vector = model.start(torch.Generator())
    run = sgd(model, rate=1.0, steps=2, learning_rate=0.3).run
    update = run(vector, Records(features, labels, torch.tensor([0, 2, 6])), SeededStreams(1, range(2), 0))
    found = model.outputs(vector, features)
    for (same_one, values), parameter in zip(before, module.parameters(), strict=True):
        assert id(parameter) == same_one
        assert torch.equal(parameter, values)
    assert torch.equal(found, module(features))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.3)
    for _ in range(2):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(features[2:]), labels[2:]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    torch.testing.assert_close(vector + update[1], model.start(torch.Generator()), rtol=1e-5, atol=1e-6)
