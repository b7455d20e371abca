"""HydraViT against a reference that is written from the rules of its slices, without the adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ofa_adapters import identify, load

D, DEPTH, PATCH, SIDE = 768, 2, 8, 24


def network() -> Any:
    """Return timm's vision transformer, whose names a checkpoint has, with random weights."""
    timm = pytest.importorskip("timm", exc_type=ImportError)
    sizes = {"img_size": SIDE, "patch_size": PATCH, "num_classes": 7, "embed_dim": D, "depth": DEPTH}
    model = timm.models.vision_transformer.VisionTransformer(**sizes, num_heads=12).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            parameter.add_(float("norm" in name and name.endswith("weight")))
    return model


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


def test_subnets_equal_the_reference() -> None:
    weights = network().state_dict()
    supernet = load("hydravit", weights)
    outputs = []
    for heads in (3, 4, 7, 12):
        spec = supernet.space.parse({"heads": heads})
        expected = reference(weights, heads, X)
        with torch.no_grad():
            torch.testing.assert_close(supernet(X, subnet=spec), expected, atol=5e-5, rtol=1e-5)
            torch.testing.assert_close(supernet.extract(spec)(X), expected, atol=5e-5, rtol=1e-5)
        outputs.append(expected)
    assert len(list(supernet.space.enumerate())) == 10
    assert min((a - b).abs().max() for i, a in enumerate(outputs) for b in outputs[:i]) > 1e-2


def test_the_largest_subnet_is_timms_vision_transformer(written_back: Any) -> None:
    model = network()
    supernet = load("hydravit", model.state_dict())
    assert identify(model.state_dict()) is None  # any vision transformer of timm has these names
    model.load_state_dict(written_back("hydravit", model.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(supernet(X), model(X), atol=5e-5, rtol=1e-5)


def test_the_sizes_of_the_published_subnets() -> None:
    with torch.device("meta"):
        supernet = load("hydravit")
        counts = [
            sum(p.numel() for p in supernet.subnet(supernet.space.parse(heads)).parameters())
            for heads in (3, 6, 12)
        ]
    assert supernet.space.parse(6) == supernet.space.parse({"heads": 6})
    assert counts == [5_717_416, 22_050_664, 86_567_656]  # DeiT-tiny, DeiT-small and DeiT-base
