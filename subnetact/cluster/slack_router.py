"""`SlackRouter`: sends every request to the replica that is expected to answer first."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from subnetact.cluster.deadline import unix_ms
from subnetact.cluster.forecast import ReplicaForecast, ReplicaReport, ranking
from subnetact.cluster.ray_serve import RequestRouter, refuse
from subnetact.errors import QueueFull

__all__ = ["SlackRouter"]


CHOSEN_MS = 1000.0
"""How long a choice counts if no replica accepts the request, in ms."""


class SlackRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Ranks the replicas by the time at which they would answer one more request.

    The time follows from the last report of the replica (`record_routing_stats`: its queue and learned
    latencies), corrected by what this router has sent to the replica since, and by what other routers have
    probably sent. Of n routers each looks at a random n-th of the replicas first, at two or more, because all
    have the same old reports and would choose the same replica. A request that no replica can answer before
    its deadline, even with the fastest subnet, is refused with `QueueFull` before it is sent.

    Ray makes one router in every process that has a handle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forecasts: dict[Any, ReplicaForecast] = {}
        self._inputs: dict[str, int] = {}
        self._chosen: dict[str, tuple[Any, int, float]] = {}

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
        sender, inputs = asked.get("sender", ""), len(asked.get("xs", ())) or 1
        now = time.monotonic() * 1e3
        self._forget_chosen(now)
        ranked = []
        for replica in candidate_replicas:
            forecast = self._forecast(replica.replica_id, sender)
            forecast.learn(ReplicaReport.read(replica.routing_stats), now)
            rank, finish = forecast.rank_ms(now, inputs), forecast.finish_ms(now, inputs)
            ranked.append((round(rank, 6), random.random(), finish, forecast.reported, replica))
        senders = max((self._forecasts[entry[-1].replica_id].senders for entry in ranked), default=1.0)
        ranked = ranking(ranked, senders)
        if pending_request is None:
            return [[entry[-1]] for entry in ranked]
        pending_request.routing_context.should_backoff = True  # after all were tried, wait and rank again
        deadline = asked.get("deadline")
        if ranked and deadline is not None and all(reported for *_, reported, _ in ranked):
            left_ms = deadline[1] - unix_ms()
            if min(entry[2] for entry in ranked) > left_ms:
                refuse(self, pending_request, QueueFull("no replica can answer in time; retry later"))
                return [[entry[-1]] for entry in ranked]
        if ranked:
            name, best = pending_request.metadata.internal_request_id, ranked[0][-1].replica_id
            self._release(name)
            self._chosen[name] = best, inputs, now
            self._forecasts[best].chosen(inputs)
        return [[entry[-1]] for entry in ranked]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Count a request that a replica accepted.

        Args:
            pending_request: the request.
            replica_id: the replica.
            result: Ray's handle of the result.
        """
        super().on_request_routed(pending_request, replica_id, result)
        asked = pending_request.kwargs
        name, inputs = pending_request.metadata.internal_request_id, len(asked.get("xs", ())) or 1
        self._release(name)
        self._forecast(replica_id, asked.get("sender", "")).sent(inputs, time.monotonic() * 1e3)
        self._inputs[name] = inputs

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Count a request that ended, however it ended.

        Args:
            replica_id: the replica.
            internal_request_id: Ray's name of the request.
        """
        super().on_request_completed(replica_id, internal_request_id)
        self._release(internal_request_id)
        inputs = self._inputs.pop(internal_request_id, 0)
        forecast = self._forecasts.get(replica_id)
        if forecast is not None and inputs:
            forecast.completed(inputs, time.monotonic() * 1e3)

    def update_replicas(self, replicas: Sequence[Any]) -> None:
        """Take over the list of replicas and forget those that ended.

        Args:
            replicas: the replicas that run.
        """
        super().update_replicas(replicas)
        alive = {replica.replica_id for replica in replicas}
        for gone in self._forecasts.keys() - alive:
            del self._forecasts[gone]

    def _release(self, name: str) -> None:
        replica_id, inputs, _ = self._chosen.pop(name, (None, 0, 0.0))
        if replica_id in self._forecasts:
            self._forecasts[replica_id].chosen(-inputs)

    def _forget_chosen(self, now_ms: float) -> None:
        """Release the choices of requests that were cancelled before any replica accepted them."""
        while self._chosen:
            name, (_, _, since) = next(iter(self._chosen.items()))
            if now_ms - since < CHOSEN_MS:
                return
            self._release(name)

    def _forecast(self, replica_id: Any, sender: str) -> ReplicaForecast:
        found = self._forecasts.get(replica_id)
        if found is None:
            found = self._forecasts[replica_id] = ReplicaForecast(sender)
        return found
