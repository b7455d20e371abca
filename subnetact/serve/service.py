"""A bundle or the demo behind a batcher, with everything that the addresses of the server share."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from subnetact.engine.engine import Engine
from subnetact.errors import DeadlinePassed, FileFormatError, TableError
from subnetact.latency.table import LatencyTable
from subnetact.serve.access import Access
from subnetact.serve.ask import Terms, read_ask
from subnetact.serve.exchange import LATER, ClientGone, Exchange, Headers, Raw, Refusal
from subnetact.serve.limits import Limits
from subnetact.serve.payloads import Images, is_image
from subnetact.serve.rows import Answerer, infer_rows
from subnetact.serve.signature import Signature, named_tensors
from subnetact.serving import Answer

__all__ = [
    "SHORT",
    "BaseService",
    "BundleState",
    "Decoded",
    "Service",
    "bundle_state",
    "load_engine",
    "now_ms",
    "scheduler_table",
    "written_over",
]

SHORT = 32 * 1024
"""Bodies of up to this many bytes are decoded at once, and longer ones on a thread."""
WATCH_AFTER_S = 0.02
"""How long a request runs before the server watches whether its client leaves, in s: most end earlier."""
DECODERS = 2  # threads
Asked = TypeVar("Asked")
Decoded = tuple[Asked, Sequence[Any], Terms]
"""What a request asks for, the inputs of the engine, and their time."""
Answered = TypeVar("Answered")


def now_ms() -> float:
    """Return the time of the monotonic clock by which requests are timed, in ms."""
    return time.perf_counter_ns() * 1e-6


class BaseService:
    """What the services of networks and of texts share; one input has `values` values.

    While `closing`, the server is about to end, and `/healthz` and `/readyz` return 503.
    """

    def __init__(
        self, limits: Limits | None = None, tokens: Mapping[str, str] | None = None, values: int = 0
    ) -> None:
        self.limits = limits or Limits()
        self.access = Access(tokens or {})
        self.body_bytes = self.limits.body_for(values)
        self.held_bytes = 0  # of all bodies
        self.threads = ThreadPoolExecutor(DECODERS, "subnetact-serve")
        self.closing = False

    def unready(self) -> str:
        """Return why the server should get no requests, or an empty text."""
        return "closing" if self.closing else ""

    def prometheus(self) -> str:
        """Return metrics in Prometheus' text format."""
        raise NotImplementedError

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:  # noqa: ARG002
        """Return what a client of an address is told of a refusal, in JSON."""
        return {"error": refusal.kind, "message": str(refusal)}

    def close(self, drain: bool = True) -> None:  # noqa: ARG002
        """Finish or drop accepted requests, and refuse new ones. A second call does nothing."""
        self.closing = True
        self.threads.shutdown()

    async def exchange(
        self,
        exchange: Exchange,
        decode: Callable[[Raw], Asked],
        answer: Callable[[Asked], Awaitable[Answered]],
    ) -> tuple[Asked, Answered]:
        """Read the body of a request, decode it and wait for the answer, as long as the client stays.

        `decode` makes what is asked of the body, for long bodies and images on a thread; `answer` answers it.

        Raises:
            Refusal: the body is too large, too slow or compressed.
            RequestError: the request is malformed, refused or dropped, or it failed.
            ClientGone: the client closed its connection.
        """
        loop, receive, body_s = asyncio.get_running_loop(), exchange.receive, self.limits.body_s
        task: Any = asyncio.current_task()
        refusal: Exception | None = None
        watcher: asyncio.Task[None] | None = None
        body = bytearray()

        def end(slow: bool = True) -> None:
            nonlocal refusal
            message = f"body: not complete after {body_s:g} s; send it faster"
            refusal = Refusal(408, "TooSlow", message) if slow else ClientGone()
            task.cancel()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            end(slow=False)

        def begin() -> None:
            nonlocal watcher
            watcher = loop.create_task(watch())

        # anyio.fail_after would do the first half of this, and takes 14 us more per request.
        timer = loop.call_later(body_s, end)
        try:
            await self._read(exchange, body)
            timer.cancel()
            timer = loop.call_later(WATCH_AFTER_S, begin)
            if len(body) <= SHORT and not is_image(body):
                asked = decode(body)
            else:
                asked = await loop.run_in_executor(self.threads, decode, body)
            return asked, await answer(asked)
        except asyncio.CancelledError:
            if refusal is None:
                raise
            if hasattr(task, "uncancel"):  # Python 3.11
                task.uncancel()
            raise refusal from None
        finally:
            self.held_bytes -= len(body)
            timer.cancel()
            if watcher is not None:
                watcher.cancel()

    async def _read(self, exchange: Exchange, body: bytearray) -> None:
        """Read a body within the limits."""
        headers, most = exchange.headers, self.body_bytes
        if headers.get(b"content-encoding") not in (None, "", "identity"):
            message = "content-encoding: bodies are not decompressed; send them as they are"
            raise Refusal(415, "Unsupported", message)
        more = True
        while True:
            if max(headers.length or 0, len(body)) > most:
                raise Refusal(413, "TooLarge", f"body: more than {most} bytes; send a smaller one")
            if not more:
                return
            event = await exchange.receive()
            if event["type"] == "http.disconnect":
                raise ClientGone
            chunk, more = event.get("body", b""), event.get("more_body", False)
            free = max(most, self.limits.bodies_bytes) - self.held_bytes
            if free < len(chunk) <= most - len(body):
                message = "the server holds as many request bodies as it may; retry later"
                raise Refusal(503, "Overloaded", message, LATER)
            body += chunk
            self.held_bytes += len(chunk)


