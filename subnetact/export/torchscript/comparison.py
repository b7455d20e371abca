"""Compares the outputs of a TorchScript module with those of the supernet's views."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subnetact.engine.outputs import agree
from subnetact.errors import ExportError, UncalibratedSubnetWarning
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["compare_with_views"]


def compare_with_views(
    scripted: Any, supernet: Supernet, specs: list[SubnetSpec], example: dict[str, Tensor], progress: bool
) -> None:
    """Compare the output of every subnet with the output of its view.

    Args:
        scripted: the TorchScript module.
        supernet: the supernet that it was made from.
        specs: the registered subnets, in the order of their numbers.
        example: one batch of each input, by name. If all elements of a floating-point input are equal, the
            outputs for random inputs are compared as well, provided that the subnet runs on them.
        progress: if True, show a progress bar when standard error is a terminal.

    Raises:
        ExportError: outputs differ, or a subnet does not run on the example.
    """
    home = next(supernet.parameters()).device
    example = {name: x.to(home) for name, x in example.items()}
    varied = {name: _random(x) for name, x in example.items()}
    constant = any(varied[name] is not example[name] for name in example)
    for i, spec in enumerate(tqdm(specs, desc="comparing subnets", disable=not progress or None)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncalibratedSubnetWarning)
            view = supernet.subnet(spec)
        subnet, number = f"subnet {i} ({spec})", torch.tensor([i])
        try:
            expected = _output(view, example)
        except Exception as error:
            raise ExportError(
                f"example: {subnet} does not run on it ({error}); {_advice(view, example)}"
            ) from error
        _compare_one(scripted, subnet, example, number, expected)
        if constant:
            try:
                expected = _output(view, varied)
            except Exception:
                continue
            _compare_one(scripted, subnet, varied, number, expected)


def _output(view: nn.Module, inputs: dict[str, Tensor]) -> Any:
    with torch.inference_mode():
        return view(**inputs)


def _advice(view: nn.Module, example: dict[str, Tensor]) -> str:
    """Return what a user should do about an example on which a view does not run."""
    try:
        _output(view, {name: x[None] for name, x in example.items()})
    except Exception:
        return "give a batch that the network takes, (N, C, H, W) for images"
    return "it lacks the batch dimension: give x[None], a batch of one, instead of x"


def _compare_one(
    scripted: Any, subnet: str, inputs: dict[str, Tensor], number: Tensor, expected: Any
) -> None:
    with torch.inference_mode():
        try:
            same, why = agree(scripted(*inputs.values(), number), expected), ""
        except Exception as error:
            same, why = False, f" ({(str(error).strip().splitlines() or [type(error).__name__])[-1]})"
    if not same:
        raise ExportError(
            f"{subnet}: the scripted network's output differs from the supernet's{why}; its forward does "
            "what tracing cannot see, such as a branch on the type of a value; rewrite that, or use "
            "subnetact.export.to_exported_programs"
        )


def _random(x: Tensor) -> Tensor:
    """Replace a constant batch by random numbers, because different networks may agree on a constant one."""
    if not x.is_floating_point() or x.numel() < 2 or bool((x != x.reshape(-1)[0]).any()):
        return x
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
