"""The demo of the embedded language model: which tokens count, how much, and whether it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from subnetact.demo.text_demo import (
    ANSWER,
    SEQUENCES,
    Quality,
    TextRun,
    TextTrace,
    _outcome,
    count_tokens,
    text_trace,
)
from subnetact.errors import BatchFailed, DeadlinePassed, TraceError

QUALITY = [Quality(3.6, 27.0, 26.5), Quality(3.4, 30.0, 29.0)]


def test_late_tokens_do_not_count_and_switched_ones_count_less() -> None:
    trace = TextTrace((100.0, 200.0, 300.0), token_ms=10.0, lull=0, burst=0, sustained=())
    answers = [(1, 1, 0, 1), (0, 0), ()]
    times = [[150.0, 160.0, 170.0, 180.1], [250.0, 260.1], []]  # due at 150, 160, 170, 180; 250, 260
    in_time, loss, right, switched = count_tokens(trace, answers, times, QUALITY)
    assert in_time == (150.0, 160.0, 170.0, 250.0)
    assert loss == (3.4, 3.4, 3.6, 3.6)
    assert right == (30.0, 30.0, 26.5, 27.0)
    assert switched == 1


def test_the_score_is_over_all_tokens_that_were_asked_for() -> None:
    run = TextRun("ours", 8, (1.0, 2.0), (3.4, 3.6), (30.0, 26.0), 1, 50.0, (0.5,), 1.0)
    assert run.score == pytest.approx(56.0 / 8)
    assert run.attainment == pytest.approx(25.0)
    assert run.figures["loss"] == pytest.approx(3.5)
    nothing = TextRun("none", 8, (), (), (), 8, 0.0, (0.5,), 1.0)
    assert (nothing.score, nothing.figures["loss"]) == (0.0, None)


def test_a_trace_has_a_request() -> None:
    with pytest.raises(TraceError, match="serve for longer"):
        text_trace((1500.0, 1000.0), 1e-6, seed=0)


def test_a_failure_of_the_library_is_no_late_answer() -> None:
    def failed(error: Exception) -> Any:
        def result() -> None:
            raise error

        return SimpleNamespace(result=result)

    assert _outcome(failed(DeadlinePassed("late"))) is None
    with pytest.raises(BatchFailed):
        _outcome(failed(BatchFailed("broken")))


def test_the_largest_subnet_can_serve_the_lulls_and_only_smaller_ones_the_burst() -> None:
    sustained = (1500.0, 1200.0, 1000.0)
    trace = text_trace(sustained, 60.0, seed=0)
    assert trace.sustained == sustained
    assert trace.token_ms == pytest.approx(1.5 * SEQUENCES)
    assert trace.lull < sustained[-1] < trace.burst < sustained[0]
    assert list(trace.arrivals_ms) == sorted(trace.arrivals_ms)
    burst = [1 for ms in trace.arrivals_ms if 22_500 <= ms < 37_500]
    assert ANSWER * len(burst) / 15 == pytest.approx(trace.burst, rel=0.1)
    lulls = len(trace.arrivals_ms) - len(burst)
    assert ANSWER * lulls / 45 == pytest.approx(trace.lull, rel=0.1)
    assert trace == text_trace(sustained, 60.0, seed=0)
    assert trace.arrivals_ms != text_trace(sustained, 60.0, seed=1).arrivals_ms


@pytest.mark.slow
def test_the_demo_runs_and_draws(tmp_path: Path, python_path: str) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "subnetact.demo", "--text", "--seconds", "1"]
    files = ["--out", "text.png", "--json", "text.json"]
    done = subprocess.run(
        [*command, *files],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path},
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "on held-out text",
        "The largest subnet continues",
        "in time x right",
        "all subnets",
        "FFN 56 alone",
    ):
        assert words in done.stdout
    assert (tmp_path / "text.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "text.json").read_text())
    assert [one["name"] for one in found["contenders"]] == [
        "all subnets",
        *(f"FFN {width} alone" for width in (56, 112, 224, 448, 896)),
    ]
    for one in found["contenders"]:
        assert one["tokens"] == ANSWER * found["prompts"]
        assert 0 <= one["in_time_times_right"] <= one["in_time"] <= 100
    for one in found["subnets"]:
        assert 20 < one["right_switched"] <= one["right"] < 40
