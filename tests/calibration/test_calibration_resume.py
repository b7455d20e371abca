"""An interrupted calibration goes on to the same statistics, bit for bit; files of others are refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import subnetact
import subnetact.supernet
from subnetact import calibrate
from subnetact.calibration.calibration_norm import CalibrationNorm
from subnetact.digits import new_digits_supernet
from subnetact.errors import FileFormatError, ResumeMismatch, StaleWeights
from subnetact.files.journal import Journal
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet


def images(*sizes: int, seed: int) -> list[torch.Tensor]:
    """Return batches of the given sizes; the seed decides them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 1, 16, 16, generator=generator) for n in sizes]


BATCHES = images(6, 10, 3, 8, 7, 9, seed=5)


class Killed(BaseException):
    pass


def specs_of(supernet: Supernet) -> list[SubnetSpec]:
    return [supernet.space.sample(seed) for seed in range(4)]


def rows(supernet: Supernet) -> dict[SubnetSpec, torch.Tensor]:
    return {spec: supernet.norms.get(spec).flat.clone() for spec in supernet.norms}


def same(a: dict[SubnetSpec, torch.Tensor], b: dict[SubnetSpec, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[spec], b[spec]) for spec in a)


def dying_after(collected: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Let the process die at the n-th BatchNorm; return whether it did."""
    real, left = CalibrationNorm.collect, [collected]

    def collect(norm: CalibrationNorm, x: torch.Tensor) -> Any:
        left[0] -= 1
        if not left[0]:
            raise Killed
        return real(norm, x)

    monkeypatch.setattr(CalibrationNorm, "collect", collect)
    return lambda: left[0] <= 0


@pytest.mark.parametrize("after", [30, 120, 200])
def test_a_killed_run_goes_on(
    digits: Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    specs, path = specs_of(digits), tmp_path / "unfinished"
    whole = calibrate(digits, specs, BATCHES, False)
    expected = rows(digits)
    digits.norms = subnetact.supernet.NormTable(digits.space.id)
    with monkeypatch.context() as patch:
        died = dying_after(after, patch)
        with pytest.raises(Killed):
            calibrate(digits, specs, BATCHES, False, resume=path, save_every_s=0)
        assert died()
    assert len(digits.norms) == 0
    assert [p.name for p in tmp_path.iterdir()] in ([], ["unfinished"])
    report = calibrate(digits, specs[::-1], iter(BATCHES), False, resume=path)
    assert same(rows(digits), dict(reversed(list(expected.items()))))
    assert report.batches == whole.batches == len(BATCHES)
    assert report.layers_alone == whole.layers_alone


def test_finished_work_is_read_back(digits: Supernet, tmp_path: Path) -> None:
    specs, path = specs_of(digits), tmp_path / "unfinished"
    first = calibrate(digits, specs, BATCHES, False, resume=path)
    expected = rows(digits)
    digits.norms = subnetact.supernet.NormTable(digits.space.id)
    again = calibrate(digits, specs, BATCHES, False, resume=path)
    assert same(rows(digits), expected)
    assert again.layers_computed == first.layers_computed
    (more,) = images(5, seed=6)
    calibrate(digits, specs, [*BATCHES, more], False, resume=path)
    longer = rows(digits)
    calibrate(digits, specs, [*BATCHES, more], False)
    assert same(rows(digits), longer)


CHILD = """
import os, signal, sys, torch, subnetact
from subnetact.digits import new_digits_supernet
torch.manual_seed(0)
torch.set_num_threads(1)
supernet = new_digits_supernet().eval()
specs = [supernet.space.sample(seed) for seed in range(4)]
batches = [torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
def killed_after_three():
    yield from batches[:3]
    os.kill(os.getpid(), signal.SIGKILL)
subnetact.calibrate(supernet, specs, killed_after_three(), False, resume=sys.argv[1], save_every_s=0)
"""


def test_a_process_killed_by_a_signal_leaves_a_file_to_go_on_with(tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    killed = subprocess.run([sys.executable, "-c", CHILD, str(unfinished)], timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert unfinished.exists()
    batches = [torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    found = []
    for resume in (unfinished, None):
        torch.manual_seed(0)
        supernet = new_digits_supernet().eval()
        calibrate(supernet, specs_of(supernet), batches, False, resume=resume)
        found.append(rows(supernet))
    assert same(*found)


def test_other_work_is_refused(digits: Supernet, tmp_path: Path) -> None:
    specs, path = specs_of(digits), tmp_path / "unfinished"
    calibrate(digits, specs, BATCHES, False, resume=path)
    before = rows(digits)
    other_batches = [*BATCHES[:2], BATCHES[2] + 1, *BATCHES[3:]]
    for chosen, batches, options, message in (
        (specs[:-1], BATCHES, {}, "subnets was"),
        (specs, BATCHES, {"rule": "cumulative_unbiased"}, "rule was"),
        (specs, other_batches, {}, "its first 6 batches are others"),
        (specs, [batch.double() for batch in BATCHES], {}, "its first 1 batches are others"),
        (specs, BATCHES[:-1], {}, "it has 6 batches, the data only 5"),
    ):
        with pytest.raises(ResumeMismatch, match=message):
            calibrate(digits, chosen, batches, False, resume=path, **options)
    digits.load_state_dict({name: t * 1.5 for name, t in digits.state_dict().items()}, norms=digits.norms)
    with pytest.raises(ResumeMismatch, match="weights was"):
        calibrate(digits, specs, BATCHES, False, resume=path)
    assert same(rows(digits), before)


def test_damaged_files_are_refused(digits: Supernet, tmp_path: Path) -> None:
    specs, path = specs_of(digits), tmp_path / "unfinished"
    calibrate(digits, specs, BATCHES[:2], False, resume=path)

    def refused(message: str) -> None:
        with pytest.raises(FileFormatError, match=message):
            calibrate(digits, specs, BATCHES[:2], False, resume=path)

    whole = path.read_bytes()
    header, progress = (json.loads(line) for line in whole.splitlines())
    for cut in (0, 7, 40):
        path.write_bytes(whole[:cut])
        refused("unfinished, line 1: not readable")
    path.write_bytes(whole.replace(b'"given": 2', b'"given": 3'))
    refused("unfinished, line 2: changed since it was written")
    facts = {name: progress[name] for name in ("given", "first", "digest", "seconds")}
    run = progress["run"]
    weight, (name, shape, data) = run["averages"][0][0]
    for wrong in (
        [name, [shape[0] + 2, shape[1] - 2], data],
        [name, [2, 4], "A" * 40 + "==="],
        ["Tensor", shape, data],
        data,
    ):
        for changed in (
            {"averages": [[[weight, wrong], *run["averages"][0][1:]], *run["averages"][1:]]},
            {"averages": run["averages"][1:]},
            {"finished": "two"},
        ):
            path.unlink()
            Journal(path, header["environment"]).append("progress", **{**facts, "run": {**run, **changed}})
            refused("damaged")


def test_unfinished_work_belongs_to_its_weights(digits: Supernet, tmp_path: Path) -> None:
    specs, path = specs_of(digits), tmp_path / "unfinished"
    first = {name: tensor.clone() for name, tensor in digits.state_dict().items()}
    calibrate(digits, specs, BATCHES, False)
    expected = rows(digits)
    digits.norms = subnetact.supernet.NormTable(digits.space.id)

    def batches() -> Iterator[torch.Tensor]:
        yield from BATCHES[:2]
        with torch.no_grad():
            digits.network.stem.weight.mul_(3)
        yield from BATCHES[2:]

    with pytest.raises(StaleWeights, match="nothing was written"):
        calibrate(digits, specs, batches(), False, resume=path, save_every_s=0)
    assert len(digits.norms) == 0
    with pytest.raises(ResumeMismatch, match="weights"):
        calibrate(digits, specs, BATCHES, False, resume=path)
    digits.load_state_dict(first)
    calibrate(digits, specs, BATCHES, False, resume=path)  # What it had done is of these weights.
    assert same(rows(digits), expected)
