"""Tiny cells and trials on digits, for tests of studies."""

from typing import Any

from polyeps_reproductions.cells import Cell, Method
from polyeps_reproductions.figures import Figure
from polyeps_reproductions.trials import Trial

from polyeps.accounting.certificate import Form

CELL = Cell(
    data="digits",
    clients=6,
    epsilons=(0.5, 0.6, 8.0, 0.55, 9.0, 0.65),
    size=60,
    rounds=3,
    local_steps=4,
    batch_published=6,
    batch_sound=6,
    delta=1e-3,
)
METHODS = tuple(Method(name) for name in ("pfa", "fedavg", "public-only"))


def trial(method: str = "fedavg", form: Form = "sound", seed: int = 1, learning_rate: float = 0.2) -> Trial:
    return Trial(CELL, Method(method), form, seed, learning_rate)


def figure(**changes: Any) -> Figure:
    """Three methods in one cell, with a number from nowhere for one of them."""
    values: dict[str, Any] = {"cells": (CELL,), "methods": METHODS, "paper": {(CELL, "pfa"): 0.5}, **changes}
    return Figure("test", "1", "Small", **values)


def result(of: Trial, final: float) -> dict[str, Any]:
    """What a trial might have left, without training."""
    bytes_of = dict.fromkeys(("up", "down", "up_private", "down_private", "up_values"), 2**20)
    told = {"trial": of.as_dict(), "final": final, "accuracy": {"1": final}, "rounds": 1, "spent_share": 0.9}
    return {**told, **bytes_of, "seconds": 0.1}
