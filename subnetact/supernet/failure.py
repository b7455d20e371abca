"""Failures of forward passes: which module raised an error, and which entry a description lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.device import raise_if_explained
from subnetact.errors import SubnetActError, first_line
from subnetact.operators.base import slicer_of
from subnetact.operators.layer_traits import traits_of
from subnetact.supernet.batches import call_with, describe_input, map_tensors


def failure(network: Callable[..., Any], x: Any) -> Exception | None:
    """Run a network on a copy of a batch; return the error that it raises, or None if it runs."""
    try:
        with torch.no_grad():
            call_with(network, map_tensors(Tensor.clone, x))
    except Exception as error:
        raise_if_explained(error)
        return error
    return None


@contextmanager
def explained(
    kind: type[SubnetActError], subject: str, network: Callable[..., Any], x: Any, advice: str = ""
) -> Iterator[None]:
    """Say on which batch a subject does not run, at which module of its network, and what to do then."""
    try:
        yield
    except Exception as error:
        raise_if_explained(error, SubnetActError)
        why = f"{summary(network, error)}{advice and f'; {advice}'}"
        raise kind(f"{subject} does not run on {describe_input(x)}: {why}") from error


def not_running(
    view: nn.Module, error: Exception, x: Any, full: nn.Module, what: str, advice: str
) -> tuple[str, bool]:
    """Return on what a view does not run and what to do then, and whether the full network runs."""
    runs = failure(full, x) is None
    advice = f"the largest subnet does run: {missing_entry(view, error)}" if runs else advice
    return f"does not run on {what}: {summary(view, error)}; {advice}", runs


def culprit(network: Any, error: BaseException) -> str:
    """Name the innermost module that raised an error, `layer1.0.conv (Conv2d)`; "" if there is none."""
    path = _path(network, error)
    return f"{path} ({type(network.get_submodule(path)).__name__})" if path else ""


def summary(network: Callable[..., Any], error: BaseException) -> str:
    """Return the first line of an error, after the name of the module, or the class of the network."""
    return f"{culprit(network, error) or type(network).__name__}: {first_line(error)}"


def missing_entry(view: nn.Module, error: BaseException) -> str:
    """Return what to add to the elastic description of a network whose narrowed view has failed."""
    path = _path(view, error)
    module = view.get_submodule(path)
    reads = traits_of(module).reads
    operator = slicer_of(module) if path and reads else None
    if operator is not None:
        return f'describe this module: "{path}": {operator.__name__}.on({reads}=...)'
    inside = f"in {path} " if path else ""
    return f"the elastic description must name every module {inside}that consumes a narrowed output"


def _path(network: Callable[..., Any], error: BaseException) -> str:
    modules = network.named_modules() if isinstance(network, nn.Module) else ()
    names = {id(module): path for path, module in modules}
    path = ""
    for frame, _ in walk_tb(error.__traceback__):
        path = names.get(id(frame.f_locals.get("self"))) or path
    return path
