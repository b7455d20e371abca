"""The engine: registered subnets of a supernet, ready to run on one device.

Which file answers which question:

- `engine.py`: how subnets are registered, run, pinned, saved and loaded (`Engine`); `memory_budget_mb`.
- `cache.py`: the memory limit of fused programs and CUDA graphs (`ByteCache` enforces `memory_budget_mb`).
- `promotion.py`: which subnets become fused programs; `fused_program.py`: how one is made.
- `packed_conv.py`, `fast_conv.py`: the convolutions of fused programs and of views.
- `packed_linear.py`, `attention_scores.py`: the linear layers and the attention of fused programs.
- `int8_conv.py`: the convolutions of fused programs of int8 subnets.
- `cuda_graphs.py`, `compiler.py`: CUDA graphs; torch.compile without its silent fallback.
- `bundle.py`: the schema of a bundle; `origins.py`: which supernets a bundle may name.
- `inputs.py`, `outputs.py`: checking and stacking inputs; comparing and splitting outputs.
- `ready_subnet.py`, `stats.py`: what `Engine.ready` and `Engine.stats` return.
"""

from subnetact.engine.cuda_graphs import Captured, GraphBackend
from subnetact.engine.engine import Engine
from subnetact.engine.ready_subnet import ReadySubnet
from subnetact.engine.stats import EngineStats

__all__ = ["Captured", "Engine", "EngineStats", "GraphBackend", "ReadySubnet"]
