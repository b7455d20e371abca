"""Send digits to a server or to a batcher in an open loop, and report accuracy and latency as JSON.

    python examples/load_generator.py --url http://127.0.0.1:8000/infer --trace bursty --qps 300
    python examples/load_generator.py --in-process --trace maf --qps 800 --policy hullfit

Latency counts from the time at which the trace demands a request, even if the request is sent later.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from digits_engine import unseen_digits
from http_client import HttpClient
from open_loop import Refused, Reply, Sent, run_open_loop, summary
from service import open_service, options
from torch import Tensor

from subnetact import Answer, Batcher
from subnetact.errors import RequestError, SubnetActError
from subnetact.serving import TRACES, bursty, from_timestamps, load_trace, poisson, time_varying

__all__ = ["ask_batcher", "ask_server", "refusal", "trace"]


def trace(name: str, qps: float, seconds: float, cv2: float = 4.0, seed: int = 0) -> npt.NDArray[np.float64]:
    """Make the arrival times of a trace.

    Args:
        name: `poisson`; `bursty`, half of whose rate is steady; `time_varying`, whose rate rises from half to
            one and a half times the mean; a recorded trace (`maf`, `azure_llm`, `servegen`); or the path of a
            file of time stamps, `.npy` or text.
        qps: mean number of requests per second.
        seconds: length in s; longer traces are cut.
        cv2: squared coefficient of variation of the gaps of bursty arrivals.
        seed: seed of random traces.

    Returns:
        The arrival times in ms, ascending.

    Raises:
        TraceError: The rate or the length is not positive.
        OSError: The file cannot be read.
    """
    if name == "poisson":
        return poisson(qps, seconds, seed)
    if name == "bursty":
        return bursty(qps / 2, qps / 2, cv2, seconds, seed)
    if name == "time_varying":
        return time_varying(qps / 2, 1.5 * qps, 2 * qps / seconds, cv2, seconds / 4, seconds / 4, seed)
    if name in TRACES:
        arrivals = from_timestamps(load_trace(name, seed=seed), mean_qps=qps)
    else:
        path = Path(name)
        stamps = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.loadtxt(path)
        arrivals = from_timestamps(stamps, mean_qps=qps)
    return arrivals[arrivals < seconds * 1e3]


async def ask_batcher(
    batcher: Batcher,
    images: Sequence[Tensor],
    arrivals_ms: Sequence[float],
    slo_ms: float,
    min_accuracy: float | None = None,
    read: Callable[[int, Answer], Reply] | None = None,
) -> list[Sent]:
    """Send a trace to a batcher in this process.

    Args:
        batcher: the batcher.
        images: the inputs, without a batch dimension; request i sends `images[i % len(images)]`.
        arrivals_ms: times at which to send, ascending, in ms.
        slo_ms: time that a request is given, in ms.
        min_accuracy: minimum accuracy of the answering subnets, in percent. If None, any may answer.
        read: makes the reply to request i from its answer. If None, the label is the class with the largest
            score.

    Returns:
        One entry per request, in order.
    """

    async def send(i: int, left_ms: float) -> Reply:
        try:
            answer = await batcher.infer(images[i % len(images)], left_ms, min_accuracy)
        except RequestError as error:
            raise Refused(type(error).__name__) from error
        if read is not None:
            return read(i, answer)
        return Reply(int(answer.output.argmax()), answer.subnet, answer.accuracy)

    return await run_open_loop(arrivals_ms, send, slo_ms)


async def ask_server(
    url: str,
    images: Sequence[Tensor],
    arrivals_ms: Sequence[float],
    slo_ms: float,
    min_accuracy: float | None = None,
    reserve_ms: float = 0.0,
) -> list[Sent]:
    """Send a trace to a server.

    Args:
        url: address of the server's `/infer`.
        images: the inputs, without a batch dimension; request i sends `images[i % len(images)]`.
        arrivals_ms: times at which to send, ascending, in ms.
        slo_ms: time that a request is given at the client, in ms.
        min_accuracy: minimum accuracy of the answering subnets, in percent. If None, any may answer.
        reserve_ms: part of `slo_ms` that is kept for the network; the server is told to answer earlier.

    Returns:
        One entry per request, in order.
    """
    pixels = [json.dumps([round(p, 4) for p in image.flatten().tolist()]) for image in images]
    floor = "" if min_accuracy is None else f', "min_accuracy": {min_accuracy}'
    client = HttpClient(url)

    async def send(i: int, left_ms: float) -> Reply:
        body = f'{{"deadline_ms": {left_ms:.3f}{floor}, "pixels": {pixels[i % len(pixels)]}}}'
        status, answer = await client.post(body.encode())
        if status != 200:
            raise Refused(refusal(status, answer))
        found = json.loads(answer)
        return Reply(found["class"], found["subnet"], found["accuracy"])

    try:
        await client.open(16)
        return await run_open_loop(arrivals_ms, send, slo_ms - reserve_ms)
    finally:
        client.close()


def refusal(status: int, answer: bytes) -> str:
    """Return the name of the error that a server returned, or the HTTP status if the body names none.

    Args:
        status: the HTTP status.
        answer: the body.
    """
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, TypeError, KeyError):
        return f"HTTP {status}"


def main() -> None:
    """Run the command line."""
    parser = options(__doc__)
    parser.add_argument("--url", help="address of a server's /infer")
    parser.add_argument("--in-process", action="store_true", help="open a batcher in this process instead")
    parser.add_argument("--trace", default="poisson", help=f"poisson, {', '.join(TRACES)}, or a file")
    parser.add_argument("--qps", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--cv2", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-accuracy", type=float)
    parser.add_argument(
        "--reserve-ms", type=float, default=5.0, help="part of the SLO that is kept for the network"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    if (args.url is None) == (not args.in_process):
        parser.error("give either --url or --in-process")
    digits = unseen_digits()
    images, labels = list(digits.images), digits.labels.tolist()
    try:
        arrivals = trace(args.trace, args.qps, args.seconds, args.cv2, args.seed).tolist()
        sent = _send(args, images, arrivals)
    except (SubnetActError, OSError, ValueError) as error:
        parser.error(str(error))
    report: dict[str, Any] = {"trace": args.trace, "qps": args.qps, "slo_ms": args.slo_ms}
    text = json.dumps({**report, **summary(sent, labels, args.slo_ms)}, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


def _send(args: argparse.Namespace, images: list[Tensor], arrivals: list[float]) -> list[Sent]:
    if args.url is not None:
        return asyncio.run(
            ask_server(args.url, images, arrivals, args.slo_ms, args.min_accuracy, args.reserve_ms)
        )
    with open_service(args).batcher as batcher:
        return asyncio.run(ask_batcher(batcher, images, arrivals, args.slo_ms, args.min_accuracy))


if __name__ == "__main__":
    main()
