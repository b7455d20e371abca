"""Export: files that run a supernet's registered subnets outside an `Engine`.

* `to_torchscript` (folder `torchscript`) writes one file that runs any registered subnet, for C++ and Python.
* `to_exported_programs` and `load_exported` (folder `programs`) write and run one `torch.export` program or
  AOTInductor package per subnet, over one file of weights.
* `to_onnx` (module `onnx`) writes one self-contained ONNX file per subnet.
* `to_triton` (folder `triton`) writes a model for NVIDIA Triton Inference Server.
* `manifest` is the list of files, with checksums, that every exported folder contains.
"""

from subnetact.export.onnx import to_onnx
from subnetact.export.programs.exported_engine import ExportedEngine, load_exported
from subnetact.export.programs.exporter import to_exported_programs
from subnetact.export.torchscript.exporter import to_torchscript
from subnetact.export.triton.exporter import to_triton

__all__ = [
    "ExportedEngine",
    "load_exported",
    "to_exported_programs",
    "to_onnx",
    "to_torchscript",
    "to_triton",
]
