"""Train the embedded language model: sandwich rule with in-place distillation over nested widths and depths.

The texts are the docstrings of the running Python's standard library. Every step trains the largest subnet on
the next token, and the smallest and a random one also on the largest one's predictions.
"""

import argparse
import ast
import json
import random
import sysconfig
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from subnetact.device import machine
from subnetact.generation import text
from subnetact.insertion.key_value_cache import switch
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet
from subnetact.training import sandwich_step

SAMPLE = 16 * 257
"""The first tokens of the held-out texts, on which a quick test repeats the measurement."""
DATA = Path(text.__file__).parents[1] / "data"
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
"""Folders of the standard library that are not read."""


def read_text(held_out: bool) -> list[str]:
    """Return docstrings of the running Python's standard library, as sessions: `>>> help(json.dumps)`.

    Every tenth module, by the checksum of its name, is held out from training; `held_out` says which part.
    """
    library, found = Path(sysconfig.get_paths()["stdlib"]), list[str]()
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        name = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
        if LEFT_OUT.intersection(place.parts) or (zlib.crc32(name.encode()) % 10 == 0) is not held_out:
            continue
        with warnings.catch_warnings(), suppress(SyntaxError, ValueError):  # some are damaged on purpose
            warnings.simplefilter("ignore")  # of invalid escapes
            found.extend(_texts(name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def _texts(name: str, node: Any) -> Iterator[str]:
    documentation, last = ast.get_docstring(node), name.rpartition(".")[2]
    if documentation and len(documentation) >= 40:
        if isinstance(node, ast.Module):
            signature = f"module {last}"
        elif isinstance(node, ast.ClassDef):
            signature = f"class {last}({', '.join(ast.unparse(base) for base in node.bases)})"
        else:
            signature = f"{last}({ast.unparse(node.args)})"
        yield f">>> help({name})\n{signature}\n{documentation.strip()}\n"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _texts(f"{name}.{child.name}", child)


def train_tokenizer(texts: list[str], path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=text.VOCABULARY,
        special_tokens=[text.END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path), pretty=False)


def random_subnets(supernet: Supernet, rng: random.Random, number: int) -> list[SubnetSpec]:
    """Draw subnets, half of them with the same width in every layer."""
    space, found = supernet.space, []
    for _ in range(number):
        values = {axis.name: [rng.choice(slot.choices) for slot in axis.slots] for axis in space.axes}
        if rng.random() < 0.5:
            values["ffn"] = [values["ffn"][0]] * len(values["ffn"])
        found.append(space.spec(**values))
    return found


def next_token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(texts: list[str]) -> torch.Tensor:
    """Return the tokens of texts in a row, each behind an end-of-text token, of shape (tokens,)."""
    found: list[int] = []
    for encoding in text.text_tokenizer().encode_batch(texts):
        found.append(text.END_TOKEN)
        found.extend(encoding.ids)
    return torch.tensor(found)


@torch.inference_mode()
def next_token_quality(
    supernet: Supernet, spec: SubnetSpec, stream: torch.Tensor, written_by: SubnetSpec | None = None
) -> tuple[float, float]:
    """Return the mean loss of a subnet in nats per token, and the percentage of next tokens predicted right.

    The tokens are cut into pieces of half the model's context. If `written_by` computes the keys and values
    of the first half of every piece, the subnet continues on them, and only the second half is predicted.
    """
    length = text.CONTEXT // 2
    pieces = stream[: len(stream) // (length + 1) * (length + 1)].view(-1, length + 1)
    first = 0 if written_by is None else length // 2
    loss, right, seen = 0.0, 0, 0
    for piece in torch.split(pieces, 8):
        given, wanted = piece[:, first:-1], piece[:, first + 1 :]
        if written_by is None:
            logits = supernet.subnet(spec)(given, use_cache=False).logits
        else:
            cache = supernet.subnet(written_by)(piece[:, :first], use_cache=True).past_key_values
            view = switch(supernet, cache, spec, allow_approximate=True)
            logits = view(given, past_key_values=cache, use_cache=True).logits
        loss += float(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
        right += int((logits.argmax(-1) == wanted).sum())
        seen += wanted.numel()
    return loss / seen, 100 * right / seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA / text.WEIGHTS)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="a file to resume from")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    training = read_text(held_out=False)
    if not (DATA / text.TOKENIZER).exists():
        train_tokenizer(training, DATA / text.TOKENIZER)
    stream, unseen = tokens(training), tokens(read_text(held_out=True))
    print(f"{len(stream)} tokens of training, {len(unseen)} held out")
    supernet = text.new_text_supernet()
    optimizer = torch.optim.AdamW(supernet.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rate, args.steps, pct_start=0.05)
    first, spent = 0, 0.0
    if args.state and args.state.exists():
        kept = torch.load(args.state, weights_only=True)
        supernet.load_state_dict(kept["weights"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
        first, spent = kept["step"], kept["seconds"]
    supernet.train()
    largest, smallest = supernet.space.largest(), supernet.space.smallest()
    begun = time.perf_counter()
    for step in (bar := tqdm(range(first, args.steps), desc="training")):
        rng, generator = random.Random(step), torch.Generator().manual_seed(step)
        starts = torch.randint(len(stream) - args.length - 1, (args.batch_size,), generator=generator)
        piece = torch.stack([stream[i : i + args.length + 1] for i in starts.tolist()])
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            losses = sandwich_step(
                supernet,
                {"input_ids": piece[:, :-1], "use_cache": False},
                piece[:, 1:],
                rng=rng,
                loss=next_token_loss,
                subnets=list(dict.fromkeys([largest, smallest, *random_subnets(supernet, rng, 1)])),
                distillation=0.5,
                class_dim=-1,
            )
        torch.nn.utils.clip_grad_norm_(supernet.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{next(iter(losses.values())):.3f}", refresh=False)
        if args.state and (step + 1) % 100 == 0:
            state = {"weights": supernet.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"schedule": schedule.state_dict(), "step": step + 1}
            state["seconds"] = spent + time.perf_counter() - begun
            torch.save(state, args.state.with_suffix(".new"))
            args.state.with_suffix(".new").replace(args.state)
            print(f"{step + 1} {state['seconds']:.0f} s {losses.values()}", flush=True)
    supernet.eval()
    weights = supernet.state_dict()
    weights.pop("lm_head.weight")  # the same tensor as the embedding
    save_file({name: tensor.half().contiguous() for name, tensor in weights.items()}, args.out)
    supernet = text.load_text_supernet(args.out)
    figures = []
    uniform = [
        supernet.space.spec(depth=[kept], ffn=[width] * text.LAYERS)
        for kept in text.KEPT
        for width in text.FFN
    ]
    for spec in tqdm(uniform, desc="held-out loss"):
        loss, right = next_token_quality(supernet, spec, unseen)
        figures.append({"subnet": spec.key, "loss": round(loss, 4), "right_percent": round(right, 3)})
    sample = unseen[:SAMPLE]
    quick = {
        spec.key: round(next_token_quality(supernet, spec, sample)[0], 4) for spec in (largest, smallest)
    }
    facts: dict[str, Any] = {
        "seed": args.seed,
        "steps": args.steps,
        "batch_size": args.batch_size,
        "length": args.length,
        "rate": args.rate,
        "bfloat16": args.bfloat16,
        "seconds": round(spent + time.perf_counter() - begun),
        "machine": machine(torch.device("cpu")),
        "tokens": {"training": len(stream), "held_out": len(unseen)},
        "held_out": figures,
        "sample": {"tokens": SAMPLE, "loss": quick},
    }
    args.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    print(table(facts))


def table(facts: dict[str, Any]) -> str:
    """Return the table of the file that tells the origin of the weights."""
    lines = ["| subnet | loss, nats per token | next tokens right, % |", "|---|---|---|"]
    lines += [
        f"| `{one['subnet']}` | {one['loss']:.3f} | {one['right_percent']:.1f} |" for one in facts["held_out"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
