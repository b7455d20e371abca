"""OFA-ResNet50 against its golden outputs and, at full size, against the live upstream package."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_families import without_skipped

import subnetact
from ofa_adapters import families, load
from ofa_adapters.registry import family_of
from subnetact.errors import CheckpointError, IllegalChoice, SpecError
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
GOLDEN = Path(__file__).parents[1] / "golden" / "ofa_resnet50"
FACTS = json.loads((GOLDEN / "cases.json").read_text())
CASES = {case["name"]: case for case in FACTS["cases"]}
IO = load_file(GOLDEN / "io.safetensors")


def golden_state() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "state_dict.safetensors")


@pytest.fixture(scope="module")
def golden() -> Supernet:
    return load("ofa_resnet50", golden_state(), **FACTS["constructor"])


@pytest.fixture(scope="module")
def calibrated() -> Supernet:
    supernet = load("ofa_resnet50", GOLDEN / "state_dict.safetensors", **FACTS["constructor"])
    batches = [IO[name].float() for name in FACTS["calibration"]["tensors"]]
    specs = [supernet.space.parse(case["config"]) for case in CASES.values()]
    subnetact.calibrate(supernet, specs, batches, progress=False)
    return supernet


@pytest.mark.parametrize("name", CASES)
def test_views_and_extracted_networks_equal_upstream(golden: Supernet, name: str) -> None:
    spec = golden.space.parse(CASES[name]["config"])
    extracted = golden.extract(spec)
    torch.testing.assert_close(golden.subnet(spec)(IO["input"]), IO[f"{name}.dynamic"], atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(extracted(IO["input"]), IO[f"{name}.static"], atol=5e-5, rtol=1e-5)
    assert sum(p.numel() for p in extracted.parameters()) == CASES[name]["static_params"]


@pytest.mark.parametrize("name", CASES)
def test_calibrated_subnets_equal_upstream(calibrated: Supernet, name: str) -> None:
    spec = calibrated.space.parse(CASES[name]["config"])
    output = calibrated(IO["input"], subnet=spec)
    torch.testing.assert_close(output, IO[f"{name}.calibrated"], atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("name", FACTS["bn_stats_file"]["cases"])
def test_calibrated_statistics_equal_upstream(calibrated: Supernet, name: str) -> None:
    rename = family_of("ofa_resnet50").rename
    expected = {
        rename(key.removeprefix(f"{name}.")): value
        for key, value in load_file(GOLDEN / "bn_stats.safetensors").items()
        if key.startswith(f"{name}.")
    }
    own = without_skipped(calibrated.extract(calibrated.space.parse(CASES[name]["config"])))
    if not any(key.startswith("input_stem.2") for key in own):
        assert "input_stem.1.bn.running_mean" in expected
    assert len(expected) == 2 * sum(key.endswith("running_mean") for key in own)
    for key, value in expected.items():
        torch.testing.assert_close(own[key], value, atol=2e-5, rtol=1e-5)


def test_configurations_round_trip(golden: Supernet) -> None:
    for case in CASES.values():
        spec = golden.space.parse(case["config"])
        assert golden.space.parse(golden.space.format(spec)) == spec


def full_size_counts() -> list[dict[str, Any]]:
    return json.loads((GOLDEN / "full_size_counts.json").read_text())["cases"]


@pytest.fixture(scope="module")
def published() -> Supernet:
    torch.manual_seed(0)
    return load("ofa_resnet50")


def test_the_published_size_is_the_default(published: Supernet) -> None:
    assert sum(p.numel() for p in published.parameters()) == 48_105_992
    sizes = dict(
        zip(published.space.dimensions, published.space.resolve(published.space.smallest()), strict=True)
    )
    assert [sizes[f"stage{i}"] for i in (1, 2, 3, 4)] == [168, 336, 664, 1328]
    assert (sizes["stem.mid"], sizes["stem.out"], sizes["stem.keep"]) == (24, 40, 0)


@pytest.mark.parametrize("case", full_size_counts(), ids=lambda c: str(c["params"]))
def test_parameter_counts_at_full_size(published: Supernet, case: dict[str, Any]) -> None:
    view = published.subnet(published.space.parse(case["config"]))
    assert sum(p.numel() for p in view.parameters()) == case["params"]
    assert sum(not isinstance(block, SkippedLayer) for block in view.blocks) == case["n_blocks"]


def randomise(module: torch.nn.Module, generator: torch.Generator) -> None:
    for name, tensor in module.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("running_mean") or (tensor.dim() == 1 and name.endswith("bias")):
            tensor.normal_(0, 0.1, generator=generator)
        elif tensor.dim() == 1 and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.0, generator=generator)


def test_live_upstream_at_full_size() -> None:
    from ofa.imagenet_classification.elastic_nn.networks import OFAResNets

    torch.manual_seed(0)
    upstream = OFAResNets(
        n_classes=10,
        depth_list=[0, 1, 2],
        expand_ratio_list=[0.2, 0.25, 0.35],
        width_mult_list=[0.65, 0.8, 1.0],
    ).eval()
    randomise(upstream, torch.Generator().manual_seed(1))
    supernet = load("ofa_resnet50", upstream.state_dict(), n_classes=10)
    x = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(2))
    specs = supernet.space.sample(4, 4)
    for spec in specs:
        upstream.set_active_subnet(**supernet.space.format(spec))
        with torch.no_grad():
            expected = upstream(x)
            static = upstream.get_active_subnet(preserve_weight=True).eval()(x)
        torch.testing.assert_close(supernet.subnet(spec)(x), expected, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(supernet.extract(spec)(x), static, atol=5e-5, rtol=1e-5)
        assert expected.std() > 1e-3


def test_live_upstream_statistics() -> None:
    from ofa.imagenet_classification.elastic_nn.networks import OFAResNets
    from ofa.imagenet_classification.elastic_nn.utils import set_running_statistics

    torch.manual_seed(1)
    lists = {k: v for k, v in FACTS["constructor"].items() if k.endswith("list")}
    upstream = OFAResNets(n_classes=4, **{k: list(v) for k, v in lists.items()}).eval()
    supernet = load("ofa_resnet50", upstream.state_dict(), n_classes=4, **lists)
    spec = supernet.space.sample(3)
    upstream.set_active_subnet(**supernet.space.format(spec))
    batches = [torch.randn(n, 3, 48, 48) for n in (5, 3)]
    set_running_statistics(upstream, [(batch, torch.zeros(len(batch))) for batch in batches])
    subnetact.calibrate(supernet, [spec], batches, progress=False)
    with torch.no_grad():
        expected = upstream(batches[0])
    torch.testing.assert_close(supernet(batches[0], subnet=spec), expected, atol=2e-4, rtol=1e-5)


SPACE = family_of("ofa_resnet50").build()[1]


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_any_configuration_round_trips_at_full_size(seed: int) -> None:
    space = SPACE
    spec = space.sample(seed)
    config = space.format(spec)
    assert space.parse(config) == spec
    assert len(config["d"]) == 5
    assert len(config["e"]) == 18
    assert len(config["w"]) == 6


# -- names and damaged files ------------------------------------------------------------------------


def static_style(key: str) -> str:
    """Drop one level of each dynamic wrapper, as an extracted network names its tensors."""
    key = re.sub(r"\.conv\.conv\.weight$", ".conv.weight", key)
    key = re.sub(r"\.bn\.bn\.", ".bn.", key)
    return key.replace("linear.linear.", "linear.")


@pytest.mark.parametrize(
    "change",
    [
        static_style,
        lambda key: f"module.{key}",
    ],
)
def test_other_key_styles_load(golden: Supernet, change: Any) -> None:
    other = load("ofa_resnet50", {change(k): v for k, v in golden_state().items()}, **FACTS["constructor"])
    assert other.fingerprint() == golden.fingerprint()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_files_and_wrappers_load(golden: Supernet, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"checkpoint{suffix}"
    if suffix == ".pth":
        torch.save({"epoch": 3, "state_dict": golden_state()}, path)
    else:
        save_file(golden_state(), path)
    assert load("ofa_resnet50", path, **FACTS["constructor"]).fingerprint() == golden.fingerprint()
    whole = path.read_bytes()
    for cut in (10, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="checkpoint"):
            load("ofa_resnet50", path, **FACTS["constructor"])


def test_a_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match="more than tensors"):
        load("ofa_resnet50", tmp_path / "evil.pth")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match="no such file"):
        load("ofa_resnet50", tmp_path / "absent.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match="holds no state_dict"):
        load("ofa_resnet50", tmp_path / "list.pth")


def test_missing_extra_and_misshaped_tensors_are_listed() -> None:
    state = golden_state()
    state["blocks.0.conv9.conv.conv.weight"] = state.pop("blocks.0.conv1.conv.conv.weight")
    state["classifier.linear.linear.bias"] = torch.zeros(3)
    with pytest.raises(CheckpointError) as error:
        load("ofa_resnet50", state, **FACTS["constructor"])
    for words in (
        "1 missing: blocks.0.conv1.weight",
        "1 extra: blocks.0.conv9.conv.conv.weight",
        "classifier.linear.linear.bias (3,) should be (11,)",
    ):
        assert words in str(error.value)
    with pytest.raises(CheckpointError, match="constructor arguments"):
        load("ofa_resnet50", golden_state())


def test_upstreams_own_notation_is_validated(golden: Supernet) -> None:
    parse = golden.space.parse
    with pytest.raises(SpecError, match=r"exactly the keys d, e, w; got \['d', 'e', 'ks'\]"):
        parse({"ks": 3, "e": 0.1, "d": 0})
    with pytest.raises(IllegalChoice, match=r"w: 3 is not an index .* choose from 0\.\.2"):
        parse({"d": 0, "e": 0.1, "w": 3})
    with pytest.raises(IllegalChoice, match="w: -1"):
        parse({"d": 0, "e": 0.1, "w": [-1, 0, 0, 0, 0, 0]})
    with pytest.raises(IllegalChoice, match=r"expand\[0\] \(block0\): 0.9 .* choose from 0.1, 0.15"):
        parse({"d": 1, "e": 0.9, "w": 1})
    with pytest.raises(IllegalChoice, match=r"depth\[1\] \(stage1\): 9"):
        parse({"d": [1, 9, 0, 0, 0], "e": 0.1, "w": 1})
    with pytest.raises(SpecError, match="expand has 14 slots"):
        parse({"d": 1, "e": [0.1] * 18, "w": 1})


def test_unknown_families_and_arguments_are_named() -> None:
    assert "ofa_resnet50" in families()
    with pytest.raises(SpecError, match=r"unknown family 'resnet'; choose from .*ofa_resnet50"):
        load("resnet")
    with pytest.raises(SpecError, match="no constructor argument width_mult"):
        load("ofa_resnet50", width_mult=1.0)
    for wrong in ([], [-1], ["a"], None, [float("nan")], [True]):
        with pytest.raises(SpecError, match="one or more numbers"):
            load("ofa_resnet50", width_mult_list=wrong)


def test_a_damaged_legacy_file_loads_to_equal_weights_or_is_refused(golden: Supernet, tmp_path: Path) -> None:
    path = tmp_path / "legacy.pth"
    torch.save({"state_dict": golden_state()}, path, _use_new_zipfile_serialization=False)
    whole, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(40):
        damaged = bytearray(whole)
        at = rng.randrange(len(whole) // 100)
        damaged[at : at + 3] = bytes(rng.randrange(256) for _ in range(3))
        path.write_bytes(damaged[: rng.choice([len(whole), at + 50])])
        try:
            supernet = load("ofa_resnet50", path, **FACTS["constructor"])
        except CheckpointError:
            refused += 1
        else:
            assert supernet.fingerprint() == golden.fingerprint()
    assert refused > 20
