"""The interpreter ends while daemon threads compute: it waits for them, and holds those that would begin."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from subnetact.serving.live import interpreter_exit

TESTS = Path(__file__).parents[1]
BATCHING = """
import threading, time
import torch
from torch import nn
import subnetact
from subnetact.serving import Fixed, Preemptive
torch.set_num_threads(1)
began = set()

class Long(nn.Linear):
    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            began.add(threading.get_ident())
            for _ in range(5):
                self.weight @ self.weight
        return super().forward(x)

def engine():
    network = nn.Sequential(nn.Linear(16, 1024), Long(1024, 1024), nn.Linear(1024, 4)).eval()
    space = subnetact.SubnetSpace(
        "m", [subnetact.Axis.uniform("w", ["a"], [32, 1024])], lambda v: {"w": v["w"][0]}
    )
    on = subnetact.WeightSlice.on
    supernet = subnetact.insert_(network, space, {"0": on(out="w"), "1": on(in_="w")})
    return subnetact.Engine(supernet, [space.largest()], example=torch.zeros(1, 16))

engines = [engine(), engine()]
table = subnetact.LatencyTable(engines[0].keys, [50.0], [1], [[1.0]])
policies = Fixed(table, 0), Preemptive(Fixed(table, 0))
batchers = [subnetact.Batcher(e, policy=p, slo_ms=1e6) for e, p in zip(engines, policies)]
for batcher in batchers:
    for _ in range(20):
        batcher.submit(torch.zeros(16), deadline_ms=1e6)
end = time.monotonic() + 60
while len(began) < len(batchers):
    assert time.monotonic() < end
    time.sleep(0.001)
"""
GENERATING = """
import torch
from torchvision_operators import define_missing
define_missing()
import subnetact
torch.set_num_threads(1)
from generation_tables import step_table
from small_decoders import small_decoder
from subnetact.generation import Generator
sizes = {"intermediate_size": 1024, "hidden_size": 512, "num_hidden_layers": 2}
model = small_decoder("LlamaConfig", **sizes, max_position_embeddings=5000)
supernet = subnetact.insert_(model, example=torch.arange(8).view(1, 8), axes=("ffn",))
spec = supernet.space.largest()
generator = Generator(supernet, [spec], step_table([spec.key], (50.0,)), token_ms=1e6)
completion = generator.submit([1, 2, 3], max_new_tokens=4000)
next(iter(completion))
"""
GENERATES = "assert not completion.done\n"


def test_the_interpreter_ends_while_threads_compute() -> None:
    """Batchers, with and without blocks, and a generator compute at the end of one program."""
    program = GENERATING + BATCHING + GENERATES if find_spec("transformers") else BATCHING
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_end_waits_for_no_thread_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_exit, "WAIT_S", 0.0)
    now = interpreter_exit._Computing()
    now.threads.add(-1)
    end = threading.Thread(target=now.end_all, daemon=True)
    end.start()
    end.join(60)
    assert not end.is_alive()
