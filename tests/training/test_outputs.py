"""distill_ on pixels, dictionaries and several outputs, and on labels that do not fit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subnetact import insert_
from subnetact.errors import SpecError, TrainingError
from subnetact.supernet.supernet import Supernet
from subnetact.training import distill_, sandwich_step

QUIET: dict[str, Any] = {"progress": False, "calibration": 2, "learning_rate": 0.04}


class Pixels(nn.Module):
    """Maps (N, 2, H, W) to three scores per pixel and to something else, as networks of torchvision do."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 16, 1), nn.BatchNorm2d(16)
        self.out, self.aux = nn.Conv2d(16, classes, 1), nn.Conv2d(16, classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.norm(self.first(x)))
        return {"out": self.out(x), "aux": self.aux(x)}


class Maps(nn.Module):
    """Maps (N, 6) to nested lists of outputs, as the heads of detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.c = nn.Linear(6, 16), nn.Linear(16, 1)
        self.a, self.b = nn.Linear(16, 3), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.first(x))
        return [[self.a(x), self.b(x)], self.c(x)]


def elastic(network: nn.Module, *shape: int) -> Supernet:
    torch.manual_seed(0)
    return insert_(network.eval(), example=torch.randn(2, *shape), choices=(0.25, 0.5, 1.0))


def scenes(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches whose class is decided by two values; a third of the pixels does not count."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(4, 2, 8, 8, generator=generator)
        masks = (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()
        found.append((x, masks.masked_fill(torch.rand(masks.shape, generator=generator) < 1 / 3, -100)))
    return found


class Counts:
    """A metric with a state: how often every class is found, and how many batches there were."""

    def __init__(self) -> None:
        self.found, self.batches = torch.zeros(3), 0

    def update(self, scores: Tensor, masks: Tensor) -> None:
        self.found += torch.bincount(scores.argmax(1).flatten(), minlength=3)
        self.batches += 1

    def compute(self) -> Tensor:
        return self.found[0] + self.batches / 10


def test_the_pixels_that_count_are_learnt_and_measured() -> None:
    supernet, held_out = (
        elastic(Pixels(), 2, 8, 8),
        [*scenes(3, 2), (torch.randn(1, 2, 8, 8), torch.full((1, 8, 8), -100))],
    )
    bytes_of_files = [(x, masks.clamp(min=0).byte()) for x, masks in scenes(3, 1)]
    distill_(supernet, bytes_of_files, held_out=held_out, steps=1, **QUIET)
    training = [
        *scenes(6, 1),
        (torch.randn(2, 2, 8, 8), torch.full((2, 8, 8), -100)),
    ]  # the last one without a label
    taylor = {"output": lambda found, x: found["out"], "importance": "taylor"}
    report = distill_(supernet, training, held_out=held_out, steps=30, **taylor, **QUIET)
    assert report.order == "1 groups sorted by taylor"
    right = counted = 0
    with torch.no_grad():
        for x, masks in held_out:
            found = supernet.extract(supernet.space.smallest())(x)["out"].argmax(1)
            right += int((found == masks).sum())
            counted += int((masks >= 0).sum())
    assert report.after[-1] == pytest.approx(100 * right / counted, abs=0.5)
    assert min(report.after) > 60 > max(report.before)
    own = {"metric": (metric := Counts()), "output": lambda found, x: found["out"]}
    counts = distill_(supernet, training, held_out=held_out, steps=1, importance=None, **own, **QUIET)
    assert (metric.batches, counts.metric) == (0, "Counts")
    for value in counts.after:
        assert value == pytest.approx(int(value) + 0.4, abs=1e-3)


def test_all_of_several_outputs_are_learnt_without_labels() -> None:
    supernet, seen = elastic(Maps(), 6), set()

    def joined(maps: Any, x: Tensor) -> Tensor:
        (a, b), c = maps
        seen.add((a.shape[1], b.shape[1], c.shape[1]))
        return torch.cat([a, b], 1)

    data = [torch.randn(16, 6, generator=torch.Generator().manual_seed(i)) for i in range(9)]
    given: dict[str, Any] = {"held_out": data[6:], "task": "values", "labels": False, "output": joined}
    report = distill_(supernet, data[:6], steps=40, **given, **QUIET)
    assert report.before[0] == pytest.approx(0.0, abs=1e-6)
    assert report.after[-1] < 0.5 * report.before[-1]
    assert seen == {(3, 5, 1)}
    view = supernet.subnet(supernet.space.smallest())
    large = supernet.subnet(supernet.space.largest())
    losses = sandwich_step(
        supernet.train(),
        data[0],
        data[1][:, :5],
        rng=random.Random(0),
        random_subnets=0,
        output=lambda maps: maps[0][1],
        loss=F.mse_loss,
        divergence=F.mse_loss,
    )
    with torch.no_grad():
        expected = [
            F.mse_loss(large(data[0])[0][1], data[1][:, :5]),
            F.mse_loss(view(data[0])[0][1], large(data[0])[0][1]),
        ]
    assert list(losses.values()) == pytest.approx([float(x) for x in expected])


def test_a_frozen_teacher_has_the_statistics_of_its_weights() -> None:
    supernet = elastic(Pixels(), 2, 8, 8)
    with torch.no_grad():
        supernet.get_parameter("first.weight").mul_(5.0)  # as a training of one's own changes it
    data = [3.0 * x + 2.0 for x, _ in scenes(3, 1)]
    report = distill_(supernet, data[:2], held_out=data[2:], labels=False, steps=1, **QUIET)
    assert report.metric == "agreement with the teacher (%)"
    assert report.before[0] == pytest.approx(100.0, abs=0.5)


def with_labels(change: Callable[[Tensor], Any]) -> list[Any]:
    return [(x, change(masks)) for x, masks in scenes(2, 1)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"batches": with_labels(lambda m: m.clone().fill_(255))},
            "a label is 255, but the classes are 0 to 2.*-100",
        ),
        ({"batches": with_labels(lambda m: m.clone().fill_(-1))}, "a label is -1"),
        (
            {"batches": with_labels(lambda m: m[:, None])},
            r"shape \(4, 8, 8\) for scores of shape \(4, 3, 8, 8\)",
        ),
        ({"batches": with_labels(lambda m: m[:, ::2, ::2])}, "resize the scores with output="),
        ({"batches": with_labels(lambda m: m.float())}, "whole numbers"),
        ({"batches": with_labels(lambda m: m.numpy())}, "labels are a tensor, got ndarray"),
        ({"output": lambda found, x: found["out"][:, :1]}, "make two"),
        ({"output": lambda found, x: found}, "what is learnt is a dictionary"),
        ({"task": "vectors", "batches": [x for x, _ in scenes(2, 1)]}, "give output="),
        ({"labels": False}, "does not run on the first batch, a tuple of 2.*pair"),
        ({"metric": lambda scores, masks: scores.mean(1)}, "no single number"),
        ({"metric": lambda scores, masks: {"iou": 1.0}}, "no single number"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(given: dict[str, Any], message: str) -> None:
    supernet = elastic(Pixels(), 2, 8, 8)
    before = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    options = {"batches": scenes(2, 1), "held_out": scenes(1, 2), "steps": 1, **QUIET, **given}
    with pytest.raises((TrainingError, SpecError), match=message):
        distill_(supernet, **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in supernet.state_dict().items())
