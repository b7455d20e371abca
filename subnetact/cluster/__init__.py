"""The same service over processes and machines: replicas on Ray Serve behind the HTTP interface of `serve`.

* `build_app` makes an application for `ray.serve.run`, `serve build` and KubeRay.
* `app_from` makes it from texts: `serve run subnetact.cluster:app_from bundle=bundle/ replicas=2`.

Both are imported on first use, because Ray takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from subnetact.cluster.autoscaler import Autoscaling

if TYPE_CHECKING:
    from subnetact.cluster.application import app_from, build_app

__all__ = ["Autoscaling", "app_from", "build_app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'subnetact.cluster' has no attribute {name!r}")
    from subnetact.cluster import application

    return getattr(application, name)
