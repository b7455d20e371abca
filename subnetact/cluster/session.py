"""A server in this process and its replicas on Ray: what `python -m subnetact.cluster` runs."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from typing import Any

from subnetact.cluster.application import Autoscaling, ReplicaCount, answerer, least_and_most, replicas_of
from subnetact.cluster.ray_serve import ray, serve
from subnetact.errors import ServeError
from subnetact.serve.source import Source

__all__ = ["Autoscaling", "RaySession"]

APPLICATION = "subnetact"
STORE_BYTES = 256 * 2**20


class RaySession:
    """Starts replicas on Ray, on this machine or on a cluster, and ends them.

    The HTTP server stays in this process, with its limits on connections, and calls the replicas directly;
    Ray's HTTP proxy is not started.

    Args:
        source: what to serve.
        replicas: number of replicas, unless `autoscaling` is given.
        autoscaling: how the number of replicas follows the load.
        queue: `replicas` or `central`.
        router: `slack` or `ray`.
        address: address of a running cluster. If None, Ray is started on this machine and ended by `close`.
        report_s: time between two reports of a replica, in s.
        cpus: CPU cores that Ray reserves per replica. If None, the CPU threads of its workers.

    Attributes:
        engine: the engine, loaded in this process too.
        answerer: what the server has in place of a batcher.

    Raises:
        ServeError: the replicas do not start.
        SubnetActError: the source cannot be served.
    """

    def __init__(
        self,
        source: Source,
        replicas: int,
        *,
        autoscaling: Autoscaling | None = None,
        queue: str = "replicas",
        router: str = "slack",
        address: str | None = None,
        report_s: float = 0.2,
        cpus: float | None = None,
    ) -> None:
        self._own = address is None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count: ReplicaCount | None = None
        try:
            source = self._on_disk(source).pinned()
            app = replicas_of(source, replicas, autoscaling, queue, router, cpus, report_s)
            self.engine = source.engine(mapped=True)
            least, most = least_and_most(replicas, autoscaling)
            self._start(address, most * (cpus or source.workers * source.threads_per_worker))
            try:
                handle = serve.run(app, name=APPLICATION, route_prefix=None)
            except RuntimeError as error:
                raise ServeError(f"backend: the replicas do not start on Ray; {error}") from error
            self._count = ReplicaCount(APPLICATION, least)
            self.answerer = answerer(handle, source, self.engine, queue, least, self._count)
        except BaseException:
            self.close()
            raise

    def _on_disk(self, source: Source) -> Source:
        """Return the source with a bundle on the disk that has a latency table: replicas load it."""
        if source.bundle is not None and (source.table is not None or source.engine(mapped=True).tables):
            return source
        engine = source.engine()
        engine.tables["scheduler"] = source.latency_table(engine)
        self._folder = tempfile.TemporaryDirectory(prefix="subnetact-")
        folder = os.path.join(self._folder.name, os.path.basename(source.bundle or "digits"))
        engine.save(folder)
        return replace(source, bundle=folder, table=None)

    def _start(self, address: str | None, cpus: float) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if address is None:
                ray.init(
                    "local",
                    num_cpus=int(cpus) + 1,
                    include_dashboard=False,
                    object_store_memory=STORE_BYTES,
                    **quiet,
                )
            else:
                ray.init(address, **quiet)
        except ConnectionError as error:
            raise ServeError(f"backend: no Ray cluster answers at {address}; {error}") from error
        serve.start(proxy_location="Disabled")

    def close(self) -> None:
        """End the replicas, and Ray if this object started it. A second call does nothing."""
        if self._count is not None:
            self._count.close()
        if ray.is_initialized():
            with suppress(Exception):  # whatever of Ray has ended already
                serve.shutdown() if self._own else serve.delete(APPLICATION)
            ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
