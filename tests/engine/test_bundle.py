"""Bundles: an engine round-trips, and files that are damaged, changed or newer are refused by name."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_networks import one_width
from torch import nn

from subnetact import Batcher, Engine, LatencyTable, calibrate, insert_
from subnetact.digits import load_digits_supernet
from subnetact.elastic.__main__ import main as check_bundle
from subnetact.errors import FileFormatError, ForeignSpec, InsertError, ProfileMismatch, StaleWeights
from subnetact.files.documents import checksum
from subnetact.serve.source import Source
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet

EXAMPLE = torch.zeros(1, 16, 16)
X = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def engine_of(digits: Supernet) -> Engine:
    specs = [digits.space.smallest(), digits.space.sample(0), digits.space.largest()]
    calibrate(digits, specs, [X], progress=False)
    engine = Engine(digits, specs, example=EXAMPLE[None], accuracy=[60.0, None, 80.0])
    engine.tables["cpu"] = LatencyTable(
        engine.keys, [60.0, 70.0, 80.0], [1, 4], [[1, 2], [2, 3], [3, 5]], stamp={"device": "cpu"}
    )
    return engine


@pytest.fixture
def engine(digits: Supernet) -> Engine:
    return engine_of(digits)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests copy and damage; making an engine takes longer than what they look at."""
    folder = tmp_path_factory.mktemp("saved") / "b"
    engine_of(load_digits_supernet()).save(folder)
    return folder


def test_an_engine_round_trips(engine: Engine, tmp_path: Path) -> None:
    engine.remove(1)
    engine.save(tmp_path / "b")
    loaded = Engine.load(tmp_path / "b", memory_budget_mb=8)
    assert loaded.fingerprint == engine.fingerprint
    assert (loaded.specs, loaded.keys, loaded.ids) == (engine.specs, engine.keys, engine.ids)
    assert loaded.accuracy == (60.0, None, 80.0)
    assert loaded.tables == engine.tables
    assert torch.equal(loaded.sample, EXAMPLE)
    assert list(loaded.supernet.norms) == list(engine.supernet.norms)
    for i in engine.ids:
        torch.testing.assert_close(loaded(X, subnet=i), engine(X, subnet=i), rtol=5e-5, atol=5e-5)
    loaded.save(tmp_path / "b")
    assert Engine.load(tmp_path / "b").keys == engine.keys
    files = ("elastic.json", "model.safetensors", "norms.safetensors", "shared_norms.safetensors")
    assert {p.name for p in (tmp_path / "b").iterdir()} == {*files, "latency-0.json"}
    supernet = Engine.load(tmp_path / "b").supernet
    spec, before = engine.specs[2], supernet.fingerprint()
    alone = torch.cat([supernet(x[None], subnet=spec) for x in X])  # It is in evaluation mode.
    torch.testing.assert_close(supernet(X, subnet=spec), alone, rtol=5e-5, atol=5e-5)
    assert (supernet.training, supernet.fingerprint()) == (False, before)


class Versioned(nn.Linear):
    """A layer that, like torchvision's MNASNet, takes no state_dict without the version of its format."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") != 2:
            raise ValueError(f"version {metadata.get('version')} is unknown")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_an_own_network_is_given_to_load(tmp_path: Path, digits: Supernet) -> None:
    def made() -> Supernet:
        torch.manual_seed(0)
        return one_width(
            nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4), Versioned(4, 2)), {"0": "out", "1": "in"}
        )

    engine, x = Engine(made(), [made().space.smallest()], example=torch.ones(1, 3)), torch.randn(2, 3)
    engine.save(tmp_path)
    loaded = Engine.load(tmp_path, supernet=made())
    assert torch.equal(loaded(x, subnet=0), engine(x, subnet=0))
    with pytest.raises(InsertError, match="expected a Supernet, got Linear"):
        Engine.load(tmp_path, supernet=nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(FileFormatError, match=r"own network.*supernet="):
        Engine.load(tmp_path)
    with pytest.raises(ForeignSpec, match="own-"):
        Engine.load(tmp_path, supernet=digits)


class Block(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Residual(nn.Module):
    """Blocks whose order of importance depends on the weights."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (Block(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)) for _ in range(4))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


