"""The embedded language model under a burst of prompts.

    python benchmarks/text_demo.py [--seconds 9] [--seed 0] [--out FIGURE] [--json FILE]

The same prompts arrive once for all subnets together, and once for every subnet alone. Every token has a
deadline. What counts are the tokens that came in time, and how often their subnets predict the next token of
held-out docstrings right; on keys and values of another subnet that is at most 0.06 points less often.
"""

from __future__ import annotations

import random
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics  # no text of which the model has seen
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from subnetact.command import run_command
from subnetact.generation import Completion, Generator, StepTable, profile_steps
from subnetact.generation import text as embedded
from subnetact.latency.arrays import Floats
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from demo import Run, Trace, compare, demonstrate, header, lulls_and_burst, serve

PROMPT, ANSWER = (64, 128), 8  # tokens of the shortest and the longest prompt, and of every answer
SEQUENCES = 8  # that are active at the same time
CONTEXT = (sum(PROMPT) + ANSWER) // 2  # usual number of tokens: the prompt and half of the answer
LULL, BURST = 0.7, 0.95  # of what the largest subnet sustains, and of what the smallest does
SATURATED = 128  # prompts that are sent at once to see how many tokens per second a subnet sustains
PARTS = (0.375, 0.25, 0.375)  # of the trace: a lull, the burst, a lull
SLACK = 1.5  # time per token, as a multiple of what the largest subnet takes with all places taken
FIRST = 5.0  # time to the first token, as a multiple of the time per token


def demonstrate_text(args: Namespace) -> None:
    """Measure the language model, serve a burst of prompts, print tables and draw a figure."""
    supernet = embedded.load_text_supernet()
    facts = {"machine": header(supernet), "seed": args.seed}
    specs = embedded.switchable_subnets(supernet)
    known = {one["subnet"]: one["right_percent"] for one in embedded.text_facts()["held_out"]}
    right = [known[spec.key] for spec in specs]
    cells: Any = {"sequences": (1, 2, 4, SEQUENCES), "contexts": (64, CONTEXT, 136)}
    table = profile_steps(supernet, specs, **cells, prompt_tokens=(64, 128, 256, 512), accuracy=right)
    tokenizer = embedded.text_tokenizer()
    encoded = [[embedded.END_TOKEN, *one.ids] for one in tokenizer.encode_batch(list(topics.values()))]
    encoded = [one for one in encoded if len(one) >= PROMPT[1] + ANSWER]
    sustained = [
        _sustained(supernet, specs[i], table.select([i]), _beginnings(encoded, SATURATED, 0))
        for i in tqdm(range(len(specs)), "sustained", disable=None)
    ]
    print(f"\nOne set of weights, on held-out docstrings; steps with 1 and {SEQUENCES} sequences, p50 in ms:")
    print(f"{'next right':>12}{'1':>9}{SEQUENCES:>9}{'tokens/s':>10}   subnet")
    for i, (spec, rate) in enumerate(zip(specs, sustained, strict=True)):
        times = "".join(f"{table.latencies_ms(n, CONTEXT)[i]:>9.2f}" for n in (1, SEQUENCES))
        print(f"{right[i]:>10.1f} %{times}{rate:>10.0f}   {spec}")
    print("next right: share of next tokens that are predicted right. tokens/s: what the subnet sustains.\n")
    arrivals_ms, token_ms = prompt_trace(sustained, args.seconds, args.seed)
    prompts = _beginnings(encoded, len(arrivals_ms), args.seed)
    first: Any = torch.tensor(prompts[:1])
    with torch.inference_mode():
        view: Any = supernet.subnet(specs[-1])
        made = view.generate(first, max_new_tokens=ANSWER, do_sample=False)[0, first.shape[1] :]
    beginning, answer = map(tokenizer.decode, (prompts[0], made.tolist()))
    print(f"\nThe largest subnet continues {beginning!r}:\n{answer}")
    print(
        f"\nServing {len(prompts):,} beginnings of Python's help topics live, {ANSWER} tokens each, the "
        f"first within {FIRST * token_ms:.0f} ms, then one every {token_ms:.1f} ms. Lulls ask for "
        f"{LULL * sustained[-1]:.0f} tokens per second, the burst for {BURST * sustained[0]:.0f}."
    )
    due_ms = arrivals_ms[:, None] + (FIRST + np.arange(ANSWER)) * token_ms
    rates = {"largest": sustained[-1], "smallest": sustained[0]}
    trace = Trace(due_ms.ravel(), FIRST * token_ms, rates, bin_ms=250.0)
    last = len(specs) - 1
    contenders = {"all subnets": [*range(len(specs))]}
    contenders |= {f"FFN {embedded.FFN[i]} alone": [i] for i in (last, 0, *range(1, last))}

    def run(name: str, ids: list[int]) -> Run:
        """Send the prompts in real time, and count the tokens that come in time."""
        sent_ms = np.zeros(len(prompts))

        def submit(i: int, begun: float) -> Completion:
            sent_ms[i] = 1e3 * (time.perf_counter() - begun)
            return generator.submit(
                prompts[i], max_new_tokens=ANSWER, first_ms=FIRST * token_ms, ignore_eos=True
            )

        settings: Any = {"token_ms": token_ms, "max_sequences": SEQUENCES, "allow_approximate": True}
        with Generator(supernet, [specs[i] for i in ids], table.select(ids), **settings) as generator:
            answers, late_ms = serve(arrivals_ms, submit)
            slowdown = generator.stats().slowdown
        accuracy = np.full(due_ms.shape, np.nan)
        for i, answer in enumerate(answers):
            for token, subnet in enumerate(answer.subnets if answer else ()):
                if sent_ms[i] + answer.times_ms[token] <= due_ms[i, token]:
                    accuracy[i, token] = right[ids[subnet]]
        more = {"dropped": 100 * answers.count(None) / len(prompts)}
        accuracy = accuracy.ravel()
        expected = np.nan_to_num(accuracy) / 100
        return Run(name, accuracy, expected, late_ms, slowdown, more)

    facts["subnets"] = [{"subnet": s.key, "tokens_per_s": r} for s, r in zip(specs, sustained, strict=True)]
    facts |= {"prompts": len(prompts), "token_ms": token_ms}
    compare([partial(run, *one) for one in contenders.items()], trace, args.out, args.json, facts)
    print(
        "in time: share of all tokens. profiled: how often their subnets predict right. dropped: prompts\n"
        "without an answer. right and in time: share of all tokens."
    )


