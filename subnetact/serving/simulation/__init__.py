"""Discrete-event simulation of scheduling policies, traces of arrivals, bounds and figures.

* `simulator`: `simulate`, with `scenario` (its validated input), `event_loop`, `preemptive_loop` (for
  policies that preempt) and `result` (what is counted).
* `traces`: synthetic arrival processes; `datasets`: recorded traces and SuperServe's latency table.
* `fluid`, `optimum`: upper bounds on what any policy can reach.
* `replay`: the arrivals of a live batcher's decision log.
* `cli`: the command `python -m subnetact.simulate`.
"""
