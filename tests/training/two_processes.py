"""One of two processes that train a supernet together: `two_processes.py STORE RANK RESULT`.

It accumulates two batches before the gradients are averaged.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from subnetact.training import sandwich_step

sys.path.insert(0, str(Path(__file__).parents[1]))
sandwich = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_sandwich.py"))))
store, rank, result = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
supernet = sandwich.new_supernet()
model = DistributedDataParallel(supernet)
rng = random.Random(rank)
widths = []
for step in range(2):
    x, labels = sandwich.data(seed=10 + 2 * rank + step)
    found = sandwich_step(model, x, labels, rng=rng, random_subnets=1, average=step == 1)
    widths.append(sandwich.widths_of(found))
torch.save({"gradients": sandwich.gradients(supernet), "widths": widths}, result)
distributed.destroy_process_group()
os._exit(0)  # Threads of torch that outlive the interpreter would abort now and then.
