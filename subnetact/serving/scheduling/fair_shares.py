"""Fair shares of the workers' time between clients, in front of the queue.

Without shares the most urgent request runs first, whoever sent it: a client with short deadlines and a high
minimum accuracy can take the whole service. With shares every client has a bucket of worker time, in ms, from
which a request takes what it costs. The buckets fill up at the rate at which the workers work, split by the
clients' weights. A request whose client has enough in its bucket joins the queue at once; all such requests
form one class, in which the most urgent runs first as usual. Other requests are held back until the bucket
has filled up, or until a worker has nothing else to do: no time is wasted. A client that is alone is never
held back.

The shares are those of generalised processor sharing (Parekh and Gallager, 1993), which start-time fair
queueing (Goyal et al., 1996) follows with one number per client: `finish`, the virtual time at which the
client's bucket is full again. Virtual time runs at the rate of the workers divided by the weights of all
clients that have an open request or a bucket that is not full.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from subnetact.errors import PolicyError
from subnetact.serving.scheduling.checks import check_time
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Queue, Request


@dataclass(frozen=True)
class FairShares:
    """How the workers' time is shared between clients.

    Attributes:
        burst_ms: worker time that a client of weight 1 may take at once, in ms. If None, half the SLO.
        weights: weight per client; a client of weight 2 gets twice the time of a client of weight 1, as all
            have that are not named.

    Raises:
        PolicyError: a number is not finite and > 0, or a weight is beyond 1e-6 to 1e6.
    """

    burst_ms: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights: Any = self.weights
        if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
            raise PolicyError(f"weights: {weights!r} must be a dictionary from names of clients to numbers")
        for name, weight in weights.items():
            if not 1e-6 <= check_time(weight, f"weight of {name!r}") <= 1e6:
                raise PolicyError(f"weight of {name!r}: {weight} must be from 1e-6 to 1e6, to sum exactly")
        if self.burst_ms is not None:
            check_time(self.burst_ms, "burst_ms")


@dataclass(slots=True, eq=False)
class _Client:
    name: str
    weight: float
    finish: float
    filling: bool = False
    open: int = 0
    held: Queue = field(default_factory=EDFQueue)


@dataclass(eq=False)
class ShareGate:
    """Lets requests into the queue as far as their clients' shares go. The owner of the queue locks.

    `cost_ms` returns the least worker time, in ms, of a request. An idle worker takes `most` of the requests
    that are held back.
    """

    _shares: FairShares
    slo_ms: InitVar[float]
    _queue: Queue
    _free_at_ms: list[float]
    _cost_ms: Callable[[Request], float]
    _most: int

    def __post_init__(self, slo_ms: float) -> None:
        self._burst_ms = slo_ms / 2 if self._shares.burst_ms is None else self._shares.burst_ms
        self._clients: dict[str, _Client] = {}
        self._holding: dict[str, _Client] = {}
        self._filling: list[tuple[float, str]] = []
        self._weight = self._virtual = 0.0
        self._now_ms = -math.inf
        self._held = 0

    def __len__(self) -> int:
        """Return the number of requests that are held back."""
        return self._held

    def has_room(self, client: str, max_queue: float, waiting: int) -> bool:
        """Return whether a client may have one more open request.

        A client may have `max_queue` times its part of the weights of all clients with open requests or a
        bucket that is not full, and of one client more. So no client fills the queue, and there is room for a
        new one.
        """
        state = self._clients.get(client)
        if state is None or not state.open:
            return True
        most = max_queue * state.weight / (self._weight + 1.0)
        return state.open < most and waiting < max_queue

    def push(self, now_ms: float, item: Request) -> None:
        """Add a request to the queue, or hold it back."""
        self._advance(now_ms)
        client = self._clients.get(item.ask.client)
        if client is None:
            name = item.ask.client
            weight = self._shares.weights.get(name, 1.0)
            client = self._clients[name] = _Client(name, weight, self._virtual)
            self._weight += weight
            if len(self._clients) == 2:
                self._recall(next(iter(self._clients.values())))
        client.open += 1
        if not client.held and self._may_pass(client, item):
            self._let_in(client, item)
        else:
            self._hold(client, item)

    def release(self, now_ms: float) -> None:
        """Let in what the shares allow now, and what an idle worker has time for; a worker is idle."""
        self._advance(now_ms)
        if not self._held:
            return
        for client in list(self._holding.values()):
            while client.held and self._may_pass(client, client.held.item()):
                self._let_in(client, self._take_first(client))
        if len(self._queue):
            return
        waiting = [(client.finish, client.name) for client in self._holding.values()]
        heapq.heapify(waiting)
        for _ in range(min(self._most, self._held)):
            _, name = heapq.heappop(waiting)
            client = self._holding[name]
            self._let_in(client, self._take_first(client))
            if client.held:
                heapq.heappush(waiting, (client.finish, name))

    def spend(self, items: list[Request], expected_ms: float) -> None:
        """Take what a batch really costs from its clients' buckets."""
        each_ms = expected_ms / len(items)
        for item in items:
            client = self._clients.get(item.ask.client)
            if client is not None:
                self._take(client, each_ms - item.charge_ms)
            item.charge_ms = 0.0

    def ended(self, item: Request) -> None:
        """Forget a request that has its outcome; if it never ran, its client gets the time back."""
        client = self._clients.get(item.ask.client)
        if client is None:
            return
        client.open -= 1
        client.finish -= item.charge_ms / client.weight
        item.charge_ms = 0.0
        if not client.open and not client.filling:
            self._forget(client)

    def expire(self, now_ms: float, least_ms: Callable[[float, int], float]) -> list[Request]:
        """Remove and return the requests that were held back until they expired."""
        expired: list[Request] = []
        for client in list(self._holding.values()):
            held = client.held
            while held and held.deadline() < now_ms + least_ms(held.floor(), held.item().shape):
                expired.append(self._take_first(client))
        return expired

    def remove(self, item: Request) -> bool:
        """Remove one request that is held back; return whether it was."""
        client = self._holding.get(item.ask.client)
        if client is None or not client.held.remove(item.deadline_ms, item):
            return False
        self._let_go(client)
        return True

    def items(self) -> list[Request]:
        """Return all requests that are held back."""
        queues = [client.held for client in self._holding.values()]
        return [item for queue in queues for _, item in queue.entries(len(queue))]

    def take_all(self) -> None:
        """Remove all requests that are held back."""
        for client in self._holding.values():
            client.held.take(len(client.held))
        self._holding.clear()
        self._held = 0

    def _may_pass(self, client: _Client, item: Request) -> bool:
        if len(self._clients) == 1:
            return True
        ahead_ms = max(client.finish - self._virtual, 0.0)
        # A request that costs more than a full bucket passes if the bucket is full.
        return ahead_ms <= 0.0 or ahead_ms + self._cost_ms(item) / client.weight <= self._burst_ms

    def _let_in(self, client: _Client, item: Request) -> None:
        item.charge_ms = self._cost_ms(item)
        self._take(client, item.charge_ms)
        self._queue.push(item.deadline_ms, item, item.ask.floor)

    def _take_first(self, client: _Client) -> Request:
        [item] = client.held.take(1)
        self._let_go(client)
        return item

    def _hold(self, client: _Client, item: Request) -> None:
        client.held.push(item.deadline_ms, item, item.ask.floor)
        self._holding[client.name] = client
        self._held += 1

    def _let_go(self, client: _Client) -> None:
        self._held -= 1
        if not client.held:
            del self._holding[client.name]

    def _recall(self, client: _Client) -> None:
        """Hold back what a client that was alone, so has all of the queue, has beyond its share."""
        queue, ahead_ms = self._queue, client.finish - self._virtual
        within = waiting = len(queue)
        while within and ahead_ms > self._burst_ms:  # the least urgent first
            within -= 1
            ahead_ms -= queue.item(within).charge_ms / client.weight
        for item in queue.take_at(range(within, waiting)):
            client.finish -= item.charge_ms / client.weight
            item.charge_ms = 0.0
            self._hold(client, item)

    def _take(self, client: _Client, cost_ms: float) -> None:
        """Take worker time from a bucket, or give some back if the number is negative."""
        client.finish = max(client.finish, self._virtual) + cost_ms / client.weight
        if not client.filling and client.finish > self._virtual:
            client.filling = True
            heapq.heappush(self._filling, (client.finish, client.name))

    def _advance(self, now_ms: float) -> None:
        """Let virtual time pass: every bucket that is not full fills up by its weight."""
        worked_ms = 0.0
        if now_ms > self._now_ms > -math.inf:
            worked_ms = (now_ms - self._now_ms) * sum(ms < math.inf for ms in self._free_at_ms)
        self._now_ms = max(now_ms, self._now_ms)
        filling = self._filling
        while filling:
            needed_ms = (filling[0][0] - self._virtual) * self._weight
            if needed_ms > worked_ms:
                self._virtual += worked_ms / self._weight
                return
            worked_ms -= max(needed_ms, 0.0)
            finish, name = heapq.heappop(filling)
            self._virtual = max(self._virtual, finish)
            client = self._clients[name]
            if client.finish > self._virtual:  # more was taken since the entry was made
                heapq.heappush(filling, (client.finish, name))
                continue
            client.filling = False
            if not client.open:
                self._forget(client)

    def _forget(self, client: _Client) -> None:
        del self._clients[client.name]
        self._weight = self._weight - client.weight if self._clients else 0.0
