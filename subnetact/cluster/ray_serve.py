"""All that the cluster uses of Ray, in one place, because much of it is alpha; tested with Ray 2.60.

`SlackRouter` builds on `RequestRouter`, whose methods Ray calls by name: `choose_replicas`,
`on_request_routed` and `on_request_completed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subnetact.errors import MissingExtra

__all__ = [
    "FULL",
    "LOST",
    "RequestRouter",
    "autoscaling",
    "check_version",
    "ingress",
    "ray",
    "refuse",
    "routed_by",
    "serve",
]

TESTED = "2.60."
NEEDED = "the cluster needs Ray Serve 2.60; pip install 'subnetact[ray]'"

try:
    import ray
    from ray import serve
    from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
    from ray.serve.request_router import RequestRouter
except ImportError as error:
    raise MissingExtra(f"{NEEDED} ({error})") from error


LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)
"""The errors that say that a replica is lost."""
FULL = (BackPressureError, DeploymentUnavailableError)
"""The errors that say that no replica can take a request now."""


def check_version() -> None:
    """Refuse versions of Ray whose alpha classes may differ.

    Raises:
        MissingExtra: another version is installed.
    """
    if not ray.__version__.startswith(TESTED):
        raise MissingExtra(f"{NEEDED} (installed is {ray.__version__})")


def routed_by(router: str | None, report_s: float) -> Any:
    """Return the configuration of the router of a deployment.

    Args:
        router: `PKG.MOD.CLASS` of the router. If None, Ray's own, power of two choices.
        report_s: time between two reports of a replica, in s.
    """
    chosen = {} if router is None else {"request_router_class": router}
    return RequestRouterConfig(request_routing_stats_period_s=report_s, **chosen)


def ingress(front: type) -> Any:
    """Return a deployment class that answers HTTP.

    Args:
        front: a class whose method `__serve_build_asgi_app__` returns the application, made in the replica.
    """
    return serve.ingress()(front)


def autoscaling(policy: type, settings: dict[str, Any], least: int, most: int) -> Any:
    """Return the configuration of autoscaling by a policy of ours.

    Args:
        policy: class of the policy; its objects are called with Ray's `AutoscalingContext`.
        settings: arguments of the class; plain values.
        least: least number of replicas.
        most: greatest number of replicas.
    """
    return AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        metrics_interval_s=1.0,
        look_back_period_s=2.0,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function=policy, policy_kwargs=settings),
    )


def refuse(router: RequestRouter, pending: Any, error: Exception) -> None:
    """Give a request its error in place of a replica.

    Args:
        router: the router that holds the request.
        pending: the request.
        error: raised to the caller.
    """
    if not pending.future.done():
        pending.future.set_exception(error)
        forget: Callable[[Any], None] = router._remove_pending_request_from_indices
        forget(pending)
