"""How long a bundle of 2 GiB takes to open, in new processes: `python benchmarks/open_folder.py`.

A Llama of bfloat16 weights is written once, and its smallest subnet is opened several times. Writes
`results/open_folder.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peers import import_torchvision

import subnetact
from subnetact.device import machine
from subnetact.elastic.factories import make_network

RESULTS = Path(__file__).parent / "results" / "open_folder.json"
OPEN = """
import sys, time, torch
sys.path.insert(0, sys.argv[2])
from peers import import_torchvision
import_torchvision()
import transformers, subnetact
transformers.LlamaForCausalLM  # imported before the clock starts, as in a process that has used it
begun = time.perf_counter()
view = subnetact.from_pretrained(sys.argv[1], "smallest")
print(time.perf_counter() - begun)
assert next(view.parameters()).dtype == torch.bfloat16
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of 512 MiB each")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    import_torchvision()
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=2048,
        num_attention_heads=32,
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=args.layers,
    )
    factory = {"library": "transformers", "name": "LlamaForCausalLM", "arguments": {}}
    torch.set_default_dtype(torch.bfloat16)
    network = make_network(factory, config, 2**40)
    torch.set_default_dtype(torch.float32)
    for parameter in network.parameters():
        parameter.data.fill_(0.01)
    x = torch.arange(4)[None]
    described = subnetact.describe(network, x, axes=("ffn",), proof=False)
    supernet = subnetact.insert_(network, described, example=x)
    with tempfile.TemporaryDirectory() as place:
        supernet.save_pretrained(place)
        size = sum(path.stat().st_size for path in Path(place).glob("*.safetensors"))
        command = [sys.executable, "-c", OPEN, place, str(Path(__file__).parent)]
        found = [
            float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(args.repeats)
        ]
    facts = {"bytes": size, "seconds": found, "median_s": statistics.median(found)}
    print(facts)
    RESULTS.write_text(json.dumps({**facts, "machine": machine(torch.device("cpu"))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
