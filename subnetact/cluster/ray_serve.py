"""All that the cluster uses of Ray, in one place, because some of it is alpha; tested with Ray 2.60 alone."""

from __future__ import annotations

from subnetact.errors import MissingExtra, extra_needed

__all__ = ["FULL", "LOST", "AutoscalingConfig", "AutoscalingPolicy", "ray", "serve"]

NEEDED = "the cluster needs Ray Serve 2.60; pip install 'subnetact[ray]'"

with extra_needed(NEEDED):
    import ray
    from ray import serve
    from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
if not ray.__version__.startswith("2.60."):
    raise MissingExtra(f"{NEEDED} (installed is {ray.__version__})")

LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)
"""The errors that say that a replica is lost."""
FULL = (BackPressureError, DeploymentUnavailableError)
"""The errors that say that no replica can take a request now."""
