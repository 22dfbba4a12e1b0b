"""`polyeps export`: write a trained model for plain PyTorch, for ONNX runtimes, or as a file to give away."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from polyeps.cli.output import Json, check_new, print_json, progress, remark, write_new
from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps.experiment.saved_model import SavedModel

ModelPath = Annotated[Path, typer.Argument(help="A model file, or the folder of a run.")]
MethodName = Annotated[str | None, typer.Option(help="Of a run's folder: the method whose model is meant.")]
ModelSeed = Annotated[int | None, typer.Option(help="Of a run's folder: the seed of the model.")]
TrustModelCode = Annotated[
    bool, typer.Option("--trust-code", help='Run the code of a model or encoder named "module:name".')
]
CodeFolder = Annotated[
    Path | None, typer.Option("--code", help="Folder of that code; by default the run's, or the current folder.")
]


def export(
    model: ModelPath,
    kind: Annotated[
        Literal["torch", "onnx", "safetensors"], typer.Option("--format", help="Format to write.")
    ] = "safetensors",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; the model's name here by default.")
    ] = None,
    method: MethodName = None,
    seed: ModelSeed = None,
    without_clients: Annotated[
        bool, typer.Option("--without-clients", help="Leave out clients' names, budgets and spending.")
    ] = False,
    trust_code: TrustModelCode = False,
    code: CodeFolder = None,
    as_json: Json = False,
) -> None:
    """Write a trained model in another format: torch (a state_dict), onnx, or safetensors with its description."""
    from polyeps.experiment.model_export import SUFFIX, as_onnx, as_safetensors, as_torch
    from polyeps.experiment.saved_model import find_model
    from polyeps.model_files import read_model_file

    path = find_model(model, method, seed)
    # A method's name may hold dots.
    target = output or Path(path.name.removesuffix(".safetensors") + SUFFIX[kind])
    check_new(target)
    metadata, tensors = read_model_file(path)
    error, clients = None, not without_clients
    if kind == "onnx":
        with progress("exporting to ONNX"):
            content, error = as_onnx(open_model(path, trust_code, code), clients)
    else:
        content = as_torch(tensors) if kind == "torch" else as_safetensors(metadata, tensors, clients)
    write_new(target, content)
    held = clients and metadata.clients is not None and kind != "torch"
    remark(
        f"wrote {target}" + (f", with the names and budgets of {len(metadata.clients or ())} clients" if held else "")
    )
    if as_json:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        found = {"model": str(path), "format": kind, "file": str(target), "bytes": len(content), "tensors": shapes}
        print_json({**found, "classes": metadata.classes, "clients": held, "largest_error": error})


def open_model(path: Path, trust_code: bool, code: Path | None) -> SavedModel:
    """Load a model; its code comes from a folder that the user trusts."""
    from polyeps.experiment.saved_model import code_folder_of, load_model

    if code is not None and not trust_code:
        raise InputError(f"--code {code} names a folder of code; read it, then add --trust-code to run it")
    folder = (code or code_folder_of(path) or Path.cwd()) if trust_code else None
    return load_model(path, code_folder=folder)
