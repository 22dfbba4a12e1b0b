"""Families of inputs, outputs, targets and losses: what a user's model may take and give, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

CLASSES = 4
POSITIONS = 6
WORDS = 20


class Task(NamedTuple):
    """A loss to train with, targets for five rows, and the loss of one row's outputs (1, ...) by plain torch."""

    loss: Any
    targets: Callable[[Tensor, torch.Generator], Tensor]
    plain: Callable[[Tensor, Tensor], Tensor]
    stated: bool = False  # whether the model is told by example what its targets are


class Given(NamedTuple):
    """A module, five examples of its inputs, and what to choose of its outputs."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Any]
    pick: Callable[[Any], Tensor] = lambda outputs: outputs
    output: str | int | None = None
    slow: bool = False


class TargetCase(NamedTuple):
    """A module with its inputs and a task or, if it must be refused, a part of the sentence."""

    given: Given
    task: Task
    refused: str = ""


class Fed(nn.Module):
    """Modules by name, and a function of them and of whatever the module is called with."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self.function(self, *inputs, **named)


class Output(dict[str, Any]):
    """Like the outputs of Hugging Face's models: keys that are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Pair(NamedTuple):
    logits: Tensor
    aux_logits: Tensor


# --- losses and targets ---------------------------------------------------------------------------------------------


def classes(outputs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, max(2, outputs.shape[-1]), (len(outputs),), generator=generator)


def positions(outputs: Tensor, generator: torch.Generator) -> Tensor:
    labels = torch.randint(0, outputs.shape[-1], outputs.shape[:-1], generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = -100
    labels[1] = -100  # a row in which nothing counts
    labels[0].view(-1)[0] = 1
    return labels


def numbers(outputs: Tensor, generator: torch.Generator) -> Tensor:
    return 2 * torch.randn(outputs.shape, generator=generator)


def single_numbers(outputs: Tensor, generator: torch.Generator) -> Tensor:
    return 2 * torch.randn(len(outputs), generator=generator)


def zero_one(outputs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, outputs.shape, generator=generator)


def soft(outputs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(outputs.shape, generator=generator).softmax(-1)


def by_position(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over positions that count, written as a loop."""
    flat, kept = outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1)
    each = [functional.cross_entropy(flat[i : i + 1], kept[i : i + 1]) for i in range(len(kept)) if kept[i] != -100]
    return torch.stack(each).mean() if each else outputs.sum() * 0


