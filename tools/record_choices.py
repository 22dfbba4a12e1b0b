"""Record the settings that trials in a folder chose: python tools/record_choices.py WORK.

They are added to `chosen.json` of the reproductions, so that later runs need not choose again. The name of a choice
contains a digest of all trials it rests on. Delete a line, and the next run chooses again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from polyeps_reproductions.studies import STUDIES, find
from polyeps_reproductions.trials import Store

RECORDED = Path(__file__).parents[1] / "reproductions" / "polyeps_reproductions" / "chosen.json"


def main(work: str) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    before = len(recorded)
    store = Store(Path(work))
    for study in map(find, STUDIES):
        for trial in dict.fromkeys(cell.trial for part in study.parts(False) for cell in part.cells(False)):
            if trial.choice and trial.choice_name not in recorded and (best := trial.best(store)):
                recorded[trial.choice_name] = json.loads(best)
    lines = (
        f" {json.dumps(name, ensure_ascii=False)}: {json.dumps(value)}" for name, value in sorted(recorded.items())
    )
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(recorded) - before} choices were added to {before}")


if __name__ == "__main__":
    main(sys.argv[1])
