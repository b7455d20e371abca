"""Generation under deadlines: the simulator compared with the live generator; the cost of choosing a subnet.

    python benchmarks/generation.py                       # two minutes on two idle cores
    python benchmarks/generation.py --only choosing

sleeping: a tiny Llama, whose subnets sleep after every forward pass, so that steps have known lengths.
computing: a Llama with random weights, whose subnets compute.
choosing: how long the choice of a subnet takes, per step, with many subnets, sequences and waiting requests.

The sections sleeping and computing measure a step table with `profile_steps`, and serve the same requests
live and in the simulator with that table. Accuracies are made up; they only tell the policies what to prefer.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from subnetact import LatencyTable, SubnetSpec, Supernet, insert_
from subnetact.device import machine
from subnetact.errors import DeadlinePassed
from subnetact.generation import (
    Completion,
    Generator,
    Prompt,
    StepPolicy,
    StepTable,
    TokenDeadlines,
    profile_steps,
    simulate_generation,
)
from subnetact.generation.step_scheduler import StepRequest, StepScheduler, TokenAsk

ACCURACY = (60.0, 66.0, 70.0)
SHARES = (0.25, 0.5, 1.0)
SLEEPS_MS = (4.0, 7.0, 12.0)
"""How long the subnets of the section sleeping sleep in a step; each token of the step adds a thirtieth."""
SEQUENCES = (1, 2, 4, 8)
VOCABULARY = 97
CONTENDERS = ("elastic", "narrowest", "middle", "widest")
"""All subnets together, and each of them alone."""


def llama(hidden: int, layers: int) -> tuple[Supernet, list[SubnetSpec]]:
    """Make an elastic Llama with random weights, and its subnets from the narrowest to the widest."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    supernet = insert_(model.eval(), example=torch.arange(12).view(2, 6), axes=("ffn",), choices=SHARES)
    return supernet, [supernet.space.spec(ffn=share) for share in SHARES]


def let_sleep(supernet: Supernet, specs: list[SubnetSpec]) -> None:
    """Let every subnet sleep after its forward pass, in proportion to the tokens of the step."""
    for spec, sleep_ms in zip(specs, SLEEPS_MS, strict=True):

        def rest(_: Any, __: Any, kwargs: dict[str, Any], ___: Any, sleep_ms: float = sleep_ms) -> None:
            time.sleep(1e-3 * sleep_ms * (1.0 + kwargs["input_ids"].shape[1] / 30))

        supernet.subnet(spec).register_forward_hook(rest, with_kwargs=True)


def requests(rate: float, seconds: float, seed: int, deadlines: TokenDeadlines) -> list[Prompt]:
    """Return requests at random times, with twice the rate in the middle third as on average."""
    rng, now = random.Random(seed), 0.0
    found: list[Prompt] = []
    while True:
        share = 2.0 if seconds / 3 < now / 1e3 < 2 * seconds / 3 else 0.5
        now += 1e3 * rng.expovariate(rate * share)
        if now > 1e3 * seconds:
            return found
        found.append(Prompt(now, rng.randint(4, 48), rng.randint(8, 40), deadlines))


def outcome(
    completion: Completion, prompt: Prompt, accuracy: tuple[float, ...]
) -> tuple[int, float, float | None]:
    """Return how many tokens were in time, their accuracies' sum, and when the first one came."""
    try:
        answer = completion.result(60)
    except DeadlinePassed:
        return 0, 0.0, None
    due = [prompt.deadlines.due_ms(0.0, i) for i in range(len(answer.tokens))]
    met = [came <= latest for came, latest in zip(answer.times_ms, due, strict=True)]
    quality = sum(accuracy[i] for i, good in zip(answer.subnets, met, strict=True) if good)
    return sum(met), quality, answer.first_ms


