"""How many workers a service needs, and which requests share workers.

* `planner`: `plan`, the fewest workers that meet a target on a trace.
* `tuner`: `Tuner`, which adds and removes workers while the service runs.
* `herd`: `group_streams`, which assigns streams of requests to groups of workers.
"""
