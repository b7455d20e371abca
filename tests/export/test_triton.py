"""Triton repositories: what is written, and model.py driven without a server."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from elastic_networks import one_width
from torch import nn

from subnetact import Engine, LatencyTable, calibrate, insert_
from subnetact.digits import load_digits_supernet
from subnetact.errors import (
    ExportError,
    FileFormatError,
    PolicyError,
    ProfileMismatch,
    QueueFull,
    SubnetActError,
)
from subnetact.export import to_triton

IMAGES = torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(1))
SLO_MS = 20_000.0


@pytest.fixture(scope="module")
def engine() -> Engine:
    supernet = load_digits_supernet()
    specs = [supernet.space.smallest(), supernet.space.largest()]
    calibrate(supernet, specs, [IMAGES], progress=False)
    return Engine(supernet, specs, example=IMAGES[:1], memory_budget_mb=0)


@pytest.fixture(scope="module")
def table(engine: Engine) -> LatencyTable:
    """A made-up table, in which only the smallest subnet meets a tight deadline."""
    return LatencyTable(engine.keys, [60.0, 80.0], [1, 4], [[1.0, 2.0], [6_000.0, 6_500.0]])


def test_python_flavour(engine: Engine, table: LatencyTable, tmp_path: Path) -> None:
    folder = to_triton(engine, tmp_path, "python", name="digits", table=table, slo_ms=40)
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert files >= {
        "digits/config.pbtxt",
        "digits_batcher/config.pbtxt",
        "digits_batcher/1/model.py",
        "digits_batcher/1/table.json",
        "digits_batcher/1/bundle/elastic.json",
    }
    tensors = [
        'input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [1, 16, 16] } ]',
        'output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [10] } ]',
        'output [ { name: "SUBNET" data_type: TYPE_INT32 dims: [ 1 ] } ]',
        'output [ { name: "MET" data_type: TYPE_BOOL dims: [ 1 ] } ]',
    ]
    assert (folder / "config.pbtxt").read_text().splitlines() == [
        "max_batch_size: 4",
        *tensors,
        'platform: "ensemble"',
        "ensemble_scheduling { step [ { model_name: 'digits_batcher' model_version: -1 input_map { key: "
        "'INPUT__0' value: 'INPUT__0' } output_map { key: 'OUTPUT__0' value: 'OUTPUT__0' } output_map { key: "
        "'SUBNET' value: 'SUBNET' } output_map { key: 'MET' value: 'MET' } } ] }",
    ]
    assert (tmp_path / "digits_batcher" / "config.pbtxt").read_text().splitlines() == [
        "max_batch_size: 4",
        *tensors,
        'backend: "python"',
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
        "dynamic_batching { max_queue_delay_microseconds: 0 }",
        "parameters { key: 'options' value: { string_value: '"
        '{"slo_ms": 40, "policy": "hullfit", "model": null, "learn": true, "memory_budget_mb": 0.0}'
        "' } }",
    ]


def test_served_subnets_are_named_and_warmed_up(engine: Engine, tmp_path: Path) -> None:
    some = Engine(engine.supernet, engine.specs, example=IMAGES[:1])
    some.remove(0)
    folder = to_triton(some, tmp_path)
    assert json.loads((folder / "export.json").read_text())["subnets"] == [engine.specs[1].to_json()]
    scripted = torch.jit.load(folder / "1" / "model.pt")
    want = engine(IMAGES, subnet=1)
    assert torch.allclose(scripted(IMAGES, torch.zeros(6, 1, dtype=torch.bool)), want, atol=1e-4)
    folder, seen = to_triton(engine, tmp_path / "all", max_batch_size=4), set()
    tensor = r'key: "(\w+)" value: \{ data_type: (\w+) dims: (\[[^]]+\]) zero_data: true \}'
    warm_up = r'model_warmup \[ \{ name: "[^"]+" batch_size: (\d+) count: 3((?: inputs \{[^}]+\} \})+) \} \]'
    for size, inputs in re.findall(rf"^{warm_up}$", (folder / "config.pbtxt").read_text(), re.MULTILINE):
        given, count = re.findall(tensor, inputs), int(size)
        x, code = (torch.zeros(count, *json.loads(dims)) for _, _, dims in given)
        assert [one[:2] for one in given] == [("INPUT__0", "TYPE_FP32"), ("INPUT__1", "TYPE_BOOL")]
        assert torch.jit.load(folder / "1" / "model.pt")(x, code.bool()).shape == (count, 10)
        seen.add((count, code.shape[1] - 1))
    assert seen == {(count, subnet) for count in (1, 4) for subnet in engine.ids}


def test_others_are_left_alone(engine: Engine, table: LatencyTable, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.pbtxt").touch()
    with pytest.raises(FileFormatError, match="theirs: holds something else"):
        to_triton(engine, tmp_path, "python", name="theirs", table=table, slo_ms=SLO_MS)
    for _ in range(2):  # an earlier export is replaced
        to_triton(engine, tmp_path, "python", name="ours", table=table, slo_ms=SLO_MS)
    with pytest.raises(ExportError):
        to_triton(engine, tmp_path, "python", name="ours", table=None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "ours_batcher", "theirs"]
    assert (tmp_path / "ours_batcher" / "1" / "bundle" / "elastic.json").exists()


def test_wrong_arguments(engine: Engine, table: LatencyTable, tmp_path: Path) -> None:
    for arguments, message in (
        ({"flavour": "onnx"}, "'onnx' is not known; choose from libtorch, python"),
        ({"flavour": "python"}, "give table=profile_latency"),
        ({"flavour": "python", "table": table, "slo_ms": 9.0, "queue_delay_us": 5}, "queue_delay_us to"),
        ({"name": "a/b"}, "is not a model name"),
        ({"name": ".."}, "is not a model name"),
        ({"name": 'a"b'}, "is not a model name"),
        ({"flavour": "python", "table": table}, "slo_ms is the time in ms"),
        ({"table": table}, "the client chooses"),
        ({"slo_ms": 5.0}, "the client chooses"),
        ({"model": "torch.nn:ReLU"}, "does not belong to 'libtorch'"),
        ({"max_batch_size": 0}, "max_batch_size: 0 must be a whole number of at least 1"),
        ({"max_batch_size": 2.5}, "must be a whole number"),
        ({"queue_delay_us": -1}, "queue_delay_us: -1 must be a whole number of at least 0"),
        ({"policy": "slackfit"}, "the client chooses"),
    ):
        with pytest.raises(ExportError, match=message):
            to_triton(engine, tmp_path, **arguments)
    for values, message in (
        ({"slo_ms": SLO_MS, "policy": "nearest"}, "'nearest' is not known; choose from"),
        ({"slo_ms": -1.0}, "slo_ms: -1"),
    ):
        with pytest.raises(PolicyError, match=message):
            to_triton(engine, tmp_path, "python", table=table, **values)
    for keys, stamp, message in (
        (["a", "b"], {}, "."),
        (engine.keys, {"supernet": "other"}, "measured on supernet other"),
    ):
        other = LatencyTable(keys, [1.0, 2.0], [1], [[1.0], [2.0]], stamp=stamp)
        with pytest.raises(ProfileMismatch, match=message):
            to_triton(engine, tmp_path, "python", table=other, slo_ms=SLO_MS)
    assert not list(tmp_path.iterdir())


class Own(nn.Module):
    """A network of the user's own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x).relu())


