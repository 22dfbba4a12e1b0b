"""Two processes charge one ledger while this one kills them at random moments; prints what became of it as JSON.

    python tests/crash.py LEDGER KILLS SEED

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
from pathlib import Path

from polyeps.accounting.events import Gaussian
from polyeps.accounts import Terms
from polyeps.core import Budget
from polyeps.errors import BudgetExceeded
from polyeps.ledger import Ledger

EVENT = Gaussian(25.0)


def work(path: Path, name: str, pipe: int) -> None:
    ledger = Ledger(path)
    number = 0
    while True:
        token = f"{name}-{number}"
        try:
            ledger.charge(EVENT, purpose=token)
        except BudgetExceeded:
            os.write(pipe, b"refused\n")
            time.sleep(0.005)
            continue
        os.write(pipe, f"{token}\n".encode())
        number += 1


def stop(workers: list[int]) -> None:
    for child in workers:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main(path: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    Ledger.create(path, {"client": Terms(Budget(2.0, 1e-5))}).close()
    heard, pipe = os.pipe()
    said = b""
    os.set_blocking(heard, False)
    running: list[int] = []
    killed = 0
    while killed < kills:
        while len(running) < 2:
            child = os.fork()
            if child == 0:
                try:
                    work(path, f"{killed}-{len(running)}", pipe)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(3)  # a worker only ends by being killed
            running.append(child)
        time.sleep(chance.expovariate(1 / 0.025))
        victim = running.pop(chance.randrange(2))
        os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
        if os.WIFEXITED(status):
            stop(running)
            sys.exit(f"a worker stopped by itself, after {killed} kills")
        killed += 1
        while True:
            try:
                said += os.read(heard, 1 << 16)
            except BlockingIOError:
                break
    stop(running)
    while True:
        try:
            said += os.read(heard, 1 << 16)
        except BlockingIOError:
            break
    tokens = said.decode().split()
    print(
        json.dumps(
            {
                "killed": killed,
                "acknowledged": [t for t in tokens if t != "refused"],
                "refused": tokens.count("refused"),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
