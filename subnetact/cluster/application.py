"""Replicas on Ray Serve behind fronts that speak HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from subnetact.cluster.autoscaler import Autoscaling, input_ms_at_floor, replicas_needed
from subnetact.cluster.client import ReplicaClient
from subnetact.cluster.front import FrontApp
from subnetact.cluster.ray_serve import (
    FULL,
    LOST,
    ROUTED,
    AutoscalingConfig,
    AutoscalingPolicy,
    Shared,
    serve,
    shares,
)
from subnetact.cluster.replica import EngineReplica, Reply
from subnetact.engine.engine import Engine
from subnetact.errors import MissingFile, ServeError
from subnetact.files.documents import StrPath
from subnetact.serve.limits import Limits
from subnetact.serve.source import Source

COUNT_S = 1.0
BURST = 1000  # requests that may wait in Ray's proxy for a front; what it refuses is in no metric of ours


def build_app(
    bundle: StrPath | Source,
    replicas: int = 1,
    *,
    autoscaling: Autoscaling | None = None,
    fronts: int = 2,
    cpus: float | None = None,
    name: str | None = None,
    limits: Limits | None = None,
    tokens: dict[str, str] | None = None,
    allowed_hosts: Sequence[str] | None = None,
    **settings: Any,
) -> Any:
    """Make a Ray Serve application: fronts that speak HTTP, and replicas that each own an engine.

    Every replica has a deadline queue of its own, and Ray's router spreads the requests. The limits hold
    except for those of connections and of slow clients: the connections belong to Ray's HTTP proxy. Deadlines
    are times of day between processes, so the clocks of the nodes must agree.

    Args:
        bundle: folder of a saved engine with a latency table, at the same path on every node; or a `Source`.
        replicas: number of replicas, unless `autoscaling` is given.
        autoscaling: how the number of replicas follows the load.
        fronts: number of fronts; with one, requests wait seconds for its replacement in an update.
        cpus: CPU cores that Ray reserves per replica. If None, the CPU threads of its workers.
        name: name of the model in the Open Inference Protocol. If None, that of the folder.
        limits: the limits. If None, the defaults.
        tokens: the name of the client per bearer token. If None, no token is needed.
        allowed_hosts: names by which clients may address the server. If None, any name.
        settings: further attributes of `Source`, such as `policy` and `slo_ms`.

    Returns:
        The application, for `ray.serve.run` and for `serve build`.

    Raises:
        ServeError: no subnet reaches the floor of `autoscaling`.
        MissingFile: there is no bundle.
        MissingExtra: another version of Ray is installed.

    Example:
        >>> ray.serve.run(subnetact.cluster.build_app("bundle/", replicas=2, slo_ms=250.0))
    """
    source = bundle if isinstance(bundle, Source) else Source(bundle=os.path.abspath(bundle))
    source = replace(source, **settings).pinned()
    most = replicas if autoscaling is None else autoscaling.most
    front = serve.deployment(
        serve.ingress()(Front),
        name="front",
        num_replicas=fronts,
        # Fronts refuse what the replicas cannot take. They would not if requests waited in Ray's proxy.
        max_ongoing_requests=2 * most * source.max_queue,
        max_queued_requests=max(source.max_queue, BURST),
        ray_actor_options={"num_cpus": 0},
        request_router_config=ROUTED,
    )
    name = name or os.path.basename(str(source.bundle))
    interface = {"name": name, "limits": limits, "tokens": tokens, "allowed_hosts": allowed_hosts}
    return front.bind(_replicas_of(source, replicas, autoscaling, cpus), source, interface)


def app_from(args: dict[str, Any]) -> Any:
    """Make the application from a configuration file of Ray Serve, which names this function.

    `args` are the arguments of `build_app`; `autoscaling` and `limits` are objects with the attributes of
    `Autoscaling` and `Limits`. Texts, as a command line gives them, are read as JSON. Raises as `build_app`,
    and `ServeError` for an argument that is not known.

    Example:
        >>> # serve run subnetact.cluster:app_from bundle=/models/digits replicas=2
    """
    given = dict(args)
    for name, text in args.items():
        with suppress(ValueError):
            given[name] = json.loads(text) if isinstance(text, str) else text
    try:
        for name, kind in (("autoscaling", Autoscaling), ("limits", Limits)):
            if isinstance(given.get(name), dict):
                given[name] = kind(**given[name])
        return build_app(**given)
    except TypeError as error:
        raise ServeError(f"args: {error}; give arguments of subnetact.cluster.build_app") from error


def _replicas_of(source: Source, replicas: int, autoscaling: Autoscaling | None, cpus: float | None) -> Any:
    """Return the replicas as an application without HTTP; the arguments and errors are `build_app`'s."""
    if source.bundle is None or not os.path.isdir(source.bundle):
        raise MissingFile(f"bundle: {source.bundle} is no folder; give a saved engine, on every node")
    scaled: dict[str, Any] = {"num_replicas": replicas}
    input_ms = 0.0
    if autoscaling is not None:
        table = source.latency_table(source.engine(mapped=True))
        input_ms = input_ms_at_floor(table, source.slo_ms, autoscaling.accuracy_floor)
        config = AutoscalingConfig(
            min_replicas=autoscaling.least,
            max_replicas=autoscaling.most,
            metrics_interval_s=1.0,
            look_back_period_s=5.0,
            upscale_delay_s=1.0,
            downscale_delay_s=autoscaling.patience_s,
            policy=AutoscalingPolicy(policy_function=replicas_needed),
        )
        scaled = {"autoscaling_config": config}
    deployment = serve.deployment(
        Replica,
        name="replicas",
        max_ongoing_requests=source.max_queue,
        ray_actor_options={"num_cpus": source.workers * source.threads_per_worker if cpus is None else cpus},
        health_check_period_s=2.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=5.0,
        **scaled,
    )
    return deployment.bind(source, input_ms)


