"""AttentiveNAS against an independent functional reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attentivenas_reference import CONFIG, WITHOUT_HEAD, reference, upstream_state

import subnetact
from ofa_adapters import encode, load
from ofa_adapters.registry import family_of
from subnetact.errors import IllegalChoice, SpecError
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


@pytest.fixture(scope="module", params=[CONFIG, WITHOUT_HEAD], ids=["v3 head", "one convolution"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def supernet(config: dict[str, Any]) -> Supernet:
    wrapped = {"state_dict": {f"module.{key}": value for key, value in upstream_state(config).items()}}
    return load("attentivenas", wrapped, supernet_cfg=config, n_classes=5)


def test_weights_are_written_with_upstreams_names(written_back: Any, config: dict[str, Any]) -> None:
    state = upstream_state(config)
    written = written_back("attentivenas", state, "bn_tracking", supernet_cfg=config, n_classes=5)
    assert written["first_conv.bn.bn_tracking.1.running_var"].eq(1).all()  # never used, but upstream wants it


X = torch.randn(6, 3, 48, 48, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("seed", range(5))
def test_subnets_equal_the_reference(supernet: Supernet, config: dict[str, Any], seed: int) -> None:
    """The statistics are those of one batch, whose variance is not unbiased."""
    space = supernet.space
    spec = [space.smallest(), space.largest()][seed] if seed < 2 else space.sample(seed)
    expected = reference(upstream_state(config), config, space.format(spec), X)
    subnetact.calibrate(supernet, [spec], [X], progress=False, rule="weighted_biased")
    torch.testing.assert_close(supernet(X, subnet=spec), expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(supernet.extract(spec)(X), expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.05


def test_configurations_and_features(supernet: Supernet) -> None:
    space = supernet.space
    for seed in range(20):
        spec = space.sample(seed)
        arch = space.format(spec)
        assert space.parse(arch) == spec
        assert {k: len(v) for k, v in arch.items() if k != "resolution"} == {
            "width": 9,
            "depth": 7,
            "kernel_size": 7,
            "expand_ratio": 7,
        }
        listed = [arch[k] for k in ("width", "depth", "kernel_size", "expand_ratio")]
        assert encode(space, spec).tolist() == [arch["resolution"], *(v for values in listed for v in values)]
    arch = space.format(space.largest())
    with pytest.raises(IllegalChoice, match=r"width\[3\] \(mb3\): 17 is not a choice; choose from 16, 24"):
        space.parse({**arch, "width": [16, 16, 16, 17, *arch["width"][4:]]})
    with pytest.raises(SpecError, match="exactly the keys resolution, width"):
        space.parse({"depth": 1})
    with pytest.raises(IllegalChoice, match=r"image_size: 33 is not a choice .* choose from 48"):
        encode(space, space.largest(), 33)
    precise = space.with_precision("int8")
    assert encode(precise, precise.at_precision(spec, "int8")).tolist() == encode(space, spec).tolist()
    for options, message in (
        ({"rule": "mean"}, "'mean' is no calibration rule; choose from weighted_biased"),
        ({}, r"unbiased variance.* calibrate with larger batches"),
    ):
        with pytest.raises(SpecError, match=message):
            subnetact.calibrate(supernet, [space.smallest()], [torch.randn(1, 3, 32, 32)], False, **options)


def test_the_default_space_covers_the_published_ranges() -> None:
    with torch.device("meta"):
        network, space, _ = family_of("attentivenas").build()
    assert [len(axis.slots) for axis in space.axes] == [1, 9, 7, 7, 7]
    ends = {a.name: [(s.choices[0], s.choices[-1]) for s in a.slots] for a in space.axes}
    assert ends["resolution"] == [(192, 288)]
    first = [(16, 24), (16, 24), (24, 32), (32, 40), (64, 72)]
    widths = [*first, (112, 128), (192, 216), (216, 224), (1792, 1984)]
    assert ends["width"] == widths
    assert [ends["depth"][i] for i in (0, 1, 2, 4, 6)] == [(1, 2), (3, 5), (3, 6), (3, 8), (1, 2)]
    assert [ends["expand"][i] for i in (0, 1, 5, 6)] == [(1, 1), (4, 6), (6, 6), (6, 6)]
    assert [block.stride for block in network.blocks if block.stride > 1] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mb1": {"c": [8]}}, r"supernet_cfg\['mb1'\] needs c, d, k, t, s"),
        ({"first_conv": {"c": [8], "act_func": "gelu"}}, "act_func out of swish, relu, .* got .*'gelu'"),
    ],
)
def test_bad_configurations_of_the_network_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load("attentivenas", None, supernet_cfg={**CONFIG, **change})
    with pytest.raises(SpecError, match="lacks last_conv"):
        load("attentivenas", None, supernet_cfg={k: v for k, v in CONFIG.items() if k != "last_conv"})
