"""Pipelines: stages behind each other under end-to-end deadlines, as in InferLine.

* `pipeline`: `Pipeline`, which serves stages (`stage`) live, one batcher per stage.
* `graph`: the graph of the stages, and how a request's time is split over them.
* `model`: what planning knows of a pipeline, and its simulation.
* `planner`: workers, batch sizes and hardware at least cost.
"""
