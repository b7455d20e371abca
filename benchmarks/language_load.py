"""Language models under load: policies in simulation, and the text server under the field's load generators.

    python benchmarks/language_load.py --only policy thinking     # simulated, minutes
    python benchmarks/language_load.py --only steps live predicted --work FOLDER   # at --load 2
    python benchmarks/language_load.py --only aiperf guidellm     # with the options of these names: programs
    python benchmarks/language_load.py --report

policy: random settings (step times, accuracies, arrivals, loads, deadlines). Prompts and answers have the
lengths of Azure's trace of conversations (Splitwise, ISCA 2024), divided by a whole number; arrivals are
random, or those of public traces. Contenders: all subnets, each alone, and the largest at two precisions.
thinking: a problem is solved with probability 1 - exp(-tokens / scale), diminishing returns as in arXiv
2601.10274; the budget chosen by load against every fixed one, all with the same policy for subnets.
steps, live: SmolLM2-135M of `served_smollm2.py` (`--work`), each contender in a server of its own, one after
the other, at a multiple of what the largest sustains (`--sustained` measures that first). predicted: the same
in simulation.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import served_smollm2
from harness import RESULTS, Facts, Run, options_of, read, run, table
from peers import import_torchvision
from tqdm import tqdm

from subnetact import LatencyTable
from subnetact.generation import Generated, Phase, Prompt, StepPolicy, StepTable, TokenDeadlines
from subnetact.generation.simulation import replay
from subnetact.generation.step_scheduler import StepScheduler

TRACES = files("subnetact") / "data" / "traces"
REQUESTS = 400  # of a setting
PATTERNS = ("Poisson", "bursty", "Azure LLM 2023", "Azure Functions 2019", "one burst", "volleys")
INT8 = (1 / 1.3, 0.3)  # step time and lost accuracy, as of SmolLM2 in results/distill.md
BUDGETS = (16, 32, 64, 128, 256)  # tokens to think


SERVE = """
import sys, runpy
from peers import import_torchvision
import_torchvision()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


# -- simulated -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A server and its load; the last row of the table is the largest subnet at int8."""

    pattern: str
    load: float  # of what the largest subnet sustains
    table: StepTable
    token_ms: float
    places: int
    prompts: list[Prompt]


def trace(name: str) -> Any:
    """Return the arrays of a public trace."""
    with (TRACES / f"{name}.npz").open("rb") as file:
        return dict(np.load(file))


def arrivals(rng: random.Random, pattern: str, rate: float) -> list[float]:
    """Return times in ms of so many requests per ms on average."""
    if pattern in ("Azure Functions 2019", "one burst", "volleys"):
        shape = np.full(240, 0.05)
        if pattern == "one burst":
            shape[:] = 1.0
            shape[90 : 90 + int(240 * rng.uniform(0.15, 0.4))] = rng.uniform(1.5, 4.0)
        elif pattern == "volleys":
            shape[:: rng.choice((24, 60, 120))] = 5.0
        else:
            counts = trace("maf2019_per_minute")["sum14d_union"]
            start = rng.randrange(len(counts) - 240)
            shape = counts[start : start + 240].astype(float)
        sums = np.concatenate([[0.0], np.cumsum(shape)]) / shape.sum()
        times = np.interp(sorted(rng.random() for _ in range(REQUESTS)), sums, np.linspace(0.0, 1.0, 241))
        return list(times * REQUESTS / rate)
    if pattern == "Azure LLM 2023":
        known = trace("azure_llm2023_conv_arrivals")["arrival_ms"].astype(float)
        start = rng.randrange(len(known) - REQUESTS - 1)
        gaps = np.diff(known[start : start + REQUESTS + 1])
    else:
        shape_of = 1.0 if pattern == "Poisson" else 1.0 / rng.choice((2, 4, 8))
        gaps = np.array([rng.gammavariate(shape_of, 1.0) for _ in range(REQUESTS)])
    return list(np.cumsum(gaps * REQUESTS / rate / gaps.sum()))


