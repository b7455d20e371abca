"""Saved bundles of the digits supernet, for replicas with and without Ray."""

import pytest
import torch

from subnetact import Engine, LatencyTable, calibrate
from subnetact.digits import load_digits_supernet


def save_digits(folder, inputs, latency_ms):
    """Save a bundle with the smallest and the largest subnet and a table; return its folder."""
    supernet = load_digits_supernet()
    specs = [supernet.space.smallest(), supernet.space.largest()]
    calibrate(supernet, specs, [inputs])
    engine = Engine(supernet, specs, example=torch.zeros_like(inputs[:1]), accuracy=[60.0, 82.0])
    engine.tables["cpu"] = LatencyTable(engine.keys, engine.accuracy, [1, 8], latency_ms)
    engine.save(folder / "digits")
    return str(folder / "digits")


@pytest.fixture(scope="module")
def digits_bundle(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cluster")
    return save_digits(folder, torch.rand(64, 1, 16, 16), [[1.0, 4.0], [3.0, 12.0]])


@pytest.fixture(scope="module")
def slow_bundle(tmp_path_factory):
    """The folder of a bundle whose better subnet needs some 8 ms per image of 64 x 64 pixels."""
    folder = tmp_path_factory.mktemp("slow")
    return save_digits(folder, torch.rand(8, 1, 64, 64), [[1.0, 5.0], [9.0, 64.0]])
