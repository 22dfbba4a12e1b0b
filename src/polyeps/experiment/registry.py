"""The parts that an experiment names: built-in ones, arguments of `run`, and code named as "module:name".

A configuration does not run code by itself: "module:name" is refused unless the caller trusts a folder (`Code`), which
`polyeps run --trust-code` does with the folder of the experiment file. No file can grant that trust, because a file may
come from elsewhere. A journal remembers the folder and the digest of each module; resuming needs the same trust, and
refuses a module that has changed.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, get_type_hints

import pydantic
from torch import Tensor, nn

from polyeps.algorithms import ALGORITHMS, Entry
from polyeps.core import Algorithm
from polyeps.data.dataset import Dataset
from polyeps.encoders import ENCODER_NAMES
from polyeps.errors import InputError, suggest
from polyeps.experiment import config
from polyeps.experiment.effective_budgets import whose_budgets
from polyeps.experiment.journal import COUNTED
from polyeps.experiment.metrics import CONFUSION, NAMED_METRICS
from polyeps.experiment.target_metrics import MEASURED_NAMES
from polyeps.experiment.trackers import TRACKERS, check_installed
from polyeps.models import MODELS, Model

# (shape of a record, or of each of its inputs by name; classes) -> a model
ModelFactory = Callable[[Any, int], Model | nn.Module]
Encoder = Callable[[Tensor], Any]  # records (R, ...) -> features (R, ...), each row from its own record alone
Metric = Callable[[Tensor, Tensor], float]  # (outputs, labels) of all test records -> a number

_REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)
_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_MEASURED = (*MEASURED_NAMES, "loss", "method", "seed", "round", *COUNTED)
# Names of earlier versions: the algorithm and its budgets.
_FORMER = {
    "minimum": ("fedavg", "minimum"),
    "maximum": ("fedavg", "maximum"),
    "non-private": ("fedavg", "none"),
    "dp-fedavg": ("fedhdp", "minimum"),
    "fedhdp-open": ("fedhdp", "none"),
    "uv-fed": ("cmp-fed", "none"),
    "randagg": ("dp-randagg", "none"),
}


class Tracker(Protocol):
    """An observer of a run, such as a link to a tracking service; its errors never stop the run."""

    def started(self, experiment: Mapping[str, Any]) -> None:
        """Take note of the settings; called again when a run is resumed."""

    def round(self, job: str, number: int, metrics: Mapping[str, float]) -> None:
        """Take note of one round of one job; metrics are empty where the model was not evaluated."""

    def finished(self, folder: Path) -> None:
        """Take note that all jobs are done; the results are in the folder."""


@dataclass
class Code:
    """The modules of a trusted folder; the bytes that are hashed are the bytes that run."""

    folder: Path
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 by module; when resuming, those of the first run
    resumed: bool = False  # only modules that the run began with are read from the folder
    _loaded: dict[str, ModuleType] = field(default_factory=dict, repr=False)

    def find(self, key: str, reference: str) -> Any:
        """Return what "module:name" stands for: in a file of the folder or, without one, in an installed module."""
        module, name = reference.split(":")
        try:
            if module not in self._loaded:
                self._loaded[module] = self._load(module)
            return getattr(self._loaded[module], name)
        except InputError:
            raise
        except Exception as problem:
            reason = f"{type(problem).__name__}: {problem}"
            if isinstance(problem, ModuleNotFoundError) and problem.name == module.partition(".")[0]:
                if not self.resumed:
                    reason = f"there is no {module}.py in {self.folder}, nor such an installed module; correct the name"
            elif isinstance(problem, AttributeError) and problem.obj is self._loaded.get(module, problem):
                own = [one for one in vars(self._loaded[module]) if not one.startswith("_")]
                reason = f"{module} defines no {name!r}; {suggest(name, own, 'correct the name')}"
            raise InputError(f'{key} = "{reference}" cannot be loaded: {reason}') from problem

    def _load(self, module: str) -> ModuleType:
        path = self.folder / f"{module}.py"
        if module not in self.digests and (self.resumed or not path.is_file()):
            return importlib.import_module(module)
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if self.digests.setdefault(module, digest) != digest:
            raise InputError(f"{path} has changed since the run began; restore it, or start a new run")
        # Not under its own name: two experiments may have modules of the same name.
        made = ModuleType(f"polyeps_own_{digest[:16]}_{module}")
        made.__file__ = str(path)
        sys.modules[made.__name__] = made
        exec(compile(content, str(path), "exec"), made.__dict__)
        return made


@dataclass(frozen=True)
class Parts:
    """What the names in an experiment stand for, beside the built-in ones."""

    algorithms: Mapping[str, Entry | Callable[..., Algorithm]] = field(default_factory=dict)
    models: Mapping[str, ModelFactory] = field(default_factory=dict)
    encoders: Mapping[str, Callable[[], Encoder]] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    trackers: Sequence[Tracker] = ()
    code: Code | None = None  # None: "module:name" is refused
    elsewhere: str = ""  # where the code lies that a resumed run names and nobody trusts
    data: Dataset | None = None  # a table given in Python, instead of the data that the experiment names

    def __post_init__(self) -> None:
        taken = {
            "algorithms": [*ALGORITHMS, *_FORMER],
            "models": MODELS,
            "encoders": ENCODER_NAMES,
            "metrics": _MEASURED,
        }
        for kind, names in self.names.items():
            for name in names:
                if name in taken.get(kind, ()):
                    raise InputError(f"{kind}: {name!r} is built in; choose another name")
                if not _NAME.fullmatch(name):
                    raise InputError(f"{kind}: {name!r} is no name; use letters, digits, _ and -, a letter first")

    @property
    def names(self) -> dict[str, list[str]]:
        """The names that were given, by kind."""
        given = {kind: getattr(self, kind) for kind in ("algorithms", "models", "encoders", "metrics")}
        return {kind: list(parts) for kind, parts in given.items() if parts}

    def find(self, key: str, name: str, known: Mapping[str, Any], argument: str) -> Any:
        """Return the part that the experiment names under a key: a known one, or code."""
        if name in known:
            return known[name]
        if ":" not in name:
            if known:
                raise InputError(config.unknown_key(name, name, known, argument.removesuffix("s")))
            raise InputError(f'{key} = "{name}" is unknown; write "module:name", or give {argument} to run')
        if not _REFERENCE.fullmatch(name):
            raise InputError(f'{key} = "{name}": write "module:name", both as Python spells them')
        if self.code is None:
            raise InputError(
                f'{key} = "{name}" names code, which a configuration cannot run by itself; read the module'
                + (f" in {self.elsewhere}" if self.elsewhere else "")
                + ", then add --trust-code (in Python: code_folder for run, trust_code for resume, or the argument "
                f"{argument})"
            )
        return self.code.find(key, name)

    def measuring(self, experiment: config.Experiment) -> dict[str, Metric]:
        """Return the metrics of an experiment, those it names and those given, by name; a matrix is no such metric."""
        found: dict[str, Metric] = dict(self.metrics)
        for reference in experiment.metrics:
            name = reference.rpartition(":")[2]
            if reference in (*MEASURED_NAMES, "loss"):
                raise InputError(f"metrics: {reference} is measured wherever it can be; leave it out")
            if name in _MEASURED or (name in found and name != reference):
                raise InputError(f"metrics: two are called {name!r}; give each a name of its own")
            if reference in self.metrics or ":" in reference:
                found[name] = self.find("metrics", reference, self.metrics, "metrics")
            elif reference in NAMED_METRICS:
                found[name] = NAMED_METRICS[reference]
            elif reference != CONFUSION:
                known = [*self.metrics, *NAMED_METRICS, CONFUSION]
                raise InputError(config.unknown_key(reference, reference, known, "metric"))
        return found

    def tracking(self, experiment: config.Experiment, folder: Path) -> dict[str, Callable[[], Tracker]]:
        """Return the functions that make the trackers which an experiment names; built-in ones write to the folder."""
        found: dict[str, Callable[[], Tracker]] = {}
        for name in experiment.trackers:
            make = self.find("trackers", name, TRACKERS, "trackers")
            if name in TRACKERS:
                check_installed(name)
                make = partial(make, folder)
            found[name] = make
        return found


BUILT_IN = Parts()


def entry_of(method: config.Method, parts: Parts = BUILT_IN) -> Entry:
    """Return the entry of a method's algorithm; a plain function trains locally, within the clients' own budgets."""
    if method.name in _FORMER:
        name, budgets = _FORMER[method.name]
        raise InputError(f'algorithm.name = "{method.name}" is now name = "{name}" with budgets = "{budgets}"')
    found = parts.find("algorithm.name", method.name, {**ALGORITHMS, **parts.algorithms}, "algorithms")
    if isinstance(found, Entry):
        return found
    if not callable(found):
        raise InputError(f'algorithm.name = "{method.name}" is a {type(found).__name__}, not a function or an Entry')
    return Entry(found, (inspect.getdoc(found) or method.title).splitlines()[0].rstrip("."))


def checked_options(method: config.Method, entry: Entry) -> dict[str, Any]:
    """Return an algorithm's own options, checked against the keyword arguments of its builder."""
    parameters = inspect.signature(entry.build).parameters.values()
    own = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in entry.options]
    try:
        hints = get_type_hints(entry.build, include_extras=True)
    except NameError as problem:
        raise InputError(f"{method.name}: {problem}; import the types of its options at run time") from problem
    fields: dict[str, Any] = {
        one.name: (hints.get(one.name, Any), ... if one.default is one.empty else one.default) for one in own
    }
    for key in method.options:
        if key not in fields:
            known = [*fields, *config.Method.model_fields]
            raise InputError(config.unknown_key(f"algorithm.{key} (of {method.name})", key, known))
        if key in entry.idle and whose_budgets(method, entry) == "none":
            raise InputError(f"algorithm.{key} changes nothing about {method.title}, which adds no noise; leave it out")
    shape: type[config.Section] = pydantic.create_model("Options", __base__=config.Section, **fields)
    return {**config.checked(shape, method.options, f"algorithm ({method.name})").__dict__, **entry.options}
