"""The scheduling policies, and their names for command lines.

A policy decides which subnet and batch size an idle worker runs next.

* `fronts`: the best subnet within a time at a batch size, for all policies.
* `hullfit`: HullFit; `slackfit`: SlackFit; `model_switching`: ModelSwitching.
* `baselines`: Fixed, CheapestFeasible, MaxBatch and MaxAcc.
* `preemptive`: Preemptive, which lets running batches of any policy give way to urgent requests.
* `registry`: `make_policy`, and the names.
"""
