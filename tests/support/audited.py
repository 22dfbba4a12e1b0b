"""Single attacks of the quick audit, by name."""

from polyeps.audit.attacks import all_attacks
from polyeps.audit.results import AuditResult, Effort

ERROR = 1e-4  # of an attack: that of a table of a hundred


def audited(name: str, times: float = 1.0, seed: int = 0) -> AuditResult:
    """Run an attack with so many times the trials of the quick audit."""
    (attack,) = (attack for attack in all_attacks() if attack.name == name)
    return attack.audit(Effort(seed, times, 1 - ERROR))
