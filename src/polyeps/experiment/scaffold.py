"""A folder to begin with: an experiment, its schema and budgets, tiny invented data, and the commands to try."""

from __future__ import annotations

import shlex
from pathlib import Path

from polyeps.data.hospitals import COLUMNS, hospitals_csv
from polyeps.errors import InputError
from polyeps.experiment import config

_EXPERIMENT = """\
# Six hospitals train one model; each has its own privacy budget.
name = "{name}"
rounds = 5
algorithm = "weiavg"

[data]
file = "patients.csv"
client = "hospital"  # the column that names the client of each record
label = "outcome"    # the column to predict
classes = ["well", "ill"]
unit = "patient"     # all records of one patient are protected together

# The schema: how columns become numbers. It is agreed before anybody's records are read, so ranges come from general
# knowledge or from one client's own records, never from those of all clients.
[data.columns]
{columns}
# Every hospital's ε: the smaller, the stronger its guarantee and the more noise it adds.
[budgets]
delta = 1e-6
epsilon = {{ elm = 4.0, alder = 1.0, cedar = 0.5, fir = 8.0, oak = 8.0, birch = 2.0 }}

[training]
batch = 16
local_steps = 10
learning_rate = 0.3
"""
_README = """\
# {name}

Six hospitals train one model together, each within its own privacy budget. `patients.csv` holds invented patients, with
one to five visits each: no person is behind any of them. Replace it by your own table.

| file | content |
|---|---|
| `experiment.toml` | settings, schema (`[data.columns]`) and budgets (`[budgets]`) |
| `patients.csv` | columns hospital, patient, age, bp, sex, smoker, outcome |

Run these commands in this folder:

```console
{commands}
```

The first three use no budget: what each hospital's budget affords, an estimate of the accuracy, and the guarantee of
each hospital in words. `run` trains; `report` writes `report.html`. `polyeps run -h` lists what else there is.
"""
COMMANDS = (
    "polyeps plan experiment.toml",
    "polyeps plan experiment.toml --accuracy",
    "polyeps certify experiment.toml",
    "polyeps run experiment.toml",
    "polyeps report runs/{name}",
)


def scaffold(folder: Path) -> list[Path]:
    """Make a new folder with files to begin with, and return them; nothing that exists is changed."""
    name = config.experiment({"name": folder.name}).name
    commands = [command.format(name=shlex.quote(name)) for command in COMMANDS]
    content = {
        "experiment.toml": _EXPERIMENT.format(name=name, columns=COLUMNS),  # a name holds neither " nor \
        "patients.csv": hospitals_csv(),
        "README.md": _README.format(name=name, commands="\n".join(f"$ {command}" for command in commands)),
    }
    try:
        folder.mkdir()
    except FileExistsError:
        raise InputError(f"{folder} exists already; choose another name") from None
    except FileNotFoundError:
        raise InputError(f"{folder} cannot be made: {folder.parent} does not exist; make it first") from None
    except OSError as problem:
        raise InputError(f"{folder} cannot be made: {problem.strerror}; choose another place") from None
    made: list[Path] = []
    try:
        for file, text_of_file in content.items():
            made.append(folder / file)
            made[-1].write_text(text_of_file, encoding="utf-8")
    except OSError as problem:
        for path in made:
            path.unlink(missing_ok=True)
        folder.rmdir()
        raise InputError(f"{made[-1]} cannot be written: {problem.strerror}; make room, or choose another") from None
    return made
