"""Scripts that run in two processes, as torchrun runs them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["in_two_processes"]

PRELUDE = """
import sys, warnings
warnings.simplefilter("ignore")
import os, torch._dynamo  # torch's optimizers import it
{imports}
for rank in "01":
    if not os.fork():
        break
else:
    sys.exit(sum(os.waitstatus_to_exitcode(os.wait()[1]) != 0 for _ in "01"))
os.environ |= dict(RANK=rank, LOCAL_RANK=rank)
os.chdir(rank)
"""
END = """
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
sys.stderr.flush()
os._exit(0)  # Threads of torch that outlive the interpreter would abort now and then.
"""


def in_two_processes(script: str, folder: Path) -> None:
    """Run a script in two processes, forked after its imports; their folders are `folder` / rank."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = folder / "script.py"
    imports = (line for line in ast.parse(script).body if isinstance(line, ast.Import | ast.ImportFrom))
    prelude = PRELUDE.format(imports="\n".join(map(ast.unparse, imports)))
    path.write_text(prelude + script + END)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    group |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for rank in ("0", "1"):
        (folder / rank).mkdir()
    own = {**os.environ, **group, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, timeout=600, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
