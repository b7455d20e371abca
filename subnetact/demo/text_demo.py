"""The embedded language model under a burst of prompts: `python -m subnetact.demo --text`.

The same prompts arrive once for all subnets together, and once for every subnet alone. Every token has a
deadline. What counts are the tokens that came in time, and how often their subnets predict the next token of
held-out text right. A subnet that continues on keys and values of another one counts with its lower accuracy
on such a cache.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from subnetact.demo.machine_notes import machine_notes, share_of_core
from subnetact.device import machine
from subnetact.errors import DeadlinePassed, QueueFull, TraceError
from subnetact.files.documents import write_json
from subnetact.generation.completion import Completion, Generated
from subnetact.generation.generator import Generator
from subnetact.generation.step_profile import profile_steps
from subnetact.generation.step_table import StepTable
from subnetact.generation.text import (
    FFN,
    end_of_text,
    load_text_supernet,
    next_token_quality,
    read_text,
    switchable_subnets,
    text_tokenizer,
    tokens,
)
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["Quality", "TextRun", "TextTrace", "count_tokens", "demonstrate_text", "text_trace"]

PROMPT = (64, 128)
"""Shortest and longest prompt, in tokens."""
ANSWER = 8
"""Tokens of every answer."""
SEQUENCES = 8
"""Sequences that are active at the same time."""
CONTEXT = (sum(PROMPT) + ANSWER) // 2
"""Usual number of tokens of a sequence: the prompt and half of the answer."""
LULL, BURST = 0.7, 0.95
"""Load of the lulls as a share of what the largest subnet sustains, and of the burst, of the smallest's."""
SATURATED = 128
"""Prompts that are sent at once to see how many tokens per second a subnet sustains."""
PARTS = (0.375, 0.25, 0.375)
"""Shares of the trace: a lull, the burst, a lull."""
SLACK = 1.5
"""Time per token, as a multiple of what the largest subnet takes with all places taken."""
FIRST = 5.0
"""Time to the first token, as a multiple of the time per token."""
HELD_OUT_TOKENS = 16_384
BIN_MS = 250.0


@dataclass(frozen=True)
class Quality:
    """How well a subnet predicts held-out text.

    Attributes:
        loss: mean loss in nats per token.
        right: share of next tokens that are predicted right, in percent.
        right_switched: the same on keys and values that another subnet wrote, the worse of the largest and
            the smallest one; not above `right`.
    """

    loss: float
    right: float
    right_switched: float


@dataclass(frozen=True)
class TextTrace:
    """When prompts arrive, and when their tokens are due.

    Attributes:
        arrivals_ms: arrival of every prompt, in ms.
        token_ms: time from one token to the next, in ms; the first has `FIRST` times as much.
        lull: tokens asked for per second in the lulls.
        burst: tokens asked for per second in the burst.
        sustained: tokens per second that every subnet alone sustains, the smallest one first.
    """

    arrivals_ms: tuple[float, ...]
    token_ms: float
    lull: float
    burst: float
    sustained: tuple[float, ...]


