"""AttentiveNAS against an independent functional reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import subnetact
from ofa_adapters import encode, load
from ofa_adapters.registry import family_of
from subnetact.errors import IllegalChoice, SpecError
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.space import make_divisible
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


def stage(c: list[int], d: list[int], t: list[int], s: int, se: bool, act: str = "swish") -> dict[str, Any]:
    return {"c": c, "d": d, "k": [3, 5], "t": t, "s": s, "act_func": act, "se": se}


CONFIG: dict[str, Any] = {
    "use_v3_head": True,
    "resolutions": [32, 40, 48],
    "first_conv": {"c": [8, 16], "s": 2, "act_func": "swish"},
    "mb1": stage([8, 16], [1, 2], [1], 1, False),
    "mb2": stage([8, 16], [1, 2, 3], [2, 3], 2, False),
    "mb3": stage([16, 24], [1, 2], [2, 3], 2, True),
    "mb4": stage([24, 32], [1, 2], [2], 2, False),
    "mb5": stage([32, 40], [1, 2], [2, 3], 1, True),
    "mb6": stage([40, 48], [1, 2], [3], 2, True),
    "mb7": stage([40, 48], [1, 2], [3], 1, True),
    "last_conv": {"c": [56, 64], "act_func": "swish"},
}
MIDDLE = [f"mb{i}" for i in range(1, 8)]
EPS = 1e-5


def upstream_state(config: dict[str, Any], classes: int = 5) -> dict[str, torch.Tensor]:
    """Random tensors under upstream's names and shapes."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, *shape: int, bn: bool = True) -> None:
        shapes[f"{name}.conv.conv.weight"] = shape
        if bn:
            shapes.update({f"{name}.bn.bn.{what}": shape[:1] for what in ("weight", "bias")})
            for tracking in ("bn", "bn_tracking.0", "bn_tracking.1"):
                shapes[f"{name}.bn.{tracking}.running_mean"] = shape[:1]
                shapes[f"{name}.bn.{tracking}.running_var"] = shape[:1]
                shapes[f"{name}.bn.{tracking}.num_batches_tracked"] = ()

    width = max(config["first_conv"]["c"])
    conv("first_conv", width, 3, 3, 3)
    block = 0
    for name in MIDDLE:
        s = config[name]
        for position in range(max(s["d"])):
            out, in_ = max(s["c"]), max(s["c"]) if position else width
            prefix = f"blocks.{block}.mobile_inverted_conv"
            mid = round(in_ * max(s["t"]))
            if max(s["t"]) != 1:
                conv(f"{prefix}.inverted_bottleneck", mid, in_, 1, 1)
            conv(f"{prefix}.depth_conv", mid, 1, max(s["k"]), max(s["k"]))
            if s["se"]:
                squeeze = make_divisible(mid // 4, 8, 1)
                shapes[f"{prefix}.depth_conv.se.fc.reduce.weight"] = (squeeze, mid, 1, 1)
                shapes[f"{prefix}.depth_conv.se.fc.reduce.bias"] = (squeeze,)
                shapes[f"{prefix}.depth_conv.se.fc.expand.weight"] = (mid, squeeze, 1, 1)
                shapes[f"{prefix}.depth_conv.se.fc.expand.bias"] = (mid,)
            conv(f"{prefix}.point_linear", out, mid, 1, 1)
            conv(f"blocks.{block}.shortcut", out, in_, 1, 1, bn=False)
            block += 1
        width = max(s["c"])
    last = max(config["last_conv"]["c"])
    if config["use_v3_head"]:
        conv("last_conv.final_expand_layer", 6 * width, width, 1, 1)
        conv("last_conv.feature_mix_layer", last, 6 * width, 1, 1, bn=False)
    else:
        conv("last_conv", last, width, 1, 1)
    shapes["classifier.linear.linear.weight"] = (classes, last)
    shapes["classifier.linear.linear.bias"] = (classes,)
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        if name.endswith("num_batches_tracked"):
            state[name] = torch.tensor(0)
        elif name.endswith("running_var") or (".bn.bn.weight" in name):
            state[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            fan = max(1, torch.Size(shape[1:]).numel())
            state[name] = torch.randn(shape, generator=generator) * (2 / fan) ** 0.5
    return state


def reference(
    state: dict[str, torch.Tensor], config: dict[str, Any], arch: dict[str, Any], x: torch.Tensor
) -> torch.Tensor:
    """Return the subnet's logits; every BatchNorm uses the statistics of this batch (training mode)."""

    def bn(name: str, y: torch.Tensor) -> torch.Tensor:
        c = y.shape[1]
        mean, var = y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)
        y = (y - mean[:, None, None]) / (var[:, None, None] + EPS).sqrt()
        weight, bias = state[f"{name}.bn.bn.weight"][:c], state[f"{name}.bn.bn.bias"][:c]
        return y * weight[:, None, None] + bias[:, None, None]

    def conv(name: str, y: torch.Tensor, out: int, stride: int = 1) -> torch.Tensor:
        weight = state[f"{name}.conv.conv.weight"][:out, : y.shape[1]]
        return F.conv2d(y, weight, stride=stride, padding=weight.shape[-1] // 2)

    def act(name: str, y: torch.Tensor) -> torch.Tensor:
        kind = config[name]["act_func"]
        return y * torch.sigmoid(y) if kind == "swish" else y.clamp(min=0)

    if x.shape[-1] != arch["resolution"]:
        x = F.interpolate(x, size=arch["resolution"], mode="bicubic", align_corners=False)
    widths = arch["width"]
    x = act("first_conv", bn("first_conv", conv("first_conv", x, widths[0], config["first_conv"]["s"])))
    start = 0
    for i, name in enumerate(MIDDLE):
        s = config[name]
        for position in range(arch["depth"][i]):
            prefix = f"blocks.{start + position}.mobile_inverted_conv"
            stride, in_, out = s["s"] if position == 0 else 1, x.shape[1], widths[i + 1]
            y = x
            if max(s["t"]) != 1:
                mid = make_divisible(round(in_ * arch["expand_ratio"][i]), 8, 1)
                y = act(
                    name, bn(f"{prefix}.inverted_bottleneck", conv(f"{prefix}.inverted_bottleneck", y, mid))
                )
            k, full = arch["kernel_size"][i], state[f"{prefix}.depth_conv.conv.conv.weight"]
            cut = (full.shape[-1] - k) // 2
            kernel = full[: y.shape[1], :, cut : cut + k, cut : cut + k]
            y = F.conv2d(y, kernel, stride=stride, padding=k // 2, groups=y.shape[1])
            y = act(name, bn(f"{prefix}.depth_conv", y))
            if s["se"]:
                squeeze = make_divisible(y.shape[1] // 4, 8, 1)
                fc = f"{prefix}.depth_conv.se.fc"
                z = y.mean((2, 3), keepdim=True)
                z = F.conv2d(
                    z,
                    state[f"{fc}.reduce.weight"][:squeeze, : y.shape[1]],
                    state[f"{fc}.reduce.bias"][:squeeze],
                )
                z = F.conv2d(
                    z.clamp(min=0),
                    state[f"{fc}.expand.weight"][: y.shape[1], :squeeze],
                    state[f"{fc}.expand.bias"][: y.shape[1]],
                )
                y = y * ((z + 3).clamp(0, 6) / 6)
            y = bn(f"{prefix}.point_linear", conv(f"{prefix}.point_linear", y, out))
            shortcut = x
            if stride > 1:
                shortcut = F.avg_pool2d(x, stride, stride, 0 if x.shape[-1] % 2 == 0 else 1)
            if in_ != out:
                shortcut = conv(f"blocks.{start + position}.shortcut", shortcut, out)
            x = y + shortcut
        start += max(s["d"])
    if config["use_v3_head"]:
        x = conv("last_conv.final_expand_layer", x, 6 * x.shape[1])
        x = act("last_conv", bn("last_conv.final_expand_layer", x)).mean((2, 3), keepdim=True)
        x = act("last_conv", conv("last_conv.feature_mix_layer", x, widths[-1])).flatten(1)
    else:
        x = act("last_conv", bn("last_conv", conv("last_conv", x, widths[-1]))).mean((2, 3))
    weight = state["classifier.linear.linear.weight"][:, : x.shape[1]]
    return F.linear(x, weight, state["classifier.linear.linear.bias"])


def without_head() -> dict[str, Any]:
    return {
        **CONFIG,
        "use_v3_head": False,
        "mb3": stage([16, 24], [1, 2], [2, 3], 2, True, "relu"),
        "mb7": stage([40, 48], [1, 2], [3], 1, False),
    }


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return upstream_state(CONFIG)


@pytest.fixture(scope="module")
def supernet(state: dict[str, torch.Tensor]) -> Supernet:
    wrapped = {"state_dict": {f"module.{key}": value for key, value in state.items()}}
    return load("attentivenas", wrapped, supernet_cfg=CONFIG, n_classes=5)


@pytest.mark.parametrize("v3_head", [True, False])
def test_weights_are_written_under_upstreams_names(written_back: Any, v3_head: bool) -> None:
    config = CONFIG if v3_head else without_head()
    written = written_back(
        "attentivenas", upstream_state(config), "bn_tracking", supernet_cfg=config, n_classes=5
    )
    assert written["first_conv.bn.bn_tracking.1.running_var"].eq(1).all()  # never used, but upstream wants it


X = torch.randn(6, 3, 48, 48, generator=torch.Generator().manual_seed(9))


def calibrated_output(supernet: Supernet, spec: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the output for the one calibration batch, scaled to undo the unbiased variance."""
    subnetact.calibrate(supernet, [spec], [x], progress=False, rule="weighted_biased")
    return supernet(x, subnet=spec)


@pytest.mark.parametrize("seed", range(12))
def test_subnets_equal_the_reference(supernet: Supernet, state: Any, seed: int) -> None:
    space = supernet.space
    spec = [space.smallest(), space.largest()][seed] if seed < 2 else space.sample(seed)
    arch = space.format(spec)
    expected = reference(state, CONFIG, arch, X)
    torch.testing.assert_close(calibrated_output(supernet, spec, X), expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(supernet.extract(spec)(X), expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_a_single_convolution_head_and_other_activations(seed: int) -> None:
    config = without_head()
    state = upstream_state(config)
    supernet = load("attentivenas", state, supernet_cfg=config, n_classes=5)
    spec = supernet.space.sample(seed)
    expected = reference(state, config, supernet.space.format(spec), X)
    torch.testing.assert_close(calibrated_output(supernet, spec, X), expected, atol=2e-4, rtol=1e-4)


def test_its_own_rule_is_the_cumulative_one(supernet: Supernet, state: Any) -> None:
    """Batches have equal weights and variances are unbiased, as in a BatchNorm without momentum."""
    spec = supernet.space.sample(5)
    batches = [X[:4], X[1:6], X[2:4]]
    subnetact.calibrate(supernet, [spec], batches, progress=False)
    network = supernet.extract(spec)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    with torch.no_grad():
        for batch in batches:
            network(batch)
        expected = network.eval()(X)
        torch.testing.assert_close(supernet(X, subnet=spec), expected, atol=2e-4, rtol=1e-4)
        own = supernet(X, subnet=spec)
        subnetact.calibrate(supernet, [spec], batches, progress=False, rule="weighted_biased")
        assert not torch.allclose(supernet(X, subnet=spec), own, atol=1e-3)
    with pytest.raises(SpecError, match="'mean' is no calibration rule; choose from weighted_biased"):
        subnetact.calibrate(supernet, [spec], batches, progress=False, rule="mean")


def test_one_value_per_channel_has_no_unbiased_variance(supernet: Supernet) -> None:
    with pytest.raises(SpecError, match=r"unbiased variance.* calibrate with larger batches"):
        subnetact.calibrate(
            supernet, [supernet.space.smallest()], [torch.randn(1, 3, 32, 32)], progress=False
        )


def test_one_block_is_identity_or_projection_by_the_active_widths(supernet: Supernet) -> None:
    space = supernet.space
    arch = space.format(space.largest())
    same = supernet.subnet(space.parse({**arch, "width": [16, 16, *arch["width"][2:]]}))
    changed = supernet.subnet(space.parse({**arch, "width": [8, 16, *arch["width"][2:]]}))
    assert isinstance(same.blocks[0].shortcut.conv, SkippedLayer)
    assert changed.blocks[0].shortcut.conv.weight.shape == (16, 8, 1, 1)


def test_inputs_are_scaled_to_the_subnets_resolution(supernet: Supernet) -> None:
    arch = supernet.space.format(supernet.space.largest())
    outputs = []
    for resolution in (32, 40, 48):
        spec = supernet.space.parse({**arch, "resolution": resolution})
        scaled = F.interpolate(X, (resolution, resolution), mode="bicubic", align_corners=False)
        torch.testing.assert_close(supernet(X, subnet=spec), supernet(scaled, subnet=spec))
        outputs.append(supernet(X, subnet=spec))
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-3)


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


def test_features_do_not_depend_on_the_precision(state: dict[str, torch.Tensor]) -> None:
    supernet = load("attentivenas", state, supernet_cfg=CONFIG, n_classes=5)
    spec = supernet.space.sample(0)
    features = encode(supernet.space, spec)
    supernet.enable_precision("int8")
    for own in (spec, supernet.space.at_precision(spec, "int8")):
        assert encode(supernet.space, own).tolist() == features.tolist()


def test_the_default_space_covers_the_published_ranges() -> None:
    with torch.device("meta"):
        network, space, _ = family_of("attentivenas").build()
    assert [len(axis.slots) for axis in space.axes] == [1, 9, 7, 7, 7]
    ends = {a.name: [(s.choices[0], s.choices[-1]) for s in a.slots] for a in space.axes}
    assert ends["resolution"] == [(192, 288)]
    widths = [
        (16, 24),
        (16, 24),
        (24, 32),
        (32, 40),
        (64, 72),
        (112, 128),
        (192, 216),
        (216, 224),
        (1792, 1984),
    ]
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
