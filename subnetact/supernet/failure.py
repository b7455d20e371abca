"""Failures of forward passes: which module raised an error, and which entry a description lacks."""

from __future__ import annotations

from torch import nn

__all__ = ["culprit", "missing_entry", "summary"]

_ENTRIES: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((nn.modules.batchnorm._BatchNorm,), "SubnetNorm.on(channels=...)"),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), "LayerNormSlice.on(features=...)"),
    ((nn.modules.conv._ConvNd, nn.Linear), "WeightSlice.on(in_=...)"),
)
"""Classes of modules, each with the entry that lets them take a narrowed input."""


def culprit(network: nn.Module, error: BaseException) -> str:
    """Name the innermost module of a network in which an error was raised.

    Args:
        network: the network that was running.
        error: the error that it raised.

    Returns:
        The name and the class, `layer1.0.conv (Conv2d)` for example; an empty string if no module of the
        network is in the traceback.
    """
    path = _path(network, error)
    return f"{path} ({type(network.get_submodule(path)).__name__})" if path else ""


def summary(network: nn.Module, error: BaseException) -> str:
    """Return the first line of an error, after the name of the module that raised it.

    Args:
        network: the network that was running.
        error: the error that it raised.
    """
    where = culprit(network, error)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{where}: {first}" if where else first


def missing_entry(view: nn.Module, error: BaseException) -> str:
    """Return what to add to the elastic description of a network whose narrowed view has failed.

    Args:
        view: the view of a subnet, which fails on an input on which the full network runs.
        error: the error that it raised.

    Returns:
        An advice that names the module, and the entry that a module of this class needs.
    """
    path = _path(view, error)
    module = view.get_submodule(path)
    for classes, entry in _ENTRIES:
        if path and isinstance(module, classes):
            return f'describe this module: "{path}": {entry}'
    inside = f"in {path} " if path else ""
    return f"the elastic description must name every module {inside}that consumes a narrowed output"


def _path(network: nn.Module, error: BaseException) -> str:
    names = {id(module): path for path, module in network.named_modules()}
    path, trace = "", error.__traceback__
    while trace is not None:
        path = names.get(id(trace.tb_frame.f_locals.get("self"))) or path
        trace = trace.tb_next
    return path
