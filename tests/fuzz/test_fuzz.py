"""Every reader and every public entry, shortly, with inputs that are the same in every run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import folders
from fuzz.targets import TARGETS, close, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subnetact.errors import MissingExtra

CORPUS = json.loads(Path(__file__).with_name("corpus.json").read_text())
"""By target: seeds of inputs that once raised something else than an error of the library."""
SLOW = {"constructor", "checkpoint", "Batcher.submit", "unfinished calibration"}
SLOW |= {"python -m subnetact.serve", "python -m subnetact.profile", "python -m subnetact.simulate"}


@pytest.fixture(autouse=True, scope="module")
def threads_end() -> Iterator[None]:
    """Leave no thread to the tests of other modules."""
    yield
    close()


def run_or_skip(name: str, source: random.Random) -> None:
    try:
        run(name, source)
    except MissingExtra as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "bundle"])
def test_hostile_inputs_raise_errors_of_the_library(name: str) -> None:
    @settings(
        max_examples=4 if name in SLOW else 20,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def fuzz(seed: int) -> None:
        run_or_skip(name, random.Random(seed))

    fuzz()


def test_a_hundred_changed_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of models that are made quickly; `long.py --only bundle --inputs 10000` changes all kinds."""
    monkeypatch.setattr(folders, "KINDS", ("own", "autoformer", "encoder"))
    accepted = 0
    for seed in range(100):
        accepted += run("bundle", random.Random(seed))
    assert 5 < accepted < 95


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in CORPUS for seed in CORPUS[name]])
def test_what_was_found_stays_mended(name: str, seed: int) -> None:
    run_or_skip(name, random.Random(seed))