def test_a_bundle_makes_an_ordinary_network_elastic_as_it_was(tmp_path: Path) -> None:
    x, seen = torch.randn(3, 6), set()
    for seed in range(4):
        torch.manual_seed(seed)
        supernet = insert_(Residual().eval(), example=x)
        seen.add(supernet.space.id)
        Engine(supernet, [supernet.space.smallest()], example=x[:1]).save(tmp_path / f"{seed}")
        loaded = Engine.load(tmp_path / f"{seed}", supernet=Residual())
        served = Source(bundle=str(tmp_path / f"{seed}"), model=f"{__name__}:Residual").engine()
        torch.testing.assert_close(loaded(x, subnet=0), supernet(x, subnet=supernet.space.smallest()))
        torch.testing.assert_close(served(x, subnet=0), loaded(x, subnet=0))
    assert len(seen) > 1
    other = insert_(nn.Sequential(Residual(), nn.Linear(6, 2)).eval(), example=x)
    with pytest.raises(ForeignSpec, match="or the ordinary network"):
        Engine.load(tmp_path / "0", supernet=other)


@pytest.mark.parametrize("name", ["elastic.json", "model.safetensors", "norms.safetensors", "latency-0.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_file_is_named(saved: Path, tmp_path: Path, name: str, damage: str) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        at = data.index(b"80.0") if b"80.0" in data else len(data) - 9
        data[at] = data[at] ^ 1
        path.write_bytes(data)
    with pytest.raises(FileFormatError, match=name):
        Engine.load(tmp_path)


def changed_index(folder: Path, change: dict[str, Any]) -> None:
    """Change places of the index of a bundle, whose first subnet is called so, and sign it again."""
    document = json.loads((folder / "elastic.json").read_text())
    document["subnets"]["first"] = document["subnets"].pop(document["engine"]["subnets"][0])
    document["engine"]["subnets"][0] = "first"
    for place, value in change.items():
        *outer, field = place.split(".")
        inner = document
        for name in outer:
            inner = inner[name]
        inner[field] = value
    del document["checksum"]
    (folder / "elastic.json").write_text(json.dumps({**document, "checksum": checksum(document)}))


def of_library(library: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"model": {"library": library, "name": name, "arguments": arguments}}


def of_family(name: str, **constructor: Any) -> dict[str, Any]:
    return of_library("ofa_adapters", name, **constructor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 2.*update subnetact"),
        ({"schema": True}, "schema True"),
        ({"kind": "other"}, "not a bundle"),
        ({"subnets": 3}, "'subnets' of the document is 3, not object"),
        ({"engine.subnets": 3}, "is 3, not array"),
        ({"engine.subnets": ["nonsense"]}, "a field is missing"),
        ({"model": {"library": "os", "name": "system", "arguments": {}}}, "is 'os', not 'subnetact' or "),
        (of_family("nonsense"), "cannot rebuild 'nonsense'"),
        (of_family("ofa_resnet50"), "network of more than .* bytes"),
        (of_family("ofa_resnet50", width_mult_list=[0.1]), "is of space digits"),
        (of_family("ofa_resnet50", width_mult_list=[64.0]), "more than .* bytes"),
        (of_family("ofa_resnet50", depth_list=[10**9]), "cannot rebuild"),
        (of_family("ofa_resnet50", n_classes=10**9), "cannot rebuild"),
        (of_library("timm", "hf-hub:timm/resnet18.a1_in1k"), "timm has no model"),
        (of_library("timm", "resnet18", checkpoint_path="/etc/passwd"), "not with .*checkpoint_path"),
        (of_library("timm", "resnet18", pretrained=True), "not with .*pretrained"),
        (of_library("torchvision", "resnet18", weights="DEFAULT"), "not with .*weights"),
        (of_library("torchvision", "get_model"), "torchvision has no model"),
        (of_library("transformers", "pipeline"), "transformers has no model"),
        (of_library("transformers", "LlamaForCausalLM"), "config.json: no file is there"),
        ({"engine.sample": ["float32", [10**5, 10**5]]}, "input of shape"),
        ({"engine.sample": ["float32", [1.0]]}, "of the wrong kind"),
        ({"subnets.first.quality": {"accuracy": {"value": "a", "source": None}}}, "is 'a', not number"),
        ({"subnets.first.quality": {"accuracy": {"value": 101, "source": None}}}, "is not a percentage"),
        ({"subnets.first.config": [[[]]]}, "of the wrong kind"),
        ({"engine.removed": [0.7]}, "is 0.7, not integer"),
        ({"engine.removed": [99]}, "removed or pinned: 99"),
        ({"engine.pinned": [True]}, "is True, not integer"),
        ({"engine.allow_uncalibrated": "no"}, "is 'no', not boolean"),
        ({"files": {}}, "does not list"),
        ({"tables": {"../x": "cpu"}}, "does not list"),
        ({"tables": {"elastic.json": "cpu"}}, "does not list"),
        ({"statistics": "elastic.json"}, "does not list"),
        ({"files": {"/dev/zero": {"bytes": 0, "sha256": "0" * 64}}}, "not a file of this folder"),
        ({"files": {"../model.safetensors": {"bytes": 0, "sha256": "0" * 64}}}, "not a file of this folder"),
        ({"licence": 3}, "is 3, not string or null"),
    ],
)
def test_a_foreign_index_is_refused(saved: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    changed_index(tmp_path, change)
    with pytest.raises(FileFormatError, match=rf"elastic\.json.*{words}"):
        Engine.load(tmp_path)


def test_a_failed_save_keeps_the_bundle(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mine = tmp_path / "b", tmp_path / "mine"
    mine.mkdir()
    (mine / "mine.txt").write_text("mine")
    with pytest.raises(FileFormatError, match="something else"):
        engine.save(mine)
    assert [p.name for p in mine.iterdir()] == ["mine.txt"]
    engine.save(folder)
    assert len({p.stat().st_mode for p in folder.iterdir()}) == 1
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert "latency-0.json" in before
    with monkeypatch.context() as patched:
        patched.setattr(type(engine.supernet.norms), "save", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.save(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    engine.tables.clear()
    engine.save(folder)
    assert "latency-0.json" not in {p.name for p in folder.iterdir()}
    assert {p.name for p in tmp_path.iterdir()} == {"b", "mine"}
    assert Engine.load(folder).tables == {}


def test_processes_share_the_weights_of_a_mapped_bundle(engine: Engine, tmp_path: Path) -> None:
    """The weights stay in the file; the engine computes with them, and a later bundle is another file."""
    engine.save(tmp_path / "bundle")
    mapped, supernet = Engine.load(tmp_path / "bundle", mapped=True), engine.supernet
    for subnet in (0, 1):
        assert torch.allclose(mapped(X, subnet), engine(X, subnet), atol=5e-5)
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if ".safetensors" in line
    ]
    weights = [tensor for tensor in mapped.supernet.network.state_dict().values() if tensor.numel()]
    assert weights
    assert all(any(low <= tensor.data_ptr() < high for low, high in ranges) for tensor in weights)
    before = mapped(X, 1)
    with torch.no_grad():
        supernet.network.classifier.bias.add_(1.0)
    engine.tables.clear()
    engine.save(tmp_path / "bundle")
    assert torch.equal(mapped(X, 1), before)


def test_a_refused_bundle_leaves_the_given_supernet_as_it_was(engine: Engine, tmp_path: Path) -> None:
    """Neither the precision nor the weights, statistics or space of the supernet change before the check."""
    engine.save(tmp_path / "b")
    precision = {"precisions": ["int8"], "keep": [], "last": False}
    changed_index(tmp_path / "b", {"precision": precision, "space": "digits-000000000000"})
    given = load_digits_supernet()
    before = given.fingerprint(), given.space.id, given.precision, len(given.norms)
    with pytest.raises(ForeignSpec, match="give the supernet that was saved"):
        Engine.load(tmp_path / "b", supernet=given)
    assert (given.fingerprint(), given.space.id, given.precision, len(given.norms)) == before


def test_a_bundle_of_weights_that_change_while_they_are_copied_is_not_written(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And saving takes no lock that registering a subnet holds while it waits for the weights."""
    engine.save(tmp_path / "b")
    before, copied = (tmp_path / "b" / "elastic.json").read_text(), NormTable.to_like

    def training(table: NormTable, *norms: Any) -> NormTable:
        with torch.no_grad():
            engine.supernet.network.stem.weight.mul_(2)
        return copied(table, *norms)

    with monkeypatch.context() as patch:
        patch.setattr(NormTable, "to_like", training)
        with pytest.raises(StaleWeights, match="between two steps of the training"):
            engine.save(tmp_path / "b")
    assert (tmp_path / "b" / "elastic.json").read_text() == before
    other = engine.supernet.space.sample(1)
    calibrate(engine.supernet, [*engine.specs, other], [X])
    with engine.supernet.generation.lock:
        registering = threading.Thread(target=engine.register, args=(other,))
        registering.start()  # It waits for the weights, with its own lock held.
        registering.join(0.2)
        engine.save(tmp_path / "b")
    registering.join(60)
    assert not registering.is_alive()
    loaded = Engine.load(tmp_path / "b")
    assert loaded.fingerprint == engine.supernet.fingerprint()
    assert set(loaded.specs) <= set(engine.specs)


def test_new_weights_and_their_tables(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def table(supernet: str) -> LatencyTable:
        stamp = {"supernet": supernet, "dtype": "float32"}
        return LatencyTable(engine.keys, [1, 2, 3], [1], [[1], [2], [3]], stamp=stamp)

    engine.tables["cpu"] = table(engine.fingerprint)
    engine.save(tmp_path / "b")
    weekly = Engine.load(tmp_path / "b")  # The fingerprint is not asked for before the exchange.
    supernet = weekly.supernet
    other = {name: 2 * t if t.is_floating_point() else t for name, t in supernet.state_dict().items()}
    supernet.load_state_dict(other, norms=supernet.norms)
    weekly.save(tmp_path / "b")
    assert check_bundle([str(tmp_path / "b")]) == 0
    loaded = Engine.load(tmp_path / "b")
    assert loaded.fingerprint == weekly.fingerprint != engine.fingerprint
    assert loaded.tables["cpu"].stamp["supernet"] == loaded.fingerprint
    Batcher(loaded, table=loaded.tables["cpu"], slo_ms=1000).close()

    loaded.tables["cpu"] = table("0123456789abcdef")
    with pytest.raises(ProfileMismatch, match=r"tables\['cpu'\]: measured on supernet 0123456789abcdef"):
        loaded.save(tmp_path / "b")
    assert Engine.load(tmp_path / "b").fingerprint == loaded.fingerprint
    capsys.readouterr()
    supernet.save_pretrained(tmp_path / "c", tables={"cpu": table("0123456789abcdef")})
    assert check_bundle([str(tmp_path / "c")]) == 2
    served = Engine.load(tmp_path / "c", allow_uncalibrated=True)
    with pytest.raises(ProfileMismatch) as refused:
        Batcher(served, table=served.tables["cpu"], slo_ms=1000)
    assert str(refused.value) in capsys.readouterr().err, "the same check, before it is served"


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_the_fingerprint_follows_the_weights_and_ids_stay_when_precisions_are_enabled(
    engine: Engine, digits: Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = engine.fingerprint
    with torch.no_grad():
        next(digits.parameters()).mul_(2)
    assert engine.fingerprint == digits.fingerprint() != former
    with monkeypatch.context() as patch:
        patch.setattr(Supernet, "fingerprint", lambda _: "computed again")
        assert engine.fingerprint != "computed again"
    space, specs = digits.space, engine.specs
    engine = Engine(
        digits, [space.largest(), space.smallest()], example=EXAMPLE[None], allow_uncalibrated=True
    )
    extended = digits.enable_precision("int8")
    assert engine.register(extended.at_precision(specs[0], "float32")) == 1
    assert engine.register(extended.at_precision(specs[0], "int8")) == 2
    assert len(set(engine.keys)) == len(engine) == 3
    engine.save(tmp_path / "bundle")
    assert Engine.load(tmp_path / "bundle").keys == engine.keys
