"""What a method promises: the paper's figure and ours, side by side and never mixed up."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from polyeps.accounting import Accountant
from polyeps.core import Adjacency, Trust, Unit

Form = Literal["sound", "published"]
Sampler = Literal["poisson", "fixed", "none"]

_ANY_CHANGE = {
    ("record", "add-remove"): "adding or removing any one record of this client",
    ("record", "replace-one"): "replacing any one record of this client by another",
    ("client", "add-remove"): "this client's taking part with its data or staying away",
    ("client", "replace-one"): "replacing everything this client holds by anything else",
}
_WHO = {
    "nobody": "anyone, the server included,",
    "secure-sum": "anyone who sees only the sums, as long as the secure sum's promises hold,",
    "server": "anyone but the server, which is trusted with un-noised updates,",
}


@dataclass(frozen=True)
class Certificate:
    """`claimed` is the paper's formula; `certified` is what we prove for what is actually run, else infinity."""

    method: str
    form: Form
    claimed: float
    certified: float
    delta: float
    adjacency: Adjacency
    unit: Unit
    sampler: Sampler
    trust: Trust
    accountant: Accountant
    details: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """All fields and the sentence, ready for JSON."""
        return {**asdict(self), "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """The promise in words."""
        change = _ANY_CHANGE[self.unit, self.adjacency]
        if not math.isfinite(self.certified):
            return f"Nothing is promised: the outcome may reveal {change} with certainty."
        factor = f"{math.exp(self.certified):.4g}" if self.certified < 500 else f"e^{self.certified:.4g}"
        exception = f", except with probability at most {self.delta:g}" if self.delta else ", without exception"
        return (
            f"Whatever {_WHO[self.trust]} learns from all of this client's answers together, {change} changes how "
            f"likely that is by a factor of at most {factor} (ε = {self.certified:.4g}){exception}."
        )