def of_chances(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that takes probabilities alone."""
    return functional.binary_cross_entropy(outputs, targets.float(), reduction="none").mean(1)


def flat_pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.reshape(-1), targets.reshape(-1).float()


def per_token(outputs: Tensor, labels: Tensor) -> Tensor:
    """An own loss of sequences: the sum over positions that count, per row."""
    each = functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return each.sum(1)


def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
    apart = targets - outputs[:, 0]
    return torch.maximum(0.9 * apart, -0.1 * apart)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """An own loss whose targets are a class and a weight."""
    return functional.cross_entropy(outputs, targets[:, 0].long(), reduction="none") * targets[:, 1]


def classes_and_weights(outputs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.stack([classes(outputs, generator).float(), torch.rand(len(outputs), generator=generator)], dim=1)


def ranked(outputs: Tensor, targets: Tensor) -> Tensor:
    """An own loss with a branch on the data, which is looped over."""
    squares = (outputs - targets).square().sum(1)
    return squares if bool((targets > 0).any()) else 2 * squares


SEQUENCE = {
    "cross-entropy of positions": Task("cross-entropy", positions, by_position),
    "own sum over positions": Task(per_token, positions, lambda o, t: per_token(o, t).sum(), stated=True),
}
FLAT = {
    "cross-entropy": Task("cross-entropy", classes, functional.cross_entropy),
    "hinge": Task(
        "hinge",
        classes,
        lambda o, t: (1 + o - o[:, t] - functional.one_hot(t, o.shape[1])).clamp(min=0).max(),
    ),
    "soft labels": Task("soft-cross-entropy", soft, functional.cross_entropy),
    "squared": Task("squared", numbers, lambda o, t: functional.mse_loss(*flat_pair(o, t))),
    "absolute": Task("absolute", numbers, lambda o, t: functional.l1_loss(*flat_pair(o, t))),
    "huber": Task("huber", numbers, lambda o, t: functional.huber_loss(*flat_pair(o, t))),
    "several labels": Task(
        "multi-label", zero_one, lambda o, t: functional.binary_cross_entropy_with_logits(*flat_pair(o, t))
    ),
    "own with weights": Task(weighted, classes_and_weights, lambda o, t: weighted(o, t).sum(), stated=True),
    "own of numbers": Task(
        lambda o, t: (o - t).square().sum(1), numbers, lambda o, t: (o - t).square().sum(), stated=True
    ),
    "own of torch": Task(
        nn.CrossEntropyLoss(reduction="none", label_smoothing=0.2),
        classes,
        lambda o, t: functional.cross_entropy(o, t, label_smoothing=0.2),
    ),
}
ONE = {
    "squared": Task("squared", single_numbers, lambda o, t: functional.mse_loss(*flat_pair(o, t))),
    "absolute": Task("absolute", single_numbers, lambda o, t: functional.l1_loss(*flat_pair(o, t))),
    "huber": Task("huber", single_numbers, lambda o, t: functional.huber_loss(*flat_pair(o, t))),
    "own quantile": Task(pinball, single_numbers, lambda o, t: pinball(o, t).sum()),
    "binary": Task(
        "binary-logistic", classes, lambda o, t: functional.binary_cross_entropy_with_logits(o[0], t.float())
    ),
}


# --- modules, inputs and outputs ------------------------------------------------------------------------------------


def row(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(5, *shape, generator=generator)


def words(generator: torch.Generator) -> Tensor:
    return torch.randint(0, WORDS, (5, POSITIONS), generator=generator)


def mask(generator: torch.Generator) -> Tensor:
    lengths = torch.randint(1, POSITIONS + 1, (5,), generator=generator)
    return (torch.arange(POSITIONS) < lengths[:, None]).long()


def text(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": words(generator), "attention_mask": mask(generator)}


def hidden(s: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    found = s.table(input_ids)
    mixed: Tensor = s.norm(found + torch.tanh(s.mix(found)))
    return mixed * attention_mask[..., None]


def of_text(s: Any, input_ids: Tensor, attention_mask: Tensor) -> Output:
    found = hidden(s, input_ids, attention_mask)
    pooled = found.sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)
    return Output(logits=s.head(pooled), hidden_states=found)


def of_tokens(s: Any, input_ids: Tensor, attention_mask: Tensor) -> Output:
    found = hidden(s, input_ids, attention_mask)
    return Output(logits=s.head(found), hidden_states=found)


def attending(s: Any, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    found = s.table(input_ids)
    mixed, _ = s.attend(found, found, found, key_padding_mask=attention_mask == 0, need_weights=False)
    return {"logits": s.head(s.norm(found + mixed))}


def masked(s: Any, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
    """Attention with an additive mask, by torch's function."""
    found = s.table(input_ids)
    bias = (1.0 - attention_mask[:, None, None, :].float()) * -1e9
    query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in s.mix(found).chunk(3, dim=-1))
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return (s.head(found + mixed.transpose(1, 2).flatten(2)),)


def parts(**others: nn.Module) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {
        "table": nn.Embedding(WORDS, 8),
        "mix": nn.Linear(8, 8),
        "norm": nn.LayerNorm(8),
        "head": nn.Linear(8, CLASSES),
    }
    return made | others


def logits(outputs: Any) -> Tensor:
    found: Tensor = outputs["logits"]
    return found


