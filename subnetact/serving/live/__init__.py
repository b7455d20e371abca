"""The live batcher: the lock, the clock and the threads around the scheduler.

* `batcher`: `Batcher`, which users open; `runner`: what runs its batches; `answers`: what its clients get.
* `driver`: the threads, and how requests enter and outcomes leave; `turns`: which of several drivers is next.
* `learner`, `corrections`: how long batches really take here, which the policy plans with.
* `stats`, `histograms`, `prometheus`, `decision_log`: what can be seen from outside.
"""
