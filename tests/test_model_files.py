"""Model files: the same bytes for the same model, and no file, however hostile, does more than be refused."""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.saved import described, save

from polyeps.errors import InputError
from polyeps.experiment.saved_model import load_model
from polyeps.model_files import MOST_CLIENTS, ModelMetadata, model_bytes, read_model_file, read_vector
from polyeps.models import MODELS

SMALL = {"features": 3, "hidden": [4], "classes": 2}


def altered(path: Path, change: Any = None, tensors: Any = None) -> Path:
    """Write a model file with a changed description, or other tensors, beside the usual one."""
    model = MODELS["mlp"](**SMALL)
    about = json.loads(json.dumps(described(model, "mlp", SMALL)))
    if change:
        change(about)
    held = {name: torch.zeros(part.shape) for name, part in model.slices.items()} if tensors is None else tensors
    path.write_bytes(bytes(safetensors.torch.save(held, {"polyeps": json.dumps(about)})))
    return path


def test_layers_have_their_names_and_the_vector_is_that_of_the_run(tmp_path: Path) -> None:
    model, vector = save(tmp_path / "m.safetensors", "mlp", SMALL)
    plain = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in plain.items()} == {
        "0.weight": (4, 3),
        "0.bias": (4,),
        "2.weight": (2, 4),
        "2.bias": (2,),
    }
    assert torch.equal(read_vector(tmp_path / "m.safetensors"), vector)
    assert all(torch.equal(plain[name], tensor) for name, tensor in model.unflatten(vector).items())


def test_the_same_model_is_the_same_bytes(tmp_path: Path) -> None:
    contents = set()
    for number in range(5):
        save(tmp_path / str(number), "cnn")
        contents.add((tmp_path / str(number)).read_bytes())
    assert len(contents) == 1
    metadata, tensors = read_model_file(tmp_path / "0")
    assert model_bytes(metadata, tensors) in contents


