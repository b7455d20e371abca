"""Scripts that run in two processes, as torchrun runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["in_two_processes"]

ROOT = Path(__file__).parents[1]
PRELUDE = """
import sys, warnings
sys.path.insert(0, {tests!r})
from torchvision_operators import define_missing
define_missing()
warnings.simplefilter("ignore")
import torch
"""
END = """
import os
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
sys.stderr.flush()
os._exit(0)  # Threads of torch that outlive the interpreter would abort now and then.
"""


def in_two_processes(script: str, folder: Path) -> None:
    """Run a script in two processes; each has a folder of its own, `folder` / rank."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = folder / "script.py"
    path.write_text(PRELUDE.format(tests=str(ROOT / "tests")) + script + END)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    group |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    workers = []
    for rank in ("0", "1"):
        (folder / rank).mkdir()
        own = {**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        workers.append(subprocess.Popen([sys.executable, str(path)], cwd=folder / rank, env=own, **pipes))
    errors = [worker.communicate(timeout=600)[1].decode() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(text[-3000:] for text in errors)
