"""A bundle or the demo behind a batcher, with everything that the addresses of the server share."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from subnetact.engine.engine import Engine
from subnetact.errors import DeadlinePassed, FileFormatError, TableError
from subnetact.latency.table import LatencyTable
from subnetact.serve.access import Access
from subnetact.serve.ask import Ask
from subnetact.serve.exchange import SHORT, Bodies, ClientGone, Headers, Receive, read_body
from subnetact.serve.limits import Limits
from subnetact.serve.payloads import Images, is_image
from subnetact.serve.rows import Answerer, RowAnswerer, infer_rows
from subnetact.serve.signature import Signature, named_tensors
from subnetact.serving.live.batcher import Answer

__all__ = [
    "Attendance",
    "BundleState",
    "Service",
    "bundle_state",
    "load_engine",
    "now_ms",
    "scheduler_table",
    "written_over",
]

WATCH_AFTER_S = 0.02
"""How long a request runs before the server watches whether its client leaves, in s."""
DECODERS = 2
"""Threads that decode long bodies and images."""
Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


def now_ms() -> float:
    """Return the time of the monotonic clock by which requests are timed, in ms."""
    return time.perf_counter_ns() * 1e-6


class Service:
    """What the addresses of one server share.

    Args:
        batcher: an open batcher, or the client of a cluster, whose method `infer_rows` answers all rows of a
            request at once.
        engine: its engine; the example says what requests may hold.
        name: name of the model in the Open Inference Protocol.
        slo_ms: the deadline of requests that name none, in ms.
        limits: the limits. If None, the defaults.
        access: who may use the server. If None, everybody.
        image_mean: mean per channel that images are normalised by.
        image_std: standard deviation per channel that images are normalised by.

    Attributes:
        signature: the tensors of one input.
        outputs: name, shape and dtype of every tensor of one output.
        closing: whether the server is about to end, so that `/healthz` and `/readyz` return 503.

    Raises:
        ServeError: the engine has no example.
    """

    def __init__(
        self,
        batcher: Answerer,
        engine: Any,
        *,
        name: str,
        slo_ms: float,
        limits: Limits | None = None,
        access: Access | None = None,
        image_mean: tuple[float, ...] = (0.0,),
        image_std: tuple[float, ...] = (1.0,),
    ) -> None:
        self.batcher = batcher
        rows: RowAnswerer | None = getattr(batcher, "infer_rows", None)
        self._rows: RowAnswerer = rows or partial(infer_rows, batcher)
        self.name = name
        self.version = str(getattr(engine, "fingerprint", None) or "1")
        self.slo_ms = slo_ms
        self.limits = limits or Limits()
        self.access = access or Access({})
        self.signature = Signature(engine.sample)
        [output] = engine.run(0, [engine.sample], 1)
        self.outputs = [(name, list(t.shape), t.dtype) for name, t in named_tensors(output, "output")]
        self.images = Images(self.signature, self.limits.pixels, image_mean, image_std)
        self.body_bytes = self.limits.body_for(self.signature.count)
        self.bodies = Bodies(max(self.limits.bodies_bytes, self.body_bytes))
        self.threads = ThreadPoolExecutor(DECODERS, "subnetact-serve")
        self.closing = False

    async def exchange(
        self,
        receive: Receive,
        headers: Headers,
        decode: Callable[[bytes], Asked],
        answer: Callable[[Asked], Awaitable[Answered]],
    ) -> tuple[Asked, Answered]:
        """Read the body of a request, decode the body and wait for the answer, while the client stays.

        Args:
            receive: the receiving side of ASGI.
            headers: the headers of the request.
            decode: makes the request of the body; long bodies and images are decoded on a thread.
            answer: answers what `decode` returned.

        Returns:
            The request and its answer.

        Raises:
            Refusal: the body is too large, too slow or compressed.
            RequestError: the request is malformed, refused or dropped, or it failed.
            ClientGone: the client closed its connection.
        """
        body = await read_body(receive, headers, self.body_bytes, self.limits.body_s, self.bodies)
        size = len(body)
        try:
            with Attendance(receive):
                if size <= SHORT and not is_image(body):
                    asked = decode(body)
                else:
                    asked = await asyncio.get_running_loop().run_in_executor(self.threads, decode, body)
                del body
                return asked, await answer(asked)
        finally:
            self.bodies.give_back(size)

    async def answers(self, xs: Sequence[Any], ask: Ask, arrived_ms: float, client: str) -> Sequence[Answer]:
        """Wait for the answers to the rows of one request.

        Args:
            xs: inputs of the engine.
            ask: the parameters.
            arrived_ms: time of the arrival by `now_ms`, in ms; the time of the request counts from here.
            client: name or address of the client.

        Raises:
            RequestError: the batcher refused or dropped the request, or it failed.
        """
        left_ms = ask.deadline_ms - (now_ms() - arrived_ms)
        if left_ms <= 0.0:
            raise DeadlinePassed(
                f"deadline_ms: {ask.deadline_ms:g} ms passed before the request was read; allow more"
            )
        return await self._rows(xs, left_ms, ask.min_accuracy, ask.priority, client)

    def close(self) -> None:
        """Finish accepted requests and end the threads. A second call does nothing."""
        self.closing = True
        self.batcher.close()
        self.threads.shutdown()


class Attendance:
    """Cancels the current task when its client leaves; leaving the block then raises `ClientGone`.

    Nothing happens in the first 20 ms, because most requests have their answer by then.

    Args:
        receive: the receiving side of ASGI, from which the whole body was read.
    """

    __slots__ = ("_gone", "_handle", "_receive", "_task", "_watch")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._task: Any = asyncio.current_task()
        self._handle = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if self._gone:
            uncancel = getattr(self._task, "uncancel", None)
            if uncancel is not None:
                uncancel()
            if kind is asyncio.CancelledError:
                raise ClientGone from None


def load_engine(
    bundle: str | PathLike[str], supernet: Any = None, attempts: int = 3, mapped: bool = False
) -> Engine:
    """Load a bundle whole: if it changes on the disk meanwhile, it is read again.

    A server serves what it has loaded, whatever happens to the folder later.

    Args:
        bundle: the folder of a saved engine.
        supernet: the supernet of a user's own network, which the weights of the bundle are put into.
        attempts: how often to try.
        mapped: as in `Engine.load`.

    Raises:
        FileFormatError: the folder is no bundle, or it changes all the time.
        SubnetActError: the bundle does not fit the supernet.
    """
    for _ in range(attempts):
        before = bundle_state(bundle)
        try:
            engine = Engine.load(bundle, supernet=supernet, mapped=mapped)
        except FileFormatError:
            if bundle_state(bundle) == before:
                raise
            continue
        if bundle_state(bundle) == before:
            return engine
    raise FileFormatError(f"bundle {bundle}: it changes while it is read; start again when it is complete")


BundleState = dict[tuple[str, int], tuple[int, int]]


def bundle_state(bundle: str | PathLike[str]) -> BundleState | None:
    """Return size and time of change of every file of a bundle by name and inode, or None without a folder.

    Args:
        bundle: the folder.
    """
    try:
        found = [(path.name, path.stat()) for path in Path(bundle).iterdir()]
    except OSError:
        return None
    return {(name, stat.st_ino): (stat.st_size, stat.st_mtime_ns) for name, stat in found}


def written_over(before: BundleState | None, now: BundleState | None) -> bool:
    """Return whether tensors of a bundle, which stay mapped after loading, were changed in place.

    New files do no harm to those that are mapped. Other files are closed after loading, so that a new file
    may get the inode of an old one.

    Args:
        before: what `bundle_state` returned when the bundle was loaded.
        now: what it returns now.
    """
    tensors = {file: facts for file, facts in (before or {}).items() if file[0].endswith(".safetensors")}
    return any(now[file] != facts for file, facts in tensors.items() if now and file in now)


def scheduler_table(engine: Engine, given: str | PathLike[str] | None = None) -> LatencyTable | None:
    """Return the table to schedule by, or None if the bundle has none.

    Args:
        engine: the engine of a bundle, whose table named `scheduler` comes first.
        given: a file that comes before the bundle's tables.

    Raises:
        TableError: the accuracy of a subnet is not known.
        FileFormatError: the file is no latency table.
    """
    if given is not None:
        table: LatencyTable | None = LatencyTable.load(given)
    else:
        table = engine.tables.get("scheduler") or next(iter(engine.tables.values()), None)
    if table is not None and not all(map(math.isfinite, table.accuracy)):
        raise TableError(
            "table: accuracies of subnets are not known, and policies need them; give a --table that has them"
        )
    return table
