"""The same service over processes and machines: replicas on Ray Serve behind the HTTP interface of `serve`.

* `build_app` makes an application for `ray.serve.run`, `serve build` and KubeRay.
* `python -m subnetact.cluster` starts replicas from one command.

The names are imported on first use, because Ray takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subnetact.cluster.application import build_app
    from subnetact.cluster.autoscaler import Autoscaling

__all__ = ["Autoscaling", "build_app"]

_HOME = {"Autoscaling": "autoscaler", "build_app": "application"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'subnetact.cluster' has no attribute {name!r}")
    return getattr(import_module(f"subnetact.cluster.{_HOME[name]}"), name)
