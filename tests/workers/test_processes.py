"""Worker processes: the same answers as threads, and every fault costs a retry at most."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_networks import BATCHES, pretrained, supernet_of
from process_runners import TABLE, CommandRunner, TellingRunner, command, shared_memory_of
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

import subnetact
from subnetact import Batcher, Engine, Supernet
from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    EngineError,
    InvalidRequest,
    MissingFile,
    SpecError,
    WorkerDied,
    WorkerHung,
)
from subnetact.serving import Answer, Fixed
from subnetact.supernet.load import held_tensors
from subnetact.supernet.statistics import adopt_statistics_
from subnetact.workers import engine_snapshot
from subnetact.workers.engine_snapshot import EngineSnapshot, unpack
from subnetact.workers.memory import BatchMemory, SharedMemory
from subnetact.workers.pool import ProcessPool
from subnetact.workers.process import WorkerProcess

Open = Callable[..., Batcher]
LONG = 60_000.0
EXAMPLE = torch.zeros(1, 16, 16)
IMAGES = torch.randn(12, 1, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens a batcher with worker processes that take commands."""
    batchers: list[Batcher] = []

    def open_batcher(**options: Any) -> Batcher:
        options = {"process": True, "watchdog_ms": 20_000.0, **options}
        batcher = Batcher(CommandRunner(tmp_path), policy=Fixed(TABLE, 0), slo_ms=36.0, **options)
        batchers.append(batcher)
        return batcher

    yield open_batcher
    for batcher in batchers:
        batcher.close(drain=False)


def ask(batcher: Batcher, kind: str, value: float = 0.0) -> Future[Answer]:
    return batcher.submit(command(kind, value), LONG)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Lets processes start only while the event is set, which it is."""
    may_start, start = threading.Event(), WorkerProcess.start
    may_start.set()

    def hold(self: WorkerProcess, *arguments: Any) -> None:
        assert may_start.wait(60)
        start(self, *arguments)

    monkeypatch.setattr(WorkerProcess, "start", hold)
    yield may_start
    may_start.set()


def pid_of(batcher: Batcher) -> int:
    return int(ask(batcher, "pid").result(60).output[0])


def state_of(pid: Any) -> tuple[str, int, str]:
    """Return the state, the parent and the command line of a process; Z and 0 if there is none."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state, int(parent), Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "Z", 0, ""


def alive(pid: int) -> bool:
    return state_of(pid)[0] != "Z"


def workers_of(pid: int) -> set[int]:
    states = {int(folder.name): state_of(folder.name) for folder in Path("/proc").glob("[0-9]*")}
    return {
        worker
        for worker, (_, parent, line) in states.items()
        if parent == pid and "subnetact.workers.child" in line
    }


