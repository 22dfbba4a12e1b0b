"""Deployed DP-SGD: what a client releases is integers on a public grid, and nothing can be read beside the noise."""

import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyeps.core import Records
from polyeps.engine.deployed_training import RecordGradients
from polyeps.engine.losses import cross_entropy
from polyeps.engine.network import record_gradients
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.errors import InputError
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.models import Model, cnn, from_module, logistic, lstm, mlp
from polyeps.training import dp_sgd, sgd

LOGISTIC = logistic(features=20, classes=4)


def records(model: Model, count: int, seed: int = 0) -> Records:
    drawn = torch.Generator().manual_seed(seed)
    features = torch.rand(count, *model.input_shape, generator=drawn)
    return Records(features, torch.randint(0, 4, (count,), generator=drawn), torch.tensor([0, count]))


def exactly(seed: int) -> SeededStreams:
    return SeededStreams(seed, ["a"], 0, exact=True)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("model", [LOGISTIC, mlp(features=20, hidden=(8,), classes=4)])
def test_it_trains_like_a_simulated_client_but_for_the_noise(model: Model, momentum: float) -> None:
    data = records(model, 60)
    training = dp_sgd(
        model, rate=0.2, batch=12, steps=9, clip=0.8, learning_rate=0.5, momentum=momentum, decay=0.01, memory=None
    )
    start = torch.randn(model.size, generator=torch.Generator().manual_seed(1)) / 3
    simulated = training.run(start, data, SeededStreams(5, ["a"], 0), 0.0)
    deployed = training.run(start, data, exactly(5), 1e-4)  # the same batches, next to no noise
    torch.testing.assert_close(deployed, simulated, atol=2e-3 * float(simulated.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("streams", [SystemStreams(1), exactly(3)])
def test_the_noise_is_what_is_priced(streams: SystemStreams | SeededStreams) -> None:
    model = logistic(features=784, classes=10)
    empty = Records(torch.zeros(4, 784), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 4]))
    scale, clip, steps = 1.7, 0.3, 6
    training = dp_sgd(model, rate=1e-9, batch=1, steps=steps, clip=clip, learning_rate=1.0)
    drawn = training.run(torch.zeros(model.size), empty, streams, scale)[0].double()
    deviation = float(drawn.std()) / steps**0.5
    assert deviation == pytest.approx(scale * clip, rel=5 / (2 * model.size) ** 0.5)
    assert deviation > 0.95 * scale * clip
    half = model.size // 2
    assert abs(float(torch.corrcoef(torch.stack([drawn[:half], drawn[half:]]))[0, 1])) < 5 / half**0.5


def test_two_tasks_never_share_noise() -> None:
    data, training = records(LOGISTIC, 5), dp_sgd(LOGISTIC, rate=1.0, batch=5, steps=1, clip=1.0, learning_rate=1.0)
    one, other = (training.run(torch.zeros(LOGISTIC.size), data, SystemStreams(1), 1.0) for _ in range(2))
    assert float((one - other).abs().min()) > 0


def low_digits(reply: Tensor, step: float) -> Tensor:
    """What is left of a reply beyond the multiples of a step, in (-1/2, 1/2] steps."""
    steps = reply.double() / step
    return steps - steps.round()


@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize("bias", [8.0, 11.0, 14.0])
def test_a_server_cannot_read_a_gradient_from_the_low_digits(local_steps: int, bias: float) -> None:
    """A model under which gradients are tiny: the noise was a multiple of 2^-16 deviations, so the rest was bare."""
    model = logistic(features=64, classes=4)
    data = Records(torch.rand(30, 64), torch.zeros(30, dtype=torch.int64), torch.tensor([0, 30]))
    start = torch.zeros(model.size)
    start[-4] = bias  # every record is of class 0 and the model is sure of it
    scale, divisor = 5.0, 30.0
    training = dp_sgd(model, rate=1.0, batch=divisor, steps=local_steps, clip=1.0, learning_rate=1.0)
    truth = record_gradients(model.network, model.loss, start, data.features, data.labels).sum(0).double()
    reply = -training.run(start, data, SystemStreams(1), scale)[0].double() * divisor / local_steps
    weights = slice(0, 4 * 64)  # biases are rounded to the start's digits
    for grid in (2.0**-16 * scale, 2.0**-16, GridSum(1.0, model.size, scale).step):
        left = low_digits(reply, grid / local_steps)[weights] * grid
        bare = low_digits(truth, grid / local_steps)[weights] * grid
        assert abs(float(torch.corrcoef(torch.stack([left, bare]))[0, 1])) < 0.3
        assert abs(float(torch.corrcoef(torch.stack([left, truth[weights]]))[0, 1])) < 0.3


