"""Factories and functions that tests name as `--model`, `--accuracy` and `--calibrate-on`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from elastic_networks import one_width
from torch import Tensor, nn
from written_networks import Written

from subnetact import calibrate
from subnetact.digits import new_digits_supernet
from subnetact.nas.evaluation import evaluate
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet


def supernet() -> Supernet:
    return new_digits_supernet().eval()


def no_supernet() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def accuracy(supernet: Supernet) -> Callable[[SubnetSpec], float]:
    largest = sum(supernet.space.resolve(supernet.space.largest()))
    return lambda spec: 90.0 * sum(supernet.space.resolve(spec)) / largest


def later_accuracy(supernet: Supernet) -> Callable[[SubnetSpec], float]:
    return lambda spec: accuracy(supernet)(spec) - 7.0


def calibrated_accuracy(supernet: Supernet) -> Callable[[SubnetSpec], float]:
    generator = torch.Generator().manual_seed(4)
    loader = [(torch.randn(6, 1, 16, 16, generator=generator), torch.arange(6))]

    def calibrated(spec: SubnetSpec) -> float:
        calibrate(supernet, [spec], batches(), progress=False)
        return evaluate(supernet, [spec], loader)[0]

    return calibrated


def broken() -> Supernet:
    raise KeyError("own")


def own_network() -> Supernet:
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return one_width(layers, {"0": "out", "2": "in"}, [2, 8])


def two_inputs() -> Supernet:
    network = Written(lambda m, a, b: m.last(m.first(a) - m.first(b)), first=(4, 8), last=(8, 3))
    return one_width(network, {"first": "out", "last": "in"}, [2, 8], "two")


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 1, 16, 16, generator=generator) for _ in range(2)]


def labelled_batches() -> list[tuple[Tensor, Tensor]]:
    return [(images, torch.zeros(6)) for images in batches()]
