"""polyeps: federated learning in which every client sets its own privacy budget.

The names below are loaded when they are first used, so that the command line starts without torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from os import environ
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyeps.accounting.calibration import calibrate
    from polyeps.accounting.certificate import Certificate
    from polyeps.core import Budget
    from polyeps.errors import PolyepsError
    from polyeps.experiment.config import Experiment
    from polyeps.experiment.outcome import Outcome, read
    from polyeps.experiment.run import resume, run
    from polyeps.experiment.saved_model import SavedModel, load_model
    from polyeps.ledger import Ledger
    from polyeps.private_federation import PrivateFederation

# Torch's threads wait for each other by spinning. Beside a busy neighbour that makes two threads several times slower
# than one; threads that soon sleep lose next to nothing elsewhere. Read when torch is loaded, unless it already is.
if "OMP_WAIT_POLICY" not in environ:
    environ.setdefault("GOMP_SPINCOUNT", "2000")


def _events_alone() -> None:
    """Have `dp_accounting` import its events alone, until one of its other names is used.

    It would import accountants that polyeps does not use and with them half of scipy, a quarter of a run's start.
    """
    spec = None if "dp_accounting" in sys.modules else find_spec("dp_accounting")
    if spec is None or spec.loader is None:
        return
    loader, package = spec.loader, module_from_spec(spec)

    def find(name: str) -> Any:
        if find_spec(f"dp_accounting.{name}"):
            return import_module(f"dp_accounting.{name}")
        loader.exec_module(package)
        if name not in vars(package):
            raise AttributeError(f"module 'dp_accounting' has no attribute {name!r}")
        return vars(package)[name]

    vars(package)["__getattr__"] = find
    sys.modules["dp_accounting"] = package


_events_alone()

__version__ = "0.2.0"

__all__ = [
    "Budget",
    "Certificate",
    "Experiment",
    "Ledger",
    "Outcome",
    "PolyepsError",
    "PrivateFederation",
    "SavedModel",
    "calibrate",
    "load_model",
    "read",
    "resume",
    "run",
]
_HOMES = {
    "Budget": "core",
    "Certificate": "accounting.certificate",
    "Experiment": "experiment.config",
    "Ledger": "ledger",
    "Outcome": "experiment.outcome",
    "PolyepsError": "errors",
    "PrivateFederation": "private_federation",
    "SavedModel": "experiment.saved_model",
    "calibrate": "accounting.calibration",
    "load_model": "experiment.saved_model",
    "read": "experiment.outcome",
    "resume": "experiment.run",
    "run": "experiment.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'polyeps' has no attribute {name!r}")
    return getattr(import_module(f"polyeps.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