def serve(generator: Generator, trace: list[Prompt]) -> list[Completion]:
    """Submit the requests of a trace at their times, and wait for all ends."""
    rng, found = random.Random(0), []
    prompts = [[rng.randrange(VOCABULARY) for _ in range(one.tokens)] for one in trace]
    start = time.perf_counter()
    for tokens, one in zip(prompts, trace, strict=True):
        time.sleep(max(0.0, 1e-3 * one.arrival_ms - (time.perf_counter() - start)))
        completion = generator.submit(
            tokens,
            max_new_tokens=one.answer,
            ignore_eos=True,
            first_ms=one.deadlines.first_ms,
            token_ms=one.deadlines.token_ms,
        )
        found.append(completion)
    return found


def only(name: str, specs: list[SubnetSpec], table: StepTable) -> tuple[list[SubnetSpec], StepTable]:
    """Return the subnets that a contender may choose from, and their table."""
    if name == "elastic":
        return specs, table
    i = CONTENDERS.index(name) - 1
    return [specs[i]], table.select([i])


def quantiles(values: list[float]) -> dict[str, float]:
    """Return the median and the 95th percentile of times, in ms."""
    if len(values) < 2:
        return {"p50": float("nan"), "p95": float("nan")}
    return {"p50": statistics.median(values), "p95": statistics.quantiles(values, n=20)[-1]}


def compare(supernet: Supernet, specs: list[SubnetSpec], seeds: int, seconds: float) -> dict[str, Any]:
    """Serve every trace live with every contender, and predict it."""
    table = profile_steps(
        supernet,
        specs,
        sequences=SEQUENCES,
        contexts=(32, 96),
        prompt_tokens=(4, 16, 48, 144),
        accuracy=ACCURACY,
        rounds=3,
    )
    widest = len(specs) - 1
    step_ms = table.latencies_ms(SEQUENCES[-1], 64)[widest]
    prompt_ms = table.latencies_ms(0, 1, 26)[widest]
    capacity = 1e3 / (24 * step_ms / SEQUENCES[-1] + prompt_ms)
    deadlines = TokenDeadlines(first_ms=12 * step_ms, token_ms=1.6 * step_ms)
    rows: list[dict[str, Any]] = []
    plan = [(load, seed) for load in (1.0, 1.5, 2.0) for seed in range(seeds)]
    for load, seed in tqdm(plan, desc="loads"):
        trace = requests(load * capacity, seconds, seed, deadlines)
        names = list(CONTENDERS)
        random.Random(seed).shuffle(names)
        for name in names:
            chosen, measured = only(name, specs, table)
            gc.collect()
            settings: Any = {"token_ms": deadlines.token_ms, "max_sequences": SEQUENCES[-1]}
            with Generator(supernet, chosen, measured, allow_approximate=True, **settings) as generator:
                pairs = zip(serve(generator, trace), trace, strict=True)
                outcomes = [outcome(*pair, measured.accuracy) for pair in pairs]
                stats = generator.stats()
            predicted = simulate_generation(trace, measured, **settings)
            asked = sum(one.answer for one in trace)
            rows.append(
                {
                    "contender": name,
                    "load": load,
                    "seed": seed,
                    "requests": len(trace),
                    "tokens": asked,
                    "live": {
                        "attainment": sum(met for met, _, _ in outcomes) / asked,
                        "effective_accuracy": sum(quality for _, quality, _ in outcomes) / asked,
                        "first_ms": quantiles([first for _, _, first in outcomes if first is not None]),
                        "dropped": stats.expired,
                    },
                    "simulated": {
                        "attainment": predicted.attainment,
                        "effective_accuracy": predicted.effective_accuracy,
                        "first_ms": quantiles(list(predicted.first_ms)),
                        "dropped": predicted.dropped,
                    },
                    "slowdown": stats.slowdown,
                }
            )
    return {
        "deadlines_ms": [deadlines.first_ms, deadlines.token_ms],
        "step_ms": [[table.latencies_ms(n, 64)[i] for n in SEQUENCES] for i in range(len(specs))],
        "rows": rows,
        "errors": errors(rows),
    }


