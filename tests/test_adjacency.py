"""Whom a guarantee compares: numbers of records are public under zero-out, and hidden under add-remove."""

import dp_accounting as dp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

from polyeps.accounting import epsilon
from polyeps.accounting.events import FixedSize, Gaussian, Poisson
from polyeps.algorithms.fedavg import fedavg
from polyeps.client import profiles
from polyeps.core import Adjacency, Records, Streams
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.errors import InputError, UnknownEvent
from polyeps.experiment.config import Experiment
from polyeps.experiment.job import prepare
from polyeps.experiment.population import populate
from polyeps.models import logistic
from polyeps.training import dp_sgd

Floats = NDArray[np.float64]
SMALL = logistic(features=4, classes=2)


STEP = 0.01
OUTCOMES = np.arange(-40.0, 12.0, STEP)


def law(others: int, rate: float, sigma: float, target: bool) -> Floats:
    """One step on the worst records found: each of the others at -1, one, if it is there, at +1; by exact mixture."""
    drawn = np.arange(others + 1)
    chances = binom.pmf(drawn, others, rate)[:, None]
    without = (chances * norm.pdf(OUTCOMES, -drawn[:, None], sigma)).sum(0)
    if not target:
        return np.asarray(without)
    return np.asarray((1 - rate) * without + rate * (chances * norm.pdf(OUTCOMES, 1 - drawn[:, None], sigma)).sum(0))


def shown_epsilon(one: Floats, other: Floats, steps: int, delta: float) -> float:
    """The ε that `steps` steps show at δ: the privacy loss of a step, composed by a Fourier transform."""
    width = 1e-3
    place = np.round(np.log(one / other) / width).astype(int)
    mass = np.bincount(place - place.min(), weights=one * STEP)
    length = (len(mass) - 1) * steps + 1
    composed = np.fft.irfft(np.fft.rfft(mass, 2 * length) ** steps, 2 * length)[:length]
    loss = (place.min() * steps + np.arange(length)) * width
    found = brentq(lambda at: (composed * np.maximum(0, 1 - np.exp(at - loss))).sum() - delta, 0, 20)
    return float(found)


@pytest.mark.parametrize(("records", "batch", "sigma", "steps"), [(60, 6, 3, 12), (60, 6, 3, 100), (200, 8, 2, 1000)])
def test_the_price_holds_for_an_emptied_record_but_not_where_the_rate_tells_the_number(
    records: int, batch: int, sigma: float, steps: int
) -> None:
    rate, delta, others = batch / records, 1e-5, records - 1
    certified = epsilon(dp.SelfComposedDpEvent(Poisson(rate, Gaussian(sigma)), steps), delta, adjacency="zero-out")
    present = law(others, rate, sigma, True)
    emptied = law(others, rate, sigma, False)  # also: absent, where the rate is public
    absent = law(others, batch / others, sigma, False)
    assert shown_epsilon(present, emptied, steps, delta) <= certified
    assert shown_epsilon(emptied, present, steps, delta) <= certified
    assert shown_epsilon(present, absent, steps, delta) > 1.05 * certified
    # So a rate that depends on the number of records is never called add-remove.
    assert dp_sgd(SMALL, rate=rate, steps=steps, clip=1, learning_rate=1).adjacency == "zero-out"


def test_a_public_rate_hides_the_number_of_records() -> None:
    hidden = dp_sgd(SMALL, rate=0.1, batch=8, steps=1, clip=1, learning_rate=1, hide_records=True)
    assert hidden.adjacency == "add-remove"
    with pytest.raises(InputError, match="a batch to divide by"):
        dp_sgd(SMALL, rate=0.1, steps=1, clip=1, learning_rate=1, hide_records=True)
    with pytest.raises(InputError, match="hides"):
        fedavg(hidden, weights="examples")


@pytest.mark.parametrize("adjacency", ["zero-out", "add-remove"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_fixed_size_batches_are_refused_where_a_record_may_be_empty(adjacency: Adjacency, accountant: str) -> None:
    with pytest.raises(UnknownEvent):
        epsilon(FixedSize(100, 10, Gaussian(2.0)), 1e-5, adjacency=adjacency, accountant=accountant)  # type: ignore[arg-type]


def experiment(**training: object) -> Experiment:
    return Experiment(
        rounds=2,
        data={"name": "digits", "clients": 4, "partition": "dirichlet"},
        budgets={"epsilon": 2.0},
        training={"batch": 8, "local_steps": 2, **training},
        algorithm=[{"name": "fedavg", **({} if "rate" in training else {"weights": "examples"})}],
    )


def test_an_experiment_says_whom_it_compares_and_discloses_no_more() -> None:
    """Numbers of records are disclosed where they are public, and only there; σ is then the same for all."""
    public, hidden = experiment(), experiment(rate=0.05)
    jobs = [prepare(one, one.algorithm[0], populate(one, 1)) for one in (public, hidden)]
    assert [job.algorithm.adjacency for job in jobs] == ["zero-out", "add-remove"]
    assert [next(iter(job.terms.values())).adjacency for job in jobs] == ["zero-out", "add-remove"]
    shown = [profiles(job.clients(None), job.algorithm, ("examples",)) for job in jobs]
    assert all(profile.examples for profile in shown[0])
    assert not any(profile.examples for profile in shown[1])  # whoever asks for it
    assert len(set(jobs[0].noise_multiplier.tolist())) > 1
    assert len(set(jobs[1].noise_multiplier.tolist())) == 1


@pytest.mark.parametrize("streams", [SeededStreams(1, ["a"], 0), SystemStreams(1)])
def test_a_client_that_hides_its_number_answers_without_any_record(streams: Streams) -> None:
    hidden = dp_sgd(SMALL, rate=0.1, batch=8, steps=3, clip=1, learning_rate=1, hide_records=True)
    nothing = Records(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))
    update = hidden.run(torch.zeros(SMALL.size), nothing, streams, 1.0)
    assert 0.02 < float(update.std()) < 2.0  # noise alone
    public = dp_sgd(SMALL, rate=0.1, batch=8, steps=3, clip=1, learning_rate=1)
    with pytest.raises(InputError, match="has no records"):
        public.run(torch.zeros(SMALL.size), nothing, streams, 1.0)
