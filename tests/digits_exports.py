"""What tests of exports share: three subnets of the digits in one engine, and threads that call an export."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

import subnetact
from subnetact.digits import load_digits_supernet


def digits_engine(images: Tensor, **options: Any) -> subnetact.Engine:
    """Return an engine of the smallest subnet, one between, and the largest, calibrated on images."""
    supernet = load_digits_supernet()
    space = supernet.space
    specs = [space.smallest(), space.spec(depth=1, expand=0.25, width=0.5), space.largest()]
    subnetact.calibrate(supernet, specs, [images], progress=False)
    return subnetact.Engine(supernet, specs, example=images[:1], **options)


def wrong_in_threads(exported: Any, images: Tensor) -> list[int]:
    """Run different subnets in six threads, and return the subnet of every answer that changed by that."""
    want = [exported(images, subnet=i) for i in exported.ids]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(20) if not torch.equal(exported(images, subnet=i), want[i]))

    threads = [threading.Thread(target=work, args=(i % len(want),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
