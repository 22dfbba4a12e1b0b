"""Why cases of the families are refused, and what share of them is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

# Parts of the sentences with which modules, losses and inputs are refused, by the reason.
REASONS: dict[str, tuple[str, ...]] = {
    "no gradient of one record exists: records are mixed, remembered, or do not reach the parameters": (
        "depends on the other",
        "other examples",
        "GroupNorm or LayerNorm",
        "track_running_stats=False",
        "changes its buffer",
        "keep nothing of examples",
        "keep nothing of them",
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
        r"leave out double\(\)",
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
        "without, and compile it afterwards",
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


# How the names of cases begin, and what they are.
FAMILIES: Mapping[str, str] = {
    "linear": "linear layers, as modules, functions and products",
    "own": "own classes: residuals, tying, LoRA, experts, weight norm, parts of weights",
    "activation": "activations",
    "norm": "normalisation (batch normalisation in eval mode)",
    "convolution": "convolutions of 1 to 3 dimensions, transposed",
    "images": "networks of images: pooling, residuals, upsampling",
    "tokens": "embeddings and bags",
    "table": "tables with `max_norm` or `sparse`, padding, unequal lengths",
    "recurrent": "RNN, GRU, LSTM: layers, directions, dropout, cells, packed sequences",
    "attention": "attention: heads, masks, grouped, rotary, linear",
    "transformer": "Transformer encoders and decoders, ViT, GPT",
    "random": "dropout of every kind, noise, stochastic depth",
    "drawing": "permutations, multinomial and other draws",
    "branch": "branches and loops on values, routed experts",
    "in place": "in-place work, 0-dim parameters, float64 and half precision inside, lazy layers",
    "differentiated": "checkpoints, own `autograd.Function`, hooks, parametrizations",
    "algebra": "weights in einsum, Kronecker products, inverses, spatial transformers",
    "odd": "classes that cannot be copied, or list, compute or hide their parameters",
    "": "several inputs and outputs, targets and losses",
}


def family_table(modules: Mapping[str, tuple[str, bool]], targets: Mapping[str, tuple[str, bool]]) -> str:
    """Return the table of docs/guides/own-models.md from cases: the sentence of a refusal, and whether one is slow."""
    rows = dict.fromkeys(FAMILIES, (0, 0))
    named = {name: case for name, case in modules.items() if not case[0]} | {
        f"# {name}": case for name, case in targets.items() if not case[0]
    }
    for name, (_, slow) in named.items():
        family = next(key for key in FAMILIES if name.startswith(f"{key} ") or not key)
        rows[family] = (rows[family][0] + (not slow), rows[family][1] + slow)
    refused = Counter(reason_of(sentence) for sentence, _ in [*modules.values(), *targets.values()] if sentence)
    lines = ["| kind of module | right | right, one record after the other |", "|---|---|---|"]
    lines += [f"| {FAMILIES[family]} | {fast} | {slow} |" for family, (fast, slow) in rows.items()]
    fast, slow = (sum(counts) for counts in zip(*rows.values(), strict=True))
    lines += [f"| **all** | **{fast}** | **{slow}** |", "", "| refused because | cases |", "|---|---|"]
    return "\n".join(lines + [f"| {reason} | {refused[reason]} |" for reason in REASONS])
