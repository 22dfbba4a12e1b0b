"""The job of a contract, built from the contract alone: by a silo for itself, and by the server for its rounds.

A silo does not know the others. It builds the run as if every silo were like itself; of the others only their number
matters. The server knows nobody's records, and builds the run for records of zeros.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from math import inf, prod
from pathlib import Path

import numpy as np
import torch

from polyeps.algorithms import ALGORITHMS
from polyeps.core import Algorithm, Budget
from polyeps.data.dataset import Dataset
from polyeps.data.own_files import load_client
from polyeps.data.own_tables import in_words
from polyeps.data.partition import Partition
from polyeps.deploy.contract import Contract
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.encoder_checks import state_of
from polyeps.experiment.encoders import encoded_here, frozen
from polyeps.experiment.job import Job, prepare
from polyeps.experiment.model_choice import model_for
from polyeps.experiment.population import Population
from polyeps.experiment.registry import BUILT_IN
from polyeps.experiment.seeds import seed_for
from polyeps.models import Model

_SERVER_BUDGET, _SERVER_NOISE = 100.0, 1000.0  # of the server's stand-ins: any that a round is affordable with
_MOST_LAYERS = 100  # of an mlp: narrow ones have few parameters, and each costs time and memory
_EXAMPLES = "fedavg, weiavg, pfa or pdp-fl"


def check_deployable(contract: Contract) -> None:
    """Refuse algorithms that silos cannot run yet."""
    name = contract.algorithm.name
    entry = ALGORITHMS.get(name)
    if entry is None:
        raise InputError(config.unknown_key(name, name, ALGORITHMS, "algorithm"))
    if entry.local == "sums" and contract.epsilon is None:
        raise InputError(
            f"{name} sums over silos that add noise for one another, so each must know the ε of all; state them in the "
            "contract: [epsilon] NAME = ε"
        )
    if entry.rates and contract.noise_multiplier is None:
        raise InputError(
            f"{name} has one noise multiplier for all silos, which each must know to find its own rate; state "
            "noise_multiplier in the contract"
        )
    if contract.noise_multiplier is not None and not entry.rates:
        raise InputError(f"noise_multiplier has no effect on {name}, whose silos calibrate their noise; leave it out")
    if entry.budgets[0] not in ("own", "minimum") or not entry.common:
        raise InputError(f"{name} is for comparisons in simulation; choose {_EXAMPLES}")


def check_sums(algorithm: Algorithm) -> None:
    """Refuse sums that some server would have to be trusted with, or that no mask can hide."""
    if algorithm.trust == "server":
        raise InputError('the server of this algorithm sees updates without noise; set algorithm.trust = "secure-sum"')
    if any(terms.bits is None for sums in algorithm.largest_sums.values() for terms in sums):
        raise InputError(
            'algorithm.noise = "gaussian" is for simulation: a secure sum is one of integers; set '
            'algorithm.noise = "discrete-gaussian"'
        )


def job_of_contract(
    contract: Contract,
    dataset: Dataset,
    budget: Budget,
    noise_multiplier: float | None = None,
    secret: bytes | None = None,
) -> Job:
    """Return the job of a contract in which every silo holds these records and has this budget.

    Where the contract states an ε for every silo, these are the budgets. Without a noise multiplier, noise is
    calibrated to them. A real server has a secret, for its own noise.
    """
    check_deployable(contract)
    names, rows = tuple(sorted(contract.silos)), np.arange(len(dataset.labels))
    partition = Partition(names, np.tile(rows, len(names)), np.arange(len(names) + 1) * len(rows))
    model, seed = contract_model(contract, dataset), contract.seed
    start = model.start(torch.Generator().manual_seed(seed_for(seed, "model")))
    everyone = (budget,) * len(names)
    if contract.epsilon is not None:
        everyone = tuple(Budget(contract.epsilon[name], contract.delta) for name in names)
    population = Population(dataset, partition, everyone, model, start, seed, torch.device("cpu"))
    settings, held = contract.training, int(population.sizes[0])
    batch = 1 if settings.batch == "auto" else settings.batch
    if settings.rate is None and settings.kind == "sgd" and held < batch:
        raise InputError(f"the silo has {held} {dataset.person or 'record'}s, fewer than training.batch = {batch}")
    wanted = contract.experiment
    if noise_multiplier is not None:
        budgets = wanted.budgets.model_copy(update={"noise_multiplier": noise_multiplier})
        wanted = wanted.model_copy(update={"budgets": budgets})
    job = prepare(wanted, contract.algorithm, population, secret=secret)
    check_sums(job.algorithm)
    return job


def server_job(contract: Contract, test: Path | None = None, secret: bytes | None = None) -> Job:
    """Return the job of a contract as its server runs it, with the server's own test records if it has some.

    Only for sums must it know the noise of silos; what they plan for themselves it never learns.
    """
    planned = {key: 1 for key in ("batch", "local_steps") if getattr(contract.training, key) == "auto"}
    contract = contract.model_copy(update={"training": contract.training.model_copy(update=planned)})
    dataset, budget = stand_in(contract, int(contract.training.batch), test), Budget(_SERVER_BUDGET, contract.delta)
    return job_of_contract(contract, dataset, budget, None if contract.epsilon else _SERVER_NOISE, secret)


def stand_in(contract: Contract, rows: int = 1, test: Path | None = None) -> Dataset:
    """Return records of zeros, and test records from a file, encoded as the contract says."""
    declared = contract.data.declaration
    assert declared.schema is not None
    features = np.zeros((rows, len(declared.schema.outputs)), np.float32)
    labels = np.zeros(rows, np.int64)
    held = None if test is None else load_client(test, declared, "test")
    dataset = Dataset(
        f"own:{contract.name}",
        features,
        labels,
        features[:0] if held is None else held.features,
        labels[:0] if held is None else held.labels,
        contract.data.classes,
        persons=None if declared.unit is None else np.arange(rows),
        person="" if declared.unit is None else in_words(declared.unit),
        schema=declared.schema,
        columns=declared.schema.outputs,
        own=True,
    )
    return as_agreed(contract, dataset)


def as_agreed(contract: Contract, dataset: Dataset) -> Dataset:
    """Return records as the model of a contract takes them: encoded, if it has an encoder."""
    wanted = contract.model.encoder_choice
    return dataset if wanted is None else encoded_here(dataset, wanted)


def contract_model(contract: Contract, dataset: Dataset) -> Model:
    """Return the model of a contract: a built-in one, since a contract brings no code."""
    return model_for(contract.model, dataset, seed_for(contract.seed, "model"), BUILT_IN)


def digest_of_model(contract: Contract) -> str:
    """Return a digest of the model's layers, shapes and first weights."""
    return _digest(contract, contract_model(contract, stand_in(contract)))


