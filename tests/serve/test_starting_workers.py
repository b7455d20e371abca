"""A server is not healthy before a worker can take a batch."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

pytest.importorskip("starlette", reason="serving needs the extra `serve`")

from subnetact import Batcher, LatencyTable, SlackFit
from subnetact.serve import build_app


class Starting:
    """A runner whose worker starts when a test lets it."""

    keys = ("one",)
    sample = torch.zeros(4)

    def __init__(self):
        self.may_start = threading.Event()

    def enter_worker(self, threads):
        assert self.may_start.wait(60)

    def check(self, x, finite=False):
        pass

    def run(self, subnet, inputs, batch_size):
        return [x.clone() for x in inputs]


def test_health_waits_for_the_first_worker(post, wait_for):
    runner = Starting()
    table = LatencyTable(["one"], [70.0], [1], [[1.0]])
    with Batcher(runner, policy=SlackFit(table, slo_ms=60_000)) as batcher:
        app = build_app(batcher, runner, slo_ms=60_000)

        def health():
            return asyncio.run(post(app, None, path="/healthz", method="GET"))[0]

        try:
            assert health() == 503
            runner.may_start.set()
            wait_for(lambda: health() == 200, 60)
        finally:
            runner.may_start.set()
