"""Slimmable ResNet-50 and US-MobileNetV2 against independent functional references."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import subnetact
from ofa_adapters import load, upstream_state_dict
from subnetact.errors import CheckpointError, SpecError
from subnetact.space import make_divisible
from subnetact.supernet.statistics import is_calibrated
from subnetact.supernet.supernet import Supernet

EPS = 1e-5
X = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(3))


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    if name.endswith("running_var") or (len(shape) == 1 and name.endswith("weight")):
        gain = 0.2 if ".body.7." in name and name.endswith("weight") else 1.0  # residuals do not explode
        return gain * (torch.rand(shape, generator=generator) + 0.5)
    if len(shape) == 1:
        return torch.randn(shape, generator=generator) * 0.2
    return torch.randn(shape, generator=generator) * (2 / torch.Size(shape[1:]).numel()) ** 0.5


def randomise(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}


WIDTHS = [0.125, 0.0625, 0.25]  # in the order of a checkpoint, which need not be sorted
LENGTHS = (3, 4, 6, 3)


def resnet_state(classes: int = 5) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    top = max(WIDTHS)

    def conv_bn(conv: str, bn: str, out: float, in_: float | None, k: int) -> None:
        shapes[f"{conv}.weight"] = (int(out * top), 3 if in_ is None else int(in_ * top), k, k)
        for i, w in enumerate(WIDTHS):
            for what in ("weight", "bias", "running_mean", "running_var"):
                shapes[f"{bn}.bn.{i}.{what}"] = (int(out * w),)
            shapes[f"{bn}.bn.{i}.num_batches_tracked"] = ()

    conv_bn("features.0.0", "features.0.1", 64, None, 7)
    before, n = 64.0, 1
    for s, length in enumerate(LENGTHS):
        out = 256.0 * 2**s
        for position in range(length):
            body = f"features.{n}.body"
            conv_bn(f"{body}.0", f"{body}.1", out / 4, before, 1)
            conv_bn(f"{body}.3", f"{body}.4", out / 4, out / 4, 3)
            conv_bn(f"{body}.6", f"{body}.7", out, out / 4, 1)
            if position == 0:
                conv_bn(f"features.{n}.shortcut.0", f"features.{n}.shortcut.1", out, before, 1)
            before, n = out, n + 1
    shapes["classifier.0.weight"] = (classes, int(2048 * top))
    shapes["classifier.0.bias"] = (classes,)
    return randomise(shapes)


def resnet_reference(state: dict[str, torch.Tensor], width: float, x: torch.Tensor) -> torch.Tensor:
    i = WIDTHS.index(width)

    def conv_bn(conv: str, bn: str, y: torch.Tensor, stride: int = 1) -> torch.Tensor:
        stats = [state[f"{bn}.bn.{i}.{what}"] for what in ("running_mean", "running_var", "weight", "bias")]
        weight = state[f"{conv}.weight"][: len(stats[0]), : y.shape[1]]
        y = F.conv2d(y, weight, stride=stride, padding=weight.shape[-1] // 2)
        mean, var, gamma, beta = (s[:, None, None] for s in stats)
        return (y - mean) / (var + EPS).sqrt() * gamma + beta

    x = F.max_pool2d(conv_bn("features.0.0", "features.0.1", x, 2).clamp(min=0), 3, 2, 1)
    n = 1
    for s, length in enumerate(LENGTHS):
        for position in range(length):
            stride = 2 if s and position == 0 else 1
            body = f"features.{n}.body"
            y = conv_bn(f"{body}.0", f"{body}.1", x).clamp(min=0)
            y = conv_bn(f"{body}.3", f"{body}.4", y, stride).clamp(min=0)
            y = conv_bn(f"{body}.6", f"{body}.7", y)
            shortcut = (
                x if position else conv_bn(f"features.{n}.shortcut.0", f"features.{n}.shortcut.1", x, stride)
            )
            x, n = (y + shortcut).clamp(min=0), n + 1
    x = x.mean((2, 3))
    return F.linear(x, state["classifier.0.weight"][:, : x.shape[1]], state["classifier.0.bias"])


@pytest.fixture(scope="module")
def resnet() -> Supernet:
    state = {"model": {f"module.{k}": v for k, v in resnet_state().items()}}
    return load("slimmable_resnet50", state, num_classes=5, width_mult_list=WIDTHS)


@pytest.mark.parametrize("width", WIDTHS)
def test_slimmable_resnet_equals_the_reference(resnet: Supernet, width: float) -> None:
    spec = resnet.space.parse({"width_mult": width})
    expected = resnet_reference(resnet_state(), width, X)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # its statistics come with the checkpoint
        for network in (resnet.subnet(spec), resnet.extract(spec)):
            torch.testing.assert_close(network(X), expected, atol=5e-5, rtol=1e-4)
    assert is_calibrated(resnet, spec)
    assert expected.std() > 0.01
    channels = int(64 * width)
    assert type(resnet.extract(spec).input_stem.bn) is torch.nn.BatchNorm2d
    assert resnet.subnet(spec).input_stem.bn.weight.shape == (channels,)
    shared = resnet.state_dict()[f"input_stem.bn.{WIDTHS.index(width)}.weight"]
    assert resnet.subnet(spec).input_stem.bn.weight.data_ptr() == shared.data_ptr()


def test_one_widths_calibration_leaves_the_others(resnet: Supernet) -> None:
    copied = pickle.loads(pickle.dumps(resnet))
    specs = [copied.space.parse(w) for w in sorted(WIDTHS)]
    before = [copied(X, subnet=spec) for spec in specs]
    subnetact.calibrate(copied, specs[:1], [X, X[:2]], progress=False)
    after = [copied(X, subnet=spec) for spec in specs]
    assert not torch.allclose(before[0], after[0], atol=1e-3)
    assert all(torch.equal(*pair) for pair in zip(before[1:], after[1:], strict=True))
    written = upstream_state_dict(copied)
    found = resnet_reference(written, min(WIDTHS), X)
    torch.testing.assert_close(found, after[0], atol=5e-5, rtol=1e-4)
    assert written["features.0.1.bn.0.running_mean"].equal(resnet_state()["features.0.1.bn.0.running_mean"])


def test_weights_are_written_with_upstreams_names(written_back: Callable[..., Any]) -> None:
    written_back("slimmable_resnet50", resnet_state(), num_classes=5, width_mult_list=WIDTHS)
    constructor = {"num_classes": 5, "width_mult_list": US_WIDTHS, "width_mult_range": [0.175, TOP]}
    written_back("us_mobilenet_v2", us_state(), **constructor)
    supernet = load("us_mobilenet_v2", us_state(), **constructor)
    largest = supernet.space.largest()
    subnetact.calibrate(supernet, [largest], [X, X[:2]], progress=False)
    found = us_reference(upstream_state_dict(supernet), 1.0, X)
    torch.testing.assert_close(found, supernet(X, subnet=largest), atol=5e-5, rtol=1e-4)


US_WIDTHS = [0.6, 0.5, 0.725, 1.0]
TOP = 0.5
STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]


def scaled(full: int, w: float, ratio: int = 1) -> int:
    return make_divisible(full * w / ratio, 8, 1) * ratio


def us_state(classes: int = 5) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}

    def conv_bn(prefix: str, index: int, out: int, in_: int, k: int, ratio: int = 1) -> None:
        shapes[f"{prefix}.{index}.weight"] = (out, in_, k, k)
        bn = f"{prefix}.{index + 1}"
        shapes[f"{bn}.weight"] = shapes[f"{bn}.bias"] = (out,)
        for i, w in enumerate(US_WIDTHS):
            for what in ("running_mean", "running_var"):
                shapes[f"{bn}.bn.{i}.{what}"] = (scaled(out, w, ratio),)
            shapes[f"{bn}.bn.{i}.num_batches_tracked"] = ()

    in_ = make_divisible(32 * TOP, 8, 1)
    conv_bn("features.0", 0, in_, 3, 3)
    n = 1
    for t, c, length, _ in STAGES:
        out = make_divisible(c * TOP, 8, 1)
        for _ in range(length):
            mid, body, index = in_ * t, f"features.{n}.body", 0
            if t != 1:
                conv_bn(body, 0, mid, in_, 1, t)
                index = 3
            conv_bn(body, index, mid, 1, 3, t)
            conv_bn(body, index + 3, out, mid, 1)
            in_, n = out, n + 1
    shapes["features.18.0.weight"] = (1280, in_, 1, 1)
    shapes.update(
        {f"features.18.1.{what}": (1280,) for what in ("weight", "bias", "running_mean", "running_var")}
    )
    shapes["features.18.1.num_batches_tracked"] = ()
    shapes["classifier.0.weight"], shapes["classifier.0.bias"] = (classes, 1280), (classes,)
    return randomise(shapes)


def us_reference(state: dict[str, torch.Tensor], width: float, x: torch.Tensor) -> torch.Tensor:
    i = US_WIDTHS.index(width)

    def conv_bn(
        prefix: str, index: int, y: torch.Tensor, stride: int = 1, depthwise: bool = False
    ) -> torch.Tensor:
        bn = f"{prefix}.{index + 1}"
        mean, var = (state[f"{bn}.bn.{i}.running_{what}"] for what in ("mean", "var"))
        c = len(mean)
        weight = state[f"{prefix}.{index}.weight"][:c]
        weight = weight if depthwise else weight[:, : y.shape[1]]
        y = F.conv2d(
            y, weight, stride=stride, padding=weight.shape[-1] // 2, groups=y.shape[1] if depthwise else 1
        )
        return F.batch_norm(y, mean, var, state[f"{bn}.weight"][:c], state[f"{bn}.bias"][:c], eps=EPS)

    x = conv_bn("features.0", 0, x, 2).clamp(0, 6)
    n, before = 1, 32
    for t, c, length, s in STAGES:
        for position in range(length):
            stride, body, y, index = 1 if position else s, f"features.{n}.body", x, 0
            if t != 1:
                y, index = conv_bn(body, 0, y).clamp(0, 6), 3
            y = conv_bn(body, index, y, stride, depthwise=True).clamp(0, 6)
            y = conv_bn(body, index + 3, y)
            same = make_divisible(before * TOP, 8, 1) == make_divisible(c * TOP, 8, 1)
            x = x + y if stride == 1 and same else y
            before, n = c, n + 1
    x = F.conv2d(x, state["features.18.0.weight"][:, : x.shape[1]])
    stats = [state[f"features.18.1.{what}"] for what in ("running_mean", "running_var", "weight", "bias")]
    x = F.batch_norm(x, *stats, eps=EPS).clamp(0, 6).mean((2, 3))
    return F.linear(x, state["classifier.0.weight"], state["classifier.0.bias"])


@pytest.fixture(scope="module")
def us() -> Supernet:
    return load(
        "us_mobilenet_v2",
        {"model": us_state()},
        num_classes=5,
        width_mult_list=US_WIDTHS,
        width_mult_range=[0.175, TOP],
    )


@pytest.mark.parametrize("width", US_WIDTHS)
def test_us_mobilenet_equals_the_reference(us: Supernet, width: float) -> None:
    spec = us.space.parse({"width_mult": width})
    expected = us_reference(us_state(), width, X)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for network in (us.subnet(spec), us.extract(spec)):
            torch.testing.assert_close(network(X), expected, atol=5e-5, rtol=1e-4)
    assert is_calibrated(us, spec)
    assert expected.std() > 0.01
    assert type(us.extract(spec).first_bn) is torch.nn.BatchNorm2d


def test_training_updates_the_listed_statistics(us: Supernet) -> None:
    copied = pickle.loads(pickle.dumps(us)).train()
    spec = copied.space.parse(0.5)
    before = {name: tensor.clone() for name, tensor in copied.state_dict().items()}
    copied(X, subnet=spec).square().mean().backward()
    after = copied.state_dict()
    assert not torch.equal(before["first_bn.running_mean_1"], after["first_bn.running_mean_1"])
    assert torch.equal(before["first_bn.running_mean_0"], after["first_bn.running_mean_0"])
    gradient = copied.network.first_conv.get_parameter("weight").grad
    assert gradient is not None
    assert gradient[:8].abs().sum() > 0


def test_missing_statistics_are_listed() -> None:
    state = us_state()
    del state["features.3.body.4.bn.2.running_mean"]
    state["features.4.body.1.bn.0.running_var"] = torch.ones(3)
    constructor = {"num_classes": 5, "width_mult_list": US_WIDTHS, "width_mult_range": [0.175, TOP]}
    with pytest.raises(
        CheckpointError, match=r"check the .* 1 missing: features.3.body.4.bn.2.running_mean; 1 of another"
    ):
        load("us_mobilenet_v2", state, **constructor)


def test_bad_width_lists_are_refused() -> None:
    for family in ("us_mobilenet_v2", "slimmable_resnet50"):
        with pytest.raises(SpecError, match=r"distinct and positive, got \[0.5, 0.5\]"):
            load(family, None, width_mult_list=[0.5, 0.5])
    with pytest.raises(SpecError, match="at most 1"):
        load("us_mobilenet_v2", None, width_mult_list=[0.5, 1.5])
    with pytest.raises(SpecError, match=r"a width of 0.35 rounds 8 channels up to 9"):
        load("us_mobilenet_v2", None, width_mult_list=[0.35, 1.0], width_mult_range=[0.1, 0.5])
    with pytest.raises(SpecError, match="depth 34 is not known; choose from"):
        load("slimmable_resnet50", None, depth=34)
