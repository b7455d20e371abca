"""The engine: registered subnets of a supernet, ready to run on one device.

Which file answers which question:

- `engine.py`: how subnets are registered, run, pinned, saved and loaded (`Engine`).
- `config.py`: what an engine consists of (`EngineConfig`).
- `fusion_plan.py`: which subnets are fused; `fused_program.py`: how a fused program is made.
- `runtime_program.py`: subnets in OpenVINO and ONNX Runtime; `subnet_program.py`, `onnx_graph.py`,
  `input_axes.py`: how a subnet becomes a program of `torch.export` and ONNX, for which sizes of inputs.
- `finite_values.py`: whether a program may use operations that turn NaN into a number.
- `graph_function.py`: a traced graph as a Python function, which is what programs and blocks call.
- `budget.py`: the memory limit of fused programs and CUDA graphs (`memory_budget_mb`).
- `packed_conv.py`: the convolutions of programs with weights of their own and without.
- `packed_linear.py`: the linear layers of fused programs.
- `int8_conv.py`: the convolutions of fused programs of int8 subnets.
- `cuda_graphs.py`, `compiler.py`: CUDA graphs; torch.compile without its silent fallback.
- `blocks.py`: a subnet as parts that run one after the other.
- `bundle.py`: what an engine adds to a bundle.
- `inputs.py`, `input_shapes.py`: checking, stacking and padding inputs; splitting outputs.
- `ready_subnet.py`, `stats.py`: what `Engine.ready` and `Engine.stats` return.
"""

from subnetact.engine.config import EngineConfig
from subnetact.engine.engine import Engine
from subnetact.engine.fusion_plan import PinResult
from subnetact.engine.ready_subnet import ReadySubnet
from subnetact.engine.stats import EngineStats

__all__ = ["Engine", "EngineConfig", "EngineStats", "PinResult", "ReadySubnet"]
