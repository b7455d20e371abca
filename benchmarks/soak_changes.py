"""A long run of a served engine that changes all the time: `python benchmarks/soak_changes.py --minutes 60`.

While clients send digits through a batcher, other threads load other weights, calibrate again, remove and
register subnets, pin and unpin fused programs, save bundles and load them again. Runs raise, hang and kill
their workers, and hostile clients send inputs that are refused or hold NaN.

The outputs of all weights, statistics, subnets and inputs are computed before. The run fails unless every
answer equals one of those that belong to a state that the engine had between the submission and the answer,
every request ends exactly once and as its kind allows, every bundle that was saved loads with weights of one
state, memory does not grow, and closing leaves no thread.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from soak import resident_mb
from torch import Tensor
from tqdm import tqdm

from subnetact import Batcher, Engine, HullFit, LatencyTable, calibrate
from subnetact.digits import distort, load_digits_supernet, undistorted_digits
from subnetact.errors import (
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    QueueFull,
    SpecError,
    SubnetActError,
)
from subnetact.serving import Answer
from subnetact.supernet import NormTable

SUBNETS, WEIGHTS, CALIBRATIONS, INPUTS = 5, 3, 2, 6
SIZES = (1, 2, 4, 8)
TOLERANCE = 2e-3
"""Largest difference of an answer from the expected output; fused programs round differently."""
APART = 0.05
"""Least difference between the expected outputs of two states, so that an answer tells them apart."""


class Faults:
    """An engine whose runs raise, hang or end their worker now and then."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.keys = engine, engine.keys
        self.fingerprint = "any"
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(1)

    def check(self, x: Any) -> None:
        """Refuse what the engine refuses."""
        self.engine.check(x)

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
        """Run a batch, or fail."""
        luck = self._rng.random()
        if luck < 0.002:
            self.counts["raises"] += 1
            raise ValueError("an injected fault")
        if luck < 0.0025:
            self.counts["kills"] += 1
            raise SystemExit("an injected end of the worker")
        if luck < 0.0027:
            self.counts["hangs"] += 1
            time.sleep(1.5)
        return self.engine.run(subnet, inputs, batch_size)


