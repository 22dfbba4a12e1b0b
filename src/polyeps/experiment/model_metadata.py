"""The model file that a job leaves in its run's folder: the trained tensors, and their description."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from polyeps import __version__
from polyeps.accounting import best_accountant
from polyeps.accounting.certificate import Certificate
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.job import Job
from polyeps.experiment.journal import spent_key
from polyeps.experiment.journal_entries import facts
from polyeps.experiment.model_choice import architecture
from polyeps.experiment.registry import Code
from polyeps.ledger import Ledger
from polyeps.model_files import (
    LARGEST_DESCRIPTION,
    MOST_CLIENTS,
    ClientGuarantee,
    ModelMetadata,
    description,
    model_bytes,
)
from polyeps.models import Model

# A condition of every certificate in a simulated run's model: its noise is as secret as a small number.
SIMULATED = (
    "The model comes from a simulation, whose noise was drawn from a seed: against those who know or guess the seed, "
    "nothing is guaranteed; the figures are those of a deployed run."
)
_HIDDEN = "clients do not disclose their budgets (budgets.disclosed = false); a client's certificate is in its ledger"
_MANY = f"there are more than {MOST_CLIENTS} clients; their certificates are in the run's ledgers"


def check_description(job: Job, experiment: config.Experiment, code: Code | None) -> None:
    """Refuse a model that could not be written when its training is over."""
    try:
        found = _metadata(job, experiment, 0, None, (dict.fromkeys(job.terms, 0.0), {}), code)
    except ValidationError as problem:
        error = problem.errors()[-1]  # of a value of several types, the last one tried
        place = ".".join(str(part) for part in error["loc"])
        raise InputError(f"{job.name}: its model cannot be described ({place}: {error['msg']}); change it") from None
    if (size := len(description(found).encode())) > LARGEST_DESCRIPTION:
        raise InputError(
            f"{job.name}: the description of its model has {size} bytes, more than {LARGEST_DESCRIPTION}; declare"
            " fewer categories, or shorten the names of columns and clients"
        )


def write_model(
    path: Path,
    job: Job,
    experiment: config.Experiment,
    vector: Tensor,
    rounds: int,
    ledger: Ledger | None,
    ended: tuple[Mapping[str, float], Mapping[str, Any]],
    code: Code | None = None,
) -> None:
    """Write the model of a job after some rounds; `ended` is the job's outcome: what was spent, and further facts."""
    content = model_bytes(
        _metadata(job, experiment, rounds, ledger, ended, code), named_tensors(job.population.model, vector)
    )
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_bytes(content)
    partial.replace(path)


def named_tensors(model: Model, vector: Tensor) -> dict[str, Tensor]:
    """Return a model's state under the names of its module's `state_dict`: trained, frozen and buffers."""
    trained: dict[Any, Tensor] = {}
    values = model.unflatten(vector)
    for name, parameter in model.module.named_parameters():
        if name in values:
            trained[id(parameter)] = values[name]
    # A shared parameter has several names.
    state = model.module.state_dict(keep_vars=True)
    return {name: trained.get(id(tensor), tensor) for name, tensor in state.items()}


def _metadata(
    job: Job,
    experiment: config.Experiment,
    rounds: int,
    ledger: Ledger | None,
    ended: tuple[Mapping[str, float], Mapping[str, Any]],
    code: Code | None,
) -> ModelMetadata:
    population = job.population
    dataset, model, own = population.dataset, population.model, population.dataset.own
    known, before = facts(job, experiment), dataset.encoded_from
    clients = _clients(job, *ended) if experiment.budgets.disclosed and len(population.ids) <= MOST_CLIENTS else None
    modules = {
        name.partition(":")[0] for name in (experiment.model.name, experiment.model.encoder or "") if ":" in name
    }
    return ModelMetadata(
        polyeps=__version__,
        torch=str(torch.__version__),
        experiment=experiment.name,
        data=dataset.name,
        method=job.method.title,
        algorithm=job.method.name,
        budgets=job.whose_budgets,
        seed=population.seed,
        rounds=rounds,
        model=architecture(experiment.model, dataset),
        parameters=tuple(model.slices),
        input_shape=model.input_shape,
        input_type=cast(Any, str(model.input_type).removeprefix("torch.")),  # checked there
        classes=dataset.classes,
        target=None if dataset.target == "class" else dataset.target,
        scale=dataset.scale,
        inputs=None if dataset.inputs is None else dataset.inputs.parts,
        output=experiment.model.output,
        label=experiment.data.label if own else None,
        columns=None if dataset.schema is None else dataset.schema.columns,
        features=dataset.columns if before is None else before.columns,
        words=dataset.words if before is None else before.words,
        encoder=experiment.model.encoder,
        encoder_size=experiment.model.encoder_size,
        encoder_bandwidth=experiment.model.encoder_bandwidth,
        record_shape=None if before is None else before.shape,
        record_type=cast(Any, None if before is None else before.kind),  # checked there
        code={name: code.digests[name] for name in sorted(modules) if name in code.digests} if code else {},
        guarantee={
            **{field.name: known[field.name] for field in fields(Certificate) if field.name in known},
            "method": job.method.title,
            "person": job.algorithm.person,
            "accountant": _accountant(ledger),
            "conditions": (*job.algorithm.conditions, *((SIMULATED,) if job.budgets is not None else ())),
        },
        clients=clients,
        withheld="" if clients is not None else _MANY if experiment.budgets.disclosed else _HIDDEN,
    )


def _clients(job: Job, spent: Mapping[str, float], ended: Mapping[str, Any]) -> dict[str, ClientGuarantee]:
    secret = ended.get("spent_if_draws_known") or {}
    found = dict.fromkeys(job.population.ids, ClientGuarantee())
    for client, terms in job.terms.items():
        epsilon, delta = terms.budget.epsilon, terms.budget.delta
        found[client] = ClientGuarantee(
            epsilon=epsilon,
            delta=delta,
            spent=spent[client] if math.isfinite(spent[client]) else None,
            spent_if_draws_known=secret.get(spent_key(spent[client], delta)),
        )
    return found


def _accountant(ledger: Ledger | None) -> str:
    """Return the accountant behind what was spent: "rdp" if any client's history needs it."""
    shared = set() if ledger is None else {ledger.account(one).standing for one in ledger.clients}
    return "rdp" if any(best_accountant(one.history) == "rdp" for one in shared) else "pld"
