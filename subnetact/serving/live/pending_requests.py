"""Everything that waits in a batcher: the queue, the deferred, and the suspects."""

from __future__ import annotations

from subnetact.serving.live.requests import Request
from subnetact.serving.scheduling.dispatch import Dispatcher

__all__ = ["PendingRequests"]


class PendingRequests:
    """The requests that have no outcome and are on no worker. Its owner locks.

    Suspects are requests whose worker hung or died. Each gets a second try alone, on the same subnet and on
    another worker where one is at hand, before the queue goes on: a guilty one can then harm nobody, and
    there are no more than one batch holds.

    Args:
        dispatcher: holds the queue and the deferred requests.
    """

    def __init__(self, dispatcher: Dispatcher[Request]) -> None:
        self._dispatcher = dispatcher
        self._suspects: list[tuple[Request, int, int]] = []

    def __len__(self) -> int:
        return len(self._dispatcher) + len(self._suspects)

    def suspect(self, request: Request, subnet: int, lost: int) -> None:
        """Let a request wait for its second try; the worker `lost` was lost over it."""
        self._suspects.append((request, subnet, lost))

    def next_suspect(self, worker: int, others: bool) -> tuple[Request, int] | None:
        """Remove and return the first suspect for a worker, and its subnet.

        While there are other workers, it is not given those over which it was lost itself.
        """
        for at, (request, subnet, lost) in enumerate(self._suspects):
            if lost != worker or not others:
                del self._suspects[at]
                return request, subnet
        return None

    def remove(self, request: Request) -> None:
        """Remove a request from wherever it waits, if it does."""
        dispatcher = self._dispatcher
        if not dispatcher.queue.remove(request.deadline_ms, request):
            dispatcher.deferred.remove(request.deadline_ms, request)
        if self._suspects:
            self._suspects = [entry for entry in self._suspects if entry[0] is not request]

    def requests(self) -> list[Request]:
        """All that wait."""
        queue, deferred = self._dispatcher.queue, self._dispatcher.deferred
        entries = queue.entries(len(queue)) + deferred.entries(len(deferred))
        return [request for _, request in entries] + [request for request, _, _ in self._suspects]

    def take_all(self) -> list[Request]:
        """Remove and return all that wait."""
        requests, dispatcher = self.requests(), self._dispatcher
        dispatcher.queue.take(len(dispatcher.queue))
        dispatcher.deferred.take(len(dispatcher.deferred))
        self._suspects.clear()
        return requests
