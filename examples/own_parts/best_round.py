"""An own tracker: remembers the best round of every job."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class BestRound:
    """Prints the best test accuracy of every job when the run is done."""

    def __init__(self) -> None:
        self.best: dict[str, tuple[float, int]] = {}

    def started(self, experiment: Mapping[str, Any]) -> None:
        print(f"{experiment['name']}: {experiment['rounds']} rounds", file=sys.stderr)

    def round(self, job: str, number: int, metrics: Mapping[str, float]) -> None:
        if "accuracy" in metrics:
            self.best[job] = max(self.best.get(job, (0.0, 0)), (metrics["accuracy"], number))

    def finished(self, folder: Path) -> None:
        for job, (accuracy, number) in self.best.items():
            print(f"{folder}, {job}: {accuracy:.1%} after round {number + 1}", file=sys.stderr)
