"""Policies and planners of papers that the library does not need, and the optimum of small instances.

* `flex`: FLEX of Shepherd, a policy that preempts.
* `optimum`: the exact optimum of SuperServe's zero-one program, with which `scheduling.py` compares policies.
* `coarse_pipeline`: pipelines replicated as a whole (InferLine).

`papers` in `results/trials.json` has what their experiments said, and which commit has those of others.
"""
