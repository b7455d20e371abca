"""All doors to the weights in random order: every answer is that of one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from weight_doors import Images

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
SEEDS = range(6)
STEPS = 14


@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_is_of_one_checkpoint(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Images(seed, tmp_path, monkeypatch)
    try:
        for _ in range(STEPS):
            images.step()
    except AssertionError as error:
        raise AssertionError(f"{error}\n{chr(10).join(images.log)}") from error
