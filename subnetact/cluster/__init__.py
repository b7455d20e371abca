"""The same service over processes and machines: replicas on Ray Serve behind the HTTP interface of `serve`.

* `build_app` makes an application for `ray.serve.run`, `serve build` and KubeRay.
* `python -m subnetact.cluster` starts replicas from one command.

`build_app` is imported on first use, because Ray takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from subnetact.cluster.autoscaler import Autoscaling

if TYPE_CHECKING:
    from subnetact.cluster.application import build_app

__all__ = ["Autoscaling", "build_app"]


def __getattr__(name: str) -> Any:
    if name != "build_app":
        raise AttributeError(f"module 'subnetact.cluster' has no attribute {name!r}")
    from subnetact.cluster.application import build_app

    return build_app
