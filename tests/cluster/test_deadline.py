"""Deadlines that travel between machines whose clocks differ."""

from __future__ import annotations

import pytest

from subnetact.cluster.deadline import SENDERS, ClockOffsets, Deadline, unix_ms


def test_time_on_the_way_is_taken_from_the_deadline():
    offsets = ClockOffsets()
    assert offsets.left_ms("a", Deadline(1000.0, 1100.0), now_ms=1002.0) == 98.0
    assert offsets.left_ms("a", Deadline(1000.0, 1100.0), now_ms=1050.0) == 50.0
    assert offsets.left_ms("a", Deadline(1000.0, 1100.0), now_ms=1150.0) == -50.0


@pytest.mark.parametrize("skew_ms", [-3_600_000.0, -40.0, -1.0, 0.0, 4.0, 40.0, 3_600_000.0])
def test_clocks_that_differ_cost_at_most_the_tolerance(skew_ms):
    """The receiver's clock is ahead by skew_ms; messages travel 1 to 3 ms, one of them 30 ms."""
    offsets = ClockOffsets(tolerance_ms=5.0)
    for i, travel_ms in enumerate([1.0, 3.0, 2.0, 30.0, 1.0]):
        sent = 1e6 * (i + 1)
        left = offsets.left_ms("a", Deadline(sent, sent + 100.0), sent + travel_ms + skew_ms)
        assert left <= 100.0
        assert left == pytest.approx(100.0 - travel_ms, abs=5.0)


def test_senders_have_clocks_of_their_own_and_are_forgotten():
    offsets = ClockOffsets()
    for _ in range(2):
        assert offsets.left_ms("behind", Deadline(0.0, 50.0), now_ms=9000.0) == pytest.approx(45.0)
        assert offsets.left_ms("right", Deadline(8999.0, 9049.0), now_ms=9000.0) == pytest.approx(49.0)
    for i in range(3 * SENDERS):
        offsets.left_ms(str(i), Deadline(0.0, 1.0), now_ms=0.0)
    assert len(offsets._travel) == SENDERS


def test_a_deadline_is_absolute():
    before = unix_ms()
    deadline = Deadline.after(250.0)
    assert before <= deadline.sent_ms <= unix_ms()
    assert deadline.due_ms - deadline.sent_ms == pytest.approx(250.0, abs=1e-3)
