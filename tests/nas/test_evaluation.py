"""`evaluate` against a count by hand."""

from __future__ import annotations

import pytest
import torch

import subnetact
from subnetact.errors import SpecError
from subnetact.supernet.supernet import Supernet


def test_evaluation_counts_right_answers(digits: Supernet) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 1, 16, 16, generator=generator), torch.arange(n) % 10) for n in (20, 7)]
    specs = [digits.space.sample(seed) for seed in (1, 2)]
    found = subnetact.evaluate(digits, specs, batches, calibration=[batches[0][0]])
    assert not len(digits.norms)
    subnetact.calibrate(digits, specs[1:], [batches[0][0]])
    assert subnetact.evaluate(digits, specs, batches, calibration=[batches[0][0]]) == found
    assert list(digits.norms) == specs[1:]
    subnetact.calibrate(digits, specs[:1], [batches[0][0]])
    expected = []
    for spec in specs:
        network = digits.extract(spec)
        with torch.no_grad():
            right = sum(int((network(x).argmax(1) == y).sum()) for x, y in batches)
        expected.append(100 * right / 27)
    assert found == pytest.approx(expected)
    assert subnetact.evaluate(digits, specs[1:], batches) == pytest.approx(expected[1:])
    for wrong in ([], [torch.zeros(2, 1, 16, 16)], [(torch.zeros(2, 1, 16, 16), torch.zeros(3))]):
        with pytest.raises(SpecError, match="batch"):
            subnetact.evaluate(digits, specs, wrong)
