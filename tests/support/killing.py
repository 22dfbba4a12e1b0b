"""Runs an experiment in a child that is killed at random moments and resumed, until it is done; prints the kills.

    python tests/support/killing.py FOLDER KILLS SEED [FILE]

With a FILE of an experiment the command line runs it, and what clients keep is written down client by client, as if it
were large.

The children are forked from a parent that has imported everything, loaded the data and calibrated the noise, but
trained nothing: a child starts at once, so that kills fall into its rounds, and no thread of torch's is lost.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from polyeps import cli
from polyeps.experiment import config
from polyeps.experiment import journal_entries as entries
from polyeps.experiment import run as runs
from polyeps.experiment.config import Experiment
from polyeps.experiment.job import prepare
from polyeps.experiment.population import populate
from support.federations import experiment


def wanted() -> Experiment:
    participation = {"kind": "uniform", "share": 0.8}
    methods = ["fedavg", "public-only", "weiavg", "pfa"]
    return experiment(methods, rounds=20, training={"local_steps": 8}, participation=participation)


def child(folder: Path, file: str | None) -> None:
    begun = (folder / "journal.db").exists()
    if file is not None:
        entries._SMALL = 50
        status = cli.execute(["run", "--resume", str(folder)] if begun else ["run", file, "--output", str(folder)])
        if status:
            sys.exit(status)
    elif begun:
        runs.resume(folder)
    else:
        runs.run(wanted(), folder)


def main(folder: Path, kills: int, seed: int, file: str | None = None) -> None:
    torch.set_num_threads(1)
    settings = wanted() if file is None else config.read_experiment(Path(file))
    for method in settings.algorithm:
        prepare(settings, method, populate(settings, settings.seeds[0]))
    chance = random.Random(seed)
    killed = 0
    while True:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                child(folder, file)
                status = 0
            finally:
                os._exit(status)
        if killed < kills:
            # A child needs some time to open its folder, the command line a little more; a kill hurts after that.
            time.sleep(chance.uniform(0.0, 0.12 if file is None else 0.3))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        elif os.WEXITSTATUS(status):
            sys.exit(f"the run failed after {killed} kills")
        else:
            print(killed, flush=True)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
