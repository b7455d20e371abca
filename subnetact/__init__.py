"""Serve any subnet of a trained supernet in place, from one copy of the weights.

Public names are imported on first use, so that importing the package (and the torch-free
`subnetact.serving`) is quick and initialises nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from subnetact import errors
from subnetact._version import __version__

if TYPE_CHECKING:
    from subnetact.accuracy_predictor import AccuracyPredictor
    from subnetact.calibration import CalibrationReport, calibrate
    from subnetact.costs import Cost, CostModel, cost
    from subnetact.engine import Engine
    from subnetact.evaluation import evaluate
    from subnetact.insert import insert_
    from subnetact.latency import LatencyTable
    from subnetact.latency_predictor import LatencyPredictor
    from subnetact.nas import Candidate, SearchResult, search
    from subnetact.norm_table import NormTable
    from subnetact.operators import LayerSelect, SubnetNorm, WeightSlice
    from subnetact.pareto import hypervolume, pareto_front
    from subnetact.serving.batcher import Answer, Batcher
    from subnetact.serving.context import Context, Policy
    from subnetact.serving.datasets import load_trace, superserve_a40
    from subnetact.serving.fluid import fluid_bound
    from subnetact.serving.optimum import exact_optimum
    from subnetact.serving.planner import plan
    from subnetact.serving.policies import (
        CheapestFeasible,
        Coarse,
        Fixed,
        Flex,
        HullFit,
        MaxAcc,
        MaxBatch,
        ModelSwitching,
        SlackFit,
        Veltair,
        make_policy,
    )
    from subnetact.serving.simulator import simulate
    from subnetact.serving.tuner import Tuner
    from subnetact.space import Axis, Slot, SubnetSpace, UsedWhen
    from subnetact.spec import SubnetSpec
    from subnetact.supernet import Supernet
    from subnetact.sweep import profile_latency

_HOME = {
    "AccuracyPredictor": "accuracy_predictor",
    "Candidate": "nas",
    "Cost": "costs",
    "CostModel": "costs",
    "LatencyPredictor": "latency_predictor",
    "SearchResult": "nas",
    "cost": "costs",
    "evaluate": "evaluation",
    "hypervolume": "pareto",
    "UsedWhen": "space",
    "Slot": "space",
    "Answer": "serving.batcher",
    "Context": "serving.context",
    "Policy": "serving.context",
    "Axis": "space",
    "Batcher": "serving.batcher",
    "CalibrationReport": "calibration",
    "CheapestFeasible": "serving.policies",
    "Coarse": "serving.policies",
    "Engine": "engine",
    "Fixed": "serving.policies",
    "Flex": "serving.policies",
    "HullFit": "serving.policies",
    "LatencyTable": "latency",
    "LayerSelect": "operators",
    "MaxAcc": "serving.policies",
    "MaxBatch": "serving.policies",
    "ModelSwitching": "serving.policies",
    "NormTable": "norm_table",
    "SlackFit": "serving.policies",
    "SubnetNorm": "operators",
    "SubnetSpace": "space",
    "SubnetSpec": "spec",
    "Supernet": "supernet",
    "Tuner": "serving.tuner",
    "Veltair": "serving.policies",
    "WeightSlice": "operators",
    "calibrate": "calibration",
    "exact_optimum": "serving.optimum",
    "fluid_bound": "serving.fluid",
    "insert_": "insert",
    "load_trace": "serving.datasets",
    "make_policy": "serving.policies",
    "pareto_front": "pareto",
    "plan": "serving.planner",
    "profile_latency": "sweep",
    "search": "nas",
    "simulate": "serving.simulator",
    "superserve_a40": "serving.datasets",
}

__all__ = [
    "AccuracyPredictor",
    "Answer",
    "Axis",
    "Batcher",
    "CalibrationReport",
    "Candidate",
    "CheapestFeasible",
    "Coarse",
    "Context",
    "Cost",
    "CostModel",
    "Engine",
    "Fixed",
    "Flex",
    "HullFit",
    "LatencyPredictor",
    "LatencyTable",
    "LayerSelect",
    "MaxAcc",
    "MaxBatch",
    "ModelSwitching",
    "NormTable",
    "Policy",
    "SearchResult",
    "SlackFit",
    "Slot",
    "SubnetNorm",
    "SubnetSpace",
    "SubnetSpec",
    "Supernet",
    "Tuner",
    "UsedWhen",
    "Veltair",
    "WeightSlice",
    "__version__",
    "calibrate",
    "cost",
    "errors",
    "evaluate",
    "exact_optimum",
    "fluid_bound",
    "hypervolume",
    "insert_",
    "load_trace",
    "make_policy",
    "pareto_front",
    "plan",
    "profile_latency",
    "search",
    "simulate",
    "superserve_a40",
]


if not TYPE_CHECKING:  # a checker that saw this would take any misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'subnetact' has no attribute {name!r}")
        value = getattr(import_module(f"subnetact.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
