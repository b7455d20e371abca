"""Every family with upstream outputs: actuated equals extracted equals upstream."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_families import without_skipped
from torch import Tensor, nn

import subnetact
from ofa_adapters import encode, load
from ofa_adapters.registry import family_of
from subnetact.operators import ElasticKernel
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/cases.json"))
CASES = [
    (family, case["name"])
    for family in FAMILIES
    for case in json.loads((GOLDEN / family / "cases.json").read_text())["cases"]
]
NORMED = [family for family in FAMILIES if family not in ("autoformer", "dynabert")]
PLAIN = {"atol": 5e-5, "rtol": 1e-5}


def test_all_six_families_have_goldens() -> None:
    mobile = ["compofa_mbv3", "dynabert", "ofa_mbv3", "ofa_proxyless", "ofa_resnet50"]
    assert ["autoformer", *mobile] == FAMILIES


def outputs(network: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return network(**inputs)


def find(cases: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(case for case in cases if case["name"] == name)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_subnets_equal_upstream(
    golden: Any, supernet_of: Callable[[str], Supernet], family: str, name: str
) -> None:
    upstream, supernet = golden(family), supernet_of(family)
    case = find(upstream.cases, name)
    spec = supernet.space.parse(case["config"])
    view, extracted = supernet.subnet(spec), supernet.extract(spec)
    expected = upstream.io[f"{name}.dynamic"]
    static = upstream.io.get(f"{name}.static", expected)
    torch.testing.assert_close(outputs(view, upstream.inputs), expected, **PLAIN)
    torch.testing.assert_close(outputs(extracted, upstream.inputs), static, **PLAIN)
    for key in ("static_params", "sampled_params_numel"):
        if key in case:
            assert sum(p.numel() for p in view.parameters()) == case[key]
            assert sum(p.numel() for p in extracted.parameters()) == case[key]
    for network in (view, extracted):
        if f"{name}.features" in upstream.io:
            features, _ = call_of(network.head, network, upstream.inputs)
            torch.testing.assert_close(features, upstream.io[f"{name}.features"], **PLAIN)
        if f"{name}.hidden" in upstream.io:
            _, hidden = call_of(network.layers[-1], network, upstream.inputs)
            torch.testing.assert_close(hidden, upstream.io[f"{name}.hidden"], **PLAIN)


def call_of(module: nn.Module, network: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the first argument and the output of a module while a network runs."""
    calls: list[tuple[Tensor, Tensor]] = []
    hook = module.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    with hook, torch.no_grad():
        network(**inputs)
    return calls[0]


@pytest.fixture(scope="module")
def calibrated(golden: Any) -> Callable[[str], Supernet]:
    @cache
    def make(family: str) -> Supernet:
        upstream, supernet = golden(family), golden(family).load()
        specs = [supernet.space.parse(case["config"]) for case in upstream.cases]
        subnetact.calibrate(supernet, specs, upstream.batches(), progress=False)
        return supernet

    return make


@pytest.mark.parametrize(("family", "name"), [case for case in CASES if case[0] in NORMED])
def test_calibrated_subnets_equal_upstream(golden: Any, calibrated: Any, family: str, name: str) -> None:
    upstream, supernet = golden(family), calibrated(family)
    spec = supernet.space.parse(find(upstream.cases, name)["config"])
    for network in (supernet.subnet(spec), supernet.extract(spec)):
        output = outputs(network, upstream.inputs)
        torch.testing.assert_close(output, upstream.io[f"{name}.calibrated"], atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("family", [f for f in NORMED if (GOLDEN / f / "bn_stats.safetensors").exists()])
@pytest.mark.parametrize("name", ["smallest", "random0"])
def test_calibrated_statistics_equal_upstream(calibrated: Any, golden: Any, family: str, name: str) -> None:
    supernet = calibrated(family)
    rename = family_of(family).rename
    expected = {
        rename(key.removeprefix(f"{name}.")): value
        for key, value in load_file(GOLDEN / family / "bn_stats.safetensors").items()
        if key.startswith(f"{name}.")
    }
    spec = supernet.space.parse(find(golden(family).cases, name)["config"])
    own = without_skipped(supernet.extract(spec))
    assert len(expected) == 2 * sum(key.endswith("running_mean") for key in own)
    for key, value in expected.items():
        torch.testing.assert_close(own[key], value, atol=2e-5, rtol=1e-5)


def test_kernels_made_by_matrices_are_shared_by_all_subnets(supernet_of: Any) -> None:
    supernet = supernet_of("ofa_mbv3")
    for seed in range(40):
        supernet.subnet(supernet.space.sample(seed))
    kernels = [m for m in supernet.network.modules() if isinstance(m, ElasticKernel)]
    assert len(kernels) == 20
    copies = [copy.tensors["weight"] for kernel in kernels for copy in kernel.packed_copies()]
    extra = sum(tensor.numel() for tensor in copies)
    assert {tensor.shape[-1] for tensor in copies} == {3, 5}
    full = sum(kernel.get_parameter("weight").numel() for kernel in kernels)
    assert 0 < extra <= full * (25 + 9) / 49


@pytest.fixture(scope="module")
def published() -> Callable[[str], Supernet]:
    """Networks at full size, without weights: tests count them and encode their subnets."""

    def make(family: str) -> Supernet:
        with torch.device("meta"):
            return load(family)

    return cache(make)


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("ofa_resnet50", 48_105_992),
        ("ofa_mbv3", 7_678_880),
        ("ofa_proxyless", 7_956_882),
        ("compofa_mbv3", 7_664_760),
        ("autoformer", 11_669_224),
        ("slimmable_resnet50", 25_557_032 + 2 * 26_560 * 3 // 2),
        ("us_mobilenet_v2", 3_504_872),
    ],
)
def test_published_networks_are_the_default(family: str, parameters: int) -> None:
    with torch.device("meta"):
        network, _, _ = family_of(family).build()
    assert sum(p.numel() for p in network.parameters()) == parameters


AUTOFORMERS = json.loads((GOLDEN / "autoformer" / "full_size_counts.json").read_text())["cases"]


@pytest.mark.parametrize("case", AUTOFORMERS, ids=lambda c: f"{c['model']}-{c['sampled_params_numel']}")
def test_parameters_of_published_autoformers(case: dict[str, Any]) -> None:
    with torch.device("meta"):
        supernet = load("autoformer", None, **case["constructor"])
        view = supernet.subnet(supernet.space.parse(case["config"]))
    assert sum(p.numel() for p in view.parameters()) == case["sampled_params_numel"]


FEATURES = [
    pytest.param(family, kind, i, id=f"{family}-{kind}-{i}")
    for family in NORMED
    if (GOLDEN / family / "arch_features.json").exists()
    for kind in ("cases", "tutorial128")
    for i in range(len(json.loads((GOLDEN / family / "arch_features.json").read_text()).get(kind, [])))
]


@pytest.mark.parametrize(("family", "kind", "index"), FEATURES)
def test_predictor_features_equal_upstream(published: Any, family: str, kind: str, index: int) -> None:
    facts = json.loads((GOLDEN / family / "arch_features.json").read_text())
    case, space = facts[kind][index], published(family).space
    size = case["arch"].get("image_size") or case["arch"]["r"]
    spec = space.parse(case["arch"])
    features = encode(space, spec, size, "tutorial" if kind == "tutorial128" else None)
    assert features.shape == (facts["n_dim"],)
    assert features.nonzero()[0].tolist() == case["one_indices"]
    assert set(features) <= {0.0, 1.0}
