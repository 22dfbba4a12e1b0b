"""Built-in trackers: MLflow, TensorBoard and Weights & Biases, each an extra that is imported when it is used.

All write into the run's folder and send nothing, unless the user has chosen a server: `MLFLOW_TRACKING_URI` or
`mlflow.set_tracking_uri` for MLflow, `WANDB_MODE=online` for Weights & Biases. The usage statistics, crash reports,
console logs and machine facts that the packages collect by default are switched off.

Every job (a method with a seed) is one run of the tracker: settings, metrics per round, counted from 1, and at the end
what each client spent. Where clients do not disclose their budgets (`budgets.disclosed = false`), budgets, spent ε and
all metrics but those of the common model on the common test records are left out.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyeps.errors import InputError
from polyeps.experiment.journal import Journal
from polyeps.experiment.outcome import model_path
from polyeps.experiment.target_metrics import MEASURED_NAMES

_COMMON = (*MEASURED_NAMES, "loss", "discarded replies")  # metrics that are not of single clients or groups
_LONGEST = 500  # letters of a setting, such as a list of budgets
_SPENT = "SELECT client, own_epsilon, epsilon, delta, spent FROM clients WHERE job = ? ORDER BY rowid"


class _Jobs:
    """What the trackers share: settings to log, metrics that may be logged, and what clients spent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.settings: dict[str, str] = {}
        self.name = ""
        self.disclosed = False
        self.common: frozenset[str] = frozenset()

    def started(self, experiment: Mapping[str, Any]) -> None:
        """Take note of the settings, each under its dotted key."""
        self.name = str(experiment["name"])
        self.disclosed = bool(experiment["budgets"]["disclosed"])
        self.common = frozenset((*_COMMON, *(name.rpartition(":")[2] for name in experiment.get("metrics", ()))))
        shown = {key: value for key, value in experiment.items() if key not in ("algorithm", "seeds", "trackers")}
        if not self.disclosed:
            shown["budgets"] = {"disclosed": False}
        self.settings = _flat(shown)

    def known(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that may be logged."""
        return {name: value for name, value in metrics.items() if self.disclosed or name in self.common}

    def of(self, job: str) -> dict[str, str]:
        """Return the settings of one job."""
        (row,) = self._ask("SELECT method, label, seed FROM jobs WHERE job = ?", job)
        return {**self.settings, "algorithm": row["method"], "method": row["label"], "seed": str(row["seed"])}

    def clients(self, job: str) -> list[dict[str, Any]]:
        """Return budgets and spent ε of every client; none where they are not disclosed."""
        return self._ask(_SPENT, job) if self.disclosed else []

    def guaranteed(self, job: str) -> bool:
        """Whether the model of a job was trained with a guarantee for every client."""
        rows = self._ask("SELECT epsilon FROM clients WHERE job = ?", job)
        return bool(rows) and all(row["epsilon"] is not None for row in rows)

    def jobs(self) -> list[str]:
        """Return the names of all jobs."""
        return [row["job"] for row in self._ask("SELECT job FROM jobs ORDER BY rowid")]

    def _ask(self, statement: str, *values: str) -> list[dict[str, Any]]:
        with closing(Journal(self.folder / "journal.db")) as journal:
            return journal.query(statement, values)

    def remembered(self, file: str, job: str, make: Callable[[], str]) -> tuple[str, bool]:
        """Return the tracker's name of a job, made now or before the run was interrupted; and whether it is new."""
        path = self.folder / file
        names = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if new := job not in names:
            names[job] = make()
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(names, indent=1), encoding="utf-8")
            partial.replace(path)
        return str(names[job]), new


class MLflow(_Jobs):
    """Logs to MLflow: the database `mlflow.db` of the run's folder, or the server that the user has set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow: Any = import_module("mlflow")
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self.local = not mlflow.is_tracking_uri_set()
        address = f"sqlite:///{self.folder / 'mlflow.db'}" if self.local else mlflow.get_tracking_uri()
        self.make_client: Callable[[], Any] = lambda: mlflow.MlflowClient(tracking_uri=address)
        self.runs: dict[str, str] = {}

    def started(self, experiment: Mapping[str, Any]) -> None:
        """Open or create the experiment of this name."""
        super().started(experiment)
        self.client = self.make_client()
        found = self.client.get_experiment_by_name(self.name)
        place = (self.folder / "mlartifacts").as_uri() if self.local else None
        self.experiment = found.experiment_id if found else self.client.create_experiment(self.name, place)

    def round(self, job: str, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round."""
        run = self._run(job)
        for name, value in self.known(metrics).items():
            self.client.log_metric(run, _plain(name), value, step=number + 1)

    def finished(self, folder: Path) -> None:
        """Log what clients spent, and models that have a guarantee."""
        for job in self.jobs():
            run = self._run(job)
            if rows := self.clients(job):
                self.client.log_dict(run, {"clients": rows}, "clients.json")
            if self.guaranteed(job) and (model := model_path(folder, job)).exists():
                self.client.log_artifact(run, str(model))
            self.client.set_terminated(run)

    def _run(self, job: str) -> str:
        if job not in self.runs:

            def make() -> str:
                return str(self.client.create_run(self.experiment, run_name=job).info.run_id)

            self.runs[job], new = self.remembered("mlflow.json", job, make)
            if new:
                for key, value in self.of(job).items():
                    self.client.log_param(self.runs[job], _plain(key), value)
        return self.runs[job]


