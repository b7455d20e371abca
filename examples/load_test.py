"""Send a trace to a server in an open loop, and report what came of it.

    pip install 'subnetact[serve]' aiohttp
    python examples/load_test.py http://127.0.0.1:8000 --trace bursty --rate 300 --slo-ms 50 --seconds 10

The server is one of `python -m subnetact.serve`. Every request is sent at its time in the trace, whether or
not others were answered, and its latency counts from that time, so that a client that falls behind hides
nothing. A line shows how the test goes, and a table at the end what came of it. The model for digits gets
digits that no subnet has seen, and the table says how many answers were right; every other model gets random
numbers, unless --inputs and --labels name files.

Requests travel over connections of aiohttp, because a POST takes 0.09 ms of CPU time with it. With httpx 0.28
it takes 0.9 to 4.6 ms, too long for an open loop from one core.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiohttp import ClientError, ClientSession, TCPConnector
from tqdm import tqdm
from yarl import URL

from subnetact.command import OptionFormatter, reported, run_command
from subnetact.digits import validation_and_test
from subnetact.errors import ServeError
from subnetact.files.documents import write_json
from subnetact.serving import bursty, load_trace, poisson, time_varying
from subnetact.serving.simulation.datasets import TRACES
from subnetact.serving.simulation.traces import from_timestamps

NUMPY_NAMES = {"BOOL": "bool", "FP16": "float16", "BF16": "float32", "FP32": "float32", "FP64": "float64"}
NUMPY_NAMES |= {f"{k.upper()}{n}": f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64)}
"""The dtype to send by datatype."""
RANDOM_INPUTS = 64


class Reply(NamedTuple):
    """The content of an answer: the class, the subnet that ran, and its profiled accuracy in percent."""

    label: int
    subnet: int
    accuracy: float


class Refused(Exception):
    """The server returned an error; the message is the name of the error."""


class Sent(NamedTuple):
    """What became of one request; times count from when it should have been sent."""

    outcome: str  # `answered`, `unanswered`, or the name of the error
    lag_ms: float  # how much later than intended it was sent
    latency_ms: float  # until the answer or error
    reply: Reply | None


#: takes the number of a request and the time it has left, in ms; returns its reply or raises `Refused`
Send = Callable[[int, float], Awaitable[Reply]]


async def run_open_loop(
    arrivals_ms: Sequence[float],
    send: Send,
    budget_ms: float,
    give_up_ms: float = 5000.0,
    tell: Callable[[Sent], object] | None = None,
    clock_s: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> list[Sent]:
    """Send the requests of a trace at their times, each with `budget_ms`; return what became of them.

    Times count from when a request should have been sent, so that a client that falls behind does not hide
    how long requests wait (coordinated omission). What has no answer `give_up_ms` after the last one was sent
    is unanswered. `tell` is called with every outcome.
    """

    async def one(i: int, due_ms: float, lag_ms: float) -> Sent:
        reply, outcome = None, "answered"
        try:
            if lag_ms >= budget_ms:
                raise Refused("SentTooLate")
            reply = await send(i, budget_ms - lag_ms)
        except Refused as error:
            outcome = str(error)
        except (OSError, ValueError) as error:  # the connection broke, or the answer is no HTTP
            outcome = type(error).__name__
        sent = Sent(outcome, lag_ms, (clock_s() - started) * 1e3 - due_ms, reply)
        if tell is not None:
            tell(sent)
        return sent

    tasks: list[asyncio.Task[Sent]] = []
    started = clock_s()
    for i, due_ms in enumerate(arrivals_ms):
        early_s = started + due_ms / 1e3 - clock_s()
        if early_s > 0:
            await sleep(early_s)
        tasks.append(asyncio.create_task(one(i, due_ms, (clock_s() - started) * 1e3 - due_ms)))
    if not tasks:
        return []
    _, waiting = await asyncio.wait(tasks, timeout=give_up_ms / 1e3)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    missing = Sent("unanswered", float("nan"), float("nan"), None)
    return [missing if task in waiting else task.result() for task in tasks]


def trace(name: str, rate: float, seconds: float, cv2: float = 4.0, seed: int = 0) -> npt.NDArray[np.float64]:
    """Return the arrival times of a trace, in ms, ascending.

    `name` is `poisson`; `bursty`, half of whose rate is steady and the other half has gaps of `cv2`;
    `time_varying`, whose rate rises from half to one and a half times the mean; a recorded trace (`maf`,
    `azure_llm`, `servegen`); or the path of a file of one column of time stamps, text or CSV. The
    mean `rate` is per second, and what comes after `seconds` is cut.
    """
    if name == "poisson":
        return poisson(rate, seconds, seed)
    if name == "bursty":
        return bursty(rate / 2, rate / 2, cv2, seconds, seed)
    if name == "time_varying":
        return time_varying(rate / 2, 1.5 * rate, 2 * rate / seconds, cv2, seconds / 4, seconds / 4, seed)
    arrivals = from_timestamps(load_trace(name, seed=seed), mean_qps=rate)
    return arrivals[arrivals < seconds * 1e3]


def summary(sent: Sequence[Sent], labels: Sequence[int] | None, slo_ms: float) -> dict[str, Any]:
    """Summarise a run: shares of all requests in time, accuracies in percent, times in ms, and counts.

    An answer is in time if its latency is at most `slo_ms`; the right class of request i is
    `labels[i % len(labels)]`. `measured_accuracy` and `profiled_accuracy` are of the answers in time,
    `effective_accuracy` of all requests; without `labels` nobody knows those that count right answers.
    """
    met = [(i, s.reply) for i, s in enumerate(sent) if s.reply is not None and s.latency_ms <= slo_ms]
    count, of_right = max(1, len(sent)), {}
    if labels is not None:
        right = sum(reply.label == labels[i % len(labels)] for i, reply in met)
        of_right = {
            "measured_accuracy": 100 * right / max(1, len(met)),
            "effective_accuracy": 100 * right / count,
        }
    outcomes = Counter(s.outcome for s in sent)
    outcomes["late"] = outcomes.pop("answered", 0) - len(met)
    outcomes["met"] = len(met)
    return {
        "requests": len(sent),
        "attainment": len(met) / count,
        **of_right,
        "profiled_accuracy": float(np.mean([reply.accuracy for _, reply in met])) if met else 0.0,
        "latency_ms": _percentiles([s.latency_ms for s in sent if s.reply is not None]),
        "lag_ms": _percentiles([s.lag_ms for s in sent if s.outcome != "unanswered"]),
        "subnets": dict(sorted(Counter(reply.subnet for _, reply in met).items())),
        "outcomes": {kind: n for kind, n in sorted(outcomes.items()) if n},
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, [50, 90, 99, 100])
    return dict(zip(("p50", "p90", "p99", "max"), map(float, found), strict=True))


def table(report: dict[str, Any]) -> str:
    """Return the table of what `summary` returned."""

    def listed(found: dict[Any, Any], form: str) -> str:
        return "  ".join(form.format(name, number) for name, number in found.items()) or "-"

    rows = {
        "requests": f"{report['requests']}",
        "answered in time": f"{100 * report['attainment']:.2f} %",
        "accuracy served": f"{report['profiled_accuracy']:.2f} % by the table",
    }
    if "measured_accuracy" in report:
        rows["right, of those"] = f"{report['measured_accuracy']:.2f} %"
        rows["right and in time"] = f"{report['effective_accuracy']:.2f} % of all requests"
    rows["latency, ms"] = listed(report["latency_ms"], "{} {:.1f}")
    rows["sent late by, ms"] = listed(report["lag_ms"], "{} {:.1f}")
    rows["outcomes"] = listed(report["outcomes"], "{} {}")
    rows["subnets in time"] = listed(report["subnets"], "{}: {}")
    return "\n".join(f"{name:<20}{text}" for name, text in rows.items())


class HttpClient:
    """Sends requests to `http://host:port/path`, by default `/infer`, each on a connection that is free.

    A POST that was sent is never sent again, so that requests that a server loses are seen.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            self.url = URL(url)
        except ValueError as error:
            raise ServeError(f"url: {url!r} is not http://host:port ({error})") from None
        if self.url.scheme not in ("http", "https") or not self.url.host or any(c in url for c in "\r\n "):
            raise ServeError(f"url: {url!r} is not http://host:port/path")
        if self.url.path == "/":
            self.url = self.url.with_path("/infer")
        self._access = {"Authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> HttpClient:
        connector = TCPConnector(limit=0)  # as many connections as requests are under way
        self._session = ClientSession(headers=self._access, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        """Return the JSON at another address of the server."""
        async with self._session.get(self.url.with_path(path), raise_for_status=True) as answer:
            return await answer.json()

    async def post(self, body: bytes, **headers: str) -> bytes:
        """Return the body of the answer; raise `Refused` with the server's reason, or the connection's."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            async with self._session.post(self.url, data=body, headers=named) as answer:
                document = await answer.read()
        except ClientError as error:
            raise Refused(type(error).__name__) from error
        if answer.status != 200:
            raise Refused(refusal(answer.status, document))
        return document


async def served_input(url: str, token: str | None = None) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    """Return the name of the model of a server, and the shape and dtype of its one input."""
    async with HttpClient(url, token) as client:
        try:
            [name, *_] = (await client.get("/v2/models"))["models"]
            [part] = (await client.get(f"/v2/models/{name}"))["inputs"]
            return name, tuple(part["shape"][1:]), np.dtype(NUMPY_NAMES[part["datatype"]])
        except (ClientError, ValueError, KeyError, TypeError) as error:
            raise ServeError(
                f"url: {url} describes no model with one tensor as its input ({error}); give --inputs "
                "FILE.npy"
            ) from error


def _body(x: npt.NDArray[Any], kind: str) -> bytes:
    if kind == "json":
        return json.dumps({"input": [round(value, 4) for value in x.flatten().tolist()]}).encode()
    file = io.BytesIO()
    np.save(file, x, allow_pickle=False)
    return file.getvalue()


async def ask_server(
    url: str,
    inputs: Iterable[npt.NDArray[Any]],
    arrivals_ms: Sequence[float],
    slo_ms: float,
    min_accuracy: float | None = None,
    reserve_ms: float = 0.0,
    body: str = "npy",
    token: str | None = None,
    tell: Callable[[Sent], object] | None = None,
) -> list[Sent]:
    """Send a trace to a server, and `inputs[i % len(inputs)]` with request i; return what became of each.

    The server is told `reserve_ms` less than `slo_ms`, for the network; `tell` is called with every outcome.
    """
    bodies = [_body(x, body) for x in inputs]
    floor = {} if min_accuracy is None else {"x_min_accuracy": str(min_accuracy)}

    async def send(i: int, left_ms: float) -> Reply:
        answer = await client.post(bodies[i % len(bodies)], x_deadline_ms=f"{left_ms:.3f}", **floor)
        found = json.loads(answer)
        return Reply(found.get("class", -1), found["subnet"], found["accuracy"])

    async with HttpClient(url, token) as client:
        return await run_open_loop(arrivals_ms, send, slo_ms - reserve_ms, tell=tell)


def refusal(status: int, answer: bytes) -> str:
    """Return the name of the error that a server returned, or the HTTP status if the body names none."""
    try:
        return str(json.loads(answer)["error"])[:80]
    except (ValueError, TypeError, KeyError):
        return f"HTTP {status}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the options of `sys.argv` if None are given; return the exit status, 2 if the test cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=OptionFormatter)
    add = parser.add_argument
    add("url", help="address of the server, for example http://127.0.0.1:8000")
    traces = f"poisson, bursty, time_varying, {', '.join(TRACES)}, or a file"
    add("--trace", default="bursty", help=traces)
    add("--rate", type=float, default=100.0, help="mean requests per second")
    add("--seconds", type=float, default=10.0, help="length of the trace")
    add("--slo-ms", type=float, default=50.0, help="time that a request has at the client")
    add("--reserve-ms", type=float, default=5.0, help="part of the SLO kept for the network")
    add("--min-accuracy", type=float, help="of the answering subnets, percent")
    add("--cv2", type=float, default=4.0, help="burstiness of bursty traces")
    add("--seed", type=int, default=0, help="of random traces and inputs")
    add("--inputs", type=Path, help="inputs as a NumPy file (N, ...)")
    add("--labels", type=Path, help="the right classes as a NumPy file (N,)")
    add("--body", choices=("json", "npy"), default="npy", help="how inputs travel")
    add("--token", help="token of the server")
    add("--out", type=Path, help="write the report to this file, as JSON")
    return reported(_run, parser.parse_args(arguments), "load_test")


def _run(args: argparse.Namespace) -> None:
    if not args.slo_ms > args.reserve_ms >= 0 or not args.seconds > 0:
        raise ServeError("give --seconds > 0 and --slo-ms > --reserve-ms >= 0")
    arrivals = trace(args.trace, args.rate, args.seconds, args.cv2, args.seed).tolist()
    if not arrivals:
        raise ServeError("the trace is empty; give a higher --rate or more --seconds")
    inputs, labels = _inputs(args)
    with tqdm(total=len(arrivals), disable=None, leave=False, unit=" requests") as line:
        wishes = args.slo_ms, args.min_accuracy, args.reserve_ms, args.body, args.token
        sent = asyncio.run(ask_server(args.url, inputs, arrivals, *wishes, lambda _: line.update()))
    names = ("url", "trace", "rate", "slo_ms", "reserve_ms", "body")
    report = {**{name: getattr(args, name) for name in names}, **summary(sent, labels, args.slo_ms)}
    print(table(report))
    if args.out is not None:
        write_json(args.out, report)


def _inputs(args: argparse.Namespace) -> tuple[npt.NDArray[Any], list[int] | None]:
    """Return the inputs (N, ...), and the classes if they are known."""
    if args.inputs is None:
        if args.labels is not None:
            raise ServeError("labels: give --inputs too, whose classes they are")
        name, shape, dtype = asyncio.run(served_input(args.url, args.token))
        if name == "digits":
            digits = validation_and_test(3, seed=1)[1]
            if tuple(digits.images.shape[1:]) == shape:
                return digits.images.numpy(), digits.labels.tolist()
        rng = np.random.default_rng(args.seed)
        if dtype.kind == "f":
            return rng.standard_normal((RANDOM_INPUTS, *shape)).astype(dtype), None
        return np.zeros((1, *shape), dtype), None
    inputs = _array(args.inputs)
    if inputs.ndim < 2 or not len(inputs):
        raise ServeError(f"inputs: {args.inputs} has shape {inputs.shape}; give an array of shape (N, ...)")
    if args.labels is None:
        return inputs, None
    labels = _array(args.labels)
    if labels.shape != inputs.shape[:1] or labels.dtype.kind not in "iu":
        raise ServeError(f"labels: {args.labels} must hold {len(inputs)} whole numbers, one per input")
    return inputs, labels.tolist()


def _array(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ServeError(f"{path}: not a NumPy file of numbers ({error})") from error


if __name__ == "__main__":
    run_command(main)
