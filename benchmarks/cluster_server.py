"""One server of `cluster.py`, in a process of its own: ours on Ray, or a plain Ray Serve deployment."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from subnetact import Engine

MOST = 4
"""Largest number of pages in a batch of the plain deployment."""


def ours(args: argparse.Namespace) -> None:
    """Serve the application that `subnetact.cluster.build_app` makes, behind Ray's HTTP proxy."""
    from subnetact.cluster import build_app

    settings = {"slo_ms": args.slo_ms, "workers": args.threads, "policy": args.policy}
    app = build_app(args.bundle, args.replicas, fronts=1, name="digits", **settings)
    on_ray(args, args.replicas * args.threads, lambda _: app)


class FixedSubnet:
    """What a user of Ray Serve writes: one subnet, and Ray's batches, first come, first served."""

    def __init__(self, bundle: str, subnet: int) -> None:
        torch.set_num_threads(1)
        self._engine = Engine.load(bundle)
        self._engine.pin(subnet)
        self._engine.prepare((16, 32, 64), [subnet])
        self._subnet = subnet
        serve: Any = import_module("ray.serve")
        self._answer = serve.batch(self._run, max_batch_size=MOST, batch_wait_timeout_s=0.002)

    async def _run(self, pages: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        x = torch.from_numpy(np.concatenate(pages))
        return list(self._engine(x, self._subnet).numpy().reshape(len(pages), -1, 10))

    async def __call__(self, request: Any) -> Any:
        """Answer one page with its scores, as a NumPy file."""
        page = np.load(io.BytesIO(await request.body()), allow_pickle=False)
        file = io.BytesIO()
        np.save(file, await self._answer(page))
        accuracy = self._engine.accuracy[self._subnet]
        headers = {"x-subnet": str(self._subnet), "x-accuracy": str(accuracy)}
        response: Any = import_module("starlette.responses").Response
        return response(file.getvalue(), headers=headers)


def plain(args: argparse.Namespace) -> None:
    """Serve one subnet behind Ray's HTTP proxy."""

    def made(serve: Any) -> Any:
        one_core = {"num_cpus": 1}
        how = {"num_replicas": args.replicas, "max_ongoing_requests": 1000, "ray_actor_options": one_core}
        return serve.deployment(FixedSubnet, **how).bind(args.bundle, args.subnet)

    on_ray(args, args.replicas, made)


def on_ray(args: argparse.Namespace, cores: int, make: Callable[[Any], Any]) -> None:
    """Start Ray, serve an application until SIGTERM, and end Ray."""
    ray: Any = import_module("ray")
    serve: Any = import_module("ray.serve")
    ray.init("local", num_cpus=cores + 1, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(make(serve), name=args.kind, route_prefix="/")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(f"listening on http://127.0.0.1:{args.port}", flush=True)
    ended.wait()
    serve.shutdown()
    ray.shutdown()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("ours", "plain"))
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="workers of every replica")
    parser.add_argument("--policy", default="slackfit:4")
    parser.add_argument("--slo-ms", type=float, default=250.0)
    parser.add_argument("--subnet", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    print(json.dumps(vars(args)), flush=True)
    (ours if args.kind == "ours" else plain)(args)


if __name__ == "__main__":
    main()