class Service(BaseService):
    """What the addresses of a server of networks share, as `build_app` takes it.

    The client of a cluster has a method `infer_rows`, which answers all rows of a request at once. `outputs`
    are name, shape and dtype of every tensor of one output.
    """

    def __init__(
        self, batcher: Answerer, engine: Any, name: str, slo_ms: float, images: Any, **common: Any
    ) -> None:
        self.signature = Signature(engine.sample)
        super().__init__(**common, values=self.signature.count)
        self.batcher = batcher
        self._rows = getattr(batcher, "infer_rows", None) or partial(infer_rows, batcher)
        self.name, self.slo_ms = name, slo_ms
        self.version = str(getattr(engine, "fingerprint", None) or "1")
        [output] = engine.run(0, [engine.sample], 1)
        self.outputs = [(name, list(t.shape), t.dtype) for name, t in named_tensors(output, "output")]
        self.images = Images(self.signature, self.limits.pixels, **images)

    def unready(self) -> str:
        """Return why the server should get no requests, or an empty text."""
        return super().unready() or ("" if self.batcher.stats().workers_up else "no worker")

    def prometheus(self) -> str:
        """Return metrics in Prometheus' text format."""
        return self.batcher.prometheus()

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:
        """Return what a client is told in JSON; the Open Inference Protocol has a form of its own."""
        if path.startswith("/v2"):
            return {"error": f"{refusal.kind}: {refusal}"}
        return super().error_document(refusal, path)

    async def infer(
        self, exchange: Exchange, decode: Callable[[Headers, Raw], Decoded[Asked]]
    ) -> tuple[Asked, Sequence[Answer]]:
        """Answer one request, whose time counts from its arrival, as `exchange` does."""

        async def answer(found: Decoded[Asked]) -> Sequence[Answer]:
            _, rows, ask = found
            query, longest_ms = exchange.scope["query_string"], self.limits.deadline_ms
            deadline_ms = read_ask(ask, query, exchange.headers, self.slo_ms, longest_ms)
            left_ms = deadline_ms - (now_ms() - exchange.arrived_ms)
            if left_ms <= 0.0:
                raise DeadlinePassed(
                    f"deadline_ms: {deadline_ms:g} ms passed before the request was read; allow more"
                )
            wishes = {"priority": ask.priority, "client": exchange.client}
            return await self._rows(rows, left_ms, min_accuracy=ask.min_accuracy, **wishes)

        (asked, _, _), answers = await self.exchange(exchange, partial(decode, exchange.headers), answer)
        return asked, answers

    def facts(self, answers: Sequence[Answer], ask: Terms, exchange: Exchange) -> dict[str, Any]:
        """Return what every reply tells of its answers besides the subnets."""
        latency_ms = now_ms() - exchange.arrived_ms
        accuracy = round(min(one.accuracy for one in answers), 2)
        met = latency_ms <= (ask.deadline_ms or 0.0)
        return {"accuracy": accuracy, "latency_ms": round(latency_ms, 3), "met": met}

    def close(self, drain: bool = True) -> None:
        """Finish or drop accepted requests, refuse new ones, and end the threads."""
        self.closing = True
        self.batcher.close(drain=drain)
        super().close()


def load_engine(
    bundle: str | PathLike[str], supernet: Any = None, attempts: int = 3, mapped: bool = False
) -> Engine:
    """Load a bundle whole: if it changes on the disk meanwhile, it is read again, up to `attempts` times.

    A server serves what it has loaded, whatever happens to the folder later.
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
    """Return size and time of change of every file by name and inode, or None if there is no folder."""
    try:
        found = [(path.name, path.stat()) for path in Path(bundle).iterdir()]
    except OSError:
        return None
    return {(name, stat.st_ino): (stat.st_size, stat.st_mtime_ns) for name, stat in found}


def written_over(before: BundleState | None, now: BundleState | None) -> bool:
    """Return whether tensors of a bundle, which stay mapped after loading, were changed in place.

    Other files are closed after loading, so that a new file may get the inode of an old one.
    """
    tensors = {file: facts for file, facts in (before or {}).items() if file[0].endswith(".safetensors")}
    return any(now[file] != facts for file, facts in tensors.items() if now and file in now)


def scheduler_table(engine: Engine, given: str | PathLike[str] | None = None) -> LatencyTable | None:
    """Return the table to schedule by: a given file, the bundle's `scheduler`, its first one, or None."""
    own = engine.tables.get("scheduler") or next(iter(engine.tables.values()), None)
    table: LatencyTable | None = own if given is None else LatencyTable.load(given)
    if table is not None and not all(map(math.isfinite, table.accuracy)):
        raise TableError(
            "table: accuracies of subnets are not known, and policies need them; give a --table that has them"
        )
    return table
