"""Moved."""

from subnetact.serving.scheduling.context import RunningBatch as RunningBatch

__all__ = ["RunningBatch"]
