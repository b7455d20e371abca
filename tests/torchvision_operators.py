"""Two operators of torchvision that its wheel lacks on a CPU-only torch, so that libraries can import it."""

from __future__ import annotations

import torch

__all__ = ["define_missing"]

_KEPT_ALIVE: list[object] = []


def define_missing() -> None:
    """Define the schemas of the operators if torchvision cannot be imported without them."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # The operators need CUDA libraries.
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library = torch.library.Library("torchvision", "FRAGMENT")
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _KEPT_ALIVE.append(library)
    except ImportError:
        pass