@dataclass(frozen=True)
class TextRun:
    """What one contender did with the prompts.

    Attributes:
        name: the contender.
        asked: how many tokens were asked for.
        in_time: times at which tokens came before they were due, in ms from the beginning.
        loss: held-out loss of the subnet of each of these, in nats per token.
        right: how often the subnet of each of these predicts right, in percent.
        dropped: how many requests were dropped, because their first token could not come in time.
        switched: share of the tokens in time whose sequence had been under another subnet, in percent.
        late_ms: how long after its due time the client sent each request, of shape (requests,).
        slowdown: how long steps took, as a multiple of the table's latency.
    """

    name: str
    asked: int
    in_time: tuple[float, ...]
    loss: tuple[float, ...]
    right: tuple[float, ...]
    dropped: int
    switched: float
    late_ms: tuple[float, ...]
    slowdown: float

    @property
    def attainment(self) -> float:
        """Share of all tokens that came in time, in percent."""
        return 100 * len(self.in_time) / self.asked

    @property
    def score(self) -> float:
        """Share of all tokens that came in time, times how often their subnets predict right, in percent."""
        return sum(self.right) / self.asked

    @property
    def mean_loss(self) -> float:
        """Mean held-out loss of the subnets of the tokens in time; NaN if there is none."""
        return float(np.mean(self.loss)) if self.loss else float("nan")

    @property
    def figures(self) -> dict[str, Any]:
        """The run as numbers that JSON can hold; shares in percent."""
        return {
            "name": self.name,
            "tokens": self.asked,
            "in_time": self.attainment,
            "loss": self.mean_loss if self.loss else None,
            "in_time_times_right": self.score,
            "dropped": self.dropped,
            "switched": self.switched,
            "late_p99_ms": float(np.percentile(self.late_ms, 99)),
            "slowdown": self.slowdown,
        }

    @property
    def row(self) -> str:
        """The run as one line of the printed table."""
        return (
            f"{self.name:<16}{self.attainment:>14.1f} %{self.mean_loss:>12.3f}{self.score:>15.2f} %"
            f"{self.dropped:>10}{self.switched:>12.1f} %"
        )


def demonstrate_text(
    plt: Any, out: Path, seconds: float, seed: int, report: Path | None = None, progress: bool = True
) -> list[TextRun]:
    """Measure the language model, serve a burst of prompts, print tables and draw a figure.

    Args:
        plt: matplotlib's pyplot.
        out: file of the figure.
        seconds: length of the trace, in s.
        seed: seed of the prompts and arrivals.
        report: file for the figures as JSON. If None, there is none.
        progress: whether a terminal shows progress bars.

    Returns:
        What the contenders did, the one with all subnets first.

    Raises:
        MissingExtra: transformers is not installed.
    """
    supernet = load_text_supernet()
    parameters = sum(p.numel() for p in supernet.parameters())
    facts = machine(torch.device("cpu"))
    print(
        f"Supernet: {supernet.space}, {parameters:,} parameters. Machine: {facts['device_name']}, "
        f"{facts['cpus']} CPUs, torch {facts['torch']}, 1 thread"
    )
    texts = read_text(held_out=True)
    specs = switchable_subnets(supernet)
    quality = measure_quality(supernet, specs, tokens(texts)[: HELD_OUT_TOKENS + 1], progress)
    table = profile_steps(
        supernet,
        specs,
        sequences=(1, 2, 4, SEQUENCES),
        contexts=(64, CONTEXT, 136),
        prompt_tokens=(64, 128, 256, 512),
        accuracy=[one.right for one in quality],
    )
    encoded = _encoded(texts)
    sustained = [
        _sustained(supernet, specs[i], table.select([i]), _prompts(encoded, SATURATED, 0))
        for i in tqdm(range(len(specs)), "sustained", disable=not progress or None)
    ]
    trace = text_trace(sustained, seconds, seed)
    _print_subnets(specs, quality, table, trace)
    prompts = _prompts(encoded, len(trace.arrivals_ms), seed)
    print(
        f"\nThe largest subnet continues {text_tokenizer().decode(prompts[0])!r}:\n"
        f"{_continued(supernet, specs[-1], prompts[0])}"
    )
    print(
        f"\nServing {len(prompts):,} beginnings of held-out docstrings live, {ANSWER} tokens each, the first "
        f"within {FIRST * trace.token_ms:.0f} ms, then one every {trace.token_ms:.1f} ms. Lulls ask for "
        f"{trace.lull:.0f} tokens per second, the burst for {trace.burst:.0f}."
    )
    everyone = list(range(len(specs)))
    contenders = [("all subnets", everyone), *((f"FFN {FFN[i]} alone", [i]) for i in everyone)]
    share, runs = [share_of_core()], []
    gc.collect()
    gc.freeze()  # A full collection that visits all objects of torch would stop the server for tens of ms.
    try:
        for name, ids in contenders:
            runs.append(_serve(name, ids, supernet, specs, table, quality, prompts, trace, progress))
            share.append(share_of_core())
    finally:
        gc.unfreeze()
    print(
        f"{'contender':<16}{'in time':>16}{'loss':>12}{'in time x right':>17}{'dropped':>10}{'switched':>14}"
    )
    for run in runs:
        print(run.row)
    print(
        "in time: share of all tokens. loss: mean held-out loss of the subnets of these tokens, in nats.\n"
        "in time x right: share of all tokens that came in time, times how often their subnets are right,\n"
        "on keys and values of another subnet if there are any. dropped: prompts without an answer.\n"
        "switched: share of the tokens in time whose sequence another subnet had begun."
    )
    notes = machine_notes(runs, share, FIRST * trace.token_ms)
    for note in notes:
        print(f"NOTE: {note}")
    _draw(plt, out, runs, trace)
    print(f"Figure: {out}")
    if report is not None:
        found = {
            "machine": facts,
            "seed": seed,
            "subnets": [
                {"subnet": str(spec), **vars(one), "tokens_per_s": rate}
                for spec, one, rate in zip(specs, quality, trace.sustained, strict=True)
            ],
            "prompts": len(trace.arrivals_ms),
            "token_ms": trace.token_ms,
            "lull_tokens_per_s": trace.lull,
            "burst_tokens_per_s": trace.burst,
            "share_of_core": share,
            "notes": notes,
            "contenders": [run.figures for run in runs],
        }
        write_json(report, found)
    return runs


