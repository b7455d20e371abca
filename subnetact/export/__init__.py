"""Export: files that run a supernet's registered subnets outside an `Engine`.

* `torchscript`: `to_torchscript` writes one file that runs any registered subnet, for C++ and Python.
  `elastic_graph` records the network with the subnet as an argument; `scripted_subnets` is the file's module.
* `pt2`: `to_pt2` writes one file with compiled programs of all subnets over one copy of the weights, for C++
  and Python.
* `onnx`: `to_onnx` writes one self-contained ONNX file per subnet.
* `exported_engine`: `load_exported` runs what these two write.
* `executorch`: `to_executorch` writes one ExecuTorch program, for phones, with a method per subnet.
* `triton`: `to_triton` writes a model for NVIDIA Triton Inference Server; `triton_model` is its `model.py`.
* `subnet_program`: what they share; it traces one subnet, compares, and writes the index of a folder.
  `input_axes` says which sizes inputs may have.
"""

from subnetact.export.executorch import to_executorch
from subnetact.export.exported_engine import ExportedEngine, load_exported
from subnetact.export.onnx import to_onnx
from subnetact.export.pt2 import to_pt2
from subnetact.export.torchscript import to_torchscript
from subnetact.export.triton import to_triton

__all__ = [
    "ExportedEngine",
    "load_exported",
    "to_executorch",
    "to_onnx",
    "to_pt2",
    "to_torchscript",
    "to_triton",
]
