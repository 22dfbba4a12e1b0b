"""A federation as a scikit-learn classifier: `fit` builds an experiment from its arguments and runs it.

There is no second engine: arguments are settings of `polyeps.experiment.config`, and what `fit` leaves is a run folder
like any other.
"""

from __future__ import annotations

import copy
import inspect
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from polyeps.accounting.certificate import Certificate
from polyeps.algorithms import ALGORITHMS, Entry
from polyeps.core import Algorithm
from polyeps.errors import InputError
from polyeps.experiment.config import Experiment
from polyeps.experiment.labelled_records import LabelledRecords, budget_table, is_table, read_records
from polyeps.experiment.model_export import as_onnx, as_safetensors, as_torch
from polyeps.experiment.outcome import Outcome
from polyeps.experiment.registry import Code, Encoder, ModelFactory, Parts, Tracker, entry_of
from polyeps.experiment.run import run
from polyeps.experiment.saved_model import SavedModel, load_model, probabilities_of
from polyeps.ledger import Ledger
from polyeps.model_files import read_model_file
from polyeps.models import MODELS, Model
from polyeps.report.page import write_page

# Arguments that are settings of the same name, by the table that has them.
_SETTINGS = {
    "": ("rounds",),
    "data": ("clients", "test_share", "columns"),
    "model": ("hidden",),
    "training": ("batch", "rate", "local_steps", "learning_rate", "clip", "momentum", "decay"),
}
# Settings that have an argument, and its name.
_ARGUMENTS = {f"{table}.{name}".strip("."): name for table, names in _SETTINGS.items() for name in names} | {
    "algorithm": "algorithm",
    "budgets.delta": "delta",
    "budgets.distribution": "budgets",
    "budgets.epsilon": "budgets",
    "budgets.epsilons": "budgets",
    "data.classes": "classes",
    "model.name": "model",
    "seeds": "seed",
}
_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_FORMATS = (".safetensors", ".pt", ".onnx")


