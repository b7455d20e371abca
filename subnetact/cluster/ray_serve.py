"""All that the cluster uses of Ray, in one place, because some of it is alpha; tested with Ray 2.60 alone."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import suppress
from typing import Any

from subnetact.cluster.front import Share
from subnetact.errors import MissingExtra, extra_needed
from subnetact.serve.base_app import ARRIVED

__all__ = ["AutoscalingConfig", "AutoscalingPolicy", "ray", "serve"]

NEEDED = "the cluster needs Ray Serve 2.60; pip install 'subnetact[ray]'"

with extra_needed(NEEDED):
    import ray
    from ray import serve
    from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
    from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
if not ray.__version__.startswith("2.60."):
    raise MissingExtra(f"{NEEDED} (installed is {ray.__version__})")

LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)
"""The errors that say that a replica is lost."""
FULL = (BackPressureError, DeploymentUnavailableError)
"""The errors that say that no replica can take a request now."""
SCRAPE_S = 1.0  # for the processes of a deployment to tell their counters


class ArrivalRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Ray's usual router, which runs in the proxy, and says in every request when the proxy got it."""

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        if pending_request.metadata.is_http_request and not is_retry:
            request = pickle.loads(pending_request.args[0])
            request.asgi_scope[ARRIVED] = pending_request.created_at * 1e3
            pending_request.args[0] = pickle.dumps(request)
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)


ROUTED = RequestRouterConfig(request_router_class=ArrivalRouter)


async def shares(handle: Any) -> dict[str, Share]:
    """Return what `share` of every process of a deployment returns, without those that take too long."""
    with suppress(asyncio.TimeoutError, *FULL):
        called = await asyncio.wait_for(handle.broadcast("share")._fetch_replica_results_async(), SCRAPE_S)
        waiting = (asyncio.wait_for(one.get_async(), SCRAPE_S) for one in called)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        return dict(answer for answer in answers if isinstance(answer, tuple))
    return {}


class Shared:
    """A process of Ray with a `batcher` whose counters the fronts show."""

    batcher: Any
    app: Any = None  # that answers over HTTP, in a front

    async def share(self) -> tuple[str, Share]:
        """Return the name of this process in Ray, and its counters."""
        name = serve.get_replica_context().replica_id.unique_id
        responses = {} if self.app is None else dict(self.app.responses)
        return name, Share(self.batcher.accuracy, self.batcher.stats(), responses)
