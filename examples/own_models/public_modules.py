"""Modules of torchvision, timm and Hugging Face as models, with random weights; install the package that you use.

    polyeps model check public_modules:torchvision_resnet --shape 3,32,32 --classes 10 --trust-code

In an experiment: [model] name = "public_modules:torchvision_resnet". Load public weights where the module is made.
"""

from torch import Tensor, nn


def torchvision_resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A ResNet-18 with GroupNorm, since BatchNorm mixes records."""
    from torchvision.models import resnet18

    assert shape[0] == 3, "three channels"
    made: nn.Module = resnet18(num_classes=classes, norm_layer=lambda channels: nn.GroupNorm(8, channels))
    return made


def timm_vit(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A vision transformer; it has LayerNorm, so nothing needs to be replaced."""
    import timm

    size = {"img_size": shape[-1], "patch_size": 4, "in_chans": shape[0], "depth": 2}
    made: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **size)
    return made


class Bert(nn.Module):
    """BERT over tokens. Its module returns an object; a model returns one tensor."""

    def __init__(self, vocabulary: int, length: int, classes: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = BertConfig(vocab_size=vocabulary, max_position_embeddings=length, num_labels=classes, **size)
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.bert(input_ids=tokens).logits
        return found


def hugging_face_bert(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small BERT for sequences of 50 tokens: --type int64, in Python dtype="int64"."""
    return Bert(50, shape[0], classes)


class GPT2(nn.Module):
    """GPT-2 over tokens, with a classifier of the last position.

    Given tokens, GPT-2 looks for padding in them, a branch on data that would have to run record by record; it is given
    their embeddings instead.
    """

    def __init__(self, vocabulary: int, length: int, classes: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model

        self.gpt2 = GPT2Model(GPT2Config(vocab_size=vocabulary, n_positions=length, n_embd=32, n_layer=2, n_head=2))
        self.classifier = nn.Linear(32, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.gpt2(inputs_embeds=self.gpt2.wte(tokens)).last_hidden_state
        found: Tensor = self.classifier(states[:, -1])
        return found


def hugging_face_gpt2(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small GPT-2 for sequences of 50 tokens: --type int64, in Python dtype="int64"."""
    return GPT2(50, shape[0], classes)