class States:
    """The states that the engine may have, what it answers in each, and when it had which.

    A state is a pair of weights and statistics. Statistics are calibrated on one of several sets of batches,
    with one of the weights, by `calibrate` itself.
    """

    def __init__(self) -> None:
        self.supernet = load_digits_supernet()
        generator = torch.Generator().manual_seed(0)
        training, held_out = undistorted_digits()
        self.batches = [[distort(training.images[i::7][:64], generator)] for i in range(CALIBRATIONS)]
        self.inputs = list(held_out.images[:INPUTS])
        space = self.supernet.space
        self.specs = [space.smallest(), space.largest(), *space.sample(0, SUBNETS)]
        self.specs = list(dict.fromkeys(self.specs))[: SUBNETS + 1]  # the last one comes and goes
        original = {name: t.clone() for name, t in self.supernet.state_dict().items()}
        self.weights = [original]
        for _ in range(WEIGHTS - 1):
            self.weights.append({n: self._other(t, generator) for n, t in original.items()})
        self.expected: dict[tuple[int, int, int], list[Tensor]] = {}
        self.rows: dict[tuple[int, int], NormTable] = {}
        self.fingerprints: list[str] = []
        x = torch.stack(self.inputs)
        for w, state in enumerate(self.weights):
            self.supernet.load_state_dict(state, norms=self.supernet.norms)
            self.fingerprints.append(self.supernet.fingerprint())
            for c, batches in enumerate(self.batches):
                calibrate(self.supernet, self.specs, batches, progress=False)
                self.rows[w, c] = self.supernet.norms
                self.supernet.norms = NormTable(space.id)
        for w, state in enumerate(self.weights):
            self.supernet.load_state_dict(state, norms=self.supernet.norms)
            for (cw, c), rows in self.rows.items():
                self.supernet.norms = rows
                for s, spec in enumerate(self.specs):
                    with torch.inference_mode():
                        y = self.supernet(x, subnet=spec)
                    self.expected[w, self._number(cw, c), s] = list(y)
        self._check_apart()
        self.now = (0, 0)
        self.supernet.load_state_dict(self.weights[0], norms=self.supernet.norms)
        self.supernet.norms = self.rows[0, 0]
        self._lock = threading.Lock()
        self._history: deque[tuple[float, float, tuple[int, int]]] = deque(maxlen=4096)
        self._since = 0.0

    def _other(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor.clone()
        return tensor * (1 + 0.2 * torch.randn(tensor.shape, generator=generator))

    def _number(self, weights: int, calibration: int) -> int:
        return weights * CALIBRATIONS + calibration

    def _check_apart(self) -> None:
        for s in range(len(self.specs)):
            for i in range(INPUTS):
                outputs = torch.stack([y[i] for (_, _, at), y in self.expected.items() if at == s])
                gaps = (outputs[:, None] - outputs[None]).abs().amax(-1)
                gaps.fill_diagonal_(1.0)
                if float(gaps.min()) < APART:
                    raise RuntimeError(f"two states give outputs only {float(gaps.min()):.1e} apart")

    def change(self, weights: int, calibration: int | None) -> None:
        """Load other weights, and perhaps calibrate with them; note when the engine may have which state."""
        spec_numbers = [(weights, self.now[1])]
        start = time.perf_counter()
        with self._lock:
            before = self.now
            self._open(start, spec_numbers[0])
        self.supernet.load_state_dict(self.weights[weights], norms=self.supernet.norms)
        if calibration is not None:
            after = (weights, self._number(weights, calibration))
            with self._lock:
                self._open(time.perf_counter(), after)
            calibrate(self.supernet, self.specs, self.batches[calibration], progress=False)
            spec_numbers.append(after)
        end = time.perf_counter()
        with self._lock:
            for state in {before, *spec_numbers[:-1]} - {spec_numbers[-1]}:
                self._close(end, state)
            self.now = spec_numbers[-1]

    def _open(self, at: float, state: tuple[int, int]) -> None:
        self._history.append((at, float("inf"), state))

    def _close(self, at: float, state: tuple[int, int]) -> None:
        for k, (start, end, known) in enumerate(self._history):
            if known == state and end == float("inf"):
                self._history[k] = start, at, known
        if state == (0, 0) and self._since == 0.0:
            self._since = at

    def possible(self, start: float, end: float) -> set[tuple[int, int]]:
        """Return the states that the engine may have had within a span of time."""
        with self._lock:
            found = {state for a, b, state in self._history if a <= end and b >= start}
            if self._since == 0.0 or start <= self._since:
                found.add((0, 0))
            found.add(self.now)
            return found


class Account:
    """Counts outcomes, and collects problems, of which there must be none."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def end(self, outcome: str, problem: str = "") -> None:
        """Count one outcome."""
        with self._lock:
            self.outcomes[outcome] += 1
            if problem:
                self.note(problem)

    def note(self, problem: str) -> None:
        """Keep one problem."""
        if len(self.problems) < 20:
            self.problems.append(problem)


def wrong(states: States, s: int, i: int, output: Tensor, start: float, end: float) -> str:
    """Return what is wrong with an answer, or an empty string."""
    possible = states.possible(start, end)
    for weights, statistics in possible:
        expected = states.expected[weights, statistics, s][i]
        if float((output - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max())):
            return ""
    others = {
        (w, c): float((output - y[i]).abs().max()) for (w, c, at), y in states.expected.items() if at == s
    }
    nearest = min(others, key=others.__getitem__)
    return (
        f"subnet {s}, input {i}: no output of the possible states {sorted(possible)}; nearest is state "
        f"{nearest}, {others[nearest]:.1e} away"
    )


def client(states: States, batcher: Batcher, account: Account, stop: threading.Event, seed: int) -> None:
    """Send requests of all kinds, 20 at a time, and check what comes back."""
    rng = random.Random(seed)
    waiting: deque[tuple[int, str, float, Future[Answer]]] = deque()
    nan = torch.full_like(states.inputs[0], float("nan"))

    def settle() -> None:
        i, kind, start, future = waiting.popleft()
        try:
            answer = future.result(60)
        except (DeadlinePassed, BatchFailed) as error:
            account.end(type(error).__name__)
        except BaseException as error:
            allowed = kind == "cancelled" and type(error).__name__ == "CancelledError"
            account.end(type(error).__name__, "" if allowed else f"{kind}: {error!r}")
        else:
            end = time.perf_counter()
            if kind == "nan":
                finite = bool(answer.output.isfinite().any())
                account.end("NaN", f"finite outputs for NaN from subnet {answer.subnet}" if finite else "")
            else:
                account.end("answered", wrong(states, answer.subnet, i, answer.output, start, end))

    while not stop.is_set():
        i, luck = rng.randrange(INPUTS), rng.random()
        kind = "plain" if luck < 0.9 else rng.choice(["nan", "shape", "deadline", "cancelled", "short"])
        x = {"nan": nan, "shape": states.inputs[i][0]}.get(kind, states.inputs[i])
        deadline = {"deadline": float("nan"), "short": 0.3}.get(kind, 2000.0)
        start = time.perf_counter()
        try:
            future = batcher.submit(x, deadline)
        except (InvalidRequest, QueueFull) as error:
            legal = kind in ("shape", "deadline") or isinstance(error, QueueFull)
            account.end(type(error).__name__, "" if legal else f"{kind} was refused: {error}")
            continue
        if kind in ("shape", "deadline"):
            account.end("accepted", f"{kind} was accepted")
        waiting.append((i, kind, start, future))
        if kind == "cancelled":
            future.cancel()
        while len(waiting) >= 20:
            settle()
        time.sleep(0.002)
    while waiting:
        settle()


def direct(states: States, engine: Engine, account: Account, stop: threading.Event, seed: int) -> None:
    """Call the engine and the supernet, the subnet that comes and goes included."""
    rng = random.Random(seed)
    x = torch.stack(states.inputs)
    while not stop.is_set():
        s = rng.randrange(len(states.specs))
        start = time.perf_counter()
        try:
            if rng.random() < 0.5:
                y = engine(x, subnet=s)
            else:
                with torch.inference_mode():
                    y = states.supernet(x, subnet=states.specs[s])
        except SpecError:
            account.end("removed", "" if s == len(states.specs) - 1 else f"subnet {s} is said to be removed")
            continue
        end = time.perf_counter()
        for i, output in enumerate(y):
            account.end("direct", wrong(states, s, i, output, start, end))
        time.sleep(0.01)


def changes(states: States, engine: Engine, account: Account, folder: Path, seed: int) -> dict[str, Any]:
    """Return what changes the engine, by name: functions that each make one change."""
    rng = random.Random(seed)
    last = len(states.specs) - 1

    def weights() -> None:
        states.change(rng.randrange(WEIGHTS), None)

    def calibration() -> None:
        states.change(rng.randrange(WEIGHTS), rng.randrange(CALIBRATIONS))

    def subnets() -> None:
        engine.remove(last)
        time.sleep(0.01)
        engine.register(states.specs[last])

    def fused() -> None:
        pinned = rng.randrange(last)
        engine.pin(pinned)
        engine.unpin(rng.randrange(last))

    def bundle() -> None:
        engine.save(folder)
        found = Engine.load(folder, supernet=load_digits_supernet())
        if found.supernet.fingerprint() not in states.fingerprints:
            account.note("a bundle has weights of no state")

    return {
        "weights": weights,
        "calibration": calibration,
        "subnets": subnets,
        "fused": fused,
        "bundle": bundle,
    }


def soak(minutes: float, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    """Run everything at once.

    Raises:
        RuntimeError: Something went wrong; the message names the first 20 problems.
    """
    states, account, stop = States(), Account(), threading.Event()
    example = torch.stack(states.inputs[:1])
    engine = Engine(states.supernet, states.specs, example=example, memory_budget_mb=64.0)
    served = len(states.specs) - 1
    runner = Faults(engine)
    table = LatencyTable(
        engine.keys,
        [70.0 + s for s in range(served)] + [1.0],  # the subnet that comes and goes is chosen by nobody
        SIZES,
        [[1.0 + 0.2 * s + 0.3 * size for size in SIZES] for s in range(served)] + [[900.0] * len(SIZES)],
    )
    before = set(threading.enumerate())
    folder = Path(tempfile.mkdtemp(prefix="soak_changes"))
    batcher = Batcher(runner, policy=HullFit(table, slo_ms=50.0), workers=2, watchdog_ms=1000.0)
    work: list[Callable[[], None]] = []
    for name, make in changes(states, engine, account, folder / "bundle", seed).items():
        pause = {"weights": 0.05, "calibration": 0.7, "subnets": 0.1, "fused": 0.1, "bundle": 1.5}[name]

        def repeat(name: str = name, make: Callable[[], None] = make, pause: float = pause) -> None:
            while not stop.wait(pause):
                if name in ("weights", "calibration"):
                    with one_at_a_time:  # what statistics were calibrated on has to be known
                        make()
                else:
                    try:
                        make()
                    except SubnetActError as error:
                        account.note(f"{name}: {error!r}")
                account.changes[name] += 1

        work.append(repeat)
    one_at_a_time = threading.Lock()
    work += [lambda k=k: client(states, batcher, account, stop, seed + k) for k in range(2)]  # type: ignore[misc]
    work.append(lambda: direct(states, engine, account, stop, seed))
    failed: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failed.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(job,)) for job in work]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    memory: list[float] = []
    seconds = minutes * 60
    with tqdm(total=round(seconds), unit=" s", disable=not progress or None) as bar:
        while (passed := time.perf_counter() - started) < seconds and not account.problems and not failed:
            time.sleep(min(1.0, seconds / 10))
            memory.append(resident_mb())
            bar.update(round(passed) - bar.n)
    stop.set()
    for thread in threads:
        thread.join(timeout=120)
    batcher.close()
    stats = batcher.stats()
    shutil.rmtree(folder, ignore_errors=True)
    end = time.perf_counter() + 10
    while (left := set(threading.enumerate()) - before) and time.perf_counter() < end:
        time.sleep(0.05)
    problems = list(account.problems) + [f"a thread ended: {error!r}" for error in failed]
    if left:
        problems.append(f"threads left: {sorted(thread.name for thread in left)}")
    warm = max(memory[: len(memory) // 5 + 1])
    if len(memory) > 50 and max(memory[-10:]) > warm + 64.0:
        problems.append(f"memory grew from {warm:.0f} to {max(memory[-10:]):.0f} MiB")
    finished = stats.met + stats.late + stats.dropped + stats.failed + stats.cancelled + stats.closed
    if stats.submitted != finished:
        problems.append(f"the counters do not add up: {stats}")
    if problems:
        raise RuntimeError("\n".join(problems))
    return {
        "seconds": round(time.perf_counter() - started),
        "outcomes": dict(sorted(account.outcomes.items())),
        "changes": dict(sorted(account.changes.items())),
        "faulty_runs": dict(sorted(runner.counts.items())),
        "counters": {name: value for name, value in vars(stats).items() if isinstance(value, int) and value},
        "resident_mb": {"after a fifth": round(warm), "at the end": round(memory[-1])},
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.system(),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak_changes.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # every killed worker is logged
    torch.set_num_threads(1)
    result = soak(args.minutes, args.seed, progress=True)
    text = json.dumps(result, indent=1)
    args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
