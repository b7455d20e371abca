"""insert_ takes torch's encoders with masks, and leaves every example as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact.supernet.batches import map_tensors

WIDTH, HEADS, FFN = 32, 4, 64
PADDED = torch.tensor([[False] * 9, [False] * 6 + [True] * 3])
SCATTERED = torch.tensor([[False] * 9, [False, True] * 4 + [False]])
MASKS = {"none": torch.zeros(2, 9).bool(), "at the end": PADDED, "scattered": SCATTERED}
LAYERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "norm first": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "without bias": {"bias": False},
}


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(
            layer, 2, enable_nested_tensor=not {*options} & {"norm_first", "bias"}
        )

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padded)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_an_encoder_with_padding_has_subnets(options: dict[str, Any], mask: str) -> None:
    torch.manual_seed(0)
    network, x, fastpath = Encoder(**options).eval(), torch.randn(2, 9, WIDTH), torch.backends.mha
    plain, was = copy.deepcopy(network), fastpath.get_fastpath_enabled()
    supernet = subnetact.insert_(network, example=(x, MASKS[mask]), axes=("heads", "ffn"))
    assert fastpath.get_fastpath_enabled() is was
    supernet.check((x, MASKS[mask]))
    small = supernet.space.smallest()
    narrow = copy.deepcopy(plain)
    with torch.no_grad():
        for layer in narrow.encoder.layers:
            layer.self_attn.out_proj.weight[:, WIDTH // 2 :] = 0  # the second half of the heads
            layer.linear2.weight[:, FFN // 2 :] = 0
        for padded in MASKS.values():
            for network, spec in ((plain, supernet.space.largest()), (narrow, small)):
                torch.testing.assert_close(supernet(x, padded, subnet=spec), network(x, padded))
                torch.testing.assert_close(supernet.extract(spec)(x, padded), network(x, padded))
    supernet.train()(x, PADDED, subnet=small).sum().backward()
    assert supernet.network.encoder.layers[0].self_attn.in_proj_weight.grad is not None


class Overwriting(nn.Module):
    """Changes its input in place, in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(Block(way) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.way == "subtract":
            x.sub_(1)
        elif self.way == "activation":
            nn.functional.relu(x, inplace=True)
        elif self.way == "index":
            x[:, 0] = 0.5
        for block in self.blocks:
            x = block(x)
        return self.head(x * scale)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.up, self.down = way, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "block":
            x.sub_(0.3)
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dictionary"])
@pytest.mark.parametrize("way", ["subtract", "activation", "index", "block"])
def test_an_example_stays_as_it_is(way: str, form: str) -> None:
    torch.manual_seed(0)
    x, network = torch.randn(4, 8), Overwriting(way).eval()
    plain, before = copy.deepcopy(network), x.clone()
    example: Any = {"tensor": x, "tuple": (x, 2.0), "dictionary": {"x": x, "scale": 2.0}}[form]
    supernet = subnetact.insert_(network, example=example)
    assert torch.equal(x, before)
    supernet.check(map_tensors(Tensor.clone, example) if form == "tensor" else example)
    assert torch.equal(x, before)
    assert supernet.space.size() > 1
    torch.testing.assert_close(supernet(x.clone()), plain(x.clone()))
    assert subnetact.describe(plain, example, axes=("ffn",)).slots
    assert torch.equal(x, before)
