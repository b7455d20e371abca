"""`SlackRouter`: sends every request to the one of two random replicas that holds less work."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from subnetact.cluster.deadline import unix_ms
from subnetact.cluster.forecast import ReplicaForecast, ReplicaReport, ranking, work
from subnetact.cluster.ray_serve import RequestRouter, refuse
from subnetact.errors import QueueFull

__all__ = ["SlackRouter"]


CHOSEN_MS = 5000.0
"""How long a choice counts if no replica accepts the request, in ms. It counts again if one does so later."""


class Sent(NamedTuple):
    """A request without an answer.

    Attributes:
        replica_id: the replica that was chosen.
        inputs: its inputs.
        since_ms: when it was chosen or accepted, by a monotonic clock, in ms.
        accepted: whether the replica has accepted it.
    """

    replica_id: Any
    inputs: int
    since_ms: float
    accepted: bool = False


class SlackRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends every request to the one of two random replicas that holds less work.

    The work is the number of inputs that a replica holds, times its latency per input where that differs much
    between the replicas. The router knows exactly what it has itself sent; the last report of the replica
    (`record_routing_stats`) tells what others had sent, and how fast the replica is. If the two replicas do
    not accept the request, the others follow by their work. A request that no replica can answer before its
    deadline, even with the fastest subnet, is refused with `QueueFull` before it is sent.

    Ray makes one router in every process that has a handle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forecasts: dict[Any, ReplicaForecast] = {}
        self._sent: dict[str, Sent] = {}
        # Requests that ended before they were accepted: the replica, and when they ended, in ms.
        self._early: dict[str, tuple[Any, float]] = {}
        self._looked_ms = 0.0

    async def choose_replicas(
        self, candidate_replicas: Sequence[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Rank the replicas.

        Args:
            candidate_replicas: the replicas that run.
            pending_request: the request.

        Returns:
            The replicas in order, each in a group of its own.
        """
        asked = {} if pending_request is None else pending_request.kwargs
        sender, inputs = asked.get("sender", ""), _inputs(asked)
        now = time.monotonic() * 1e3
        if pending_request is not None:
            self._release(pending_request.metadata.internal_request_id)  # it was refused, and is sent again
            self._early.pop(pending_request.metadata.internal_request_id, None)
        self._forget(now)
        forecasts = []
        for replica in candidate_replicas:
            forecasts.append(self._forecast(replica.replica_id, sender))
            forecasts[-1].learn(ReplicaReport.read(replica.routing_stats), now)
        entries = [
            (amount, random.random(), replica)
            for amount, replica in zip(work(forecasts, inputs), candidate_replicas, strict=True)
        ]
        ranked = [replica for *_, replica in ranking(entries)]
        groups = [[replica] for replica in ranked]
        if pending_request is None or not ranked:
            return groups
        pending_request.routing_context.should_backoff = True  # after all were tried, wait and rank again
        deadline = asked.get("deadline")
        if deadline is not None and all(forecast.reported for forecast in forecasts):
            left_ms = deadline[1] - unix_ms()
            if min(forecast.finish_ms(now, inputs) for forecast in forecasts) > left_ms:
                refuse(self, pending_request, QueueFull("no replica can answer in time; retry later"))
                return groups
        best = ranked[0].replica_id
        self._sent[pending_request.metadata.internal_request_id] = Sent(best, inputs, now)
        self._forecasts[best].outstanding += inputs
        return groups

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Note that a replica has accepted a request.

        Args:
            pending_request: the request.
            replica_id: the replica.
            result: Ray's handle of the result.
        """
        super().on_request_routed(pending_request, replica_id, result)
        name = pending_request.metadata.internal_request_id
        self._release(name)
        if self._early.pop(name, (None, 0.0))[0] != replica_id:  # otherwise it has its answer already
            asked = pending_request.kwargs
            inputs = _inputs(asked)
            self._sent[name] = Sent(replica_id, inputs, time.monotonic() * 1e3, accepted=True)
            self._forecast(replica_id, asked.get("sender", "")).outstanding += inputs

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Note that a request has ended, however it ended.

        Args:
            replica_id: the replica.
            internal_request_id: Ray's name of the request.
        """
        super().on_request_completed(replica_id, internal_request_id)
        sent = self._sent.get(internal_request_id)
        if sent is None or not sent.accepted:
            self._early[internal_request_id] = (replica_id, time.monotonic() * 1e3)
        if sent is not None and sent.replica_id == replica_id:  # it may have been sent to another one since
            self._release(internal_request_id)

    def update_replicas(self, replicas: Sequence[Any]) -> None:
        """Take over the list of replicas and forget those that ended.

        Args:
            replicas: the replicas that run.
        """
        super().update_replicas(replicas)
        alive = {replica.replica_id for replica in replicas}
        for gone in self._forecasts.keys() - alive:
            del self._forecasts[gone]

    def _release(self, name: str) -> Sent | None:
        sent = self._sent.pop(name, None)
        forecast = None if sent is None else self._forecasts.get(sent.replica_id)
        if sent is not None and forecast is not None:
            forecast.outstanding = max(0, forecast.outstanding - sent.inputs)
        return sent

    def _forget(self, now_ms: float) -> None:
        """Release requests that were cancelled before any replica accepted them: Ray does not tell."""
        if now_ms - self._looked_ms > CHOSEN_MS:
            self._looked_ms = now_ms
            for name, sent in list(self._sent.items()):
                if not sent.accepted and now_ms - sent.since_ms > CHOSEN_MS:
                    self._release(name)
            for name, (_, ended_ms) in list(self._early.items()):
                if now_ms - ended_ms > CHOSEN_MS:
                    del self._early[name]

    def _forecast(self, replica_id: Any, sender: str) -> ReplicaForecast:
        found = self._forecasts.get(replica_id)
        if found is None:
            found = self._forecasts[replica_id] = ReplicaForecast(sender)
        return found


def _inputs(asked: Mapping[str, Any]) -> int:
    return len(asked.get("xs", ())) or 1