@dataclass(eq=False, repr=False)
class PrivateFederation(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that clients train together, each within its own privacy budget.

    `model`: the name of a built-in model, a torch module, a function from (shape of a record, classes) to one, a
    `polyeps.models.Model`, or "module:name" in `code_folder`. `budgets`: one ε for all, a dictionary or pandas series
    by client, an array for clients 0, 1, ..., or the name of a distribution. `algorithm`: a name, a table such as
    {"name": "pfa", ...}, or a function. `columns` declares how the columns of a table become numbers. `settings` holds
    all other settings of an experiment by their keys, such as {"participation.share": 0.5}.

    After `fit`: `classes_`, `model_` (a `SavedModel`), `outcome_`, `experiment_`, `ledger_`, and by client `spent_` and
    `certificates_` (none where budgets are not disclosed). The run's folder is `folder`, which must be new, or a
    temporary one.
    """

    model: str | nn.Module | Model | ModelFactory = "logistic"
    budgets: Any = None
    _: KW_ONLY
    algorithm: str | Mapping[str, Any] | Entry | Callable[..., Algorithm] = "weiavg"
    rounds: int = 20
    batch: int | str = 8
    rate: float | None = None
    local_steps: int | str = 20
    learning_rate: float = 0.1
    clip: float = 1.0
    momentum: float = 0.0
    decay: float = 0.0
    delta: float | Mapping[Any, float] | None = None
    seed: int = 1
    hidden: tuple[int, ...] | None = None
    clients: int | None = None
    classes: Any = None
    columns: Mapping[str, Mapping[str, Any]] | None = None
    dtype: str = "float32"
    test_share: float = 0.2
    settings: Mapping[str, Any] | None = None
    encoders: Mapping[str, Callable[[], Encoder]] | None = None
    trackers: tuple[Tracker | str, ...] = ()
    folder: Path | str | None = None
    code_folder: Path | str | None = None
    device: str = "cpu"
    progress: bool | None = None

    def fit(self, X: Any, y: Any, client: Any = None, *, unit: Any = None, test: Any = None) -> Self:  # noqa: N803
        """Train on records X with labels y; `client` names the client of each record.

        `unit` names the person of each record, whose records are then protected together. `test` is a pair (X, y) of
        public or set-apart records to measure the model on after each round; without it, a share `test_share` of every
        client's records is held out for that and not trained on. Without `client` the records are divided at random
        among as many `clients` as are asked for.
        """
        if self.budgets is None and not {"budgets.levels", "budgets.file"} & set(self.settings or ()):
            raise InputError("budgets is missing; give one epsilon for all clients, or a dictionary of them by client")
        if client is None and self._count() is None:
            raise InputError("fit needs client=, the client of each record; or set clients to divide them at random")
        found = read_records(X, y, client, unit, test, self.classes, self.columns, self.dtype)
        experiment, own = self._experiment(found)
        code = None if self.code_folder is None else Code(Path(self.code_folder).absolute())
        if not entry_of(experiment.algorithm[0], Parts(own["algorithms"], code=code)).common:
            raise InputError(f"algorithm {experiment.algorithm[0].name} trains no common model; choose another")
        temporary = None if self.folder is not None else mkdtemp(prefix="polyeps-")
        try:
            folder = Path(temporary, "run") if temporary else Path(self.folder or "")
            self._run(experiment, own, folder, found)
        except BaseException:
            if temporary:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if "_delete" in vars(self):
            self._delete()  # the folder of an earlier fit
        if temporary:
            self._delete: Any = weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
        return self

    def _run(self, experiment: Experiment, own: dict[str, Any], folder: Path, found: LabelledRecords) -> None:
        given: dict[str, Any] = {"data": found.dataset, "code_folder": self.code_folder, "trackers": self.trackers}
        outcome = run(experiment, folder, device=self.device, progress=self.progress, **given, **own)
        loadable = {"models": own["models"], "encoders": own["encoders"], "code_folder": self.code_folder}
        self.model_: SavedModel = load_model(folder, **loadable)
        self.experiment_: Experiment = experiment
        self.outcome_: Outcome = outcome
        self.classes_: NDArray[Any] = found.classes
        self.certificates_: dict[str, Certificate] = self.model_.certificates
        (self.spent_,) = outcome.spent.values()
        self.n_features_in_ = found.dataset.features[0].size if found.names is None else len(found.names)
        if found.names is not None:
            self.feature_names_in_ = np.array(found.names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the class of each record."""
        places = Model.classes(self._outputs(X)).numpy()
        found: NDArray[Any] = self.classes_[places]
        return found

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the probability of every class, in the order of `classes_`, for each record."""
        return probabilities_of(self._outputs(X))

    @property
    def ledger_(self) -> Ledger | None:
        """The verified ledger of the run; None where no client has a guarantee."""
        path = self._run_folder() / "ledgers" / f"{self.model_.path.stem}.db"
        return Ledger(path) if path.exists() else None

    def report(self, path: Path | str) -> Path:
        """Write an offline HTML page about the run."""
        write_page([self._run_folder()], Path(path))
        return Path(path)

    def save(self, path: Path | str, *, clients: bool = True) -> Path:
        """Write the model: .safetensors with its description, .pt for PyTorch (a state_dict), or .onnx.

        Without `clients` the file does not name them. An existing file is not overwritten.
        """
        check_is_fitted(self)
        path = Path(path)
        if path.suffix not in _FORMATS:
            raise InputError(f"{path} ends in {path.suffix or 'no suffix'}; give one of {', '.join(_FORMATS)}")
        if path.suffix == ".onnx":
            content = as_onnx(self.model_, clients)[0]
        elif path.suffix == ".pt":
            content = as_torch(self.model_.module.state_dict())
        else:
            content = as_safetensors(*read_model_file(self._run_folder() / "models" / self.model_.path.name), clients)
        try:
            with path.open("xb") as stream:
                stream.write(content)
        except FileExistsError:
            raise InputError(f"{path} exists already; remove it, or choose another file") from None
        except OSError as problem:
            raise InputError(f"{path} cannot be written: {problem.strerror}; choose another file") from None
        return path

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # noise costs accuracy
        tags.input_tags.three_d_array = True
        return tags

    def __getstate__(self) -> Any:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_delete"}  # the original owns the folder

    def _outputs(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        if not is_table(X):
            X = LabelledRecords.array(X, self.dtype)  # noqa: N806
            if X[0].size != self.n_features_in_ and self.model_.schema is None:
                raise InputError(
                    f"X has {X[0].size} features, but {type(self).__name__} is expecting {self.n_features_in_} features"
                    " as input; give as many, in the order of the training"
                )
        return self.model_.outputs(self.model_.encode(X, name="X"))

    def _run_folder(self) -> Path:
        check_is_fitted(self)
        if not (self.outcome_.folder / "journal.db").exists():
            raise InputError(
                f"the run's folder {self.outcome_.folder} is gone; name a folder of your own before fit, to keep it"
            )
        return self.outcome_.folder

    def _experiment(self, found: LabelledRecords) -> tuple[Experiment, dict[str, Any]]:
        """Return the experiment that the arguments describe, and the parts of `run` that it names."""
        values: dict[str, Any] = {"name": "private-federation", "seeds": (self.seed,)}
        for table, names in _SETTINGS.items():
            into = values.setdefault(table, {}) if table else values
            into.update({name: getattr(self, name) for name in names if getattr(self, name) is not None})
        if (self.settings or {}).get("training.kind") == "gradient":
            # Only what was given: settings of local steps are refused for it.
            usual = inspect.signature(PrivateFederation).parameters
            values["training"] = {k: v for k, v in values["training"].items() if v != usual[k].default}
        values["data"] |= {"label": found.label, "client": found.client}
        values["budgets"] = budget_table(self.budgets, self.delta, found.dataset.group_names)
        own: dict[str, Any] = {"models": {}, "algorithms": {}, "encoders": self.encoders or {}}
        values["model"]["name"] = self._model(own["models"])
        algorithm = self.algorithm
        if callable(algorithm) or isinstance(algorithm, Entry):
            name = _name_of(algorithm, ALGORITHMS, "own-algorithm")
            own["algorithms"][name] = algorithm
            algorithm = name
        if not isinstance(algorithm, str | Mapping):
            raise InputError(f"algorithm is a {type(algorithm).__name__}; give a name, a table or a function")
        values["algorithm"] = [algorithm]
        for key, value in (self.settings or {}).items():
            _set(values, key, value)
        return Experiment(**values), own

    def _model(self, models: dict[str, ModelFactory]) -> str:
        """Return the name of the model; a module of the user's is added to the models."""
        model = self.model
        if isinstance(model, str):
            return model
        if not isinstance(model, nn.Module | Model) and not callable(model):
            raise InputError(f"model is a {type(model).__name__}; give a name, a module, a function or a Model")
        name = _name_of(model.module if isinstance(model, Model) else model, MODELS, "own-model")
        if isinstance(model, nn.Module | Model):
            # A copy each time: the user's module keeps the weights that training starts with.
            models[name] = lambda *_: copy.deepcopy(model)
        else:
            models[name] = model
        return name

    def _count(self) -> int | None:
        """Return the number of clients to divide records among, if it is known."""
        listed = not isinstance(self.budgets, Mapping | str) and not hasattr(self.budgets, "to_dict")
        return len(self.budgets) if self.clients is None and listed and np.ndim(self.budgets) == 1 else self.clients


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Add a setting by its key; refuse those that have an argument."""
    if key in _ARGUMENTS or key.startswith("algorithm."):
        raise InputError(f"settings[{key!r}] is the argument {_ARGUMENTS.get(key, 'algorithm')}; give it there")
    *path, last = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise InputError(f"settings[{key!r}]: {part} is a value, not a table; leave out the rest")
    if isinstance(values.get(last), dict):
        raise InputError(f"settings[{key!r}] is a table, which would replace arguments; give its keys: '{key}.NAME'")
    values[last] = value


def _name_of(thing: Any, taken: Mapping[str, Any], usual: str) -> str:
    """Return the name of an own part: that of the function or class, where it can be one."""
    name = getattr(thing, "__name__", type(thing).__name__)
    return name if _NAME.fullmatch(name) and name not in taken else usual