def errors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far predictions are off: attainment and accuracy in points, times in percent."""
    found: dict[str, list[float]] = {"attainment": [], "effective_accuracy": [], "first_p50": []}
    for row in rows:
        live, simulated = row["live"], row["simulated"]
        found["attainment"].append(100 * abs(live["attainment"] - simulated["attainment"]))
        found["effective_accuracy"].append(abs(live["effective_accuracy"] - simulated["effective_accuracy"]))
        off = simulated["first_ms"]["p50"] / live["first_ms"]["p50"] - 1.0
        found["first_p50"].append(100 * abs(off))
    return {name: {"mean": statistics.mean(values), "worst": max(values)} for name, values in found.items()}


def sleeping(seeds: int, seconds: float) -> dict[str, Any]:
    """Compare with subnets that sleep."""
    supernet, specs = llama(16, 1)
    let_sleep(supernet, specs)
    return compare(supernet, specs, seeds, seconds)


def computing(seeds: int, seconds: float) -> dict[str, Any]:
    """Compare with subnets that compute."""
    return compare(*llama(256, 6), seeds, seconds)


def choosing(seeds: int, seconds: float) -> dict[str, Any]:  # noqa: ARG001
    """Measure the choice of a subnet."""
    rows = []
    for subnets in (3, 10, 30):
        keys = [str(i) for i in range(subnets)]
        accuracy = [60.0 + 10.0 * i / subnets for i in range(subnets)]
        sizes, tokens = [1, 2, 4, 8, 16], [4, 16, 64, 256]
        step = [[(5 + i) * (1 + 0.05 * n) for n in sizes] for i in range(subnets)]
        prompt = [[(5 + i) * (1 + 0.02 * n) for n in tokens] for i in range(subnets)]
        decode = LatencyTable(keys, accuracy, sizes, step)
        table = StepTable({64: decode, 256: decode.scaled(1.3)}, LatencyTable(keys, accuracy, tokens, prompt))
        for sequences in (1, 16):
            chooser, rng, taken = StepPolicy(table, 100.0), random.Random(0), []
            for slack in [rng.uniform(0.0, 80.0) for _ in range(300)]:
                begun = time.perf_counter()
                chooser.choose(slack, sequences=sequences, context=100.0, prompt_tokens=8)
                taken.append(1e6 * (time.perf_counter() - begun))
            rows.append(
                {
                    "subnets": subnets,
                    "sequences": sequences,
                    "median_us": statistics.median(taken),
                    "p99_us": statistics.quantiles(taken, n=100)[-1],
                }
            )
    return {"rows": rows, "waiting": waiting(table)}


def waiting(table: StepTable) -> list[dict[str, Any]]:
    """Measure a scheduler that has more requests than its 16 places: beginning a step, and its end."""
    found = []
    for number in (16, 100, 1000):
        scheduler = StepScheduler(StepPolicy(table, 100.0), places=16, step_tokens=512)
        ask = TokenAsk([1, 2, 3], 500, TokenDeadlines(60_000.0, 100.0))
        for _ in range(number):
            scheduler.submit(StepRequest(ask), 0.0)
        times = []
        for now in range(400):
            begun = time.perf_counter()
            scheduler.candidates().take_all()
            step = scheduler.begin(float(now))
            chosen = time.perf_counter()
            assert step is not None
            scheduler.step_done([0] * len(step.answered), now + 0.5)
            times.append((1e6 * (chosen - begun), 1e6 * (time.perf_counter() - chosen)))
        begin_us, end_us = (statistics.median(column) for column in zip(*times, strict=True))
        found.append({"requests": number, "begin_us": begin_us, "end_us": end_us})
    return found


def main() -> None:
    """Measure, print the means and write all runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections: dict[str, Callable[[int, float], dict[str, Any]]] = {
        "sleeping": sleeping,
        "computing": computing,
        "choosing": choosing,
    }
    parser.add_argument("--only", nargs="+", choices=tuple(sections), default=list(sections))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a trace")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "generation.json")
    args = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(5e-4)
    document: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.only:
        found = sections[name](args.seeds, args.seconds)
        stamp = {**machine(torch.device("cpu")), "transformers": transformers.__version__}
        document[name] = {"machine": stamp, **found}
        for row in found["rows"] + found.get("waiting", []):
            print(name, json.dumps(row), flush=True)
        print(name, json.dumps(found.get("errors")), flush=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
