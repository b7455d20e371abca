"""Corrections: what they compute, that they help where they are kept, and where they go with their subnet."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_decoders import small_decoder
from torch import Tensor, nn

from subnetact import Engine, calibrate, from_pretrained, insert_, reorder_
from subnetact.calibration.corrections import fitted
from subnetact.digits import load_digits_supernet
from subnetact.errors import ExportError, PrecisionError, SpecError, UncalibratedSubnetWarning
from subnetact.export import to_torchscript
from subnetact.operators.correction import Correction
from subnetact.spec import SubnetSpec
from subnetact.supernet import NormRow, NormTable, Supernet
from subnetact.supernet.bind import packed_bytes

RANK = 8


class Block(nn.Module):
    """A block of a vision transformer before norms or, as in BERT, after them."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.norm, self.other, self.after = nn.LayerNorm(16), nn.LayerNorm(16), after
        self.mix, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.after:
            x = self.norm(x + self.dropout(self.mix(x)))
            return self.other(x + self.dropout(self.down(self.up(x).relu())))
        x = x + self.mix(self.norm(x))
        return x + self.dropout(self.down(self.up(self.other(x)).relu()))


class Stream(nn.Module):
    def __init__(self, after: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(12, 16), nn.Linear(16, 5)
        self.blocks = nn.Sequential(*(Block(after) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(1))


def vectors(seed: int, count: int = 64) -> Tensor:
    return torch.randn(count, 8, 12, generator=torch.Generator().manual_seed(seed))


def stream(after: bool = False) -> tuple[Supernet, list[Any], Any]:
    torch.manual_seed(0)
    model = Stream(after).eval()
    axes = ("ffn", "depth")
    supernet = insert_(model, example=vectors(0)[:1], axes=axes, each_block=True)
    return supernet, list(vectors(1).split(16)), vectors(2, 16)


def decoder() -> tuple[Supernet, list[Any], Any]:
    def tokens(seed: int) -> list[Any]:
        drawn = torch.randint(3, 50, (64, 16), generator=torch.Generator().manual_seed(seed))
        return [{"input_ids": part, "use_cache": False} for part in drawn.split(16)]

    model = small_decoder("LlamaConfig", num_hidden_layers=4)
    axes = ("ffn", "heads", "depth")
    supernet = insert_(model, example=tokens(0)[0], axes=axes, each_block=True)
    return supernet, tokens(1), tokens(2)[0]


MODELS: dict[str, Callable[[], Any]] = {"before": stream, "after": lambda: stream(True), "decoder": decoder}


def run(network: Any, x: Any, **options: Any) -> Tensor:
    output = network(**x, **options) if isinstance(x, dict) else network(x, **options)
    return output if isinstance(output, Tensor) else output.logits


def narrow(supernet: Supernet) -> list[SubnetSpec]:
    """Return the smallest subnet, which skips blocks, and one that keeps them all."""
    space = supernet.space
    values = {axis.name: [slot.choices[0] for slot in axis.slots] for axis in space.axes}
    values["depth"] = [slot.choices[-1] for slot in next(a for a in space.axes if a.name == "depth").slots]
    return [space.smallest(), space.spec(**values)]


@cache
def corrected(name: str) -> tuple[Supernet, list[SubnetSpec], Any, list[float]]:
    """Return a supernet with corrected subnets, another batch, and how far they were off without them."""
    supernet, batches, x = MODELS[name]()
    specs = narrow(supernet)
    whole = run(supernet, x, subnet=supernet.space.largest())
    before = [float((run(supernet, x, subnet=spec) - whole).square().mean()) for spec in specs]
    report = calibrate(
        supernet, [*specs, supernet.space.largest()], batches, corrections=RANK, progress=False
    )
    assert report.subnets == len(specs)
    assert report.corrected == {spec: len(supernet.norms.get(spec).corrected) for spec in specs}  # type: ignore[union-attr]
    assert "corrections of" in str(report)
    return supernet, specs, x, before


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_other_inputs_come_closer_to_the_largest_subnet_by_a_few_numbers_of_layers_that_are_cut(
    name: str,
) -> None:
    supernet, specs, x, before = corrected(name)
    whole = run(supernet, x, subnet=supernet.space.largest())
    assert supernet.norms.get(supernet.space.largest()) is None
    shared = {p.untyped_storage().data_ptr() for p in supernet.parameters()}
    for spec, former in zip(specs, before, strict=True):
        assert float((run(supernet, x, subnet=spec) - whole).square().mean()) < 0.95 * former
        row, view = supernet.norms.rows[spec], supernet.subnet(spec)
        own = [p for n, p in view.named_parameters() if "correction_" not in n]
        packed = packed_bytes(supernet.network)
        assert sum(p.nbytes for p in own if p.untyped_storage().data_ptr() not in shared) <= packed
        assert row.nbytes == sum(t.nbytes for one in row.corrections().values() for t in one)
        assert row.corrected
        for path in row.corrected:
            full: Any = supernet.network.get_submodule(path)
            kept: Any = view.get_submodule(path)
            assert (
                not hasattr(kept, "weight")
                or kept.weight.shape != full.template.weight.shape
                or kept.in_features < full.template.in_features
            )


def test_a_view_adds_what_the_original_weights_with_the_correction_in_them_compute(name: str) -> None:
    supernet, specs, x, _ = corrected(name)
    for spec in specs:
        row = supernet.norms.get(spec)
        assert row is not None
        table, supernet.norms = supernet.norms, NormTable(supernet.space.id)
        plain = supernet.extract(spec)
        supernet.norms = table
        for path, (down, up, bias) in row.corrections().items():
            layer: Any = plain.get_submodule(path)
            if not hasattr(layer, "weight"):  # It is skipped.
                layer.register_forward_hook(
                    lambda _, args, y, d=down, u=up, b=bias: y + y @ d.t() @ u.t() + b
                )
                continue
            layer.weight.data += up @ down
            layer.bias = nn.Parameter(bias if layer.bias is None else layer.bias + bias)
        expected = run(plain, x)
        for network in (supernet.subnet(spec), supernet.extract(spec)):
            torch.testing.assert_close(run(network, x), expected, rtol=0, atol=5e-5)
        with supernet.running(spec):
            torch.testing.assert_close(run(supernet.network, x), expected, rtol=0, atol=5e-5)


def extracted_and_saved(supernet: Supernet, spec: SubnetSpec, x: Any, folder: Path) -> Any:
    torch.save(supernet.extract(spec).state_dict(), folder / "subnet.pt")
    other = supernet.extract(spec)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(torch.load(folder / "subnet.pt"))
    return run(other, x)


def table_saved(supernet: Supernet, spec: SubnetSpec, x: Any, folder: Path) -> Any:
    supernet.norms.save(folder / "norms.safetensors")
    other = copy.deepcopy(supernet)
    other.norms = NormTable.load(folder / "norms.safetensors")
    return run(other, x, subnet=spec)


def bundled(supernet: Supernet, spec: SubnetSpec, x: Any, folder: Path) -> Any:
    supernet.save_pretrained(folder / "bundle", subnets={"small": spec})
    model = {"model": Stream()} if isinstance(x, Tensor) else {}
    return run(from_pretrained(folder / "bundle", **model, subnet="small"), x)


def served(supernet: Supernet, spec: SubnetSpec, x: Any, folder: Path) -> Any:
    if not isinstance(x, Tensor):
        return run(supernet, x, subnet=spec)
    engine = Engine(supernet, [spec], example=x[:1])
    engine.prepare((len(x),))
    return torch.stack([torch.as_tensor(row) for row in engine.run(0, list(x), len(x))])


DOORS: dict[str, Callable[[Supernet, SubnetSpec, Any, Path], Any]] = {
    "copied": lambda s, spec, x, _: run(copy.deepcopy(s), x, subnet=spec),
    "extracted and pickled": lambda s, spec, x, _: run(pickle.loads(pickle.dumps(s.extract(spec))), x),
    "extracted and saved": extracted_and_saved,
    "table saved": table_saved,
    "bundled": bundled,
    "served": served,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["before", "decoder"])
def test_what_a_corrected_subnet_answers_stays_the_same(name: str, door: str, tmp_path: Path) -> None:
    supernet, specs, x, _ = corrected(name)
    for spec, place in zip(specs, ("one", "other"), strict=True):
        (tmp_path / place).mkdir()
        expected = run(supernet, x, subnet=spec)
        found = DOORS[door](supernet, spec, x, tmp_path / place)
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


def test_corrections_go_with_the_weights_that_they_were_measured_on() -> None:
    supernet, batches, x = stream()
    specs = narrow(supernet)
    calibrate(supernet, specs, batches, corrections=RANK, progress=False)
    state = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    supernet.load_state_dict(state)
    assert set(supernet.norms) == set(specs)
    supernet.to(torch.bfloat16)
    assert run(supernet, x.bfloat16(), subnet=specs[0]).isfinite().all()
    supernet.float()
    with pytest.warns(UncalibratedSubnetWarning, match="dropped"):
        supernet.load_state_dict({name: 0.9 * tensor for name, tensor in state.items()})
    assert not len(supernet.norms)
    calibrate(supernet, specs, batches, corrections=RANK, progress=False)
    supernet.norms.drop(specs[:1])
    assert set(supernet.norms) == {specs[1]}
    with pytest.warns(UncalibratedSubnetWarning):
        reorder_(supernet, example=x)  # Features have changed places.
    assert not len(supernet.norms)


def test_a_lower_precision_adds_the_same_and_cannot_be_merged() -> None:
    supernet, batches, x = stream()
    spec = narrow(supernet)[1]
    calibrate(supernet, [spec], batches, corrections=RANK, progress=False)
    space = supernet.enable_precision("bfloat16")
    low = space.at_precision(spec, "bfloat16")
    torch.testing.assert_close(run(supernet, x, subnet=low), run(supernet, x, subnet=spec), rtol=0, atol=0.05)
    with pytest.raises(PrecisionError, match="cannot be merged"):
        supernet.extract(low)


def test_a_fit_is_kept_only_where_it_helps_other_samples() -> None:
    draw = torch.Generator().manual_seed(0)
    x, noise = torch.randn(4096, 24, generator=draw), torch.randn(4096, 12, generator=draw)
    down, up = torch.randn(3, 24, generator=draw), torch.randn(12, 3, generator=draw)
    missing = x @ down.t() @ up.t() + 2.0
    correction = fitted(x, missing, 3)
    assert correction is not None
    left = missing - correction(x)
    assert float(left.square().mean()) < 0.1 * float((missing - missing.mean(0)).square().mean())
    assert fitted(x, noise - noise.mean(0), 8) is None


def test_padding_teaches_nothing() -> None:
    supernet, batches, _ = decoder()
    spec, flats = narrow(supernet)[1], []
    for padding in (3, 40):
        padded = [dict(batch, input_ids=batch["input_ids"].clone()) for batch in batches]
        for batch in padded:
            batch["input_ids"][:, 12:] = padding
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][:, 12:] = 0
        calibrate(supernet, [spec], padded, corrections=RANK, progress=False)
        row = supernet.norms.get(spec)
        assert row is not None
        flats.append([up @ down for down, up, _ in row.corrections().values()])
    torch.testing.assert_close(*flats, rtol=0, atol=1e-4)


def test_what_cannot_be_corrected_written_or_read_is_refused(tmp_path: Path) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        *(({"corrections": wrong}, "is no rank") for wrong in (-1, 1.5, True)),
        ({"batches": []}, "at least one batch"),
        ({"batches": [vectors(0, 4)[:, :1]]}, "too few for rank 8"),
        ({"batches": [vectors(0), vectors(0)[:, :4]]}, "batches of one shape"),
        ({"supernet": load_digits_supernet()}, "for networks without BatchNorm"),
        ({"resume": "state.jsonl"}, "leave out resume"),
    ]
    supernet, batches, _ = stream()
    for change, words in refusals:
        options = {"supernet": supernet, "batches": batches, "corrections": RANK, **change}
        with pytest.raises(SpecError, match=words):
            calibrate(specs=[options["supernet"].space.smallest()], **options)
    supernet, specs, x, _ = corrected("before")
    with pytest.raises(ExportError, match="use to_onnx or to_pt2"):
        to_torchscript(Engine(supernet, specs, example=x[:1]), tmp_path / "model.pt")
    with pytest.raises(SpecError, match="needs shape"):
        NormRow({}, torch.zeros(7), {"layer": (2, 3, 4)})
    row = NormRow.of({}, {"layer": Correction(torch.ones(2, 3), torch.ones(4, 2), torch.ones(4))})
    assert row.corrections()["layer"](torch.ones(3)).tolist() == [7.0] * 4
