"""Subnets in OpenVINO and ONNX Runtime: what they answer, what they follow, and what they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_decoders import small_decoder
from torch import Tensor, nn

from subnetact import Engine, Supernet, calibrate, insert_
from subnetact.digits import load_digits_supernet
from subnetact.engine import runtime_program
from subnetact.errors import EngineError, MissingExtra

pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("read_once")]
IMAGE = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["onnxruntime", "openvino"])
def backend(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def small_supernet() -> Supernet:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return insert_(network.eval(), example=IMAGE[None])


def engine_of(backend: str, supernet: Supernet | None = None, **options: Any) -> Engine:
    supernet = supernet or small_supernet()
    spec = supernet.space.smallest()
    images = torch.randn(32, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    calibrate(supernet, [spec], [images], progress=False)
    return Engine(supernet, [spec], example=IMAGE[None], backend=backend, **options)


def of_view(engine: Engine, x: Any) -> Any:
    view = engine.supernet.subnet(engine.specs[0])
    with torch.inference_mode():
        return view(**x) if isinstance(x, dict) else view(x)


def as_the_view(engine: Engine, x: Tensor) -> None:
    torch.testing.assert_close(engine(x, 0), of_view(engine, x), rtol=1e-3, atol=1e-4, equal_nan=True)


def test_answers_are_those_of_the_view_for_every_shape_value_and_number_of_threads(backend: str) -> None:
    engine, threads = engine_of(backend, load_digits_supernet(), memory_budget_mb=64), torch.get_num_threads()
    assert engine.mode_of(0) == backend
    for shape in ((1, 1, 16, 16), (3, 1, 16, 16), (2, 1, 20, 20)):
        as_the_view(engine, torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    strange = torch.stack([IMAGE, IMAGE, IMAGE])
    strange[1, 0, 3, 3] = float("nan")
    as_the_view(engine, strange)
    (answer,) = engine.run(0, [IMAGE], 1)
    torch.testing.assert_close(answer, of_view(engine, IMAGE[None])[0], rtol=1e-3, atol=1e-4)
    run = engine.start(0, [IMAGE, IMAGE], 2)
    assert run.step()
    assert len(run.outputs()) == 2
    try:
        torch.set_num_threads(3 - min(threads, 2))
        as_the_view(engine, IMAGE[None])
    finally:
        torch.set_num_threads(threads)


def test_named_inputs_of_several_lengths_and_structured_outputs_are_kept(backend: str) -> None:
    model = small_decoder("LlamaConfig", num_hidden_layers=2)
    tokens = torch.randint(3, 50, (1, 12), generator=torch.Generator().manual_seed(0))

    def batch(length: int, count: int) -> dict[str, Tensor]:
        ids = tokens[:, :length].expand(count, -1).contiguous()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    model.config.use_cache = False
    examples = [batch(4, 1), batch(12, 1)]
    supernet = insert_(model, example=examples, axes=("ffn", "depth"))
    spec = supernet.space.smallest()
    engine = Engine(supernet, [spec], example=examples, backend=backend, memory_budget_mb=64)
    assert not engine.stats().unfused
    for length, count in ((4, 1), (12, 2), (7, 3)):
        x = dict(reversed(batch(length, count).items()))
        answer, expected = engine(x, 0), of_view(engine, x)
        assert type(answer) is type(expected)
        torch.testing.assert_close(answer.logits, expected.logits, rtol=1e-3, atol=1e-4)


def test_what_the_budget_has_no_room_for_runs_as_a_view_or_for_all_shapes_at_once(backend: str) -> None:
    engine = engine_of(backend, memory_budget_mb=0.01)
    assert engine.mode_of(0) == "zero-copy"
    assert "does not fit in the budget" in engine.stats().unfused[0]
    copy = engine_of(backend, memory_budget_mb=64).stats().fused_bytes
    engine = engine_of(backend, memory_budget_mb=2.5 * copy / 2**20)
    for size in (1, 2, 5, 9):
        as_the_view(engine, IMAGE.expand(size, 1, 16, 16))
    assert engine.mode_of(0) == backend
    assert engine.stats().fused_bytes == copy * (2 if backend == "openvino" else 1)


def test_weights_that_change_are_followed_and_a_bundle_keeps_the_choice(backend: str, tmp_path: Path) -> None:
    engine, x = engine_of(backend, memory_budget_mb=64), IMAGE[None]
    before = engine(x, 0)
    with torch.no_grad():
        for parameter in engine.supernet.parameters():
            parameter.mul_(1.05)
    as_the_view(engine, x)
    assert not torch.allclose(engine(x, 0), before, rtol=1e-2)
    assert engine.is_fused(0)
    engine_of(backend, memory_budget_mb=0).save(tmp_path / "bundle")
    loaded = Engine.load(tmp_path / "bundle", supernet=small_supernet(), memory_budget_mb=64)
    assert loaded.mode_of(0) == backend
    as_the_view(loaded, x)
    assert Engine.load(tmp_path / "bundle", supernet=small_supernet(), backend="fused").mode_of(0) == "fused"


def test_runtimes_that_cannot_be_used_are_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=f"backend: {backend} runs subnets on the CPU only"):
        runtime_program.require_runtime(backend, torch.device("cuda"))
    monkeypatch.setattr(runtime_program, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=rf"pip install 'subnetact\[{backend}\]'"):
        engine_of(backend)


def test_precisions_without_a_program_run_as_views(backend: str) -> None:
    supernet = load_digits_supernet()
    supernet.enable_precision("bfloat16")
    spec = supernet.space.at_precision(supernet.space.largest(), "bfloat16")
    calibrate(supernet, [spec], [IMAGE.expand(8, 1, 16, 16)], progress=False)
    engine = Engine(supernet, [spec], example=IMAGE[None], backend=backend, memory_budget_mb=64)
    assert engine.stats().unfused[0] == "a subnet at bfloat16 runs as a view"
    as_the_view(engine, IMAGE[None])
