"""Packed convolutions: one that is being packed keeps no other one waiting."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from subnetact.engine.packed_conv import PackedConv


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
