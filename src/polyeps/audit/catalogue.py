"""Every row of `polyeps audit`, in the order of the table: the only list of them."""

from __future__ import annotations

from polyeps.audit import (
    canary_cases,
    clipping,
    deployed_cases,
    federation_cases,
    local_cases,
    report_cases,
)
from polyeps.audit.rows import Case


def cases() -> list[Case]:
    """Return all attacks: mechanisms first, then what clients run, whole federations, and mistakes in accounts."""
    return [
        *report_cases.cases(),
        *local_cases.cases(),
        *deployed_cases.cases(),
        *clipping.cases(),
        *federation_cases.cases(),
        *canary_cases.cases(),
    ]
