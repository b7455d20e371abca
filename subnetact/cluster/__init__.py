"""The same service over processes and machines: replicas on Ray Serve behind the HTTP interface of `serve`.

* `build_app` makes an application for `ray.serve.run`, `serve build` and KubeRay.
* `python -m subnetact.serve --backend ray` starts replicas from one command.
* `SlackRouter` sends every request to the replica that is expected to answer first.
"""

from __future__ import annotations

from typing import Any

from subnetact.cluster.autoscaler import AccuracyFirst
from subnetact.errors import MissingExtra

__all__ = ["AccuracyFirst", "Autoscaling", "SlackRouter", "build_app"]

try:
    from subnetact.cluster.application import Autoscaling, build_app
    from subnetact.cluster.slack_router import SlackRouter
except ImportError as error:
    _missing = str(error)

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise MissingExtra(f"the cluster needs Ray Serve ({_missing}); pip install 'subnetact[ray]'")
        raise AttributeError(f"module 'subnetact.cluster' has no attribute {name!r}")
