"""What is fuzzed: every reader of a file, and every public function that takes arguments from outside.

A target gets a `random.Random`, makes an input that is damaged or hostile, and gives it to the library. The
library may accept the input or raise one of its own errors; everything else is a finding. `test_fuzz.py` runs
each target shortly; `python tests/fuzz/long.py --minutes 60` runs them for an hour.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from io import BytesIO, StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from fuzz.folders import fuzz_folder
from fuzz.inputs import (
    NASTY,
    Finding,
    changed,
    changed_once,
    damaged,
    journal_file,
    json_file,
    lines_file,
    tensor_file,
    text,
)
from torch import nn
from torchvision_operators import define_missing

import ofa_adapters
import subnetact
import subnetact.insertion
import subnetact.supernet
from ofa_adapters.__main__ import main as families_main
from subnetact import (
    Batcher,
    Engine,
    LatencyTable,
    SubnetSpec,
    Supernet,
    calibrate,
    describe,
    insert_,
    search,
    simulate,
)
from subnetact.digits import load_digits_supernet
from subnetact.errors import MissingExtra, QueueFull, SubnetActError, TableError
from subnetact.files.journal import Journal
from subnetact.generation import Prompt, StepTable, TokenDeadlines, simulate_generation
from subnetact.profile.cli import main as profile_main
from subnetact.profile.pipeline import ProfileJob, checked
from subnetact.profile.source import ProfileSource
from subnetact.profile.sweep import Measurements
from subnetact.serve.cli import main as serve_main
from subnetact.serving import Fixed, make_policy
from subnetact.serving.live.corrections import Corrections
from subnetact.serving.simulation import traces
from subnetact.serving.simulation.cli import main as simulate_main
from subnetact.serving.simulation.replay import LiveRun

define_missing()

__all__ = ["TARGETS", "Finding", "run"]

WORDS = (
    *("", "-1", "0", "1", "2", "nan", "inf", "1e400", "9" * 30, "x", "../x", "/dev/zero"),
    *("all", "random:2"),
)
TABLE = LatencyTable(
    ["a", "b"], [70.0, math.nan], [1, 4], [[1.0, 2.0], [3.0, 6.0]], {"p99": [[1.0, 2.0], [3.0, 6.0]]},
    {"device": "cpu"},
)  # fmt: skip
ACCURATE = TABLE.with_accuracy([70.0, 80.0])


def run(name: str, source: random.Random) -> bool:
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as place:
            try:
                TARGETS[name](source, Path(place))
                return True
            except MissingExtra:
                raise
            except SubnetActError:
                pass
            except SystemExit as end:
                if end.code not in (0, 1, 2, None):
                    raise Finding(f"{name}: exit status {end.code}") from end
            except Exception as error:
                raise Finding(f"{name}: {type(error).__name__}: {error!s:.300}") from error
    return False


# -- seeds -------------------------------------------------------------------------------------------


@cache
def seeds() -> Path:
    """Return a folder with one valid file or folder of every kind."""
    place = Path(tempfile.mkdtemp(prefix="subnetact-fuzz-"))
    supernet, engine = digits(), digits_engine()
    engine.save(place / "bundle")
    supernet.norms.save(place / "norms.safetensors")
    TABLE.save(place / "table.json")
    windows = Journal(place / "journal.jsonl", {"threads": 1})
    for i in range(3):
        windows.append("window", cell=[0, i, 1], host_ms=[1.0, 2.0])
    search_from(place / "search.jsonl")
    Corrections(TABLE).save(place / "corrections.json")
    header = {"kind": "subnetact.decision_log", "schema": 1, "policy": "Fixed", "workers": 1}
    header |= {"expired": "drop", "table": ACCURATE.to_json()}
    batch = {"t": 0.0, "w": 0, "queued": 1, "slack": 5.0, "s": 0, "b": 1, "ms": 1.0, "met": 1}
    lines = (header, {**batch, "a": [0.0], "d": [9.0]}, {"o": "dropped", "a": [1.0], "d": [9.0], "p": [1]})
    (place / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options: dict[str, Any] = {"progress": False, "resume": place / "unfinished", "save_every_s": 0}
    with suppress(InterruptedError):
        calibrate(load_digits_supernet(), list(supernet.norms), _interrupted(), **options)
    state = ofa_adapters.load("ofa_mbv3", width_mult=0.1, n_classes=2).state_dict()
    torch.save({"state_dict": state}, place / "c.pth")
    return place


def _interrupted() -> Iterator[torch.Tensor]:
    yield torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    yield torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    raise InterruptedError


@cache
def digits() -> Supernet:
    supernet = load_digits_supernet()
    specs = [supernet.space.smallest(), supernet.space.largest()]
    images = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    calibrate(supernet, specs, [images], progress=False)
    return supernet


def digits_engine() -> Engine:
    supernet = digits()
    engine = Engine(supernet, list(supernet.norms), example=torch.zeros(1, 1, 16, 16))
    rows, accuracy = [[1.0, 2.0]] * len(engine), [60.0] * len(engine)
    engine.tables["cpu"] = LatencyTable(engine.keys, accuracy, [1, 2], rows)
    return engine


def search_from(path: Path) -> None:
    """Search the space of digits, resuming from a journal."""
    made_up: Any = lambda spec: 1.0 + len(spec.key)  # noqa: E731
    options: dict[str, Any] = {"evaluations": 8, "remeasure": made_up, "progress": False}
    search(digits(), made_up, made_up, resume=path, **options)


def copied(name: str, place: Path) -> Path:
    seed, path = seeds() / name, place / name
    (shutil.copytree if seed.is_dir() else shutil.copy)(seed, path)
    return path


def reader(name: str, change: Callable[[Path, random.Random], None], read: Callable[[Path], Any]) -> Any:
    """Return a target that changes a seed and reads it."""

    def target(source: random.Random, place: Path) -> None:
        path = copied(name, place)
        change(path, source)
        read(path)

    return target


# -- targets -----------------------------------------------------------------------------------------


def fuzz_checkpoint(source: random.Random, place: Path) -> None:
    path = copied("c.pth", place)
    if source.random() < 0.4:
        path.write_bytes(damaged(path.read_bytes(), source))
    else:
        content = torch.load(path, weights_only=True)
        name = source.choice(list(content["state_dict"]))
        tensor = content["state_dict"][name]
        tensors = [tensor.double(), tensor.to(torch.int8), tensor * math.nan, tensor.to("meta")]
        tensors += [tensor.to(torch.complex64), torch.zeros(1).expand(10**6, 10**6), tensor.to_sparse()]
        content["state_dict"][name] = source.choice((*NASTY, *tensors))
        if source.random() < 0.2:
            content["model"] = content["state_dict"]["self"] = content
        torch.save(content, path)
    families_main(["inspect", str(path)])
    ofa_adapters.load("ofa_mbv3", path, width_mult=0.1, n_classes=2)


def fuzz_constructor(source: random.Random, place: Path) -> None:
    resnet = {"n_classes": 2, "width_mult_list": [0.1], "depth_list": [0], "bn_param": [0.1, 1e-5]}
    mobile = {"n_classes": 2, "width_mult": 0.1, "ks_list": [3], "depth_list": [2], "expand_ratio_list": [3]}
    arguments: dict[str, dict[str, Any]]
    arguments = {"ofa_resnet50": resnet, "ofa_mbv3": mobile, "us_mobilenet_v2": {"num_classes": 2}}
    family = source.choice(list(arguments))
    with torch.device("meta"):
        hostile = {name: changed_once(value, source) for name, value in arguments[family].items()}
        ofa_adapters.load(family, **{**arguments[family], **dict(source.sample(list(hostile.items()), 1))})


def fuzz_spec(source: random.Random, place: Path) -> None:
    space = digits().space
    hostile = changed(space.sample(source.randrange(99)).to_json(), source)
    if source.random() < 0.5:
        space.check(SubnetSpec.from_json(hostile))
    elif source.random() < 0.5:
        space.parse(changed(space.format(space.sample(source.randrange(99))), source))
    else:
        key = space.sample(source.randrange(99)).key
        space.parse(damaged(key.encode(), source).decode("latin-1"))


def fuzz_traces(source: random.Random, place: Path) -> None:
    small = [v for v in NASTY if not isinstance(v, (int, float)) or not abs(v) < math.inf or abs(v) <= 10**5]
    number = lambda: source.choice((0.5, 2.0, 20.0, source.choice(small)))  # noqa: E731
    kind = source.randrange(4)
    if kind == 0:
        traces.bursty(number(), number(), number(), number(), source.choice((0, number())))
    elif kind == 1:
        traces.from_counts(source.choice(([1, 2, 3], number())), number(), number())
    elif kind == 2:
        traces.from_timestamps(source.choice(([1.0, 2.0], number())), number())
    else:
        traces.time_varying(number(), number(), number(), number(), number())


def fuzz_simulate(source: random.Random, place: Path) -> None:
    arguments: dict[str, Any] = {
        **{"arrivals_ms": [0.0, 1.0, 2.0], "slo_ms": 20.0, "workers": 2, "expired": "drop", "noise": 0.1},
        **{"overhead_ms": 0.1, "min_accuracy": 60.0, "seed": 1, "blocks": 1, "events": ()},
    }
    name = source.choice(list(arguments))
    arguments[name] = source.choice(NASTY)
    policy = make_policy(source.choice(("hullfit", "slackfit:4", "fixed:0", "maxbatch")), ACCURATE, 20.0)
    simulate(table=ACCURATE, policy=policy, progress=False, **arguments)


class _Runner:
    keys = TABLE.subnets

    def check(self, x: Any) -> None:
        """Accept every input."""

    def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
        return inputs


def fuzz_submit(source: random.Random, place: Path) -> None:
    with Batcher(_Runner(), policy=Fixed(ACCURATE, 0), slo_ms=1e4) as batcher:
        for _ in range(5):
            arguments = {"deadline_ms": 50.0, "min_accuracy": None, "priority": None}
            hostile = (*NASTY, np.float16(20.0), np.float32(20.0), np.int64(3), "20")
            arguments[source.choice(list(arguments))] = source.choice(hostile)
            try:
                future = batcher.submit(1, **arguments)  # type: ignore[arg-type]
            except SubnetActError:
                continue
            error = future.exception(timeout=30)
            if error is not None and not isinstance(error, SubnetActError):
                raise error


def fuzz_description(source: random.Random, place: Path) -> None:
    document = json.loads(_described())
    bytewise = source.random() < 0.3
    raw = damaged(_described().encode(), source) if bytewise else text(changed(document, source))
    description = subnetact.insertion.Description.from_json(raw)
    str(description)
    x = torch.zeros(2, 3, 8, 8)
    torch.testing.assert_close(_inserted("a description", description, example=x)(x), _plain_network()(x))


def _plain_network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(128, 2)).eval()


@cache
def _described() -> str:
    found = describe(_plain_network(), example=torch.zeros(2, 3, 8, 8), choices={"width": (4, 8)})
    return found.to_json()


def fuzz_insert(source: random.Random, place: Path) -> None:
    """Insert into a small model with hostile arguments; a refusal leaves the model as it was."""
    arguments: dict[str, Any] = {
        **{"axes": ("width",), "choices": {"width": (4, 8)}, "only": "3", "fixed": ("0",)},
        **{"example": (torch.zeros(2, 3, 8, 8),)},
    }
    name = source.choice(list(arguments))
    nasty = source.choice(NASTY)
    arguments[name] = nasty if source.random() < 0.5 else changed_once(arguments[name], source)
    _inserted(f"{name}={arguments[name]!r:.80}", **arguments)


def _inserted(what: str, *given: Any, **arguments: Any) -> Supernet:
    """Insert into a small model, which is as it was if that is refused."""
    network, x = _plain_network(), torch.zeros(2, 3, 8, 8)
    before, keys = network(x), list(network.state_dict())
    try:
        return insert_(network, *given, **arguments)
    except SubnetActError:
        same = torch.equal(network(x), before) and list(network.state_dict()) == keys
        if not same or any("subnetact" in type(m).__module__ for m in network.modules()):
            raise Finding(f"the model is not as it was after {what}") from None
        raise


def _step_table() -> StepTable:
    plain = LatencyTable(ACCURATE.subnets, ACCURATE.accuracy, ACCURATE.batch_sizes, ACCURATE.latency_ms)
    return StepTable({32: plain, 128: plain.scaled(1.5)}, plain)


def fuzz_simulate_generation(source: random.Random, place: Path) -> None:
    times: dict[str, Any] = {"first_ms": 100.0, "token_ms": 20.0}
    prompt: dict[str, Any] = {"arrival_ms": 0.0, "tokens": 4, "answer": 3}
    arguments: dict[str, Any] = {"token_ms": 20.0, "max_sequences": 4, "step_tokens": 64, "expired": "drop"}
    chosen = source.choice((times, prompt, arguments))
    chosen[source.choice(list(chosen))] = source.choice(NASTY)
    prompts = [Prompt(**prompt, deadlines=TokenDeadlines(**times))]
    simulate_generation(prompts, _step_table(), **arguments)


class _Served:
    """The application that serves digits, asked without a socket."""

    def __init__(self) -> None:
        from subnetact.serve import build_app

        engine = digits_engine()
        self.batcher: Any = Batcher(engine, policy=Fixed(engine.tables["cpu"], 0), slo_ms=6e4)
        self.app = build_app(self.batcher, engine, slo_ms=6e4)
        self.loop = asyncio.new_event_loop()

    def status(self, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> int:
        return self.loop.run_until_complete(self._ask(path, body, headers))

    async def _ask(self, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> int:
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        found: list[int] = []

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                found.append(message["status"])

        scope = {
            **{"type": "http", "http_version": "1.1", "scheme": "http", "method": "POST", "path": path},
            **{"raw_path": path.encode("latin-1", "replace"), "root_path": "", "query_string": b""},
            **{"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)},
        }
        await asyncio.wait_for(self.app(scope, receive, send), 30)
        return found[0]


class _ServedText(_Served):
    """The application of a text server whose queue is always full."""

    def __init__(self) -> None:
        from subnetact.serve import build_text_app

        def refuse(*_: Any, **__: Any) -> None:
            raise QueueFull("none")

        generator: Any = SimpleNamespace(submit=refuse, close=lambda wait=True: None, max_length=99)
        self.batcher = generator
        self.app = build_text_app(generator, SimpleNamespace(encode=lambda text: [*text.encode()]))
        self.loop = asyncio.new_event_loop()


_served, _served_text = cache(_Served), cache(_ServedText)


def close() -> None:
    """End the threads of the applications that a target has opened."""
    for opened in (_served, _served_text):
        if opened.cache_info().currsize:
            opened().batcher.close()
            opened().loop.close()
            opened.cache_clear()


def fuzz_http(source: random.Random, place: Path) -> None:
    """Send hostile bodies and headers to the server; an answer has no status 500."""
    pixels = [0.5] * 256
    ask = {"input": pixels, "deadline_ms": 5e4, "min_accuracy": 10.0}
    tensor = {"name": "input", "shape": [1, 1, 16, 16], "datatype": "FP32", "data": pixels}
    infer = {"id": "a", "inputs": [tensor], "outputs": [{"name": "output"}]}
    infer |= {"parameters": {"deadline_ms": 5e4}}
    path, good = source.choice((("/infer", ask), ("/v2/models/model/infer", infer)))
    body = text(changed(good, source))
    headers = [(b"content-type", b"application/json")]
    kind = source.random()
    if kind < 0.2:
        body = damaged(body, source)
    elif kind < 0.35:
        file = BytesIO()
        np.save(file, np.zeros((1, 16, 16), source.choice((np.float32, np.int8, np.complex64, "U3"))))
        path, body = "/infer", damaged(file.getvalue(), source)
        headers = [(b"content-type", b"application/x-npy")]
    elif kind < 0.6:
        cut = source.choice((b"-1", b"0", b"10", b"99999999999", b"x", str(len(body) - 8).encode()))
        headers.append((b"inference-header-content-length", cut))
    if source.random() < 0.3:
        names = (b"x-deadline-ms", b"x-min-accuracy", b"content-length", b"host", b"content-type")
        headers.append((source.choice(names), source.choice(WORDS).encode()))
    status = _served().status(path, body, headers)
    if status >= 500 and status not in (503, 504):
        raise Finding(f"status {status} of {path}: {body[:200]!r} {headers}")


def fuzz_text_http(source: random.Random, place: Path) -> None:
    """Send hostile requests for texts and chats; the only error is a full queue."""
    ask = {"max_tokens": 5, "temperature": 0.5, "stop": ["a"], "stream": False, "n": 1, "deadline_ms": 5e4}
    ask |= {"min_accuracy": 10.0, "stream_options": {"include_usage": True}, "logit_bias": {}, "user": "a"}
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], **ask}
    path, good = source.choice((("/v1/completions", {"prompt": "a", **ask}), ("/v1/chat/completions", chat)))
    body = text(changed(good, source))
    if source.random() < 0.2:
        body = damaged(body, source)
    names = (b"x-deadline-ms", b"x-min-accuracy", b"x-slo-ttft-ms")
    headers = [(source.choice(names), source.choice(WORDS).encode())] if source.random() < 0.5 else []
    status = _served_text().status(path, body, headers)
    if status not in (400, 404, 413, 429):
        raise Finding(f"status {status} of {path}: {body[:200]!r} {headers}")


def fuzz_command(main: Callable[[list[str]], int], options: dict[str, int], fixed: list[str]) -> Any:
    """Return a target that gives hostile options to a command."""

    def target(source: random.Random, place: Path) -> None:
        given = list(fixed)
        for name in source.sample(list(options), min(len(options), source.choice((1, 1, 2, 3)))):
            words = (source.choice((*WORDS, str(seeds() / "table.json"))) for _ in range(options[name]))
            given += [name, *words]
        with _in(place):
            status = main(given)
        if status not in (0, 1, 2, 3):
            raise Finding(f"exit status {status} of {given}")

    return target


@contextmanager
def _in(place: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def _checked_profile(job: ProfileJob, source: ProfileSource) -> LatencyTable:
    """Refuse what a profile refuses before it measures anything, and the rest as well."""
    checked(job, source)
    raise TableError("fuzzing measures nothing")


def _profile(arguments: list[str]) -> int:
    errors = StringIO()
    with redirect_stderr(errors), mock.patch("subnetact.profile.cli.run_profile", _checked_profile):
        status = profile_main(arguments)
    if "Traceback" in errors.getvalue():
        raise Finding(f"{arguments}: {errors.getvalue()[-300:]}")
    return status


def _serve(arguments: list[str]) -> int:
    interval = sys.getswitchinterval()
    try:
        with mock.patch("subnetact.serve.run"):  # Everything but the loop of the server.
            return serve_main(["--bundle", str(seeds() / "bundle"), *arguments])
    finally:
        sys.setswitchinterval(interval)


def options(names: str, **words: int) -> dict[str, int]:
    """Return how many words follow each option of a command, which is one unless something else is said."""
    return {f"--{name}": words.get(name, 1) for name in names.split()}


SERVE = options(
    "table policy slo-ms threads-per-worker max-queue name host port allowed-hosts token-file grace-s fair"
    " queue max-body-mb max-connections body-s idle-s write-s constructor model workers router",
    fair=0,
)
SIMULATE = options("slo-ms workers noise overhead-ms scale seed table policy")
PROFILE = options(
    "family checkpoint bundle constructor subnets accuracy fit-subnets evaluations seed calibrate-on"
    " batch-sizes input-shape input-dtype dtype memory-budget-mb device threads warmup-ms min-time-ms windows"
    " max-windows tolerance quantiles statistic out"
)
TARGETS: dict[str, Callable[[random.Random, Path], Any]] = {
    "spec": fuzz_spec,
    "latency table": reader("table.json", json_file, LatencyTable.load),
    "norm table": reader("norms.safetensors", tensor_file, subnetact.supernet.NormTable.load),
    "bundle": fuzz_folder,
    "checkpoint": fuzz_checkpoint,
    "constructor": fuzz_constructor,
    "journal": reader("journal.jsonl", journal_file, lambda p: Measurements(Journal(p, {"threads": 1}))),
    "search": reader("search.jsonl", journal_file, search_from),
    "corrections": reader("corrections.json", json_file, lambda path: Corrections(TABLE).load(path)),
    "decision log": reader("log.jsonl", lines_file, LiveRun.load),
    "unfinished calibration": reader("unfinished", journal_file, lambda path: _resumed(path)),
    "traces": fuzz_traces,
    "simulate": fuzz_simulate,
    "Batcher.submit": fuzz_submit,
    "python -m subnetact.simulate": fuzz_command(
        simulate_main, SIMULATE, ["--trace", "bursty", "--duration-s", "0.05", "--policy", "fixed:0"]
    ),
    "python -m subnetact.serve": fuzz_command(_serve, SERVE, []),
    "python -m subnetact.profile": fuzz_command(_profile, PROFILE, []),
    "python -m ofa_adapters": fuzz_command(families_main, {"inspect": 1}, []),
    "description": fuzz_description,
    "insert_": fuzz_insert,
    "simulate_generation": fuzz_simulate_generation,
    "HTTP": fuzz_http,
    "HTTP, text": fuzz_text_http,
}


def _resumed(path: Path) -> Any:
    batches = list(itertools.islice(_interrupted(), 2))
    return calibrate(load_digits_supernet(), list(digits().norms), batches, False, resume=path)


if __name__ == "__main__":
    sys.exit("run tests/fuzz/long.py")
