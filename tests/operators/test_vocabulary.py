"""The one vocabulary: a family with other names is one row, and tables made of others follow it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subnetact
from subnetact.operators import vocabulary


class SelfAttention(nn.Module):
    """An attention with a name of its own for its number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.lanes = 4

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (self.lanes, -1)) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        return self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("known", [False, True])
def test_a_family_with_a_name_of_its_own_is_one_row(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if known:
        monkeypatch.setattr(vocabulary, "HEADS", (*vocabulary.HEADS, "lanes"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), SelfAttention(), nn.Linear(16, 3)).eval()
    found = subnetact.describe(model, torch.randn(2, 5, 8))
    heads = [group for group in found.groups.values() if group.axis == "heads"]
    assert [group.full for group in heads] == [4] * known
    assert ("1", "lanes") in {(m.module, m.part) for group in heads for m in group.members} or not known


def test_fields_that_may_differ_are_those_of_all_meanings() -> None:
    parts = (vocabulary.CONFIGURED_HEADS, vocabulary.NEURONS, vocabulary.EXPERT_WIDTHS, vocabulary.ROUTED)
    assert {name for names in parts for name in names} <= set(vocabulary.SIZES)
    assert set(vocabulary.NEURONS) <= set(vocabulary.PER_LAYER)
    routed = (vocabulary.EXPERTS, vocabulary.EXPERTS_PER_TOKEN, vocabulary.EXPERT_GROUPS)
    names = [name for table in routed for name in table]
    assert len(names) == len(set(names)) == len(vocabulary.ROUTED)
