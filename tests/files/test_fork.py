"""A forked process: what was loaded before the fork works there, or says why not; nothing waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

SCRIPT = """
import os, signal, sys, threading, warnings
sys.path.insert(0, "tests")
warnings.simplefilter("ignore")
import torch
from subnetact import Engine, calibrate, errors
from subnetact.files import fork
from subnetact.digits import load_digits_supernet
from subnetact.supernet.views import private_view

def in_child(act):
    # Return what an act returns in a forked child, or the name of its error; "hangs" if it does not end.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            said = act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, str(said).encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 4096).decode()
    os.waitpid(child, 0)
    return said or "hangs"

supernet, x = load_digits_supernet(), torch.rand(2, 1, 16, 16)
specs = [supernet.space.smallest(), supernet.space.largest()]
calibrate(supernet, specs, [x])
engine = Engine(supernet, specs, example=x)
supernet.subnet(specs[0])
inside, ends = threading.Event(), threading.Event()

def hold(*locks):
    for lock in locks:
        lock.acquire()
    inside.set()
    ends.wait()
    for lock in locks:
        lock.release()

def exchange():
    with supernet.generation.lock:
        supernet.generation.begin_exchange()
        hold()

acts = {
    "cached view": lambda: supernet.subnet(specs[0])(x),
    "new view": lambda: private_view(supernet, specs[1])[0](x),
    "calibrate": lambda: calibrate(supernet, specs[:1], [x]),
    "load_state_dict": lambda: supernet.load_state_dict(supernet.state_dict()),
    "extract": lambda: supernet.extract(specs[0])(x),
    "training": lambda: supernet.train()(x),
    "engine": lambda: engine(x, subnet=0),
    "pin": lambda: engine.pin(1),
}
for target, locks in ((hold, list(fork._locks)), (exchange, [])):
    thread = threading.Thread(target=target, args=locks, daemon=True)
    thread.start()
    inside.wait()
    for act in acts.values():
        print(in_child(lambda: act() is not None and "works"))
    ends.set()
    if target is hold:
        thread.join()
        inside.clear(), ends.clear()
"""


def test_a_child_works_whatever_locks_were_held_and_refuses_weights_that_were_being_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.splitlines()
    assert said[:8] == ["works"] * 8
    assert len(said) == 16
    assert [line for line in said[8:] if "StaleWeights: this process was forked" not in line] == []
