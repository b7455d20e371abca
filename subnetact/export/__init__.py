"""Export: files that run a supernet's registered subnets outside an `Engine`.

* `torchscript`: `to_torchscript` writes one file that runs any registered subnet, for C++ and Python.
  `elastic_graph` records the network with the subnet as an argument; `scripted_subnets` is the file's module.
* `programs`: `to_exported_programs` writes one `torch.export` program or AOTInductor package per subnet, over
  one file of weights; `exported_engine`: `load_exported` runs them.
* `onnx`: `to_onnx` writes one self-contained ONNX file per subnet.
* `triton`: `to_triton` writes a model for NVIDIA Triton Inference Server; `triton_model` is its `model.py`.
* `subnet_program`: what they share; it traces one subnet, compares, and writes the index of a folder.
"""

from subnetact.export.exported_engine import ExportedEngine, load_exported
from subnetact.export.onnx import to_onnx
from subnetact.export.programs import to_exported_programs
from subnetact.export.torchscript import to_torchscript
from subnetact.export.triton import to_triton

__all__ = [
    "ExportedEngine",
    "load_exported",
    "to_exported_programs",
    "to_onnx",
    "to_torchscript",
    "to_triton",
]
