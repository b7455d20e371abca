"""Upstream's networks, those of the package `ofa`, and torchvision, which they import."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def import_torchvision() -> None:
    """Import torchvision, whose operators are missing if it was built for CUDA and torch was not."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # a torchvision built for CUDA beside a CPU-only torch lacks two operators
        for name in ("nms", "qnms"):
            library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define(  # type: ignore[no-untyped-call]
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
            _KEPT_ALIVE.append(library)


def _import_networks() -> Any:
    import_torchvision()
    from ofa.imagenet_classification.elastic_nn import networks

    return networks


_KEPT_ALIVE: list[Any] = []


def upstream_network(family: str) -> Any:
    """Return upstream's published supernet of `ofa_resnet50` or `ofa_mbv3`, in eval mode."""
    networks = _import_networks()
    torch.manual_seed(0)
    if family == "ofa_resnet50":
        network = networks.OFAResNets(
            depth_list=[0, 1, 2],
            expand_ratio_list=[0.2, 0.25, 0.35],
            width_mult_list=[0.65, 0.8, 1.0],
            dropout_rate=0,
        )
    else:
        network = networks.OFAMobileNetV3(
            ks_list=[3, 5, 7], expand_ratio_list=[3, 4, 6], depth_list=[2, 3, 4], dropout_rate=0
        )
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.get_buffer("running_mean").normal_(0, 0.1)
            module.get_buffer("running_var").uniform_(0.5, 1.5)
    return network.eval()
