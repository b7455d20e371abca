"""Packed convolutions: one that is being packed keeps no other one waiting."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from subnetact.engine.packed_conv import PackedConv
from subnetact.operators.operation_traits import operation_of


def test_a_convolution_is_packed_while_another_one_is() -> None:
    x = torch.randn(1, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    inner, outer, outputs = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), list[Tensor]()

    def run_inner() -> None:
        with torch.inference_mode():
            outputs.append(PackedConv(inner)(x))

    class Slow(PackedConv):
        def _reordered(self, shape: torch.Size) -> Tensor:
            other = threading.Thread(target=run_inner, daemon=True)
            other.start()
            other.join(20)
            assert outputs, "the other convolution waits until this one is packed"
            return super()._reordered(shape)

    with torch.inference_mode():
        got = Slow(outer)(x)
    torch.testing.assert_close(got, outer(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs[0], inner(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pixels", [3, 40])  # a product with the plain weight, and oneDNN's convolution
@pytest.mark.parametrize("overwrite", [None, False, True])
def test_a_pointwise_convolution_adds_and_activates_at_every_size(
    pixels: int, overwrite: bool | None
) -> None:
    conv, norm = nn.Conv2d(6, 10, 1), nn.BatchNorm2d(10).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    x, other = (torch.randn(2, c, pixels, pixels).to(memory_format=torch.channels_last) for c in (6, 10))
    relu = operation_of(torch.relu)
    with torch.inference_mode():
        expected = norm(conv(x)) if overwrite is None else norm(conv(x)) + other
        packed = PackedConv(conv, norm, relu)
        packed.overwrite = bool(overwrite)
        got = packed(x) if overwrite is None else packed(x, other.clone())
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert packed.nbytes >= 4 * (conv.weight.numel() + 10)
    torch.testing.assert_close(got, expected.relu(), rtol=1e-4, atol=1e-5)
