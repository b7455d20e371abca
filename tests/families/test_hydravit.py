"""HydraViT against a reference that is written from the rules of its slices, without the adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ofa_adapters import identify, load
from ofa_adapters.networks.hydravit import FAMILY
from subnetact.errors import SpecError

D, DEPTH, PATCH, SIDE = 768, 2, 8, 24


def state() -> dict[str, Tensor]:
    """Return random weights under the names of timm's vision transformer."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, std: float = 0.05) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    found = {
        "cls_token": random(1, 1, D),
        "pos_embed": random(1, 1 + (SIDE // PATCH) ** 2, D),
        "patch_embed.proj.weight": random(D, 3, PATCH, PATCH),
        "patch_embed.proj.bias": random(D),
    }
    for i in range(DEPTH):
        for norm in ("norm1", "norm2"):
            found[f"blocks.{i}.{norm}.weight"] = 1 + random(D)
            found[f"blocks.{i}.{norm}.bias"] = random(D)
        for name, out, in_ in (
            ("attn.qkv", 3 * D, D),
            ("attn.proj", D, D),
            ("mlp.fc1", 4 * D, D),
            ("mlp.fc2", D, 4 * D),
        ):
            found[f"blocks.{i}.{name}.weight"] = random(out, in_)
            found[f"blocks.{i}.{name}.bias"] = random(out)
    found["norm.weight"], found["norm.bias"] = 1 + random(D), random(D)
    found["head.weight"], found["head.bias"] = random(7, D), random(7)
    return found


def reference(s: dict[str, Tensor], heads: int, x: Tensor) -> Tensor:
    """Return the logits of a subnet, with the slices of its description applied one by one."""
    p = 64 * heads
    rows = [*range(p), *range(D, D + p), *range(2 * D, 2 * D + p)]

    def norm(name: str, y: Tensor) -> Tensor:
        return F.layer_norm(y, (p,), s[f"{name}.weight"][:p], s[f"{name}.bias"][:p], 1e-6)

    def linear(name: str, y: Tensor, out: int, in_: int) -> Tensor:
        return y @ s[f"{name}.weight"][:out, :in_].T + s[f"{name}.bias"][:out]

    y = F.conv2d(x, s["patch_embed.proj.weight"][:p], s["patch_embed.proj.bias"][:p], stride=PATCH)
    y = torch.cat([s["cls_token"][..., :p].expand(len(x), 1, p), y.flatten(2).transpose(1, 2)], 1)
    y = y + s["pos_embed"][..., :p]
    for i in range(DEPTH):
        b = f"blocks.{i}"
        qkv = norm(f"{b}.norm1", y) @ s[f"{b}.attn.qkv.weight"][rows, :p].T + s[f"{b}.attn.qkv.bias"][rows]
        q, k, v = (part.unflatten(-1, (heads, 64)).transpose(1, 2) for part in qkv.chunk(3, -1))
        attended = ((q @ k.transpose(-1, -2)) / 8).softmax(-1) @ v
        branch = linear(f"{b}.attn.proj", attended.transpose(1, 2).reshape(len(x), -1, p), p, p)
        y = y + branch
        branch = F.gelu(linear(f"{b}.mlp.fc1", norm(f"{b}.norm2", y), 4 * p, p))
        y = y + linear(f"{b}.mlp.fc2", branch, p, 4 * p)
    return norm("norm", y)[:, 0] @ s["head.weight"][:, :p].T + s["head.bias"]


X = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def test_all_ten_subnets_equal_the_reference() -> None:
    weights = state()
    supernet = load("hydravit", weights)
    outputs = []
    for heads in range(3, 13):
        spec = supernet.space.parse({"heads": heads})
        expected = reference(weights, heads, X)
        with torch.no_grad():
            torch.testing.assert_close(supernet(X, subnet=spec), expected, atol=5e-5, rtol=1e-5)
            torch.testing.assert_close(supernet.extract(spec)(X), expected, atol=5e-5, rtol=1e-5)
        outputs.append(expected)
    assert len(list(supernet.space.enumerate())) == 10
    assert min((a - b).abs().max() for i, a in enumerate(outputs) for b in outputs[:i]) > 1e-2


def test_sizes_are_read_from_the_tensors() -> None:
    supernet = load("hydravit", state())
    assert supernet.origin == {
        "name": "hydravit",
        "constructor": {
            "patch_size": PATCH,
            "img_size": SIDE,
            "num_classes": 7,
            "depth": DEPTH,
        },
    }
    assert identify(state()) is None  # any vision transformer of timm has these names


def test_the_largest_subnet_is_timms_vision_transformer(written_back: Any) -> None:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model: Any = timm.models.vision_transformer.VisionTransformer(
        img_size=SIDE, patch_size=PATCH, num_classes=7, embed_dim=D, depth=DEPTH, num_heads=12
    )
    model.load_state_dict(state())
    supernet = load("hydravit", model.state_dict())
    model.load_state_dict(written_back("hydravit", model.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(supernet(X), model.eval()(X), atol=5e-5, rtol=1e-5)


def test_only_narrowed_queries_keys_and_values_are_copies() -> None:
    supernet = load("hydravit", state())
    supernet.subnet(supernet.space.parse(12))
    assert supernet.packed_bytes() == 0
    for heads in (3, 6, 3):
        supernet.subnet(supernet.space.parse(heads))
    assert supernet.packed_bytes() == 4 * DEPTH * sum(3 * p * p + 3 * p for p in (64 * 3, 64 * 6))


def test_the_sizes_of_the_published_subnets() -> None:
    with torch.device("meta"):
        supernet = load("hydravit")
        counts = [
            sum(p.numel() for p in supernet.subnet(supernet.space.parse(heads)).parameters())
            for heads in (3, 6, 12)
        ]
    assert counts == [5_717_416, 22_050_664, 86_567_656]  # DeiT-tiny, DeiT-small and DeiT-base


def test_configurations() -> None:
    space = FAMILY.build()[1]
    assert space.parse(6) == space.parse({"heads": 6})
    assert space.format(space.parse(6)) == {"heads": 6}
    with pytest.raises(
        SpecError, match=r"hydravit: heads\[0\] \(all blocks\): 2 is not a choice; choose from 3"
    ):
        space.parse(2)
