"""Where the time of a deployed round goes, and its CPU seconds: python benchmarks/deployed_rounds.py [SILOS].

A federation of the demonstration's kind runs on this machine with so many silos. Of each round it is noted when the
server sends, when each silo takes its task up, when its reply is with the SuperNode, and when the server has all.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Message

from polyeps.data.hospitals import PATIENTS, hospitals_csv
from polyeps.deploy.demo import DemoFederation
from polyeps.deploy.flower_runtime import started_run
from polyeps.deploy.kits import ServerTerms
from polyeps.deploy.serving import serve_contract

ROUNDS = 12
_TICK = os.sysconf("SC_CLK_TCK")


def federation(folder: Path, count: int) -> DemoFederation:
    """Return a federation of silos with invented records; those of one hospital serve several silos."""
    names = [f"silo-{place:02}" for place in range(count)]
    it = DemoFederation(folder, ServerTerms(ROUNDS, enrolment=300, reply=300), {}, dict.fromkeys(names, (1.0, 8.0)))
    header, *rows = hospitals_csv().splitlines()
    for place, name in enumerate(names):
        hospital = list(PATIENTS)[place % len(PATIENTS)]
        own = [row.partition(",")[2] for row in (header, *(r for r in rows if r.startswith(f"{hospital},")))]
        (it.silo(name) / "records.csv").write_text("\n".join(own) + "\n")
    return it


class Timed:
    """A grid that notes when messages are sent and when the last reply is there."""

    def __init__(self, grid: Any) -> None:
        self.grid, self.sent, self.heard, self.times = grid, dict[str, float](), dict[str, float](), dict[str, float]()
        self.busy = {"sending": 0.0, "looking": 0.0}

    def get_node_ids(self) -> Iterable[int]:
        found: Iterable[int] = self.grid.get_node_ids()
        return found

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        some, began = list(messages), time.monotonic()
        names = list(self.grid.push_messages(some))
        for message in some:
            if round := round_of(message):
                self.sent.setdefault(round, began)
                self.times[round] = time.monotonic() - began
        return names

    def pull_messages(self, names: Iterable[str]) -> Iterable[Message]:
        replies = list(self.grid.pull_messages(names))
        for reply in replies:
            self.heard[round_of(reply)] = time.monotonic()
        return replies


def round_of(message: Message) -> str:
    """Return the round of a message; "" for one that asks a silo to enrol."""
    return str(message.metadata.group_id).partition("/")[0]


def watch(note: Path, found: list[tuple[float, float]], over: threading.Event) -> None:
    """Note when a silo takes each task up and when it has replied: its note of the task is there meanwhile."""
    began = None
    while not over.wait(0.004):
        there = note.exists()
        if there and began is None:
            began = time.monotonic()
        elif not there and began is not None:
            found.append((began, time.monotonic()))
            began = None


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def main(count: int) -> None:
    over, tasks = threading.Event(), dict[str, list[tuple[float, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        it = federation(Path(folder), count)
        with it.processes:
            it.start()
            for name in it.budgets:
                tasks[name] = []
                note = it.silo(name) / "state" / "task"
                threading.Thread(target=watch, args=(note, tasks[name], over), daemon=True).start()
            grids, marks = list[Timed](), list[dict[str, float]]()

            def mark(said: str) -> None:
                if said.startswith("round "):
                    marks.append({name: processor_seconds(one.pid) for name, one in it.processes.running.items()})
                    marks[-1]["serve"] = time.process_time()

            @contextmanager
            def connect() -> Any:
                with started_run(it.endpoint) as grid:
                    grids.append(Timed(grid))
                    yield grids[0]

            served = serve_contract(it.signed, partial(connect), Path(folder) / "run", progress=mark)
            over.set()
    (grid,) = grids
    steps: dict[str, list[float]] = {"until taken up": [], "at the silo": [], "until heard": [], "whole round": []}
    for number in map(str, range(1, ROUNDS)):  # without the first, when all is loaded
        sent, heard = grid.sent[number], grid.heard[number]
        for spans in tasks.values():
            own = [(begin, end) for begin, end in spans if sent <= begin and end <= heard + 1]
            if own:
                begin, end = own[0]
                steps["until taken up"].append(begin - sent)
                steps["at the silo"].append(end - begin)
                steps["until heard"].append(heard - end)
        steps["whole round"].append(heard - sent)
    rounds = len(marks) - 1
    spent = {name: (marks[-1][name] - marks[0][name]) / rounds for name in marks[0]}
    kinds = {"silo": "silo-silo", "SuperNode": "supernode", "SuperLink": "superlink", "polyeps serve": "serve"}
    shown = {
        "silos": count,
        "rounds": served.rounds,
        "seconds (median)": {step: round(statistics.median(values), 2) for step, values in steps.items()},
        "sending (median)": round(statistics.median(grid.times.values()), 3),
        "CPU seconds per round": {
            kind: round(statistics.mean(v for name, v in spent.items() if name.startswith(start)), 3)
            for kind, start in kinds.items()
        },
        "load": os.getloadavg()[0],
    }
    print(json.dumps(shown, indent=2))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
