"""A real engine behind the live batcher: answers, minimum accuracies, faults and mismatched tables."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch

import subnetact
import subnetact.serving
from subnetact.errors import InvalidRequest, ProfileMismatch
from subnetact.serving.live.batcher import Answer
from subnetact.supernet.supernet import Supernet

EXAMPLE = torch.zeros(1, 16, 16)
IMAGES = torch.randn(40, 1, 16, 16, generator=torch.Generator().manual_seed(0))
SLO_MS = 1e7


@pytest.fixture
def engine(digits: Supernet) -> subnetact.Engine:
    specs = [
        digits.space.smallest(),
        digits.space.spec(depth=2, expand=0.25, width=0.5),
        digits.space.largest(),
    ]
    subnetact.calibrate(digits, specs, [IMAGES], progress=False)
    return subnetact.Engine(digits, specs, example=EXAMPLE[None])


def table_of(engine: subnetact.Engine, **stamp: str) -> subnetact.LatencyTable:
    """Make a table of invented latencies, which saves measuring."""
    latency = [[1.0, 2.0, 3.0], [2.0, 3.0, 5.0], [5.0, 9.0, 16.0]]
    return subnetact.LatencyTable(engine.keys, [60.0, 70.0, 80.0], [1, 4, 8], latency, stamp=stamp)


def test_every_answer_is_its_own_requests(engine: subnetact.Engine) -> None:
    expected = [engine(IMAGES, subnet=i) for i in range(len(engine))]

    async def serve() -> list[Answer]:
        policy = subnetact.SlackFit(table_of(engine), slo_ms=SLO_MS)
        async with subnetact.Batcher(engine, policy=policy) as batcher:
            return await asyncio.gather(*(batcher.infer(x, deadline_ms=SLO_MS) for x in IMAGES))

    answers = asyncio.run(serve())
    for i, answer in enumerate(answers):
        torch.testing.assert_close(answer.output, expected[answer.subnet][i], atol=5e-5, rtol=1e-4)
        assert answer.met
        assert answer.accuracy == (60.0, 70.0, 80.0)[answer.subnet]
        assert answer.latency_ms > 0


def test_threads_share_one_batcher(engine: subnetact.Engine) -> None:
    expected = engine(IMAGES, subnet=0)
    wrong: list[int] = []
    with subnetact.Batcher(
        engine, policy=subnetact.serving.Fixed(table_of(engine), 0), slo_ms=36.0, workers=2
    ) as batcher:

        def client(start: int) -> None:
            futures = [(i, batcher.submit(IMAGES[i], deadline_ms=SLO_MS)) for i in range(start, 40, 4)]
            for i, future in futures:
                if (future.result(timeout=60).output - expected[i]).abs().max() > 1e-4:
                    wrong.append(i)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert batcher.stats().met == 40
    assert not wrong


def test_floors_are_respected(engine: subnetact.Engine) -> None:
    with subnetact.Batcher(engine, policy=subnetact.SlackFit(table_of(engine), slo_ms=SLO_MS)) as batcher:
        futures = [batcher.submit(x, deadline_ms=SLO_MS, min_accuracy=75.0) for x in IMAGES[:8]]
        assert {f.result(timeout=60).subnet for f in futures} == {2}
        with pytest.raises(InvalidRequest, match="min_accuracy"):
            batcher.submit(IMAGES[0], deadline_ms=SLO_MS, min_accuracy=81.0)


def test_bad_requests_are_refused_and_harm_nobody(engine: subnetact.Engine) -> None:
    with subnetact.Batcher(engine, policy=subnetact.SlackFit(table_of(engine), slo_ms=SLO_MS)) as batcher:
        good = batcher.submit(IMAGES[0], deadline_ms=SLO_MS)
        for deadline in (math.nan, math.inf, 0.0, -5.0, "soon"):
            with pytest.raises(InvalidRequest, match="deadline_ms"):
                batcher.submit(IMAGES[0], deadline_ms=deadline)
        for x in (IMAGES[0].double(), torch.zeros(1, 8, 8), "digit"):
            with pytest.raises(InvalidRequest, match="input: "):
                batcher.submit(x, deadline_ms=SLO_MS)
        assert good.result(timeout=60).met


def test_a_profile_of_something_else_is_refused(engine: subnetact.Engine, digits: Supernet) -> None:
    other = subnetact.Engine(digits, engine.specs[:2], example=EXAMPLE[None])
    with pytest.raises(ProfileMismatch, match="3 subnets, but the engine has 2"):
        subnetact.Batcher(other, table=table_of(engine), slo_ms=SLO_MS)
    with pytest.raises(ProfileMismatch, match="measured on supernet 0123"):
        subnetact.Batcher(engine, table=table_of(engine, supernet="0123"), slo_ms=SLO_MS)
    with subnetact.Batcher(
        engine, table=table_of(engine, supernet=engine.fingerprint), slo_ms=SLO_MS
    ) as batcher:
        assert batcher.stats().submitted == 0
