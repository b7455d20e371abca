"""The demo of the embedded language model: which tokens count, how much, and whether it runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from generation_tables import step_table

from subnetact.demo import text_demo
from subnetact.demo.cli import main
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
from subnetact.generation import StepTable

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


def test_the_demo_runs_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With made-up times of steps and little text; how many tokens come in time is left to the machine."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")

    def made_up(supernet: Any, specs: Any, *, accuracy: Any, **_: Any) -> StepTable:
        return step_table([str(spec) for spec in specs], tuple(accuracy))

    monkeypatch.setattr(text_demo, "profile_steps", made_up)
    monkeypatch.setattr(text_demo, "_sustained", lambda _, spec, *__: 200.0 - 0.1 * sum(spec["ffn"]) / 4)
    monkeypatch.setattr(text_demo, "HELD_OUT_TOKENS", 514)
    files = ["--out", str(tmp_path / "text.png"), "--json", str(tmp_path / "text.json")]
    assert main(["--text", "--seconds", "0.5", *files]) == 0
    printed = capsys.readouterr().out
    for words in (
        "on held-out text",
        "The largest subnet continues",
        "in time x right",
        "all subnets",
        "FFN 56 alone",
    ):
        assert words in printed
    assert (tmp_path / "text.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "text.json").read_text())
    assert found["prompts"] > 3
    assert [one["name"] for one in found["contenders"]] == [
        "all subnets",
        *(f"FFN {width} alone" for width in (56, 112, 224, 448, 896)),
    ]
    for one in found["contenders"]:
        assert one["tokens"] == ANSWER * found["prompts"]
        assert 0 <= one["in_time_times_right"] <= one["in_time"] <= 100
    for one in found["subnets"]:
        assert 10 < one["right_switched"] <= one["right"] < 60
