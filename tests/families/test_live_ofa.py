"""The families of once-for-all against the live upstream package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ofa_adapters import identify, load, upstream_state_dict
from ofa_adapters.registry import family_of

pytest.importorskip("ofa", reason="parity with the upstream package needs it")
pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")

MOBILE = {"ks_list": [3, 5, 7], "expand_ratio_list": [3, 4, 6], "depth_list": [2, 3, 4]}
RESNET = {"depth_list": [0, 1, 2], "expand_ratio_list": [0.2, 0.25, 0.35], "width_mult_list": [0.2, 0.35]}
SMALL: dict[str, dict[str, Any]] = {
    "ofa_mbv3": {**MOBILE, "width_mult": 0.3},
    "ofa_proxyless": {**MOBILE, "width_mult": 0.3},
    "ofa_resnet50": RESNET,
}
CLASSES = {"ofa_mbv3": "OFAMobileNetV3", "ofa_proxyless": "OFAProxylessNASNets", "ofa_resnet50": "OFAResNets"}


def randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in module.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("running_mean") or (tensor.dim() == 1 and name.endswith("bias")):
            tensor.normal_(0, 0.1, generator=generator)
        elif name.endswith("_matrix"):
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
        elif tensor.dim() == 1 and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)


def upstream_network(family: str, arguments: dict[str, Any], n_classes: int = 10) -> Any:
    from ofa.imagenet_classification.elastic_nn import networks

    torch.manual_seed(0)
    network = getattr(networks, CLASSES[family])(n_classes=n_classes, dropout_rate=0, **arguments).eval()
    randomise(network)
    return network


@pytest.mark.parametrize("family", SMALL)
def test_random_subnets_equal_upstream(family: str) -> None:
    upstream = upstream_network(family, SMALL[family])
    supernet = load(family, upstream.state_dict(), n_classes=10, **SMALL[family])
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    bounds = {"atol": 5e-5 if family == "ofa_resnet50" else 1e-6, "rtol": 1e-5}
    specs = supernet.space.sample(4, 5)
    spread = []
    for spec in specs:
        upstream.set_active_subnet(**supernet.space.format(spec))
        with torch.no_grad():
            expected, view = upstream(x), supernet.subnet(spec)(x)
            static = upstream.get_active_subnet(preserve_weight=True).eval()
            torch.testing.assert_close(view, expected, **bounds)
            extracted = supernet.extract(spec)
            torch.testing.assert_close(extracted(x), static(x), **bounds)
        assert sum(p.numel() for p in extracted.parameters()) == sum(p.numel() for p in static.parameters())
        assert expected.std() > 1e-3
        spread.append(expected.flatten()[:4])
    assert torch.stack(spread).std(0).min() > 1e-4
    largest = supernet.space.largest()
    upstream.set_active_subnet(**supernet.space.format(largest))
    names = upstream.get_active_subnet(preserve_weight=True).state_dict()
    assert identify(names) == family
    assert {family_of(family).rename(key) for key in names} == set(supernet.extract(largest).state_dict())
    plain = torch.nn.Module.load_state_dict  # upstream's own ignores what is missing
    plain(upstream_network(family, SMALL[family]), upstream_state_dict(supernet), strict=True)


@pytest.mark.parametrize("family", ["ofa_mbv3", "ofa_proxyless"])
def test_crops_without_matrices_equal_upstream(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ofa.imagenet_classification.elastic_nn.modules.dynamic_op import DynamicSeparableConv2d

    monkeypatch.setattr(DynamicSeparableConv2d, "KERNEL_TRANSFORM_MODE", None)
    upstream = upstream_network(family, SMALL[family], 4)
    assert not any("matrix" in name for name in upstream.state_dict())
    supernet = load(family, upstream.state_dict(), n_classes=4, kernel_transform_mode=None, **SMALL[family])
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(5))
    for seed in range(3):
        spec = supernet.space.sample(seed)
        upstream.set_active_subnet(**supernet.space.format(spec))
        with torch.no_grad():
            expected = upstream(x)
        torch.testing.assert_close(supernet(x, subnet=spec), expected, atol=5e-5, rtol=1e-5)
