"""AutoFormer's variants that have no goldens, against an independent reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from ofa_adapters import load
from subnetact.errors import CheckpointError, SpecError

GOLDEN = Path(__file__).parent.parent / "golden" / "autoformer"
FACTS = json.loads((GOLDEN / "cases.json").read_text())


def state(**change: Any) -> dict[str, torch.Tensor]:
    """Return the golden weights without those that a variant lacks."""
    found = load_file(GOLDEN / "state_dict.safetensors")
    if change.get("relative_position") is False:
        found = {k: v for k, v in found.items() if "rel_pos" not in k}
    if change.get("abs_pos") is False:
        del found["pos_embed"]
    if change.get("qkv_bias") is False:
        found = {k: v for k, v in found.items() if not k.endswith("qkv.bias")}
    return found


def reference(
    s: dict[str, torch.Tensor], config: dict[str, Any], x: torch.Tensor, **variant: Any
) -> torch.Tensor:
    e, reach = config["embed_dim"][0], 2

    def norm(name: str, y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(y, (e,), s[f"{name}.weight"][:e], s[f"{name}.bias"][:e], 1e-5)

    x = F.conv2d(x, s["patch_embed_super.proj.weight"][:e], s["patch_embed_super.proj.bias"][:e], stride=8)
    x = torch.cat([s["cls_token"][..., :e].expand(len(x), 1, e), x.flatten(2).transpose(1, 2)], 1)
    x = x + s["pos_embed"][..., :e] if variant.get("abs_pos", True) else x
    n, tokens, _ = x.shape
    side = int((tokens - 1) ** 0.5)
    for i in range(config["layer_num"]):
        b, h = f"blocks.{i}", config["num_heads"][i]
        y = norm(f"{b}.attn_layer_norm", x)
        weight, bias = s[f"{b}.attn.qkv.weight"], s.get(f"{b}.attn.qkv.bias")
        q_rows, scale = 64 * h, 64**-0.5
        weight = torch.cat([weight[j : 3 * q_rows : 3, :e] for j in range(3)])
        bias = None if bias is None else bias[: 3 * q_rows]
        q, k, v = F.linear(y, weight, bias).reshape(n, tokens, 3, h, q_rows // h).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("nhqd,nhkd->nhqk", q, k) * scale
        both = {}
        if variant.get("relative_position", True):
            for what in "kv":
                tables = [s[f"{b}.attn.rel_pos_embed_{what}.embeddings_table_{axis}"] for axis in "vh"]
                both[what] = torch.zeros(tokens, tokens, q_rows // h)
                for a in range(tokens):
                    for c in range(tokens):
                        index = [0, 0]
                        if a and c:
                            steps = ((c - 1) // side - (a - 1) // side, (c - 1) % side - (a - 1) % side)
                            index = [max(-reach, min(reach, step)) + reach + 1 for step in steps]
                        both[what][a, c] = tables[0][index[0]] + tables[1][index[1]]
            scores = scores + torch.einsum("nhqd,qkd->nhqk", q, both["k"]) * scale
        weights = scores.softmax(-1)
        y = torch.einsum("nhqk,nhkd->nhqd", weights, v)
        if both:
            y = y + torch.einsum("nhqk,qkd->nhqd", weights, both["v"])
        y = y.transpose(1, 2).reshape(n, tokens, q_rows)
        x = x + F.linear(y, s[f"{b}.attn.proj.weight"][:e, :q_rows], s[f"{b}.attn.proj.bias"][:e])
        f = int(e * config["mlp_ratio"][i])
        y = F.linear(norm(f"{b}.ffn_layer_norm", x), s[f"{b}.fc1.weight"][:f, :e], s[f"{b}.fc1.bias"][:f])
        x = x + F.linear(F.gelu(y), s[f"{b}.fc2.weight"][:e, :f], s[f"{b}.fc2.bias"][:e])
    x = norm("norm", x)
    pooled = x[:, 1:].mean(1) if variant.get("gp", True) else x[:, 0]
    return F.linear(pooled, s["head.weight"][:, :e], s["head.bias"])


VARIANTS: list[dict[str, Any]] = [
    {},
    {"gp": False},
    {"relative_position": False, "gp": False, "abs_pos": False},
    {"relative_position": False},
    {"qkv_bias": False},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(v) or "published")
def test_variants_equal_the_reference(variant: dict[str, Any]) -> None:
    supernet = load("autoformer", state(**variant), **{**FACTS["constructor"], **variant})
    x = load_file(GOLDEN / "io.safetensors")["input"]
    outputs = []
    for seed in range(3):
        spec = supernet.space.sample(seed)
        config = supernet.space.format(spec)
        expected = reference(state(**variant), config, x, **variant)
        with torch.no_grad():
            torch.testing.assert_close(supernet(x, subnet=spec), expected, atol=5e-5, rtol=1e-5)
            torch.testing.assert_close(supernet.extract(spec)(x), expected, atol=5e-5, rtol=1e-5)
        outputs.append(expected)
    assert torch.stack(outputs).std(0).max() > 1e-2


def test_the_given_search_space_is_the_space_and_variants_refuse_each_others_checkpoints() -> None:
    supernet = load("autoformer", state(), **FACTS["constructor"], search_space=FACTS["search_space"])
    assert supernet.space.size() == 3 * sum((2 * 3) ** depth for depth in (1, 2, 3))
    with pytest.raises(
        SpecError, match=r"embed\[0\] \(stream\): 128 is not a choice; choose from 72, 96, 120"
    ):
        supernet.space.parse(next(c["config"] for c in FACTS["cases"] if c["name"] == "super_dims"))
    with pytest.raises(CheckpointError, match=r"12 extra: blocks\.0\.attn\.rel_pos_embed_k"):
        load("autoformer", state(), **{**FACTS["constructor"], "relative_position": False})
