"""Write modules of common layers as ONNX graphs, one operator a layer.

All built-in models consist of these layers. torch's own exporter takes seconds and unrolls an LSTM step by step; it is
for modules that are not known here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyeps.engine.recurrent import LastState

_OPSET, _IR_VERSION = 17, 8  # read by every runtime since 2022
_PLAIN: dict[type[nn.Module], str] = {nn.ReLU: "Relu", nn.Tanh: "Tanh", nn.Sigmoid: "Sigmoid"}
_TYPES = {torch.float32: "FLOAT", torch.int64: "INT64"}
_GATES = (0, 3, 1, 2)  # torch has input, forget, cell, output; ONNX input, output, forget, cell


class _Unknown(Exception):  # noqa: N818
    """A layer of which there is no operator here."""


def graph_of(module: nn.Module, shape: tuple[int, ...], kind: torch.dtype, classes: int) -> Any:
    """Return the ONNX model of a module and its probabilities; None where it has a layer that is not known here."""
    import onnx
    from onnx import helper

    if type(module) is not nn.Sequential or kind not in _TYPES:
        return None
    graph = _Graph()
    try:
        found = "features"
        for layer in module:
            found = graph.layer(layer, found)
    except _Unknown:
        return None
    last = module[-1]
    if isinstance(last, nn.Linear) and last.out_features == 1:
        against = graph.node("Sigmoid", graph.node("Neg", found))
        found = graph.node("Concat", against, graph.node("Sigmoid", found), axis=1)
    else:
        found = graph.node("Softmax", found, axis=-1)
    graph.nodes[-1].output[0] = "probabilities"
    made = helper.make_graph(
        graph.nodes,
        "model",
        [helper.make_tensor_value_info("features", getattr(onnx.TensorProto, _TYPES[kind]), ["records", *shape])],
        [helper.make_tensor_value_info("probabilities", onnx.TensorProto.FLOAT, ["records", classes])],
        graph.constants,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)


class _Graph:
    """Operators and constants, in the order of the module's layers."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def node(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add an operator and return the name of its last output."""
        from onnx import helper

        names = [f"{operator.lower()}_{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names[-1]

    def constant(self, values: Tensor) -> str:
        from onnx import numpy_helper

        name = f"constant_{len(self.constants)}"
        array = np.ascontiguousarray(values.detach().cpu().numpy())
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def layer(self, layer: nn.Module, rows: str) -> str:
        """Add a layer and return the name of its output."""
        kind = type(layer)
        if kind in _PLAIN:
            return self.node(_PLAIN[kind], rows)
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            return self.node("Flatten", rows, axis=1)
        if type(layer) is nn.Linear:
            return self.node("Gemm", rows, *self._weights(layer), transB=1)
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            return self.node(
                "Conv",
                rows,
                *self._weights(layer),
                kernel_shape=layer.kernel_size,
                strides=layer.stride,
                pads=(*layer.padding, *layer.padding),
                dilations=layer.dilation,
                group=layer.groups,
            )
        if type(layer) is nn.MaxPool2d and not layer.return_indices and not layer.ceil_mode:
            return self.node(
                "MaxPool",
                rows,
                kernel_shape=_pair(layer.kernel_size),
                strides=_pair(layer.stride),
                pads=_pair(layer.padding) * 2,
                dilations=_pair(layer.dilation),
            )
        if type(layer) is nn.Embedding and layer.max_norm is None:
            return self.node("Gather", self.constant(layer.weight), rows, axis=0)
        if type(layer) is LastState and not (layer.lstm.bidirectional or layer.lstm.proj_size or layer.lstm.dropout):
            return self._last_state(layer.lstm, rows)
        raise _Unknown

    def _weights(self, layer: nn.Linear | nn.Conv2d) -> list[str]:
        held = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
        return [self.constant(one) for one in held]

    def _last_state(self, lstm: nn.LSTM, rows: str) -> str:
        rows = self.node("Transpose", rows, perm=(1, 0, 2)) if lstm.batch_first else rows
        for number in range(lstm.num_layers):
            held = {name: getattr(lstm, f"{name}_l{number}") for name in ("weight_ih", "weight_hh")}
            matrices = [self.constant(_reordered(one)[None]) for one in held.values()]
            if lstm.bias:
                biases = [_reordered(getattr(lstm, f"bias_{side}_l{number}")) for side in ("ih", "hh")]
                matrices.append(self.constant(torch.cat(biases)[None]))
            last = number == lstm.num_layers - 1
            # All states (length, 1, records, hidden), then the last one (1, records, hidden).
            states = self.node("LSTM", rows, *matrices, outputs=2 if last else 1, hidden_size=lstm.hidden_size)
            rows = self.node("Squeeze", states, self.constant(torch.tensor([0 if last else 1])))
        return rows


def _reordered(weights: Tensor) -> Tensor:
    return torch.cat([weights.chunk(4)[place] for place in _GATES])


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
