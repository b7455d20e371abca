"""Export: files that run a supernet's registered subnets outside an `Engine`.

* `to_torchscript` (folder `torchscript`) writes one file that runs any registered subnet, for C++ and Python.
* `to_exported_programs` and `load_exported` (folder `programs`) write and run one `torch.export` program or
  AOTInductor package per subnet, over one file of weights.
* `to_onnx` (module `onnx`) writes one self-contained ONNX file per subnet.
* `to_triton` (folder `triton`) writes a model for NVIDIA Triton Inference Server.
* `manifest` is the list of files, with checksums, that every exported folder contains.

Names are imported on first use, so that importing the package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subnetact.export.onnx import to_onnx
    from subnetact.export.programs.exported_engine import ExportedEngine, load_exported
    from subnetact.export.programs.exporter import to_exported_programs
    from subnetact.export.torchscript.exporter import to_torchscript
    from subnetact.export.triton.exporter import to_triton

_HOME = {
    "ExportedEngine": "programs.exported_engine",
    "load_exported": "programs.exported_engine",
    "to_exported_programs": "programs.exporter",
    "to_onnx": "onnx",
    "to_torchscript": "torchscript.exporter",
    "to_triton": "triton.exporter",
}

__all__ = [
    "ExportedEngine",
    "load_exported",
    "to_exported_programs",
    "to_onnx",
    "to_torchscript",
    "to_triton",
]

if not TYPE_CHECKING:  # a checker that saw this would take any misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'subnetact.export' has no attribute {name!r}")
        value = getattr(import_module(f"subnetact.export.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