TEXT = {
    "dictionary of text": Given(lambda: Fed(of_text, **parts()), text, logits),
    "text by place": Given(lambda: Fed(of_text, **parts()), lambda g: tuple(text(g).values()), logits),
}
TOKENS = {
    "dictionary of tokens": Given(lambda: Fed(of_tokens, **parts()), text, logits),
    "attention with padding": Given(
        lambda: Fed(attending, **parts(attend=nn.MultiheadAttention(8, 2, batch_first=True))), text, logits
    ),
    "attention with a mask": Given(lambda: Fed(masked, **parts(mix=nn.Linear(8, 24))), text, lambda found: found[0]),
    "one input by name": Given(
        lambda: Fed(lambda s, tokens: s.head(s.norm(s.table(tokens))), **parts()), lambda g: {"tokens": words(g)}
    ),
    "recurrent, first of a tuple": Given(
        lambda: Fed(
            lambda s, tokens: (s.head(s.layers(s.table(tokens))[0]), None),
            **parts(layers=nn.GRU(8, 8, batch_first=True)),
        ),
        lambda g: {"tokens": words(g)},
        lambda found: found[0],
        0,
    ),
    "linear of positions": Given(lambda: nn.Linear(3, CLASSES), lambda g: row(g, POSITIONS, 3)),
    "map of pixels": Given(
        lambda: Fed(lambda s, x: s.last(x).permute(0, 2, 3, 1), last=nn.Conv2d(2, CLASSES, 3, padding=1)),
        lambda g: row(g, 2, 4, 3),
    ),
}
FLATTENED = {
    "mixed inputs": Given(
        lambda: Fed(
            lambda s, code, amount, flag: (
                s.last(torch.relu(s.first(amount)) + s.table(code)) * (1 + flag[:, None].float())
            ),
            first=nn.Linear(3, 5),
            table=nn.Embedding(9, 5),
            last=nn.Linear(5, CLASSES),
        ),
        lambda g: {
            "code": torch.randint(0, 9, (5,), generator=g),
            "amount": row(g, 3),
            "flag": torch.rand(5, generator=g) < 0.5,
        },
    ),
    "two images": Given(
        lambda: Fed(
            lambda s, left, right: s.head(torch.cat([s.tower(left), s.tower(right)], 1).flatten(1)),
            tower=nn.Conv2d(1, 2, 3),
            head=nn.Linear(16, CLASSES),
        ),
        lambda g: {"left": row(g, 1, 4, 4), "right": row(g, 1, 4, 4)},
    ),
    "bilinear": Given(lambda: nn.Bilinear(3, 2, CLASSES), lambda g: (row(g, 3), row(g, 2))),
    "tuple of one": Given(
        lambda: Fed(lambda s, x: (s.a(x),), a=nn.Linear(3, CLASSES)), lambda g: row(g, 3), lambda found: found[0]
    ),
    "named tuple": Given(
        lambda: Fed(lambda s, x: Pair(s.a(x), s.b(x)), a=nn.Linear(3, CLASSES), b=nn.Linear(3, CLASSES)),
        lambda g: row(g, 3),
        lambda found: found.logits,
    ),
    "second of a list": Given(
        lambda: Fed(lambda s, x: [x, s.a(x)], a=nn.Linear(3, CLASSES)), lambda g: row(g, 3), lambda found: found[1], 1
    ),
    "chosen by key": Given(
        lambda: Fed(
            lambda s, x: {"scores": s.a(torch.tanh(s.b(x))), "hidden": x}, a=nn.Linear(3, CLASSES), b=nn.Linear(3, 3)
        ),
        lambda g: row(g, 3),
        lambda found: found["scores"],
        "scores",
    ),
    "branching": Given(
        lambda: Fed(
            lambda s, x, y: {"logits": torch.cat([(s.a if r.sum() > 0 else s.b)(r[None]) for r in x]) + y},
            a=nn.Linear(3, CLASSES),
            b=nn.Linear(3, CLASSES),
        ),
        lambda g: {"x": row(g, 3), "y": row(g, CLASSES)},
        logits,
        slow=True,
    ),
}
SINGLE = {
    "one output": Given(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), lambda g: row(g, 3)),
    "one output of two inputs": Given(
        lambda: Fed(lambda s, x, t: {"logits": s.a(x) + s.b(t.float()[:, None])}, a=nn.Linear(3, 1), b=nn.Linear(1, 1)),
        lambda g: {"x": row(g, 3), "t": torch.randint(-9, 9, (5,), generator=g)},
        logits,
    ),
}


