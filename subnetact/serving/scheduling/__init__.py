"""The steps that the live batcher and the simulator share: one queue, one context, one way to form a batch.

* `queue`: the earliest-deadline-first queue; equal deadlines leave in order of arrival.
* `context`: what a policy sees, and the protocol that a policy implements.
* `dispatch`: removes expired requests, asks the policy and forms the batch.
* `priority`: which requests expire first when not every deadline can be met.
* `floors`: minimum accuracies, as the accuracies of the subnets that meet them.
* `frontier`: Pareto-optimal subnets and concave hulls of a latency table.
* `checks`: validation of settings.
"""
