"""What `load_exported` runs: the supernet's outputs, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from digits_exports import digits_engine, wrong_in_threads
from elastic_networks import one_width
from short_windows import SHORT
from torch import nn

import subnetact
from subnetact import Batcher, Engine, SubnetSpec, profile_latency
from subnetact.errors import ExportError, FileFormatError, InvalidRequest, ProfileMismatch, SpecError
from subnetact.export import ExportedEngine, load_exported, to_onnx

pytestmark = pytest.mark.heavy  # ONNX

IMAGES = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return digits_engine(IMAGES, accuracy=[60.0, 70.0, 80.0])


@pytest.fixture(scope="module")
def folder(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_onnx(engine, tmp_path_factory.mktemp("x") / "programs", progress=False)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(scope="module")
def exported(folder: Path) -> ExportedEngine:
    return load_exported(folder, trusted=True)


def checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def rewrite(folder: Path, **facts: Any) -> None:
    """Change the manifest as somebody would who can also compute checksums."""
    path = folder / "export.json"
    document = {**json.loads(path.read_text()), **facts}
    document.pop("checksum")
    document["files"] = {name: described(folder / name) for name in document["files"]}
    path.write_text(json.dumps({**document, "checksum": checksum(document)}))


def test_programs_equal_the_supernet(engine: Engine, exported: ExportedEngine) -> None:
    assert exported.keys == engine.keys
    assert exported.accuracy == engine.accuracy
    assert exported.specs == engine.specs
    assert exported.sample.shape == IMAGES[0].shape
    for i, spec in enumerate(engine.specs):
        for size in (1, 2, 5):
            want = engine.supernet(IMAGES[:size], subnet=spec)
            torch.testing.assert_close(exported(IMAGES[:size], subnet=i), want, atol=5e-5, rtol=5e-5)
    assert not torch.equal(exported(IMAGES, subnet=0), exported(IMAGES, subnet=2))
    assert not wrong_in_threads(exported, IMAGES)


def test_some_subnets_run_and_are_profiled_as_what_they_are(engine: Engine, tmp_path: Path) -> None:
    folder = to_onnx(engine, tmp_path / "onnx", subnets=engine.specs[1:], progress=False)
    loaded = load_exported(folder, trusted=True)
    assert (loaded.keys, loaded.program) == (engine.keys[1:], "onnx")
    for i, spec in enumerate(loaded.specs):
        for x in (IMAGES[:1], IMAGES, IMAGES.transpose(2, 3)):
            want = engine.supernet(x, subnet=spec)
            torch.testing.assert_close(loaded(x, subnet=i), want, atol=5e-5, rtol=5e-5)
    table = profile_latency(loaded, [1, 3], accuracy=[60, 70], **SHORT)
    assert (table.subnets, table.accuracy) == (loaded.keys, (60, 70))
    assert (table.stamp["program"], table.stamp["supernet"]) == ("onnx", engine.fingerprint)
    assert table.stamp["space"] == engine.supernet.space.id
    with Batcher(loaded, table=table, slo_ms=5000) as batcher:
        answer = batcher.submit(IMAGES[0]).result(60)
    want = engine.supernet(IMAGES[:1], subnet=loaded.specs[answer.subnet])[0]
    torch.testing.assert_close(answer.output, want, atol=5e-5, rtol=5e-5)
    of_engine = profile_latency(engine, [1], accuracy=[60, 70, 80], **SHORT)
    with pytest.raises(ProfileMismatch, match=r"'engine', and 'onnx' runs.*profile_latency\(engine\)"):
        Batcher(loaded, table=of_engine.select([1, 2]), slo_ms=5000)


def test_wrong_calls_are_refused(engine: Engine, exported: ExportedEngine, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"an export .* needs distinct subnets.* twice"):
        to_onnx(engine, tmp_path / "p", subnets=engine.specs[:1] * 2)
    for wrong in (True, 1.0):
        with pytest.raises(SpecError, match=f"no subnet {wrong}"):
            exported(IMAGES[:1], subnet=wrong)
    with pytest.raises(InvalidRequest, match="not finite"):
        exported.check(torch.full((1, 16, 16), float("nan")), finite=True)
    ids: Any = [0, 1]
    with pytest.raises(SpecError, match="got int"):
        to_onnx(engine, tmp_path / "p", subnets=ids)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(FileFormatError, match="holds something else"):
        to_onnx(engine, tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]
    for bad in (3, -1, "0"):
        with pytest.raises(SpecError, match="no subnet"):
            exported(IMAGES, subnet=bad)
    for x in (IMAGES[0], IMAGES[:0], IMAGES.double(), torch.zeros(2, 1, 8, 8), "digit"):
        with pytest.raises(InvalidRequest, match="input: "):
            exported(x, subnet=0)


@pytest.mark.parametrize("name", ["subnet-1.onnx", "export.json"])
def test_damaged_files_are_named(copy: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(FileFormatError, match=name):
        load_exported(copy, trusted=True)
    (copy / name).unlink()
    with pytest.raises(FileFormatError, match=name):
        load_exported(copy, trusted=True)


def test_foreign_exports_are_refused(copy: Path) -> None:
    document = json.loads((copy / "export.json").read_text())
    more = {name: [*document[name], document[name][0]] for name in ("subnets", "accuracy")}
    more["subnets"][-1] = SubnetSpec("digits", ()).to_json()
    for facts, words in (
        ({"schema": 2}, "schema 2, this version reads 1; update subnetact"),
        ({"kind": "subnetact.triton"}, r"not an export; expected .* of kind .subnetact\.export"),
        ({"device": "cuda"}, "cuda"),
        (more, "damaged"),
        ({"subnets": [{}]}, "a field is missing"),
    ):
        rewrite(copy, **{**document, **facts})
        with pytest.raises((FileFormatError, subnetact.errors.DeviceError), match=words):
            load_exported(copy, trusted=True)
    path = copy / "export.json"
    document = {**json.loads(path.read_text()), "files": None}
    document.pop("checksum")
    path.write_text(json.dumps({**document, "checksum": checksum(document)}))
    with pytest.raises(FileFormatError, match="`files` lists no files"):
        load_exported(copy, trusted=True)


@pytest.mark.parametrize("name", ["copy", "model.pt2"])
def test_loading_runs_code_and_needs_trust(copy: Path, name: str) -> None:
    (copy / "subnet-0.onnx").unlink()
    with pytest.raises(ExportError, match=r"contains native code.* trusted=True"):
        load_exported(copy.parent / name)


class Fussy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x


def test_the_module_that_cannot_be_exported_is_named(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Fussy())).eval()
    supernet = one_width(network, {"0": "out"}, (2, 4))
    engine = Engine(supernet, [supernet.space.largest()], example=torch.zeros(1, 4))
    with pytest.raises(ExportError, match=r"module 1\.1 \(Fussy\)"):
        to_onnx(engine, tmp_path / "p", progress=False)
    assert not list(tmp_path.iterdir())
