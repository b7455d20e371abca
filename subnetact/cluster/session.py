"""A server in this process and its replicas on Ray: what `python -m subnetact.cluster` runs."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace

from subnetact.cluster.application import ReplicaCount, client_of, replicas_of
from subnetact.cluster.autoscaler import Autoscaling
from subnetact.cluster.client import ReplicaClient
from subnetact.cluster.ray_serve import ray, serve
from subnetact.engine.engine import Engine
from subnetact.errors import ServeError
from subnetact.serve.source import Source

__all__ = ["open_replicas"]

APPLICATION = "subnetact"
STORE_BYTES = 256 * 2**20


def open_replicas(
    source: Source,
    replicas: int,
    stack: ExitStack,
    autoscaling: Autoscaling | None = None,
    address: str | None = None,
) -> tuple[Engine, ReplicaClient]:
    """Start replicas on Ray, on the cluster at `address` or else on this machine, until the stack is closed.

    Return the engine, loaded here too, and what the server has in place of a batcher. The HTTP server stays
    in this process, with its limits on connections, and calls the replicas; Ray's proxy is not started.
    """
    source = _on_disk(source, stack).pinned()
    app = replicas_of(source, replicas, autoscaling, None)
    engine = source.engine(mapped=True)
    most = replicas if autoscaling is None else autoscaling.most
    stack.callback(_end, address)
    _start(address, most * source.workers * source.threads_per_worker)
    try:
        handle = serve.run(app, name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise ServeError(f"backend: the replicas do not start on Ray; {error}") from error
    count = ReplicaCount(APPLICATION, replicas)
    stack.callback(count.close)
    return engine, client_of(handle, source, engine, count)


def _on_disk(source: Source, stack: ExitStack) -> Source:
    """Return the source with a bundle on the disk that has a latency table: replicas load it."""
    if source.bundle is not None and (source.table is not None or source.engine(mapped=True).tables):
        return source
    engine = source.engine()
    engine.tables["scheduler"] = source.latency_table(engine)
    parent = stack.enter_context(tempfile.TemporaryDirectory(prefix="subnetact-"))
    folder = os.path.join(parent, os.path.basename(source.bundle or "digits"))
    engine.save(folder)
    return replace(source, bundle=folder, table=None)


def _start(address: str | None, cpus: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = {"num_cpus": cpus + 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        ray.init(address or "local", **quiet, **(own if address is None else {}))
    except ConnectionError as error:
        raise ServeError(f"backend: no Ray cluster answers at {address}; {error}") from error
    serve.start(proxy_location="Disabled")


def _end(address: str | None) -> None:
    if ray.is_initialized():
        with suppress(Exception):  # whatever of Ray has ended already
            serve.shutdown() if address is None else serve.delete(APPLICATION)
        ray.shutdown()
