"""Tables whose accuracies are not known."""

from __future__ import annotations

from pathlib import Path

import pytest

import subnetact
from subnetact.errors import TableError


def test_unknown_accuracy_survives_on_disk_and_is_refused_by_schedulers(tmp_path: Path) -> None:
    table = subnetact.LatencyTable.from_arrays(["a", "b"], [float("nan"), 70.0], [1, 2], [[1, 2], [3, 4]])
    table.save(tmp_path / "t.json")
    loaded = subnetact.LatencyTable.load(tmp_path / "t.json")
    assert loaded == table
    for use in (
        lambda t: subnetact.SlackFit(t, slo_ms=36.0),
        lambda t: subnetact.simulate([0.0], t, subnetact.Fixed(t, 0), slo_ms=36.0),
    ):
        with pytest.raises(TableError, match="accuracy of 'a' is not known"):
            use(loaded)
    known = loaded.with_accuracy([60.0, 70.0])
    assert (
        subnetact.simulate([0.0], known, subnetact.SlackFit(known, slo_ms=36.0), slo_ms=36.0).attainment
        == 1.0
    )