def test_what_is_off_the_old_grid_does_not_tell_whether_a_record_is_there() -> None:
    """Replies with and without the target: the share of numbers off any coarse grid is the same, nought."""
    model, scale = LOGISTIC, 3.0
    grid = GridSum(1.0, model.size, scale)
    training = dp_sgd(model, rate=1.0, batch=1, steps=1, clip=1.0, learning_rate=1.0)
    present = Records(torch.full((1, 20), 1e-7), torch.tensor([1]), torch.tensor([0, 1]))
    absent = Records(torch.zeros(1, 20), torch.tensor([1]), torch.tensor([0, 1]))
    for data in (present, absent):
        for _ in range(20):
            reply = training.run(torch.zeros(model.size), data, SystemStreams(1), scale)[0]
            assert float(low_digits(reply, grid.step).abs().max()) < 1e-2  # but for float32's own digits


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e6, 1e18])
def test_a_record_moves_an_exact_sum_by_no_more_than_its_clip_whatever_the_weights(spread: float) -> None:
    data = records(LOGISTIC, 40)
    start = torch.randn(LOGISTIC.size, generator=torch.Generator().manual_seed(9)) * spread
    grid = GridSum(0.01, LOGISTIC.size, 1.0)
    whole = RecordGradients(LOGISTIC, start).total(data, list(range(40)), grid)
    for left_out in range(0, 40, 3):
        rest = [i for i in range(40) if i != left_out]
        moved = whole - RecordGradients(LOGISTIC, start).total(data, rest, grid)
        assert float(moved.norm()) <= grid.longest
        assert float(moved.norm()) * grid.step <= 0.01 * 1.002


def test_batches_of_a_fixed_size_are_refused() -> None:
    training = dp_sgd(LOGISTIC, sampler="fixed", batch=4, steps=1, clip=1.0, learning_rate=1.0)
    with pytest.raises(InputError, match="Poisson batches"):
        training.run(torch.zeros(LOGISTIC.size), records(LOGISTIC, 9), SystemStreams(1), 1.0)


def test_a_deployed_client_takes_at_most_three_times_as_long_as_a_simulated_one() -> None:
    model = logistic(features=784, classes=10)
    data = Records(torch.rand(400, 784), torch.randint(0, 10, (400,)), torch.tensor([0, 400]))
    training = dp_sgd(model, rate=8 / 400, batch=8, steps=40, clip=1.0, learning_rate=0.1)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(6):
        for exact in (False, True):
            streams = SystemStreams(1) if exact else SeededStreams(number, ["a"], 0)
            began = time.process_time()
            training.run(torch.zeros(model.size), data, streams, 1.5)
            seconds[exact].append(time.process_time() - began)
    assert np.median(seconds[True]) < 3 * np.median(seconds[False])


OWN = {
    "GELU": nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 2)),
    "Sigmoid": nn.Sequential(nn.Linear(7, 5), nn.Sigmoid(), nn.Linear(5, 2)),
    "LayerNorm": nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)),
}
MODELS = {
    "logistic": LOGISTIC,
    "mlp": mlp(),
    "cnn": cnn(),
    **{name: from_module(module, cross_entropy, torch.rand(5, 7)) for name, module in OWN.items()},
}


