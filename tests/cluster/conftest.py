"""A saved bundle of the digits supernet, for replicas with and without Ray."""

import pytest
import torch

from subnetact import Engine, LatencyTable, calibrate
from subnetact.digits import load_digits_supernet


@pytest.fixture(scope="module")
def digits_bundle(tmp_path_factory):
    """The folder of a bundle with the smallest and the largest subnet and a table."""
    supernet = load_digits_supernet()
    specs = [supernet.space.smallest(), supernet.space.largest()]
    torch.manual_seed(0)
    calibrate(supernet, specs, [torch.rand(64, 1, 16, 16)])
    engine = Engine(supernet, specs, example=torch.zeros(1, 16, 16), accuracy=[60.0, 82.0])
    engine.tables["cpu"] = LatencyTable.from_arrays(
        engine.keys, engine.accuracy, [1, 8], [[1.0, 4.0], [3.0, 12.0]]
    )
    bundle = tmp_path_factory.mktemp("cluster") / "digits"
    engine.save(bundle)
    return str(bundle)
