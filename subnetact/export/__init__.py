"""Export: files that run a supernet's registered subnets without this package.

Names are imported on first use, so that importing the package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subnetact.export.torchscript import to_torchscript

_HOME = {
    "to_torchscript": "torchscript",
}

__all__ = ["to_torchscript"]

if not TYPE_CHECKING:  # a checker that saw this would take any misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'subnetact.export' has no attribute {name!r}")
        value = getattr(import_module(f"subnetact.export.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
