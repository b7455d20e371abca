"""Measures the named subnets of a bundle on a folder of images, and writes what it found into the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import subnetact
from subnetact.elastic.card import validated
from subnetact.elastic.folder import ACCURACY, save_folder
from subnetact.errors import SpecError, extra_needed
from subnetact.files.documents import StrPath
from subnetact.supernet.batches import call_with, logits

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Those of ImageNet, which networks of torchvision and most others are trained with."""


def evaluate_images(
    folder: StrPath, images: StrPath, size: int = 224, batch_size: int = 64
) -> dict[str, float]:
    """Measure every named subnet of a bundle on images, and write the accuracies into its `elastic.json`.

    Images are resized to 8/7 of `size` on the shorter side, cropped in the middle, and scaled with the mean
    and the deviation of ImageNet; a network of timm has its own mean, deviation and crop.

    Args:
        folder: the bundle, which is written anew as a whole.
        images: a folder with one subfolder of images per class, in the order of the network's classes, as
            `torchvision.datasets.ImageFolder` reads it.
        size: the height and the width that the network gets, in pixels.
        batch_size: images per batch.

    Returns:
        The top-1 accuracy of each named subnet, in percent.

    Raises:
        FileFormatError: the bundle is damaged.
        SpecError: the bundle is of a network that no library makes, there are no images, or not as many
            folders as the network has classes.
        MissingExtra: torchvision is not installed.
    """
    if size < 1 or batch_size < 1:
        raise SpecError(f"size and batch size are at least 1, got {size} and {batch_size}")
    document, tables, supernet = validated(folder)
    if supernet is None:
        raise SpecError(f"{folder}: is of an own network; use subnetact.evaluate(supernet, specs, batches)")
    with extra_needed("images are read by torchvision; pip install 'subnetact[vision]'"):
        from torchvision.datasets import ImageFolder
    import torch

    try:
        found = ImageFolder(str(images), _transform(supernet.network, size))
    except (OSError, ValueError) as error:
        raise SpecError(f"{images}: {error}; give a folder with a subfolder of images per class") from error
    names, specs = list(supernet.card.subnets), list(supernet.card.subnets.values())
    with torch.inference_mode():
        classes = logits(call_with(supernet.subnet(specs[0]), found[0][0][None])).shape[-1]
    if classes != len(found.classes):
        raise SpecError(f"{images}: has {len(found.classes)} classes, the network {classes}; give all")
    batches = torch.utils.data.DataLoader(found, batch_size)
    accuracy = dict(zip(names, subnetact.evaluate(supernet, specs, batches), strict=True))
    source = f"{len(found)} images in {classes} classes of {Path(images).name}, {size} x {size} pixels"
    figures = {name: {ACCURACY: percent} for name, percent in accuracy.items()}
    card = supernet.card.extended(supernet.space, None, figures, source, None, None)
    save_folder(supernet, folder, card, tables, document["engine"])
    return accuracy


def _transform(network: Any, size: int) -> Any:
    from torchvision import transforms

    stated: dict[str, Any] = getattr(network, "pretrained_cfg", None) or {}
    crop: float = stated.get("crop_pct") or 7 / 8
    mean, std = stated.get("mean") or MEAN, stated.get("std") or STD
    steps = [transforms.Resize(round(size / crop)), transforms.CenterCrop(size), transforms.ToTensor()]
    return transforms.Compose([*steps, transforms.Normalize(mean, std)])
