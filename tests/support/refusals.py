"""Why cases of the families are refused, and what share of them is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# Parts of the sentences with which modules, losses and inputs are refused, by the reason.
REASONS: dict[str, tuple[str, ...]] = {
    "no gradient of one record exists: records are mixed, remembered, or do not reach the parameters": (
        "depends on the other",
        "other examples",
        "GroupNorm or LayerNorm",
        "track_running_stats=False",
        "changes its buffer",
        "keep nothing of examples",
        "in training",
        "batch_first=True",
        "no gradient for one example",
        "nothing to train",
        "no trainable",
        "first dimension",
        "one number per row",
        "row's own positions",
    ),
    "a gradient exists, but not in real float32 numbers, or not twice the same": (
        "float32",
        r"call float\(\)",
        r"outputs\.float\(\)",
        r"2\^24",
        "torch.view_as_real",
        "in eval mode",
        "global generator",
        "generator",
    ),
    "the call is wrong: other inputs, outputs or targets than stated": (
        "returns a",
        "cannot be run on",
        "none of them called logits",
        "one of 'a', 'b'",
        "no tensor",
        "leave out output",
        "targets of shape",
        "make them alike",
        "move the classes to the end",
        "no loss 'crossentropy'",
        "give its .module",
        "the module it was made from",
        "make all layers in __init__",
    ),
}
ABSENT, TYPES, CALLS = REASONS


def reason_of(sentence: str) -> str:
    """Return why a case is refused; every sentence has one reason."""
    found = [reason for reason, parts in REASONS.items() if any(sentence.startswith(part) for part in parts)]
    if not found:
        found = [reason for reason, parts in REASONS.items() if any(part in sentence for part in parts)]
    assert len(set(found)) == 1, (sentence, found)
    return found[0]


def counted(sentences: Iterable[str], slow: Iterable[bool]) -> Counter[str]:
    """Return how many cases are right at once, right one after the other, and refused, by the reason."""
    found: Counter[str] = Counter()
    for sentence, looped in zip(sentences, slow, strict=True):
        found[reason_of(sentence) if sentence else ("slow" if looped else "fast")] += 1
    return found
