"""The demo of the embedded language model: which tokens count, how much, and whether it runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import text_demo
from demo import Run, serve
from generation_tables import step_table
from text_demo import ANSWER, SEQUENCES, main, prompt_trace

from subnetact.errors import BatchFailed, DeadlinePassed, QueueFull, TraceError
from subnetact.generation import StepTable
from subnetact.generation.text import text_facts


def test_the_score_is_over_all_tokens_that_were_asked_for() -> None:
    accuracy = np.array([30.0, 26.0, *[np.nan] * 6])
    run = Run("ours", accuracy, np.nan_to_num(accuracy) / 100, np.array([0.5]), 1.0)
    assert run.shares == pytest.approx({"in time": 25.0, "profiled": 28.0, "right and in time": 56.0 / 8})
    nothing = np.full(8, np.nan)
    run = Run("none", nothing, np.zeros(8), np.array([0.5]), 1.0)
    assert run.shares == {"in time": 0.0, "profiled": 0.0, "right and in time": 0.0}


def test_a_full_queue_costs_its_request_and_a_failure_of_the_library_is_no_late_answer() -> None:
    def ended(error: Exception | None, answer: int = 0) -> Any:
        def result() -> int:
            if error is not None:
                raise error
            return answer

        return SimpleNamespace(result=result)

    def submit(i: int, _: float) -> Any:
        if i == 1:
            raise QueueFull("full")
        return ended(None, i)

    assert serve(np.zeros(1), lambda *_: ended(DeadlinePassed("late")))[0] == [None]
    with pytest.raises(BatchFailed):
        serve(np.zeros(1), lambda *_: ended(BatchFailed("broken")))
    answers, late_ms = serve(np.zeros(3), submit)
    assert answers == [0, None, 2]
    assert len(late_ms) == 3


def test_the_largest_subnet_can_serve_the_lulls_and_only_smaller_ones_the_burst() -> None:
    arrivals_ms, token_ms = prompt_trace((1500.0, 1200.0, 1000.0), 60.0, seed=0)
    assert token_ms == pytest.approx(1.5 * SEQUENCES)
    assert arrivals_ms.tolist() == sorted(arrivals_ms)
    in_burst = (arrivals_ms >= 22_500) & (arrivals_ms < 37_500)
    burst = ANSWER * in_burst.sum() / 15
    lull = ANSWER * (~in_burst).sum() / 45
    assert burst == pytest.approx(0.95 * 1500, rel=0.1)
    assert lull == pytest.approx(0.7 * 1000, rel=0.1)
    again, other = (prompt_trace((1500.0, 1200.0, 1000.0), 60.0, seed=seed)[0] for seed in (0, 1))
    assert np.array_equal(again, arrivals_ms)
    assert not np.array_equal(other, arrivals_ms)
    with pytest.raises(TraceError, match="serve for longer"):
        prompt_trace((1500.0, 1000.0), 1e-6, seed=0)


def test_the_demo_runs_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With made-up times of steps and little text; how many tokens come in time is left to the machine."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")

    def made_up(supernet: Any, specs: Any, *, accuracy: Any, **_: Any) -> StepTable:
        return step_table([spec.key for spec in specs], tuple(accuracy))

    monkeypatch.setattr(text_demo, "profile_steps", made_up)
    monkeypatch.setattr(text_demo, "_sustained", lambda _, spec, *__: 200.0 - 0.1 * sum(spec["ffn"]) / 4)
    files = ["--out", str(tmp_path / "text.png"), "--json", str(tmp_path / "text.json")]
    assert main(["--seconds", "0.5", *files]) == 0
    printed = capsys.readouterr().out
    for words in ("on held-out docstrings", "The largest subnet continues", "right and in time"):
        assert words in printed
    assert (tmp_path / "text.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "text.json").read_text())
    assert found["prompts"] > 3
    names = ["all subnets", *(f"FFN {width} alone" for width in (896, 56, 112, 224, 448))]
    assert [one["name"] for one in found["contenders"]] == names
    for one in found["contenders"]:
        assert one["items"] == ANSWER * found["prompts"]
        assert 0 <= one["right_and_in_time"] <= one["in_time"] <= 100
    alone = {one["name"]: one["profiled"] for one in found["contenders"][1:] if one["in_time"]}
    known = [one["right_percent"] for one in text_facts()["held_out"]]
    assert all(any(value == pytest.approx(right) for right in known) for value in alone.values())
