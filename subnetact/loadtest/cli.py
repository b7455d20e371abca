"""Send a trace to a server of `python -m subnetact.serve` in an open loop.

    python -m subnetact.loadtest http://127.0.0.1:8000 --trace bursty --rate 300 --slo-ms 50 --seconds 10

Every request is sent at its time in the trace, whether or not others were answered, and its latency counts
from that time, so that a client that falls behind hides nothing. A line shows how the test goes, and a table
at the end what came of it. The model for digits gets digits that no subnet has seen, and the table says how
many answers were right; every other model gets random numbers, unless --inputs and --labels name files.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from subnetact.command import OptionFormatter, reported
from subnetact.errors import ServeError
from subnetact.files.documents import write_json
from subnetact.loadtest.open_loop import summary, table, trace
from subnetact.serving.simulation.datasets import TRACES

RANDOM_INPUTS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the options of `sys.argv` if None are given; return the exit status, 2 if the test cannot run."""
    name = "python -m subnetact.loadtest"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=OptionFormatter)
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
    return reported(_run, parser.parse_args(arguments), "subnetact.loadtest")


def _run(args: argparse.Namespace) -> None:
    if not args.slo_ms > args.reserve_ms >= 0 or not args.seconds > 0:
        raise ServeError("give --seconds > 0 and --slo-ms > --reserve-ms >= 0")
    arrivals = trace(args.trace, args.rate, args.seconds, args.cv2, args.seed).tolist()
    if not arrivals:
        raise ServeError("the trace is empty; give a higher --rate or more --seconds")
    from subnetact.loadtest.http_client import ask_server  # The extra `serve` may be missing.

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
        from subnetact.loadtest.http_client import served_input

        name, shape, dtype = asyncio.run(served_input(args.url, args.token))
        if name == "digits":
            from subnetact.serve.digits_engine import unseen_digits

            digits = unseen_digits()
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