def _beginnings(encoded: Sequence[list[int]], count: int, seed: int) -> list[list[int]]:
    """Return beginnings of texts, as tokens."""
    rng = random.Random(seed)
    return [rng.choice(encoded)[: rng.randint(*PROMPT)] for _ in range(count)]


def _sustained(supernet: Supernet, spec: SubnetSpec, table: StepTable, prompts: Sequence[list[int]]) -> float:
    """Measure how many tokens per second a subnet generates while prompts wait for places."""
    rng = random.Random(0)
    with Generator(supernet, [spec], table, token_ms=1e6, max_sequences=SEQUENCES) as generator:
        begun = time.perf_counter()
        lengths = [rng.randint(1, 2 * ANSWER - 1) for _ in prompts]  # so that they do not all end at once
        pairs = zip(prompts, lengths, strict=True)
        sent = [
            generator.submit(prompt, max_new_tokens=n, first_ms=1e6, ignore_eos=True) for prompt, n in pairs
        ]
        return sum(len(one.result().tokens) for one in sent) / (time.perf_counter() - begun)


def prompt_trace(sustained: Sequence[float], seconds: float, seed: int) -> tuple[Floats, float]:
    """Return arrivals and the time per token, in ms, from what subnets sustain, the smallest one first.

    The largest subnet can serve the lulls alone, and the smallest the burst. The time per token is `SLACK`
    times what the largest subnet takes with all places taken.
    """
    lull, burst = LULL * sustained[-1] / ANSWER, BURST * sustained[0] / ANSWER
    parts = [seconds * part for part in PARTS]
    arrivals_ms = lulls_and_burst(lull, burst, parts, seed, steady=0.0, cv2=1.0)
    return arrivals_ms, SLACK * 1e3 * SEQUENCES / sustained[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration with the options of `sys.argv` if None are given; return the exit status."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("text_demo.png"), help="file of the figure")
    parser.add_argument("--json", type=Path, help="also write the figures of every contender to this file")
    parser.add_argument("--seconds", type=float, default=9.0, help="length of the trace")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals")
    return demonstrate(demonstrate_text, parser.parse_args(arguments), "text_demo")


if __name__ == "__main__":
    run_command(main)
