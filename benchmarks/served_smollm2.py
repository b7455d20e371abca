"""SmolLM2-135M as `language_load.py` serves it: elastic neurons, sizes chosen per layer, distilled.

    python benchmarks/served_smollm2.py --work FOLDER --steps 100    # goes on where it stopped

Install what `budget.py` asks for. The weights stay in FOLDER. Every feed-forward network keeps a twelfth to
all of its neurons, and every subnet can continue on the keys and values of the others, at float32, bfloat16
and int8. The sizes are those that scores of layers choose at the multiply-accumulates of even halves and
quarters; the smallest has a twelfth everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import budget
import elastic_smollm2
import torch
from distill import Chunks, smollm2_model, smollm2_texts
from harness import Facts, read, save
from peers import import_torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor

from subnetact import SubnetSpec, Supernet, insert_
from subnetact.training import distill_

SIZES = {"1": 1.0, "1/2": 0.5, "1/4": 0.25, "1/12": 1 / 12}
ROWS = (
    ("1/12", "int8"),
    ("1/4", "int8"),
    ("1/2", "int8"),
    ("1", "int8"),
    ("1", "bfloat16"),
    ("1", "float32"),
)
"""What the server has: the size of the feed-forward networks, and the precision."""
NAMES = [f"FFN {size}, {precision}" for size, precision in ROWS]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"  # the same tensor


def batches(tokens: Tensor) -> list[Facts]:
    """Return batches of four chunks."""
    return [{"input_ids": x, "use_cache": False} for x in torch.split(tokens, 4)]


def held_out() -> Tensor:
    """Return chunks of docstrings (N, LENGTH) that nothing is trained on."""
    return smollm2_texts(argparse.Namespace(tokens=0))["docstrings"]


def tokenizer() -> Any:
    """Return the tokenizer of the model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(elastic_smollm2.model_folder(), gguf_file=elastic_smollm2.FILE)


def keep(supernet: Supernet, path: Path) -> None:
    """Write the weights."""
    save_file({name: one for name, one in supernet.state_dict().items() if name != HEAD}, path)


def elastic(weights: Path) -> Supernet:
    """Return the elastic model with these weights."""
    model, (axes, choices), state = smollm2_model(), budget.AXES["ffn"], load_file(weights)
    model.load_state_dict({**state, HEAD: state[EMBEDDING]})
    example = {"input_ids": torch.arange(32).view(1, 32), "use_cache": False}
    return insert_(model, example=example, axes=axes, choices=choices, each_block=True)


def served(work: Path) -> tuple[Supernet, list[SubnetSpec]]:
    """Return the trained model, and the subnets of `ROWS`."""
    supernet, keys = elastic(work / "trained.safetensors"), read(work / "facts.json")["keys"]
    specs = {size: supernet.space.parse(key) for size, key in keys.items()}
    space = supernet.enable_precision("bfloat16", "int8", last=True)
    return supernet, [space.at_precision(specs[size], precision) for size, precision in ROWS]


def token_accuracy(scores: Tensor, tokens: Tensor) -> float:
    """Return how often the next token is the likeliest one, in percent."""
    return 100.0 * float((scores[:, :-1].argmax(-1) == tokens[:, 1:]).float().mean())


def quality(supernet: Supernet, specs: Sequence[SubnetSpec]) -> list[dict[str, float]]:
    """Return the perplexity of held-out docstrings, and which share of their tokens is predicted right."""
    chunks, found = held_out(), []
    for spec in specs:
        view: Any = supernet.subnet(spec)
        with torch.inference_mode():
            shares = [token_accuracy(view(**x).logits, x["input_ids"]) for x in batches(chunks)]
        perplexity = elastic_smollm2.perplexity(view, chunks)
        found.append({"perplexity": perplexity, "right": sum(shares) / len(shares)})
    return found


def train(args: argparse.Namespace) -> None:
    """Choose the sizes, and distil them."""
    args.work.mkdir(parents=True, exist_ok=True)
    given, facts = smollm2_texts(args), args.work / "facts.json"
    if not facts.exists():
        supernet, scores, seconds = budget.elastic("ffn", {"calibration": given["training"][:16]})
        even = {name: budget.uniform(supernet, ffn=share) for name, share in SIZES.items()}
        chosen = {name: scores.best({"macs": scores.costs(spec).macs}) for name, spec in even.items()}
        keep(supernet, args.work / "sorted.safetensors")
        macs = {name: scores.costs(spec).macs for name, spec in chosen.items()}
        save(facts, {"cpu_s": seconds, "macs": macs, "keys": {n: spec.key for n, spec in chosen.items()}})
    known, supernet = read(facts), elastic(args.work / "sorted.safetensors")
    specs = [supernet.space.parse(known["keys"][name]) for name in SIZES]
    report = distill_(
        supernet,
        Chunks(given["training"], 4),
        held_out=batches(given["docstrings"][:8]),
        task="tokens",
        steps=args.steps,
        subnets=specs,
        trained=specs[1:],
        importance=None,
        random_subnets=2,
        calibration=1,
        autocast=torch.bfloat16,
        resume=args.work / "state.safetensors",
        save_every_s=60.0,
    )
    print(report)
    keep(supernet, args.work / "trained.safetensors")
    trained = {"steps": report.steps, "minutes": report.seconds / 60}
    save(facts, {**known, "training": {**trained, "before": report.before, "after": report.after}})


def folder(work: Path) -> None:
    """Write the largest subnet where transformers reads it; no token ends its answers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    packed, state = smollm2_model(), load_file(work / "trained.safetensors")
    facts = {**packed.config.to_dict(), "quantization_config": None}
    model: Any = LlamaForCausalLM(LlamaConfig(**facts))
    model.load_state_dict({**state, HEAD: state[EMBEDDING]})
    model.generation_config.eos_token_id = None
    model.save_pretrained(work / "folder")
    tokenizer().save_pretrained(work / "folder")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the weights")
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--tokens", type=int, default=600_000, help="training tokens that are read")
    parser.add_argument("--folder", action="store_true", help="only write the folder for transformers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import_torchvision()
    folder(args.work) if args.folder else train(args)