@dataclass
class Scored:
    """What a module may return, without being a tuple or a dictionary."""

    scores: Tensor
    inputs: Tensor


def packed(s: Any, tokens: Tensor, lengths: Tensor) -> Any:
    rows = rnn.pack_padded_sequence(s.e(tokens), lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
    return s.r(rows)[1][-1]


def of_one_layer(function: Callable[..., Any], width: int = CLASSES, **others: Any) -> Given:
    return Given(lambda: Fed(function, a=nn.Linear(3, width)), lambda g: row(g, 3), **others)


STRANGE: dict[str, Given] = {
    "dataclass of two": of_one_layer(lambda s, x: Scored(s.a(x), x), pick=lambda o: o.scores, output="scores"),
    "second output in training only": of_one_layer(
        lambda s, x: (s.a(x), x) if s.training else s.a(x), pick=lambda o: o[0] if isinstance(o, tuple) else o, output=0
    ),
    "lengths of packed sequences": Given(
        lambda: Fed(packed, e=nn.Embedding(WORDS, 3), r=nn.GRU(3, CLASSES, batch_first=True)),
        lambda g: {"tokens": words(g), "lengths": torch.randint(1, POSITIONS + 1, (5,), generator=g)},
        slow=True,
    ),
    "loss of probabilities": of_one_layer(lambda s, x: s.a(x).sigmoid()),
    "one number, squeezed": of_one_layer(lambda s, x: s.a(x).squeeze(), 1),
}


def right_cases() -> dict[str, TargetCase]:
    found = {}
    for givens, tasks in (({**TEXT, **FLATTENED}, FLAT), (TOKENS, SEQUENCE), (SINGLE, ONE)):
        for number, (name, given) in enumerate(givens.items()):
            for place, (title, task) in enumerate(tasks.items()):
                skipped = len(tasks) > 5 and (number + place) % 2  # every second pair, so that each meets most others
                if not skipped and not (task.loss is per_token and name == "map of pixels"):
                    found[f"{name}, {title}"] = TargetCase(given, task)
    looped = Task(ranked, numbers, lambda o, t: ranked(o, t).sum(), stated=True)
    chances = Task(of_chances, zero_one, lambda o, t: of_chances(o, t).sum(), stated=True)
    return (
        found
        | {"branching loss": TargetCase(FLATTENED["tuple of one"], looped)}
        | dict(
            zip(
                STRANGE,
                map(TargetCase, STRANGE.values(), (FLAT["cross-entropy"],) * 3 + (chances, ONE["squared"])),
                strict=True,
            )
        )
    )


def refused_targets() -> dict[str, TargetCase]:
    """What must be refused in a sentence."""
    plain = Given(lambda: nn.Linear(3, CLASSES), lambda g: row(g, 3))
    usual = FLAT["cross-entropy"]

    def given(
        function: Callable[..., Any], inputs: Callable[[torch.Generator], Any] | None = None, **others: Any
    ) -> Given:
        return Given(lambda: Fed(function, a=nn.Linear(3, CLASSES)), inputs or (lambda g: row(g, 3)), **others)

    def losing(loss: Any, targets: Any = classes, stated: bool = False) -> Task:
        return Task(loss, targets, functional.cross_entropy, stated)

    both: Callable[[torch.Generator], Any] = lambda g: {"x": row(g, 3), "y": row(g, 3)}  # noqa: E731
    return {
        "two outputs": TargetCase(given(lambda s, x: (s.a(x), x)), usual, "none of them called logits.*one of 0, 1"),
        "two keys": TargetCase(given(lambda s, x: {"a": s.a(x), "b": x}), usual, "one of 'a', 'b'"),
        "unknown key": TargetCase(given(lambda s, x: {"a": s.a(x), "b": x}, output="c"), usual, "no tensor 'c'"),
        "unknown place": TargetCase(given(lambda s, x: (s.a(x), x), output=2), usual, "no tensor 2"),
        "nothing to choose": TargetCase(given(lambda s, x: s.a(x), output=1), usual, "leave out output"),
        "a text": TargetCase(given(lambda s, x: str(s.a(x))), usual, "returns a str"),
        "chosen is no tensor": TargetCase(given(lambda s, x: (s.a(x), "x"), output=1), usual, "no tensor 1"),
        "mixing two inputs": TargetCase(given(lambda s, x, y: s.a(x + y.mean(0)), both), usual, "other examples"),
        "unknown argument": TargetCase(
            given(lambda s, x: s.a(x), both), usual, "cannot be run on inputs x .5, 3. float32"
        ),
        "float64 input": TargetCase(
            given(lambda s, x, y: s.a(x + y), lambda g: {"x": row(g, 3).double(), "y": row(g, 3)}),
            usual,
            r"call float\(\)",
        ),
        "bfloat16 input": TargetCase(
            given(lambda s, x, y: s.a(x + y), lambda g: {"x": row(g, 3), "y": row(g, 3).bfloat16()}),
            usual,
            r"call float\(\)",
        ),
        "large numbers beside floats": TargetCase(
            given(lambda s, x, y: s.a(x) + y[:, None], lambda g: {"x": row(g, 3), "y": torch.full((5,), 2**24 + 1)}),
            usual,
            r"2\^24",
        ),
        "float64 rows": TargetCase(
            given(lambda s, x: s.a(x.float()), lambda g: row(g, 3).double()), usual, r"call float\(\)"
        ),
        "bfloat16 rows": TargetCase(
            given(lambda s, x: s.a(x.float()), lambda g: row(g, 3).bfloat16()), usual, r"call float\(\)"
        ),
        "bfloat16 module": TargetCase(
            Given(lambda: nn.Linear(3, CLASSES).bfloat16(), lambda g: row(g, 3)), usual, r"call float\(\)"
        ),
        "bfloat16 outputs": TargetCase(given(lambda s, x: s.a(x).bfloat16()), usual, r"outputs\.float\(\)"),
        "unknown loss": TargetCase(plain, losing("crossentropy"), "no loss 'crossentropy'; known are cross-entropy"),
        "mean over all": TargetCase(TOKENS["linear of positions"], losing(nn.CrossEntropyLoss()), "targets of shape"),
        "mean of a sequence": TargetCase(
            TOKENS["linear of positions"],
            losing(lambda o, t: functional.cross_entropy(o.transpose(1, 2), t), positions, True),
            "one number per row",
        ),
        "a number for each position": TargetCase(
            TOKENS["linear of positions"],
            losing(lambda o, t: functional.cross_entropy(o.transpose(1, 2), t, reduction="none"), positions, True),
            "row's own positions",
        ),
        "mean over everybody's positions": TargetCase(
            TOKENS["linear of positions"],
            losing(lambda o, t: per_token(o, t) / (t != -100).sum(), positions, True),
            "depends on the other rows",
        ),
        "centred targets": TargetCase(
            plain, losing(lambda o, t: (o - t + t.mean(0)).square().sum(1), numbers, True), "depends on the other rows"
        ),
        "wrong shape of targets": TargetCase(plain, losing("squared", single_numbers, True), "make them alike"),
        "wrong length of positions": TargetCase(
            TOKENS["linear of positions"],
            losing("cross-entropy", lambda o, g: positions(o, g)[:, 1:], True),
            "move the classes to the end",
        ),
    }