def lengths(rng: random.Random, prompt: int, answer: int, count: int = REQUESTS) -> list[tuple[int, int]]:
    """Return lengths of prompts and answers: those of Azure's conversations, divided."""
    known = trace("azure_llm2023_conv_arrivals")
    start = rng.randrange(len(known["arrival_ms"]) - count)
    pairs = zip(known["context_tokens"][start:], known["generated_tokens"][start:], strict=True)
    return [
        (max(2, int(a) // prompt), max(2, int(b) // answer))
        for (a, b), _ in zip(pairs, range(count), strict=False)
    ]


def setting(seed: int) -> Setting:
    """Return a random setting."""
    rng = random.Random(seed)
    subnets, places, ratio = rng.randint(3, 6), rng.choice((8, 16, 32)), rng.uniform(1.5, 4.0)
    shared, base = rng.uniform(0.2, 0.9), rng.uniform(2.0, 20.0)
    ranks = [i / (subnets - 1) for i in range(subnets)]
    speeds = [1.0 + (ratio - 1.0) * rank for rank in ranks]
    span, top, bend = rng.uniform(4.0, 25.0), rng.uniform(50.0, 80.0), rng.uniform(1.0, 2.5)
    accuracy = [top - span * (1.0 - rank) ** bend for rank in ranks]
    speeds, accuracy = [*speeds, INT8[0] * speeds[-1]], [*accuracy, accuracy[-1] - INT8[1]]
    longer, cost = 1.0 + rng.uniform(0.0, 0.5), rng.uniform(1.0, 4.0)
    sizes = lengths(rng, rng.choice((8, 16)), rng.choice((4, 8, 16)))
    prompt, answer = (statistics.mean(column) for column in zip(*sizes, strict=True))
    numbers, tokens = [n for n in (1, 2, 4, 8, 16, 32) if n <= places], [8, 64, 256, 512]
    steps = [[base * one * (shared + (1.0 - shared) * n / places) for n in numbers] for one in speeds]
    prompts = [[base * one * (0.3 * shared + cost * n / prompt) for n in tokens] for one in speeds]
    names = [*map(str, range(subnets)), "int8"]
    decode = LatencyTable(names, accuracy, numbers, steps)
    table = StepTable(
        {64: decode, 512: decode.scaled(longer)}, LatencyTable(names, accuracy, tokens, prompts)
    )
    context = prompt + answer / 2
    alone, both = (table.latencies_ms(places, context, n) for n in (0, int(prompt)))
    sustained = [1.0 / (answer * a / places + b - a) for a, b in zip(alone, both, strict=True)]
    largest = subnets - 1
    rate = rng.uniform(0.4 * sustained[largest], 1.05 * sustained[0])
    token_ms = rng.uniform(1.1, 3.0) * alone[largest]
    first_ms = rng.uniform(3.0, 20.0) * token_ms + table.latencies_ms(0, 1.0, int(prompt))[largest]
    pattern, kind = PATTERNS[seed % len(PATTERNS)], rng.random()
    found = []
    for now, (length, count) in zip(arrivals(rng, pattern, rate), sizes, strict=True):
        patient = 1.0 + (kind > 0.7 and rng.random() < 0.5)  # two classes of requests in some settings
        due = TokenDeadlines(patient**2 * first_ms, patient * token_ms)
        if kind < 0.2:
            due = TokenDeadlines.total(first_ms + count * token_ms, count, token_ms)
        found.append(Prompt(now, length, count, due))
    return Setting(pattern, rate / sustained[largest], table, token_ms, places, found)


def outcome(one: Setting, rows: Sequence[int], thinking: Mapping[int, float] | None = None) -> Facts:
    """Simulate a setting with some of the subnets; return shares in percent, times in ms."""
    table = one.table.select(rows)
    policy = StepPolicy(table, one.token_ms, thinking=thinking)
    scheduler = StepScheduler(policy, places=one.places, step_tokens=512)
    tokens, quality, met, answered, first = 0, 0.0, 0, 0.0, []
    for now, request in replay(deque(sorted(one.prompts, key=lambda prompt: prompt.arrival_ms)), scheduler):
        count = len(request.tokens)
        if count == 1:
            first.append(request.times_ms[0])
        if count and now <= request.ask.deadlines.latest_ms(request.accepted_ms, count - 1):
            tokens, quality = tokens + 1, quality + table.accuracy[request.subnets[-1]]
        if isinstance(request.outcome, Generated) and request.outcome.met:
            met += 1
            right = statistics.mean([table.accuracy[i] for i in request.outcome.subnets])
            if thinking is not None:
                phase = request.ask.phases[0].tokens or 0
                right *= solved(phase - (request.ask.answer - request.most))
            answered += right
    asked, number = sum(prompt.answer for prompt in one.prompts), len(one.prompts)
    return {
        "tokens in time": 100 * tokens / asked,
        "effective accuracy": quality / asked,
        "requests in time": 100 * met / number,
        "quality of requests": answered / number,
        "first token, P95": float(np.percentile(first, 95)) if first else math.nan,
    }


def differences(pairs: Sequence[tuple[float, float]]) -> Facts:
    """Return by how much the first of pairs is greater."""
    found = [a - b for a, b in pairs]
    return {
        "mean": statistics.mean(found),
        "5th percentile": float(np.percentile(found, 5)),
        "worst": min(found),
    }


def policy(this: Run) -> Facts:
    """Compare all subnets with each alone, and with the largest at two precisions."""
    rows: list[Facts] = []
    for seed in tqdm(range(this.args.first, this.args.first + this.args.settings), "", disable=None):
        one = setting(seed)
        last = len(one.table.subnets) - 2
        contenders = {"all": [*range(last + 2)], "precision": [last, last + 1]}
        contenders |= {str(i): [i] for i in range(last + 2)}
        found = {name: outcome(one, ids) for name, ids in contenders.items()}
        rows.append({"seed": seed, "pattern": one.pattern, "load": one.load, "contenders": found})
    measures = list(rows[0]["contenders"]["all"])[:4]

    def alone(row: Facts) -> list[Facts]:
        return [facts for name, facts in row["contenders"].items() if name not in ("all", "precision")]

    against: dict[str, Any] = {}
    rivals: dict[str, Callable[[Facts], Facts]] = {
        "the largest": lambda row: alone(row)[-2],
        "the largest at int8": lambda row: alone(row)[-1],
        "the smallest": lambda row: alone(row)[0],
        "the middle one": lambda row: alone(row)[(len(alone(row)) - 1) // 2],
        "precision alone": lambda row: row["contenders"]["precision"],
    }
    for name in measures:
        for rival, facts_of in rivals.items():
            pairs = [(row["contenders"]["all"][name], facts_of(row)[name]) for row in rows]
            against.setdefault(rival, {})[name] = differences(pairs)
        best = [(row["contenders"]["all"][name], max(one[name] for one in alone(row))) for row in rows]
        against.setdefault("the best one of each setting", {})[name] = differences(best)

    def dominated(row: Facts, by: Facts) -> bool:
        return all(by[name] >= row["contenders"]["all"][name] + 0.5 for name in measures[2:])

    worse = [any(dominated(row, one) for one in alone(row)) for row in rows]
    shown = {name: [row["contenders"][name] for row in rows] for name in ("all", "precision", "0")}
    shown["largest"] = [alone(row)[-2] for row in rows]
    means = {
        name: {measure: statistics.mean(one[measure] for one in outcomes) for measure in measures}
        for name, outcomes in shown.items()
    }
    return {"settings": len(rows), "against": against, "means": means, "dominated by 0.5": sum(worse)}


def solved(tokens: float) -> float:
    """Return the probability that a problem is solved with so many tokens to think."""
    return 1.0 - math.exp(-tokens / 64.0)


def problem(seed: int) -> dict[str, float]:
    """Return the quality of requests that think: with the budget chosen by load, and with each fixed one."""
    one, rng, most = setting(seed), random.Random(seed), BUDGETS[-1]
    shares = {budget: solved(budget) for budget in BUDGETS}
    answer = statistics.mean(prompt.answer for prompt in one.prompts)
    longer = (answer + rng.uniform(0.1, 0.6) * most) / answer  # the load asks for budgets between the ends
    due_ms = rng.uniform(1.5, 4.0) * (most + 2 * answer) * one.token_ms
    facts: Any = {"phases": [Phase(end=1, tokens=most), Phase()]}
    prompts = []
    for prompt in one.prompts:
        count = most + prompt.answer
        due = TokenDeadlines.total(due_ms, count, one.token_ms)
        arrival_ms = longer * prompt.arrival_ms
        prompts.append(replace(prompt, arrival_ms=arrival_ms, answer=count, deadlines=due, **facts))
    one = replace(one, prompts=prompts)
    ids = [*range(len(one.table.subnets))]
    budgets = {"chosen": shares, **{str(budget): {budget: shares[budget]} for budget in BUDGETS}}
    return {name: outcome(one, ids, each)["quality of requests"] for name, each in budgets.items()}


def thinking(this: Run) -> Facts:
    """Compare budgets chosen by load with fixed ones, for problems to think about."""
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(problem, range(this.args.first, this.args.first + this.args.settings // 4)))
    names = list(rows[0])
    return {
        "settings": len(rows),
        "mean quality": {name: statistics.mean(row[name] for row in rows) for name in names},
        "against": {name: differences([(row["chosen"], row[name]) for row in rows]) for name in names[1:]},
        "against the best one of each setting": differences(
            [(row["chosen"], max(row[name] for name in names[1:])) for row in rows]
        ),
    }


# -- the text server -----------------------------------------------------------------------------------


PLACES, STEP_TOKENS = 16, 512
FIRST_MS, TOKEN_MS = 2000.0, 200.0  # objectives of MLPerf Inference for conversations with Llama 2 70B
SHORTER = 8  # lengths are those of Azure's conversations, divided by this
LONGEST_PROMPT, TRACES_PREDICTED = 480, 20


def serve_rows(this: Run) -> None:
    """Serve some rows of SmolLM2's table until the process ends."""
    from subnetact import serve
    from subnetact.generation import Generator

    supernet, specs = served_smollm2.served(this.args.work)
    ids, table = this.args.serve, step_table(this)
    options: Any = {"token_ms": TOKEN_MS, "allow_approximate": True}
    options |= {"max_sequences": PLACES, "step_tokens": STEP_TOKENS}
    generator = Generator(supernet, [specs[i] for i in ids], table.select(ids), **options)
    app = serve.build_text_app(generator, served_smollm2.tokenizer(), name="smollm2")
    serve.run(app, port=this.args.port)


def serve_llama(this: Run) -> None:
    """Serve SmolLM2 by llama.cpp until the process ends."""
    import language_views
    import xllamacpp

    options, path = xllamacpp.CommonParams(), this.args.work / "model.gguf"
    language_views.write_gguf(path, this.args.llama)
    options.model.path, options.port, options.n_parallel = str(path), this.args.port, PLACES
    options.n_ctx, options.n_batch, options.n_ubatch = 1024 * PLACES, STEP_TOKENS, STEP_TOKENS
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    _server = xllamacpp.Server(options)
    signal.pause()


def step_table(this: Run) -> StepTable:
    """Return the measured step table."""
    tables = this.known["steps"]["tables"]
    return StepTable.from_tables({name: LatencyTable.from_json(one) for name, one in tables.items()})


def steps(this: Run) -> Facts:
    """Measure the steps of all rows, and their perplexity and right next tokens of held-out docstrings."""
    from subnetact.generation import profile_steps

    supernet, specs = served_smollm2.served(this.args.work)
    quality = served_smollm2.quality(supernet, specs)
    cells: Any = {"sequences": (1, 2, 4, 8, PLACES), "contexts": (128, 256)}
    cells |= {"prompt_tokens": (32, 128, 256, 512)}
    right = [one["right"] for one in quality]
    table = profile_steps(supernet, specs, **cells, accuracy=right, rounds=this.args.rounds)
    names = dict(zip(served_smollm2.NAMES, quality, strict=True))
    facts = read(this.args.work / "facts.json")
    return {
        "quality": names,
        "model": facts,
        "tables": {name: one.to_json() for name, one in table.to_tables().items()},
    }


@contextmanager
def server(
    command: Sequence[str], port: int, path: str = "/v1/models", log: Path | None = None
) -> Iterator[None]:
    """Run a server until the block ends."""
    with (log or Path(os.devnull)).open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            for _ in range(2000):
                with suppress(OSError):
                    urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).close()
                    break
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended: {' '.join(command)}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(30)


async def ask(port: int, body: Facts, wait_s: float) -> Facts:
    """Send one request when its time has come; return when its pieces came, in ms, and who gave them."""
    await asyncio.sleep(wait_s)
    begun = time.perf_counter()
    times: list[float] = []
    subnets: Facts = {}
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        text = json.dumps({**body, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())
        status = (await reader.readline()).split()[1].decode()
        async for line in reader:
            if line.startswith(b"data: {"):
                choice: Facts = (json.loads(line[6:]).get("choices") or [{}])[0]
                times += [1e3 * (time.perf_counter() - begun)] if choice else []
                subnets = choice.get("subnets") or subnets
        writer.close()
    except Exception as error:
        status = type(error).__name__
    ended = 1e3 * (time.perf_counter() - begun)
    return {"times": times, "ended": ended, "subnets": subnets, "status": status}


async def send(port: int, bodies: Sequence[Facts], waits_s: Sequence[float]) -> list[Facts]:
    """Send all requests at their times."""
    return await asyncio.gather(*[ask(port, *one) for one in zip(bodies, waits_s, strict=True)])


def judged(
    answers: Sequence[Facts], bodies: Sequence[Facts], right: Mapping[str, float], seconds: float
) -> Facts:
    """Return what clients got: a request counts if its first and its last token came by their deadlines."""
    met, first, quality = 0, [], []
    for answer, body in zip(answers, bodies, strict=True):
        times, count = answer["times"], body["max_tokens"]
        first.append(times[0] if times else max(answer["ended"], FIRST_MS))
        if times and times[0] <= FIRST_MS and times[-1] <= FIRST_MS + (count - 1) * TOKEN_MS:
            met += 1
            given = answer["subnets"] or {next(iter(right)): 1}
            quality.append(sum(right[name] * n for name, n in given.items()) / sum(given.values()))
    statuses = [answer["status"] for answer in answers]
    return {
        "requests": len(bodies),
        "violations": 100 * (1 - met / len(bodies)),
        "goodput": met / seconds,
        "first token, P50": float(np.percentile(first, 50)),
        "first token, P95": float(np.percentile(first, 95)),
        "quality in time": statistics.mean(quality) if quality else None,
        "right and in time": sum(quality) / len(bodies),
        "refused": {status: statuses.count(status) for status in {*statuses} - {"200"}},
    }


def conversations(count: int, rng: random.Random) -> list[Facts]:
    """Return bodies of requests: held-out texts, with the lengths of Azure's conversations, divided."""
    tokenizer, texts = served_smollm2.tokenizer(), served_smollm2.held_out().flatten()
    bodies = []
    for prompt, answer in lengths(rng, SHORTER, SHORTER, count):
        start = rng.randrange(len(texts) - LONGEST_PROMPT)
        text = tokenizer.decode(texts[start : start + min(prompt, LONGEST_PROMPT)])
        due = {"slo_ttft_ms": FIRST_MS, "slo_tpot_ms": TOKEN_MS}
        bodies.append({"model": "smollm2", "prompt": text, "max_tokens": answer, "ignore_eos": True, **due})
    return bodies


def contenders() -> dict[str, list[int]]:
    """Return the rows that every contender has, the largest first."""
    names = served_smollm2.NAMES
    found = {name: [i] for i, name in reversed([*enumerate(names)])}
    whole = [i for i, (size, _) in enumerate(served_smollm2.ROWS) if size == "1"]
    usable = [*range(1, len(names))]  # not the first, whose perplexity is ten times that of the whole
    mixed = {"precision alone": whole, "all": usable}
    return {**found, PATIENT: found[names[-1]], **mixed, **{name: list[int]() for name in PEERS}}


PATIENT = f"{served_smollm2.NAMES[-1]}, no deadlines"
PEERS = {"transformers serve": "", "llama.cpp, float32": "F32", "llama.cpp, int8": "Q8_0"}
"""Servers of others, and the type of weights of llama.cpp."""


@contextmanager
def contender(this: Run, name: str) -> Iterator[None]:
    """Run the server of some rows, or a peer with the largest model, on a core of its own."""
    kind, path = PEERS.get(name), "/health"
    what = ["--llama", kind] if kind else ["--serve", *map(str, contenders()[name])]
    command = [sys.executable, __file__, *what, "--work", str(this.args.work), "--out", str(this.args.out)]
    command += ["--port", str(this.args.port)]
    if kind == "":
        command = [this.args.peer, "-c", SERVE, "transformers.cli.transformers", "serve"]
        command += [str(this.args.work / "folder"), "--continuous-batching", "--device", "cpu"]
        command += ["--port", str(this.args.port), "--cb-num-blocks", "64", "--cb-max-batch-tokens"]
        command += [str(STEP_TOKENS)]  # the tokens of cache and step that the others have
    os.sched_setaffinity(0, {this.args.cores[0]})
    with server(command, this.args.port, path, this.args.work / "server.log"):
        os.sched_setaffinity(0, {this.args.cores[1]})
        yield


def predicted(this: Run) -> Facts:
    """Simulate the live part with the step table, on traces of which the live part has the first."""
    live, rows = this.known["live"], dict[str, list[Facts]]()
    rate = live["sustained"][served_smollm2.NAMES[-1]]
    for seed in range(TRACES_PREDICTED):
        rng = random.Random(seed)
        times = arrivals(rng, "Azure LLM 2023", this.args.load * rate / 1e3)
        times = [one for one in times if one < 1e3 * live["seconds"]]
        sizes = [(min(prompt, LONGEST_PROMPT), n) for prompt, n in lengths(rng, SHORTER, SHORTER, len(times))]
        due = TokenDeadlines(FIRST_MS, TOKEN_MS)
        prompts = [Prompt(now, *size, due) for now, size in zip(times, sizes, strict=True)]
        one = Setting("Azure LLM 2023", 2.0, step_table(this), TOKEN_MS, PLACES, prompts)
        for name, ids in contenders().items():
            rows.setdefault(name, []).extend([outcome(one, ids)] if ids and name != PATIENT else [])
    return {
        "traces": TRACES_PREDICTED,
        "rows": {
            name: {measure: statistics.mean(one[measure] for one in found) for measure in found[0]}
            for name, found in rows.items()
            if found
        },
    }


def live(this: Run) -> Facts:
    """Serve twice what the largest sustains with every contender; what was measured before stays."""
    if "sustained" not in this.known.get("live", {}):
        this.known["live"] = {}
    known = this.known["live"]
    table, names = step_table(this), served_smollm2.NAMES
    right = dict(reversed([*zip(table.subnets, table.accuracy, strict=True)]))  # the largest first

    def answers(name: str, bodies: Sequence[Facts], waits: Sequence[float]) -> list[Facts]:
        patient: Facts = {"slo_ttft_ms": 6e5, "slo_tpot_ms": 6e4}
        if name in PEERS:  # they know no deadlines, and the first one the model by its folder
            patient, told = {}, {} if PEERS[name] else {"model": str(this.args.work / "folder")}
            kept = ("model", "prompt", "max_tokens", "ignore_eos")[: 3 if told else 4]
            bodies = [{**{name: body[name] for name in kept}, **told} for body in bodies]
        elif name == PATIENT:
            bodies = [{**body, **patient} for body in bodies]
        with contender(this, name):
            warm = [{**body, **patient, "max_tokens": 4} for body in bodies[:PLACES]]
            asyncio.run(send(this.args.port, warm, [0.0] * len(warm)))
            return asyncio.run(send(this.args.port, bodies, waits))

    for name in this.args.sustained or ():
        count, patient = 8 * PLACES, {"slo_ttft_ms": 6e5, "slo_tpot_ms": 6e4}
        many = [{**body, **patient} for body in conversations(count, random.Random(1))]
        ends = [one["ended"] for one in answers(name, many, [0.0] * count)]
        known.setdefault("sustained", {})[name] = 1e3 * count / max(ends)
        print(name, known["sustained"], flush=True)
        this.save()
    rate, rng = this.args.load * known["sustained"][names[-1]], random.Random(0)
    rows = known.setdefault(f"rows at {this.args.load:g}", {})
    times = arrivals(rng, "Azure LLM 2023", rate / 1e3)
    waits = [one / 1e3 for one in times if one < 1e3 * this.args.seconds]
    bodies = conversations(len(waits), rng)
    for name in contenders() if this.args.contenders is None else this.args.contenders:
        rows[name] = row = judged(answers(name, bodies, waits), bodies, right, this.args.seconds)
        row["load of the machine"] = os.getloadavg()[0]
        print(name, row, flush=True)
        this.save()
    return {**known, "seconds": this.args.seconds}


def tokenizer_folder(folder: Path) -> None:
    """Write the tokenizer of the embedded model where load generators of the field can read it."""
    from transformers import PreTrainedTokenizerFast

    from subnetact.generation import text as embedded

    make: Any = PreTrainedTokenizerFast
    tokens = make(tokenizer_object=embedded.text_tokenizer(), eos_token=embedded.END)
    tokens.save_pretrained(str(folder / "tokenizer"))


def generator_of_load(this: Run, command: Sequence[str], pattern: str) -> tuple[Path, list[Facts]]:
    """Run a load generator against the text server; return its folder and the files it wrote."""
    folder = Path(tempfile.mkdtemp())
    tokenizer_folder(folder)
    serve = [sys.executable, "-c", SERVE, "subnetact.serve", "--text", "--slo-ms", "60000"]
    serve += ["--port", str(this.args.port)]
    with server(serve, this.args.port, "/health", folder / "server.log"):
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([*command], cwd=folder, check=True, env=variables)
    return folder, [json.loads(path.read_text()) for path in folder.rglob(pattern)]


def aiperf(this: Run) -> Facts:
    """Let AIPerf send requests at the times of Azure's trace."""
    url, count = f"http://127.0.0.1:{this.args.port}", this.args.requests
    rng = random.Random(0)
    start = rng.randrange(10000)
    times = trace("azure_llm2023_conv_arrivals")["arrival_ms"][start : start + count].astype(float)
    schedule = Path(tempfile.mkdtemp()) / "schedule.jsonl"
    scale = (times[-1] - times[0]) / (1e3 * count / this.args.rate)
    sizes = lengths(rng, 64, 32, count)
    lines = [
        {"timestamp": int((now - times[0]) / scale), "input_length": prompt, "output_length": answer}
        for now, (prompt, answer) in zip(times, sizes, strict=True)
    ]
    schedule.write_text("\n".join(map(json.dumps, lines)) + "\n")
    options = ["profile", "--model", "docstrings", "--url", url]
    options += ["--endpoint-type", "completions", "--streaming"]
    options += ["--tokenizer", "./tokenizer", "--extra-inputs", "ignore_eos:true", "--ui", "none"]
    options += ["--input-file", str(schedule), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
    options += ["--goodput", "time_to_first_token:2000 inter_token_latency:200"]
    _, (facts,) = generator_of_load(this, [this.args.aiperf, *options], "profile_export_aiperf.json")
    names = ["request_count", "error_request_count", "goodput", "good_request_count", "request_throughput"]
    names += ["time_to_first_token", "inter_token_latency", "output_token_throughput"]
    kept = {name: facts.get(name) or {"avg": 0.0} for name in names}  # without errors they are not named
    told = {
        name: {key: one[key] for key in ("unit", "avg", "p50", "p95") if key in one}
        for name, one in kept.items()
    }
    return {"schedule": "Azure LLM 2023", **told}


def guidellm(this: Run) -> Facts:
    """Let guidellm send requests."""
    url = f"http://127.0.0.1:{this.args.port}"
    count = min(this.args.requests, 100)
    target = f"kind=openai_http,target={url},model=docstrings,request_format=/v1/completions"
    options = ["run", "--backend", target]
    options += ["--profile", "kind=constant,rate=4", "--constraint", f"kind=max_requests,count={count}"]
    options += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=12", "--disable-console"]
    options += ["--tokenizer", "kind=hf_auto,model=./tokenizer", "--output", "kind=json,path=out.json"]
    _, files = generator_of_load(this, [this.args.guidellm, *options], "out.json")
    return {"requests": files[0]["benchmarks"][0]["metrics"]["request_totals"]}


# -- the page ------------------------------------------------------------------------------------------


def step_lines(facts: Facts) -> Iterator[str]:
    """Yield the qualities and the step times of SmolLM2."""
    tables = {name: LatencyTable.from_json(one) for name, one in facts["tables"].items()}
    decode, prompts = tables["decode-128"], tables["prefill"]
    heads = [f"{n} sequences" for n in decode.batch_sizes] + [f"prompt {n}" for n in prompts.batch_sizes]
    rows = []
    for i, (name, one) in enumerate(facts["quality"].items()):
        times = [*decode.latency_ms[i], *prompts.latency_ms[i]]
        quality = [f"{one['perplexity']:.1f}", f"{one['right']:.1f}"]
        rows.append([name, *quality, *[f"{ms:.0f}" for ms in times]])
    trained = facts["model"]["training"]
    yield f"Distilled in {trained['steps']} steps, {trained['minutes']:.0f} minutes. Times of steps in ms."
    yield ""
    yield from table(["row", "perplexity", "right next tokens, %", *heads], rows)


def live_lines(facts: Facts) -> Iterator[str]:
    """Yield what clients of every contender got."""
    sustained = [f"{name} {rate:.2f}" for name, rate in facts["sustained"].items()]
    yield f"Sustained, requests/s: {', '.join(sustained)}. Sent for {facts['seconds']:.0f} s."
    for load in [name for name in facts if name.startswith("rows")]:
        rows = facts[load]
        columns = [name for name, value in rows["all"].items() if isinstance(value, float)]
        shown = [[row[column] for column in columns] for row in rows.values()]
        cells = [["" if value is None else f"{value:.2f}" for value in values] for values in shown]
        yield ""
        yield f"Sent at {load.removeprefix('rows at ')} times what the largest sustains:"
        yield ""
        yield from table(["contender", *columns], [[n, *line] for n, line in zip(rows, cells, strict=True)])
        for name in [one for one in (served_smollm2.NAMES[-1], PATIENT) if one in rows]:
            fewer = 100 * (1 - rows["all"]["violations"] / rows[name]["violations"])
            sooner = rows[name]["first token, P95"] / rows["all"]["first token, P95"]
            yield f"\n`all`, not `{name}`: {fewer:.0f} % fewer violations, P95 {sooner:.2f} times shorter."
    yield ""
    yield "![Quality of the answers in time against goodput.](language_load.png)"


def figure(live: Facts) -> None:
    """Draw the quality of answers in time against goodput, at every load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for i, load in enumerate([name for name in live if name.startswith("rows")]):
        for name, row in live[load].items():
            if row["quality in time"] is not None:
                at = row["goodput"], row["quality in time"]
                label = f"{load.removeprefix('rows at ')} times the largest" if name == "all" else None
                axes.plot(*at, "*" if name == "all" else "o", color=f"C{i}", label=label)
                axes.annotate(name, at, (5, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="requests answered in time, per s", ylabel="right next tokens of their subnets, %")
    axes.margins(x=0.2)
    axes.legend(loc="center left")
    drawn.savefig(RESULTS / "language_load.png", dpi=110)


def report(known: Facts) -> Iterator[str]:
    """Yield the figures of the page, and draw its figure."""
    figure(known["live"])
    for part, facts in known.items():
        device = facts["machine"]
        where = (
            f"{device['device_name']}, {device['cpus']} CPUs, load {device['load']}, torch {device['torch']}"
        )
        yield f"## {part} ({where})"
        yield ""
        if part == "policy":
            measures = list(next(iter(facts["against"].values())))
            yield f"All minus a rival, points, in {facts['settings']} settings: mean (5th percentile)."
            yield ""
            yield "| against | " + " | ".join(measures) + " |"
            yield "|---" * (1 + len(measures)) + "|"
            for rival, found in facts["against"].items():
                cells = [f"{found[m]['mean']:+.2f} ({found[m]['5th percentile']:+.2f})" for m in measures]
                yield f"| {rival} | " + " | ".join(cells) + " |"
            yield ""
            yield (
                f"In {facts['dominated by 0.5']} settings one subnet alone is better by 0.5 points in "
                "both the requests in time and their quality."
            )
        elif part == "thinking":
            yield f"Mean quality in {facts['settings']} settings; chosen minus fixed: mean (5th percentile)."
            yield ""
            yield "| budget | mean quality, % | chosen minus this |"
            yield "|---|---|---|"
            for name, value in facts["mean quality"].items():
                found = facts["against"].get(name)
                cell = f"{found['mean']:+.2f} ({found['5th percentile']:+.2f})" if found else ""
                yield f"| {name} | {value:.2f} | {cell} |"
        elif part == "steps":
            yield from step_lines(facts)
        elif part == "live":
            yield from live_lines(facts)
        elif part == "predicted":
            columns = list(facts["rows"]["all"])
            yield f"Means over {facts['traces']} traces."
            yield ""
            rows = facts["rows"].items()
            yield from table(
                ["contender", *columns], [[n, *map("{:.2f}".format, r.values())] for n, r in rows]
            )
        else:
            yield "```json"
            shown = {name: value for name, value in facts.items() if name != "machine"}
            yield json.dumps(shown, indent=1)
            yield "```"
        yield ""


def main() -> None:
    """Measure the parts."""
    parts: dict[str, Any] = {"policy": policy, "thinking": thinking, "steps": steps, "live": live}
    parts |= {"predicted": predicted, "aiperf": aiperf, "guidellm": guidellm}
    parser = options_of(__doc__, "language_load", parts)
    parser.add_argument("--settings", type=int, default=200)
    parser.add_argument("--first", type=int, default=1000, help="seed of the first setting")
    parser.add_argument("--seconds", type=float, default=90.0, help="length of the live trace")
    parser.add_argument("--work", type=Path, default=Path("served"), help="folder of served_smollm2.py")
    parser.add_argument("--load", type=float, default=2.0, help="of what the largest sustains")
    parser.add_argument("--rounds", type=int, default=3, help="visits of every cell of the step table")
    parser.add_argument("--contenders", nargs="*", choices=[*contenders()], help="of the live part")
    parser.add_argument("--sustained", nargs="*", choices=[*contenders()], help="measure what they sustain")
    parser.add_argument("--peer", default=sys.executable, help="Python with transformers' server")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="of the server, and of the client")
    parser.add_argument("--requests", type=int, default=1000, help="of the load generators")
    parser.add_argument("--rate", type=float, default=8.0, help="requests/s of the load generators")
    parser.add_argument("--aiperf", default="aiperf")
    parser.add_argument("--guidellm", default="guidellm")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--serve", type=int, nargs="+", help="serve these subnets, and nothing else")
    parser.add_argument("--llama", help="serve SmolLM2 by llama.cpp with weights of this type")
    args = parser.parse_args()
    import_torchvision()
    if args.serve or args.llama:
        (serve_rows if args.serve else serve_llama)(Run(args))
        return
    run(parser, "language_load", parts, report, ("transformers",))


if __name__ == "__main__":
    main()
