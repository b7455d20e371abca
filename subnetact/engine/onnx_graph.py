"""onnx_graph: one subnet as an ONNX model, for files and for the runtimes that engines use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from subnetact.engine.input_axes import InputAxes
from subnetact.engine.subnet_program import SubnetProgram, quiet
from subnetact.errors import MissingExtra
from subnetact.supernet.batches import call_with


def require_onnx() -> None:
    """Refuse to go on without the packages that write ONNX."""
    missing = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if missing:
        raise MissingExtra(f"ONNX export needs {' and '.join(missing)}: pip install 'subnetact[onnx]'")


def onnx_graph(subnet: SubnetProgram, axes: InputAxes) -> Any:
    """Return the `torch.onnx.ONNXProgram` of a subnet, for all sizes that the axes may have."""
    program = subnet.traced(axes)
    traced = program.module()
    subnet.require_equal(traced, "torch.export")
    inputs = _names("input", subnet.x)
    opset = import_module("onnxscript").opset18

    def int_mm(a: Any, b: Any) -> Any:
        return opset.MatMulInteger(a, b)  # dynamically quantised, without a zero point

    with quiet(), subnet.blamed("torch.onnx"):
        return torch.onnx.export(
            program,
            (),
            input_names=inputs,
            dynamic_shapes=dict(zip(inputs, axes.dims(), strict=True)),  # what axes are called
            output_names=_names("output", call_with(traced, subnet.x)),
            dynamo=True,
            verbose=False,
            custom_translation_table={torch.ops.aten._int_mm.default: int_mm},
        )


def _names(kind: str, value: Any) -> list[str]:
    """Return the names of the tensors of an input or an output: its keys, or numbers behind its `kind`."""
    if isinstance(value, Tensor):
        return [kind]
    keys = value if isinstance(value, Mapping) and (kind == "input" or "input" not in value) else {}
    if keys and all(isinstance(part, Tensor) for part in keys.values()):
        return [str(name) for name in keys]
    tensors = [part for part in tree_leaves(value) if isinstance(part, Tensor)]
    return [f"{kind}_{i}" for i in range(len(tensors))]