def one_ulp_decides(model: Model) -> Tensor:
    """Weights under which inputs do not matter and large terms cancel, so that a last bit decides the class."""
    drawn = torch.Generator().manual_seed(4)
    weights = torch.zeros(model.size)
    for number, part in enumerate(model.slices.values()):
        size = part.stop - part.start
        spread = 1e8 if number == 2 else 1.0
        weights[part.start : part.stop] = torch.randn(size, generator=drawn) * spread * (number > 0)
    return weights


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hostile", [False, True])
def test_a_batch_is_the_sum_of_its_records_each_alone_to_the_last_bit(name: str, hostile: bool) -> None:
    """In a batch of 65 one record once moved the sum of a perceptron by 33 clips, by the others' rounding."""
    model = MODELS[name]
    drawn = torch.Generator().manual_seed(6)
    count = 20 if name == "cnn" else 65
    x = torch.rand(1, *model.input_shape, generator=drawn)
    signs = torch.tensor([1.0, -1.0] * count)[:count].reshape(-1, *(1,) * (x.dim() - 1))
    data = Records(signs * x, torch.tensor([0, 1] * count)[:count], torch.tensor([0, count]))
    weights = one_ulp_decides(model) if hostile else torch.randn(model.size, generator=drawn)
    grid = GridSum(1.0, model.size, 1.0)
    alone = RecordGradients(model, weights)
    singles = torch.stack([alone.total(data, [record], grid) for record in range(count)])
    assert float(singles.norm(dim=1).max()) <= grid.longest
    for some in (list(range(count)), list(range(1, count)), list(range(0, count, 3)), [5, 4]):
        assert torch.equal(alone.total(data, some, grid), singles[some].sum(0))


def test_a_record_for_which_the_module_fails_counts_as_empty(caplog: pytest.LogCaptureFixture) -> None:
    """An exception for some data would tell that they are there."""
    model = from_module(nn.Sequential(nn.Linear(7, 2)), cross_entropy, torch.rand(5, 7))
    drawn = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 2, (60,), generator=drawn)
    labels[30] = 9  # no class
    bad = Records(torch.randn(60, 7, generator=drawn), labels, torch.tensor([0, 60]))
    grid = GridSum(1.0, model.size, 1.0)
    others = [record for record in range(60) if record != 30]
    for size in (0.0, 1.0, 1e4):
        alone = RecordGradients(model, size * torch.randn(model.size, generator=drawn))
        assert torch.equal(alone.total(bad, list(range(60)), grid), alone.total(bad, others, grid))
    assert "counts as empty" in caplog.text


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.float32])
def test_tokens_of_any_type_are_learnt_from(kind: torch.dtype) -> None:
    model = lstm(vocabulary=30, classes=2, length=12)
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 30, (40, *model.input_shape), generator=drawn).to(kind)
    data = Records(tokens, torch.randint(0, 2, (40,), generator=drawn), torch.tensor([0, 40]))
    training = dp_sgd(model, rate=0.3, batch=12, steps=4, clip=1.0, learning_rate=1.0)
    start = model.start(torch.Generator().manual_seed(0))
    simulated = training.run(start, data, SeededStreams(1, ["a"], 0), 0.0)
    deployed = training.run(start, data, exactly(1), 1e-4)
    assert float((simulated - deployed).norm()) < 0.02 * float(simulated.norm())


def test_a_module_that_always_fails_is_refused_instead_of_trained_on_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_module(nn.Sequential(nn.Linear(7, 3), nn.ReLU(), nn.Linear(3, 2)), cross_entropy, torch.rand(5, 7))
    monkeypatch.setattr(nn.ReLU, "forward", lambda *_: 1 / 0)
    data = Records(torch.rand(3, 7), torch.tensor([0, 1, 1]), torch.tensor([0, 3]))
    with pytest.raises(InputError, match="no gradient even for a made-up record"):
        RecordGradients(model, torch.zeros(model.size)).check(data)


def test_training_without_noise_of_its_own_fails_silently_when_deployed(caplog: pytest.LogCaptureFixture) -> None:
    """Its update gets noise later, on a sum or a report; whether it failed must not be seen before."""
    bad = Records(torch.rand(3, 20), torch.tensor([0, 9, 1]), torch.tensor([0, 3]))  # a label that is no class
    training = sgd(LOGISTIC, rate=1.0, steps=1, learning_rate=1.0)
    assert not training.run(torch.zeros(LOGISTIC.size), bad, SystemStreams(1)).any()
    assert "the update is zero" in caplog.text
    with pytest.raises((InputError, RuntimeError, IndexError)):  # a simulation says so
        training.run(torch.zeros(LOGISTIC.size), bad, SeededStreams(1, ["a"], 0))