def client_of(handle: Any, source: Source, engine: Engine, count: ReplicaCount) -> ReplicaClient:
    """Return the client of the replicas behind Ray's handle; the engine, loaded here too, checks inputs."""

    async def call(**request: Any) -> Reply:
        response = handle.answer.remote(**request)
        try:
            return await response  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            response.cancel()
            raise

    return ReplicaClient(
        call,
        dict(enumerate(source.latency_table(engine).accuracy)),
        died=LOST,
        full=FULL,
        check=lambda x: engine.check(x, finite=True),
        replicas=count,
        max_queue=source.max_queue,
    )


class ReplicaCount:
    """How many replicas of an application run, asked for once per second in a thread."""

    def __init__(self, application: str, wanted: int = 1) -> None:
        self._application = application
        self._counts = (wanted, wanted)
        self._end = threading.Event()
        threading.Thread(target=self._watch, name="subnetact-replicas", daemon=True).start()

    def __call__(self) -> tuple[int, int]:
        """Return how many replicas run, and how many Ray wants; what was given, before it has answered."""
        return self._counts

    def close(self) -> None:
        """End the thread."""
        self._end.set()

    def _watch(self) -> None:
        while not self._end.wait(COUNT_S):
            try:
                application = serve.status().applications[self._application]
                states = application.deployments["replicas"].replica_states
            except Exception:  # Ray's controller may be restarting; the last counts stay
                continue
            counts = {str(getattr(state, "value", state)): number for state, number in states.items()}
            wanted = sum(number for state, number in counts.items() if state != "STOPPING")
            self._counts = counts.get("RUNNING", 0), wanted


class Replica(Shared, EngineReplica):
    """A replica in a process of Ray."""


class Front(Shared):
    """The HTTP interface of the application; `interface` are arguments of `subnetact.serve.build_app`."""

    def __init__(self, handle: Any, source: Source, interface: dict[str, Any]) -> None:
        engine, context = source.engine(mapped=True), serve.get_replica_context()
        fronts = serve.get_deployment_handle(context.deployment, context.app_name)
        self.batcher = client_of(handle, source, engine, ReplicaCount(context.app_name))
        gather = lambda: asyncio.gather(shares(fronts), shares(handle))  # noqa: E731
        self.app = FrontApp(gather, self.batcher, engine, slo_ms=source.slo_ms, **interface)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application; Ray calls this method after the constructor."""
        return self.app
