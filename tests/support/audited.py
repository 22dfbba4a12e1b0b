"""Single rows of the quick audit, by name."""

from polyeps.audit.catalogue import cases
from polyeps.audit.rows import Effort, Row

ERROR = 1e-4  # of a row: that of a table of a hundred


def row(what: str, times: float = 1.0, seed: int = 0) -> Row:
    """Return a row with so many times the trials of the quick audit."""
    (case,) = (case for case in cases() if case.what == what)
    return Row(case.what, case.form, case.attack, case.run(Effort(seed, times, 1 - ERROR)))
