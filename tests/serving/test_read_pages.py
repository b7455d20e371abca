"""The example with two stages: its pages, and which digits it counts as read."""

from __future__ import annotations

import read_pages
import torch

from subnetact.digits import undistorted_digits


def test_a_perfect_detector_finds_every_digit() -> None:
    pages = read_pages.compose(undistorted_digits()[1], 20, torch.Generator().manual_seed(0))
    maps = read_pages.maps_of(pages)
    maps[:, 0] = 20.0 * maps[:, 0] - 10.0
    counts = set()
    for image, one, digits in zip(pages.images, maps, pages.digits, strict=True):
        found = read_pages.cut({"page": image, "find": one})
        assert sorted(place for _, place in found) == sorted(place for place, _ in digits)
        for tile, (row, column) in found:
            assert torch.equal(tile, image[:, row : row + 16, column : column + 16])
        counts.add(len(digits))
    assert len(counts) > 5


def test_only_digits_in_their_place_and_read_right_count() -> None:
    digits = [((0, 0), 3), ((40, 20), 7)]
    assert read_pages.matches([((2, 3), None), ((40, 30), None)], digits) == 1
    assert read_pages.matches([((2, 3), 3), ((41, 20), 8)], digits) == 1
    assert read_pages.matches([((41, 20), 7), ((1, 1), 3)], digits) == 2
