"""Policies and experiments of papers that the library does not need: `python -m papers` in benchmarks.

* `coarse`: switching by loading models (SuperServe, Fig. 1); `flex`: FLEX of Shepherd.
* `veltair`: co-runners that are estimated from latencies (VELTAIR).
* `optimum`: the exact optimum of SuperServe's zero-one program on small instances.
* `stage_tuner`, `coarse_pipeline`: stages that are scaled, and pipelines replicated as a whole (InferLine).
"""
