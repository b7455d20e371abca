"""Policies and planners of papers that the library does not need, and the optimum of small instances.

* `coarse`: switching by loading models (SuperServe, Fig. 1); `flex`: FLEX of Shepherd.
* `veltair`: co-runners that are estimated from latencies (VELTAIR).
* `optimum`: the exact optimum of SuperServe's zero-one program, with which `scheduling.py` compares policies.
* `stage_tuner`, `coarse_pipeline`: stages that are scaled, and pipelines replicated as a whole (InferLine).

`papers` in `results/trials.json` has what their experiments said.
"""
