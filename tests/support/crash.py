"""Processes that create and charge ledgers while this one kills them; prints what became of the ledgers as JSON.

    python tests/crash.py FOLDER CREATIONS KILLS SEED

The workers are forked, so that starting one costs no imports. Each writes a token into a pipe once a charge was
acknowledged; the token is also the charge's purpose, so every acknowledged charge can be looked for afterwards.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from polyeps.accounting.events import Gaussian
from polyeps.core import Budget
from polyeps.errors import BudgetExceeded, LedgerError
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge
from polyeps.ledger.head_file import head_path

EVENT = Gaussian(60.0)
TERMS = {"client": BudgetTerms(Budget(2.0, 1e-5))}
STEPS = ("open", "write", "fsync", "link", "replace", "unlink", "pwrite")  # of `os`, at which a process may die


def forked(work: Callable[[], object]) -> int:
    """Start a child that does some work; its exit status is 0, or 3 with a traceback."""
    child = os.fork()
    if child:
        return child
    status = 3
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def dies_at(step: int, work: Callable[[], object]) -> bool:
    """Do some work in a child that dies before a given call to the operating system; return whether it came to that."""

    def dying() -> None:
        left = [step]

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return real(*arguments, **named)

            return call

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        work()

    _, status = os.waitpid(forked(dying), 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def die_creating(folder: Path) -> int:
    """Let a process that creates a ledger die at every point in turn; return at how many, all of them survived."""
    for step in range(100):
        path = folder / f"created-{step}.db"
        died = dies_at(step, partial(Ledger.create, path, TERMS))
        if step % 2 and not path.exists():
            with suppress(LedgerError):  # "exists already", if the dead process had got that far
                Ledger.create(path, TERMS)
        Ledger.open_or_create(path, TERMS).charge(EVENT)
        assert Ledger(path).verify().seq == 3
        if not died:
            return step
    raise AssertionError


def die_charging(folder: Path) -> int:
    """Let a process that charges a ledger die at every point in turn; return at how many, all of them survived."""
    path, told = folder / "charged.db", folder / "told"
    Ledger.create(path, TERMS).close()
    rows = 2

    def charge() -> None:
        Ledger(path).charge(EVENT)
        told.touch()

    for step in range(100):
        died = dies_at(step, charge)
        found = Ledger(path).verify().seq
        assert found - rows in ((1,) if told.exists() else (0, 1))
        told.unlink(missing_ok=True)
        rows = found
        if not died:
            Ledger(path).charge(EVENT)
            return step
    raise AssertionError


def flip(folder: Path, flips: int, seed: int) -> int:
    """Flip bytes of a ledger and its head, time and again; return how often it was refused, always in a sentence."""
    path, chance = folder / "flipped.db", random.Random(seed)
    ledger = Ledger.create(path, TERMS)
    for number in range(30):
        ledger.charge(EVENT, purpose=f"{number}")
    ledger.reserve("run", [Charge(("client",), EVENT, 2)])
    good = ledger.rows()
    ledger.close()
    whole = {file: file.read_bytes() for file in (path, head_path(path))}
    refused = 0
    for number in range(flips):
        file = head_path(path) if number % 5 == 0 else path
        for other, content in whole.items():
            other.write_bytes(content)
        damaged = bytearray(whole[file])
        for _ in range(chance.choice([1, 1, 1, 3])):
            damaged[chance.randrange(len(damaged))] ^= chance.choice([1, 2, 16, 64, 128, 255])
        file.write_bytes(damaged)
        try:
            opened = Ledger(path)
            assert opened.rows() == good
            if number % 4 == 0:
                opened.charge(EVENT)
            opened.close()
        except LedgerError:
            refused += 1
    return refused


def race(folder: Path, ledgers: int, racers: int, seed: int) -> dict[str, Any]:
    """Let several processes create the same ledger, many times; kill some of them in the second half."""
    chance = random.Random(seed)
    winners, bricked = [], []
    for number in range(ledgers):
        path = folder / f"{number}.db"
        ready, gate = os.pipe()
        heard, pipe = os.pipe()

        def create(path: Path = path, ready: int = ready, gate: int = gate, pipe: int = pipe) -> None:
            os.close(gate)
            os.read(ready, 1)  # until all others are there, too
            try:
                Ledger.create(path, TERMS)
                os.write(pipe, b"w")
            except LedgerError as problem:
                if "exists already" not in str(problem):
                    raise
                Ledger(path).charge(EVENT)

        children = [forked(create) for _ in range(racers)]
        os.close(ready)
        os.close(gate)
        os.close(pipe)
        failed = False
        for child in children:
            if number >= ledgers // 2:
                time.sleep(chance.uniform(0, 0.008))
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            failed |= os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
        winners.append(len(os.read(heard, racers)))
        os.close(heard)
        try:
            ledger = Ledger.open_or_create(path, TERMS)
            ledger.charge(EVENT)
            ledger.verify()
            ledger.close()
        except LedgerError as problem:
            failed = True
            print(problem, file=sys.stderr)
        if failed:
            bricked.append(number)
    return {"winners": winners, "bricked": bricked}


def work(path: Path, name: str, pipe: int) -> None:
    """Charge, and reserve, use and release, until killed."""
    ledger = Ledger.open_or_create(path, TERMS)
    number = 0
    while True:
        token = f"{name}-{number}"
        number += 1
        run = token if number % 3 == 0 else ""
        try:
            if run:
                ledger.reserve(run, [Charge(("client",), EVENT, 3)])
                os.write(pipe, f"reserved-{run}\n".encode())
            ledger.charge(EVENT, purpose=token, run=run)
        except BudgetExceeded:
            os.write(pipe, b"refused\n")
            time.sleep(0.005)
            continue
        os.write(pipe, f"{token}\n".encode())
        if run and number % 2:
            ledger.release(run)


def kill(path: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill one of two charging processes after the other."""
    chance = random.Random(seed)
    heard, pipe = os.pipe()
    said = b""
    os.set_blocking(heard, False)
    running: list[int] = []
    for killed in range(kills):
        while len(running) < 2:
            running.append(forked(partial(work, path, f"{killed}-{len(running)}", pipe)))
        time.sleep(chance.expovariate(1 / 0.025))
        said += _stop(running.pop(chance.randrange(2)), heard)
    for child in running:
        said += _stop(child, heard)
    tokens = said.decode().split()
    reserved = [token.removeprefix("reserved-") for token in tokens if token.startswith("reserved-")]
    acknowledged = [token for token in tokens if token != "refused" and not token.startswith("reserved-")]
    return {
        "killed": kills,
        "acknowledged": acknowledged,
        "reserved": reserved,
        "refused": tokens.count("refused"),
    }


def _stop(child: int, heard: int) -> bytes:
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        sys.exit("a worker stopped by itself")
    said = b""
    while True:
        try:
            said += os.read(heard, 1 << 16)
        except BlockingIOError:
            return said


def main(folder: Path, creations: int, kills: int, seed: int) -> None:
    folder.mkdir(exist_ok=True)
    outcome = {
        "deaths": [die_creating(folder), die_charging(folder)],
        "race": race(folder, creations, 4, seed),
        "kill": kill(folder / "ledger.db", kills, seed),
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