def _digest(contract: Contract, model: Model) -> str:
    start = model.start(torch.Generator().manual_seed(seed_for(contract.seed, "model")))
    found = sha256(f"{model.module!r}{model.input_shape}{sorted(model.slices.items())}".encode())
    found.update(start.numpy().tobytes())
    wanted = contract.model.encoder_choice
    if wanted is not None:  # its weights, too, are drawn from a constant seed
        shape = (len(contract.data.declaration.schema.outputs),) if contract.data.declaration.schema else ()
        found.update(f"{wanted!r}{state_of(frozen(wanted, shape, BUILT_IN).encoder)}".encode())
    return found.hexdigest()


def check_contract_model(contract: Contract, most: float = inf) -> None:
    """Refuse a model that is too large, or another one than the contract was signed for."""
    if len(contract.model.hidden or ()) > _MOST_LAYERS:
        raise InputError(
            f"model.hidden has {len(contract.model.hidden or ())} layers; at most {_MOST_LAYERS} are allowed"
        )
    widest = max(*(contract.model.hidden or ()), contract.model.encoder_size or 1, 1)
    if widest > most or sum(map(prod, pairwise(contract.model.hidden or ()))) > most:  # before it is built
        raise InputError(
            f"model.hidden or encoder_size makes more parameters than the policy's limits.parameters = {most}"
        )
    model = contract_model(contract, stand_in(contract))
    if model.size > most:
        raise InputError(f"the model has {model.size} parameters, more than the policy's limits.parameters = {most}")
    if _digest(contract, model) != contract.model_digest:
        raise InputError("this version of polyeps builds another model than the contract was signed for; use the same")
