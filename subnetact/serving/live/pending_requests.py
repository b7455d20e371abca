"""All requests that wait in a batcher: the queue, requests held back or deferred, and lost ones."""

from __future__ import annotations

from subnetact.serving.live.requests import Request
from subnetact.serving.scheduling.dispatch import Dispatcher

__all__ = ["PendingRequests"]


class PendingRequests:
    """The requests that have no outcome and are on no worker. The owner holds the lock.

    A suspect is a request whose worker hung or died. Each suspect gets a second try before the queue goes on.
    It runs alone, on the same subnet, and on another worker if there is one, so that a request that breaks
    its worker harms no other. There are never more suspects than requests in the batches that were lost.

    Args:
        dispatcher: holds the queue and the deferred requests.
    """

    def __init__(self, dispatcher: Dispatcher[Request]) -> None:
        self._dispatcher = dispatcher
        self._suspects: list[tuple[Request, int, int]] = []

    def __len__(self) -> int:
        return len(self._dispatcher) + len(self._suspects)

    def add_suspect(self, request: Request, subnet: int, lost_worker: int) -> None:
        """Let a request wait for its second try.

        Args:
            request: the suspect.
            subnet: id of the subnet that ran.
            lost_worker: number of the worker that hung or died.
        """
        self._suspects.append((request, subnet, lost_worker))

    def next_suspect(self, worker: int, others: bool) -> tuple[Request, int] | None:
        """Remove and return the first suspect that a worker may run.

        Args:
            worker: number of the idle worker.
            others: whether another worker is up; if so, the worker gets no suspect that it was lost with.

        Returns:
            The request and its subnet. If there is no such suspect, None.
        """
        for at, (request, subnet, lost_worker) in enumerate(self._suspects):
            if lost_worker != worker or not others:
                del self._suspects[at]
                return request, subnet
        return None

    def suspects(self) -> list[tuple[Request, int]]:
        """Return all suspects, each with its subnet."""
        return [(request, subnet) for request, subnet, _ in self._suspects]

    def remove(self, request: Request) -> None:
        """Remove a request from wherever it waits; a request that does not wait is ignored.

        Args:
            request: the request.
        """
        dispatcher = self._dispatcher
        gate, at_ms = dispatcher.gate, request.deadline_ms
        held = gate is not None and gate.remove(at_ms, request)
        if not held and not dispatcher.queue.remove(at_ms, request):
            dispatcher.deferred.remove(at_ms, request)
        if self._suspects:
            self._suspects = [entry for entry in self._suspects if entry[0] is not request]

    def requests(self) -> list[Request]:
        """Return all requests that wait."""
        queue, deferred = self._dispatcher.queue, self._dispatcher.deferred
        entries = queue.entries(len(queue)) + deferred.entries(len(deferred))
        held = [] if self._dispatcher.gate is None else self._dispatcher.gate.items()
        return [request for _, request in entries] + held + [request for request, _, _ in self._suspects]

    def take_all(self) -> list[Request]:
        """Remove and return all requests that wait."""
        requests, dispatcher = self.requests(), self._dispatcher
        dispatcher.queue.take(len(dispatcher.queue))
        dispatcher.deferred.take(len(dispatcher.deferred))
        if dispatcher.gate is not None:
            dispatcher.gate.take_all()
        self._suspects.clear()
        return requests
