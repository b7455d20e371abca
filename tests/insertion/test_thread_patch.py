"""What is replaced in another library is replaced for one thread only, and only meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact.insertion.tensor_memo import forget_
from subnetact.insertion.thread_patch import patched_here


def on_another_thread(function: Callable[[], Any]) -> Any:
    """Return what a function returns there."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    return results[0]


def test_another_thread_keeps_the_original_and_so_does_whoever_kept_the_replacement() -> None:
    class Place:
        def __init__(self) -> None:
            self.by = "original"

    def other(self: Any) -> None:
        self.by = "replaced"

    with patched_here(Place, __init__=other):
        kept = Place.__init__
        assert (Place().by, on_another_thread(Place).by) == ("replaced", "original")
    place = Place()
    other(place)
    kept(place)
    assert (place.by, Place().by) == ("original", "original")


def test_another_thread_reads_its_own_graph_while_a_model_is_described() -> None:
    kirigami = pytest.importorskip("torch_kirigami")
    theirs = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 2)).eval()

    def graph() -> list[str]:
        made = kirigami.DependencyGraph.build(theirs, args=(torch.randn(1, 3),))
        return [node.name for node in made.fx_graph.nodes]

    expected, graphs = graph(), []

    class Described(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            graphs.append(on_another_thread(graph))
            return self.b(self.a(x).relu())

    subnetact.describe(Described().eval(), torch.randn(1, 8), proof=False)
    assert graphs
    assert all(names == expected for names in graphs)


def test_a_memo_that_is_keyed_by_shape_does_not_grow() -> None:
    network = nn.Linear(2, 2)
    network.memo = {0: torch.zeros(2)}  # type: ignore[assignment]
    forget_(network)
    memo: Any = network.memo
    for key in range(1000):
        memo[key] = torch.zeros(2)
    assert float(memo[999].sum()) == 0
    with pytest.raises(KeyError):
        memo[0]
