"""Serve any subnet of a trained supernet in place, from one copy of the weights.

The public names are imported on first use, so that importing the package (and the torch-free
`subnetact.serving`) is quick and initialises nothing.

Map
---
A room imports only from the rooms above it; `python tests/rooms.py` draws this from the code.

    errors, files/                       typed errors; files: replaced as a whole, versioned, resumable; forks
    device, command                      the device in use; what all commands share
    comparison                           equal, within tolerances that have names
    spec, space                          the identity of a subnet; the search space
    operators/                           one slicing rule each: WeightSlice, ...
      base.py                              what an operator is, and how to write one
      lowered_weight.py                    how an int8 or bfloat16 weight is sliced and multiplied
    supernet/                            Supernet, NormTable; puts operators in; binds the view of one subnet
      generation.py                        whether weights have changed, and what is then made again
    insertion/                           describe, insert_: what can be elastic, and its proof
      insert.py                            the steps of insert_, and every reason to refuse a model
      key_value_cache.py                   which subnet may continue on the cache of another one
    ofa_adapters/                        published supernet families and their checkpoints
    digits                               the embedded supernet for digits
    calibration/                         calibrate: BatchNorm statistics of many subnets
    latency/                             LatencyTable: check, save, compare; Pareto sets (no torch)
    training/                            distill_: trains all subnets; sandwich_step for own loops
    elastic/                             bundles: one folder with every size, which other libraries open
      folder.py                            what a bundle stores
    engine/                              Engine: ready subnets, fused programs, CUDA graphs
      fusion_plan.py                       which subnets become fused programs
    workers/                             worker processes: one copy of the weights for all of them
    costs                                CostModel: parameters, multiply-accumulates, bytes
    nas/                                 search, scores of layers, evaluate, accuracy and latency predictors
    profile/                             profile_latency and python -m subnetact.profile
      sweep.py                             how a latency is measured
    serving/                             scheduling, policies, Batcher, simulate, pipelines (no torch)
    generation/                          Generator: tokens under deadlines, a subnet per step (transformers)
    export/                              TorchScript, AOTInductor, ONNX, ExecuTorch, Triton
    simulate                             python -m subnetact.simulate: compares policies on a trace
    serve/                               python -m subnetact.serve: a bundle over HTTP
    cluster/                             build_app: replicas of the service on Ray Serve
    __main__                             the command subnetact: all commands as one

Size
----
Lines of code, lines of docstrings, and public names per room. `python tests/rooms.py --write` updates it.

    room            code  docs  names
    errors            72    53     41
    files            545    93      0
    device           128    13      0
    command           76    10      0
    comparison        94    13      0
    spec              86    37      8
    space            357   169      6
    operators       2341   814     18
    supernet        2832   850      7
    insertion       4140   947     12
    ofa_adapters    2555   522      7
    digits           136    18      7
    calibration      684   165      1
    latency          525   280      5
    training        1221   324      5
    elastic          824   186      1
    engine          2537   696      5
    workers          562    96      0
    costs            281    72      4
    nas              879   378      8
    profile         1214   277      1
    serving         4696  1917     34
    generation      1640   500     13
    export          1002   394      7
    simulate           9     5      2
    serve           1768   369      7
    cluster          446   117      3
    __main__          17     2      0
    all            31667  9317    202

The README has a glossary of the words that are used here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from subnetact import errors
from subnetact.elastic.in_transformers import add_to_transformers

__version__ = "0.1.0"

if TYPE_CHECKING:
    from subnetact.calibration.calibrate import calibrate
    from subnetact.elastic.folder import from_pretrained
    from subnetact.engine.engine import Engine
    from subnetact.insertion.insert import describe, insert_
    from subnetact.insertion.reorder import reorder_
    from subnetact.latency.pareto import pareto_front
    from subnetact.latency.table import LatencyTable
    from subnetact.nas.evaluation import evaluate
    from subnetact.nas.search import search
    from subnetact.operators import LayerSelect, SubnetNorm, WeightSlice
    from subnetact.profile.sweep import profile_latency
    from subnetact.serving.live.batcher import Batcher
    from subnetact.serving.policies.hullfit import HullFit
    from subnetact.serving.policies.slackfit import SlackFit
    from subnetact.serving.simulation.simulator import simulate
    from subnetact.space import Axis, SubnetSpace
    from subnetact.spec import SubnetSpec
    from subnetact.supernet.supernet import Supernet

_HOME = {
    "describe": "insertion.insert",
    "from_pretrained": "elastic.folder",
    "push_bundle": "elastic.hub",  # for Supernet.push_to_hub; no public name
    "save_alone": "elastic.cut_out",  # for save_pretrained of subnets; no public name
    "save_cut_out": "elastic.cut_out",  # for Supernet.save_pretrained, as the next one; no public names
    "save_folder": "elastic.folder",
    "evaluate": "nas.evaluation",
    "Axis": "space",
    "Batcher": "serving.live.batcher",
    "Engine": "engine.engine",
    "HullFit": "serving.policies.hullfit",
    "LatencyTable": "latency.table",
    "LayerSelect": "operators",
    "SlackFit": "serving.policies.slackfit",
    "SubnetNorm": "operators",
    "SubnetSpace": "space",
    "SubnetSpec": "spec",
    "Supernet": "supernet.supernet",
    "WeightSlice": "operators",
    "calibrate": "calibration.calibrate",
    "insert_": "insertion.insert",
    "reorder_": "insertion.reorder",
    "pareto_front": "latency.pareto",
    "profile_latency": "profile.sweep",
    "search": "nas.search",
    "simulate": "serving.simulation.simulator",
}

__all__ = [
    "Axis",
    "Batcher",
    "Engine",
    "HullFit",
    "LatencyTable",
    "LayerSelect",
    "SlackFit",
    "SubnetNorm",
    "SubnetSpace",
    "SubnetSpec",
    "Supernet",
    "WeightSlice",
    "__version__",
    "calibrate",
    "describe",
    "errors",
    "evaluate",
    "from_pretrained",
    "insert_",
    "pareto_front",
    "profile_latency",
    "reorder_",
    "search",
    "simulate",
]


_PARTS = ("digits", "export", "generation", "insertion", "nas", "operators", "serve", "serving", "training")
"""Packages with names of their own, opened when they are first read: `subnetact.training.distill_`."""

if not TYPE_CHECKING:  # a checker that saw this would take any misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return import_module(f"subnetact.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'subnetact' has no attribute {name!r}")
        value = getattr(import_module(f"subnetact.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__


add_to_transformers()
