"""SmolLM2-135M with elastic FFN, heads, stream and depth, and int8: perplexity against tokens per second.

The subnets are those of `examples/elastic_smollm2.py` (which see for what to install). The training begins
with the weights of `distill.py --smollm2`, whose feed-forward widths are distilled, and distils all axes for
`--minutes`. Then the perplexity of held-out docstrings and of the descriptions of data sets that come with
scikit-learn, and the tokens per second of greedy generation, in turns: `--only perplexity`, and `--only
speed` for an idle machine. It writes `elastic_smollm2.json` and `.png` beside the example.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from distill import next_token_loss, smollm2_model, smollm2_texts
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from subnetact import Supernet, insert_, reorder_
from subnetact.device import machine
from subnetact.training import distill_

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import elastic_smollm2
from elastic_smollm2 import CHOICES, perplexity

EXAMPLES = Path(__file__).parents[1] / "examples"
SUBNETS = {
    **elastic_smollm2.SUBNETS,
    "FFN 3/4": (0.75, 3, 1.0, 30),
    "26 layers": (1.0, 3, 1.0, 26),
    "FFN 3/4, 26 layers": (0.75, 3, 1.0, 26),
    "FFN 1/2, 23 layers": (0.5, 3, 1.0, 23),
}
PRECISIONS = ("float32", "int8")
ROUNDS = 5


def elastic_model(given: dict[str, Tensor], weights: Path | None) -> Supernet:
    """Return the elastic model with the weights of a training, or as it comes."""
    model = smollm2_model()
    if weights is not None:
        put_(model, weights)
    example = {"input_ids": given["training"][:1, :32], "use_cache": False}
    return insert_(model, example=example, axes=tuple(CHOICES), choices=CHOICES)


def put_(model: torch.nn.Module, file: Path) -> dict[str, Any]:
    """Copy the weights of an unfinished training into a model; return the facts about the training."""
    with safe_open(file, "pt") as stored, torch.no_grad():
        names = set(stored.keys())
        for name, tensor in model.state_dict().items():
            if f"weights/{name}" in names:  # Weights that others share are stored once.
                tensor.copy_(stored.get_tensor(f"weights/{name}"))
        facts: dict[str, Any] = json.loads(stored.metadata()["document"])["facts"]
    return facts


def trained(given: dict[str, Tensor], args: argparse.Namespace) -> tuple[Supernet, dict[str, Any]]:
    """Distil all axes, or go on; return the supernet and what was done."""

    def batches(part: str) -> list[Any]:
        return [{"input_ids": x, "use_cache": False} for x in torch.split(given[part], 4)]

    supernet = elastic_model(given, args.weights)
    example = {"input_ids": given["training"][:1, :32], "use_cache": False}
    sorting = [(x, x["input_ids"]) for x in batches("training")[:4]]
    # The neurons are sorted already, and their narrow subnets trained.
    fresh = [name for name in supernet.space.dimensions if ".keep" not in name and "mlp" not in name]
    reorder_(supernet, "taylor", example, batches=sorting, loss=next_token_loss, dimensions=fresh)
    report = distill_(
        supernet,
        batches("training"),
        held_out=batches("docstrings")[:2],
        task="tokens",
        minutes=args.minutes,
        subnets=[supernet.space.largest(), supernet.space.smallest()],
        importance=None,
        random_subnets=1,
        autocast=torch.bfloat16,
        resume=args.state,
        save_every_s=180.0,
    )
    return supernet, {"steps": report.steps, "minutes": report.seconds / 60, "before": report.before}


def tokens_per_s(view: Any, prompt: Tensor, tokens: int = 16) -> float:
    """Return the speed of greedy generation after a prompt (1, tokens)."""
    with torch.inference_mode():
        output = view(prompt, use_cache=True, logits_to_keep=1)
        token, cache, start = output.logits[:, -1:].argmax(-1), output.past_key_values, time.perf_counter()
        for _ in range(tokens):
            token = view(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return tokens / (time.perf_counter() - start)


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw perplexity against tokens per second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for precision, marker in zip(PRECISIONS, "os", strict=True):
        chosen = [row for row in rows if row["precision"] == precision]
        points = [(row["tokens_per_s"], row["docstrings"]) for row in chosen]
        axes.plot(*zip(*points, strict=True), marker, label=precision)
        for i, (row, point) in enumerate(zip(chosen, points, strict=True)):
            place = (5, 4 - 11 * (i % 2))  # Neighbours overlap less.
            axes.annotate(row["subnet"], point, xytext=place, textcoords="offset points", fontsize=7)
    axes.set(xlabel="tokens per second, one sequence", ylabel="perplexity of docstrings", yscale="log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.margins(x=0.15)
    axes.legend()
    pyplot.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", type=Path, help="distill_work/elastic.safetensors of distill.py")
    parser.add_argument("--minutes", type=float, default=35.0, help="of training")
    parser.add_argument("--state", type=Path, default=Path("smollm2.safetensors"), help="unfinished work")
    parser.add_argument("--tokens", type=int, default=500_000, help="training tokens that are read")
    parser.add_argument("--only", nargs="+", choices=("perplexity", "speed"), default=["perplexity", "speed"])
    parser.add_argument("--out", type=Path, default=EXAMPLES / "elastic_smollm2.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = smollm2_texts(args)
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows = known.setdefault("rows", [{"subnet": n, "precision": p} for p in PRECISIONS for n in SUBNETS])
    if "perplexity" in args.only:
        supernet, known["training"] = trained(given, args)
    else:
        supernet = elastic_model(given, None)
    known["machine"] = machine(torch.device("cpu"))
    space = supernet.enable_precision("int8", last=True)
    sizes = [dict(zip(CHOICES, SUBNETS[row["subnet"]], strict=True)) for row in rows]
    specs = [space.spec(**of, precision=row["precision"]) for of, row in zip(sizes, rows, strict=True)]
    views = [supernet.subnet(spec) for spec in specs]
    if "perplexity" in args.only:
        for row, view in zip(rows, tqdm(views, "perplexity", disable=None), strict=True):
            row |= {part: perplexity(view, given[part][:8]) for part in ("docstrings", "other")}
    if "speed" in args.only:
        speeds: list[list[float]] = [[] for _ in views]
        for _ in tqdm(range(ROUNDS), "speed", disable=None):
            for view, found in zip(views, speeds, strict=True):
                found.append(tokens_per_s(view, given["docstrings"][:1, :64]))
        for row, found in zip(rows, speeds, strict=True):
            row["tokens_per_s"] = statistics.median(found)
    print("\n".join(map(str, rows)))
    args.out.write_text(json.dumps(known, indent=1) + "\n")
    if all("docstrings" in row and "tokens_per_s" in row for row in rows):
        figure(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
