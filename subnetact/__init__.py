"""Serve any subnet of a trained supernet in place, from one copy of the weights.

Public names are imported on first use, so that importing the package (and the torch-free
`subnetact.serving`) is quick and initialises nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from subnetact import errors
from subnetact._version import __version__

if TYPE_CHECKING:
    from subnetact.calibration import calibrate
    from subnetact.engine import Engine
    from subnetact.insert import insert_
    from subnetact.latency import LatencyTable
    from subnetact.nas import search
    from subnetact.norm_table import NormTable
    from subnetact.operators import LayerSelect, SubnetNorm, WeightSlice
    from subnetact.pareto import pareto_front
    from subnetact.profile import profile_latency
    from subnetact.serving.batcher import Batcher
    from subnetact.serving.policies import Fixed, SlackFit
    from subnetact.serving.simulator import simulate
    from subnetact.space import Axis, SubnetSpace
    from subnetact.spec import SubnetSpec
    from subnetact.supernet import Supernet

_HOME = {
    "Axis": "space",
    "Batcher": "serving.batcher",
    "Engine": "engine",
    "Fixed": "serving.policies",
    "LatencyTable": "latency",
    "LayerSelect": "operators",
    "NormTable": "norm_table",
    "SlackFit": "serving.policies",
    "SubnetNorm": "operators",
    "SubnetSpace": "space",
    "SubnetSpec": "spec",
    "Supernet": "supernet",
    "WeightSlice": "operators",
    "calibrate": "calibration",
    "insert_": "insert",
    "pareto_front": "pareto",
    "profile_latency": "profile",
    "search": "nas",
    "simulate": "serving.simulator",
}

__all__ = [
    "Axis",
    "Batcher",
    "Engine",
    "Fixed",
    "LatencyTable",
    "LayerSelect",
    "NormTable",
    "SlackFit",
    "SubnetNorm",
    "SubnetSpace",
    "SubnetSpec",
    "Supernet",
    "WeightSlice",
    "__version__",
    "calibrate",
    "errors",
    "insert_",
    "pareto_front",
    "profile_latency",
    "search",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'subnetact' has no attribute {name!r}")
    value = getattr(import_module(f"subnetact.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