class TensorBoard(_Jobs):
    """Writes event files for TensorBoard into the folder `tensorboard` of the run's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        self.writer: Callable[[str], Any] = lambda job: writer(str(self.folder / "tensorboard" / job))
        self.writers: dict[str, Any] = {}

    def round(self, job: str, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round."""
        for name, value in self.known(metrics).items():
            self._of(job).add_scalar(name, value, number + 1)

    def finished(self, folder: Path) -> None:  # noqa: ARG002
        """Log what clients spent, and close the files."""
        for job in self.jobs():
            if rows := self.clients(job):
                lines = ["| client | budget ε | spent ε |", "|---|---|---|"]
                lines += [f"| {row['client']} | {row['epsilon']} | {row['spent']} |" for row in rows]
                self._of(job).add_text("clients", "\n".join(lines))
        self.interrupted()

    def interrupted(self) -> None:
        """Close the files."""
        for writer in self.writers.values():
            writer.close()

    def _of(self, job: str) -> Any:
        if job not in self.writers:
            self.writers[job] = self.writer(job)
            lines = ["| setting | value |", "|---|---|"] + [f"| {key} | {text} |" for key, text in self.of(job).items()]
            self.writers[job].add_text("settings", "\n".join(lines))
        return self.writers[job]


class WeightsAndBiases(_Jobs):
    """Logs to Weights & Biases: into the folder `wandb` of the run's folder, unless `WANDB_MODE` says otherwise."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self.wandb: Any = import_module("wandb")
        self.runs: dict[str, Any] = {}

    def round(self, job: str, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round."""
        self._run(job).log(self.known(metrics), step=number + 1)

    def finished(self, folder: Path) -> None:  # noqa: ARG002
        """Log what clients spent, and end all runs."""
        for job in self.jobs():
            run = self._run(job)
            if rows := self.clients(job):
                run.log({"clients": self.wandb.Table(list(rows[0]), [list(row.values()) for row in rows])})
        self.interrupted()

    def interrupted(self) -> None:
        """End all runs, so that they can be continued in this process or in another."""
        for run in self.runs.values():
            run.finish()

    def _run(self, job: str) -> Any:
        if job not in self.runs:
            name, _ = self.remembered("wandb.json", job, lambda: secrets.token_hex(8))
            self.runs[job] = self.wandb.init(
                project=os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "_", self.name),
                group=self.name,
                name=job,
                id=name,
                resume="allow",
                reinit="create_new",
                dir=str(self.folder),
                mode=os.environ.get("WANDB_MODE") or "offline",
                config=self.of(job),
                settings=self.wandb.Settings(
                    console="off",  # the tables that a run prints name every client's budget
                    silent=True,
                    save_code=False,
                    disable_git=True,
                    disable_job_creation=True,
                    x_disable_stats=True,
                    x_disable_machine_info=True,
                    x_disable_meta=True,
                    x_save_requirements=False,
                ),
            )
        return self.runs[job]


# By name: the class, and the packages it needs.
_NEEDED: dict[str, tuple[type[MLflow | TensorBoard | WeightsAndBiases], tuple[str, ...]]] = {
    "mlflow": (MLflow, ("mlflow", "sqlalchemy", "alembic")),
    "tensorboard": (TensorBoard, ("tensorboard",)),
    "wandb": (WeightsAndBiases, ("wandb",)),
}
TRACKERS = {name: made for name, (made, _) in _NEEDED.items()}


def check_installed(name: str) -> None:
    """Refuse a built-in tracker whose packages are not installed."""
    for package in _NEEDED[name][1]:
        if find_spec(package) is None:
            raise InputError(f"trackers: {name} needs {package}, which is not installed; pip install 'polyeps[{name}]'")


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return settings by dotted key, as text; of a file, its name alone."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{before}{key}.")
            continue
        text = Path(value).name if key == "file" else value if isinstance(value, str) else json.dumps(value)
        found[before + key] = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return found


def _plain(name: str) -> str:
    """Return a name with the letters that MLflow allows.

    >>> _plain("own accuracy (strict)")
    'own accuracy _strict_'
    """
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
