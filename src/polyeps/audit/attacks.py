"""The attacks of `polyeps audit`, in the order of its table."""

from __future__ import annotations

from polyeps.audit.accounting_attacks import accounting_attacks
from polyeps.audit.clipping_attacks import clipping_attacks
from polyeps.audit.deployment_attacks import deployment_attacks
from polyeps.audit.dp_sgd_attacks import dp_sgd_attacks
from polyeps.audit.federation_attacks import federation_attacks
from polyeps.audit.fedsel_attacks import fedsel_attacks
from polyeps.audit.results import Attack


def all_attacks() -> list[Attack]:
    """Return all attacks: on mechanisms, on clients, on whole federations, and on published accounts."""
    return [
        *fedsel_attacks(),
        *dp_sgd_attacks(),
        *deployment_attacks(),
        *clipping_attacks(),
        *federation_attacks(),
        *accounting_attacks(),
    ]
