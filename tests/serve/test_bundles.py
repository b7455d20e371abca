"""Which bundles are served: those of own networks too, and never half of one that changes."""

from __future__ import annotations

import json
import os
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subnetact import LatencyTable, __version__
from subnetact.device import machine
from subnetact.errors import InvalidRequest, ServeError, TableError
from subnetact.serve.cli import main
from subnetact.serve.payloads import Signature
from subnetact.serve.source import Source

ROOT = Path(__file__).parents[2]
OWN = """
import torch
from torch import nn
import subnetact

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x, scale):
        return {"scores": self.b(torch.relu(self.a(x))) * scale, "sum": x.sum(1)}

def supernet(width=8):
    torch.manual_seed(0)
    example = {"x": torch.zeros(2, 4), "scale": torch.ones(2, 3)}
    return subnetact.insert_(TwoInputs().eval(), example=example, choices={"ffn": (4, width)})

if __name__ == "__main__":
    own = supernet()
    example = {"x": torch.zeros(1, 4), "scale": torch.ones(1, 3)}
    engine = subnetact.Engine(own, list(own.space.enumerate()), example=example, accuracy=[60.0, 70.0])
    table = subnetact.LatencyTable(engine.keys, engine.accuracy, [1, 2], [[1, 2], [2, 3]])
    engine.tables["cpu"] = table
    engine.save("bundle")
"""


def test_the_bundle_of_an_own_network_is_served(tmp_path, start, capsys, monkeypatch):
    (tmp_path / "own_network.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("own_network.py", run_name="__main__")
    bundle = str(tmp_path / "bundle")
    assert main(["--bundle", bundle]) == 2
    assert "--model" in capsys.readouterr().err  # the advice names an option of this command
    options = ["--bundle", bundle, "--model", "own_network:supernet", "--constructor", '{"width": 8}']
    server = start(*options, environment={"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{tmp_path}"})
    answers = []
    for scale in (1.0, 2.0):
        body = {"input": {"x": [1, 2, 3, 4], "scale": [scale] * 3}, "deadline_ms": 60_000, "min_accuracy": 70}
        status, _, text = server.call("POST", "/infer", body)
        answers.append(json.loads(text))
        assert status == 200
    first, second = (answer["output"] for answer in answers)
    assert second["scores"] == pytest.approx([2 * value for value in first["scores"]], rel=1e-4)
    assert first["sum"] == 10.0
    for bad in ({"x": [1, 2, 3, 4]}, [1, 2, 3, 4], {"x": [1, 2, 3, 4], "scale": [1, 1]}):
        assert server.call("POST", "/infer", {"input": bad})[0] == 400


def test_one_line_says_what_is_served(digits):
    engine, bundle = digits
    source = Source(str(bundle), slo_ms=40.0, workers=2)
    line = source.summary(engine, engine.tables["cpu"])
    assert "\n" not in line
    for part in (__version__, str(bundle), engine.fingerprint, "3 subnets", "slo_ms 40", "workers 2"):
        assert part in line
    assert line.endswith("latencies: measured on this machine")
    foreign = replace(engine.tables["cpu"], stamp=machine(engine.device) | {"device_name": "Intel E5"})
    assert "latencies: measured on another machine" in source.summary(engine, foreign)


def test_the_table_for_schedulers_is_preferred(digits, tmp_path):
    engine = digits[0]
    cpu = engine.tables["cpu"]
    assert Source().latency_table(engine) is cpu
    engine.tables["scheduler"] = cpu.monotone()
    try:
        assert Source().latency_table(engine) is engine.tables["scheduler"]
    finally:
        del engine.tables["scheduler"]
    LatencyTable(engine.keys, [float("nan")] * 3, [1], [[1], [2], [3]]).save(tmp_path / "table.json")
    with pytest.raises(TableError, match="--table"):
        Source(table=str(tmp_path / "table.json")).latency_table(engine)


def test_what_inputs_may_be():
    nested = Signature((torch.zeros(2), {"ids": torch.zeros(3, dtype=torch.int64)}))
    assert [(part.name, part.shape) for part in nested.parts] == [("input_0", (2,)), ("ids", (3,))]
    x = nested.from_values({"input_0": [1, 2], "ids": [1, 2, 3]})
    assert x[0].dtype == torch.float32
    assert x[1]["ids"].tolist() == [1, 2, 3]
    for ids in ([1.5, 2, 3], [True, 2.0, 3], ["1", 2, 3], [2**70, 1, 1], [[1, 2, 3]] * 2):
        with pytest.raises(InvalidRequest, match="whole numbers"):
            nested.from_values({"input_0": [1, 2], "ids": ids})
    with pytest.raises(ServeError, match="example"):
        Signature(None)
    with pytest.raises(ServeError, match="complex"):
        Signature(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InvalidRequest, match="several"):
        nested.from_numpy(b"")
