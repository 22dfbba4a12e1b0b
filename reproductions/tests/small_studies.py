"""Tiny settings and trials on digits, for tests of studies."""

from typing import Any

from polyeps_reproductions.cells import Setting, compared
from polyeps_reproductions.comparison import comparison
from polyeps_reproductions.studies import Cell, Part, Study
from polyeps_reproductions.trials import Trial

from polyeps.accounting.certificate import Form

SETTING = Setting(
    data="digits",
    clients=6,
    epsilons=(0.5, 0.6, 8.0, 0.55, 9.0, 0.65),
    size=60,
    rounds=3,
    local_steps=4,
    batch_published=6,
    batch_sound=6,
    delta=1e-3,
    choice_rounds=2,
)
METHODS = ("pfa", "fedavg", "public-only")


def cell(method: str = "fedavg", form: Form = "sound", learning_rate: float | None = 0.2, **others: Any) -> Cell:
    return SETTING.cell(method, form, learning_rate, **others)


def trial(method: str = "fedavg", form: Form = "sound", **others: Any) -> Trial:
    return cell(method, form, **others).trial


def figure(axis: Any = "clients", uplink: bool = False, paper: float = 0.5, **changes: Any) -> Part:
    """Three methods in one cell, with a number from nowhere for one of them."""
    settings, methods = changes.get("settings", (SETTING,)), changes.get("methods", METHODS)
    cells = compared(settings, methods, {(SETTING, "pfa"): paper})
    return Part("figure", "1", "Small", comparison(cells, axis, uplink), lambda _: cells, partial=True)


STUDY = Study("test", lambda _: (figure(),))


def result(of: Trial, final: float) -> dict[str, Any]:
    """What a trial might have left, without training."""
    bytes_of = dict.fromkeys(("up", "down", "up_private", "down_private", "uplink"), 2**20)
    values = {"seed": of.seed, "final": final, "accuracy": {"1": final}, "rounds": 1, "spent_share": 0.9, "spent": 0.5}
    return {**values, **bytes_of, "seconds": 0.1, "version": "0", "settings": {"training": {"learning_rate": 0.05}}}