def test_a_vector_of_version_0_2_is_read_and_not_taken_for_a_model(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    path.write_bytes(bytes(safetensors.torch.save({"model": torch.arange(3.0)})))
    assert read_vector(path).tolist() == [0, 1, 2]
    with pytest.raises(InputError, match=r"0\.2 or older, without names; run the experiment again"):
        load_model(path)


def test_certificates_are_those_of_the_clients(tmp_path: Path) -> None:
    save(tmp_path / "m", "logistic")
    found = load_model(tmp_path / "m").certificates
    assert (found["elm"].certified, found["elm"].delta) == (3.5, 1e-6)
    assert "ε = 3.5" in found["elm"].sentence
    assert "It is an example." in found["elm"].sentence
    assert "Nothing is guaranteed" in found["oak"].sentence


def test_secret_draws_are_not_forgotten() -> None:
    from polyeps.accounting.certificate import SECRET_COHORT

    model = MODELS["mlp"](**SMALL)
    values = described(model, "mlp", SMALL)
    values["guarantee"] = {**values["guarantee"], "conditions": [SECRET_COHORT]}
    values["clients"] = {
        "elm": {"epsilon": 4.0, "spent": 3.5},
        "oak": {"epsilon": 4, "spent": 3, "spent_if_draws_known": 9},
    }
    found = ModelMetadata.model_validate(values)
    assert found.clients
    assert "against those who know, the server that draws among them, nothing is guaranteed" in (
        found.certificate(found.clients["elm"]).sentence
    )
    assert "ε = 9" in found.certificate(found.clients["oak"]).sentence


def test_without_clients_nothing_of_them_is_left(tmp_path: Path) -> None:
    save(tmp_path / "m", "logistic")
    metadata, tensors = read_model_file(tmp_path / "m")
    content = model_bytes(metadata.without_clients(), tensors)
    assert b"elm" in model_bytes(metadata, tensors)
    assert b"elm" not in content
    (tmp_path / "other").write_bytes(content)
    again = load_model(tmp_path / "other")
    assert again.certificates == {}
    assert again.metadata.withheld == "left out on request"


HOSTILE: dict[str, tuple[Any, str]] = {
    "unknown key": (lambda a: a.update(code_to_run="os"), "code_to_run: "),
    "newer": (lambda a: a.update(format=2), "has format 2, and this polyeps reads 1; install a newer polyeps"),
    "no format of ours": (lambda a: a.update(format="1.0"), "format: "),
    "unknown model": (lambda a: a["model"].update(name="resnet"), "resnet"),
    "code": (lambda a: a["model"].update(name="os:system", arguments={"shape": [3], "classes": 2}), "--trust-code"),
    "escape": (lambda a: a.update({"\x1b[2J\nall is well": 1}), r"ours:  \[2J all is well: "),
    "escape in a column": (lambda a: a.update(columns=[{"name": "\x1b[2J", "range": [2, 1]}]), r"data\.columns\."),
    "escape in a name": (lambda a: a["model"].update(name="mlp\x1b[2J"), r"model\.name"),
    "unknown argument": (lambda a: a["model"]["arguments"].update(device="cuda"), "arguments.device"),
    "other argument": (lambda a: a["model"]["arguments"].update(width=3), "mlp has no argument 'width'"),
    "not a width": (lambda a: a["model"]["arguments"].update(features=[3]), "cannot be built"),
    "huge": (lambda a: a["model"]["arguments"].update(features=1 << 39), "tensor '0.weight' is"),
    "overflowing": (lambda a: a["model"]["arguments"].update(hidden=[1 << 39] * 3), "mlp|tensor"),
    "many layers": (lambda a: a["model"]["arguments"].update(hidden=[4] * 65), "hidden"),
    "negative": (lambda a: a["model"]["arguments"].update(features=-1), "features"),
    "huge record": (lambda a: a.update(input_shape=[1 << 20, 1 << 20]), "too large"),
    "other shape": (lambda a: a.update(input_shape=[4]), "describes another model than mlp"),
    "other type": (lambda a: a.update(input_type="int64"), "takes torch.float32, not int64"),
    "no type": (lambda a: a.update(input_type="float16"), "input_type"),
    "more classes": (lambda a: a.update(classes=["a", "b", "c"]), "names 3 classes for 2"),
    "classes twice": (lambda a: a.update(classes=["a", "a"]), "the same name"),
    "an escape in a class": (lambda a: a.update(classes=["a", "\x1b[31mb"]), "cannot be shown"),
    "fewer parameters": (lambda a: a.update(parameters=["0.weight"]), "another model"),
    "other parameters": (lambda a: a.update(parameters=["0.weight", "9.bias"]), "holds no tensor '9.bias'"),
    "no certificate": (lambda a: a["guarantee"].update(unit="galaxy"), "unit"),
    "nan": (lambda a: a["clients"].update(ash={"epsilon": float("nan")}), "JSON|clients"),
    "negative budget": (lambda a: a["clients"].update(ash={"epsilon": -1}), r"clients\.ash\.epsilon"),
    "column": (lambda a: a.update(columns=[{"name": "age", "range": [2, 1]}]), "the smaller one first"),
    "two kinds": (lambda a: a.update(columns=[{"name": "age", "range": [1, 2], "categories": ["a"]}]), "exactly one"),
    "many clients": (lambda a: a.update(clients={str(i): {} for i in range(MOST_CLIENTS + 1)}), "clients"),
    "no encoder": (lambda a: a.update(encoder="os:getcwd"), "--trust-code"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_description_is_refused(tmp_path: Path, kind: str) -> None:
    change, said = HOSTILE[kind]
    path = altered(tmp_path / "m.safetensors", change)
    with pytest.raises(InputError, match=said) as problem:
        load_model(path)
    assert str(problem.value).isprintable()
    assert altered(tmp_path / "good")
    load_model(tmp_path / "good")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"0.weight": torch.zeros(4, 3)}, "holds no tensor '0.bias'"),
        ({"0.weight": torch.zeros(3, 4)}, r"'0.weight' is torch.float32 \(3, 4\), but the model it names has"),
        ({"0.weight": torch.zeros(4, 3, dtype=torch.float64)}, "torch.float64"),
        ({"9.weight": torch.zeros(1)}, "holds a tensor '9.weight'"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(tmp_path: Path, tensors: Any, said: str) -> None:
    right = {name: torch.zeros(part.shape) for name, part in MODELS["mlp"](**SMALL).slices.items()}
    held = tensors if "0.bias" in said else {**right, **tensors}
    with pytest.raises(InputError, match=said):
        load_model(altered(tmp_path / "m", tensors=held))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cut off"),
        (b"\x80\x04}q\x00.", "cut off"),
        (b"PK\x03\x04" + b"\0" * 2000, "cut off"),
        (struct.pack("<Q", 1 << 62) + b"{}", "cut off"),
        (struct.pack("<Q", 2) + b"{}", "no description"),
        (struct.pack("<Q", 9) + b"not json!", "damaged"),
        (struct.pack("<Q", 60_000) + b'{"a":' + b"[" * 59_995, "damaged"),
        (struct.pack("<Q", (1 << 25) + 1) + b" " * ((1 << 25) + 1), "more than any model of ours"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        load_model(path)


def test_a_description_that_is_no_description_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for text in ("", "[1]", "null", "{", "[" * 100_000, '{"format": 1e999}', "{" * 10 + "}" * 10):
        path.write_bytes(bytes(safetensors.torch.save({"0.weight": torch.zeros(1)}, {"polyeps": text})))
        with pytest.raises(InputError):
            load_model(path)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_model(tmp_path / "nothing.safetensors")
    with pytest.raises(InputError, match="there is no run at"):
        load_model(tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = altered(tmp_path / "m.safetensors")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]))
    with suppress(InputError):
        load_model(path)
