"""The commands profile and serve a model that `insert_` made elastic, and AOTInductor compiles it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from subnetact import Engine
from subnetact.export import load_exported, to_pt2
from subnetact.profile.cli import main

OWN = """
import torch
from torch import nn
from subnetact import evaluate, insert_

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1)
    def forward(self, x):
        return x + self.b(self.norm(self.a(x)).relu())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(8, 5)
    def forward(self, x):
        return {"scores": self.head(self.blocks(self.stem(x)).mean((2, 3)))}

def supernet():
    torch.manual_seed(0)
    choices = {"depth": (0, 1, 2), "width": (8, 16)}
    return insert_(Net().eval(), example=torch.zeros(2, 3, 8, 8), axes=("depth", "width"), choices=choices)

def batches():
    return [torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))]

def accuracy(supernet):
    return lambda spec: float(sum(supernet.space.resolve(spec)))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A folder with the module of a model, and the bundle that `python -m subnetact.profile` writes of it."""
    folder = tmp_path_factory.mktemp("inserted")
    (folder / "inserted.py").write_text(OWN)
    text = "--model inserted:supernet --calibrate-on inserted:batches --accuracy inserted:accuracy"
    text += " --subnets all --input-shape 3 8 8 --batch-sizes 1 2 --device cpu --threads 1"
    text += " --min-time-ms 2 --warmup-ms 0 --windows 2 --max-windows 2"
    text += f" --out {folder}/t.json --save-bundle {folder}/bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        assert main(text.split()) == 0
        yield folder / "bundle"


def loaded(bundle):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(bundle.parent))
        return Engine.load(bundle, supernet=importlib.import_module("inserted").supernet())


def expected(engine, x):
    """What each subnet computes as an ordinary network of its own."""
    networks = [engine.supernet.extract(spec) for spec in engine.specs]
    with torch.no_grad():
        return [network(x)["scores"] for network in networks]


def test_a_profiled_bundle_of_an_inserted_model_is_served(bundle, start):
    engine = loaded(bundle)
    assert len(engine.specs) == 12
    x = torch.randn(3, 8, 8)
    options = ["--bundle", str(bundle), "--model", "inserted:supernet", "--policy", "fixed:4"]
    root = Path(__file__).parents[2]
    server = start(*options, environment={"PYTHONPATH": os.pathsep.join((str(root), str(bundle.parent)))})
    status, _, text = server.call("POST", "/infer", {"input": x.tolist(), "deadline_ms": 60_000})
    assert status == 200
    answer = json.loads(text)
    at = engine.keys.index(answer["subnet"]) if isinstance(answer["subnet"], str) else answer["subnet"]
    output = torch.tensor(answer["output"]["scores"])
    torch.testing.assert_close(output, expected(engine, x[None])[at][0], rtol=0, atol=5e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler: install g++")
def test_aotinductor_compiles_a_subnet_of_an_inserted_model(bundle, tmp_path):
    """The program has no weights of its own, and is loaded only where it was compiled."""
    engine, at = loaded(bundle), 4
    path = to_pt2(engine, tmp_path / "p.pt2", subnets=[engine.specs[at]], progress=False)
    compiled = load_exported(path, trusted=True)
    images = torch.randn(5, 3, 8, 8)
    for x in (images[:1], images, images.transpose(2, 3)):
        output = compiled(x, subnet=0)["scores"]  # the first of the exported subnets
        torch.testing.assert_close(output, expected(engine, x)[at], atol=1e-4, rtol=1e-3)
    weights = engine.supernet.state_dict()["stem.weight"].numpy().tobytes()
    with zipfile.ZipFile(path) as file:
        assert [weights in file.read(name) for name in file.namelist()].count(True) == 1