def test_own_networks_are_rebuilt_by_a_named_function(tmp_path: Path, started: Callable[..., Any]) -> None:
    own = insert_(Own(8).eval(), example=torch.zeros(2, 3))
    engine = Engine(own, [own.space.largest()], example=torch.zeros(1, 3))
    table = LatencyTable(engine.keys, [1.0], [1], [[1.0]])
    arguments: dict[str, Any] = {"table": table, "slo_ms": SLO_MS}
    with pytest.raises(ExportError, match=r"an own network has none; give model='PKG\.MOD:FACTORY'"):
        to_triton(engine, tmp_path, "python", **arguments)
    for name, error in (
        ("torch.nn:Absent", "cannot be imported"),
        ("torch.nn:Linear", "raised TypeError"),
        ("torch.nn:ReLU", "."),
    ):
        with pytest.raises(SubnetActError, match=error):
            to_triton(engine, tmp_path, "python", model=name, **arguments)
    assert not list(tmp_path.iterdir())
    to_triton(engine, tmp_path, "python", model=f"{__name__}:Own", **arguments)
    model, x = started(tmp_path / "subnetact_batcher"), torch.randn(2, 3)
    model.execute([request := Sent(x.numpy())])
    want = own.extract(own.space.largest())(x)
    torch.testing.assert_close(torch.from_numpy(request.answer()["OUTPUT__0"]), want.detach())


