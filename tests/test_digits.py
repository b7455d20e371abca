"""The embedded trained supernet: real accuracy, its collapse on shared statistics, and the demo."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import demo
import numpy as np
import pytest
import torch
from demo import Run, machine_notes, main, serve

from subnetact import calibrate, evaluate
from subnetact.digits import (
    distort,
    load_digits_supernet,
    read_digits,
    undistorted_digits,
    validation_and_test,
)
from subnetact.errors import BatchFailed, DeadlinePassed, QueueFull, SpecError

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


def test_digits_are_what_the_supernet_takes_repeatable_and_held_out_ones_apart() -> None:
    training, held_out = undistorted_digits()
    assert len(training.labels) + len(held_out.labels) == 1797
    seen = {image.numpy().tobytes() for image in training.images}
    assert sum(image.numpy().tobytes() in seen for image in held_out.images) == 0
    for one, other, again, plain in zip(
        read_digits(), read_digits(1), read_digits(), (training, held_out), strict=True
    ):
        assert one.images.shape == (len(plain.labels), 1, 16, 16)
        assert torch.equal(one.labels, plain.labels)
        assert torch.equal(one.images, again.images)
        assert not torch.equal(one.images, other.images)
    validation, test = validation_and_test(2, seed=5)
    _, held_out = read_digits(6)
    assert torch.equal(validation.images[-300:], held_out.images[::2])
    assert torch.equal(validation.labels, held_out.labels[::2].repeat(2))
    assert torch.equal(test.images[-299:], held_out.images[1::2])
    with pytest.raises(SpecError, match=r"\(N, 1, 8, 8\).*got \(\d+, 1, 16, 16\)"):
        distort(read_digits()[1].images, torch.Generator())


def test_subnets_trade_accuracy_and_subnet_norm_repairs_them() -> None:
    supernet = load_digits_supernet()
    training, held_out = read_digits(7)
    data = [held_out, read_digits(8)[1]]
    space = supernet.space
    smallest, middle, largest = space.smallest(), space.spec(depth=2, expand=0.25, width=0.5), space.largest()
    shared = evaluate(supernet, [smallest, middle], data)
    batches = training.images[:600].split(200)
    calibrate(supernet, [smallest, middle, largest], batches, progress=False)
    low, mid, high = evaluate(supernet, [smallest, middle, largest], data)
    assert high - low >= 8
    assert low < mid < high
    assert shared[0] < low - 20
    assert shared[1] < mid - 20


@pytest.mark.slow
def test_the_demo_runs_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few images and latencies that are measured shortly; how precise they are does not matter."""
    monkeypatch.setattr(demo, "validation_and_test", lambda _, seed: validation_and_test(1, seed))
    quick = {"warmup_ms": 0.0, "min_time_ms": 5.0, "windows": 2, "max_windows": 2}
    real = demo.profile_latency
    monkeypatch.setattr(demo, "profile_latency", lambda *given, **named: real(*given, **{**named, **quick}))
    out = tmp_path / "demo.png"
    files = ["--out", str(out), "--json", str(tmp_path / "demo.json")]
    assert main(["--candidates", "4", "--seconds", "0.5", *files]) == 0
    printed = capsys.readouterr().out
    for words in ("shared statistics", "Pareto set", "right and in time"):
        assert words in printed
    assert out.stat().st_size > 10_000
    found = json.loads((tmp_path / "demo.json").read_text())
    names = ["HullFit, all subnets", "fixed, largest subnet", "fixed, smallest subnet"]
    assert [one["name"] for one in found["contenders"]] == names
    assert all(name in printed for name in names)
    for one in found["contenders"]:
        assert 0 <= one["right_and_in_time"] <= one["in_time"] <= 100
    assert len(found["share_of_core"]) == 4


def run(slowdown: float = 1.0, late_ms: float = 0.5) -> Run:
    accuracy = np.array([80.0, 70.0, np.nan, 60.0])
    right = np.array([1.0, 0.0, 0.0, 1.0])
    return Run("ours", accuracy, right, np.full(4, late_ms), slowdown, {"measured": 66.0})


def test_the_demo_says_when_the_machine_decided_the_result() -> None:
    assert machine_notes([run(), run(1.3)], [1.0, 0.97], 40.0) == []
    (busy,) = machine_notes([run()], [0.99, 0.62], 40.0)
    assert "62 % of a core" in busy
    for slowdown in (0.5, 2.0):
        (drift,) = machine_notes([run(), run(slowdown)], [1.0], 40.0)
        assert f"{slowdown:.2f} times the profiled latency" in drift
    (late,) = machine_notes([run(late_ms=15.0)], [1.0], 40.0)
    assert "15 ms after" in late


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
