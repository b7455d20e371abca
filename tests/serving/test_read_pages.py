"""The example with two stages: its pages, its steps with a perfect detector, and its committed results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subnetact import LatencyTable
from subnetact.digits import Digits, undistorted_digits

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("read_pages", EXAMPLES / "read_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["read_pages"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(example: Any) -> Any:
    return example.compose(undistorted_digits()[1], 20, torch.Generator().manual_seed(0))


def test_a_perfect_detector_finds_every_digit(example: Any, pages: Any) -> None:
    maps = example.maps_of(pages)
    maps[:, 0] = 20.0 * maps[:, 0] - 10.0
    counts = set()
    for image, one, digits in zip(pages.images, maps, pages.digits, strict=True):
        found = example.cut({"page": image, "find": one})
        assert sorted(place for _, place in found) == sorted(place for place, _ in digits)
        for tile, (row, column) in found:
            assert torch.equal(tile, image[:, row : row + 16, column : column + 16])
        counts.add(len(digits))
    assert len(counts) > 5


def test_only_digits_in_their_place_and_read_right_count(example: Any) -> None:
    digits = [((0, 0), 3), ((40, 20), 7)]
    assert example.matches([((2, 3), None), ((40, 30), None)], digits) == 1
    assert example.matches([((2, 3), 3), ((41, 20), 8)], digits) == 1
    assert example.matches([((41, 20), 7), ((1, 1), 3)], digits) == 2


def test_pages_are_found_cut_and_read_live(example: Any, pages: Any) -> None:
    detector = example.new_detector()
    example.train_detector(detector, undistorted_digits()[0], 1)
    find, found_percent = example.finder(detector, pages)
    assert len(found_percent) == len(find.ids)

    class Perfect:
        """Gives the maps of a perfect detector for the pages that it knows."""

        keys = find.keys
        check = find.check

        def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
            maps = example.maps_of(pages)
            maps[:, 0] = 20.0 * maps[:, 0] - 10.0
            return [maps[int(((pages.images - x) ** 2).sum((1, 2, 3)).argmin())] for x in inputs]

        def enter_worker(self, threads: int | None) -> None:
            torch.set_num_threads(1)

    train, held_out = (Digits(some.images[:400], some.labels[:400]) for some in undistorted_digits())
    read, read_percent = example.reader(train, held_out)
    assert read_percent[-1] > 75.0
    assert min(read_percent) > 50.0
    tables = {
        "find": LatencyTable(find.keys, found_percent, [1, 16], [[1.0, 2.0]] * len(find.ids)),
        "read": LatencyTable(read.keys, read_percent, [1, 16], [[1.0, 8.0]] * len(read.ids)),
    }
    stages = example.fixed(example.new_stages(Perfect(), read, tables), largest=True)
    order, times = list(range(len(pages.digits))), np.zeros(len(pages.digits))
    answers = example.serve(stages, 60_000.0, pages, order, times)
    figures = example.summary(answers, pages, order, np.array([i < 5 for i in order]))
    assert figures["all"]["in_time_percent"] == 100.0
    assert figures["all"]["read_right_percent"] > 70.0
    assert (figures["burst"]["pages"], figures["calm"]["pages"]) == (5, 15)
    for answer in answers:
        assert {"find", "cut", "read"} <= set(answer.stages)
        assert sum(example.times_of(answer)) <= answer.latency_ms + 1e-6
