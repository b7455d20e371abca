"""One .pt2 of all subnets: right outputs from one copy of the weights, free sizes, and what is refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from digits_exports import wrong_in_threads

from subnetact import Engine
from subnetact.errors import ExportError, FileFormatError, MissingFile
from subnetact.export import ExportedEngine, load_exported, pt2, to_pt2

pytestmark = pytest.mark.heavy
IMAGES = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def exported(compiled: tuple[Engine, Path]) -> ExportedEngine:
    return load_exported(compiled[1], trusted=True)


def test_it_equals_the_supernet(compiled: tuple[Engine, Path], exported: ExportedEngine) -> None:
    engine, _ = compiled
    assert (exported.specs, exported.accuracy) == (engine.specs, engine.accuracy)
    assert exported.fingerprint == engine.fingerprint
    for i, spec in enumerate(engine.specs):
        for x in (IMAGES[:1], IMAGES[:2], IMAGES, IMAGES.transpose(2, 3), IMAGES[::2]):
            want = engine.supernet(x, subnet=spec)
            torch.testing.assert_close(exported(x, subnet=i), want, atol=5e-5, rtol=5e-5)
    answers = exported.run(1, list(IMAGES[:3]), 4)
    torch.testing.assert_close(
        torch.stack(list(answers)), engine.supernet(IMAGES[:3], subnet=engine.specs[1]), atol=5e-5, rtol=5e-5
    )


def test_torch_alone_runs_it_and_weights_are_stored_once(compiled: tuple[Engine, Path]) -> None:
    engine, path = compiled
    package = pytest.importorskip("torch.export.pt2_archive._package")
    runners = package.load_pt2(str(path), load_weights_from_disk=True).aoti_runners
    for i, spec in enumerate(engine.specs):
        for x in (IMAGES[:1], IMAGES):
            want = engine.supernet(x, subnet=spec)
            torch.testing.assert_close(runners[f"subnet-{i}"](x), want, atol=5e-5, rtol=5e-5)
    weights = engine.supernet.state_dict()["stages.0.0.conv2.weight"]
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
        holders = [name for name in names if weights.numpy().tobytes() in file.read(name)]
        assert len(holders) == 1
        assert "/data/weights/" in holders[0]
        size = sum(entry.file_size for entry in file.infolist() if "/data/weights/" in entry.filename)
        facts = json.loads(file.read(next(name for name in names if name.endswith(pt2.FACTS))))
    once = sum(t.nbytes for t in engine.supernet.state_dict().values()) + engine.supernet.norms.nbytes()
    assert size <= 1.1 * once + 2500 * len(names)  # torch.save adds up to 2 kB to a tensor
    assert facts["inputs"] == [f"input: float32 batch:1:{2**30} 1 16 16"]
    assert facts["accuracy"] == [60.0, None]


def test_threads_run_different_subnets(exported: ExportedEngine) -> None:
    assert not wrong_in_threads(exported, IMAGES)


def edited(path: Path, target: Path, **facts: Any) -> Path:
    """Copy a file and change its facts, as somebody would who can also write archives."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith(pt2.FACTS):
                data = json.dumps({**json.loads(data), **facts}).encode()
            new.writestr(name, data)
    return target


def test_foreign_or_damaged_files(compiled: tuple[Engine, Path], tmp_path: Path) -> None:
    _, path = compiled
    with pytest.raises(ExportError, match=r"native code.*trusted=True"):
        load_exported(path)
    with pytest.raises(MissingFile):
        load_exported(tmp_path / "none.pt2", trusted=True)
    for facts, message in (
        ({"torch": "2.0.0"}, r"compiled by torch 2\.0\.0 for"),
        ({"capability": "another"}, "for another, this is torch"),
        ({"schema": 2}, "schema 2, this version reads 1; update subnetact"),
        ({"kind": "other"}, "not an export"),
        ({"subnets": [{}]}, "damaged"),
    ):
        with pytest.raises(FileFormatError, match=message):
            load_exported(edited(path, tmp_path / "edited.pt2", **facts), trusted=True)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "flipped.pt2").write_bytes(data)
    (tmp_path / "cut.pt2").write_bytes(path.read_bytes()[:-1000])
    for name in ("flipped", "cut"):
        with pytest.raises(FileFormatError, match=f"{name}.pt2.*(damaged|restore)"):
            load_exported(tmp_path / f"{name}.pt2", trusted=True)


def test_wrong_arguments_are_refused_and_nothing_is_written(
    compiled: tuple[Engine, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = compiled
    for name in ("model.pt", "nowhere/model.pt2"):
        with pytest.raises(ExportError, match=r"not a \.pt2 file in a folder that exists"):
            to_pt2(engine, tmp_path / name)
    from torch._inductor import config

    absent = config.patch({"cpp.cxx": ("a-compiler-that-is-not-installed",)})
    with absent, pytest.raises(ExportError, match=r"AOTInductor cannot take .*C\+\+ compiler"):
        to_pt2(engine, tmp_path / "model.pt2", progress=False)
    monkeypatch.setattr(pt2, "import_module", lambda name: pt2)  # a module without what is needed
    monkeypatch.setattr(pt2, "load_pt2", lambda path: None, raising=False)
    with pytest.raises(ExportError, match="install a newer torch"):
        to_pt2(engine, tmp_path / "model.pt2", progress=False)
    assert not list(tmp_path.iterdir())
