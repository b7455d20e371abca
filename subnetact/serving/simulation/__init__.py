"""Discrete-event simulation of scheduling policies, traces of arrivals, and an upper bound.

* `simulator`: `simulate` and the checks of its input, with `event_loop` (around the scheduler) and `result`.
* `traces`: synthetic arrival processes; `datasets`: recorded traces and SuperServe's latency table;
  `trace_file`: the arrivals in a file of one's own.
* `fluid`: an upper bound on what any policy can reach.
* `replay`: the arrivals of a live batcher's decision log.
* `figure`: the figure of a comparison.
* `cli`: the command `python -m subnetact.simulate`.
"""
