"""A distillation that a test can kill: `python distilled.py STATE BATCH own|default` dies at a batch."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subnetact import insert_
from subnetact.supernet.supernet import Supernet
from subnetact.training import DistillationReport, distill_

STEPS = 9


class Net(nn.Module):
    """A classifier with all that has a state: BatchNorm, dropout, momentum in the optimizer."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.bn(self.conv(x))).mean((2, 3))))  # type: ignore[no-any-return]


def new_supernet() -> Supernet:
    torch.manual_seed(0)
    return insert_(Net().eval(), example=torch.randn(2, 2, 5, 5), choices=(0.25, 0.5, 0.75, 1.0))


def labelled(n: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of images whose class is the sign of two means."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n):
        x = torch.randn(16, 2, 5, 5, generator=generator) + torch.randn(16, 2, 1, 1, generator=generator)
        means = x.mean((2, 3)) > 0
        found.append((x, means[:, 0].long() * 2 + means[:, 1].long()))
    return found


class Batches:
    """Four batches per epoch, in random order and with random noise; the process dies at one of them."""

    def __init__(self, deadly: int | None = None) -> None:
        self.data, self.deadly, self.given = labelled(4, 1), deadly, 0

    def __iter__(self) -> Iterator[Any]:
        for i in torch.randperm(4).tolist():
            if self.given == self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            self.given += 1
            x, labels = self.data[i]
            noise = torch.randn(x.shape) + torch.from_numpy(np.random.randn(*x.shape)).float()
            yield x + 0.1 * noise + random.random(), labels


def distilled(state: str | None, own: bool, deadly: int | None = None) -> DistillationReport:
    """Distil for a few steps, with default or own optimizer and scheduler; save after every step."""
    supernet = new_supernet()
    given: dict[str, Any] = {"teacher": "frozen"}
    if own:
        optimizer = torch.optim.SGD(supernet.parameters(), 0.1, momentum=0.9)
        given = {
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS),
            "accumulate": 2,
        }
    given |= {"metric": nn.functional.cross_entropy, "resume": state, "save_every_s": 0.0}
    given |= {"held_out": labelled(3, 2), "steps": STEPS, "calibration": 2, "progress": False}
    return distill_(supernet, Batches(deadly), **given)


if __name__ == "__main__":
    torch.set_num_threads(1)
    distilled(sys.argv[1], sys.argv[3] == "own", int(sys.argv[2]))
