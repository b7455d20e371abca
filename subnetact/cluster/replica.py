"""One replica: an engine and a batcher with a deadline queue of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from subnetact.cluster.arrays import to_arrays, to_tensors
from subnetact.cluster.deadline import ClockOffsets, Deadline
from subnetact.cluster.forecast import ReplicaReport
from subnetact.errors import DeadlinePassed, FileFormatError, InvalidRequest, RequestError
from subnetact.serve.rows import infer_rows
from subnetact.serve.service import bundle_state, written_over
from subnetact.serve.source import Source
from subnetact.serving.live.answers import Decided

__all__ = ["EngineReplica", "Reply"]

WARM_UP_S = 2.0
"""How long a new replica runs batches of its own before it takes requests, in s."""
SENDERS = 256
"""Senders whose inputs are counted; the one that was idle longest is forgotten."""


class Reply(NamedTuple):
    """The reply to one request.

    Attributes:
        answers: for every row the fields of `Answer`, with the output as arrays.
        error: name of the error if there is no answer; otherwise empty.
        message: its message.
    """

    answers: Sequence[tuple[Any, ...]] = ()
    error: str = ""
    message: str = ""


class EngineReplica:
    """Loads a bundle, whose weights all replicas of a machine share, and answers requests.

    Errors of requests are returned, not raised, so that Ray neither logs nor wraps them.

    Args:
        source: what to serve; it must name a bundle.
        central: whether batches come from a central queue, which calls `run`; the replica then has no queue.
    """

    def __init__(self, source: Source, central: bool = False) -> None:
        torch.set_num_threads(source.threads_per_worker)
        self._bundle = source.bundle or ""
        self._files = bundle_state(self._bundle) if self._bundle else None
        self.engine = source.engine(mapped=True)
        self.table = source.latency_table(self.engine)
        self.engine.warm_up(self.table.batch_sizes, WARM_UP_S)  # the first requests would be late
        self._workers = source.workers
        self._expected_ms: deque[float] = deque(maxlen=source.workers)
        self._offsets = ClockOffsets()
        self._received: OrderedDict[str, int] = OrderedDict()
        self._finished: Counter[str] = Counter()
        self._arrived = self._met = self._missed = 0
        self._accuracy_sum = 0.0
        self._reports = 0
        self._since_s = time.monotonic()
        self._lock = threading.Lock()
        self._latency: list[list[float]] = self.table.latency_ms.tolist()
        self._sizes = {size: i for i, size in enumerate(self.table.batch_sizes)}
        self._per_input_ms = float(np.nanmin(self.table.latency_ms / np.array(self.table.batch_sizes)))
        self._one_ms = float(np.nanmin(self.table.latency_ms))
        self.batcher = None if central else source.batcher(self.engine, self.table, on_decision=self._note)

    async def answer(
        self,
        xs: Sequence[Any],
        deadline: tuple[float, float],
        sender: str,
        min_accuracy: float | None = None,
        priority: int | None = None,
        client: str = "",
        turned_away: int = 0,
    ) -> Reply:
        """Answer the rows of one request.

        Args:
            xs: the inputs as arrays.
            deadline: the `Deadline`.
            sender: name of the process that sends the request.
            min_accuracy: minimum accuracy of the answering subnets, in percent. If None, any may answer.
            priority: the higher, the more important.
            client: name of the client.
            turned_away: inputs that the sender has refused since its last request, because no replica could
                answer in time. They count for the number of replicas.

        Returns:
            The answers, or the error.
        """
        self._count(sender, len(xs))
        self._arrived += len(xs) + turned_away
        self._missed += turned_away
        try:
            left_ms = self._offsets.left_ms(sender, Deadline(*deadline))
            if left_ms <= 0.0:
                raise DeadlinePassed("the deadline passed on the way")
            rows = [to_tensors(x) for x in xs]
            answers = await infer_rows(self.batcher, rows, left_ms, min_accuracy, priority, client)
        except RequestError as error:
            if not isinstance(error, InvalidRequest):
                self._missed += len(xs)
            return Reply(error=type(error).__name__, message=str(error))
        finally:
            with self._lock:
                if sender in self._received:  # otherwise it was forgotten, and stays so
                    self._finished[sender] += len(xs)
        in_time = [answer.accuracy for answer in answers if answer.met]
        self._met += len(in_time)
        self._missed += len(answers) - len(in_time)
        self._accuracy_sum += sum(in_time)
        return Reply([tuple(answer._replace(output=to_arrays(answer.output))) for answer in answers])

    async def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> list[Any]:
        """Run one batch of a central queue.

        Args:
            subnet: id of the subnet.
            inputs: the inputs as arrays.
            batch_size: the planned batch size.

        Returns:
            The outputs as arrays.
        """
        xs = [to_tensors(x) for x in inputs]
        return [to_arrays(y) for y in await asyncio.to_thread(self.engine.run, subnet, xs, batch_size)]

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the report that routers rank replicas by; Ray asks for it several times per second."""
        if self.batcher is None:
            return {}
        stats = self.batcher.stats()
        now = time.perf_counter_ns() * 1e-6
        busy = [ms - now for ms in self._expected_ms if ms > now] if stats.running else []
        free_ms = min(busy) if len(busy) >= self._workers else 0.0
        with self._lock:
            self._reports += 1
            report = ReplicaReport(
                number=self._reports,
                queued=stats.queued,
                running=stats.running,
                free_ms=free_ms,
                per_input_ms=self._per_input_ms * stats.correction / max(1, stats.workers_up),
                one_ms=self._one_ms * stats.correction,
                received=dict(self._received),
                finished={sender: self._finished[sender] for sender in self._received},
            )
        return report._asdict()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the arrivals per second, the attainment and the accuracy served since the last call.

        A request with a row that was not answered in time counts with all of its rows as not answered, and so
        do the inputs that the senders refused.
        """
        if self.batcher is None:
            return {}
        now = time.monotonic()
        arrived, met, missed, accuracy = self._arrived, self._met, self._missed, self._accuracy_sum
        self._arrived = self._met = self._missed = 0
        self._accuracy_sum = 0.0
        seconds, self._since_s = now - self._since_s, now
        return {
            "arrivals_per_s": arrived / max(seconds, 1e-3),
            "attainment": met / (met + missed) if met + missed else 1.0,
            "accuracy": accuracy / met if met else max(self.table.accuracy),
        }

    def check_health(self) -> None:
        """Raise if no worker is up or the mapped weights were overwritten, so that Ray replaces the replica.

        Raises:
            FileFormatError: the file of the weights, which the replica reads while it serves, was changed in
                place. Replicas that start later refuse the bundle.
            RuntimeError: no worker is up.
        """
        if written_over(self._files, bundle_state(self._bundle)):
            raise FileFormatError(
                f"bundle {self._bundle}: it was written over while it is served; save it to a new folder, or "
                "replace its files instead of changing them"
            )
        if self.batcher is not None and not self.batcher.stats().workers_up:
            raise RuntimeError("no worker of the batcher is up")

    def close(self) -> None:
        """Finish accepted requests and end the threads. A second call does nothing."""
        if self.batcher is not None:
            self.batcher.close()

    def __del__(self) -> None:
        if getattr(self, "batcher", None) is not None:  # the constructor may have failed
            self.close()

    def _note(self, decided: Decided) -> None:
        i = self._sizes.get(decided.batch_size, len(self._sizes) - 1)
        latency_ms = self._latency[decided.subnet][i]
        self._expected_ms.append(time.perf_counter_ns() * 1e-6 + latency_ms)

    def _count(self, sender: str, inputs: int) -> None:
        with self._lock:
            self._received[sender] = self._received.get(sender, 0) + inputs
            self._received.move_to_end(sender)
            if len(self._received) > SENDERS:
                forgotten, _ = self._received.popitem(last=False)
                self._finished.pop(forgotten, None)
