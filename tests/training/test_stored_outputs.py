"""What a teacher returned is read again only where it would return the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distilled import Batches, Net, labelled, new_supernet
from torch import Tensor, nn

from subnetact.errors import TrainingError, WriteError
from subnetact.training import distill_, stored_outputs

STEPS = 6  # Four batches are an epoch.


class Teacher(nn.Module):
    """A network that counts its calls."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)  # type: ignore[no-any-return]


def numbers(teacher: Any, stored: Path | None, batches: Any = None, **options: Any) -> Tensor:
    """Distil for a few steps; return the losses and what was measured."""
    given: dict[str, Any] = {"held_out": labelled(2, 2), "steps": STEPS, "calibration": 2, "progress": False}
    report = distill_(new_supernet(), batches or labelled(4, 1), teacher, stored=stored, **given, **options)
    losses = [loss for entry in report.losses for loss in entry]
    return torch.tensor([*report.before, *report.after, *losses])


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_teacher_runs_once_per_batch_and_losses_are_the_same(
    tmp_path: Path, autocast: torch.dtype | None
) -> None:
    expected, teacher = numbers(Teacher(), None, autocast=autocast), Teacher()
    assert torch.equal(numbers(teacher, tmp_path, autocast=autocast), expected)
    assert teacher.calls == 1 + 4 + 1  # It is checked, runs in the first epoch, and is compared once.
    teacher = Teacher()
    assert torch.equal(numbers(teacher, tmp_path, autocast=autocast), expected)
    assert teacher.calls == 2
    files = list(tmp_path.iterdir())
    assert len(files) == 4
    files[0].write_bytes(files[0].read_bytes()[:-8])
    assert torch.equal(numbers(teacher, tmp_path, autocast=autocast), expected)
    assert teacher.calls == 2 + 3  # What is damaged is computed again.


def test_other_teachers_and_other_inputs_have_other_outputs(tmp_path: Path) -> None:
    numbers(Teacher(), tmp_path)
    for teacher in (Teacher(1), "frozen"):
        assert torch.equal(numbers(teacher, tmp_path), numbers(teacher, None))
    batches = [(0.9 * x, labels) for x, labels in labelled(4, 1)]
    assert torch.equal(numbers(Teacher(), tmp_path, batches), numbers(Teacher(), None, batches))
    assert len(list(tmp_path.iterdir())) == 4 * 4


@pytest.mark.parametrize(
    ("teacher", "options"),
    [
        (lambda seed: Teacher(0), lambda seed: {"output": lambda scores, x: scores * (1.0 + seed)}),
        (lambda seed: Teacher(seed).eval().forward, lambda seed: {}),
    ],
)
def test_what_no_name_tells_is_compared(
    tmp_path: Path, teacher: Callable[[int], Any], options: Callable[[int], dict[str, Any]]
) -> None:
    numbers(teacher(0), tmp_path, **options(0))
    with pytest.raises(TrainingError, match="not those of this teacher"):
        numbers(teacher(1), tmp_path, **options(1))


def test_batches_that_change_are_computed_again_and_fill_no_disk(tmp_path: Path) -> None:
    expected = numbers(Teacher(), None, Batches())
    with pytest.warns(RuntimeWarning, match="change from epoch to epoch"):
        assert torch.equal(numbers(Teacher(), tmp_path, Batches()), expected)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_full_disk_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise WriteError("no space left")

    monkeypatch.setattr(stored_outputs, "write_tensors", full)
    with pytest.warns(RuntimeWarning, match="no space left"):
        found = numbers(Teacher(), tmp_path)
    assert torch.equal(found, numbers(Teacher(), None))


def test_a_resumed_training_reads_them(tmp_path: Path) -> None:
    expected, state = numbers("frozen", None), tmp_path / "state"
    batches = Interrupted(labelled(4, 1))
    options = {"resume": state, "save_every_s": 0.0}
    with pytest.raises(KeyboardInterrupt):
        numbers("frozen", tmp_path / "outputs", batches, **options)
    found = numbers("frozen", tmp_path / "outputs", batches, **options)
    torch.testing.assert_close(found, expected)


class Interrupted(list[Any]):
    """Batches, at the sixth of which the user stops the training."""

    given = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.given += 1
            if self.given == 6:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.parametrize(
    ("teacher", "options"), [(None, {}), ("frozen", {"distillation": 0.0}), (Teacher(), {"stored": "taken"})]
)
def test_what_cannot_be_stored_is_refused(tmp_path: Path, teacher: Any, options: dict[str, Any]) -> None:
    (tmp_path / "taken").write_text("")
    stored = tmp_path / options.pop("stored", "outputs")
    with pytest.raises(TrainingError, match="stored"):
        numbers(teacher, stored, **options)
