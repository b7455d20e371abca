"""Serve any subnet of a trained supernet in place, from one copy of the weights.

Public names are imported on first use, so that importing the package (and the torch-free
`subnetact.serving`) is quick and initialises nothing.
"""

from importlib import import_module
from typing import Any

from subnetact._version import __version__

_HOME = {
    "Axis": "space",
    "Batcher": "serving.batcher",
    "Engine": "engine",
    "Fixed": "serving.policies",
    "LatencyTable": "latency",
    "NormTable": "norm_table",
    "SlackFit": "serving.policies",
    "SubnetSpace": "space",
    "SubnetSpec": "spec",
    "Supernet": "supernet",
    "calibrate": "calibration",
    "errors": "",
    "insert_": "insert",
    "pareto_front": "pareto",
    "profile_latency": "profile",
    "search": "nas",
    "simulate": "serving.simulator",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'subnetact' has no attribute {name!r}")
    if not _HOME[name]:
        return import_module(f"subnetact.{name}")
    value = getattr(import_module(f"subnetact.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