def _print_subnets(
    specs: Sequence[SubnetSpec], quality: Sequence[Quality], table: StepTable, trace: TextTrace
) -> None:
    print(f"\nOne set of weights, on held-out text; steps with 1 and {SEQUENCES} sequences, p50 in ms:")
    print(f"{'loss':>8}{'next right':>13}{'switched':>13}{'1':>9}{SEQUENCES:>9}{'tokens/s':>10}   subnet")
    for i, (spec, one) in enumerate(zip(specs, quality, strict=True)):
        times = table.latency_ms(i, 1, CONTEXT), table.latency_ms(i, SEQUENCES, CONTEXT)
        print(
            f"{one.loss:>8.3f}{one.right:>11.1f} %{one.right_switched:>11.1f} %{times[0]:>9.2f}"
            f"{times[1]:>9.2f}{trace.sustained[i]:>10.0f}   {spec}"
        )
    print(
        "next right: share of next tokens that are predicted right; switched: the same on keys and values\n"
        "that another subnet wrote. tokens/s: what the subnet sustains while prompts wait for places."
    )


def _encoded(texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of the texts that are long enough for a prompt and an answer."""
    found = [[end_of_text(), *one.ids] for one in text_tokenizer().encode_batch(list(texts))]
    return [one for one in found if len(one) >= PROMPT[1] + ANSWER]


def _prompts(encoded: Sequence[list[int]], count: int, seed: int) -> list[list[int]]:
    """Return beginnings of texts, as tokens."""
    rng = random.Random(seed)
    return [rng.choice(encoded)[: rng.randint(*PROMPT)] for _ in range(count)]


def _sustained(supernet: Supernet, spec: SubnetSpec, table: StepTable, prompts: Sequence[list[int]]) -> float:
    """Measure how many tokens per second a subnet generates while prompts wait for places."""
    rng = random.Random(0)
    with Generator(supernet, [spec], table, token_ms=1e6, max_sequences=SEQUENCES) as generator:
        begun = time.perf_counter()
        lengths = [rng.randint(1, 2 * ANSWER - 1) for _ in prompts]  # so that they do not all end at once
        sent = [
            generator.submit(prompt, max_new_tokens=length, first_ms=1e6)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        count = sum(len(one.result().tokens) for one in sent)
        return count / (time.perf_counter() - begun)


def measure_quality(
    supernet: Supernet, specs: Sequence[SubnetSpec], stream: torch.Tensor, progress: bool = True
) -> list[Quality]:
    """Measure how well subnets predict held-out text, alone and on the caches of others.

    Args:
        supernet: the language model.
        specs: the subnets, from the smallest to the largest.
        stream: tokens of held-out texts, of shape (tokens,).
        progress: whether a terminal shows a progress bar.
    """
    found = []
    for spec in tqdm(specs, "held-out text", disable=not progress or None):
        loss, right = next_token_quality(supernet, spec, stream)
        _, own = next_token_quality(supernet, spec, stream, written_by=spec)
        others = [other for other in (specs[0], specs[-1]) if other != spec]
        worst = min(next_token_quality(supernet, spec, stream, written_by=other)[1] for other in others)
        found.append(Quality(loss, right, right - max(0.0, own - worst)))
    return found


def _continued(supernet: Supernet, spec: SubnetSpec, prompt: Sequence[int]) -> str:
    view: Any = supernet.subnet(spec)
    with torch.inference_mode():
        made = view.generate(torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False)
    return text_tokenizer().decode(made[0, len(prompt) :].tolist())


def text_trace(sustained: Sequence[float], seconds: float, seed: int) -> TextTrace:
    """Choose the time per token and the rates from what subnets sustain: a lull, a burst and a lull.

    The largest subnet can serve the lulls alone, and the smallest the burst. The time per token is `SLACK`
    times what the largest subnet takes with all places taken.

    Args:
        sustained: tokens per second that every subnet sustains, the smallest one first.
        seconds: length of the trace, in s.
        seed: seed of the arrivals.

    Raises:
        TraceError: no request arrives in this time.
    """
    lull, burst = LULL * sustained[-1], BURST * sustained[0]
    rng, found, start = random.Random(seed), list[float](), 0.0
    for part, rate in zip(PARTS, (lull, burst, lull), strict=True):
        now, end = start, start + 1e3 * seconds * part
        while (now := now + rng.expovariate(rate / ANSWER / 1e3)) < end:
            found.append(now)
        start = end
    if not found:
        raise TraceError(f"no request arrives within {seconds:g} s; serve for longer")
    return TextTrace(tuple(found), SLACK * 1e3 * SEQUENCES / sustained[-1], lull, burst, tuple(sustained))


def _serve(
    name: str,
    ids: Sequence[int],
    supernet: Supernet,
    specs: Sequence[SubnetSpec],
    table: StepTable,
    quality: Sequence[Quality],
    prompts: Sequence[list[int]],
    trace: TextTrace,
    progress: bool,
) -> TextRun:
    """Send the prompts in real time, and count the tokens that come in time."""
    generator = Generator(
        supernet,
        [specs[i] for i in ids],
        table.select(ids),
        token_ms=trace.token_ms,
        max_sequences=SEQUENCES,
        allow_approximate=True,
    )
    completions: list[Completion] = []
    times: list[list[float]] = []
    late_ms: list[float] = []
    with generator:
        begun = time.perf_counter()
        arrivals = tqdm(trace.arrivals_ms, name, disable=not progress or None)
        for due_ms, prompt in zip(arrivals, prompts, strict=True):
            time.sleep(max(0.0, begun + due_ms / 1e3 - time.perf_counter()))
            late_ms.append(1e3 * (time.perf_counter() - begun) - due_ms)
            completions.append(
                generator.submit(prompt, max_new_tokens=ANSWER, first_ms=FIRST * trace.token_ms)
            )
            times.append([])
            completions[-1].listen(partial(_note, times[-1], begun))
        outcomes = [_outcome(completion) for completion in completions]
        stats = generator.stats()
    answers = [() if one is None else tuple(ids[subnet] for subnet in one.subnets) for one in outcomes]
    in_time, loss, right, switched = count_tokens(trace, answers, times, quality)
    share = 100 * switched / max(len(in_time), 1)
    asked = ANSWER * len(prompts)
    return TextRun(name, asked, in_time, loss, right, stats.expired, share, tuple(late_ms), stats.slowdown)


def count_tokens(
    trace: TextTrace,
    answers: Sequence[Sequence[int]],
    times: Sequence[Sequence[float]],
    quality: Sequence[Quality],
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], int]:
    """Return the tokens that came in time, and what they count.

    Args:
        trace: when tokens are due.
        answers: id of the subnet of every token, per request; empty if the request was dropped.
        times: when every token came, in ms from the beginning, per request.
        quality: what the subnets are worth.

    Returns:
        Per token in time, when it came, and the loss and the accuracy that it counts; and how many of these
        tokens continue on keys and values that another subnet wrote.
    """
    in_time, loss, right, switched = list[float](), list[float](), list[float](), 0
    for arrival_ms, subnets, came in zip(trace.arrivals_ms, answers, times, strict=True):
        alone = True
        for position, subnet in enumerate(subnets):
            alone = alone and subnet == subnets[0]
            if came[position] > arrival_ms + (FIRST + position) * trace.token_ms:
                continue
            one = quality[subnet]
            in_time.append(came[position])
            loss.append(one.loss)
            right.append(one.right if alone else one.right_switched)
            switched += not alone
    return tuple(in_time), tuple(loss), tuple(right), switched


def _note(times: list[float], begun: float) -> None:
    times.append(1e3 * (time.perf_counter() - begun))


def _outcome(completion: Completion) -> Generated | None:
    try:
        return completion.result()
    except (DeadlinePassed, QueueFull):
        return None


def _draw(plt: Any, path: Path, runs: Sequence[TextRun], trace: TextTrace) -> None:
    """Draw the tokens that were asked for and that came in time, and the accuracy of their subnets."""
    ours, smallest, *_, largest = runs
    best = max(runs[1:], key=lambda run: run.score)
    shown = [(ours, "tab:blue"), (largest, "tab:red"), (smallest, "tab:green")]
    if best not in (smallest, largest):
        shown.append((best, "tab:orange"))
    figure, axes = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True, constrained_layout=True)
    edges = np.arange(0, trace.arrivals_ms[-1] + 4 * BIN_MS, BIN_MS)
    per_second = 1e3 / BIN_MS
    asked = ANSWER * np.histogram(trace.arrivals_ms, edges)[0] * per_second
    axes[0].stairs(asked, edges / 1e3, fill=True, color="tab:gray", alpha=0.3, label="asked for")
    axes[0].axhline(trace.sustained[-1], color="tab:red", ls="--", lw=1, label="the largest subnet sustains")
    axes[0].axhline(
        trace.sustained[0], color="tab:green", ls="--", lw=1, label="the smallest subnet sustains"
    )
    middle = (edges[:-1] + edges[1:]) / 2e3
    for run, color in shown:
        counts = np.histogram(run.in_time, edges)[0]
        axes[0].plot(
            middle, counts * per_second, color=color, label=f"{run.name}: {run.attainment:.1f} % in time"
        )
        right = np.histogram(run.in_time, edges, weights=run.right)[0]
        mean = np.where(counts > 0, right / np.maximum(counts, 1), np.nan)
        axes[1].plot(middle, mean, color=color, label=f"{run.name}: {run.score:.2f} %")
    axes[0].set_ylabel("tokens per second")
    axes[0].legend(loc="upper left", fontsize=7)
    axes[1].set_ylabel("next token right (%), of the\nsubnets of the tokens in time")
    axes[1].legend(loc="lower right", fontsize=8, title="in time x right", title_fontsize=8)
    axes[1].set_xlabel("seconds")
    axes[0].set_title(
        f"{len(trace.arrivals_ms):,} prompts of {ANSWER} tokens: in time x right {ours.score:.2f} % with all "
        f"subnets, {best.score:.2f} % with the best one alone",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
