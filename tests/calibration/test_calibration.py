"""Calibration: the rules of averaging, many subnets in one pass, all or nothing, and files of statistics."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import subnetact
from subnetact import Axis, SubnetNorm, SubnetSpace, WeightSlice
from subnetact.errors import FileFormatError, ForeignSpec, InsertError, SpecError
from subnetact.operators.layer_traits import is_batch_norm
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
*BATCHES, X = torch.randn(23, 1, 16, 16, generator=torch.Generator().manual_seed(3)).split([6, 10, 3, 4])


def specs_of(supernet: Supernet) -> list[SubnetSpec]:
    return [supernet.space.smallest(), supernet.space.sample(1), supernet.space.sample(2)]


def by_hand(network: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Apply the averaging rule to an extracted network, one BatchNorm after another."""
    sums: dict[str, list[torch.Tensor]] = {}

    def hook(name: str, norm: nn.Module) -> None:
        def normalise(module: nn.Module, args: tuple[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
            (x,) = args
            mean = x.mean((0, 2, 3))
            var = (x - mean.view(1, -1, 1, 1)).square().mean((0, 2, 3))
            total = sums.setdefault(name, [torch.zeros(()), torch.zeros_like(mean), torch.zeros_like(var)])
            total[0] += len(x)
            total[1] += len(x) * mean
            total[2] += len(x) * var
            return nn.functional.batch_norm(x, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps)

        norm.register_forward_hook(normalise)

    for name, module in network.named_modules():
        if is_batch_norm(module):
            hook(name, module)
    with torch.no_grad():
        for batch in BATCHES:
            network(batch)
    return {name: (mean / n, var / n) for name, (n, mean, var) in sums.items()}


def test_statistics_follow_the_weighted_biased_rule(digits: Supernet) -> None:
    for spec in specs_of(digits):
        expected = by_hand(digits.extract(spec))
        subnetact.calibrate(digits, [spec], BATCHES, progress=False)
        extracted = digits.extract(spec)
        assert digits.statistics.calibrated(spec)
        for name, (mean, var) in expected.items():
            norm = extracted.get_submodule(name)
            torch.testing.assert_close(norm.running_mean, mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(norm.running_var, var, rtol=1e-5, atol=1e-6)


def test_calibrating_one_subnet_moves_no_other_by_one_bit(digits: Supernet) -> None:
    a, b, c = specs_of(digits)
    subnetact.calibrate(digits, [b], BATCHES, progress=False)
    view_b, view_c = digits.subnet(b), digits.subnet(c)
    before = view_b(X), view_c(X), digits(X, subnet=b), {k: v.clone() for k, v in digits.state_dict().items()}
    subnetact.calibrate(digits, [a], [10 * batch for batch in BATCHES], progress=False)
    assert torch.equal(view_b(X), before[0])
    assert torch.equal(view_c(X), before[1])
    assert torch.equal(digits(X, subnet=b), before[2])
    assert all(torch.equal(v, before[3][k]) for k, v in digits.state_dict().items())


def test_many_at_once_equal_one_at_a_time(digits: Supernet) -> None:
    specs = specs_of(digits)
    subnetact.calibrate(digits, specs, iter(BATCHES), progress=False)
    together = [digits.norms.get(spec).flat.clone() for spec in specs]
    for spec, row in zip(specs, together, strict=True):
        subnetact.calibrate(digits, [spec], BATCHES, progress=False)
        assert torch.equal(digits.norms.get(spec).flat, row)


def test_interruption_changes_nothing(digits: Supernet) -> None:
    spec, other, _ = specs_of(digits)
    subnetact.calibrate(digits, [spec], BATCHES, progress=False)
    before = digits(X, subnet=spec)

    def interrupted() -> Iterator[torch.Tensor]:
        yield 5 * BATCHES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subnetact.calibrate(digits, [spec, other], interrupted(), progress=False)
    assert torch.equal(digits(X, subnet=spec), before)
    assert not digits.statistics.calibrated(other)


def test_no_batches_and_foreign_specs_are_refused(digits: Supernet) -> None:
    with pytest.raises(SpecError, match="at least one batch"):
        subnetact.calibrate(digits, specs_of(digits), [], progress=False)
    with pytest.raises(SpecError):
        subnetact.calibrate(digits, [SubnetSpec("other", ())], BATCHES, progress=False)
    assert len(digits.norms) == 0


def test_calibrating_the_active_subnet_takes_effect(digits: Supernet) -> None:
    spec = specs_of(digits)[0]
    digits.actuate(spec)
    before = digits(X)
    subnetact.calibrate(digits, [spec], BATCHES, progress=False)
    assert not torch.equal(digits(X), before)
    assert torch.equal(digits(X), digits.extract(spec)(X))


def test_a_table_round_trips_and_is_a_drop_in(digits: Supernet, tmp_path) -> None:
    specs = specs_of(digits)
    subnetact.calibrate(digits, specs, BATCHES, progress=False)
    expected = [digits(X, subnet=spec) for spec in specs]
    digits.norms.save(tmp_path / "norms.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["norms.safetensors"]
    digits.norms = NormTable(digits.space.id)
    assert not digits.statistics.calibrated(specs[0])
    loaded = NormTable.load(tmp_path / "norms.safetensors")
    assert list(loaded) == list(dict.fromkeys(specs))
    digits.norms = loaded
    for spec, output in zip(specs, expected, strict=True):
        assert torch.equal(digits(X, subnet=spec), output)
    assert loaded.nbytes() == sum(r.numel() * 4 for r in load_file(tmp_path / "norms.safetensors").values())


def test_damaged_and_foreign_files_are_refused(digits: Supernet, tmp_path) -> None:
    subnetact.calibrate(digits, specs_of(digits), BATCHES, progress=False)
    path = tmp_path / "norms.safetensors"
    digits.norms.save(path)
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(FileFormatError, match=r"norms\.safetensors"):
            NormTable.load(path)
    path.write_text(json.dumps({"norms": 1}))
    with pytest.raises(FileFormatError):
        NormTable.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(FileFormatError, match="not a norm table"):
        NormTable.load(path)
    document = {"kind": "subnetact.norms", "schema": 99, "space": "x", "rows": []}
    save_file({"a": torch.zeros(1)}, path, {"document": json.dumps(document)})
    with pytest.raises(FileFormatError, match="schema 99"):
        NormTable.load(path)
    with pytest.raises(ForeignSpec):
        digits.norms = NormTable("other-space")
    with pytest.raises(ForeignSpec):
        digits.norms.update({SubnetSpec("other", ()): NormRow({}, torch.zeros(0))})


def test_rows_of_other_sizes_are_refused(digits: Supernet) -> None:
    small, large = digits.space.smallest(), digits.space.largest()
    subnetact.calibrate(digits, [large], BATCHES, progress=False)
    digits.norms.update({small: digits.norms.get(large)})
    with pytest.raises(SpecError, match="channels, its statistics"):
        digits.subnet(small)
    with pytest.raises(SpecError, match="needs shape"):
        NormRow({"a": 3}, torch.zeros(5))


def test_bad_batches_commit_nothing(digits: Supernet) -> None:
    spec = digits.space.smallest()
    for batches, message in (
        ([BATCHES[0], torch.full((2, 1, 16, 16), float("nan"))], "not finite, first at bn"),
        ([BATCHES[0], torch.zeros(0, 1, 16, 16)], "a calibration batch is a tensor"),
        ([{"image": BATCHES[0]}], "unexpected keyword argument 'image'"),
        ([{"image": "x"}], "got a dictionary of 'image'"),
        (BATCHES[0], "write \\[spec\\] and \\[batch\\]"),
    ):
        with pytest.raises(SpecError, match=message):
            subnetact.calibrate(digits, [spec], batches, progress=False)
    assert not digits.statistics.calibrated(spec)


def test_pairs_of_images_and_labels_and_inference_mode_do(digits: Supernet) -> None:
    spec = digits.space.smallest()
    subnetact.calibrate(digits, [spec], BATCHES, progress=False)
    expected = digits.norms.get(spec).flat
    pairs = [(b, torch.zeros(len(b))) for b in BATCHES]
    with pytest.raises(
        SpecError, match=r"a torch\.float32 tensor of shape \(.*too many.*give calibrate labels=True"
    ):
        subnetact.calibrate(digits, [spec], pairs, progress=False)
    with torch.inference_mode():
        subnetact.calibrate(digits, [spec], pairs, progress=False, labels=True)
    row = digits.norms.get(spec).flat
    assert torch.equal(row, expected)
    assert not row.is_inference()


class ActivatedNorm(nn.BatchNorm2d):
    """A BatchNorm that does more than normalise, as in timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


def test_a_batchnorm_that_also_activates_is_calibrated_as_it_runs() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), ActivatedNorm(4), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)
    ).eval()
    space = subnetact.SubnetSpace(
        "s", [subnetact.Axis.uniform("c", ["it"], [2, 4])], lambda v: {"c": v["c"][0]}
    )
    elastic = {
        "0": subnetact.WeightSlice.on(out="c"),
        "1": subnetact.SubnetNorm.on(channels="c"),
        "2": subnetact.WeightSlice.on(in_="c"),
    }
    supernet = subnetact.insert_(network, space, elastic)
    spec = space.smallest()
    x = BATCHES[0]
    subnetact.calibrate(supernet, [spec], [x], progress=False)
    hidden = supernet.extract(spec)[0](x)
    hidden = nn.functional.relu(nn.functional.batch_norm(hidden, None, None, training=True))
    hidden = supernet.extract(spec)[2](hidden)
    torch.testing.assert_close(
        supernet.extract(spec)[3].running_mean, hidden.mean((0, 2, 3)), rtol=1e-4, atol=1e-5
    )
    one, other = supernet.subnet(spec), supernet.subnet(space.largest())
    assert one[1].act is not other[1].act


def test_rows_that_lack_a_norm_and_tables_of_another_dtype(digits: Supernet) -> None:
    spec = digits.space.smallest()
    subnetact.calibrate(digits, [spec], BATCHES, progress=False)
    row = digits.norms.get(spec)
    expected = digits(X, subnet=spec)
    doubled = NormTable(digits.space.id)
    doubled.update({spec: NormRow(row.channels, row.flat.double())})
    digits.norms = doubled
    assert doubled.get(spec).flat.dtype == torch.float64
    torch.testing.assert_close(digits(X, subnet=spec), expected)
    digits.norms.update(doubled.rows)
    torch.testing.assert_close(digits(X, subnet=spec), expected)
    digits.norms.update({spec: row})
    assert digits.norms.get(spec) is row
    pairs = row.pairs()
    pairs.pop("bn")
    digits.norms.update({spec: NormRow.of(pairs)})
    with pytest.raises(SpecError, match="lack bn; calibrate it again"):
        digits.subnet(spec)


def test_a_network_without_batchnorm_needs_no_calibration() -> None:
    space = subnetact.SubnetSpace(
        "s", [subnetact.Axis.uniform("c", ["it"], [2, 4])], lambda v: {"c": v["c"][0]}
    )
    from subnetact.operators import WeightSlice

    supernet = subnetact.insert_(nn.Sequential(nn.Linear(3, 4)), space, {"0": WeightSlice.on(out="c")})
    subnetact.calibrate(supernet, [space.smallest()], [], progress=False)
    assert supernet.statistics.calibrated(space.smallest())


def test_a_description_that_forgets_a_module_is_told_where() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1), nn.BatchNorm2d(2)
    ).eval()
    space = SubnetSpace("own", [Axis.uniform("w", ["all"], [4, 8])], lambda v: {"width": v["w"][0]})
    out = {"0": WeightSlice.on(out="width"), "3": SubnetNorm.on()}
    batch = torch.randn(2, 3, 4, 4)
    for elastic, told in (
        (out, r'1 \(BatchNorm2d\): .* describe this module: "1": SubnetNorm\.on\(channels'),
        (
            {**out, "1": SubnetNorm.on(channels="width")},
            r'2 \(Conv2d\): .* describe this module: "2": WeightSlice\.on\(in_',
        ),
    ):
        supernet = subnetact.insert_(copy.deepcopy(network), space, elastic)
        with pytest.raises(InsertError, match=rf"calibrate: w=4 does not run on .* \(2, 3, 4, 4\): {told}"):
            subnetact.calibrate(supernet, list(space.enumerate()), [batch], progress=False)
        assert len(supernet.norms) == 0
        with pytest.raises(SpecError, match=r"0 \(Conv2d\): .*; give batches that the network takes"):
            subnetact.calibrate(supernet, [space.largest()], [batch[:, :2]], progress=False)


class Counting(nn.Module):
    """Counts the inputs that it has seen, in a buffer that torch takes for a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.norm(self.conv(x))  # type: ignore[no-any-return]


def test_a_network_whose_forward_writes_into_its_buffers_is_calibrated() -> None:
    """The forward passes of a check and of a calibration write into copies, so no weights change."""
    space = SubnetSpace("counting", [Axis.uniform("w", ["all"], (2, 4))], lambda v: {"w": v["w"][0]})
    elastic = {"conv": WeightSlice.on(out="w"), "norm": SubnetNorm.on(channels="w")}
    supernet = subnetact.insert_(Counting().eval(), space, elastic)
    for spec in space.enumerate():
        expected = by_hand(supernet.extract(spec))
        subnetact.calibrate(supernet, [spec], BATCHES, progress=False)
        for own, reference in zip(supernet.statistics(spec)["norm"], expected["norm"], strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-6)
    assert supernet.network.seen.tolist() == [0, 0]
