"""A table says of itself whether it was measured on this machine and on the weights that are served."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import subnetact
from subnetact.device import machine
from subnetact.errors import LatencyTableWarning, PolicyError, ProfileMismatch
from subnetact.latency.origin import doubts, require_measured_on, restamped
from subnetact.serving.policies import HullFit

CPU = torch.device("cpu")


def table(unstable: int = 0, **stamp: Any) -> subnetact.LatencyTable:
    stable = np.ones((2, 2))
    stable.flat[:unstable] = 0
    return subnetact.LatencyTable(
        ["small", "large"], [60, 70], [1, 4], [[10, 20], [30, 40]], {"stable": stable}, stamp
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ()),
        ({"python": "2.7", "cpus": 512, "system": "Plan 9", "operator": "Ann"}, ()),
        ({"device_name": "Intel E5"}, ("device_name Intel E5",)),
        ({"processor": "family 23 model 49 stepping 0"}, ("processor family 23 model 49",)),
        ({"instructions": "AVX2"}, ("instructions AVX2",)),
        ({"torch": "1.0", "threads": 77}, ("torch 1.0", "threads 77 (here 3)")),
        ({"device": "cuda"}, ("device cuda (here cpu)",)),
    ],
)
def test_only_what_changes_latencies_makes_a_table_doubtful(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    here = machine(CPU) | {"threads": 3}
    text = doubts(table(**{**here, **changes}), Echo(), threads=3)
    assert bool(text) == bool(words)
    assert all(word in text for word in words)


def test_facts_that_a_stamp_lacks_are_not_compared_and_unstable_cells_are_counted() -> None:
    assert doubts(table(), Echo()) == doubts(table(torch=torch.__version__), Echo()) == ""
    assert doubts(table(device="an A40", source="a paper"), Echo()) == ""
    assert doubts(table(unstable=3), Echo()) == "3 of 4 cells are unstable"


class Echo:
    keys = ("small", "large")
    device = CPU

    def check(self, x: Any) -> None: ...

    def run(self, subnet: int, inputs: list[Any], batch_size: int) -> list[Any]:
        return inputs


def test_a_batcher_warns_once_of_all_its_tables_and_engines() -> None:
    foreign = table(unstable=1, **machine(CPU) | {"device_name": "Intel E5"})
    with pytest.warns(LatencyTableWarning) as caught:
        subnetact.Batcher([Echo(), Echo()], table=foreign, slo_ms=50).close()
    (text,) = [str(one.message) for one in caught]
    assert "Intel E5" in text
    assert "1 of 4 cells" in text
    assert "python -m subnetact.profile" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        subnetact.Batcher(Echo(), table=table(**machine(CPU)), slo_ms=50).close()
        nameless = type("Nameless", (Echo,), {"device": property()})()  # a runner need not say where it runs
        subnetact.Batcher(nameless, table=foreign, slo_ms=50).close()


def test_a_short_slo_is_blamed_on_another_machine_only_if_there_was_one() -> None:
    with pytest.raises(PolicyError, match=r"another machine .*Intel E5 .*subnetact\.profile.* at least 10"):
        HullFit(table(**machine(CPU) | {"device_name": "Intel E5"}), slo_ms=1.0)
    with pytest.raises(PolicyError, match=r"lowest latency of the table; give slo_ms of at least 10"):
        HullFit(table(**machine(CPU)), slo_ms=1.0)


def test_a_table_follows_new_values_of_the_same_weights_and_nothing_else() -> None:
    present = {"supernet": "new", "space": "s", "dtype": "float32"}
    known = table(supernet="old", space="s", dtype="float32", measured="monday")
    assert restamped(known, {"old"}, present).stamp == {**known.stamp, "supernet": "new"}
    for other in (
        table(supernet="other", space="s", dtype="float32"),
        table(supernet="old", space="s", dtype="bfloat16"),
        table(supernet="old", space="t", dtype="float32"),
        table(),
    ):
        assert restamped(other, {"old"}, present) is other
    with pytest.raises(ProfileMismatch, match=r"tables\['cpu'\]: measured on supernet old, .* is new"):
        require_measured_on(known, known.subnets, "new", "tables['cpu']")
    with pytest.raises(ProfileMismatch, match="subnet 1 is 'large', but the engine's is 'larger'"):
        require_measured_on(known, ("small", "larger"), "old")
    require_measured_on(known, None, "old")
    require_measured_on(table(), ["small", "large"], None)
