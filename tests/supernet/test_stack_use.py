"""A Sequential is shortened only if nothing in the network sees the positions of its layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from subnetact import Axis, SubnetSpace, insert_
from subnetact.digits import DigitsNet
from subnetact.operators import LayerSelect
from subnetact.supernet.stack_use import only_called


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Iterated(Called):
    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) + i
        return x


class ByName(Called):
    def forward(self, x: Tensor) -> Tensor:
        for part in ("blocks",):
            x = getattr(self, part)[2](x)
        return x


class Children(Called):
    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in next(self.children()))  # type: ignore[return-value]


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Called()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.blocks[2](x)


@pytest.mark.parametrize(
    ("network", "path", "only"),
    [
        (Called(), "blocks", True),
        (Iterated(), "blocks", False),
        (ByName(), "blocks", False),
        (Children(), "blocks", False),
        (Outside(), "inner.blocks", False),
        (nn.Sequential(Called()), "0.blocks", True),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU()), "0", True),
        (nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]), "0", False),
        (DigitsNet(), "stages.1", True),
    ],
)
def test_code_tells_whether_positions_are_seen(network: nn.Module, path: str, only: bool) -> None:
    assert only_called(network, path) == only


@pytest.mark.parametrize(("cls", "length"), [(Called, 2), (Iterated, 3)])
def test_both_kinds_of_stack_compute_identities_in_place(cls: type[Called], length: int) -> None:
    space = SubnetSpace("s", [Axis.uniform("keep", ["1"], [0, 1])], lambda v: {"keep": v["keep"][0]})
    reference = cls().eval()
    network = cls().eval()
    network.load_state_dict(reference.state_dict())
    reference.blocks[1] = nn.Identity()
    supernet = insert_(network, space, {"blocks": LayerSelect.on(**{"1": "keep"})})
    x = torch.randn(2, 4)
    for subnet in (supernet.subnet(space.smallest()), supernet.extract(space.smallest())):
        torch.testing.assert_close(subnet(x), reference(x), rtol=0, atol=0)
        assert len(subnet.blocks) == length