def started(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start a Python program that finds the modules of the tests."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], **pipes, **options)


# -- faults -----------------------------------------------------------------------------------------


def test_faults_stay_with_their_request_and_the_process_is_replaced(
    opened: Open, wait_for: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A crash in native code, an exit and a hang cost a retry; errors arrive as they are."""
    batcher = opened(spares=0, watchdog_ms=2000.0)
    first = pid_of(batcher)
    assert first != os.getpid()
    assert ask(batcher, "double", 21.0).result(60).output == np.array([42.0])

    assert ask(batcher, "crash", 1.0).result(60).output == np.array([2.0])
    second = pid_of(batcher)
    assert second != first
    assert (batcher.stats().died, batcher.stats().retried) == (1, 1)

    assert ask(batcher, "exit", 2.0).result(60).output == np.array([4.0])
    assert ask(batcher, "hang", 4.0).result(60).output == np.array([8.0])
    hung = batcher.stats().hung
    assert hung >= 1  # a busy machine may be slower than the watchdog, too
    pid_of(batcher)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == hung + 2, "one for each hang and each death"
    assert sum("batcher worker 0 hung: " in line and "is killed" in line for line in lines) == hung
    assert lines[0] == f"batcher worker 0 died: WorkerDied: worker process {first} was killed by SIGSEGV"
    assert lines[1].endswith(f"worker process {second} ended with status 1")

    with pytest.raises(BatchFailed, match="poisoned") as raised:
        ask(batcher, "raise").result(60)
    assert isinstance(raised.value.__cause__, ValueError)
    assert 'raise ValueError("poisoned")' in str(raised.value.__cause__.__cause__)
    with pytest.raises(BatchFailed, match="Unpicklable: one"):
        ask(batcher, "unpicklable").result(60)
    with pytest.raises(BatchFailed, match=r"Unprintable \(its __str__ raised\)"):
        ask(batcher, "unprintable").result(60)
    assert batcher.stats().died == 2
    assert batcher.stats().met == batcher.stats().submitted - 3

    gate = [ask(batcher, "double", float(i)) for i in range(8)]
    killer = ask(batcher, "crash", -1.0)
    others = [ask(batcher, "double", float(i)) for i in range(8)]
    with pytest.raises(WorkerDied, match="SIGSEGV"):
        killer.result(60)
    assert [f.result(60).output[0] for f in gate + others] == [2.0 * (i % 8) for i in range(16)]
    stats = batcher.stats()
    assert stats.submitted == stats.met + stats.late + stats.failed
    assert stats.failed == 4, "a request that kills twice fails alone"

    blocked = ask(batcher, "double")
    futures = [ask(batcher, "memory", float(i)) for i in range(12)]
    assert [future.result(60).output[0] for future in futures] == [2.0 * i for i in range(12)]
    blocked.result(60)
    assert batcher.stats().out_of_memory >= 1, "and half of the batch is tried"
    assert batcher.stats().batch_limits[0] < 4
    hanging, mine = ask(batcher, "hang", -1.0), workers_of(os.getpid())
    assert mine
    batcher.close()
    assert isinstance(hanging.exception(0), WorkerHung | BatcherClosed), "although it hangs forever"
    assert not any(map(alive, mine))


def test_while_no_process_lives_nobody_is_up_and_requests_end_at_their_deadline(
    opened: Open, wait_for: Any, held: threading.Event
) -> None:
    now = [0.0]
    batcher = opened(spares=0, clock_ms=lambda: now[0])
    pid = pid_of(batcher)
    assert batcher.stats().workers_up == 1
    held.clear()
    lost = batcher.submit(command("hang", 1.0), 500.0)
    wait_for(lambda: batcher.stats().running == 1)
    queued = batcher.submit(command("double"), 500.0)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: batcher.stats().workers_up == 0)
    wait_for(lambda: batcher.stats().revived == 1)
    assert not lost.done()
    now[0] = 501.0
    for future in (lost, queued):
        with pytest.raises(DeadlinePassed):
            future.result(60)
    assert batcher.stats().workers_up == 0, "the worker waits for a process"
    held.set()
    wait_for(lambda: batcher.stats().workers_up == 1, 60)
    held.clear()
    os.kill(batcher.processes[0], signal.SIGKILL)  # It has nothing to do, and no request tells of it.
    wait_for(lambda: batcher.stats().workers_up == 0)
    held.set()
    wait_for(lambda: batcher.stats().workers_up == 1, 60)
    assert ask(batcher, "double", 4.0).result(60).output == np.array([8.0])


def test_a_spare_takes_over_and_a_worker_without_one_waits_for_the_next(
    tmp_path: Path, wait_for: Any, held: threading.Event
) -> None:
    pool = ProcessPool(CommandRunner(tmp_path), 1, threads=1, batch_sizes=(1,), spares=1)
    try:
        [runner] = pool.runners
        first = runner.process
        wait_for(lambda: bool(pool.ready), 60)
        [spare] = pool.ready
        held.clear()
        first.kill("by this test")
        wait_for(lambda: first.ended is not None)
        assert first.reason() == "was killed by this test"
        assert runner.is_ready
        assert runner.run(0, [command("double", 4.0)], 1) == [8.0], "the spare takes over"
        assert runner.process is spare
        spare.kill("by this test")
        wait_for(lambda: not runner.is_ready)
        held.set()
        runner.enter_worker(None)
        assert runner.is_ready
    finally:
        held.set()
        pool.close()


# -- the engine and its changes -----------------------------------------------------------------------


def engine_of(digits: Supernet, **options: Any) -> Engine:
    specs = [digits.space.smallest(), digits.space.spec(depth=2, expand=0.25, width=0.5)]
    subnetact.calibrate(digits, specs, [IMAGES], progress=False)
    return Engine(digits, specs, example=EXAMPLE[None], **options)


def same(pool: ProcessPool, engine: Engine, subnet: int) -> bool:
    theirs = pool.runners[0].run(subnet, list(IMAGES), len(IMAGES))
    ours = engine.run(subnet, list(IMAGES), len(IMAGES))
    return all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def see_no_mixture(digits: Supernet, runner: Any) -> None:
    """Run batches while another thread loads weights: they see the former ones or the new ones."""
    former = {name: tensor.clone() for name, tensor in digits.state_dict().items()}
    states = [former, {name: tensor * 1.5 for name, tensor in former.items()}]
    allowed, stop = [], threading.Event()
    for state in states:
        digits.load_state_dict(state, norms=digits.norms)
        allowed.append(torch.stack(runner.run(0, list(IMAGES), 12)))
    assert not torch.equal(*allowed)

    def load() -> None:
        while not stop.is_set():
            for state in states:
                digits.load_state_dict(state, norms=digits.norms)

    with ThreadPoolExecutor(1) as threads:
        loads = threads.submit(load)
        try:
            for _ in range(15):
                output = torch.stack(runner.run(0, list(IMAGES), 12))
                assert any(torch.equal(output, one) for one in allowed)
        finally:
            stop.set()
    loads.result()
    digits.load_state_dict(former, norms=digits.norms)


def test_processes_answer_as_threads_and_follow_every_change(digits: Supernet) -> None:
    engine = engine_of(digits)
    before = engine(IMAGES, subnet=0)
    fingerprint = engine.supernet.fingerprint()
    pool = ProcessPool(engine, 1, threads=1, batch_sizes=(1, 4), spares=0)
    [runner] = pool.runners
    try:
        assert engine.supernet.fingerprint() == fingerprint
        assert torch.equal(engine(IMAGES, subnet=0), before)
        assert same(pool, engine, 0)
        assert same(pool, engine, 1)

        third = digits.space.largest()
        subnetact.calibrate(digits, [third], [IMAGES], progress=False)
        assert engine.register(third) == 2
        assert same(pool, engine, 2)
        engine.remove(1)
        with pytest.raises(SpecError, match="no subnet 1"):
            runner.run(1, list(IMAGES), 12)
        engine.register(engine.specs[1])
        assert same(pool, engine, 1)

        other = {name: tensor.clone() for name, tensor in digits.state_dict().items()}
        for name, tensor in other.items():
            if name.endswith("weight"):
                tensor.mul_(1.25)
        digits.load_state_dict(other, norms=digits.norms)
        assert not torch.equal(engine(IMAGES, subnet=0), before)
        before = engine(IMAGES, subnet=0)
        assert same(pool, engine, 0)
        with torch.no_grad():
            for parameter in digits.network.parameters():
                parameter.mul_(0.9)
        assert not torch.equal(engine(IMAGES, subnet=0), before)
        assert same(pool, engine, 0)

        see_no_mixture(digits, runner)

        row = digits.norms.get(engine.specs[0])
        assert row is not None
        digits.norms.update({engine.specs[0]: row.map(lambda flat: flat + 0.1)})
        assert same(pool, engine, 0)
        digits.to(torch.float64)
        with pytest.raises(InvalidRequest, match=r"this engine serves torch\.float64"):
            runner.run(0, list(IMAGES), 12)
        assert runner.run(0, list(IMAGES.double()), 12)[0].dtype == torch.float64
    finally:
        pool.close()
    assert not workers_of(os.getpid())


def shared_bytes(pid: int) -> dict[str, int]:
    """Return the Pss of every shared memory of a process: a page is split among those that map it."""
    found: dict[str, int] = {}
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text()):
        head = block.split("\n", 1)[0].split()
        if "memfd:subnetact" in head[-2]:
            size = 1024 * int(re.findall(r"^Pss:\s+(\d+) kB", block, re.MULTILINE)[0])
            found[head[4]] = found.get(head[4], 0) + size
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_processes_share_the_weights_and_follow_pin_and_unpin(digits: Supernet) -> None:
    engine = engine_of(digits, memory_budget_mb=64)
    weights = engine.stats().weights + engine.stats().norm_table
    pool = ProcessPool(TellingRunner(engine), 2, threads=1, batch_sizes=(1,), spares=0)

    def theirs(subnet: int) -> tuple[Tensor, list[int]]:
        answers = pool.runners[0].run(subnet, list(IMAGES), len(IMAGES))
        assert all((facts == answers[0][1]).all() for _, facts in answers)
        return torch.stack([output for output, _ in answers]), answers[0][1].tolist()

    try:
        for runner in pool.runners:
            [[_, (shared, total, _, _)]] = runner.run(0, [EXAMPLE], 1)
            assert shared == total == len(held_tensors(digits))
        first, second = map(shared_bytes, workers_of(os.getpid()))
        here = shared_bytes(os.getpid())
        both = first.keys() & second.keys() & here.keys()
        total = sum(sizes[inode] for inode in both for sizes in (first, second, here))
        assert weights <= total < 1.1 * weights
        for pin in (True, False):
            if pin:
                assert engine.pin(1)
            else:
                engine.unpin(1)
            output, (_, _, fused, pinned) = theirs(1)
            assert (fused, pinned) == (1, pin)  # a program that nobody needs the room of stays
            assert torch.allclose(output, engine(IMAGES, subnet=1), atol=5e-5)
            assert theirs(0)[1][3] == 0
    finally:
        pool.close()


# -- the end of the parent ----------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from process_runners import TABLE, CommandRunner
from subnetact import Batcher
from subnetact.serving import Fixed
batcher = Batcher(CommandRunner(Path(".")), policy=Fixed(TABLE, 0), slo_ms=9.0, process=True, spares=0)
if sys.argv[1] == "fork":
    print("ready", flush=True)
    if os.fork() == 0:
        time.sleep(30)  # It has a copy of every descriptor of its parent.
        os._exit(0)
if sys.argv[1] == "interrupt":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # It may be ignored in the background.
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        from process_runners import command
        print(batcher.submit(command("double", 4.0), 60e3).result(60).output, flush=True)
        sys.exit(0)  # without closing the batcher
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(
    ("how", "sent"),
    [
        pytest.param("fork", signal.SIGKILL, id="kill -9 after a fork"),
        pytest.param("interrupt", signal.SIGINT, id="Ctrl-C", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_the_workers_of_a_dead_parent(
    how: str, sent: signal.Signals, tmp_path: Path, wait_for: Any
) -> None:
    parent = started("-c", SCRIPT, how, cwd=tmp_path, start_new_session=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    workers = workers_of(parent.pid)
    assert len(workers) == 1
    held = shared_memory_of([parent.pid, *workers])
    if how == "interrupt":  # Ctrl-C reaches all processes of the terminal; workers go on with their batches.
        os.killpg(parent.pid, sent)
    else:
        parent.send_signal(sent)
    wait_for(lambda: not any(map(alive, workers)))
    if how == "fork":
        os.killpg(parent.pid, signal.SIGKILL)
    output, errors = parent.communicate(timeout=30)
    assert not [path for path in held if path.exists()]
    if how == "interrupt":
        assert (parent.returncode, output) == (0, "[8.]\n")
        assert "Traceback" not in errors


# -- what is refused ----------------------------------------------------------------------------------


def test_what_cannot_be_sent_to_a_process_is_refused(tmp_path: Path, digits: Supernet) -> None:
    runner: Any = CommandRunner(tmp_path)
    runner.function = lambda: 0
    with pytest.raises(EngineError, match=r"cannot be sent to a worker process.*lambda"):
        Batcher(runner, policy=Fixed(TABLE, 0), slo_ms=36.0, process=True)
    with pytest.raises(MissingFile, match="gone"):
        Batcher(tmp_path / "gone", policy=Fixed(TABLE, 0), slo_ms=36.0, process=True)
    specs = list(engine_of(digits).specs)
    blind = Engine(digits, specs)
    with pytest.raises(EngineError, match=r"does not start.*example="):
        ProcessPool(blind, 1, threads=1, batch_sizes=(1,), spares=0)
    digits.share_memory()
    shared = Engine(digits, specs, example=EXAMPLE[None])
    with pytest.raises(EngineError, match="share_memory_"):
        ProcessPool(shared, 1, threads=1, batch_sizes=(1,), spares=0)
    assert not workers_of(os.getpid())


UNGUARDED = """
from process_runners import TABLE, CommandRunner
from subnetact import Batcher
from subnetact.serving import Fixed
class Own(CommandRunner):
    pass
Batcher(Own("."), policy=Fixed(TABLE, 0), slo_ms=9.0, process=True, spares=0).close()
print("closed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
def test_the_main_program_runs_again_only_if_the_engine_needs_it(guarded: bool, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    first, last = UNGUARDED.rsplit("Batcher(", 1)
    if guarded:
        last = last.replace("print", "    print")
    script.write_text(first + ('if __name__ == "__main__":\n    ' if guarded else "") + "Batcher(" + last)
    program = started(str(script))
    output, errors = program.communicate(timeout=120)
    if guarded:
        assert output == "closed\n", errors
    else:
        assert program.returncode == 1
        assert 'if __name__ == "__main__"' in errors.splitlines()[-1]


# -- inputs and outputs -------------------------------------------------------------------------------


ZEROS, ONES = torch.zeros(1), torch.ones(1)
SAMPLES: list[list[Any]] = [
    *([torch.randn(3, 4)] * 5, [torch.randn(2, dtype=torch.bfloat16)], [torch.tensor(3), torch.tensor(4)]),
    *([torch.randn(2), torch.randn(3)], [torch.empty(0, 3)] * 2, [torch.randn(4, 6).t(), torch.randn(6, 4)]),
    [torch.randn(3, dtype=torch.complex64).conj()],
    [{"ids": torch.arange(4), "mask": torch.ones(4, dtype=torch.bool)} for _ in range(3)],
    [(torch.zeros(2), {"a": [ONES]}), (torch.ones(2), {"a": [ZEROS]})],
    [(torch.zeros(2), None, "text"), (torch.ones(2), None, "other")],
    [{"a": ZEROS}, {"b": ZEROS}],
    [np.arange(6.0).reshape(2, 3), np.ones((2, 3))],
    [np.array([object()]).astype(str), np.array(["x"], dtype=object)],
    *([(), ()], [{}, {}], [1, "two", None], [[ZEROS], (ZEROS,)]),
]


@pytest.mark.parametrize("samples", SAMPLES)
def test_samples_arrive_as_they_were(samples: list[Any]) -> None:
    memory = SharedMemory(1)
    here, there = BatchMemory(memory), BatchMemory(SharedMemory(1, os.dup(memory.descriptor)))
    layout = here.write(samples)
    for copy in (False, True):
        assert_same(there.read(layout, copy), samples)
    copies = there.read(layout, copy=True)
    here.write([torch.full((64,), 7.0)])
    assert_same(copies, samples)
    for leaf in tree_leaves(copies):  # a client that keeps one keeps no other
        if isinstance(leaf, Tensor):
            assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
        elif isinstance(leaf, np.ndarray):
            assert leaf.base is None or memoryview(leaf.base).nbytes == leaf.nbytes


def assert_same(found: Any, expected: Any) -> None:
    leaves, form = tree_flatten(found)
    wanted, wanted_form = tree_flatten(expected)
    assert form == wanted_form
    for one, other in zip(leaves, wanted, strict=True):
        assert type(one) is type(other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
        assert torch.equal(one, other) if isinstance(other, Tensor) else np.array_equal(one, other)


def test_memory_that_there_is_no_room_for_is_an_error() -> None:
    with pytest.raises(MemoryError, match="no room for"):
        SharedMemory(2**60)


@pytest.fixture
def engine() -> Engine:
    supernet = supernet_of(pretrained())
    adopt_statistics_(supernet)
    return Engine(supernet, [supernet.space.largest()], example=BATCHES[0][:1], memory_budget_mb=0)


def during_copies(monkeypatch: pytest.MonkeyPatch, change: Callable[[], Any]) -> None:
    """Let another thread change the weights when a storage is about to be copied."""
    place = engine_snapshot._storage

    def placed(*args: Any) -> Any:
        change()
        return place(*args)

    monkeypatch.setattr(engine_snapshot, "_storage", placed)


def bias(supernet: Supernet) -> torch.nn.Parameter:
    return supernet.network[0].bias  # type: ignore[no-any-return, index, union-attr]


def test_blueprints_of_one_supernet_share_its_memory(engine: Engine) -> None:
    other = Engine(engine.supernet, engine.specs, example=BATCHES[0][:1], memory_budget_mb=0)
    first = EngineSnapshot(engine)
    _, states = first.package()
    moved = engine.supernet.generation.number
    second = EngineSnapshot(other)
    assert engine.supernet.generation.number == moved
    assert first.is_current(states)
    for one in (first, second):
        runner, _, (supernet,) = unpack(one.package()[0])
        with torch.no_grad():
            bias(engine.supernet).add_(1)
        assert torch.equal(bias(supernet), bias(engine.supernet))
        assert torch.equal(runner(BATCHES[0], 0), engine(BATCHES[0], 0))


def test_a_change_while_weights_are_copied_is_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, changes = bias(engine.supernet).detach() + 3, iter(range(3))

    @torch.no_grad()
    def change() -> None:
        if next(changes, None) is not None:
            bias(engine.supernet).add_(1)

    during_copies(monkeypatch, change)
    _, _, (supernet,) = unpack(EngineSnapshot(engine).package()[0])
    assert torch.equal(bias(engine.supernet), expected)
    assert torch.equal(bias(supernet), expected)