def test_sizes_that_differ_among_examples_are_free(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    supernet = one_width(layers, {"0": "out", "2": "in"}, (2, 4))
    space = supernet.space
    examples = [torch.zeros(1, 5, 3), torch.zeros(1, 9, 3)]
    engine = Engine(supernet, [space.smallest(), space.largest()], example=examples)
    folder = to_triton(engine, tmp_path)
    assert (folder / "config.pbtxt").read_text().count("dims: [-1, ") == 2
    scripted, x = torch.jit.load(folder / "1" / "model.pt"), torch.randn(2, 7, 3)
    assert torch.equal(scripted(x, torch.zeros(2, 2).bool()), supernet(x, subnet=space.largest()))


def test_outputs_whose_width_is_the_subnets(tmp_path: Path) -> None:
    supernet = one_width(nn.Sequential(nn.Linear(3, 4)), {"0": "out"}, (2, 4))
    space = supernet.space
    own = Engine(supernet, [space.smallest(), space.largest()], example=torch.zeros(1, 3))
    folder = to_triton(own, tmp_path)
    assert "OUTPUT__0" in (config := (folder / "config.pbtxt").read_text())
    assert "data_type: TYPE_FP32 dims: [-1] } ]" in config
    scripted = torch.jit.load(folder / "1" / "model.pt")
    x = torch.randn(2, 3)
    assert scripted(x, torch.zeros(2, 1, dtype=torch.bool)).shape == (2, 2)
    for code, message in (
        (torch.zeros(3, 1), r"int64 tensor, or bool of shape \[batch, number \+ 1\]"),
        (torch.zeros(2, 1, 1), r"int64 tensor, or bool of shape \[batch, number \+ 1\]"),
        (torch.zeros(2, 0), "no subnet -1"),
        (torch.zeros(2, 3), r"no subnet 2; this file has 0\.\.1"),
    ):
        with pytest.raises(Exception, match=message):
            scripted(x, code.bool())


# -- model.py without a server ---------------------------------------------------------------------


class Error:
    INVALID_ARG, UNAVAILABLE = "INVALID_ARG", "UNAVAILABLE"
    INTERNAL, CANCELLED = "INTERNAL", "CANCELLED"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class Sent:
    """One request, and the responses that its sender got."""

    def __init__(self, x: np.ndarray[Any, Any], timeout_us: int = 0, **parameters: Any) -> None:
        self.timeout_us, self.gone = timeout_us, False
        self.x, self.text = x, json.dumps(parameters) if parameters else ""
        self.done = threading.Event()
        self.responses: list[Any] = []

    def get_response_sender(self) -> Sent:
        return self

    def timeout(self) -> int:
        return self.timeout_us

    def is_cancelled(self) -> bool:
        assert not self.responses, "the server has freed the sender"
        return self.gone

    def parameters(self) -> str:
        return self.text

    def send(self, response: Any, flags: int) -> None:
        assert flags == 1
        self.responses.append(response)
        self.done.set()

    def answer(self) -> dict[str, np.ndarray[Any, Any]]:
        assert self.done.wait(60)
        (response,) = self.responses
        assert response.error is None, response.error.message
        return {tensor.name: tensor.array for tensor in response.outputs}

    def error(self) -> Error:
        assert self.done.wait(60)
        (response,) = self.responses
        assert response.outputs is None
        return response.error


class Metrics:
    """Triton's metrics: a family, and what its metrics are set to, by name and labels."""

    COUNTER, GAUGE = "counter", "gauge"
    values: ClassVar[dict[tuple[str, ...], float]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert description
        self.name, self.kind = name, kind

    def Metric(self, labels: dict[str, str]) -> Any:  # noqa: N802
        model, instance, *others = labels.values()
        assert (model, instance) == ("some", "some_0")
        key = (self.name, *others)

        def add(number: float) -> None:
            assert number > 0
            assert self.kind == self.COUNTER
            self.values[key] = self.values.get(key, 0.0) + number

        return SimpleNamespace(increment=add, set=lambda number: self.values.__setitem__(key, number))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start model.py of a folder as Triton does, with values of its configuration replaced."""
    utils: Any = ModuleType("triton_python_backend_utils")
    utils.TritonError, utils.MetricFamily, utils.TritonModelException = Error, Metrics, RuntimeError
    utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    utils.Tensor = lambda name, array: SimpleNamespace(name=name, array=array)
    utils.InferenceResponse = lambda outputs=None, error=None: SimpleNamespace(outputs=outputs, error=error)
    utils.get_input_tensor_by_name = lambda request, name: SimpleNamespace(as_numpy=lambda: request.x)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    monkeypatch.setattr(Metrics, "values", {})
    models = []

    def start(folder: Path, **values: Any) -> Any:
        spec = importlib.util.spec_from_file_location("model", folder / "1" / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        pattern = r"parameters \{ key: 'options' value: \{ string_value: '(.*)' \} \}"
        (text,) = re.findall(pattern, (folder / "config.pbtxt").read_text())
        options = {"string_value": json.dumps(json.loads(text) | values)}
        config = json.dumps({"parameters": {"options": options}})
        names = {"model_name": "some", "model_instance_name": "some_0", "model_instance_kind": "CPU"}
        models.append(module.TritonPythonModel())
        models[-1].initialize({"model_config": config, **names})
        return models[-1]

    yield start
    for model in models:
        model.finalize()


@pytest.fixture
def model(engine: Engine, table: LatencyTable, tmp_path: Path, started: Callable[..., Any]) -> Any:
    to_triton(engine, tmp_path, "python", table=table, slo_ms=SLO_MS)
    # The latencies of the table are made up, and a policy that counts arrivals would save time for more.
    return started(tmp_path / "subnetact_batcher", policy="slackfit", learn=False)


def test_what_a_client_cancelled_is_withdrawn_and_metrics_are_the_batchers(model: Any) -> None:
    rows: list[Future[Any]] = [Future(), Future()]
    real = model.batcher
    facts = {"stats": real.stats, "accuracy": real.accuracy}
    model.batcher = SimpleNamespace(submit=lambda *_, **__: rows.pop(), **facts)
    withdrawn, request = list(rows), Sent(IMAGES[:2].numpy())
    model.execute([request])
    model.batcher, request.gone = real, True
    assert request.error().code == "CANCELLED"
    assert all(row.cancelled() for row in withdrawn)
    answered, refused = Sent(IMAGES[:3].numpy()), Sent(IMAGES[:1].numpy(), min_accuracy=99)
    model.execute([answered, refused])
    assert answered.answer()["SUBNET"].tolist() == [[1]] * 3
    model.closed.set()
    model.attendant.join()
    model._report()
    model._report()
    seen = Metrics.values
    assert seen["subnetact_requests_total", "met"] == seen["subnetact_served_total", "1"] == 3
    assert seen["subnetact_refused_total",] == 1
    assert seen["subnetact_accuracy_ratio_count",] == 3
    assert seen["subnetact_accuracy_ratio_sum",] == pytest.approx(3 * 0.8)
    assert seen["subnetact_subnet_accuracy_ratio", "0"] == pytest.approx(0.6)


def test_answers_are_their_own_and_bad_requests_harm_no_other(model: Any, engine: Engine) -> None:
    x, starts = IMAGES[:1].numpy(), ((0, 1), (1, 3), (4, 1), (5, 1))
    good = [Sent(IMAGES[i : i + rows].numpy()) for i, rows in starts]
    bad = [
        (Sent(x, deadline_ms="soon"), "deadline_ms"),
        (Sent(x, min_accuracy=99.0), "min_accuracy"),
        (Sent(x, min_acuracy=50.0), "'min_acuracy' is not known; choose from deadline_ms, min_accuracy, imp"),
        (Sent(x, importance="high"), "importance: 'high' is not an int"),
        (Sent(x.astype(np.float64)), "torch.float64"),
        (Sent(x[:, :, :8]), r"shape (1, 8, 16)"),
        (Sent(x[:0]), "at least one sample"),
    ]
    assert model.execute([*good[:2], *(request for request, _ in bad), *good[2:]]) is None
    for request, message in bad:
        assert request.error().code == "INVALID_ARG"
        assert message in request.error().message
    for (start, _), request in zip(starts, good, strict=True):
        answer = request.answer()
        assert answer["SUBNET"].shape == answer["MET"].shape == (len(request.x), 1)
        for row, subnet in enumerate(answer["SUBNET"][:, 0]):
            want = engine(IMAGES[start + row][None], subnet=int(subnet))[0]
            torch.testing.assert_close(torch.from_numpy(answer["OUTPUT__0"][row]), want, atol=5e-5, rtol=1e-4)


def test_deadline_and_floor_choose_the_subnet(model: Any) -> None:
    x = IMAGES[:1].numpy()
    relaxed, tight = Sent(x), Sent(x, deadline_ms=5_000)
    model.execute([relaxed])
    assert relaxed.answer()["SUBNET"].item() == 1
    model.execute([tight])
    assert tight.answer()["SUBNET"].item() == 0
    expired = Sent(x, deadline_ms=1e-6)
    model.execute([expired])
    assert expired.error().code == "UNAVAILABLE"
    assert expired.error().message.startswith("DeadlinePassed: ")
    for request in (Sent(x, timeout_us=5_000_000), Sent(x, timeout_us=5_000_000, deadline_ms=15_000)):
        model.execute([request])
        assert request.answer()["SUBNET"].item() == 0
    floor = Sent(x, min_accuracy=75.0)
    model.execute([floor])
    assert floor.answer()["SUBNET"].item() == 1


def test_a_refused_row_takes_its_request_with_it(model: Any) -> None:
    rows, real = [Future[Any](), Future[Any]()], model.batcher
    submitted = iter(rows)

    def submit(*_: Any, **__: Any) -> Future[Any]:
        for row in submitted:
            return row
        raise QueueFull("the queue is at its bound")

    model.batcher = SimpleNamespace(submit=submit, stats=real.stats, accuracy=real.accuracy)
    request = Sent(IMAGES[:3].numpy())
    model.execute([request])
    model.batcher = real
    assert request.error().code == "UNAVAILABLE"
    assert [row.cancelled() for row in rows] == [True, True]
