"""Measures how long a bundle of 2 GiB takes to open, in new processes.

`python benchmarks/open_folder.py --results benchmarks/results/open_folder.json`
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OPEN = """
import sys, time, torch, transformers, subnetact
torch.set_num_threads(1)
transformers.LlamaForCausalLM  # imported before the clock starts, as in a process that has used it
begun = time.perf_counter(), time.process_time()
view = subnetact.from_pretrained(sys.argv[1], "smallest")
print(time.perf_counter() - begun[0], time.process_time() - begun[1])
assert next(view.parameters()).dtype == torch.bfloat16
"""


def main() -> None:
    """Write a Llama of 2 GiB, open its smallest subnet a few times, and write the times as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of 536 MB each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    import torch
    import transformers

    import subnetact
    from subnetact.elastic.factories import make_network
    from subnetact.files.documents import write_json

    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": args.layers,
    }
    config = transformers.LlamaConfig(vocab_size=2048, num_attention_heads=32, **sizes)
    factory = {"library": "transformers", "name": "LlamaForCausalLM", "arguments": {}}
    torch.set_default_dtype(torch.bfloat16)
    network = make_network(factory, config, 2**40)
    torch.set_default_dtype(torch.float32)
    for parameter in network.parameters():
        parameter.data.fill_(0.01)
    supernet = subnetact.insert_(network, example=torch.arange(4)[None])
    with tempfile.TemporaryDirectory() as place:
        supernet.save_pretrained(place)
        size = sum(path.stat().st_size for path in Path(place).glob("*.safetensors"))
        found = []
        for _ in range(args.repeats):
            done = subprocess.run(
                [sys.executable, "-c", OPEN, place], capture_output=True, text=True, check=True
            )
            found.append([float(word) for word in done.stdout.split()])
    wall, cpu = ([row[i] for row in found] for i in (0, 1))
    facts = {"machine": platform.processor(), "bytes": size, "wall_s": wall, "cpu_s": cpu}
    print(json.dumps({**facts, "median_wall_s": statistics.median(wall)}))
    write_json(args.results, facts)


if __name__ == "__main__":
    main()
