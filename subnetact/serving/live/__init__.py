"""The live batcher: requests with deadlines come in, and batches run on the subnets that a policy chooses.

* `batcher`: `Batcher`, with all its settings; the place to start.
* `requests`: what goes in and comes out: `Runner`, `Request`, `Answer`, and how answers reach their clients.
* `core`: the state and every transition of it under one lock; `pending_requests`, `batch_job`, `outcomes` and
  `worker_states` are its parts, and `failures` has the errors that requests end with.
* `workers`: the threads; `interpreter_exit` lets the interpreter end while they compute.
* `corrections`: the latencies that are learned while serving; `learner` gives them to the policy.
* `stats`, `histograms`, `prometheus`, `decision_log`: what can be observed.
"""
