"""AttentiveNAS as functions of upstream's tensors, and random tensors of that kind."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from subnetact.space import make_divisible

__all__ = ["CONFIG", "WITHOUT_HEAD", "reference", "upstream_state"]


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
WITHOUT_HEAD = {
    **CONFIG,
    "use_v3_head": False,
    "mb3": stage([16, 24], [1, 2], [2, 3], 2, True, "relu"),
    "mb7": stage([40, 48], [1, 2], [3], 1, False),
}


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
