"""`build_app`: a Ray Serve application with the HTTP interface of `python -m subnetact.serve`."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any

from subnetact.cluster.autoscaler import AccuracyFirst, AccuracyFirstPolicy
from subnetact.cluster.central import RemoteRunner
from subnetact.cluster.client import ReplicaClient
from subnetact.cluster.ray_serve import FULL, LOST, autoscaling, check_version, ingress, routed_by, serve
from subnetact.cluster.replica import EngineReplica, Reply
from subnetact.engine.engine import Engine
from subnetact.errors import MissingFile, ServeError
from subnetact.serve.app import build_app as serve_app
from subnetact.serve.limits import Limits
from subnetact.serve.rows import Answerer
from subnetact.serve.source import Source

__all__ = ["Autoscaling", "Front", "ReplicaCount", "answerer", "app_from", "build_app", "replicas_of"]

QUEUES = ("replicas", "central")
ROUTERS = {"slack": "subnetact.cluster.slack_router.SlackRouter", "ray": None}
COUNT_S = 1.0
BATCH_S = 120.0
"""Longest time that a central queue waits for one batch, in s; its watchdog is quicker."""


@dataclass(frozen=True)
class Autoscaling:
    """How many replicas to run, by `AccuracyFirst`.

    Attributes:
        accuracy_floor: least mean accuracy of the answers, in percent.
        least: least number of replicas.
        most: greatest number of replicas.
        attainment: least share of requests that are answered in time.
        patience_s: how long both targets must be kept before a replica is removed, in s.

    Raises:
        ServeError: `least` is below 1 or above `most`.
    """

    accuracy_floor: float
    least: int = 1
    most: int = 8
    attainment: float = 0.99
    patience_s: float = 15.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ServeError(
                f"autoscaling: from {self.least} to {self.most} replicas; give at least 1, and a greatest "
                "number that is not below the least one"
            )


def least_and_most(replicas: int, autoscaling: Autoscaling | None) -> tuple[int, int]:
    """Return the least and the greatest number of replicas.

    Args:
        replicas: their number, unless `autoscaling` is given.
        autoscaling: how their number follows the load.
    """
    return (replicas, replicas) if autoscaling is None else (autoscaling.least, autoscaling.most)


def build_app(
    bundle: str | PathLike[str] | Source,
    replicas: int = 1,
    *,
    autoscaling: Autoscaling | None = None,
    queue: str = "replicas",
    router: str = "slack",
    fronts: int = 1,
    cpus: float | None = None,
    report_s: float = 0.2,
    name: str | None = None,
    limits: Limits | None = None,
    tokens: dict[str, str] | None = None,
    allowed_hosts: Sequence[str] | None = None,
    **settings: Any,
) -> Any:
    """Make a Ray Serve application: fronts that speak HTTP, and replicas that each own an engine.

    With `queue="replicas"` every replica has a deadline queue of its own, and the front sends a request to
    the one of two random replicas that holds less work. With `queue="central"` one front has the only queue,
    and idle replicas get whole batches from it. The limits hold except for those of connections and of slow
    clients: the connections belong to Ray's HTTP proxy.

    Args:
        bundle: folder of a saved engine with a latency table, at the same path on every node; or a `Source`.
        replicas: number of replicas, unless `autoscaling` is given.
        autoscaling: how the number of replicas follows the load.
        queue: `replicas` or `central`.
        router: `slack`, or `ray` for Ray's own power of two choices.
        fronts: number of fronts; a central queue has one.
        cpus: CPU cores that Ray reserves per replica. If None, the CPU threads of its workers.
        report_s: time between two reports of a replica to the routers, in s.
        name: name of the model in the Open Inference Protocol. If None, that of the folder.
        limits: the limits. If None, the defaults.
        tokens: the name of the client per bearer token. If None, no token is needed.
        allowed_hosts: names by which clients may address the server. If None, any name.
        settings: further attributes of `Source`, such as `policy` and `slo_ms`.

    Returns:
        The application, for `ray.serve.run` and for `serve build`.

    Raises:
        ServeError: the settings contradict each other.
        MissingFile: there is no bundle.
        MissingExtra: another version of Ray is installed.

    Example:
        >>> ray.serve.run(subnetact.cluster.build_app("bundle/", replicas=2, slo_ms=250.0))
    """
    source = bundle if isinstance(bundle, Source) else Source(bundle=os.path.abspath(bundle))
    source = replace(source, **settings).pinned()
    if queue == "central" and fronts != 1:
        raise ServeError(f"fronts: {fronts}, but a central queue has one front")
    workers = replicas_of(source, replicas, autoscaling, queue, router, cpus, report_s)
    wanted, most = least_and_most(replicas, autoscaling)
    front = serve.deployment(
        ingress(Front),
        name="front",
        num_replicas=fronts,
        # Fronts refuse what the replicas cannot take. They would not if requests waited in Ray's proxy.
        max_ongoing_requests=2 * most * source.max_queue,
        max_queued_requests=source.max_queue,
        ray_actor_options={"num_cpus": 0},
    )
    shown = {"name": name or os.path.basename(str(source.bundle)), "limits": asdict(limits or Limits())}
    return front.bind(workers, source, queue, wanted, {**shown, "tokens": tokens, "hosts": allowed_hosts})


def app_from(args: dict[str, Any]) -> Any:
    """Make the application from a configuration file of Ray Serve, which names this function.

    Args:
        args: the arguments of `build_app`; `autoscaling` is an object with the attributes of `Autoscaling`.
            Values that a command line gives as text are read as JSON.

    Returns:
        The application.

    Raises:
        ServeError: an argument is not known.
        SubnetActError: as `build_app`.

    Example:
        >>> # serve run subnetact.cluster.application:app_from bundle=/models/digits replicas=2
    """
    given = {name: _value(text) for name, text in args.items()}
    if "bundle" not in given:
        raise ServeError("bundle: not given; name the folder of a saved engine")
    for name, kind in (("autoscaling", Autoscaling), ("limits", Limits)):
        if isinstance(given.get(name), dict):
            try:
                given[name] = kind(**given[name])
            except TypeError as error:
                raise ServeError(f"{name}: {error}") from error
    try:
        return build_app(**given)
    except TypeError as error:
        raise ServeError(f"args: {error}; give arguments of subnetact.cluster.build_app") from error


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def replicas_of(
    source: Source,
    replicas: int,
    scaling: Autoscaling | None,
    queue: str,
    router: str,
    cpus: float | None,
    report_s: float,
) -> Any:
    """Return the replicas as an application without HTTP.

    Args:
        source: what to serve.
        replicas: number of replicas.
        scaling: how the number of replicas follows the load. If None, the number stays.
        queue: `replicas` or `central`.
        router: `slack` or `ray`.
        cpus: CPU cores that Ray reserves per replica. If None, the CPU threads of its workers.
        report_s: time between two reports, in s.

    Raises:
        ServeError: the settings contradict each other.
        MissingFile: there is no bundle.
    """
    check_version()
    if queue not in QUEUES or router not in ROUTERS:
        raise ServeError(
            f"queue: {queue!r}, router: {router!r}; choose a queue from {', '.join(QUEUES)} and a router "
            f"from {', '.join(ROUTERS)}"
        )
    if source.bundle is None or not os.path.isdir(source.bundle):
        raise MissingFile(f"bundle: {source.bundle} is no folder; give a saved engine, on every node")
    source = source if source.checksum else source.pinned()
    central = queue == "central"
    if central and scaling is not None:
        raise ServeError("autoscaling: a central queue has a fixed number of replicas; give replicas=N")
    scaled: dict[str, Any] = {"num_replicas": replicas}
    if scaling is not None:
        table = source.latency_table(source.engine(mapped=True))
        rule: dict[str, Any] = {
            "slo_ms": source.slo_ms,
            "policy": source.policy,
            "accuracy_floor": scaling.accuracy_floor,
            "attainment": scaling.attainment,
            "patience_s": scaling.patience_s,
            "most": scaling.most,
        }
        # Bad settings are refused here rather than in Ray's controller, which must not simulate for seconds.
        rule["planned_per_s"] = AccuracyFirst(table, **rule).planned_per_s
        scaled = {
            "autoscaling_config": _autoscaling(
                AccuracyFirstPolicy, {"table": table.to_json(), **rule}, scaling.least, scaling.most
            )
        }
    if central:
        source = replace(source, workers=1)
    threads = source.workers * source.threads_per_worker
    deployment = serve.deployment(
        EngineReplica,
        name="replicas",
        max_ongoing_requests=1 if central else source.max_queue,
        ray_actor_options={"num_cpus": threads if cpus is None else cpus},
        request_router_config=routed_by(None if central else ROUTERS[router], report_s),
        health_check_period_s=2.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=5.0,
        **scaled,
    )
    return deployment.bind(source, central)


_autoscaling = autoscaling  # `build_app` has an argument of this name


def answerer(handle: Any, source: Source, engine: Engine, queue: str, replicas: int, count: Any) -> Answerer:
    """Return what a server has in place of a batcher.

    Args:
        handle: Ray's handle of the replicas.
        source: what is served.
        engine: the engine, loaded in this process too, which checks inputs.
        queue: `replicas` or `central`.
        replicas: number of replicas.
        count: returns how many replicas run, and how many should.
    """
    table = source.latency_table(engine)
    if queue == "central":

        def run(*batch: Any) -> Any:
            return handle.run.remote(*batch).result(timeout_s=BATCH_S)

        runners = [RemoteRunner(engine, run, LOST) for _ in range(replicas)]
        return source.batcher(runners, table, workers=1, threads_per_worker=None)

    async def call(**request: Any) -> Reply:
        response = handle.answer.remote(**request)
        try:
            return await response  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            response.cancel()
            raise

    def check(x: Any) -> None:
        engine.check(x, finite=True)

    return ReplicaClient(
        call,
        dict(enumerate(table.accuracy)),
        died=LOST,
        full=FULL,
        check=check,
        replicas=count,
        max_per_replica=source.max_queue,
    )


class ReplicaCount:
    """How many replicas run, asked for once per second in a thread.

    Args:
        application: name of the Ray Serve application. If None, the one that this process belongs to.
        wanted: number of replicas until Ray has answered.
    """

    def __init__(self, application: str | None, wanted: int) -> None:
        self._application = application
        self._counts = (wanted, wanted)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="subnetact-replicas", daemon=True)
        self._thread.start()

    def __call__(self) -> tuple[int, int]:
        """Return how many replicas run, and how many Ray has started or is starting."""
        return self._counts

    def close(self) -> None:
        """End the thread."""
        self._end.set()

    def _watch(self) -> None:
        name = self._application or serve.get_replica_context().app_name
        while not self._end.wait(COUNT_S):
            try:
                states = serve.status().applications[name].deployments["replicas"].replica_states
            except Exception:  # Ray's controller may be restarting; the last counts stay
                continue
            counts = {str(getattr(state, "value", state)): number for state, number in states.items()}
            up = counts.get("RUNNING", 0)
            wanted = sum(number for state, number in counts.items() if state != "STOPPING")
            self._counts = (up, max(up, wanted))


class Front:
    """The HTTP interface of the application.

    Args:
        handle: Ray's handle of the replicas.
        source: what is served.
        queue: `replicas` or `central`.
        replicas: number of replicas.
        shown: name, limits, tokens and hosts of the interface.
    """

    def __init__(self, handle: Any, source: Source, queue: str, replicas: int, shown: dict[str, Any]) -> None:
        engine = source.engine(mapped=True)
        name = serve.get_replica_context().app_name
        self._count = ReplicaCount(name, replicas)
        self._answerer = answerer(handle, source, engine, queue, replicas, self._count)
        self._app = serve_app(
            self._answerer,
            engine,
            slo_ms=source.slo_ms,
            name=shown["name"],
            limits=Limits(**shown["limits"]),
            tokens=shown["tokens"],
            allowed_hosts=shown["hosts"],
        )

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application; Ray calls this method after the constructor."""
        return self._app
